"""How fast a step of DPO is against TRL 1.16's DPOTrainer at its best settings, and what memory it
needs against the same step with a second model for the reference.

    python benchmarks/preference.py [--lengths uniform mixed] [--batch 8] [--rounds 6]
    [--clock wall|cpu] [--json]

Made-up pairs on a Llama of random weights, all of one length or as mixed as people's are. TRL's
log-probabilities of the reference are precomputed, nothing is computed again, and of each step its
rows of like length share a micro-batch, whose size is the fastest of three (so is ours). It has no
padding-free batches of preferences: DPOConfig.padding_free is switched off in 1.16. Losses of all
steps must be equal, or it exits 1. They take turns, so that the noise of the machine hits both
alike; memory is measured in a new process for each. TRL runs in the environment of tests/trl_1_16,
and this program with it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # runs from a checkout that is not installed

from preference_contestants import Ours, Pairs, Trl, TwoModels
from races import OURS, REFERENCE, SETTLING, Race, environment, race_parser, show, table

from tests.trl_1_16.environment import TRL
from trainer.runtime import distributed
from trainer.telemetry.meter import Meter

RESIDENT = "ours with a second model"
CONTESTANTS: dict[str, Callable[..., Any]] = {OURS: Ours, REFERENCE: Trl, RESIDENT: TwoModels}
TARGET = 1.3  # times the reference's pairs/s
TRIED = 3  # steps of each micro-batch, of which the first is not timed
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CLOSE = 2e-4  # of losses; they are of steps that followed other roundings


def fastest(pairs: Pairs, name: str) -> Any:
    """The contestant whose micro-batch, one of three, takes the least time of the processor; it has
    trained for TRIED steps.
    """
    seconds: dict[float, Any] = {}
    for micro_batch in (pairs.batch, pairs.batch // 2, pairs.batch // 4):
        contestant = CONTESTANTS[name](pairs, micro_batch=micro_batch)
        contestant.step(0)
        begun = time.process_time()
        for number in range(1, TRIED):
            contestant.step(number)
        seconds[time.process_time() - begun] = contestant
    best = seconds.pop(min(seconds))
    for other in seconds.values():
        other.close()
    return best


def race(pairs: Pairs, rounds: int) -> dict[str, Any]:
    """What the steps of both came to. Exits 1 where a loss differs."""
    # TRL's first: it looks whether there is a process group, which ours joins
    both = {name: fastest(pairs, name) for name in (REFERENCE, OURS)}
    losses: dict[str, list[float]] = {name: [] for name in both}

    def turn(name: str) -> Callable[[int], object]:
        return lambda number: losses[name].append(both[name].step(TRIED + number))

    turns = {name: turn(name) for name in (OURS, REFERENCE)}
    found = Race(f"{pairs.lengths} lengths", TARGET, pairs.batch).run(turns, rounds).summary()
    worst = max(abs(one - other) for one, other in zip(*losses.values(), strict=True))
    if not math.isfinite(worst) or worst > CLOSE:
        raise SystemExit(f"the losses are {losses}, {worst:.1e} apart: this is different work")
    found["micro_batches"] = {name: one.micro_batch for name, one in both.items()}
    found |= {"loss_difference": worst, "padding": both[REFERENCE].share_of_padding()}
    for one in both.values():
        one.close()
    return found


def peak_gib(pairs: Pairs, name: str, micro_batch: int) -> float:
    """The most memory that this process uses while one contestant trains."""
    meter = Meter()
    contestant = CONTESTANTS[name](pairs, micro_batch=micro_batch)
    for number in range(SETTLING + 2):
        contestant.step(number)
    return meter.read("steps")["peak_gib"]


def peak_gib_of_new_process(name: str, lengths: str) -> float:
    """The same, by this command in a process of its own; all micro-batches have as many rows."""
    command = [sys.executable, __file__, *sys.argv[1:], "--only", name, "--lengths", lengths]
    # accelerate says of this process that it is a rank
    own = {key: value for key, value in os.environ.items() if key not in OF_RANKS}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=own)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])["peak_gib"]


def parser() -> argparse.ArgumentParser:
    made = race_parser("DPO, ours against TRL's DPOTrainer.")
    made.add_argument("--lengths", nargs="+", default=["uniform", "mixed"], help="of the rows")
    made.add_argument("--batch", type=int, default=8, help="pairs a step")
    made.add_argument("--rounds", type=int, default=6, help="timed turns of each")
    made.add_argument("--only", choices=tuple(CONTESTANTS), help="print the peak memory of one")
    return made


def main() -> None:
    if importlib.util.find_spec("trl") is None:  # again, by the interpreter of TRL's environment
        interpreter = str(TRL.python())
        os.execv(interpreter, [interpreter, __file__, *sys.argv[1:]])
    options = parser().parse_args()
    for name in ("DeepSpeed", "trl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    races: list[dict[str, Any]] = []
    notes: list[str] = []
    for lengths in options.lengths:
        with tempfile.TemporaryDirectory() as folder:
            size = {"batch": options.batch, "num_batches": options.rounds + SETTLING}
            pairs = Pairs(folder=Path(folder), lengths=lengths, **size).write()
            if options.only:
                gib = peak_gib(pairs, options.only, options.batch // 2)
                print(json.dumps({"peak_gib": gib}))
                distributed.shutdown()
                return
            found = race(pairs, options.rounds)
        races.append(found)
        sizes = found["micro_batches"]
        notes.append(
            f"{lengths}: losses differ by at most {found['loss_difference']:.1e}; padding in TRL's "
            f"batches {found['padding']:.1%}; pairs of a micro-batch: TRL {sizes[REFERENCE]}, ours "
            f"{sizes[OURS]}"
        )
    memory = {name: peak_gib_of_new_process(name, options.lengths[-1]) for name in CONTESTANTS}
    resident = memory.pop(RESIDENT)
    notes.append(f"peak memory of {RESIDENT}: {resident:.2f} GiB")
    load = os.getloadavg()[0]
    notes.append(f"batch {options.batch}, fp32, {options.rounds} rounds; load {load:.1f}")
    whole = {"environment": environment("trl"), "races": races, "peak_gib": memory}
    show(whole, notes, table(whole, options.clock), as_json=options.json)
    distributed.shutdown()  # which ends this process


if __name__ == "__main__":
    main()
