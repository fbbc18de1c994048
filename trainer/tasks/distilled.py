"""What tasks share that learn from a teacher: it is found and compared with the student, it reads
every row once before the first step, and what it said goes into batches.
"""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from trainer import tasks
from trainer.config.origin.teacher import DistilledExperiment
from trainer.config.schema import Base, RandomBase
from trainer.config.userfile import placed
from trainer.data import vocabulary
from trainer.data.padding import flat, unflat
from trainer.data.readings.likely_tokens import (
    LikelyTokens,
    Row,
    RowsToRead,
    TeacherStore,
    TeacherValues,
)
from trainer.errors import ConfigError, DataError
from trainer.models import base_source
from trainer.models.distillation import DistillationTerms, teacher_fields
from trainer.models.head import OutputLayer
from trainer.models.weights import absent
from trainer.protocol.abilities import EncodedRows
from trainer.protocol.task import DRAW, EPOCH, STEP, Batch
from trainer.runtime import distributed
from trainer.runtime.batch import to_device
from trainer.tasks.token_task import TokenTask

D = TypeVar("D", bound=DistilledExperiment)


class DistilledTask(TokenTask[D], Generic[D]):
    """A task whose labelled tokens a teacher may read: a model of the same task.

    The task's module has `scored_states(**batch)`: (N, D) states of the labelled positions.
    """

    _lessons: TeacherValues | None = None  # what the teacher said, once it has read all rows

    # Rows
    # ----------------------------------------------------------------------------------------------

    @abstractmethod
    def length(self, encoded: Mapping[str, Any]) -> int: ...

    @property
    def draws_targets(self) -> bool:
        """Whether one of several targets of a row is drawn for each epoch."""
        return False

    def target_of(self, row: Row) -> Sequence[int] | None:
        """What is learnt of a row in its epoch; None: a row is one text, and has no others."""
        return None

    def num_labels(self, row: Row) -> int:
        """The labelled tokens of a row with one target."""
        return len(row["targets"])

    def with_one_target(self, row: Row) -> Row:
        """The row with the target that its epoch has, alone."""
        target, fields = self.target_of(row), _without_draw(row)
        return fields if target is None else {**fields, **flat([target], "targets")}

    def by_target(self, row: Row) -> Sequence[Row]:
        """The row once with each target that an epoch may have."""
        if not self.draws_targets:
            return [self.with_one_target(row)]
        rest = _without_draw(row)
        every: list[Row] = [{**rest, **flat([one], "targets")} for one in unflat(row, "targets")]
        return every or [self.with_one_target(row)]

    def with_lesson(self, batch: Batch, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """A batch of these rows with what the teacher says of its labels (teacher_fields), once it
        has read them.

        Before that rows of training have numbers that are not finite in its place, so that memory
        is planned with them and no step trains on them.
        """
        how = self.cfg.teacher
        if self._lessons is not None:
            values = [self._values(row) for row in rows]
        elif how is not None and self._export is None and DRAW in rows[0]:
            values = [_no_values(len(batch["scored"]), self._top_k, self._dtype_on_disk)]
        else:
            return batch
        ids, logps, rest = (torch.cat(parts) for parts in zip(*values, strict=True))
        return {**batch, **teacher_fields(ids, logps, rest)}

    def _values(self, row: Row) -> LikelyTokens:
        assert self._lessons is not None
        values = self._lessons.of(self.with_one_target(row))
        if values is None:
            raise DataError(
                f"a row of {self.num_labels(row)} labels was not read by the teacher: the rows "
                "have changed since. Start again, with another teacher.store if it is given."
            )
        return values

    # The teacher
    # ----------------------------------------------------------------------------------------------

    @cached_property
    def distillation(self) -> DistillationTerms | None:
        """How the loss learns from the teacher; None without one, and for a trained model, which
        needs it no more.
        """
        how = self.cfg.teacher
        if how is None or self._export is not None:
            return None
        sizes = [_vocabulary_of(task) for task in (self, self._teacher)]
        return DistillationTerms(how.divergence, how.weight, how.temperature, min(sizes))

    def task_of_teacher(self) -> Any:
        """The task of the teacher, which reads the same rows. ConfigError when it is a model of
        another kind, or of another tokenizer.
        """
        return self._teacher

    @cached_property
    def _teacher(self) -> Any:
        how = self.cfg.teacher
        assert how is not None, "the caller has looked"
        base, own = how.base, self.cfg.tokenizer
        if own is None:
            source = base_source.resolve(self.cfg.base, self.places)
            assert isinstance(source, str), "a random base brings no tokenizer"
            own = source
        train = {"base_bits": None, "gradient_checkpointing": False, "neftune_alpha": None}
        changes = {
            **{"base": base, "tokenizer": own, "teacher": None},
            **dict.fromkeys(("lora", "init_from", "continues", "metrics", "judge")),
            "train": self.cfg.train.model_copy(update={**train, "freeze": ()}),
        }
        with _refusals():
            task: Any = tasks.load(self.cfg.model_copy(update=changes), self.places)
            task.read_as_trained()
            task.skeleton()
            self._refuse_other_tokens(base)
        return task

    def read_as_trained(self) -> None:
        """Take from the base, which is a teacher, what a key says otherwise of the student."""

    def teacher_fingerprint(self) -> str | None:
        """Names the teacher's weights; None without a teacher. ConfigError when it cannot teach
        this student.
        """
        if self.cfg.teacher is None:
            return None
        return base_source.fingerprint(self._teacher.cfg.base, self.places)

    def _refuse_other_tokens(self, base: Base) -> None:
        """ConfigError when the teacher's tokenizer gives tokens other ids. Weights without a
        tokenizer are taken to be of the student's.
        """
        source = base_source.resolve(base, self.places)
        if isinstance(source, RandomBase) or not _has_tokenizer(source):
            return
        read = vocabulary.load_tokenizer(
            source, data_path=None, cache_dir=self.places.cache_dir, is_of_base=True
        )
        theirs, ours = read.get_vocab(), self.tokenizer.get_vocab()
        tokens = sorted(theirs.keys() | ours.keys())
        other = [token for token in tokens if theirs.get(token) != ours.get(token)]
        if other:
            first = other[0]
            raise ConfigError(
                f"its tokenizer ({source}) gives {len(other):,} of {len(tokens):,} tokens another "
                f"id than the student's: got {theirs.get(first)} for {first!r}, want "
                f"{ours.get(first)}. Its probabilities would be of other tokens. Name a teacher of "
                "the same tokenizer, such as a larger model of the same family."
            )

    @property
    def _top_k(self) -> int:
        assert self.cfg.teacher is not None
        assert self.distillation is not None
        return min(self.cfg.teacher.top_k, self.distillation.vocabulary)

    @property
    def _dtype_on_disk(self) -> torch.dtype:
        """Of log-probabilities: in 16 bits where the teacher computes them in so many."""
        return torch.float32 if self.cfg.train.precision == "fp32" else torch.float16

    def read_teacher(self, stores: Mapping[str, EncodedRows], *, batch: int) -> None:
        """Have the teacher read the rows of these splits, as far as nobody has stored it yet: from
        now on collate() knows what it says. Its memory is free afterwards. A collective.
        """
        if self.cfg.teacher is None:
            return
        self._lessons = None
        readings = {
            split: self._reading(rows, draws=self.draws_targets and split == "train")
            for split, rows in stores.items()
        }
        store, model = self._teacher_store(), cache(self._teacher_model)

        def compute(rows: Sequence[Row]) -> list[LikelyTokens]:
            values = self.likeliest(model(), to_device(self._teacher.collate(rows)))
            sizes = [self.num_labels(row) for row in rows]
            ids, logps, rest = (part.cpu().split(sizes) for part in values)
            return list(zip(ids, logps, rest, strict=True))

        for split, reading in readings.items():
            store.fill(split, reading, compute, batch=batch)
        model.cache_clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._lessons = store.read(readings)

    def likeliest(self, model: nn.Module, batch: Batch) -> LikelyTokens:
        """What the teacher's model says of the N labels of a batch of its task, on its device."""
        assert self.distillation is not None
        with torch.no_grad():
            states_ND: Tensor = model.scored_states(**batch)  # pyright: ignore
            layer = OutputLayer(model.get_submodule(self.base_name))
            return layer.likeliest(states_ND, self.distillation, self._top_k)

    def _reading(self, rows: EncodedRows, *, draws: bool) -> RowsToRead:
        every = self.by_target if draws else lambda row: [self.with_one_target(row)]
        return RowsToRead(rows, every, self.num_labels, draws)

    def _teacher_model(self) -> nn.Module:
        with _refusals():
            model: nn.Module = self._teacher.model()
            absent.refuse(model, is_trained=False)
        return model.to(distributed.device()).eval()

    def _teacher_store(self) -> TeacherStore:
        how, distillation = self.cfg.teacher, self.distillation
        assert how is not None
        assert distillation is not None
        identity = {
            "task": self.cfg.task,
            "teacher": self.teacher_fingerprint(),
            "precision": self.cfg.train.precision,
            "top_k": self._top_k,
            "temperature": how.temperature,
            "vocabulary": distillation.vocabulary,
        }
        root = self.places.cache_dir / "teacher" if how.store is None else Path(placed(how.store))
        named = how.store is not None
        return TeacherStore(root, named, identity, self._top_k, self._dtype_on_disk)


@contextmanager
def _refusals() -> Iterator[None]:
    """Inside, a ConfigError says that it is of the teacher."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"teacher: {error}") from error


def _without_draw(row: Row) -> dict[str, Any]:
    return {name: values for name, values in row.items() if name not in (DRAW, EPOCH, STEP)}


def _no_values(count: int, k: int, dtype: torch.dtype) -> LikelyTokens:
    """In place of what a teacher has not said yet, of so many labels."""
    ids = torch.arange(k, dtype=torch.int32).expand(count, k)
    return ids, torch.full((count, k), torch.nan, dtype=dtype), torch.full((count,), torch.nan)


def _vocabulary_of(task: TokenTask[Any]) -> int:
    """The number of ids that a task's base has logits for; some may stand for no token."""
    config = base_source.config_of(task.cfg.base, task.places)
    return int(config.get_text_config().vocab_size)


def _has_tokenizer(source: str) -> bool:
    folder = Path(source)
    if not folder.is_dir():
        return True  # of a Hub id it is read
    return any((folder / name).is_file() for name in vocabulary.VOCABULARIES)
