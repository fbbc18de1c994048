"""What a language-modelling experiment states. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, cast

from pydantic import model_validator

from trainer.config.block import Positive
from trainer.config.formats.layouts import CHATS, COMPLETIONS, TEXTS, Layout, Purpose
from trainer.config.formats.table import FORMATS
from trainer.config.origin.teacher import DistilledExperiment
from trainer.config.own_rows import OwnRows


class Data(OwnRows):
    """Rows and how they become tokens."""

    encoded = frozenset({"source", "format", "max_tokens", "loss_on", "chat_template"})
    not_encoded = frozenset({"facts"})
    purposes: ClassVar[tuple[Purpose, ...]] = ("conversation", "completion", "text")
    of_source: ClassVar[frozenset[str]] = OwnRows.of_source | {"loss_on", "chat_template", "facts"}
    sources_of_formats: ClassVar[tuple[str, ...]] = ("files", "jsonl", "chat")

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
    assistant says. With `format` "alpaca" or "prompt_completion" it is "answer" unless it is given.
    """
    chat_template: str | None = None
    """Of conversations: a file (also below --data_path) or the name of a built-in one, "chatml" or
    "plain"; None: the tokenizer's own.
    """

    @property
    def purpose(self) -> Purpose:
        """What a row is: a conversation, a prompt with its completion, or a text."""
        if self.source == "chat":
            return "conversation"
        if self.format is None:
            return "completion" if self.loss_on == "answer" else "text"
        serves = FORMATS[self.format].serves
        return next(one for one in ("completion", "text", "conversation") if one in serves)

    def layout(self) -> Layout | None:
        if self.source not in self.sources_of_formats:
            return None
        return {"conversation": CHATS, "completion": COMPLETIONS, "text": TEXTS}[self.purpose]

    @model_validator(mode="before")
    @classmethod
    def _completions_are_learnt(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = cast("dict[str, Any]", values)
        is_of_pairs = values.get("format") in ("alpaca", "prompt_completion")
        is_of_texts = is_of_pairs and values.get("source") in ("files", "jsonl")
        return {"loss_on": "answer", **values} if is_of_texts else values

    @model_validator(mode="after")
    def _answers_are_known(self) -> Data:
        if self.loss_on != "answer":
            return self
        if self.source not in ("lookup", "jsonl", "files", "chat"):
            raise ValueError(
                f'loss_on="answer": source={self.source!r} has no answers. Use source="files" with '
                '"prompt" and "completion", or loss_on="all"'
            )
        if self.format is not None and self.purpose == "text":
            raise ValueError(
                f'loss_on="answer": format={self.format!r} has no answers. Use '
                'format="prompt_completion", or loss_on="all"'
            )
        return self

    @model_validator(mode="after")
    def _conversations_are_learnt_from_one_side(self) -> Data:
        reads = f"source={self.source!r}" if self.format is None else f"format={self.format!r}"
        is_known = self.format is None or "conversation" in FORMATS[self.format].serves
        if self.source == "chat" and not is_known:
            raise ValueError(f'{reads} has no conversations: use source="files"')
        is_chat = self.purpose == "conversation"
        if is_chat and "loss_on" in self.model_fields_set and self.loss_on == "all":
            raise ValueError(
                f'{reads} has its loss on what the assistant says: leave loss_on="all" out'
            )
        if not is_chat and self.chat_template is not None:
            raise ValueError(
                f'{reads} has no conversations: leave chat_template out, or use source="chat"'
            )
        return self


class Config(DistilledExperiment):
    """A language-modelling experiment; without `lora` every weight of the base trains."""

    scores_vocabulary = True

    task: Literal["causal_lm"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    """A language model on texts."""
    data: Data
    """Rows, and how they become tokens."""
