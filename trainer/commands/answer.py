"""One trained model that answers, for the service: `python -m trainer.commands.answer RUN CACHE`.

A line of JSON in, a line of JSON out or, of a text, several as it grows. Meant to look at a model.

    {"texts": ["..."], "side": "query"}                 -> {"vectors": [[...]], "tokens": 5}
    {"prompt": "...", "max_tokens": 9, "temperature": 0, "seed": 1, "stop": []}
                        -> {"text": "..."} ..., {"finish": "stop", "prompt_tokens": 4, "tokens": 7}
    the same with "messages": [{"role": "user", "content": "..."}] in place of the prompt
    whatever cannot be done                             -> {"error": "..."}
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import jinja2
import torch
from torch import Tensor

from trainer.errors import ConfigError, LatheError
from trainer.evaluation.run import Question, opened
from trainer.files.atomic import read_json
from trainer.tasks.abilities import Embeds
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
        task, model, _ = opened(
            Question(values, model="final"), Options(folder.parent, cache_dir=cache)
        )
    except LatheError as error:
        _say(out, {"error": str(error)})
        return error.exit_code
    _say(out, {"ready": True})
    for line in sys.stdin:
        try:
            for answer in answers(task, model, json.loads(line)):
                _say(out, answer)
        except LatheError as error:
            _say(out, {"error": str(error)})
    return 0


def _say(out: IO[str], answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


@torch.inference_mode()
def answers(task: Any, model: Any, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The answers to one line. ConfigError for what the model cannot do."""
    if "texts" in asked and isinstance(task, Embeds):
        side = asked["side"]
        rows = task.ids([{"text": text} for text in asked["texts"]], side=side)
        vectors = task.embed(model, rows, side=side).float().cpu()
        yield {"vectors": vectors.tolist(), "tokens": sum(map(len, rows))}
    elif "texts" not in asked and isinstance(model, CausalLM):
        prompt = asked["prompt"] if "prompt" in asked else _opened_chat(task, asked["messages"])
        yield from _grown(task, model.base, prompt, asked)
    else:
        kind = "vectors" if "texts" in asked else "texts"
        raise ConfigError(f"a model of the task {task.cfg.task!r} makes no {kind}")


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
    chance = torch.Generator().manual_seed(asked["seed"])
    made: list[int] = []
    text, told, finish, cache = "", 0, "length", None
    step = torch.tensor([prompt])
    while finish == "length" and len(made) < min(asked["max_tokens"], limit - len(prompt)):
        out = base(input_ids=step.to(base.device), past_key_values=cache, use_cache=True)
        cache, token = out.past_key_values, _drawn(out.logits[0, -1], asked["temperature"], chance)
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
