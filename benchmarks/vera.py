"""How fast we train and evaluate a statement verifier, against the same encoder fed with the
original's padding.

    python benchmarks/vera.py --data_path DIR [--tasks comve_a creak] [--tokenizer DIR] [--batch 16]
    [--rounds 8]
                              [--size small] [--clock wall|cpu] [--json]

DIR holds <task>/train.json as `python -m trainer convert` writes them. The original encodes 4 slots
of 128 tokens for every group in training and 11 in evaluation, whatever is in them. Its Python
loops over anchors are left out: both sides compute our vectorised form of its loss, so that only
padding differs. Prints a table of real statements/s and of seconds on the clock and of the
processor; exits 1 when the two do not give the same losses and the same logits, for then they do
not do the same work. They take turns, so that the noise of the machine hits both alike.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # runs from a checkout that is not installed

import torch
from races import OURS, REFERENCE, SETTLING, Race, environment, race_parser, show
from vera_contestants import (
    EVALUATED_SLOTS,
    LR,
    MAX_TOKENS,
    SIZES,
    TRAINED_SLOTS,
    Ours,
    Reference,
    Work,
)
from workload import SEED

from trainer.runtime import distributed

CHECKED = 2  # steps without dropout, whose losses must agree
TOLERANCE = 1e-5  # of those losses, and of the logits before them
TARGET = 4.0  # times the reference's statements/s


def check(work: Work) -> dict[str, float]:
    """By how much the logits of a batch and then the losses of the first steps differ, without
    dropout.

    Exits 1 when one of them differs by more than TOLERANCE.
    """
    ours, reference = Ours(work), Reference(work)
    logits_R, expected_R = ours.evaluate(0).float(), reference.evaluate(0)
    losses = [
        (float(ours.step(number)), float(reference.step(number))) for number in range(CHECKED)
    ]
    ours.close()
    if not all(map(math.isfinite, sum(losses, ()))):
        raise SystemExit(
            f"the losses are {losses}: in a batch so small a statement is alone in its class. "
            "Raise --batch"
        )
    worst = max(abs(one - other) for one, other in losses)
    if worst > TOLERANCE:
        raise SystemExit(
            f"the losses are {losses}, {worst:.1e} apart, more than {TOLERANCE}: this is "
            "different work"
        )
    if logits_R.shape != expected_R.shape or not torch.allclose(
        logits_R, expected_R, rtol=0, atol=TOLERANCE
    ):
        raise SystemExit(f"the logits differ: ours {logits_R}, the reference's {expected_R}")
    return {
        "loss": losses[0][0],
        "loss_difference": worst,
        "logit_difference": float((logits_R - expected_R).abs().max()),
        "num_logits": len(logits_R),
    }


def measure(work: Work, rounds: int) -> dict[str, Any]:
    """What both races came to, and the share of real tokens among those that each side reads."""
    torch.manual_seed(SEED)
    contestants = {OURS: Ours(work), REFERENCE: Reference(work)}
    steps = {name: contestant.step for name, contestant in contestants.items()}
    evaluations = {name: contestant.evaluate for name, contestant in contestants.items()}
    training = Race("training step", TARGET, work.batch).run(steps, rounds)
    evaluating = Race("evaluation", TARGET, work.batch).run(evaluations, rounds)
    races = [summary(training, work, TRAINED_SLOTS), summary(evaluating, work, EVALUATED_SLOTS)]
    for race, is_trained in zip(races, (True, False), strict=True):
        for name, contestant in contestants.items():
            race[f"real_tokens_{name}"] = contestant.share_of_real_tokens(is_trained=is_trained)
    contestants[OURS].close()
    return {"races": races}


def summary(race: Race, work: Work, slots: int) -> dict[str, Any]:
    """Medians, quartiles of the ratio, and the median of real statements/s, by contestant.

    slots: how many statements of a group are looked at.
    """
    found = race.summary()
    for name, seconds in race.seconds["wall"].items():
        counts = [work.num_statements(SETTLING + turn, slots) for turn in range(len(seconds))]
        rates = [count / turn_s for count, turn_s in zip(counts, seconds, strict=True)]
        found[f"statements_per_s_{name}"] = statistics.median(rates)
        del found[f"examples_per_s_{name}"]
    return found


def table(found: dict[str, Any], judge: str) -> str:
    """The races line by line. judge: the clock that the target is held against."""
    lines = [f"{'':15s}{'':14s}{OURS:>9s}{REFERENCE:>11s}   ratio   quartiles     target"]
    for race in found["races"]:
        for clock in ("wall", "cpu"):
            ratio, low, high = (race[f"{clock}_{part}"] for part in ("ratio", "low", "high"))
            seconds = f"{race[f'{clock}_s_{OURS}']:9.3f}{race[f'{clock}_s_{REFERENCE}']:11.3f}"
            met = f"{TARGET:.1f} {'met' if ratio >= TARGET else 'missed'}" if clock == judge else ""
            lines.append(
                f"{race['work']:15s}{clock + ' s':14s}{seconds}{ratio:8.2f}   "
                f"{f'{low:.2f}-{high:.2f}':14s}{met}"
            )
        rates = [race[f"statements_per_s_{name}"] for name in (OURS, REFERENCE)]
        lines.append(f"{'':15s}{'statements/s':14s}{rates[0]:9.2f}{rates[1]:11.2f}")
        shares = [race[f"real_tokens_{name}"] for name in (OURS, REFERENCE)]
        lines.append(f"{'':15s}{'real tokens':14s}{shares[0]:9.1%}{shares[1]:11.1%}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = race_parser("A statement verifier, ours against the original's padding.")
    made.add_argument(
        "--data_path", type=Path, required=True, help="a folder with <task>/train.json"
    )
    made.add_argument(
        "--tasks", nargs="+", default=["comve_a", "creak"], help="all mixed, as published"
    )
    made.add_argument(
        "--tokenizer",
        default="../tokenizers/t5",
        help="a folder, looked for here and in --data_path",
    )
    made.add_argument("--batch", type=int, default=16, help="groups a step")
    made.add_argument(
        "--rounds", type=int, default=8, help="timed turns of each; each takes another batch"
    )
    made.add_argument(
        "--size",
        choices=tuple(SIZES),
        default="small",
        help="of a T5 v1.1 encoder with random weights",
    )
    return made


def main() -> None:
    options = parser().parse_args()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        shape = {
            name: getattr(options, name) for name in ("data_path", "tokenizer", "size", "batch")
        }
        work = Work(
            folder=Path(folder), tasks=tuple(options.tasks), num_batches=options.rounds, **shape
        )
        report(options, work)
    distributed.shutdown()


def report(options: argparse.Namespace, work: Work) -> None:
    checked = check(replace(work, dropout=0.0))
    found = {"environment": environment(), **checked, **measure(work, options.rounds)}
    notes = [
        f"T5 v1.1 {work.size} encoder, random weights; {', '.join(work.tasks)}, batch "
        f"{work.batch} groups, fp32, "
        f"dropout {work.dropout}, Adam {LR}, no clipping; {options.rounds} rounds\n"
        f"the reference pads every group to {TRAINED_SLOTS} x {MAX_TOKENS} tokens in training, "
        f"{EVALUATED_SLOTS} x {MAX_TOKENS} in evaluation; both sides compute our vectorised form "
        "of its loss",
        f"without dropout, losses of {CHECKED} steps (the first {checked['loss']:.4f}) differ by "
        "at most "
        f"{checked['loss_difference']:.1e}, {checked['num_logits']} logits by "
        f"{checked['logit_difference']:.1e}",
    ]
    show(found, notes, table(found, options.clock), as_json=options.json)


if __name__ == "__main__":
    main()
