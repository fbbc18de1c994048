"""What a Fusion-in-Decoder experiment states. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, model_validator

from trainer.config.block import Fraction, Positive, Strict
from trainer.config.formats.layouts import QUESTIONS, Layout, Purpose
from trainer.config.origin.teacher import DistilledExperiment
from trainer.config.own_rows import OwnRows, Splits


class Data(OwnRows):
    """Questions, their retrieved passages, and how both become tokens."""

    encoded = frozenset({"corpus", "passage_tokens", "target_tokens"})
    not_encoded = frozenset(
        {
            "source",
            "format",
            "rankings",
            "contexts",
            "answer_tokens",
            "sort_by_score",
            "sample_targets",
            "clean_up_spaces",
        }
    )

    unstreamed_sources: ClassVar[tuple[str, ...]] = ("ranked",)
    purposes: ClassVar[tuple[Purpose, ...]] = ("question",)
    of_source: ClassVar[frozenset[str]] = OwnRows.of_source | {"rankings"}
    sources_of_formats: ClassVar[tuple[str, ...]] = ("files", "ranked")

    source: Literal["fid", "files", "ranked", "nq", "stdlib_docs", "lookup"]
    """files: questions of your own with answers and contexts (docs/own-data.md). fid: the same,
    named after FiD's and DPR's JSON and JSONL. ranked: questions, and a ranking as Tevatron and
    TREC write it. nq: queries.jsonl with ranked passage ids. stdlib_docs: the embedded corpus.
    lookup: made-up facts, one of which answers.
    """
    rankings: Splits = Splits()
    """Of source "ranked": the files of rankings."""
    corpus: str | None = None
    """A TSV of id, text, title, which passages given by id are read from."""
    contexts: Positive
    """The number of passages of a question: its first ones, or all if it has fewer."""
    passage_tokens: Positive = 250
    """The most tokens of question, title and text together; longer ones are cut."""
    target_tokens: Annotated[int, Field(ge=2)] | None = None
    """The most tokens of a target with its end token; a longer target loses its end."""
    answer_tokens: Annotated[int, Field(ge=2)] = 50
    """The most tokens of a generated answer; the start token counts, as published."""
    sort_by_score: bool = True
    """Sort the passages of a question by score, highest first, if all of them have one."""
    sample_targets: bool = True
    """Train on a random answer in every epoch; False: always on the first."""
    clean_up_spaces: bool = True
    """Remove spaces before punctuation in generated answers, as the published programs do."""

    def layout(self) -> Layout | None:
        return QUESTIONS if self.source in ("fid", "files", "ranked") else None

    def names_files(self) -> bool:
        return self.layout() is not None or self.source == "nq"

    @model_validator(mode="after")
    def _passages_are_somewhere(self) -> Data:
        if self.source == "ranked" and self.reads == "nq":
            raise ValueError(
                'format="nq" brings its ranking: use source="files", or leave format out'
            )
        for key, value in (("source", self.source), ("format", self.format)):
            if value in ("ranked", "nq") and self.corpus is None:
                raise ValueError(
                    f"{key}={value!r} names passages by id: say in which file they are, "
                    'for example "corpus": "corpus.tsv"'
                )
        is_embedded = self.source in ("stdlib_docs", "lookup")
        if is_embedded and (self.corpus or self.files != Splits()):
            raise ValueError(f"source={self.source!r} reads no file: leave files and corpus out")
        if self.source != "ranked" and self.rankings != Splits():
            raise ValueError(
                f'source={self.source!r} reads no rankings: leave them out, or use source="ranked"'
            )
        return self


class Reader(Strict):
    """How the T5 runs, and FiDO's two switches (docs/tasks/fid.md), which take weights from its
    decoder.
    """

    attention: Literal["padded", "bucketed", "flex"] = "bucketed"
    """padded: linear layers on real tokens, attention on passages padded to the longest. bucketed:
    the same with passages of like length together. flex: no padding at all, CUDA only, without
    dropout on attention.
    """
    dropout: Fraction | None = None
    """None: the base's own."""
    compat_cross_bias: bool = False
    """The position bias that transformers 3.0.2 gave cross-attention."""
    cross_attention_every: Positive = 1
    """FiDO: cross-attention in the last of every k blocks of the decoder only."""
    cross_attention_multi_query: bool = False
    """FiDO: all heads of cross-attention share one head of keys and values."""

    @model_validator(mode="after")
    def _the_bias_is_of_whole_attention(self) -> Reader:
        is_fido = self.cross_attention_every > 1 or self.cross_attention_multi_query
        if self.compat_cross_bias and is_fido:
            raise ValueError(
                "compat_cross_bias is of a reader whose cross-attention is whole: leave it out, or "
                "cross_attention_every and cross_attention_multi_query"
            )
        return self


class Config(DistilledExperiment):
    """A Fusion-in-Decoder experiment; without `lora` every weight of the base trains."""

    not_encoded = frozenset({"reader"})
    scores_vocabulary = True

    task: Literal["fid"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    """Fusion-in-Decoder."""
    data: Data
    """Rows, and how they become tokens."""
    reader: Reader = Reader()
    """What the model is, where it is not stock T5."""

    @classmethod
    def with_current_keys(cls, values: dict[str, Any]) -> dict[str, Any]:
        """reader.checkpoint_every counted where train.gradient_checkpointing was true."""
        reader, train = values.get("reader"), values.get("train")
        if not isinstance(reader, dict) or "checkpoint_every" not in reader:
            return values
        reader = {**cast("dict[str, Any]", reader)}
        every, current = reader.pop("checkpoint_every"), {**values, "reader": reader}
        settings = cast("dict[str, Any]", train if isinstance(train, dict) else {})
        if settings.get("gradient_checkpointing") is True:
            current["train"] = {**settings, "gradient_checkpointing": every}
        return current
