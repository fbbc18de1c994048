"""What a retriever's experiment states, in each of its forms. Imports no torch.
docs/tasks/retriever.md maps Tevatron's argument names, docs/tasks/reranker.md says what
`form: "cross"` trains, docs/tasks/late.md what `form: "late"` does, docs/tasks/sparse.md what
`form: "sparse"` does.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from trainer.config.block import Fraction, Positive, Strict
from trainer.config.formats.layouts import QUERIES, QUESTIONS, TEVATRON, Layout, Purpose
from trainer.config.own_rows import OwnRows
from trainer.config.schema import Experiment
from trainer.tasks.retriever.batching.config import Batching

Selection = Literal["by_epoch", "drawn", "first"]
_WITH_TOPICS = ("files", "tevatron", "hub")  # sources whose rows may say their topic


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
            "positives",
            "select_positive",
            "select_negatives",
            "scores",
            "pad_to_multiple_of",
        }
    )

    unstreamed: ClassVar[tuple[str, ...]] = ("corpus", "batches")
    purposes: ClassVar[tuple[Purpose, ...]] = ("query",)
    of_source: ClassVar[frozenset[str]] = OwnRows.of_source | {
        "corpus",
        "negatives",
        "scores",
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
    scores: str | None = None
    """A teacher's scores for the passages of the rows, by ids: a run file, as `search` and
    `rerank` write it, or a reader's rows (`evaluate --write_scores`). They replace scores in rows.
    """
    query_tokens: Annotated[int, Field(ge=2)] = 32
    """Longer queries are cut, special tokens counted."""
    passage_tokens: Annotated[int, Field(ge=2)] = 128
    """Longer passages are cut."""
    passages: Positive = 8
    """The number of passages of a query in training: positives, and negatives."""
    positives: Positive = 1
    """The most of them that are positives; a query with fewer has more negatives."""
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
    batches: Batching | None = None
    """Which rows stand together in a step; None: any."""

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
        if self.positives > self.passages:
            raise ValueError(
                f"positives={self.positives} of passages={self.passages}: want at most all of them"
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
    learn_temperature: bool = False
    """Whether training moves the temperature, never below 0.01, as CLIP does; the export says the
    last one.
    """


class Distillation(Strict):
    """How the retriever's scores of a query's own passages become those of a teacher."""

    kind: Literal["kl", "margin_mse"] = "kl"
    """kl: the divergence of the retriever's distribution from the teacher's. margin_mse: the
    squared difference between their margins, which are the first positive's score minus a
    negative's.
    """
    coefficient: Annotated[float, Field(gt=0)] = 1.0
    """The factor of this term in the loss."""
    teacher_temperature: Annotated[float, Field(gt=0)] = 1.0
    """The teacher's scores are divided by it."""


class FalseNegatives(Strict):
    """Which negatives are taken for unknown positives, and left out of the softmax: those for which
    one of these holds. A score is a dot product here, not divided by the temperature.
    """

    by: Literal["retriever", "teacher"] = "retriever"
    """Whose scores say it; a teacher has scored a query's own passages alone."""
    above: float | None = None
    """The score is above this one."""
    margin: float | None = None
    """The score is above the positive's minus this margin; -0.1 is what Qwen3-Embedding has. 0 or
    less leaves copies of the positive among the negatives, for their score is the same:
    mask_duplicates takes those with its id out.
    """
    share: Fraction | None = None
    """The score is above this share of the positive's; 0.95 is what NV-Retriever has."""

    @model_validator(mode="after")
    def _some_are_left_out(self) -> FalseNegatives:
        if self.above is None and self.margin is None and self.share is None:
            raise ValueError("got none of above, margin and share, want one that tells them")
        return self


