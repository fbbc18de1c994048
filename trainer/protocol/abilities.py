"""What a task may offer besides `Task`: each ability is a protocol of its own, and a task that has
its methods has the ability.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.metrics.mergeable import Ratio
    from trainer.protocol.task import Row


@dataclass(frozen=True)
class Search:
    """How answers are looked for."""

    num_beams: int = 1  # 1: greedy
    num_answers: int = 1  # the n best of each row, at most num_beams; when sampled, n draws
    # None: the most likely tokens. A number: tokens are drawn, and the lower it is, the likelier.
    temperature: float | None = None
    # Tokens are drawn from the most likely ones that have this share of the probability.
    top_p: float = 1.0
    seed: int = 0  # of the draws


GREEDY = Search()


@dataclass(frozen=True)
class Answered:
    """Some rows, answered by generation."""

    predictions: list[str]  # by row, the best one
    scores: dict[str, Ratio]  # over these rows
    # by row, the best first; None when one each was asked for
    n_best: list[list[str]] | None = None


def scored_answers(
    n_best: list[list[str]],
    raw: Sequence[Row],
    search: Search,
    score: Callable[[Sequence[str], Sequence[Sequence[str]]], dict[str, Ratio]],
) -> Answered:
    """The rows `raw`, answered by search.num_answers texts each, the best first.

    score: of predictions and the references of each, of which there is at least one.
    """
    predictions = [best for best, *_ in n_best]
    scored: list[str] = []
    references: list[Sequence[str]] = []
    for text, row in zip(predictions, raw, strict=True):
        if row["answers"]:
            scored.append(text)
            references.append(row["answers"])
    scores = score(scored, references)
    return Answered(predictions, scores, n_best if search.num_answers > 1 else None)


def by_row(texts: Sequence[str], search: Search) -> list[list[str]]:
    """The answers of one row after the other, search.num_answers of each -> those of each row."""
    starts = range(0, len(texts), search.num_answers)
    return [list(texts[start : start + search.num_answers]) for start in starts]


@runtime_checkable
class Answers(Protocol):
    """What a task may offer besides Task: it answers rows by generation, for --do_extra_evals.

    Its raw rows hold `question` (text) and `answers` (the references, a list of texts).
    """

    def answer_tokens(self) -> int:
        """The most tokens that an answer may have, by the experiment."""
        ...

    def answers(
        self,
        model: nn.Module,
        rows: Sequence[Mapping[str, Any]],
        raw: Sequence[Row],
        *,
        search: Search = GREEDY,
        max_tokens: int | None = None,
    ) -> Answered:
        """Predictions and scores of encoded `rows`; `raw` are the same rows as text, `question` and
        `answers` only.

        max_tokens: the most tokens of an answer in the place of answer_tokens(), also where the
        experiment asks for more at least: the plan of memory generates a few, and knows what more
        cost.

        model: in evaluation mode, perhaps an engine. A forward may be a collective of all ranks,
        which answer different rows: how many are made must not depend on what is generated when
        there are several ranks. A row without references has a prediction and no score. ConfigError
        for a search that the task cannot do.
        """
        ...


@runtime_checkable
class JudgesAnswers(Protocol):
    """What a task that answers may offer besides Task.

    For rows that are no questions, or of which EM and F1 say little.
    """

    def question_row(self, row: Row) -> Row:
        """`question` (the text), `answers` (the references) and perhaps `id` of a raw row.

        They are as `answers` takes them.
        """
        ...

    def answer_scores(self, prediction: str, references: Sequence[str]) -> dict[str, float]:
        """Every score of one prediction against at least one reference."""
        ...


def question_of(task: object, row: Row) -> Row:
    """`question`, `answers` and, where there are such, `id` and `dataset` of a raw row."""
    if isinstance(task, JudgesAnswers):
        return task.question_row(row)
    return {key: row[key] for key in ("id", "dataset", "question", "answers") if key in row}


@runtime_checkable
class ScoresPassages(Protocol):
    """What a task may offer besides Task: it says how much each passage of a row was read.

    Its raw rows hold `ctxs`, the passages.
    """

    def passage_scores(
        self, model: nn.Module, rows: Sequence[Mapping[str, Any]]
    ) -> list[list[float]]:
        """One score per passage of each encoded row, higher for what was read more. model: as for
        answers().
        """
        ...


@runtime_checkable
class ReadsContexts(Protocol):
    """What a task may offer besides Task: its answers lean on a context.

    That can be another row's, to see how much they do.
    """

    def under_another_context(self, encoded: Mapping[str, Any]) -> Mapping[str, Any]:
        """An encoded evaluation row with another row's context. ConfigError without one."""
        ...


