"""One trained model that answers, for the service: `python -m trainer.commands.answer RUN CACHE`.

A line of JSON in, a line of JSON out or, of a text, several as it grows. Meant to look at a model.

    {"texts": ["..."], "side": "query"}                 -> {"vectors": [[...]], "tokens": 5}
    {"prompt": "...", "max_tokens": 9, "temperature": 0, "seed": 1, "stop": []}
                        -> {"text": "..."} ..., {"finish": "stop", "prompt_tokens": 4, "tokens": 7}
    {"statements": ["..."]}                             -> {"scores": [0.9]}
    {"question": "...", "contexts": ["..."], "max_tokens": 9, "temperature": null, "stop": []}
                        -> {"text": "...", "prompt_tokens": 4, "tokens": 7}
    {"many": [questions that have one answer]}          -> {"many": [answers or errors]}
    {"messages": [{"role": "user", "content": "..."}], ...}     as with a prompt
    whatever cannot be done                             -> {"error": "..."}
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import jinja2
import numpy as np
import torch
from torch import Tensor

from trainer.commands.options import module_of
from trainer.errors import ConfigError, LatheError
from trainer.evaluation.mergeable import cut_at
from trainer.evaluation.run import Question, opened
from trainer.files.atomic import read_json
from trainer.tasks.abilities import GREEDY, Answers, Embeds, Search
from trainer.tasks.causal_lm.task import CausalLM
from trainer.training.options import Options

TORN = "\ufffd"  # of a letter whose bytes are several tokens, before the last of them


def main() -> int:
    """Answer until the end of standard input."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    folder, cache = Path(sys.argv[1]), Path(sys.argv[2])
    values = read_json(folder / "exp_dict.json")
    if values is None:
        _say(out, {"error": f"{folder} holds no exp_dict.json"})
        return ConfigError.exit_code
    try:
        model_of_run = Opened(
            *opened(Question(values, model="final"), Options(folder.parent, cache_dir=cache))
        )
    except LatheError as error:
        _say(out, {"error": str(error)})
        return error.exit_code
    _say(out, {"ready": True})
    for line in sys.stdin:
        try:
            for answer in answers(model_of_run, json.loads(line)):
                _say(out, answer)
        except LatheError as error:
            _say(out, {"error": str(error)})
    return 0