class Matryoshka(Strict):
    """The loss is a weighted sum of losses: of the first numbers of each vector (`dims`), which
    have length 1 again where `encoder.normalize` says so, and of the vectors that the first blocks
    of the base give (`layers`). With both, the loss of every layer is that sum over `dims`.
    """

    dims: tuple[Positive, ...] = ()
    """So many numbers; the whole width should be among them. None are listed: whole vectors."""
    weights: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    """One for each of `dims`; None: 1 for all."""
    layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """So many blocks of the base, 0 for its embeddings; the whole base counts besides, with the
    weight 1. `encode --layers` then uses fewer blocks.
    """
    layer_weights: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    """One for each of `layers`; None: all alike, and together 1."""
    divergence: Annotated[float, Field(ge=0)] = 1.0
    """The factor of the divergence of each layer's vectors from the whole base's, which do not
    move towards them; 0: without it.
    """
    divergence_temperature: Annotated[float, Field(gt=0)] = 0.3
    """Vectors are divided by it, before a softmax over their numbers."""

    @model_validator(mode="after")
    def _each_has_a_weight(self) -> Matryoshka:
        for key, sizes, weights in (
            ("dims", self.dims, self.weights),
            ("layers", self.layers, self.layer_weights),
        ):
            if weights is not None and len(weights) != len(sizes):
                raise ValueError(f"got {len(weights)} weights, want one for each of {key} {sizes}")
            if len({*sizes}) < len(sizes):
                raise ValueError(f"{key}={list(sizes)}: got one of them twice, want each once")
        if not self.dims and not self.layers:
            raise ValueError("got neither dims nor layers, want one of them or both")
        return self


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
    chunk_tokens: Positive | Literal["auto"] | None = None
    """In the place of both: as many queries, or passages, at a time as have so many tokens
    together, those of like length; a longer text goes alone. auto: the most that fits, by the
    memory plan; the choice is the run's from its first step on. None: by query_chunk and
    passage_chunk.
    """
    pool_on_host: bool = False
    """Keep representations and scores in the CPU's memory."""
    mask_duplicates: bool = False
    """A query's positives among other queries' passages are no negatives."""
    contrastive: Annotated[float, Field(ge=0)] = 1.0
    """Coefficient of the contrast with other passages."""
    kind: Literal["softmax", "triplet"] = "softmax"
    """softmax: a query chooses its positive among all passages of the pool. triplet: the positive's
    score exceeds that of each of the query's own negatives by `margin`; no temperature.
    """
    margin: Annotated[float, Field(ge=0)] = 0.0
    """softmax: subtracted from a positive's score (additive margin). triplet: the least margin."""
    symmetric: bool = False
    """Positives choose their query among all queries, too; the loss is the mean of both ways."""
    positives: Literal["each", "supcon", "marginal"] = "each"
    """Several positives of a query (data.positives). each: the mean of their losses, without the
    others in the softmax. supcon: with them. marginal: one loss, of their summed probability.
    """
    false_negatives: FalseNegatives | None = None
    """Negatives that are left out of the softmax; None: none."""
    matryoshka: Matryoshka | None = None
    """Vectors whose first numbers are vectors, too; None: whole ones alone."""
    distillation: Distillation | None = None
    """Learn from a teacher's scores beside the labels; None: do not."""

    @model_validator(mode="after")
    def _something_is_minimised(self) -> Loss:
        if self.contrastive == 0 and self.distillation is None:
            raise ValueError("contrastive=0 without distillation leaves nothing to minimise")
        return self

    @model_validator(mode="after")
    def _chunks_are_of_rows_or_tokens(self) -> Loss:
        if self.chunk_tokens is not None and (self.query_chunk or self.passage_chunk):
            raise ValueError(
                f"chunk_tokens={self.chunk_tokens!r} with query_chunk={self.query_chunk} and "
                f"passage_chunk={self.passage_chunk}: want chunks of tokens or of rows. Leave one "
                "kind out"
            )
        return self

    @model_validator(mode="after")
    def _a_triplet_is_of_a_query_alone(self) -> Loss:
        if self.kind == "softmax":
            return self
        of_softmax = [
            name
            for name in ("symmetric", "mask_duplicates", "false_negatives")
            if getattr(self, name)
        ]
        if of_softmax:
            raise ValueError(
                f'kind="triplet" compares a query with its own passages alone, so that '
                f'{of_softmax[0]} has no meaning: leave it out, or use "softmax"'
            )
        if not self.margin:
            raise ValueError('kind="triplet" got margin=0, want one above 0, such as 0.2')
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


