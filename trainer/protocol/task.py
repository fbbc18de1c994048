"""The Task protocol: the one page that a task author reads.

What a task may offer besides stands in abilities.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from trainer.metrics.mergeable import GatheredValues, Ratio

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
# In training every row also has the number of its step under this key, (1,) int64 from 1, for a
# task whose loss changes with it. Rows that a client sends have none.
STEP = "step"


@dataclass(frozen=True)
class Cut:
    """The texts of a row that one limit cuts."""

    setting: str  # the key of the dictionary: "data.context_tokens"
    limit: int  # its tokens
    lengths: Sequence[int]  # of every text, whole
    kept: int | None = None  # the tokens that a longer text keeps; None: `limit`

    @property
    def lost(self) -> list[int]:
        """How many tokens every text loses."""
        room = self.limit if self.kept is None else self.kept
        return [length - room if length > self.limit else 0 for length in self.lengths]


class Encoded(dict[str, list[int]]):
    """One encoded row: a flat list of 32-bit integers for each field, as `collate` gets them back
    from the cache.

    is_truncated: a limit cut a text of this row; `stats` and the log of a run count such rows.
    lost_labels: how many tokens of its labels a limit cut off, and of how many. A run in which more
    than `train.max_lost_labels` of all label tokens are cut off is refused; with (0, 0) everywhere
    it never is. cuts: {"contexts": Cut(...)}, what the limits cut, by what people call it: it is
    added up and told at the start of a run. row_hash: of the raw row, equal for rows that say the
    same; controls: (field, control token) of its texts; the token store sets both.
    """

    row_hash: int = 0
    controls: Sequence[tuple[str, str]] = ()

    def __init__(
        self,
        fields: Mapping[str, list[int]],
        *,
        is_truncated: bool = False,
        lost_labels: tuple[int, int] = (0, 0),
        cuts: Mapping[str, Cut] | None = None,
    ) -> None:
        super().__init__(fields)
        self.is_truncated, self.lost_labels = is_truncated, lost_labels
        self.cuts = dict(cuts or {})


@dataclass(frozen=True)
class Text:
    """Token ids of a batch that the model reads or is asked to write.

    For people, and for counting padding.
    """

    ids: Tensor  # of any shape
    # Of the same shape, 0 or False where the batch was padded. None: it has no padding.
    is_real: Tensor | None = None
    # Of the same shape, True where the loss counts a token. None: the loss is not over tokens.
    in_loss: Tensor | None = None


@dataclass(frozen=True)
class Places:
    """Where a run reads and writes. Never part of an experiment's identity."""

    data_path: Path | None
    cache_dir: Path
    savedir_base: Path
    num_proc: int | None = None  # processes that encode rows; None: by their number


class Task(Protocol):
    """What is trained, and on what.

    It receives the model, never the trainer; it returns metrics, never logs them.
    """

    unit: ClassVar[str]  # what the loss is a mean over: "tokens", "statements", "queries"
    cfg: Any  # the experiment, an Experiment with the blocks of this task

    def __init__(self, cfg: Any, places: Places) -> None: ...

    def model(self) -> nn.Module:
        """The pretrained model, changed as the task needs it and with its frozen weights frozen, in
        fp32 or the dtype of its checkpoint.

        New weights are drawn here, under a seed of their own or under the run's: it was set just
        before. Rank 0's are sent to all ranks, so they may differ until then.
        """
        ...

    def skeleton(self) -> nn.Module:
        """The same model without storage, on the meta device: to count before anything is read."""
        ...

    def rows(self, split: str) -> Iterable[Row]:
        """Raw rows of "train" or "valid", always in the same order.

        DataError names file and line. A task with `rows_are_of_files = True` says that they follow
        from its dictionary without train, optim and schedule, from its places, and from files that
        Python opens: a start then reads them only when one of those has changed.
        """
        ...

    def encode(self, row: Row) -> Encoded:
        """Token ids of one row, cut to the limits.

        Pure: the result is cached on disk under a content id.
        """
        ...

    def encoding_id(self) -> str:
        """Names all that `encode` depends on besides rows: tokenizer, templates, length limits."""
        ...

    def earlier_encoding_ids(self) -> Sequence[str]:
        """The ids that earlier versions gave to the same encoding, () for none: a run that began
        under one of them is resumed if its rows are the same.
        """
        ...

    def length(self, encoded: Mapping[str, Any]) -> int:
        """How long a row is for the device: rows of like length share a micro-batch."""
        ...

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Encoded rows -> the tensors of a batch: a stream of real tokens, or padded rows where the
        base reads no streams.

        Pure, and run in another thread: it uses no global random state.
        """
        ...

    def units(self, batch: Batch) -> Tensor:
        """() int64: how many units this micro-batch's loss is summed over."""
        ...

    def losses(self, model: nn.Module, window: Sequence[Batch]) -> Iterator[Tensor]:
        """len(window) scalars, each a SUM over its units; the loop divides by all ranks' units."""
        ...

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Ratio | GatheredValues]:
        """Evaluation of one batch, mergeable across batches and ranks."""
        ...

    def fingerprint(self) -> str:
        """Names the frozen weights that the trained ones belong to ("" when all are trained)."""
        ...

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the trained weights (by name, CPU tensors) as a folder that others can load.

        The same weights always give the same files, for a resumed run is compared by them.
        """
        ...

    def load_export(self, folder: Path) -> nn.Module:
        """The model that `export` wrote into `folder`.

        ConfigError when it holds none of this task's.
        """
        ...

    # What people are told
    # ----------------------------------------------------------------------------------------------

    def limits(self) -> dict[str, int]:
        """The keys of the dictionary that cut texts, and their values: {"data.max_tokens": 1024}.
        {}: nothing is cut.

        When a run does not fit, the memory plan tries lower values of the largest of these limits.
        """
        ...

    def specimen(self) -> Row:
        """A made-up raw row with every text longer than its limit, to plan for without data."""
        ...

    def describe(self, batch: Batch) -> dict[str, Text]:
        """What the model reads of a batch, and what it is asked to write.

        Each is under a name that `stats` shows.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids -> text, special tokens included."""
        ...
