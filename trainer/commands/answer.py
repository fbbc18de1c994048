"""Answers questions with one trained model, for the service, which lets people try a model:
`python -m trainer.commands.answer RUN CACHE [WEIGHTS]`. WEIGHTS: final, base (untrained), step-N, a
saved step, of which a model is made where there is none (averages/saved_step.py), or "samples":
questions for samples (texts/samples.py) name their weights themselves (texts/exchanged.py).

It reads lines of JSON: `{"many": [questions]}`, the waiting questions. For these it writes lines of
JSON, each with the number of its question (`of`), and at last `{"done": true}`.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from trainer.averages.saved_step import export_step
from trainer.commands.options import module_of
from trainer.commands.texts.exchanged import ExchangedWeights
from trainer.commands.texts.pieces import AnswerText, choices_of, pieces
from trainer.commands.texts.wishes import WrongWish, begun
from trainer.data.formats.json_text import preview
from trainer.errors import ConfigError, LatheError
from trainer.evaluation.predict import OpenExport, rows_at_once
from trainer.evaluation.run import Question, open_model
from trainer.files.atomic import read_json
from trainer.metrics.mergeable import cut_at
from trainer.protocol.abilities import (
    GREEDY,
    Answers,
    CutRow,
    Embeds,
    GeneratedText,
    Prediction,
    Search,
    Side,
    continues,
)
from trainer.training.options import Options

SAMPLES = "samples"
_SEND_TEXTS = "Send texts (LangChain: check_embedding_ctx_length=False)"
_PROMPTS = {"prompt", "prompts", "messages"}  # of a language model's questions


def main() -> int:
    """Answer until the end of standard input."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error
    folder, cache, weights = [*sys.argv[1:], "final"][:3]
    run, cache_dir = Path(folder), Path(cache)
    values = read_json(run / "exp_dict.json")
    if values is None:
        _say(out, {"error": f"{run} holds no exp_dict.json"})
        return ConfigError.exit_code
    options = Options(run.parent, cache_dir=cache_dir)
    try:
        if weights.startswith("step-"):
            export_step(run, int(weights.removeprefix("step-")), options.places)
        answers_to = ExchangedWeights(values, options).answers
        if weights != SAMPLES:
            model_of_run = OpenExport(*open_model(Question(values, model=weights), options))
            answers_to = partial(answers, model_of_run)
    except LatheError as error:
        _say(out, {"error": str(error)})
        return error.exit_code
    _say(out, {"ready": True})
    for line in sys.stdin:
        for piece in answers_to(json.loads(line)["many"]):
            _say(out, piece)
        _say(out, {"done": True})
    return 0