class Sparse(Strict):
    """How a text becomes weights of the words of a vocabulary, and what keeps most of them at 0."""

    pooling: Literal["max", "sum"] = "max"
    """A word's weight in a text: the largest that one of its tokens gives it, or their sum."""
    queries: Literal["encoded", "tokens"] = "encoded"
    """encoded: by the model, as passages are. tokens: each token of a query has the weight 1, and
    no model reads it (SPLADE-doc).
    """
    query_regulariser: Literal["flops", "l1"] = "flops"
    """What is added to the loss for queries. flops: the sum over words of the square of their mean
    weight. l1: the mean sum of a query's weights.
    """
    passage_regulariser: Literal["flops", "l1"] = "flops"
    """The same for passages."""
    query_weight: Annotated[float, Field(ge=0)] = 5e-5
    """The factor of the queries' regulariser, behind its warm-up."""
    passage_weight: Annotated[float, Field(ge=0)] = 3e-5
    """The factor of the passages' regulariser, behind its warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """In step t of so many both factors are multiplied by the square of t / warmup_steps."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Scores are divided by it in the loss."""
    anti_zero: Annotated[float, Field(ge=0)] = 0.0
    """The factor of a term that keeps weights from all becoming 0: one over the square of the sum
    of all queries' weights, and the same of passages.
    """

    @model_validator(mode="after")
    def _tokens_have_no_regulariser(self) -> Sparse:
        given = sorted(self.model_fields_set & {"query_regulariser", "query_weight"})
        if self.queries == "tokens" and given:
            raise ValueError(
                f'{given[0]}: got it with queries="tokens", whose weights are all 1: nothing of '
                'them can be learnt. Leave it out, or use queries="encoded"'
            )
        return self


class Late(Strict):
    """How the tokens of a text become vectors, and two lists of vectors a score (MaxSim): for each
    vector of the query the largest dot product with one of the passage, summed.
    """

    width: Positive = 128
    """Numbers of a vector: a linear layer without bias on each state; vectors have length 1."""
    expand: bool = True
    """Queries are filled up to data.query_tokens with mask tokens (of a tokenizer without one, its
    end token), whose vectors count as well: ColBERT's query augmentation. False: they are not.
    """
    attend: bool = False
    """Whether tokens attend to those mask tokens; of ColBERT they do not."""
    skip_punctuation: bool = True
    """Punctuation marks of passages have no vector."""
    skip: tuple[str, ...] = ()
    """More tokens of passages that have none, as the tokenizer's vocabulary spells them."""
    mean: bool = False
    """Scores are divided by the number of the query's vectors."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Scores are divided by it in the loss."""

    @model_validator(mode="after")
    def _mask_tokens_are_there(self) -> Late:
        if self.attend and not self.expand:
            raise ValueError("attend=true without expand has no mask tokens to attend to")
        return self


# What each form reads, of the blocks that not all forms read. "bi" has its code in the folder of
# the task, every other form in a folder within.
BLOCKS_OF_FORMS = {
    "bi": ("encoder", "loss"),
    "cross": ("cross",),
    "late": ("late", "loss"),
    "sparse": ("sparse", "loss"),
}


