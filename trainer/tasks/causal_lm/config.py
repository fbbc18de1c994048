"""What a language-modelling experiment states. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from trainer.config.own_rows import COMPLETIONS, TEXTS, Layout, OwnRows
from trainer.config.schema import Experiment, Positive


class Data(OwnRows):
    """Rows and how they become tokens."""

    # files: rows of your own with "text", or "prompt" and "completion"; "jsonl" is its older name.
    # stdlib_docs: the embedded corpus.
    # lookup: made-up facts. nq: corpus.tsv of NaturalQuestions.
    source: Literal["stdlib_docs", "lookup", "nq", "jsonl", "files"]
    facts: Positive = 8  # of "lookup": told in a text at most
    # longer texts are cut into pieces of this length
    max_tokens: Positive = 1024
    # answer: on completions alone ("files" with "prompt" and "completion"), or on the answers of
    # the made-up corpus.
    loss_on: Literal["all", "answer"] = "all"

    def layout(self) -> Layout | None:
        if self.source not in ("files", "jsonl"):
            return None
        return COMPLETIONS if self.loss_on == "answer" else TEXTS

    @model_validator(mode="after")
    def _answers_are_known(self) -> Data:
        if self.loss_on == "answer" and self.source not in ("lookup", "jsonl", "files"):
            raise ValueError(
                f'loss_on="answer": source={self.source!r} has no answers. Use source="files" with '
                '"prompt" and "completion", or loss_on="all"'
            )
        return self


class Config(Experiment):
    """A language-modelling experiment; without `lora` every weight of the base trains."""

    task: Literal["causal_lm"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    data: Data
