"""What a language-modelling experiment states. Imports no torch."""

from __future__ import annotations

from typing import Literal

from trainer.config.schema import Experiment, Positive, Strict


class Data(Strict):
    """Rows and how they become tokens."""

    source: Literal["stdlib_docs", "lookup", "nq", "jsonl"]
    max_tokens: Positive = 1024  # longer texts are cut into pieces of this length


class Config(Experiment):
    """A language-modelling experiment: every weight of the base trains."""

    task: Literal["causal_lm"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    data: Data
