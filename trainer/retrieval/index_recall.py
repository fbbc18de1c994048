"""What an index finds of an exact search's hits, and how long one question takes, by setting."""

# Q questions, D width, K depth

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.retrieval.exact_search import Hits, search
from trainer.retrieval.stored_forms import floats

TARGET = 0.99
SAMPLE = 200  # questions whose exact hits are compared
TIMED = 11  # questions that are searched alone
SMALLEST = {"efSearch": 16, "nprobe": 1}  # where the doubling begins

Searcher = Callable[[np.ndarray, int, int], np.ndarray]  # questions, K, value -> (Q, K) positions


@dataclass(frozen=True)
class Knob:
    """The number by which an index visits more of its passages."""

    name: str  # efSearch or nprobe
    largest: int  # from here on everything is visited

    @property
    def series(self) -> list[int]:
        """1, 2, 4, ... for nprobe, 16, 32, ... for efSearch, and the largest."""
        value, values = SMALLEST[self.name], list[int]()
        while value < self.largest:
            values.append(value)
            value *= 2
        return [*values, self.largest]

    def effective(self, value: int, depth: int) -> int:
        """What FAISS searches with: HNSW keeps at least as many candidates as there are hits."""
        return max(value, depth) if self.name == "efSearch" else value


@dataclass(frozen=True)
class Setting:
    """A value of efSearch or nprobe, and what it does; 0 for an index that has neither."""

    value: int
    recall: float  # mean share of the exact search's K hits
    error: float  # standard error of this mean
    ms: float  # median milliseconds of one question, wall clock

    @property
    def reaches_target(self) -> bool:
        return self.recall - self.error >= TARGET


@dataclass(frozen=True)
class IndexRecall:
    """What was measured when the index was built or grown, or another setting was asked for."""

    depth: int  # K
    questions: int
    exact_ms: float  # of one question, by exact search
    settings: list[Setting]  # by rising value
    default: int  # the value that is used when none is given

    @staticmethod
    def of(values: dict[str, Any]) -> IndexRecall:
        """From JSON. KeyError or TypeError for something else."""
        settings = [Setting(**setting) for setting in values.pop("settings")]
        return IndexRecall(**values, settings=settings)

    def covers(self, depth: int, value: int | None, *, questions: int) -> bool:
        """Whether this says what a search of that depth and setting finds, and so many questions
        would tell no more.
        """
        values = {setting.value for setting in self.settings}
        is_deep = depth <= self.depth and (value is None or value in values)
        return is_deep and min(questions, SAMPLE) <= self.questions

    def setting(self, value: int | None) -> Setting:
        """The measurement of a value, or of the default."""
        wish = self.default if value is None else value
        return next(setting for setting in self.settings if setting.value == wish)

    def lines(self, name: str, knob: str | None, setting: Setting) -> Iterator[str]:
        """What a person is told of a setting."""
        with_value = f", {knob} {setting.value}" if knob else ""
        yield (
            f"{name}{with_value}: recall@{self.depth} {setting.recall:.3f} (standard error "
            f"{setting.error:.3f}) of an exact search's hits, on {self.questions} questions; one "
            f"question takes {setting.ms:.2f} ms, exactly {self.exact_ms:.2f} ms"
        )
        if setting.recall < TARGET:
            # the default is the last of its series, unless one before it reached the target
            has_larger = knob is not None and setting.value < self.default
            fix = f"Give a larger {knob}" if has_larger else "Take another --faiss"
            yield f"warning: recall@{self.depth} is below {TARGET}. {fix}, or search exactly."
        if setting.ms >= self.exact_ms:
            yield "An exact search of one question is as fast: leave --faiss out."


def measure(
    searcher: Searcher,
    passages: Sequence[np.ndarray],
    queries: np.ndarray,
    *,
    depth: int,
    knob: Knob | None,
    wish: int | None,
) -> IndexRecall:
    """The recall of a doubling series of settings, up to the first that reaches TARGET, on a sample
    of the questions.

    passages: vectors in any stored form, in the order of the index. wish: an effective value that
    is measured besides.
    """
    chosen = np.random.default_rng(0).permutation(len(queries))[:SAMPLE]
    sample_QD = queries[np.sort(chosen)]
    exact = search(sample_QD, passages, depth=depth)

    def setting_of(value: int) -> Setting:
        shares = shares_found(exact, searcher(sample_QD, depth, value), sample_QD, passages)
        error = statistics.stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 0.0
        milliseconds = _ms(lambda one: searcher(one, depth, value), sample_QD)
        return Setting(value, statistics.fmean(shares), error, milliseconds)

    settings: list[Setting] = []
    series = [0]
    if knob is not None:
        series = [*dict.fromkeys(knob.effective(value, depth) for value in knob.series)]
    for value in series:
        settings.append(setting_of(value))
        if settings[-1].reaches_target:
            break
    default = settings[-1].value
    if wish is not None and wish not in {setting.value for setting in settings}:
        settings = sorted([*settings, setting_of(wish)], key=lambda setting: setting.value)
    exact_ms = _ms(lambda one: search(one, passages, depth=depth), sample_QD[:3])
    return IndexRecall(depth, len(sample_QD), exact_ms, settings, default)


def shares_found(
    exact: Hits, rows_QK: np.ndarray, queries_QD: np.ndarray, passages: Sequence[np.ndarray]
) -> list[float]:
    """The share of each question's exact hits that are among the rows of another search.

    Which of several passages with the last hit's score are hits is a matter of their order: in the
    place of such a hit, another passage of its score counts as well.
    """
    shares: list[float] = []
    for exact_K, rows_K, query_D in zip(exact.rows, rows_QK, queries_QD, strict=True):
        wanted, rows = exact_K[exact_K >= 0], rows_K[rows_K >= 0]
        missed, others = np.setdiff1d(wanted, rows), np.setdiff1d(rows, wanted)
        num_found = len(wanted) - len(missed)
        if len(missed) and len(others):
            places = np.concatenate([wanted[-1:], missed, others])
            vectors_ND = vectors_at(passages, places)
            scores_N = vectors_ND @ query_D
            # as far as sums of D numbers in fp32 usually are from each other, in whatever order
            rounding = np.finfo(np.float32).eps * len(query_D) ** 0.5
            slack_N = rounding * (np.abs(vectors_ND) @ np.abs(query_D))
            is_tied = np.abs(scores_N - scores_N[0]) <= slack_N
            num_tied = is_tied[1 : 1 + len(missed)].sum(), is_tied[1 + len(missed) :].sum()
            num_found += int(min(num_tied))
        shares.append(num_found / max(1, len(wanted)))
    return shares


def vectors_at(passages: Sequence[np.ndarray], positions: np.ndarray) -> np.ndarray:
    """(N, D) float32 vectors of passages in any stored form, by their positions."""
    starts = np.cumsum([0, *map(len, passages)])
    shards = np.searchsorted(starts, positions, side="right") - 1
    pairs = zip(positions.tolist(), shards.tolist(), strict=True)
    rows = [floats(passages[shard][at - starts[shard] :][:1]) for at, shard in pairs]
    return np.concatenate(rows)


def _ms(searcher: Callable[[np.ndarray], object], queries: np.ndarray) -> float:
    """Median milliseconds of one question that is searched alone."""
    times: list[float] = []
    for row in range(min(TIMED, len(queries))):
        start = time.perf_counter()
        searcher(queries[row : row + 1])
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)
