"""Runs where lm-eval is, without ours: its own HFLM on exported folders.

    python theirs.py < asked.json > told.json

Asked: {"tasks", "include_path", "models": {name: {"pretrained", "peft", "tokenizer", "chat"}}}. Told,
by name: "results" and "n-shot" of lm-eval, and "answers": [kind, texts of the request, answer] of each request.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]


class Heard(HFLM):
    """Keeps what it was asked and what it answered."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.answers: list[list[Any]] = []

    def _keep(self, kind: str, requests: list[Any], answers: list[Any]) -> list[Any]:
        for one, answer in zip(requests, answers, strict=True):
            self.answers.append([kind, list(one.args), answer])
        return answers

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        return self._keep("choice", requests, super().loglikelihood(requests))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        return self._keep("text", requests, super().loglikelihood_rolling(requests))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        return self._keep("answer", requests, super().generate_until(requests))


def main() -> None:
    asked = json.load(sys.stdin)
    told: dict[str, Any] = {}
    for name, model in asked["models"].items():
        chat = model.pop("chat")
        lm = Heard(**model, device="cpu", batch_size=3, dtype="float32")
        found = simple_evaluate(
            lm,
            tasks=asked["tasks"],
            task_manager=TaskManager(include_path=asked["include_path"], include_defaults=False),
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            log_samples=False,
        )
        told[name] = {part: found[part] for part in ("results", "n-shot")}
        told[name]["answers"] = lm.answers
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
