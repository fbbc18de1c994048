"""Every metric of a task over a split, each row once, on any number of ranks.

Random state is put back afterwards, so that evaluating never changes what is trained next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from trainer.data.content import rows_of
from trainer.data.mixed.store import parts_of
from trainer.data.order import evaluation_batches
from trainer.errors import ConfigError
from trainer.metrics.intervals import RowSums
from trainer.metrics.mergeable import GatheredValues, Ratio, answer_scores, scores_by_dataset
from trainer.protocol.abilities import (
    ALONE,
    GREEDY,
    Answers,
    JudgesAnswers,
    RankPlace,
    Search,
    question_of,
    shared,
)
from trainer.runtime import distributed, rng
from trainer.runtime.batch import name_batch_when_out_of_memory, to_device

if TYPE_CHECKING:
    from trainer.data.token_store import TokenStore
    from trainer.protocol.task import Row, Task


class Scored(Protocol):
    """What can be evaluated: an engine, or a Frozen model."""

    @property
    def model(self) -> Any: ...

    def train(self) -> None: ...

    def eval(self) -> None: ...


@dataclass(frozen=True)
class Frozen:
    """A model that is only evaluated, in place of an engine."""

    model: nn.Module

    def train(self) -> None:
        """Nothing: it stays in evaluation mode."""

    def eval(self) -> None:
        self.model.eval()


@torch.no_grad()
def evaluate(
    model: Scored,
    task: Task,
    store: TokenStore,
    *,
    batch: int,
    num_rows: int | None = None,
    stop: Callable[[], None] | None = None,
    place: RankPlace = ALONE,
) -> dict[str, float]:
    """Every metric of `task.scores` over the first `num_rows` (None: all) of `store`, each once, on
    any ranks.

    Random state is put back afterwards, so evaluating never changes what is trained next. stop: is
    called before every batch, equally often on all ranks, and raises to end the evaluation. place:
    of this rank among those that share a row.
    """

    def scores(rows: list[int]) -> Mapping[str, Ratio | GatheredValues]:
        collated = shared(task, task.collate([store[row] for row in rows]), place)
        with name_batch_when_out_of_memory([collated]):
            return task.scores(model.model, to_device(collated))

    with _evaluation(model):
        how: dict[str, Any] = {"batch": batch, "stop": stop, "sharing": place.ranks}
        return _merge(scores, store, num_rows, **how)


@torch.no_grad()
def evaluate_rows(
    model: Scored,
    task: Task,
    store: TokenStore,
    *,
    batch: int,
    num_rows: int,
    stop: Callable[[], None] | None = None,
) -> tuple[dict[str, float], dict[str, RowSums]]:
    """Every metric of `task.scores` over the first `num_rows` of `store`, each once, on any ranks;
    and, of those that are means, what each row adds to them.

    Where a task has such metrics, each row is a batch of its own. batch: rows of the others.
    """
    own: list[tuple[int, dict[str, Ratio]]] = []

    def scores(rows: list[int]) -> Mapping[str, Ratio | GatheredValues]:
        collated = task.collate([store[row] for row in rows])
        with name_batch_when_out_of_memory([collated]):
            of_batch = task.scores(model.model, to_device(collated))
        means = {name: score for name, score in of_batch.items() if isinstance(score, Ratio)}
        own.append((rows[0], means))
        return of_batch

    with _evaluation(model):
        scores([0])  # on every rank: shows which metrics are means
        names = sorted(own.pop()[1])
        how: dict[str, Any] = {"batch": 1 if names else batch, "stop": stop}
        numbers = _merge(scores, store, num_rows, **how)
    table = torch.zeros(len(own), 1 + 2 * len(names), dtype=torch.float64)
    for place, (row, means) in enumerate(own):
        parts = ((means[name].num, means[name].den) if name in means else (0, 0) for name in names)
        table[place] = torch.tensor(
            [row, *(float(part) for pair in parts for part in pair)], dtype=torch.float64
        )
    sums_NM = np.zeros((num_rows, 2 * len(names)))
    for of_rank in distributed.gather_rows(table):
        # a row that a rank repeated, so that all ranks make equally many calls, is the same again
        sums_NM[of_rank[:, 0].long().numpy()] = of_rank[:, 1:].numpy()
    columns = range(0, 2 * len(names), 2)
    return numbers, {
        name: RowSums(sums_NM[:, column], sums_NM[:, column + 1])
        for name, column in zip(names, columns, strict=True)
    }


@torch.no_grad()
def pool(model: Scored, task: Task, store: TokenStore, *, name: str, batch: int) -> Tensor | None:
    """The values of the pool `name` of `task.scores` over every row of `store` exactly once, on all
    ranks; None if the task has no such pool.
    """

    def scores(rows: list[int]) -> Mapping[str, Ratio | GatheredValues]:
        of_batch = task.scores(model.model, to_device(task.collate([store[row] for row in rows])))
        return {
            key: score
            for key, score in of_batch.items()
            if key == name and isinstance(score, GatheredValues)
        }

    with _evaluation(model):
        merged = _sum_scores(scores, store.lengths, batch=batch).get(name)
    return None if merged is None else merged.values  # pyright: ignore[reportAttributeAccessIssue] (a Pool, see above)


def first_questions(task: Task, count: int | Literal["all"], split: str = "valid") -> list[Row]:
    """The first `count` rows of a validation split, as `question_of` gives them, to be answered at
    each evaluation.

    ConfigError when the task cannot answer by generation and some are wanted.
    """
    if count == 0:
        return []
    if not isinstance(task, Answers):
        raise ConfigError(
            f"--do_extra_evals or train.answers: task {task.cfg.task!r} cannot answer questions "
            "by generation. "
            "Leave it out, or give the task a method `answers` (trainer/protocol/task.py)."
        )
    rows = islice(rows_of(task, split)(), None if count == "all" else count)
    return [question_of(task, row) for row in rows]


@torch.no_grad()
def answer(
    model: Scored,
    task: Answers,
    store: TokenStore,
    questions: Sequence[Row],
    *,
    batch: int,
    search: Search = GREEDY,
    stop: Callable[[], None] | None = None,
) -> tuple[dict[str, float], list[list[str]]]:
    """Every metric of `task.answers` over `questions`, and of each data set that they name; and the
    answers to each question, the best first. On all ranks.

    questions: raw rows of the first rows of `store`; each is answered exactly once, on any number
    of ranks.
    """
    own: dict[int, list[str]] = {}

    def scores(rows: list[int]) -> Mapping[str, Ratio | GatheredValues]:
        raw = [questions[row] for row in rows]
        answered = task.answers(model.model, [store[row] for row in rows], raw, search=search)
        own.update(
            zip(rows, answered.n_best or [[text] for text in answered.predictions], strict=True)
        )
        return answered.scores

    with _evaluation(model):
        means = _merge(scores, store, len(questions), batch=batch, stop=stop)
    by_row = {row: texts for part in distributed.gather(list(own.items())) for row, texts in part}
    answers = [by_row[row] for row in range(len(questions))]
    return means | scores_by_dataset(questions, [best for best, *_ in answers]), answers


def scores_of_answer(task: object, text: str, references: Sequence[str]) -> dict[str, float]:
    """The scores of one answer, as its task or SQuAD defines them; none without references."""
    if not references:
        return {}
    if isinstance(task, JudgesAnswers):
        return task.answer_scores(text, references)
    ratios = answer_scores([text], [references])
    return {name: float(ratio.num) for name, ratio in ratios.items()}


@contextmanager
def _evaluation(model: Scored) -> Iterator[None]:
    """Evaluation mode; afterwards training mode, and random state as it was."""
    before = rng.capture()
    model.eval()
    try:
        yield
    finally:
        model.train()
        rng.restore(before)


def _merge(
    scores: Callable[[list[int]], Mapping[str, Ratio | GatheredValues]],
    store: TokenStore,
    num_rows: int | None,
    *,
    batch: int,
    stop: Callable[[], None] | None = None,
    sharing: int = 1,
) -> dict[str, float]:
    """`scores(rows)` over the first rows of a store and all ranks as numbers, each row counted
    once. Of a mix, those of each source as well, "loss_general": its rows share no batch with
    others.
    """
    lengths = store.lengths[:num_rows]
    total: dict[str, Any] = {}
    by_source: dict[str, float] = {}
    for source, rows in parts_of(store, len(lengths)):
        of_rows = slice(rows.start, rows.stop)

        def of_part(places: list[int], first: int = rows.start) -> Mapping[str, Any]:
            return scores([first + place for place in places])

        how: dict[str, Any] = {"batch": batch, "stop": stop, "sharing": sharing}
        of_source = _sum_scores(of_part, lengths[of_rows], **how)
        for name, score in of_source.items():
            total[name] = total[name] + score if name in total else score
        if source is not None:
            by_source |= {f"{name}_{source}": one for name, one in _numbers(of_source).items()}
    return _numbers(total) | by_source


def _numbers(scores: Mapping[str, Ratio | GatheredValues]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, score in scores.items():
        value = score.value()
        numbers |= value if isinstance(value, dict) else {name: value}
    return numbers


def _sum_scores(
    scores: Callable[[list[int]], Mapping[str, Ratio | GatheredValues]],
    lengths: np.ndarray,
    *,
    batch: int,
    stop: Callable[[], None] | None = None,
    sharing: int = 1,
) -> dict[str, Ratio | GatheredValues]:
    """`scores(rows)` merged over all rows and ranks; all ranks call it equally often. sharing: so
    many neighbours get the same rows.
    """
    totals: dict[str, Ratio | GatheredValues] = {}
    groups = {"world": distributed.world() // sharing, "rank": distributed.rank() // sharing}
    shares = evaluation_batches(len(lengths), lengths, batch=batch, **groups)
    for rows, counted in shares:
        if stop is not None:
            stop()
        for name, score in scores(rows.tolist()).items():
            score = score if counted else _nothing(score)
            totals[name] = totals[name] + score if name in totals else score  # pyright: ignore[reportOperatorIssue]
    for name, score in totals.items():
        if isinstance(score, Ratio):
            parts = torch.stack([score.num.double(), score.den.double()])
            totals[name] = Ratio(*distributed.total(parts))
        else:
            rows = torch.cat(distributed.gather_rows(score.values)).cpu()
            totals[name] = GatheredValues(rows, score.reduce)
    return totals


def _nothing(score: Ratio | GatheredValues) -> Ratio | GatheredValues:
    """The same kind of score over no rows. A rank adds it after a batch that it ran only because
    all ranks must make equally many calls.
    """
    if isinstance(score, Ratio):
        return Ratio(torch.zeros_like(score.num), torch.zeros_like(score.den))
    return GatheredValues(score.values[:0], score.reduce)
