"""What a cross-attention experiment states (specs: XC-Cache, ServiceNow). Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config.own_rows import QUESTIONS, Layout, OwnRows
from trainer.config.schema import Experiment, Fraction, Positive, Strict

Rate = Annotated[float, Field(ge=0.0, le=1.0)]


class Layers(Strict):
    """The inserted layers: block indices n-1, n-1-stride, ... of a base with n blocks, counted from
    the top.
    """

    count: Positive
    stride: Positive
    shared_weights: bool = False  # one module in every slot
    shared_projections: bool = False  # query and key use one matrix
    after: bool = True  # True: behind its base block ("final"); False: before it
    width: Positive | None = None  # of the attention and, times 4, of the MLP; None: the base's
    heads: Positive | None = None  # None: the base's
    # rotary positions: heads of keys and values; None: as many as heads
    kv_heads: Positive | None = None
    # rotary positions: of the attention's projections; GPTBigCode layers have biases
    attention_bias: bool = False
    # rotary positions: width, heads and kv_heads of the attention are the base's, and
    base_attention: bool = False
    # `width` is that of the MLP alone. The published Mistral did so whatever its config said.
    attention_dropout: Fraction | None = None  # of attention probabilities; None: the base's
    # whole context tokens hidden from a layer, drawn per layer and sample
    key_dropout: Fraction = 0.0
    skip: bool = False  # the output is hidden + layer(hidden), so the residual counts twice
    # zero: output projections start at 0, logits equal the base's
    initialisation: Literal["zero", "published"] = "zero"


class Data(OwnRows):
    """Rows and how they become tokens."""

    # files: questions of your own with answers and contexts (docs/own-data.md); "jsonl" is its
    # older name. stdlib_docs: the embedded corpus. lookup: made-up facts. nq: NaturalQuestions.
    source: Literal["stdlib_docs", "lookup", "nq", "jsonl", "files"]
    facts: Positive = 8  # of "lookup": told in a context at most
    template: Literal["chat", "plain", "mistral", "bare"] = "chat"
    question_on_context: bool = False  # the question is written before the context as well
    decoder_tokens: Positive = 2048
    context_tokens: Positive = 2048  # of each chunk
    chunked: bool = False  # every context is encoded by itself, positions restart at 0
    loss_on: Literal["all", "answer"] = "all"
    # training also predicts every context itself, through the layers that read it
    include_context_ids: bool = False
    fim_rate: Rate = 0.5  # of those contexts: how many are reordered to fill in the middle
    training_data_subset: str = "all"  # only rows of this "dataset" ("nq", ...)
    validation_data_subset: str = "all"
    # cached: the states that `python -m trainer prepare` made are read
    encode: Literal["online", "cached"] = "online"
    # of prepared states; int8 has a scale for each token
    state_dtype: Literal["bf16", "fp32", "int8"] = "bf16"
    shuffled_context: bool = False  # evaluation also reports the loss under another row's context
    # losses on streams of real tokens, not on rows padded to the longest; None: where the base's
    # attention is torch's, which it is unless the base says otherwise
    packed: bool | None = None
    answer_tokens: Positive = 30  # generated at most for an answer (--do_extra_evals)

    def layout(self) -> Layout | None:
        return QUESTIONS if self.source in ("files", "jsonl") else None


class Config(Experiment):
    """A cross-attention experiment."""

    task: Literal["cross_attention"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    layers: Layers
    data: Data
    # a folder with added layers to start from: a published checkpoint or our own final/
    init_from: str | None = None

    @model_validator(mode="after")
    def _contexts_are_read_without_adapters(self) -> Config:
        if self.lora is not None and self.lora.export == "merged":
            raise ValueError(
                'lora.export="merged": contexts are encoded by the base without its adapters, so '
                'that prepared states stay right, and a merged base is both. Use "adapter"'
            )
        return self
