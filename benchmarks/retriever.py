"""What GradCache costs a dense retriever, how much memory it takes, and how fast it is beside the
published algorithm.

    python benchmarks/retriever.py --data_path DIR --tokenizer DIR [--size small] [--batch 64]
    [--micro_batch 16]
                                   [--passages 2] [--published_chunks 4 32] [--rounds 6] [--memory
                                   16 32 64 128]
                                   [--clock wall|cpu] [--json]

DIR holds queries.jsonl and corpus.tsv (NaturalQuestions with gold passages and BM25's); the
tokenizer is BERT's. Five ways of the same step: ours directly, --batch queries at once; ours with
GradCache over micro-batches of like length, and over chunks of one micro-batch, which pad as the
direct step does; and GradCache in plain torch, every text padded to its limit, with the published
chunks and with ours. They take turns, so that the noise of the machine hits all alike; memory is
measured in a new process for each size. Prints tables, and exits 1 when losses differ, for then
they do not do the same work.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # runs from a checkout that is not installed

import psutil
import torch
from races import environment, race_parser, ratio, take_turns
from retriever_contestants import CLIP, LR, SIZES, Contestant, Maker, Ours, Reference, Work
from torch.utils.flop_counter import FlopCounterMode
from workload import SEED

from trainer.runtime import distributed
from trainer.telemetry.meter import Meter

DIRECT, WINDOW, CHUNKS = "direct", "micro-batches", "chunks"
CHECKED = 2  # steps without dropout, whose losses must agree
TOLERANCE = (
    1e-5  # of those losses, relative: AdamW makes a whole step of what is noise in a gradient
)
MOST_COST, LEAST_GAIN, MOST_GROWTH = 1.30, 1.2, 1.1

# Makes glibc give freed tensors back at once. By itself it learns to keep them, and a process then
# holds up to twice of what is alive (man mallopt, M_MMAP_THRESHOLD). Without meaning on a GPU.
RETURNING = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}


def contestants(options: argparse.Namespace) -> dict[str, Maker]:
    """Who takes part, the direct step first; the last two are the published algorithm."""
    micro, passages = options.micro_batch, options.micro_batch * options.passages
    chunks = {"query_chunk": micro, "passage_chunk": passages}
    query, passage = options.published_chunks
    return {
        DIRECT: lambda work: Ours(work, work.batch),
        WINDOW: lambda work: Ours(work, micro),
        CHUNKS: lambda work: Ours(work, work.batch, **chunks),
        f"published {query}/{passage}": lambda work: Reference(work, query, passage),
        f"published {micro}/{passages}": lambda work: Reference(work, micro, passages),
    }


def check(work: Work, makers: dict[str, Maker]) -> dict[str, float]:
    """The first loss, and by how much those of the first steps differ, without dropout; exits 1
    beyond TOLERANCE.
    """
    torch.manual_seed(SEED)
    everyone = [make(work) for make in makers.values()]
    worst, first = 0.0, 0.0
    for number in range(CHECKED):
        losses = [contestant.step(number) for contestant in everyone]
        worst, first = max(worst, (max(losses) - min(losses)) / max(losses)), first or losses[0]
        if not (all(map(math.isfinite, losses)) and worst <= TOLERANCE):
            raise SystemExit(
                f"step {number}: the losses are {losses}, {worst:.1e} apart: this is different work"
            )
    for contestant in everyone:
        contestant.close()
    return {"loss": first, "loss_difference": worst}


# Time
# --------------------------------------------------------------------------------------------------


def flops(contestant: Contestant) -> int:
    """Of the matrix products of one step, which no other process on the machine disturbs."""
    with FlopCounterMode(display=False) as counter:
        contestant.step(0)
    return counter.get_total_flops()


def measure(work: Work, makers: dict[str, Maker], rounds: int) -> dict[str, Any]:
    """Median seconds of each contestant, its share of padding, its ratios by the clock to the
    direct step and to ours, and that of its arithmetic to the direct step's.
    """
    everyone = {name: make(work) for name, make in makers.items()}
    torch.manual_seed(SEED)
    counted = {name: flops(contestant) for name, contestant in everyone.items()}
    steps = {name: contestant.step for name, contestant in everyone.items()}
    seconds = take_turns(steps, rounds)
    found: dict[str, Any] = {}
    for name, contestant in everyone.items():
        found[name] = {"padding": contestant.padding(), "flops": counted[name] / counted[DIRECT]}
        for clock, of_clock in seconds.items():
            found[name] |= {
                f"{clock}_s": statistics.median(of_clock[name]),
                f"{clock}_over_{DIRECT}": ratio(of_clock[name], of_clock[DIRECT]),
                f"{clock}_over_{WINDOW}": ratio(of_clock[name], of_clock[WINDOW]),
            }
        contestant.close()
    return found


# Memory
# --------------------------------------------------------------------------------------------------


def peak_mib(work: Work, make: Maker) -> float:
    """The most memory of a step above what was held before it, in this process; the first step
    makes the gradients and the optimizer's state, three times the weights, which is in it.
    """
    contestant = make(work)
    meter = Meter()
    has_gpu = torch.cuda.is_available()
    held = torch.cuda.memory_allocated() if has_gpu else psutil.Process().memory_info().rss
    contestant.step(0)
    peak = meter.read("steps")["peak_gib"] * 2**30 - held
    contestant.close()
    return peak / 2**20


def peak_mib_of_new_process(name: str, batch: int) -> float:
    command = [sys.executable, __file__, *sys.argv[1:], "--only", name, "--batch", str(batch)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | RETURNING
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


# The command
# --------------------------------------------------------------------------------------------------


def table(found: dict[str, Any], batch: int, clock: str) -> str:
    """A line for each contestant. clock: the one that the targets are held against."""
    columns = f"{'wall s':>8s}{'cpu s':>8s}{'queries/s':>11s}{'padding':>9s}{'FLOPs':>7s}"
    lines = [f"{'':18s}{columns}   / direct (quartiles)   / ours"]
    for name, of_name in found.items():
        numbers = (
            f"{of_name['wall_s']:8.3f}{of_name['cpu_s']:8.3f}{batch / of_name[f'{clock}_s']:11.2f}"
        )
        ratios = [of_name[f"{clock}_over_{other}"] for other in (DIRECT, WINDOW)]
        shown = "   ".join(f"{r['median']:5.2f} ({r['low']:.2f}-{r['high']:.2f})" for r in ratios)
        lines.append(
            f"{name:18s}{numbers}{of_name['padding']:9.1%}{of_name['flops']:7.2f}   {shown}"
        )
    *ours, published, _ = found
    for name in ours[1:]:
        cost = found[name][f"{clock}_over_{DIRECT}"]["median"]
        lines.append(
            f"GradCache over {name} costs {cost:.2f} of the direct step, at most "
            f"{_against(cost, MOST_COST)}"
        )
    gain = found[published][f"{clock}_over_{WINDOW}"]["median"]
    lines.append(
        f"{gain:.2f} times the queries/s of {published}, at least "
        f"{_against(gain, LEAST_GAIN, is_least=True)}"
    )
    return "\n".join(lines)


def _against(value: float, target: float, *, is_least: bool = False) -> str:
    is_met = value >= target if is_least else value <= target
    return f"{target:.2f} {'met' if is_met else 'missed'}"


def memory_table(found: dict[str, dict[int, float]]) -> str:
    """Peak memory by contestant and batch, and how much the largest batch takes of the smallest
    one's.
    """
    lines = [
        f"{'peak MiB at batch':18s}"
        + "".join(f"{batch:>8}" for batch in next(iter(found.values())))
    ]
    for name, of_name in found.items():
        smallest, *_, largest = of_name.values()
        growth = f"   x {largest / smallest:.2f}"
        verdict = (
            f", flat (at most {_against(largest / smallest, MOST_GROWTH)})"
            if name != DIRECT
            else ""
        )
        lines.append(
            f"{name:18s}"
            + "".join(f"{value:8.0f}" for value in of_name.values())
            + growth
            + verdict
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = race_parser("A dense retriever: GradCache's cost and memory, and as published.")
    made.add_argument(
        "--data_path", type=Path, required=True, help="a folder with queries.jsonl and corpus.tsv"
    )
    made.add_argument(
        "--tokenizer", type=Path, required=True, help="a folder with BERT's tokenizer"
    )
    made.add_argument(
        "--size", choices=tuple(SIZES), default="small", help="of a BERT with random weights"
    )
    made.add_argument("--batch", type=int, default=64, help="queries a step")
    made.add_argument(
        "--micro_batch", type=int, default=16, help="queries at a time, with GradCache"
    )
    made.add_argument("--passages", type=int, default=2, help="of a query")
    made.add_argument("--query_tokens", type=int, default=32)
    made.add_argument("--passage_tokens", type=int, default=156)
    made.add_argument(
        "--published_chunks",
        type=int,
        nargs=2,
        default=[4, 32],
        help="queries and passages at a time",
    )
    made.add_argument(
        "--rounds", type=int, default=6, help="timed turns of each; each takes another batch"
    )
    made.add_argument(
        "--memory",
        type=int,
        nargs="*",
        default=[16, 32, 64, 128],
        help="queries a step; none: left out",
    )
    made.add_argument(
        "--only", choices=(DIRECT, WINDOW, CHUNKS), help="print the peak memory of one, and stop"
    )
    return made


def main() -> None:
    options = parser().parse_args()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    makers = contestants(options)
    names = (
        "data_path",
        "tokenizer",
        "size",
        "batch",
        "passages",
        "query_tokens",
        "passage_tokens",
    )
    with tempfile.TemporaryDirectory() as folder:
        shape = {name: getattr(options, name) for name in names}
        batches = 1 if options.only else max(options.rounds, CHECKED)
        work = Work(folder=Path(folder), num_batches=batches, **shape)
        if options.only:
            print(peak_mib(work, makers[options.only]))
        else:
            report(options, work, makers)
    distributed.shutdown()


def report(options: argparse.Namespace, work: Work, makers: dict[str, Maker]) -> None:
    checked = check(replace(work, dropout=0.0), makers)
    found = {
        "environment": environment(),
        **checked,
        "steps": measure(work, makers, options.rounds),
    }
    memory = {
        name: {batch: peak_mib_of_new_process(name, batch) for batch in options.memory}
        for name in (DIRECT, WINDOW, CHUNKS)
    }
    if options.json:
        print(json.dumps({**found, "peak_mib": memory}, indent=1))
        return
    print(found["environment"])
    print(
        f"BERT {work.size} {SIZES[work.size]}, random weights, fp32, dropout {work.dropout}; "
        f"{work.batch} queries of "
        f"at most {work.query_tokens} tokens, {work.passages} passages each of "
        f"{work.passage_tokens}; AdamW {LR}, clip "
        f"{CLIP}; ours {options.micro_batch} queries at a time; {options.rounds} rounds"
    )
    print(
        f"without dropout, losses of {CHECKED} steps (the first {checked['loss']:.4f}) differ by "
        "at most "
        f"{checked['loss_difference']:.1e} of them"
    )
    print(table(found["steps"], work.batch, options.clock))
    if options.memory:
        print(memory_table(memory))


if __name__ == "__main__":
    main()
