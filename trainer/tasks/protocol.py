"""The Task protocol: the one page that a task author reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from trainer.evaluation.mergeable import Pool, Ratio

# A raw row: {"question": "...", "answers": [...], "context": "..."}. Messages name it by its "id",
# where it has one.
Row = dict[str, Any]
Batch = dict[str, Tensor]

# In training every row that `collate` gets has a random number under this key, (1,) int64 and not
# negative. The seed, the step and the row decide which. A task that samples (one of several
# answers, say) samples with it, so that a resumed run draws the same. Rows of an evaluation have
# none.
DRAW = "draw"
# In training every row also has its epoch under this key, (1,) int64 from 0, for a task that takes
# turns.
EPOCH = "epoch"


class Encoded(dict[str, list[int]]):
    """One encoded row: a flat list of 32-bit integers for each field, as `collate` gets them back
    from the cache.

    is_truncated: a limit cut a text of this row; `stats` and the log of a run count such rows.
    lost_labels: how many tokens of its labels a limit cut off, and of how many. A run in which more
    than `train.max_lost_labels` of all label tokens are cut off is refused; with (0, 0) everywhere
    it never is.
    """

    def __init__(
        self,
        fields: Mapping[str, list[int]],
        *,
        is_truncated: bool = False,
        lost_labels: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(fields)
        self.is_truncated, self.lost_labels = is_truncated, lost_labels


@dataclass(frozen=True)
class Text:
    """Token ids of a batch that the model reads or is asked to write, for people and for counting
    padding.
    """

    ids: Tensor  # of any shape
    is_real: Tensor | None = (
        None  # of the same shape, 0 or False where a batch was padded; None: it has no padding
    )
    in_loss: Tensor | None = (
        None  # of the same shape, True where the loss counts a token; None: no loss over tokens
    )


@dataclass(frozen=True)
class Places:
    """Where a run reads and writes. Never part of an experiment's identity."""

    data_path: Path | None
    cache_dir: Path
    savedir_base: Path


