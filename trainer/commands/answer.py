"""Answers questions with one trained model, for the service, which lets people try a model:
`python -m trainer.commands.answer RUN CACHE [WEIGHTS]`. WEIGHTS: final, or base (untrained).

It reads lines of JSON: `{"many": [questions]}`, the waiting questions. For these it writes lines of
JSON, each with the number of its question (`of`), and at last `{"done": true}`.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from trainer.commands.options import module_of
from trainer.errors import ConfigError, LatheError
from trainer.evaluation.predict import OpenExport
from trainer.evaluation.run import Question, open_model
from trainer.files.atomic import read_json
from trainer.metrics.mergeable import cut_at
from trainer.models.texts import GrowingText, grown
from trainer.protocol.abilities import (
    GREEDY,
    Answers,
    CutRow,
    Embeds,
    Prediction,
    Search,
    continues,
)
from trainer.tasks import continuation
from trainer.training.options import Options


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
    try:
        model_of_run = OpenExport(
            *open_model(Question(values, model=weights), Options(run.parent, cache_dir=cache_dir))
        )
    except LatheError as error:
        _say(out, {"error": str(error)})
        return error.exit_code
    _say(out, {"ready": True})
    for line in sys.stdin:
        for piece in answers(model_of_run, json.loads(line)["many"]):
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
    texts: list[GrowingText] = []
    choices: list[tuple[int, int]] = []  # of each text: its question, its number among the answers
    others: list[int] = []
    for number, one in enumerate(questions):
        if not (continues(task) and ("prompt" in one or "messages" in one)):
            others.append(number)
            continue
        try:
            own = _continuations(task, model.base, one)
        except LatheError as error:
            yield {"of": number, "error": str(error)}
            continue
        texts += own
        choices += [(number, choice) for choice in range(len(own))]
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
    if texts:
        yield from _lines(task, model.base, texts, choices)


def _continuations(task: Any, base: Any, one: dict[str, Any]) -> list[GrowingText]:
    """The texts that answer a question: messages, or a prompt that is continued as it stands."""
    is_chat = "messages" in one
    raw = {"messages": one["messages"], "tools": one.get("tools")} if is_chat else {}
    row = continuation.row_to_predict(task, raw or {"text": one["prompt"]}, "the request")
    temperature = 1.0 if one["temperature"] is None else one["temperature"]
    search = Search(
        num_answers=one.get("n", 1),
        temperature=temperature or None,  # 0: the likeliest tokens
        top_p=one.get("top_p", 1.0),
        seed=one["seed"],
    )
    how = {"stops": one["stop"], "is_told": True, "num_likeliest": one.get("logprobs")}
    return continuation.continuations(task, base, row, search, max_tokens=one["max_tokens"], **how)


def _lines(
    task: Any, base: Any, texts: list[GrowingText], choices: list[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """The pieces of growing texts, each with the number of its question.

    Of a question with several answers each piece also says of which answer it is (`choice`), and
    the last piece of an answer whether the question is over (`is_last`). With log-probabilities
    that piece holds one object for each token.
    """
    growing = Counter(number for number, _ in choices)
    several = {number for number, count in growing.items() if count > 1}
    for row, piece in grown(base, texts, pad=task.pad):
        number, choice = choices[row]
        line = {"of": number, **piece}
        if number in several:
            line["choice"] = choice
        if "finish" in piece:
            growing[number] -= 1
            if number in several:
                line["is_last"] = not growing[number]
            if texts[row].num_likeliest is not None:
                line["logprobs"] = _logprobs(texts[row])
        yield line


def _logprobs(text: GrowingText) -> list[dict[str, Any]]:
    """One object for each token of a text that has ended; their texts together are the text."""
    entries: list[dict[str, Any]] = []
    for choice, own in zip(text.chosen, text.texts_of_choices(), strict=True):
        likeliest = [
            {"token": own if token == choice.token else spelt, "logprob": value}
            for (token, value), spelt in zip(choice.likeliest, choice.spelt, strict=True)
        ]
        entries.append({"token": own, "logprob": choice.logprob, "likeliest": likeliest})
    return entries


def _answer(opened_run: OpenExport, group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answer equal kinds of questions together; one by one if one of them cannot be answered."""
    try:
        return _of_kind(opened_run, group)
    except LatheError as error:
        if len(group) == 1:
            return [{"error": str(error)}]
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
    kind = {"texts": "vectors", "statements": "scores"}
    word = next((name for key, name in kind.items() if key in group[0]), "texts")
    raise ConfigError(f"a model of the task {task.cfg.task!r} makes no {word}")


def _vectors(task: Embeds, model: Any, group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    side = group[0]["side"]
    rows = [task.ids([{"text": text} for text in one["texts"]], side=side) for one in group]
    vectors = iter(task.embed(model, [ids for of_one in rows for ids in of_one], side=side).float())
    answers: list[dict[str, Any]] = []
    for one, of_one in zip(group, rows, strict=True):
        passages = [{"text": text} for text in one["texts"]]
        answer = {"vectors": [next(vectors).tolist() for _ in of_one]}
        answers.append({**answer, "tokens": sum(map(len, of_one))})
        queries = one["texts"] if side == "query" else []
        texts = [{"query": text, "ctxs": None} for text in queries]
        texts = texts or [{"query": "", "ctxs": passages}]
        lost = sum(_cut_row(task, model, text, Prediction()).tokens for text in texts)
        if lost:
            answers[-1]["cut_tokens"] = lost
    return answers


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
        answer = {"text": whole.text, "finish": "length" if whole.is_cut else "stop"}
        tokens = whole.tokens
        if any(stop in whole.text for stop in one["stop"]):
            answer = {"text": cut_at(whole.text, one["stop"]), "finish": "stop"}
            tokens = len(task.tokenizer(answer["text"], add_special_tokens=False)["input_ids"])
        answer |= {"prompt_tokens": task.length(row), "tokens": tokens}
        answers.append(_with_cut(answer, cut_row))
    return answers


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
