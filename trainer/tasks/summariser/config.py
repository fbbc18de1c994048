"""What a summarisation experiment states. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, model_validator

from trainer.config.block import Positive, Strict
from trainer.config.formats.layouts import SUMMARIES, Layout, Purpose
from trainer.config.mistakes import FP16_OF_T5
from trainer.config.origin.teacher import DistilledExperiment
from trainer.config.own_rows import OwnRows, Splits

TokensWithEnd = Annotated[int, Field(ge=2)]


class Data(OwnRows):
    """Documents with their summaries, and how both become tokens."""

    encoded = frozenset({"prefix", "source_tokens", "target_tokens"})
    not_encoded = frozenset(
        {"source", "format", "facts", "document", "summaries", "id", "sample_summaries"}
    )

    purposes: ClassVar[tuple[Purpose, ...]] = ("summary",)
    of_source: ClassVar[frozenset[str]] = OwnRows.of_source | {
        "document",
        "summaries",
        "id",
        "prefix",
        "facts",
    }
    sources_of_formats: ClassVar[tuple[str, ...]] = ("files", "datasets")

    source: Literal["files", "datasets", "stdlib_docs", "lookup"]
    """files: documents of your own below --data_path. datasets: a data set of Hugging Face
    `datasets`. stdlib_docs: the embedded corpus, the body of a docstring and its first line.
    lookup: made-up facts, and what they say of one person.
    """
    facts: Annotated[int, Field(ge=2)] = 8
    """Of "lookup": the most facts of a document; two of them are about its first person."""
    document: str = "document"
    """The column with the text; a list of texts is joined by spaces. This key and the next two are
    an older way to name columns, which also allows lists of texts and several references.
    """
    summaries: Annotated[tuple[str, ...], Field(min_length=1)] = ("summary",)
    """The columns of the references; each holds a reference, or a list of references."""
    id: str = "id"
    """The column that names a row; where there is none, its number in the file."""
    prefix: str = "summarize: "
    """Stands before every document, as T5 was trained."""
    source_tokens: TokensWithEnd = 512
    """The most tokens of prefix and document with the end token; longer ones are cut."""
    target_tokens: TokensWithEnd = 128
    """The most tokens of a summary with its end token; a longer one is cut."""
    sample_summaries: bool = False
    """Train on a random reference in every epoch; False: always on the first."""

    def layout(self) -> Layout | None:
        return SUMMARIES if self.source in ("files", "datasets") else None

    @model_validator(mode="after")
    def _source_is_somewhere(self) -> Data:
        if (self.dataset is None) == (self.source == "datasets"):
            limits = (
                "say which: a Hub id or a folder"
                if self.dataset is None
                else 'leave it out, or use "datasets"'
            )
            raise ValueError(f"source={self.source!r} with dataset={self.dataset!r}: {limits}")
        if self.source != "files" and self.files != Splits():
            raise ValueError(
                f'source={self.source!r} names no files: leave them out, or use source="files"'
            )
        usual = type(self).model_fields
        older = [
            name
            for name in ("document", "summaries", "id")
            if getattr(self, name) != usual[name].default
        ]
        if self.format is not None and older:
            raise ValueError(
                f"format={self.format!r} says what its columns are called: leave "
                f"{' and '.join(older)} out"
            )
        columns = {"document": self.document, "summary": self.summaries[0], "id": self.id}
        twice = [name for name in self.columns if columns[name] != name]
        if twice:
            raise ValueError(
                f"columns maps {' and '.join(twice)}, which data.document, data.summaries or "
                "data.id names as well: name it in one place"
            )
        return self


class Generation(Strict):
    """How summaries are written when they are scored."""

    num_beams: Positive = 1
    """1: greedy."""
    length_penalty: float = 1.0
    """A beam's score is divided by length to this power: above 1.0 favours long ones."""
    max_tokens: Positive = 128
    """The most tokens of a generated summary, with its end token."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """The least number of tokens before the end token."""
    no_repeat_ngram: Annotated[int, Field(ge=0)] = 0
    """No sequence of that many tokens twice; 0: anything goes."""

    @model_validator(mode="after")
    def _shortest_below_longest(self) -> Generation:
        if self.min_tokens >= self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is not below max_tokens={self.max_tokens}"
            )
        return self


class Rouge(Strict):
    """How summaries are scored."""

    best: Literal["each", "rouge1"] = "each"
    """The best of several references: for each kind of ROUGE on its own (rouge-score), or the one
    with the best ROUGE-1 for all kinds (SciTLDR).
    """
    stemmer: bool = True
    """Porter's, on words of more than three letters."""


class Config(DistilledExperiment):
    """A summarisation experiment; without `lora` every weight of the base trains that reads or
    writes texts.
    """

    not_encoded = frozenset({"generation", "rouge"})
    scores_vocabulary = True

    task: Literal["summariser"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    """A sequence-to-sequence summariser."""
    data: Data
    """Rows, and how they become tokens."""
    generation: Generation = Generation()
    """How summaries are generated in evaluation."""
    rouge: Rouge = Rouge()
    """How ROUGE is counted."""

    @classmethod
    def with_current_keys(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Until 2026-11-27 label_smoothing stood beside `train`, and was of this task alone."""
        train = values.get("train")
        if "label_smoothing" not in values or not isinstance(train, dict):
            return values
        current, settings = {**values}, cast("dict[str, Any]", train)
        if "label_smoothing" not in settings:
            current["train"] = {**settings, "label_smoothing": current.pop("label_smoothing")}
        return current

    @model_validator(mode="after")
    def _fits_in_fp16(self) -> Config:
        if self.train.precision == "fp16":
            raise ValueError(FP16_OF_T5)
        return self
