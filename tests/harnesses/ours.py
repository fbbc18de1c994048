"""Runs where lm-eval and MTEB are: our evaluation of several runs, in one process.

    python -m tests.harnesses.ours < asked.json > told.json

Asked: {name: {"run", "model", "data_path", "cache_dir", "flags"}}; with "is_padded" rows are padded and
go through lm-eval's own forward. Told, by name: "lines" that the
command prints, and "answers" as theirs.py tells them; or "error".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.evaluation.named_run import named_run
from trainer.harness.flags import HarnessFlags
from trainer.harness.language_model import TrainedLM
from trainer.harness.run import run
from trainer.training.options import Options

KINDS = {"loglikelihood": "choice", "loglikelihood_rolling": "text", "generate_until": "answer"}


def main() -> None:
    answers: list[list[Any]] = []
    shared = TrainedLM._shared

    def heard(lm: TrainedLM, answer: Callable[..., list[Any]], requests: list[Any]) -> list[Any]:
        given = shared(lm, answer, requests)
        kind = KINDS[answer.__name__]
        for one, value in zip(requests, given, strict=True):
            answers.append([kind, list(one.args), value])
        return given

    begin = TrainedLM.__init__
    is_padded = False

    def begun(lm: TrainedLM, *args: Any, **how: Any) -> None:
        begin(lm, *args, **how)
        lm._read = None if is_padded else lm._read

    TrainedLM._shared = heard  # type: ignore[method-assign]
    TrainedLM.__init__ = begun  # type: ignore[method-assign]
    told: dict[str, Any] = {}
    for name, asked in json.load(sys.stdin).items():
        answers.clear()
        is_padded = asked.get("is_padded", False)
        paths = {key: Path(path) for key, path in asked["flags"].pop("paths", {}).items()}
        flags = HarnessFlags(**asked["flags"], **paths)
        assert flags.is_set
        named = named_run(asked["run"], Path("results"))
        options = Options(
            named.savedir_base,
            data_path=Path(asked["data_path"]),
            cache_dir=Path(asked["cache_dir"]),
        )
        try:
            lines = run(named, named.question(asked["model"]), flags, options)
        except ConfigError as error:
            told[name] = {"error": str(error)}
        else:
            told[name] = {"lines": lines, "answers": list(answers)}
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
