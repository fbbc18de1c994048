"""A training step of every task against the best loops that others can write for it.

    python benchmarks/best_of_hf.py --data_path DIR [--task NAME ...] [--lengths KIND ...]
        [--steps 5] [--size small] [--precision fp32] [--slow] [--malloc kept] [--out FILE]

Two opponents (opponents/losses.py), each with the knobs that a search finds fastest for these very
rows: "padded" is what transformers' Trainer and sentence-transformers do, and every way of padding
less; "unpadded" is a lean loop of torch that computes no pads either: row by row, or rows one after
the other with attention in each. DIR holds published texts, whose lengths are the kind "real".
Everybody starts from the same weights, without dropout, collates on its own clock, and has a
process of its own with the same allocator; losses of all steps must be equal, or it exits 1. CPU
seconds of one thread, step by step in turns; medians, and first and third quartiles, of theirs
divided by ours. The fastest two choices of each search race, and the faster is the opponent. The
worst row comes first. What is in --out already is not run again.

--slow: torch.compile is a knob, too, and costs a minute a choice. --quick: no search; two usual
choices of each side race, so that the ratios are upper bounds of ours.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout

import numpy as np
import torch
from opponents.contest import SETUPS, SIZES, Contest
from opponents.counting import positions, share_of_products
from opponents.knobs import FIRST, SLOW, SPACES, USUAL, Knobs, search
from opponents.losses import Opponent
from opponents.rows import KINDS
from opponents.turns import Answers, Contestant, clocked, keep_freed_memory

from tests.facts import write_facts

CLOSE = {"fp32": 2e-4, "bf16": 2e-2}  # of losses; they are of steps that followed other roundings
WANTED = {"padded": 1.10, "unpadded": 1.00}
WARM, TRIED, RACING = 1, 1, 2  # steps that warm up a choice, its timed steps, choices that race


def ours(contest: Contest) -> Answers:
    step, model = contest.ours()
    return {
        "step": clocked(step),
        "share": lambda number: share_of_products(step, number),
        "positions": lambda number: positions(model, step, number),
    }


def opponent(contest: Contest, knobs: Knobs) -> Answers:
    one = Opponent(contest.name, contest.task, contest.model(), knobs)

    def step(number: int) -> float:
        return one.step(*contest.rows(number))

    return {
        "step": clocked(step),
        "positions": lambda number: positions(one.model, step, number),
    }


def trials(contest: Contest) -> Answers:
    """A process that times one choice after the other."""

    def seconds(knobs: Knobs) -> float:
        run = opponent(contest, knobs)["step"]
        took = [run(number)[0] for number in range(WARM + TRIED)]
        return sum(took[WARM:])

    return {"seconds": seconds}


def searched(
    contest: Contest, side: str, *, is_slow: bool, is_quick: bool
) -> list[tuple[float, Knobs]]:
    """The choices of a side by their seconds, the fastest first; is_quick: two without a search."""
    if is_quick:
        return [(math.nan, knobs) for knobs in USUAL[side]]
    space = SPACES[side][contest.name] | (SLOW if is_slow else {})
    if contest.precision == "bf16":
        space = {**space, "autocast": (True,)}
    process = Contestant(lambda: trials(contest))

    def seconds_of(knobs: Knobs) -> float | str:
        try:
            return process.ask("seconds", knobs)
        except RuntimeError as error:
            return str(error)

    found = search(FIRST[side], space, seconds_of)
    process.close()
    return found


def raced(contest: Contest, options: argparse.Namespace) -> dict[str, Any]:
    """What ours and the fastest choices take on the same steps, in turns."""
    for number in range(max(WARM + TRIED, 1 + options.steps)):
        contest.rows(number)
    how = {"is_slow": options.slow, "is_quick": options.quick}
    found = {side: searched(contest, side, **how) for side in WANTED}
    runs = {"ours": Contestant(lambda: ours(contest))}
    of_side: dict[str, list[str]] = {}
    for side, choices in found.items():
        names = [f"{side}: {knobs}" for _, knobs in choices[:RACING]]
        of_side[side] = names
        for name, (_, knobs) in zip(names, choices, strict=False):
            runs[name] = Contestant(lambda knobs=knobs: opponent(contest, knobs))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    losses: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(1 + options.steps):
        for name in list(runs) if number % 2 else list(runs)[::-1]:
            took, loss = runs[name].ask("step", number)
            losses[name].append(loss)
            if number:  # the first one warms up
                seconds[name].append(took)
    result = {"task": contest.name, "lengths": contest.kind, "tried": {}}
    result["ours"] = _of_run(runs["ours"], seconds["ours"])
    for side, names in of_side.items():
        fastest = min(names, key=lambda name: float(np.median(seconds[name])))
        theirs = np.array(seconds[fastest])
        apart = np.abs(np.array(losses[fastest]) / np.array(losses["ours"]) - 1)
        result[side] = _of_run(runs[fastest], seconds[fastest])
        result[side] |= {"knobs": fastest.removeprefix(f"{side}: "), "apart": float(apart.max())}
        result[side]["times"] = _quartiles(theirs / np.array(seconds["ours"]))
        result["tried"][side] = [[str(knobs), round(s, 3)] for s, knobs in found[side]]
    result["share"] = runs["ours"].ask("share", 1)
    for run in runs.values():
        run.close()
    return result


def _of_run(run: Contestant, seconds: Sequence[float]) -> dict[str, Any]:
    own = {"seconds": _quartiles(seconds), "peak_mib": run.ask("peak_mib")}
    return {**own, "positions": run.ask("positions", 1)}


def _quartiles(values: Any) -> list[float]:
    return [round(float(x), 4) for x in np.percentile(values, (25, 50, 75))]


# The table
# --------------------------------------------------------------------------------------------------


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """The worst row first: the one that misses its targets by most."""
    lines = [
        "| task | lengths | against no pads | its settings | against pads | its settings | "
        "peak MiB: ours, no pads, pads | positions: ours, pads | products |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(row) for row in sorted(found, key=_worst)]
    return "\n".join(lines)


def _worst(row: Mapping[str, Any]) -> float:
    return min(row[side]["times"][1] / wanted for side, wanted in WANTED.items())


def _line(row: Mapping[str, Any]) -> str:
    cells = [row["task"], row["lengths"]]
    for side in ("unpadded", "padded"):
        low, middle, high = row[side]["times"]
        cells += [f"**{middle:.2f}** ({low:.2f} to {high:.2f})", row[side]["knobs"]]
    peaks = (row[side]["peak_mib"] for side in ("ours", "unpadded", "padded"))
    cells.append(", ".join(f"{peak:.0f}" for peak in peaks))
    cells.append(f"{row['ours']['positions']}, {row['padded']['positions']}")
    cells.append(f"{row['share']:.0%}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    options = parser().parse_args()
    if "real" in options.lengths and options.data_path is None:
        sys.exit("lengths of the kind real: got no --data_path, want the folder of their texts")
    torch.set_num_threads(1)
    if options.malloc == "kept":
        keep_freed_memory()
    known = json.loads(options.out.read_text()) if options.out and options.out.is_file() else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_facts(Path(temporary))
        how = {"size": options.size, "data": options.data_path, "precision": options.precision}
        for name in options.task:
            for kind in options.lengths:
                key = f"{name} {kind}"
                if key not in known:
                    known[key] = raced(Contest(name, kind, folder, **how), options)
                    print(_line(known[key]), file=sys.stderr, flush=True)
                if options.out:
                    options.out.write_text(json.dumps(known, indent=1))
    print(table(list(known.values())))
    close = CLOSE[options.precision]
    apart = [f"{k}, {s}" for k, row in known.items() for s in WANTED if row[s]["apart"] > close]
    if apart:
        sys.exit(f"losses are more than {close} apart: {'; '.join(apart)}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Ours against the best loops of others.")
    made.add_argument("--task", nargs="+", choices=list(SETUPS), default=list(SETUPS))
    made.add_argument("--lengths", nargs="+", choices=KINDS, default=list(KINDS))
    made.add_argument("--data_path", type=Path, help="published texts, for real lengths")
    made.add_argument("--steps", type=int, default=5, help="timed, of each side")
    made.add_argument("--size", choices=list(SIZES), default="small", help="of the bases")
    made.add_argument("--precision", choices=list(CLOSE), default="fp32")
    made.add_argument("--quick", action="store_true", help="two choices a side, no search")
    made.add_argument("--slow", action="store_true", help="torch.compile is a knob")
    made.add_argument("--malloc", choices=("kept", "default"), default="kept")
    made.add_argument("--out", type=Path, help="a JSON file that takes the results")
    return made


if __name__ == "__main__":
    main()
