"""What a language-modelling experiment states. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, model_validator

from trainer.config.block import Positive
from trainer.config.formats.layouts import CHATS, COMPLETIONS, TEXTS, Layout, Purpose
from trainer.config.formats.table import FORMATS
from trainer.config.origin.teacher import DistilledExperiment
from trainer.config.own_rows import OwnRows

CLIENT = "client"
# Keys that need rows before the first step, or that say what each operation of a client says.
_NOT_DRIVEN = (
    "epochs",
    "eval_batch",
    "eval_every",
    "answers",
    "best_is",
    "hours",
    "patience",
    "on_bad_step",
    "spike_z",
    "label_smoothing",
    "z_loss",
    "neftune_alpha",
    "ema",
    "freeze",
    "compile",
    "activation_offload",
)


class Data(OwnRows):
    """Rows and how they become tokens."""

    encoded = frozenset({"source", "format", "max_tokens", "loss_on", "chat_template"})
    not_encoded = frozenset({"facts", "put_aside_s", "together"})
    purposes: ClassVar[tuple[Purpose, ...]] = ("conversation", "completion", "text")
    of_source: ClassVar[frozenset[str]] = OwnRows.of_source | {"loss_on", "chat_template", "facts"}
    sources_of_formats: ClassVar[tuple[str, ...]] = ("files", "jsonl", "chat")

    source: Literal["stdlib_docs", "lookup", "nq", "jsonl", "files", "chat", "client"]
    """files: rows of your own with "text", or "prompt" and "completion"; "jsonl" is its older name.
    chat: rows of your own with "messages" (docs/own-data.md). stdlib_docs: the embedded corpus.
    lookup: made-up facts. nq: corpus.tsv of NaturalQuestions. client: a client sends rows and
    steps (docs/driven.md).
    """
    facts: Positive = 8
    """Of "lookup": the most facts that a text tells."""
    max_tokens: Positive = 1024
    """Longer texts are cut into pieces of this length; a longer conversation loses its end. Of a
    client's rows a longer one is refused.
    """
    put_aside_s: Annotated[float, Field(gt=0)] | None = None
    """Of "client": seconds without an operation after which the run saves and ends, to be woken by
    the next one. None: it waits for ever.
    """
    together: Positive = 1
    """Of "client": how many runs one worker computes on one base, each with its own adapters. Above
    1 the run is computed so even while it is alone (docs/driven.md).
    """
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
    def _a_client_brings_its_rows(self) -> Data:
        if self.source != CLIENT and self.put_aside_s is not None:
            raise ValueError(
                f"put_aside_s with source={self.source!r}, whose rows wait for nobody: leave it out"
            )
        if self.source != CLIENT and self.together > 1:
            raise ValueError(
                f"together with source={self.source!r}, whose run computes alone: leave it out"
            )
        foreign = [key for key in ("mix", "facts") if key in self.model_fields_set]
        if self.source == CLIENT and foreign:
            raise ValueError(
                f'source="client" reads no rows from files: leave {" and ".join(foreign)} out'
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

    @property
    def is_driven(self) -> bool:
        return self.data.source == CLIENT

    @property
    def unshared(self) -> str | None:
        if self.is_driven:
            return 'with data.source="client" the ranks follow a log of whole rows'
        return None

    @model_validator(mode="after")
    def _a_client_drives_adapters(self) -> Config:
        if not self.is_driven:
            return self
        train, usual = self.train, type(self.train).model_fields
        problems = [
            f"train.{key}={getattr(train, key)!r}"
            for key in _NOT_DRIVEN
            if getattr(train, key) != usual[key].get_default()
        ]
        problems += [
            f"train.{key}='auto'"
            for key in ("gradient_checkpointing", "frozen")
            if getattr(train, key) == "auto"
        ]
        problems += ["train.micro_batch='auto'"] if train.micro_batch == 0 else []
        problems += ["deepspeed='auto'"] if self.deepspeed == "auto" else []
        problems += ["train.precision='fp16'"] if train.precision == "fp16" else []
        problems += [f"optim.name={self.optim.name!r}"] if self.optim.name != "adamw" else []
        problems += [
            key
            for key in ("teacher", "judge", "metrics", "continues", "init_from")
            if getattr(self, key) is not None
        ]
        if problems:
            raise ValueError(
                f'data.source="client" with {", ".join(problems)}: the client sends rows and '
                "steps, so that there are none to choose it by, to score or to schedule. Leave "
                f"{'it' if len(problems) == 1 else 'them'} out (docs/driven.md)"
            )
        lora = self.lora
        changes = lora and (lora.weights_of_base or ("dora" if lora.dora else None))
        changes = changes or (f"tokens={lora.tokens}" if lora and lora.tokens else None)
        if self.data.together > 1 and changes:
            raise ValueError(
                f"data.together={self.data.together} with lora.{changes}: runs that share a base "
                "leave it as it is. Leave one of the two out"
            )
        if self.lora is None:
            raise ValueError(
                'data.source="client" trains adapters beside a frozen base: give "lora", {} for '
                "its defaults"
            )
        return self
