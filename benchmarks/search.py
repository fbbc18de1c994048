"""How fast and in how much memory we search vectors exactly, against numpy, FAISS's flat index and
usearch's exact search.

    python benchmarks/search.py [--passages 1000000] [--width 768] [--queries 64] [--depth 100]
    [--rounds 5]
                                [--dtype float32|float16] [--clock wall|cpu] [--json]

Random vectors. numpy: all scores at once by matmul, argpartition, and a sort of what is left.
FAISS: IndexFlatIP, whose copy of the vectors is made before the clock starts. FAISS and usearch
take part where they are installed. They take turns, so
that the noise of the machine hits all alike; memory is measured in a new process for each, above
the vectors themselves. Prints a table, and exits 1 when one finds other scores than the others, for
then they do not do the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # runs from a checkout that is not installed

import numpy as np
import torch

from trainer.retrieval.exact_search import search

OURS, NUMPY, FAISS, USEARCH = "ours", "numpy", "faiss", "usearch"
PACKAGES = {NUMPY: "numpy", FAISS: "faiss-cpu", USEARCH: "usearch"}
SEED = 5
TOLERANCE = 1e-5  # of a score, relative to the largest one
SETTLING = 1  # turns that are not timed
GIB = 2**30

Searcher = Callable[
    [np.ndarray], tuple[np.ndarray, np.ndarray]
]  # queries -> rows and scores, best first


def ours(passages: np.ndarray, depth: int) -> Searcher:
    def run(queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = search(queries, [passages], depth=depth)
        return found.rows, found.scores

    return run


def by_numpy(passages: np.ndarray, depth: int) -> Searcher:
    def run(queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scores = queries @ passages.astype(np.float32, copy=False).T
        rows = np.argpartition(scores, -depth, axis=1)[:, -depth:]
        best = np.take_along_axis(scores, rows, axis=1)
        order = np.argsort(-best, axis=1, kind="stable")
        return np.take_along_axis(rows, order, axis=1), np.take_along_axis(best, order, axis=1)

    return run


def by_faiss(passages: np.ndarray, depth: int) -> Searcher:
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    index: Any = faiss.IndexFlatIP(passages.shape[1])
    for start in range(0, len(passages), 65_536):
        index.add(passages[start : start + 65_536].astype(np.float32, copy=False))

    def run(queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scores, rows = index.search(queries, depth)
        return rows, scores

    return run


def by_usearch(passages: np.ndarray, depth: int) -> Searcher:
    from usearch import index as usearch  # pyright: ignore[reportMissingImports]

    numbers, threads = passages.astype(np.float32, copy=False), torch.get_num_threads()

    def run(queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        how = {"exact": True, "threads": threads}
        matches = usearch.search(numbers, queries, depth, usearch.MetricKind.IP, **how)
        shape = (len(queries), depth)  # of one question, usearch gives one axis
        return matches.keys.reshape(shape), 1 - matches.distances.reshape(shape)

    return run


CONTESTANTS: dict[str, Callable[[np.ndarray, int], Searcher]] = {
    OURS: ours,
    NUMPY: by_numpy,
    FAISS: by_faiss,
    USEARCH: by_usearch,
}


def vectors(options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """(queries, passages) of the size that is asked for."""
    drawn = np.random.default_rng(SEED)
    queries = drawn.standard_normal((options.queries, options.width), dtype=np.float32)
    passages = np.empty((options.passages, options.width), dtype=options.dtype)
    for start in range(
        0, len(passages), 1024
    ):  # few at a time: peak memory is counted from here on
        block = passages[start : start + 1024]
        block[:] = drawn.standard_normal(block.shape, dtype=np.float32)
    return queries, passages


def check(searchers: dict[str, Searcher], queries: np.ndarray) -> float:
    """The largest difference of a score from ours, relative to the largest score; exits 1 beyond
    TOLERANCE.
    """
    found = {name: run(queries)[1] for name, run in searchers.items()}
    largest = float(np.abs(found[OURS]).max())
    worst = max(float(np.abs(scores - found[OURS]).max()) / largest for scores in found.values())
    if worst > TOLERANCE:
        raise SystemExit(
            f"scores are {worst:.1e} apart, more than {TOLERANCE}: this is different work"
        )
    return worst


def race(
    searchers: dict[str, Searcher], queries: np.ndarray, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every turn, by contestant and clock."""
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"wall": [], "cpu": []} for name in searchers
    }
    for number in range(SETTLING + rounds):
        for name in list(searchers) if number % 2 else list(searchers)[::-1]:
            wall, cpu = time.perf_counter(), time.process_time()
            searchers[name](queries)
            if number >= SETTLING:
                seconds[name]["wall"].append(time.perf_counter() - wall)
                seconds[name]["cpu"].append(time.process_time() - cpu)
    return seconds