def _say(out: IO[str], answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


@torch.inference_mode()
def answers(opened_run: OpenExport, questions: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Pieces of the answers to waiting questions, each with the number of its question."""
    task, model = opened_run.task, opened_run.model
    choices: list[AnswerText] = []
    others: list[int] = []
    for number, one in enumerate(questions):
        if not (continues(task) and _PROMPTS & one.keys()):
            others.append(number)
            continue
        try:
            choices += choices_of(number, begun(task, model.base, one))
        except WrongWish as error:
            yield {"of": number, "error": str(error), "param": error.param}
    alike: dict[str, list[int]] = {}  # the numbers of questions that one forward answers
    for number in others:
        one = questions[number]
        shape = [sorted(one), *(one.get(key) for key in ("side", "max_tokens", "temperature"))]
        is_drawn = bool(one.get("temperature"))
        key = json.dumps([*shape, one.get("seed") if is_drawn else None])
        alike.setdefault(key, []).append(number)
    for group in alike.values():
        answers = _answer(opened_run, [questions[number] for number in group])
        yield from ({"of": number, **one} for number, one in zip(group, answers, strict=True))
    if choices:
        yield from pieces(task, model.base, choices)


def _answer(opened_run: OpenExport, group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answer equal kinds of questions together; one by one if one of them cannot be answered."""
    try:
        return _of_kind(opened_run, group)
    except LatheError as error:
        if len(group) == 1:
            param = {"param": error.param} if isinstance(error, WrongWish) else {}
            return [{"error": str(error), **param}]
        return [answer for one in group for answer in _answer(opened_run, [one])]


def _of_kind(opened_run: OpenExport, group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    task, model = opened_run.task, opened_run.model
    if "texts" in group[0] and isinstance(task, Embeds):
        return _vectors(task, model, group)
    if "statements" in group[0] and task.cfg.task == "vera":
        texts = [text for one in group for text in one["statements"]]
        use = module_of("vera", "use", "score")
        scores = iter(list(use.plausibilities(task, model, texts, folder=opened_run.folder)))
        return [
            _with_cut(
                {"scores": [next(scores) for _ in one["statements"]]},
                _cut_row(task, model, one, Prediction()),
            )
            for one in group
        ]
    if "question" in group[0] and isinstance(task, Answers):
        return _read(task, model, group)
    if "prompt" in group[0] and task.cfg.task == "preference":
        return _written(task, model, group)
    kind = {"texts": "vectors", "statements": "scores"}
    word = next((name for key, name in kind.items() if key in group[0]), "texts")
    raise ConfigError(f"a model of the task {task.cfg.task!r} makes no {word}")


def _vectors(task: Embeds, model: Any, group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    side = group[0]["side"]
    group = [{**one, "texts": _spelt(task, one["texts"])} for one in group]
    rows = [task.ids([{"text": text} for text in one["texts"]], side=side) for one in group]
    vectors = iter(_embedded(task, model, [ids for of_one in rows for ids in of_one], side))
    answers: list[dict[str, Any]] = []
    for one, of_one in zip(group, rows, strict=True):
        passages = [{"text": text} for text in one["texts"]]
        answer: dict[str, Any] = {"vectors": [next(vectors) for _ in of_one]}
        answers.append({**answer, "tokens": sum(map(len, of_one))})
        queries = one["texts"] if side == "query" else []
        texts = [{"query": text, "ctxs": None} for text in queries]
        texts = texts or [{"query": "", "ctxs": passages}]
        lost = sum(_cut_row(task, model, text, Prediction()).tokens for text in texts)
        if lost:
            answers[-1]["cut_tokens"] = lost
    return answers


def _spelt(task: Any, texts: list[Any]) -> list[str]:
    """Texts, of which some may be lists of ids of the model's own tokenizer. WrongWish for ids that
    this tokenizer gives for no text, such as those of another one.
    """
    size = len(task.tokenizer)
    ids = (token for text in texts if isinstance(text, list) for token in text)
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        raise WrongWish(
            f"input: got the token {wrong}, want 0 to {size - 1}: ids are those of this model's "
            f"own tokenizer. {_SEND_TEXTS}",
            "input",
        )
    return [text if isinstance(text, str) else _text_of_ids(task, text) for text in texts]


def _text_of_ids(task: Any, ids: list[int]) -> str:
    """The text for which the tokenizer gives these ids, with its special tokens around them or
    without.
    """
    text = ""
    for is_without in (True, False):
        text = task.tokenizer.decode(ids, skip_special_tokens=is_without)
        for is_around in {False, is_without}:
            if text and task.tokenizer(text, add_special_tokens=is_around)["input_ids"] == ids:
                return text
    raise WrongWish(
        "input: got ids that this model's tokenizer gives for no text (they spell "
        f"{preview(text)}): they are of another tokenizer, or begin inside a word. {_SEND_TEXTS}",
        "input",
    )


def _embedded(task: Any, model: Any, rows: list[list[int]], side: Side) -> Iterator[str]:
    """The vector of each row of ids: its numbers as fp32, in base64."""
    batch = rows_at_once(task)
    for start in range(0, len(rows), batch):
        vectors = task.embed(model, rows[start : start + batch], side=side).float().cpu().numpy()
        yield from (base64.b64encode(one.astype("<f4").tobytes()).decode() for one in vectors)


def _read(task: Any, model: Any, group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A reader's answers to questions, each with its own contexts."""
    raw = [_row(task, one) for one in group]
    first = group[0]
    search = GREEDY
    if first["temperature"]:
        search = Search(temperature=first["temperature"], seed=first["seed"])
    # a length that is not below the experiment's own means that one, with its least length
    limit = task.answer_tokens()
    most = None if first["max_tokens"] >= limit else first["max_tokens"]
    cut_rows = [_cut_row(task, model, row, Prediction(search, most)) for row in raw]
    for doubt in (doubt for one in cut_rows for doubt in one.doubts):
        raise ConfigError(f"{doubt}: this is one of them. Ask a shorter question.")
    encoded = [task.encode(row) for row in raw]
    rows = [{name: np.asarray(ids) for name, ids in one.items()} for one in encoded]
    questions = [{"question": one["question"], "answers": []} for one in group]
    texts = task.answers(model, rows, questions, search=search, max_tokens=most).best
    answers: list[dict[str, Any]] = []
    for one, whole, row, cut_row in zip(group, texts, encoded, cut_rows, strict=True):
        answer = {"prompt_tokens": task.length(row), **_stopped(task, whole, one["stop"])}
        answers.append(_with_cut(answer, cut_row))
    return answers


def _written(task: Any, model: Any, group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What an encoder-decoder that was trained on preferences writes to prompts."""
    trained = module_of("preference", "trained", "answer")
    rows = [trained.row_to_predict(task, {"prompt": one["prompt"]}, "prompt") for one in group]
    search = Search(temperature=group[0]["temperature"] or None)
    how = Prediction(search, group[0]["max_tokens"])
    answers: list[dict[str, Any]] = []
    texts = trained.texts_to_prompts(task, model, rows, how)
    for one, row, (whole,) in zip(group, rows, texts, strict=True):
        answer = {"prompt_tokens": len(row["ids"]), **_stopped(task, whole, one["stop"])}
        answers.append(_with_cut(answer, _cut_row(task, model, row, how)))
    return answers


def _stopped(task: Any, whole: GeneratedText, stops: list[str]) -> dict[str, Any]:
    """A text up to the first of the stops: "text", "finish" and "tokens" of an answer."""
    if any(stop in whole.text for stop in stops):
        text = cut_at(whole.text, stops)
        tokens = len(task.tokenizer(text, add_special_tokens=False)["input_ids"])
        return {"text": text, "finish": "stop", "tokens": tokens}
    finish = "length" if whole.is_cut else "stop"
    return {"text": whole.text, "finish": finish, "tokens": whole.tokens}


def _cut_row(task: Any, model: Any, row: Any, how: Prediction) -> CutRow:
    return module_of(task.cfg.task, "trained", "answer").cut_row(task, model, row, how)


def _with_cut(answer: dict[str, Any], cut_row: CutRow) -> dict[str, Any]:
    """An answer that says how many tokens its question lost, if it lost some."""
    return answer | {"cut_tokens": cut_row.tokens} if cut_row.tokens else answer


def _row(task: Any, request: dict[str, Any]) -> dict[str, Any]:
    """A question as a raw row of its task. ConfigError for contexts that it cannot read."""
    question, contexts = request["question"], request["contexts"]
    if not question.strip():
        raise ConfigError("there is no question: the last message of the user is empty")
    if task.cfg.task == "summariser":
        if contexts:
            raise ConfigError("a summariser reads no contexts: the document is the prompt")
        return {"document": question, "summaries": []}
    if not contexts:
        raise ConfigError("a reader wants contexts: a list of texts (`contexts` in extra_body)")
    passages = [{"title": "", "text": text} for text in contexts]
    row = {"id": "0", "question": question, "answers": [""], "contexts": contexts}
    return {**row, "ctxs": passages}


if __name__ == "__main__":
    sys.exit(main())
