"""What a cross-attention experiment states (specs: XC-Cache, ServiceNow). Imports no torch."""

from __future__ import annotations

from typing import Literal

from trainer.config import Experiment, Fraction, Positive, Strict


class Layers(Strict):
    """The inserted layers: block indices n-1, n-1-stride, ... of a base with n blocks, counted from the top."""

    count: Positive
    stride: Positive
    shared_weights: bool = False  # one module in every slot
    shared_projections: bool = False  # query and key use one matrix
    after: bool = True  # True: behind its base block ("final"); False: before it
    width: Positive | None = None  # of the attention and, times 4, of the MLP; None: the base's
    heads: Positive | None = None  # None: the base's
    key_dropout: Fraction = 0.0  # whole context tokens hidden from a layer, drawn per layer and sample
    skip: bool = False  # the output is hidden + layer(hidden), so the residual counts twice
    initialisation: Literal["zero", "published"] = (
        "zero"  # zero: output projections start at 0, logits equal the base's
    )


class Data(Strict):
    """Rows and how they become tokens."""

    source: Literal["stdlib_docs", "nq", "jsonl"]
    template: Literal["chat", "plain", "mistral"] = "chat"
    question_on_context: bool = False  # the question is written before the context as well
    decoder_tokens: Positive = 2048
    context_tokens: Positive = 2048  # of each chunk
    chunked: bool = False  # every context is encoded by itself, positions restart at 0
    loss_on: Literal["all", "answer"] = "all"
    shuffled_context: bool = False  # evaluation also reports the loss under another row's context
    answer_tokens: Positive = 30  # generated at most for an answer (--do_extra_evals)


class Config(Experiment):
    """A cross-attention experiment."""

    task: Literal["cross_attention"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    layers: Layers
    data: Data
    init_from: str | None = None  # a folder with added layers to start from: a published checkpoint or our own final/