class Config(Experiment):
    """A retriever's experiment; without `lora` every weight trains."""

    encoded = frozenset({"form"})
    not_encoded = frozenset({"encoder", "loss", "cross", "late", "sparse", "dropout"})

    task: Literal["retriever"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    """A dense, late or sparse retriever, or a reranker."""
    form: Literal["bi", "cross", "late", "sparse"] = "bi"
    """bi: a query and a passage each become a vector (`encoder`, `loss`). cross: one model reads
    both together and scores the pair (`cross`). late: each token becomes a vector (`late`, `loss`).
    sparse: each text becomes weights of words (`sparse`, `loss`).
    """
    data: Data
    """Rows, and how they become tokens."""
    encoder: Encoder = Encoder()
    """How texts become vectors."""
    loss: Loss = Loss()
    """What is minimised, and in which pieces."""
    cross: Cross = Cross()
    """What form="cross" minimises."""
    late: Late = Late()
    """How tokens of form="late" become vectors."""
    sparse: Sparse = Sparse()
    """What form="sparse" makes of texts, and what it adds to `loss`."""
    dropout: Fraction | None = None
    """None: the base's own."""

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss reads a teacher's scores."""
        judge = self.loss.false_negatives
        is_judged = judge is not None and judge.by == "teacher"
        return is_judged or self.loss.distillation is not None

    @property
    def package(self) -> str:
        """The forms are packages of the task."""
        return self.task if self.form == "bi" else f"{self.task}.{self.form}"

    @model_validator(mode="after")
    def _the_form_has_its_blocks(self) -> Config:
        own = BLOCKS_OF_FORMS[self.form]
        readers = {
            block: form for form, blocks in reversed(BLOCKS_OF_FORMS.items()) for block in blocks
        }
        defaults = type(self).model_fields
        unread = [
            name
            for name in readers
            if name not in own and getattr(self, name) != defaults[name].default
        ]
        if "loss" not in own and self.data.scores is not None:
            unread.append("data.scores")
        if unread:
            other = readers.get(unread[0], "bi")
            raise ValueError(
                f'{unread[0]}: form="{self.form}" does not read it, form="{other}" does. Leave it '
                f'out, or say form="{other}"'
            )
        if self.form == "late" and self.loss.matryoshka is not None:
            raise ValueError(
                'loss.matryoshka: form="late" has no vector of a whole text to cut short. Leave it '
                'out, or say form="bi"'
            )
        if self.form == "sparse" and self.loss.matryoshka is not None:
            raise ValueError(
                'loss.matryoshka: form="sparse" makes weights of words, and the first of them are '
                'no vector. Leave it out, or say form="bi"'
            )
        if self.form == "cross" and self.data.passages <= self.data.positives:
            raise ValueError(
                f'form="cross" learns scores from positives beside negatives: got data.passages='
                f"{self.data.passages} with data.positives={self.data.positives}, want more "
                "passages than positives"
            )
        if self.form == "late" and self.loss.chunk_tokens is not None:
            raise ValueError(
                'loss.chunk_tokens: form="late" cuts micro-batches by texts alone. Use query_chunk '
                "and passage_chunk"
            )
        if self.form == "late" and self.data.passages == 1:
            raise ValueError(
                'form="late" is validated on each query\'s own passages: got data.passages=1, want '
                "2 or more, so that a positive has negatives (lathe mine finds some)"
            )
        return self

    @model_validator(mode="after")
    def _teachers_have_scores(self) -> Config:
        reads, is_taught = self.data.reads, self.loss.distillation is not None
        if not self.needs_teacher:
            return self
        if self.data.scores is None and reads not in ("fid", "tevatron", "dpr", "files"):
            key = "source" if self.data.format is None else "format"
            asks = "distillation" if is_taught else 'false_negatives.by="teacher"'
            raise ValueError(
                f'loss.{asks}: {key}="{reads}" has no scores of a teacher. Use "fid", or name a '
                "file of scores in data.scores"
            )
        return self

    @model_validator(mode="after")
    def _batches_can_be_made(self) -> Config:
        batches, data, train = self.data.batches, self.data, self.train
        if batches is None:
            return self
        reason = None
        if batches == Batching():
            reason = "says nothing: name source, distinct or topics, or leave it out"
        elif self.form == "cross" or self.loss.kind == "triplet" or not self.loss.contrastive:
            reason = "puts rows together that are each other's negatives, and here none is"
        elif batches.source == "one" and not data.mix:
            reason = '.source="one" is of a mix: name its sources in data.mix, or leave it out'
        elif batches.topics is not None and data.mix and batches.source == "mixed":
            reason = '.topics of a mix: a step has one topic, want source="one" besides'
        elif self.form != "bi" and batches.topics is not None and batches.topics.by == "model":
            reason = (
                f'.topics.by="model" clusters a vector of each query, and form="{self.form}" makes '
                'none: want by="words"'
            )
        elif train.bucket_steps > 1 or train.order == "as_given":
            key = "order" if train.order == "as_given" else "bucket_steps"
            reason = f" and train.{key} both say which rows a step has: leave one of them out"
        elif batches.reads_topics and data.reads not in _WITH_TOPICS:
            reason = f'.topics.by="field": the rows of {data.reads!r} say no topic. Use "words"'
        if reason is not None:
            raise ValueError(f"data.batches{'' if reason[0] in '. ' else ' '}{reason}")
        return self

    @model_validator(mode="after")
    def _layers_are_listened_to(self) -> Config:
        nested = self.loss.matryoshka
        if nested is not None and nested.layers and self.train.compile:
            raise ValueError(
                "loss.matryoshka.layers with train.compile, whose blocks are not listened to: "
                "leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _the_loss_has_its_passages(self) -> Config:
        if self.loss.kind == "triplet" and self.data.passages <= self.data.positives:
            raise ValueError(
                f'loss.kind="triplet" needs negatives: got data.passages={self.data.passages} with '
                f"data.positives={self.data.positives}, want more passages than positives"
            )
        return self
