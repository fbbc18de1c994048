"""How fast we train and answer with Fusion-in-Decoder, against stock transformers T5 used as minFiD
uses it.

    python benchmarks/fid.py --data_path DIR [--contexts 10] [--passage_tokens 250] [--batch 2]
    [--rounds 8]
                             [--size small] [--answer_tokens 9 50] [--clock wall|cpu] [--json]

DIR holds queries.jsonl and corpus.tsv (NaturalQuestions with passages ranked by BM25);
tokenizers/t5 stands beside it. Prints a table of examples/s, of seconds on the clock and of the
processor, and of peak memory; exits 1 when the two do not give the same losses and the same
answers, for then they do not do the same work. They take turns, so that the noise of the machine
hits both alike; memory is measured in a new process for each.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # runs from a checkout that is not installed

import torch
from fid_contestants import CLIP, SIZES, Ours, Reference, Work
from races import OURS, REFERENCE, SETTLING, Race, environment, race_parser, show, table
from workload import SEED

from trainer.runtime import distributed
from trainer.telemetry.meter import Meter

CONTESTANTS: dict[str, Callable[[Work], Any]] = {OURS: Ours, REFERENCE: Reference}
CHECKED = 2  # steps without dropout, whose losses must agree
TOLERANCE = 1e-5  # of those losses
TRAINING_TARGET, ANSWERING_TARGET = 1.4, 1.3  # times the reference's examples/s


# Equality
# --------------------------------------------------------------------------------------------------


def check(work: Work, answer_tokens: int) -> dict[str, float]:
    """By how much the losses of the first steps differ, without dropout, and how many answers were
    compared before.

    Exits 1 when the losses differ by more than TOLERANCE or an answer is another.
    """
    ours, reference = Ours(work), Reference(work)
    answers = [
        [
            answer
            for number in range(work.num_batches)
            for answer in contestant.answers(number, answer_tokens)
        ]
        for contestant in (ours, reference)
    ]
    losses = [(float(ours.step(number)), reference.step(number)) for number in range(CHECKED)]
    ours.close()
    worst = max(abs(one - other) for one, other in losses)
    if not (all(map(math.isfinite, sum(losses, ()))) and worst <= TOLERANCE):
        raise SystemExit(
            f"the losses are {losses}, {worst:.1e} apart, more than {TOLERANCE}: this is "
            "different work"
        )
    if answers[0] != answers[1]:
        raise SystemExit(f"the answers differ: ours {answers[0]}, the reference's {answers[1]}")
    return {"loss_difference": worst, "equal_answers": len(answers[0])}


# Memory
# --------------------------------------------------------------------------------------------------


def peak_gib(work: Work, name: str, rounds: int) -> float:
    """The most memory that this process uses while one contestant trains."""
    meter = Meter()
    contestant = CONTESTANTS[name](work)
    for number in range(SETTLING + rounds):
        contestant.step(number)
    return meter.read("steps")["peak_gib"]


def peak_gib_of_new_process(name: str) -> float:
    """The same, by this command in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--only", name, "--measure_memory"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])["peak_gib"]


# The command
# --------------------------------------------------------------------------------------------------


def measure(
    work: Work, *, rounds: int, answer_tokens: list[int]
) -> tuple[list[dict[str, Any]], float]:
    """What each race came to, and the share of padding in what the reference reads."""
    torch.manual_seed(SEED)
    contestants: dict[str, Any] = {name: make(work) for name, make in CONTESTANTS.items()}
    answering = []  # before training, for then the weights and so the answers are the same
    for count in answer_tokens:
        turns = {name: _answering(contestant, count) for name, contestant in contestants.items()}
        answering.append(
            Race(f"{count - 1} new tokens", ANSWERING_TARGET, work.batch).run(turns, rounds)
        )
    steps = {name: contestant.step for name, contestant in contestants.items()}
    training = Race("training step", TRAINING_TARGET, work.batch).run(steps, rounds)
    contestants[OURS].close()
    return [race.summary() for race in (training, *answering)], contestants[
        REFERENCE
    ].share_of_padding()


def _answering(contestant: Any, answer_tokens: int) -> Callable[[int], object]:
    return lambda number: contestant.answers(number, answer_tokens)


def parser() -> argparse.ArgumentParser:
    made = race_parser("Fusion-in-Decoder, ours against stock T5 as minFiD uses it.")
    made.add_argument(
        "--data_path", type=Path, required=True, help="a folder with queries.jsonl and corpus.tsv"
    )
    made.add_argument("--contexts", type=int, default=10, help="passages per question, at most 20")
    made.add_argument("--passage_tokens", type=int, default=250)
    made.add_argument("--batch", type=int, default=2, help="questions a step")
    made.add_argument(
        "--rounds", type=int, default=8, help="timed turns of each; each takes another batch"
    )
    made.add_argument(
        "--size", choices=tuple(SIZES), default="small", help="of a T5 with random weights"
    )
    made.add_argument(
        "--answer_tokens",
        type=int,
        nargs="+",
        default=[9, 50],
        help="at most, with the start token",
    )
    made.add_argument(
        "--only", choices=tuple(CONTESTANTS), help="one of them alone, with --measure_memory"
    )
    made.add_argument(
        "--measure_memory", action="store_true", help="print the peak of --only and stop"
    )
    return made


def main() -> None:
    options = parser().parse_args()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        names = ("data_path", "size", "contexts", "passage_tokens", "batch")
        shape = {name: getattr(options, name) for name in names}
        work = Work(folder=Path(folder), num_batches=options.rounds, **shape)
        if options.measure_memory:
            print(json.dumps({"peak_gib": peak_gib(work, options.only, min(options.rounds, 3))}))
        else:
            report(options, work)
    distributed.shutdown()


def report(options: argparse.Namespace, work: Work) -> None:
    checked = check(replace(work, dropout=0.0), max(options.answer_tokens))
    races, padding = measure(work, rounds=options.rounds, answer_tokens=options.answer_tokens)
    memory = {name: peak_gib_of_new_process(name) for name in CONTESTANTS}
    found = {
        "environment": environment(),
        **checked,
        "padding": padding,
        "races": races,
        "peak_gib": memory,
    }
    notes = [
        f"T5 {work.size}, random weights (they never end an answer, so all new tokens are made); "
        f"{work.contexts} passages of at most {work.passage_tokens} tokens, batch {work.batch}, "
        "fp32, "
        f"dropout {work.dropout}, clip {CLIP}; {options.rounds} rounds",
        f"padding in the reference's encoder: {padding:.1%}, real tokens {1 - padding:.1%}",
        f"without dropout, losses of {CHECKED} steps differ by at most "
        f"{checked['loss_difference']:.1e}, "
        f"all {checked['equal_answers']} answers are equal",
    ]
    show(found, notes, table(found, options.clock), as_json=options.json)


if __name__ == "__main__":
    main()
