"""How fast we train and answer with cross-attention layers: on prepared states, online, and as
published.

    python benchmarks/cross_attention.py --data_path DIR --tokenizer DIR [--size small] [--batch 64]
    [--micro_batch 16]
        [--micro_tokens 4096] [--with_contexts] [--padded] [--precision fp32] [--rounds 6] [--clock
        wall|cpu] [--json]

DIR holds queries.jsonl and corpus.tsv (NaturalQuestions with gold passages); the tokenizer is
StarCoder's. Three races, by turns, so that the noise of the machine hits both sides alike: a
training step on prepared states against the same model stepped by the Hugging Face Trainer
(micro-batches of --micro_batch rows in the order of the data, padded to the longest, contexts
encoded in every forward: the published way); the same against our own online encoding; and answers
against reading context and text anew for every token. Exits 1 when losses or answers differ, for
then they do not do the same work. Prints the share of padding of both.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # runs from a checkout that is not installed

import torch
from cross_attention_contestants import LAYERS, SIZES, Answers, Contestants, Work
from races import OURS, REFERENCE, Race, Turn, environment, race_parser, show, table
from workload import SEED

from trainer.runtime import distributed

CHECKED = 2  # steps without dropout, whose losses must agree
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}  # of those losses, relative
PUBLISHED_TARGET, ONLINE_TARGET, ANSWERING_TARGET, MOST_PADDING = 3.0, 1.0, 10.0, 0.10


def check(work: Work) -> dict[str, float]:
    """By how much the losses of our two ways and the reference's differ, without dropout. Exits 1
    when by too much.
    """
    all_of = Contestants(replace(work, dropout=0.0, bucket_steps=1))
    wanted = all_of.reference.token_mean(0)
    found = [float(contestant.step(0)) for contestant in (all_of.cached, all_of.online)]
    all_of.close()
    worst = max(abs(loss - wanted) / wanted for loss in found)
    if not (math.isfinite(worst) and worst <= TOLERANCES[work.precision]):
        raise SystemExit(
            f"the losses are {found}, want {wanted}: {worst:.1e} apart, this is different work"
        )
    return {"loss": wanted, "loss_difference": worst}


def measure(work: Work, rounds: int, answers: Answers) -> dict[str, Any]:
    """What the races came to, and both shares of padding."""
    answered = answering(answers, rounds)
    all_of = Contestants(work)
    cached: dict[str, Turn] = {OURS: all_of.cached.step}
    published = Race("step / published", PUBLISHED_TARGET, work.batch)
    races = [published.run({**cached, REFERENCE: all_of.reference.step}, rounds)]
    races.append(
        Race("step / online", ONLINE_TARGET, work.batch).run(
            {**cached, REFERENCE: all_of.online.step}, rounds
        )
    )
    races.append(answered)
    shares = {
        "padding_ours": all_of.cached.padding(),
        "padding_reference": all_of.reference.padding(),
    }
    shares["padding_of_our_attention"] = (
        all_of.cached.padding_of_attention() if work.packed else shares["padding_ours"]
    )
    all_of.close()
    return {
        "races": [race.summary() for race in races],
        "peak_gib": None,
        "total_ratio": total_ratio(published),
        **shares,
    }


def answering(answers: Answers, rounds: int) -> Race:
    """The race of the two ways of continuing prompts, which have to give the same tokens. Exits 1
    otherwise.
    """
    torch.manual_seed(SEED)
    if not torch.equal(answers.ours(0), answers.reference(0)):
        raise SystemExit("the answers differ: this is different work")
    turns: dict[str, Turn] = {OURS: answers.ours, REFERENCE: answers.reference}
    return Race(f"{answers.new_tokens} new tokens", ANSWERING_TARGET, answers.rows).run(
        turns, rounds
    )


def total_ratio(race: Race) -> dict[str, float]:
    """How many times faster we are over all turns together: with bucket_steps only these hold the
    same rows.
    """
    return {
        clock: sum(seconds[REFERENCE]) / sum(seconds[OURS])
        for clock, seconds in race.seconds.items()
    }


def parser() -> argparse.ArgumentParser:
    made = race_parser("Cross-attention layers: prepared states, online, and as published.")
    made.add_argument(
        "--data_path", type=Path, required=True, help="a folder with queries.jsonl and corpus.tsv"
    )
    made.add_argument(
        "--tokenizer", type=Path, required=True, help="a folder with StarCoder's tokenizer"
    )
    made.add_argument(
        "--size", choices=tuple(SIZES), default="small", help="of a GPTBigCode with random weights"
    )
    made.add_argument("--batch", type=int, default=64, help="rows a step")
    made.add_argument(
        "--micro_batch", type=int, default=16, help="rows a forward of the reference; published: 16"
    )
    made.add_argument(
        "--micro_tokens", type=int, default=4096, help="padded tokens a forward of ours"
    )
    made.add_argument(
        "--bucket_steps",
        type=int,
        default=1,
        help="of ours; above 1 steps have other rows than theirs",
    )
    made.add_argument(
        "--with_contexts", action="store_true", help="every context is predicted too, as published"
    )
    made.add_argument(
        "--padded", action="store_true", help="ours too pads rows to the longest, and packs none"
    )
    made.add_argument("--precision", choices=tuple(TOLERANCES), default="fp32")
    made.add_argument(
        "--rounds", type=int, default=6, help="timed turns of each; each takes another batch"
    )
    made.add_argument(
        "--answers", type=int, default=1, help="questions answered at a time; published: 1"
    )
    made.add_argument("--context_tokens", type=int, default=512, help="of each of them")
    made.add_argument("--new_tokens", type=int, default=30)
    made.add_argument(
        "--answers_only", action="store_true", help="no training step, which takes longest"
    )
    return made


def main() -> None:
    options = parser().parse_args()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    names = (
        "data_path",
        "tokenizer",
        "size",
        "batch",
        "micro_batch",
        "micro_tokens",
        "bucket_steps",
        "with_contexts",
    )
    with tempfile.TemporaryDirectory() as folder:
        shape = {name: getattr(options, name) for name in (*names, "precision")}
        work = Work(
            folder=Path(folder), num_batches=options.rounds, packed=not options.padded, **shape
        )
        distributed.init()
        work.prepare()
        lengths = {"context_tokens": options.context_tokens, "new_tokens": options.new_tokens}
        answers = Answers(work, rows=options.answers, **lengths)
        if options.answers_only:
            race = answering(answers, options.rounds)
            print(table({"races": [race.summary()], "peak_gib": None}, options.clock))
        else:
            report(options, work, answers)
    distributed.shutdown()


def report(options: argparse.Namespace, work: Work, answers: Answers) -> None:
    checked = check(work)
    found = {
        "environment": environment(),
        **checked,
        **measure(work, options.rounds, answers),
    }
    count, stride = LAYERS[work.size]
    ours, theirs = found["padding_ours"], found["padding_reference"]
    notes = [
        f"GPTBigCode {work.size} ({SIZES[work.size]}), random weights, {count} added layers of "
        f"stride {stride}; "
        f"{work.batch} rows a step{', contexts predicted too' if work.with_contexts else ''}, "
        f"{work.precision}; "
        f"{options.rounds} rounds",
        f"without dropout the first loss is {checked['loss']:.5f}, apart by "
        f"{checked['loss_difference']:.1e} at most",
        f"padding: ours {ours:.1%} (in the decoder's attention "
        f"{found['padding_of_our_attention']:.1%}; micro-batches "
        f"of at most {work.micro_tokens} tokens), the reference's {theirs:.1%} (of "
        f"{work.micro_batch} rows); "
        f"below {MOST_PADDING:.0%} {'met' if ours < MOST_PADDING else 'missed'}",
        f"answers are equal; {options.answers} at a time, on {options.context_tokens} tokens of "
        "context",
    ]
    ratios = ", ".join(f"{clock} {ratio:.2f}" for clock, ratio in found["total_ratio"].items())
    lines = (
        f"{table(found, options.clock)}\nstep / published, all {options.rounds} turns together "
        f"(the same rows on both sides): {ratios}"
    )
    show(found, notes, lines, as_json=options.json)


if __name__ == "__main__":
    main()