def peak_gib(options: argparse.Namespace) -> float:
    """The most memory that one contestant needs above the vectors, in this process."""
    queries, passages = vectors(options)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    CONTESTANTS[options.only](passages, options.depth)(queries)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / GIB


def peak_gib_of_new_process(name: str) -> float:
    command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


def summary(
    seconds: dict[str, dict[str, list[float]]], num_queries: int
) -> dict[str, dict[str, float]]:
    """Medians, and how many times faster we are, with quartiles over the pairs of turns."""
    found: dict[str, dict[str, float]] = {}
    for name, by_clock in seconds.items():
        found[name] = {}
        for clock, values in by_clock.items():
            ratios = [
                theirs / mine for mine, theirs in zip(seconds[OURS][clock], values, strict=True)
            ]
            low, ratio, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            median = statistics.median(values)
            found[name] |= {f"{clock}_s": median, f"queries_per_{clock}_s": num_queries / median}
            found[name] |= {f"{clock}_ratio": ratio, f"{clock}_low": low, f"{clock}_high": high}
    return found


def table(found: dict[str, dict[str, float]], clock: str) -> str:
    lines = [
        f"{'':8s}{clock + ' s':>9s}{'queries/s':>11s}{'ratio':>8s}   quartiles   peak GiB above "
        "the vectors"
    ]
    for name, of_name in found.items():
        spread = f"{of_name[f'{clock}_low']:.2f}-{of_name[f'{clock}_high']:.2f}"
        seconds, rate = of_name[f"{clock}_s"], of_name[f"queries_per_{clock}_s"]
        numbers = f"{seconds:9.3f}{rate:11.1f}{of_name[f'{clock}_ratio']:8.2f}"
        lines.append(f"{name:8s}{numbers}   {spread:11s}{of_name['peak_gib']:9.2f}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Exact search, ours and theirs.")
    made.add_argument("--passages", type=int, default=1_000_000)
    made.add_argument("--width", type=int, default=768)
    made.add_argument(
        "--queries",
        type=int,
        default=64,
        help="numpy holds all scores: 4 MB each at 1,000,000 passages",
    )
    made.add_argument("--depth", type=int, default=100)
    made.add_argument("--rounds", type=int, default=5, help="timed turns of each")
    made.add_argument(
        "--dtype", choices=("float32", "float16"), default="float32", help="of the passages"
    )
    made.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: judge by it, on a busy machine",
    )
    made.add_argument(
        "--only", choices=tuple(CONTESTANTS), help="print the peak memory of one, in GiB, and stop"
    )
    made.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    return made


def main() -> None:
    options = parser().parse_args()
    if options.only:
        print(peak_gib(options))
        return
    names = [name for name in CONTESTANTS if name == OURS or find_spec(name)]
    memory = {name: peak_gib_of_new_process(name) for name in names}
    queries, passages = vectors(options)
    searchers = {name: CONTESTANTS[name](passages, options.depth) for name in names}
    worst = check(searchers, queries)
    found = summary(race(searchers, queries, options.rounds), options.queries)
    found = {name: {**of_name, "peak_gib": memory[name]} for name, of_name in found.items()}
    versions = ", ".join(
        f"{package} {version(package)}"
        for package in ("torch", *(PACKAGES[name] for name in names if name != OURS))
    )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    environment = (
        f"{versions}; {device}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s)"
    )
    if options.json:
        print(
            json.dumps(
                {"environment": environment, "difference": worst, "contestants": found}, indent=1
            )
        )
        return
    print(environment)
    print(
        f"{options.passages} x {options.width} {options.dtype}, {options.queries} queries, the "
        f"best {options.depth}; "
        f"{options.rounds} rounds; scores differ by at most {worst:.1e} of the largest"
    )
    print(table(found, options.clock))


if __name__ == "__main__":
    main()
