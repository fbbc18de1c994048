"""What a cross-attention experiment states (specs: XC-Cache, ServiceNow). Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from trainer.config.block import Fraction, Positive, Strict
from trainer.config.formats.layouts import QUESTIONS, Layout, Purpose
from trainer.config.own_rows import OwnRows
from trainer.config.schema import Experiment

Rate = Annotated[float, Field(ge=0.0, le=1.0)]


class Layers(Strict):
    """The inserted layers: block indices n-1, n-1-stride, ... of a base with n blocks, counted from
    the top.
    """

    count: Positive
    """How many cross-attention layers are inserted."""
    stride: Positive
    """Blocks of the base from one of them to the next."""
    shared_weights: bool = False
    """Whether one module stands in every place."""
    shared_projections: bool = False
    """Whether query and key use one matrix."""
    after: bool = True
    """True: behind its base block ("final"); False: before it."""
    width: Positive | None = None
    """Of the attention, and times 4 of the MLP; None: the base's."""
    heads: Positive | None = None
    """Of the attention; None: the base's."""
    kv_heads: Positive | None = None
    """Bases with rotary positions: heads of keys and values; None: as many as heads."""
    attention_bias: bool = False
    """Bases with rotary positions: whether projections have biases; layers in a GPTBigCode always
    have.
    """
    base_attention: bool = False
    """Bases with rotary positions: width, heads and kv_heads of the attention are the base's, and
    `width` is that of the MLP alone. The published Mistral did so whatever its config said.
    """
    attention_dropout: Fraction | None = None
    """Of attention probabilities; None: the base's."""
    key_dropout: Fraction = 0.0
    """Share of whole context tokens that are hidden from a layer, drawn per layer and sample."""
    skip: bool = False
    """The output is hidden + layer(hidden), so the residual counts twice."""
    initialisation: Literal["zero", "published"] = "zero"
    """zero: output projections start at 0, logits equal the base's."""


class Data(OwnRows):
    """Rows and how they become tokens."""

    encoded = frozenset(
        {
            "source",
            "facts",
            "template",
            "question_on_context",
            "decoder_tokens",
            "context_tokens",
            "chunked",
            "loss_on",
            "include_context_ids",
            "shuffled_context",
        }
    )
    not_encoded = frozenset(
        {
            "format",
            "fim_rate",
            "training_data_subset",
            "validation_data_subset",
            "encode",
            "state_dtype",
            "packed",
            "answer_tokens",
        }
    )

    unstreamed: ClassVar[tuple[str, ...]] = ("include_context_ids",)
    purposes: ClassVar[tuple[Purpose, ...]] = ("question",)
    of_source: ClassVar[frozenset[str]] = OwnRows.of_source | {
        "facts",
        "training_data_subset",
        "validation_data_subset",
    }
    sources_of_formats: ClassVar[tuple[str, ...]] = ("files", "jsonl")

    source: Literal["stdlib_docs", "lookup", "nq", "jsonl", "files"]
    """files: questions of your own with answers and contexts (docs/own-data.md); "jsonl" is its
    older name. stdlib_docs: the embedded corpus. lookup: made-up facts. nq: NaturalQuestions.
    """
    facts: Positive = 8
    """Of "lookup": the most facts that a context tells."""
    template: Literal["chat", "plain", "mistral", "bare"] = "chat"
    """How question and answer become one text; bare: the texts alone."""
    question_on_context: bool = False
    """The question is written before the context as well."""
    decoder_tokens: Positive = 2048
    """Longer questions with their answers are cut."""
    context_tokens: Positive = 2048
    """Longer contexts are cut; of each chunk, where they are chunked."""
    chunked: bool = False
    """Every context is encoded by itself, positions restart at 0."""
    loss_on: Literal["all", "answer"] = "all"
    """Which tokens of the decoder are labels: all, or those of the answer."""
    include_context_ids: bool = False
    """Training also predicts every context itself, through the layers that read it."""
    fim_rate: Rate = 0.5
    """The share of those contexts that are reordered to fill in the middle."""
    training_data_subset: str = "all"
    """Only rows of this "dataset" ("nq", ...)."""
    validation_data_subset: str = "all"
    """The part of the validation that is read; all: everything."""
    encode: Literal["online", "cached"] = "online"
    """Where the states of contexts come from. online: the base computes them in every step. cached:
    `python -m trainer prepare` made them before.
    """
    state_dtype: Literal["bf16", "fp32", "int8"] = "bf16"
    """The dtype of prepared states; int8 has a scale for each token."""
    shuffled_context: bool = False
    """Evaluation also reports the loss under another row's context."""
    packed: bool | None = None
    """Losses on streams of real tokens, not on rows padded to the longest; None: where the base's
    attention is torch's, which it is unless the base says otherwise.
    """
    answer_tokens: Positive = 30
    """The most tokens of a generated answer (--do_extra_evals)."""

    def layout(self) -> Layout | None:
        return QUESTIONS if self.source in ("files", "jsonl") else None

    @model_validator(mode="after")
    def _states_are_of_one_source(self) -> Data:
        if self.mix and self.encode == "cached":
            raise ValueError(
                'encode="cached" with a mix: `prepare` writes the rows of one source beside their '
                'states. Use encode="online"'
            )
        return self


class Config(Experiment):
    """A cross-attention experiment."""

    not_encoded = frozenset({"layers", "init_from"})
    scores_vocabulary = True

    task: Literal["cross_attention"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    """A frozen decoder that reads contexts through inserted layers."""
    layers: Layers
    """The layers that are inserted, and train."""
    data: Data
    """Rows, and how they become tokens."""
    init_from: str | None = None
    """A folder with added layers to start from: a published checkpoint or our own final/."""

    @property
    def inserts_layers(self) -> bool:
        return True

    @property
    def freezes_base(self) -> bool:
        return True

    @model_validator(mode="after")
    def _contexts_are_read_without_adapters(self) -> Config:
        if self.lora is not None and self.lora.export == "merged":
            raise ValueError(
                'lora.export="merged": contexts are encoded by the base without its adapters, so '
                'that prepared states stay right, and a merged base is both. Use "adapter"'
            )
        changed = self.lora and (self.lora.weights_of_base or (self.lora.tokens and "tokens"))
        if changed:
            raise ValueError(
                f"lora.{changed}: contexts are encoded by the base as it is, so "
                "that prepared states stay right, and this changes its weights. Leave it out"
            )
        return self