Side = Literal["query", "passage"]


@runtime_checkable
class Embeds(Protocol):
    """What a task may offer besides Task: vectors of queries and passages.

    The dot product of two is their relevance.
    """

    def ids(self, texts: Sequence[Row], *, side: Side) -> list[list[int]]:
        """Token ids as `embed` takes them, cut to the side's limit. texts: {"text"} of a query,
        {"title", "text"} of a passage (title optional).
        """
        ...

    def embed(self, model: nn.Module, rows: Sequence[Sequence[int]], *, side: Side) -> Tensor:
        """(N, D) fp32 vectors of N token rows, on the model's device. model: in evaluation mode."""
        ...


@runtime_checkable
class Shapes(Protocol):
    """What a task may offer besides Task: how its rows are padded, so that little is wasted."""

    def padded_fields(self) -> Sequence[str]:
        """The encoded fields that are padded, each by itself; `length` counts the ids of all."""
        ...

    def kind_field(self) -> str | None:
        """An encoded field of one number: rows with other numbers are kept apart, and those with
        the highest come first.
        """
        ...


@runtime_checkable
class Packs(Protocol):
    """What a task may offer besides Task: a micro-batch is one stream of rows, without pads."""

    @property
    def is_packed(self) -> bool:
        """Whether they do, as the experiment stands."""
        ...


@dataclass(frozen=True)
class Uncut:
    """A field of a row before its limit cuts it."""

    texts: list[list[int]]  # token ids, whole
    limit: int | None  # how many of each are kept, the first ones; None: all
    setting: str  # the key of the dictionary that says so
    labels_from: int | None = None  # where the labels of each begin; None: it holds none
    holds_answers: bool = False  # the `answers` of the raw row are looked for in it


@runtime_checkable
class ShowsCuts(Protocol):
    """What a task may offer besides Task: its rows without limits, for the truncation ledger."""

    def uncut_fields(self, row: Row) -> dict[str, Uncut]:
        """Everything that `encode` cuts of a raw row, by field."""
        ...


class Trained(Protocol):
    """What trainer/tasks/<task>/trained.py may offer: what becomes of a trained model."""

    def usage(self, cfg: Any, folder: Path) -> Usage:
        """How others load the export in `folder`."""
        ...

    def row_to_predict(self, task: Any, raw: Row, place: str) -> Row:
        """The row to predict that an object in our names gives, whose answers are not read.

        DataError names its place.
        """
        ...

    def predict(
        self, task: Any, model: nn.Module, rows: Sequence[Row], how: Prediction
    ) -> list[dict[str, Any]]:
        """What the model says of each row, as JSON values by name."""
        ...


@dataclass(frozen=True)
class Prediction:
    """How rows are predicted."""

    search: Search = GREEDY
    max_tokens: int | None = None  # of a text; None: what the experiment says


@dataclass(frozen=True)
class Usage:
    """How others load what a task exports, for its model card."""

    library: str  # as the Hub calls it: "transformers", "sentence-transformers", "peft"
    # (heading, Python), which loads the folder that it names FOLDER; the first is what most want
    programs: list[tuple[str, str]]
    limits: list[str]  # whole sentences
