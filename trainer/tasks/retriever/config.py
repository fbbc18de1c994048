"""What a retriever's experiment states, and a reranker's. Imports no torch. docs/tasks/retriever.md
maps Tevatron's argument names, docs/tasks/reranker.md says what `form: "cross"` trains.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from trainer.config.block import Fraction, Positive, Strict
from trainer.config.formats.layouts import QUERIES, QUESTIONS, TEVATRON, Layout, Purpose
from trainer.config.own_rows import OwnRows
from trainer.config.schema import Experiment

Selection = Literal["by_epoch", "drawn", "first"]


class Data(OwnRows):
    """Queries with their passages, and how they become tokens."""

    encoded = frozenset(
        {
            "query_tokens",
            "passage_tokens",
            "passages",
            "separator",
            "query_prefix",
            "passage_prefix",
            "append_eos",
        }
    )
    not_encoded = frozenset(
        {
            "source",
            "format",
            "corpus",
            "negatives",
            "select_positive",
            "select_negatives",
            "pad_to_multiple_of",
        }
    )

    unstreamed: ClassVar[tuple[str, ...]] = ("corpus",)
    purposes: ClassVar[tuple[Purpose, ...]] = ("query",)
    of_source: ClassVar[frozenset[str]] = OwnRows.of_source | {
        "corpus",
        "negatives",
        "query_prefix",
        "passage_prefix",
    }

    source: Literal[
        "files", "tevatron", "pretokenised", "beir", "dpr", "fid", "nq", "stdlib_docs", "hub"
    ]
    """files: questions of your own with answers and contexts (docs/own-data.md): positives are
    those that useful_contexts marks, else a context that stands alone, else those that hold an
    answer. tevatron: rows of query_id, query, positive_passages, negative_passages; ids alone
    (positive_docids, negative_docids) are looked up in `corpus`. pretokenised: query, positives,
    negatives as token ids. beir: corpus.jsonl, queries.jsonl and qrels/<split>.tsv. dpr: DPR's
    JSON. fid: ctxs with teacher scores. nq: queries.jsonl with gold passages and BM25's ranking.
    stdlib_docs: the embedded corpus. hub: `dataset` in Tevatron's layout, which may be
    "org/name/split" or "org/name:config"; `files` then names splits, too.
    """
    corpus: str | None = None
    """A file of passages that rows name by id; .jsonl(.gz) or .tsv."""
    negatives: str | None = None
    """beir, msmarco: JSON lines of query_id and negative_docids, which qrels do not give."""
    query_tokens: Annotated[int, Field(ge=2)] = 32
    """Longer queries are cut, special tokens counted."""
    passage_tokens: Annotated[int, Field(ge=2)] = 128
    """Longer passages are cut."""
    passages: Positive = 8
    """The number of passages of a query in training: one positive, and negatives."""
    select_positive: Selection = "by_epoch"
    """by_epoch: what Tevatron v1 takes in this epoch. drawn: at random. first: always the first
    ones.
    """
    select_negatives: Selection = "by_epoch"
    """Which of a row's negatives a step takes."""
    separator: str = " "
    """Between title and text; the name of a special token (sep_token) means that token."""
    query_prefix: str = ""
    """Text in front of every query."""
    passage_prefix: str = ""
    """Text in front of every passage."""
    append_eos: bool = False
    """Whether texts end with the tokenizer's end-of-sequence token."""
    pad_to_multiple_of: Positive = 8
    """Where rows are padded: to a multiple of it, but never beyond the limits above."""

    def layout(self) -> Layout | None:
        if self.source in ("files", "fid"):
            return QUESTIONS if self.source == "fid" else QUERIES
        return TEVATRON if self.source in ("tevatron", "hub") else None

    def names_files(self) -> bool:
        return True

    @model_validator(mode="after")
    def _the_source_has_what_it_needs(self) -> Data:
        if self.dataset is None and self.source == "hub":
            raise ValueError('dataset belongs to source="hub", which needs it')
        if self.negatives is not None and self.reads not in ("beir", "msmarco"):
            raise ValueError('negatives belongs to source="beir"; other sources have their own')
        if self.reads == "pretokenised" and (self.query_prefix or self.passage_prefix):
            raise ValueError(
                "token ids take no prefix: leave query_prefix and passage_prefix out, or give texts"
            )
        return self


class Projection(Strict):
    """A linear layer behind the pooling, without activation: Tevatron's pooler."""

    width: Positive = 768
    """Numbers of a vector behind the projection."""
    in_width: Positive | None = None
    """The width of the base's states, which is only checked."""
    tied: bool | None = None
    """One for both sides; None: as the encoders."""


class Encoder(Strict):
    """How a text becomes a vector, and two vectors a score."""

    tied: bool = True
    """One encoder for queries and passages."""
    pooling: Literal["cls", "mean", "eos"] = "cls"
    """Which states become the vector: the first, the mean, or the last one's."""
    projection: Projection | None = None
    """A linear layer behind the pooling; None: none."""
    normalize: bool = False
    """Whether vectors have length 1."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Scores are divided by it."""


