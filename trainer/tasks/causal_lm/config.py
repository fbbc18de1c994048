"""What a language-modelling experiment states. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from trainer.config.block import Positive
from trainer.config.own_rows import CHATS, COMPLETIONS, TEXTS, Layout, OwnRows
from trainer.config.schema import Experiment


class Data(OwnRows):
    """Rows and how they become tokens."""

    encoded = frozenset({"source", "max_tokens", "loss_on", "chat_template"})
    not_encoded = frozenset({"facts"})

    source: Literal["stdlib_docs", "lookup", "nq", "jsonl", "files", "chat"]
    """files: rows of your own with "text", or "prompt" and "completion"; "jsonl" is its older name.
    chat: rows of your own with "messages" (docs/own-data.md). stdlib_docs: the embedded corpus.
    lookup: made-up facts. nq: corpus.tsv of NaturalQuestions.
    """
    facts: Positive = 8
    """Of "lookup": the most facts that a text tells."""
    max_tokens: Positive = 1024
    """Longer texts are cut into pieces of this length; a longer conversation loses its end."""
    loss_on: Literal["all", "answer"] = "all"
    """The tokens that the loss counts. answer: only completions ("files" with "prompt" and
    "completion"), or the answers of the made-up corpus. In a conversation it is always what the
    assistant says.
    """
    chat_template: str | None = None
    """Of "chat": a file (also below --data_path) or the name of a built-in one, "chatml" or
    "plain"; None: the tokenizer's own.
    """

    def layout(self) -> Layout | None:
        if self.source == "chat":
            return CHATS
        if self.source not in ("files", "jsonl"):
            return None
        return COMPLETIONS if self.loss_on == "answer" else TEXTS

    @model_validator(mode="after")
    def _answers_are_known(self) -> Data:
        if self.loss_on == "answer" and self.source not in ("lookup", "jsonl", "files", "chat"):
            raise ValueError(
                f'loss_on="answer": source={self.source!r} has no answers. Use source="files" with '
                '"prompt" and "completion", or loss_on="all"'
            )
        return self

    @model_validator(mode="after")
    def _conversations_are_learnt_from_one_side(self) -> Data:
        if self.source == "chat" and "loss_on" in self.model_fields_set and self.loss_on == "all":
            raise ValueError(
                'source="chat" has its loss on what the assistant says: leave loss_on="all" out'
            )
        if self.source != "chat" and self.chat_template is not None:
            raise ValueError(
                f"source={self.source!r} has no conversations: leave chat_template out, or use "
                'source="chat"'
            )
        return self


class Config(Experiment):
    """A language-modelling experiment; without `lora` every weight of the base trains."""

    task: Literal["causal_lm"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    """A language model on texts."""
    data: Data
    """Rows, and how they become tokens."""