def _say(out: IO[str], answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


@dataclass(frozen=True)
class Opened:
    """A trained model with its task and its folder."""

    task: Any
    model: Any
    folder: Path


@torch.inference_mode()
def answers(opened_run: Opened, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The answers to one line. ConfigError for what the model cannot do."""
    task, model = opened_run.task, opened_run.model
    if "many" in asked:
        yield {"many": _together(opened_run, asked["many"])}
    elif isinstance(model, CausalLM):
        prompt = asked["prompt"] if "prompt" in asked else _opened_chat(task, asked["messages"])
        yield from _grown(task, model.base, prompt, asked)
    else:
        raise ConfigError(f"a model of the task {task.cfg.task!r} makes no texts")


def _together(opened_run: Opened, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An answer, or an error, for each of the questions that wait: alike ones in one forward."""
    alike: dict[str, list[int]] = {}
    for number, one in enumerate(questions):
        shape = [sorted(one), *(one.get(key) for key in ("side", "max_tokens", "temperature"))]
        is_drawn = bool(one.get("temperature"))
        key = json.dumps([*shape, one.get("seed") if is_drawn else None])
        alike.setdefault(key, []).append(number)
    found: dict[int, dict[str, Any]] = {}
    for numbers in alike.values():
        group = [questions[number] for number in numbers]
        found.update(zip(numbers, _answered(opened_run, group), strict=True))
    return [found[number] for number in range(len(questions))]


def _answered(opened_run: Opened, group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to questions that are alike; where one of them cannot be answered, each alone."""
    try:
        return _of_kind(opened_run, group)
    except LatheError as error:
        if len(group) == 1:
            return [{"error": str(error)}]
        return [answer for one in group for answer in _answered(opened_run, [one])]


def _of_kind(opened_run: Opened, group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    task, model = opened_run.task, opened_run.model
    if "texts" in group[0] and isinstance(task, Embeds):
        return _vectors(task, model, group)
    if "statements" in group[0] and task.cfg.task == "vera":
        texts = [text for one in group for text in one["statements"]]
        use = module_of("vera", "use", "score")
        scores = iter(list(use.plausibilities(task, model, texts, folder=opened_run.folder)))
        return [{"scores": [next(scores) for _ in one["statements"]]} for one in group]
    if "question" in group[0] and isinstance(task, Answers):
        return _read(task, model, group)
    kind = {"texts": "vectors", "statements": "scores"}
    word = next((name for key, name in kind.items() if key in group[0]), "texts")
    raise ConfigError(f"a model of the task {task.cfg.task!r} makes no {word}")


def _vectors(task: Embeds, model: Any, group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    side = group[0]["side"]
    rows = [task.ids([{"text": text} for text in one["texts"]], side=side) for one in group]
    vectors = iter(task.embed(model, [ids for of_one in rows for ids in of_one], side=side).float())
    return [
        {"vectors": [next(vectors).tolist() for _ in of_one], "tokens": sum(map(len, of_one))}
        for of_one in rows
    ]


def _read(task: Any, model: Any, group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a reader answers to questions, each with its own contexts."""
    raw = [_row(task, one) for one in group]
    encoded = [task.encode(row) for row in raw]
    rows = [{name: np.asarray(ids) for name, ids in one.items()} for one in encoded]
    first = group[0]
    search = GREEDY
    if first["temperature"]:
        search = Search(temperature=first["temperature"], seed=first["seed"])
    most = min(first["max_tokens"], task.answer_tokens())
    questions = [{"question": one["question"], "answers": []} for one in group]
    texts = task.answers(model, rows, questions, search=search, max_tokens=most).predictions
    found: list[dict[str, Any]] = []
    for one, text, row in zip(group, texts, encoded, strict=True):
        text = cut_at(text, one["stop"]) if one["stop"] else text
        tokens = len(task.tokenizer(text, add_special_tokens=False)["input_ids"])
        found.append({"text": text, "prompt_tokens": task.length(row), "tokens": tokens})
    return found


def _row(task: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """A question as a raw row of its task. ConfigError for contexts that it cannot read."""
    question, contexts = asked["question"], asked["contexts"]
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


def _opened_chat(task: Any, messages: list[dict[str, Any]]) -> str:
    """Messages as the task's template writes them, up to where the assistant speaks."""
    if task.cfg.data.source != "chat":
        raise ConfigError("it has not learnt from conversations: ask /v1/completions")
    try:
        return task.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"its chat template refuses these messages: {error}") from None


def _grown(task: Any, base: Any, begun: str, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A text as it grows, a token at a time, up to its end, a stop text or max_tokens."""
    limit: int = getattr(base.config, "max_position_embeddings", None) or 1 << 20
    prompt: list[int] = task.tokenizer(begun, add_special_tokens=False)["input_ids"]
    if not prompt or len(prompt) >= limit:
        raise ConfigError(f"the prompt has {len(prompt)} tokens, want 1 to {limit - 1}")
    temperature = 1.0 if asked["temperature"] is None else asked["temperature"]
    chance = torch.Generator().manual_seed(asked["seed"])
    made: list[int] = []
    text, told, finish, cache = "", 0, "length", None
    step = torch.tensor([prompt])
    while finish == "length" and len(made) < min(asked["max_tokens"], limit - len(prompt)):
        out = base(input_ids=step.to(base.device), past_key_values=cache, use_cache=True)
        cache, token = out.past_key_values, _drawn(out.logits[0, -1], temperature, chance)
        if token == task.end:
            finish = "stop"
            break
        made.append(token)
        step = torch.tensor([[token]])
        text = task.tokenizer.decode(made)
        end = min((text.find(stop) for stop in asked["stop"] if stop in text), default=None)
        if end is not None:
            text, finish = text[:end], "stop"
        sure = len(text) - (_unsure(text, asked["stop"]) if end is None else 0)
        if sure > told:
            yield {"text": text[told:sure]}
            told = sure
    if text[told:]:
        yield {"text": text[told:]}
    yield {"finish": finish, "prompt_tokens": len(prompt), "tokens": len(made)}


def _unsure(text: str, stops: list[str]) -> int:
    """How many letters at the end may still change, or become a stop text that is not told."""
    torn = len(text) - len(text.rstrip(TORN))
    begun = [
        length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length])
    ]
    return max([torn, *begun])


def _drawn(logits_V: Tensor, temperature: float, chance: torch.Generator) -> int:
    """(V,) logits -> a token: the likeliest at temperature 0, else drawn."""
    if not temperature:
        return int(logits_V.argmax())
    chances_V = (logits_V.float().cpu() / temperature).softmax(-1)
    return int(torch.multinomial(chances_V, 1, generator=chance))


if __name__ == "__main__":
    sys.exit(main())