class Task(Protocol):
    """What is trained, and on what. It receives the model, never the trainer; it returns metrics,
    never logs them.
    """

    unit: ClassVar[str]  # what the loss is a mean over: "tokens", "statements", "queries"
    cfg: Any  # the experiment, an Experiment with the blocks of this task

    def __init__(self, cfg: Any, places: Places) -> None: ...

    def model(self) -> nn.Module:
        """The pretrained model, operated on, frozen where frozen, in fp32 or its checkpoint's
        dtype.

        New weights are drawn here, under a seed of their own or under the run's: it was set just
        before. Rank 0's are sent to all ranks, so they may differ until then.
        """
        ...

    def skeleton(self) -> nn.Module:
        """The same model without storage, on the meta device: for counting before anything
        is read.
        """
        ...

    def rows(self, split: str) -> Iterable[Row]:
        """Raw rows of "train" or "valid", always in the same order. DataError names file
        and line.
        """
        ...

    def encode(self, row: Row) -> Encoded:
        """Token ids of one row, cut to the limits. Pure: the result is cached on disk under a
        content id.
        """
        ...

    def encoding_id(self) -> str:
        """Names everything besides the rows that `encode` depends on: tokenizer, templates, length
        limits.
        """
        ...

    def length(self, encoded: Mapping[str, Any]) -> int:
        """How long a row is for the device: rows of like length share a micro-batch."""
        ...

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Encoded rows -> padded tensors. Pure, and run in another thread: no global random
        state.
        """
        ...

    def units(self, batch: Batch) -> Tensor:
        """() int64: how many units this micro-batch's loss is summed over."""
        ...

    def losses(self, model: nn.Module, window: Sequence[Batch]) -> Iterator[Tensor]:
        """len(window) scalars, each a SUM over its units; the loop divides by the units of all
        ranks.
        """
        ...

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Ratio | Pool]:
        """Evaluation of one batch, mergeable across batches and ranks."""
        ...

    def fingerprint(self) -> str:
        """Names the frozen weights that the trained ones belong to ("" when everything is
        trained).
        """
        ...

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the trained weights (by name, CPU tensors) as a folder that others can load.

        The same weights always give the same files, for a resumed run is compared by them.
        """
        ...

    def exported(self, folder: Path) -> nn.Module:
        """The model that `export` wrote into `folder`. ConfigError when it holds none of this
        task's.
        """
        ...

    # What people are told
    # ----------------------------------------------------------------------------------------------

    def limits(self) -> dict[str, int]:
        """The keys of the dictionary that cut texts, and their values: {"data.max_tokens": 1024}.
        {}: nothing is cut.

        When a run does not fit, the plan of its memory tries lower values of the highest one.
        """
        ...

    def specimen(self) -> Row:
        """A made-up raw row of which every text is longer than its limit: what is planned for
        without data.
        """
        ...

    def describe(self, batch: Batch) -> dict[str, Text]:
        """What the model reads of a batch, and what it is asked to write, each under a name that
        `stats` shows.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids -> text, special tokens included."""
        ...


@dataclass(frozen=True)
class Search:
    """How answers are looked for."""

    num_beams: int = 1  # 1: greedy
    num_answers: int = 1  # the n best of each row, at most num_beams; when sampled, n draws
    temperature: float | None = (
        None  # None: the most likely tokens; a number: drawn, from the sharper the lower it is
    )
    top_p: float = (
        1.0  # when drawn: from the most likely tokens that have this share of the probability
    )
    seed: int = 0  # of the draws


GREEDY = Search()


@dataclass(frozen=True)
class Answered:
    """Some rows, answered by generation."""

    predictions: list[str]  # by row, the best one
    scores: dict[str, Ratio]  # over these rows
    n_best: list[list[str]] | None = (
        None  # by row, the best first; None when one each was asked for
    )


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
    """What a task that answers may offer besides, where its rows are no questions or EM and F1 say
    little of them.
    """

    def asked(self, row: Row) -> Row:
        """`question` (the text), `answers` (the references) and perhaps `id` of a raw row, as
        `answers` takes them.
        """
        ...

    def judged(self, prediction: str, references: Sequence[str]) -> dict[str, float]:
        """Every score of one prediction against at least one reference."""
        ...


def question_of(task: object, row: Row) -> Row:
    """`question`, `answers` and, where there are such, `id` and `dataset` of a raw row of a task
    that answers.
    """
    if isinstance(task, JudgesAnswers):
        return task.asked(row)
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
    """What a task may offer besides Task: its answers lean on a context, which can be another row's
    to see how much.
    """

    def under_another_context(self, encoded: Mapping[str, Any]) -> Mapping[str, Any]:
        """An encoded evaluation row with another row's context in the place of its own. ConfigError
        without one.
        """
        ...


Side = Literal["query", "passage"]


@runtime_checkable
class Embeds(Protocol):
    """What a task may offer besides Task: it turns queries and passages into vectors whose dot
    product is relevance.
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
    """What a task may offer besides Task: how its rows are padded, for micro-batches that waste
    little.
    """

    def padded_fields(self) -> Sequence[str]:
        """The encoded fields that are padded, each by itself; `length` counts the ids of all of
        them.
        """
        ...

    def kind_field(self) -> str | None:
        """An encoded field of one number: rows with other numbers are kept apart, and those with
        the highest come first.
        """
        ...


@runtime_checkable
class Packs(Protocol):
    """What a task may offer besides Task: the rows of a micro-batch follow one another as one
    stream, without a pad.
    """

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
    """What a task may offer besides Task: its rows as they would be without limits, for the
    truncation ledger.
    """

    def untruncated(self, row: Row) -> dict[str, Uncut]:
        """Everything that `encode` cuts of a raw row, by field."""
        ...