class Distillation(Strict):
    """KL divergence between the teacher's and the retriever's distribution over a query's own
    passages.
    """

    coefficient: Annotated[float, Field(gt=0)] = 1.0
    """The factor of this term in the loss."""
    teacher_temperature: Annotated[float, Field(gt=0)] = 1.0
    """The teacher's scores are divided by it."""


class Loss(Strict):
    """What is minimised, and over which passages."""

    pool: Literal["window", "micro_batch"] = "window"
    """micro_batch: accumulation adds no negatives, as published."""
    negatives_x_device: bool = True
    """The passages of all ranks are negatives."""
    query_chunk: Positive | None = None
    """GradCache. The micro-batches of a window are chunks of one pool by themselves: every text is
    encoded twice, but those of the last one once. These cut a micro-batch further, so many queries
    and passages at a time: again twice but for the last passages where it is the whole window,
    which also needs one gradient reduction only, and three times in a window of several. None: all
    at once.
    """
    passage_chunk: Positive | None = None
    """As query_chunk, for passages; None: all at once."""
    pool_on_host: bool = False
    """Keep representations and scores in the CPU's memory."""
    mask_duplicates: bool = False
    """A query's positives among other queries' passages are no negatives."""
    contrastive: Annotated[float, Field(ge=0)] = 1.0
    """Coefficient of the in-batch loss."""
    distillation: Distillation | None = None
    """Learn from a reader's scores beside the labels; None: do not."""

    @model_validator(mode="after")
    def _something_is_minimised(self) -> Loss:
        if self.contrastive == 0 and self.distillation is None:
            raise ValueError("contrastive=0 without distillation leaves nothing to minimise")
        return self


class Cross(Strict):
    """What a cross-encoder lowers: it reads a query together with a passage, and gives the pair a
    score.
    """

    loss: Literal["pointwise", "margin", "ranknet", "softmax", "lambda"] = "softmax"
    """Over the passages of one query. pointwise: binary cross-entropy of each score. margin: a
    positive is to be `margin` above each negative. ranknet: the logistic loss of each such pair.
    softmax: the cross-entropy of the softmax over all passages. lambda: LambdaLoss, the pairs of
    ranknet weighted by what their order means for nDCG.
    """
    margin: Annotated[float, Field(gt=0)] = 1.0
    """Of the loss margin: how far a positive is to be above a negative."""
    sigma: Annotated[float, Field(gt=0)] = 1.0
    """Of ranknet and lambda: differences of scores are multiplied by it."""
    weights: Literal["ndcg2pp", "ndcg2", "ndcg1", "lambdarank"] = "ndcg2pp"
    """Of lambda: the published weights, NDCG-Loss2++, NDCG-Loss2, NDCG-Loss1 or LambdaRank."""
    mu: Annotated[float, Field(gt=0)] = 10.0
    """Of ndcg2pp: the factor of NDCG-Loss2 in it; that of LambdaRank is 1."""
    top: Positive | None = None
    """Of lambda: the k of nDCG@k. Only pairs with a passage in the first k count. None: all."""


class Config(Experiment):
    """A retriever's experiment; without `lora` every weight trains."""

    not_encoded = frozenset({"encoder", "loss", "cross", "dropout"})

    task: Literal["retriever"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    """A dense retriever, or a reranker."""
    form: Literal["bi", "cross"] = "bi"
    """bi: a query and a passage each become a vector (`encoder`, `loss`). cross: one model reads
    both together and scores the pair (`cross`).
    """
    data: Data
    """Rows, and how they become tokens."""
    encoder: Encoder = Encoder()
    """How texts become vectors."""
    loss: Loss = Loss()
    """What is minimised, and in which pieces."""
    cross: Cross = Cross()
    """What form="cross" minimises."""
    dropout: Fraction | None = None
    """None: the base's own."""

    @property
    def package(self) -> str:
        """The forms are packages of the task."""
        return f"{self.task}.cross" if self.form == "cross" else self.task

    @model_validator(mode="after")
    def _the_form_has_its_blocks(self) -> Config:
        blocks = {"encoder": Encoder(), "loss": Loss()}
        if self.form == "bi":
            blocks = {"cross": Cross()}
        unread = [name for name, default in blocks.items() if getattr(self, name) != default]
        if unread:
            other = "bi" if self.form == "cross" else "cross"
            raise ValueError(
                f'{unread[0]}: form="{self.form}" does not read it, form="{other}" does. Leave it '
                f'out, or say form="{other}"'
            )
        if self.form == "cross" and self.data.passages < 2:
            raise ValueError(
                'data.passages=1 with form="cross": a score is learnt from a positive beside '
                "negatives. Use 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _teachers_have_scores(self) -> Config:
        reads = self.data.reads
        if self.loss.distillation is not None and reads not in ("fid", "tevatron", "dpr"):
            key = "source" if self.data.format is None else "format"
            raise ValueError(
                f'loss.distillation: {key}="{reads}" has no scores of a teacher. Use "fid"'
            )
        return self
