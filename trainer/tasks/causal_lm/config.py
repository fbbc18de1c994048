"""What a language-modelling experiment states. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from trainer.config.schema import Experiment, Positive, Strict


class Data(Strict):
    """Rows and how they become tokens."""

    source: Literal["stdlib_docs", "lookup", "nq", "jsonl"]
    facts: Positive = 8  # of "lookup": told in a text at most
    max_tokens: Positive = 1024  # longer texts are cut into pieces of this length
    # answer: on completions alone ("jsonl" with "prompt" and "completion"), or on the answers of
    # the made-up corpus
    loss_on: Literal["all", "answer"] = "all"

    @model_validator(mode="after")
    def _answers_are_known(self) -> Data:
        if self.loss_on == "answer" and self.source not in ("lookup", "jsonl"):
            raise ValueError(
                f'loss_on="answer": source={self.source!r} has no answers. Use source="jsonl" with '
                '"prompt" and "completion", or loss_on="all"'
            )
        return self


class Config(Experiment):
    """A language-modelling experiment; without `lora` every weight of the base trains."""

    task: Literal["causal_lm"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    data: Data
