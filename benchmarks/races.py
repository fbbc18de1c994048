"""Contestants take turns, so that the noise of the machine hits all alike: what their seconds come
to, and what such benchmarks print and are asked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch

OURS, REFERENCE = "ours", "reference"
SETTLING = 1  # turns that are not timed

Turn = Callable[[int], object]  # of a number
Seconds = dict[str, dict[str, list[float]]]  # by clock and contestant


def take_turns(turns: Mapping[str, Turn], rounds: int) -> Seconds:
    """Seconds of every turn but the first, on the clock and of all this process's threads."""
    seconds: Seconds = {clock: {name: [] for name in turns} for clock in ("wall", "cpu")}
    for number in range(SETTLING + rounds):
        for name in list(turns) if number % 2 else list(turns)[::-1]:
            _synchronise()
            wall, cpu = time.perf_counter(), time.process_time()
            turns[name](number)
            _synchronise()
            if number >= SETTLING:
                seconds["wall"][name].append(time.perf_counter() - wall)
                seconds["cpu"][name].append(time.process_time() - cpu)
    return seconds


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ratio(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float]:
    """How many times longer `slow` takes: median and quartiles over the pairs of turns."""
    ratios = [one / other for one, other in zip(slow, fast, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"median": median, "low": low, "high": high}


@dataclass
class Race:
    """The turns of ours and the reference at one kind of work."""

    name: str
    target: float
    batch: int
    seconds: Seconds = field(default_factory=dict)

    def run(self, turns: Mapping[str, Turn], rounds: int) -> Race:
        self.seconds = take_turns(turns, rounds)
        return self

    def summary(self) -> dict[str, Any]:
        """Medians of both, and how many times faster we are, with its quartiles over the pairs of
        turns.
        """
        found: dict[str, Any] = {"work": self.name, "target": self.target}
        for clock, seconds in self.seconds.items():
            times = ratio(seconds[REFERENCE], seconds[OURS])
            found[f"{clock}_ratio"] = times["median"]
            found |= {f"{clock}_low": times["low"], f"{clock}_high": times["high"]}
            found |= {
                f"{clock}_s_{name}": statistics.median(values) for name, values in seconds.items()
            }
        return found | {
            f"examples_per_s_{name}": self.batch / found[f"wall_s_{name}"]
            for name in (OURS, REFERENCE)
        }


def table(found: dict[str, Any], judge: str) -> str:
    """The races line by line. judge: the clock that the targets are held against."""
    lines = [f"{'':18s}{'':8s}{OURS:>9s}{REFERENCE:>11s}   ratio   quartiles    target"]
    for race in found["races"]:
        target = race["target"]
        for clock in ("wall", "cpu"):
            ratio = race[f"{clock}_ratio"]
            seconds = f"{race[f'{clock}_s_{OURS}']:9.3f}{race[f'{clock}_s_{REFERENCE}']:11.3f}"
            spread = f"{race[f'{clock}_low']:.2f}-{race[f'{clock}_high']:.2f}"
            met = f"{target:.1f} {'met' if ratio >= target else 'missed'}" if clock == judge else ""
            lines.append(
                f"{race['work']:18s}{clock + ' s':8s}{seconds}{ratio:8.2f}   {spread}    {met}"
            )
        rates = f"{race[f'examples_per_s_{OURS}']:9.3f}{race[f'examples_per_s_{REFERENCE}']:11.3f}"
        lines.append(f"{'':18s}{'ex./s':8s}{rates}")
    if found["peak_gib"]:
        ours, theirs = found["peak_gib"][OURS], found["peak_gib"][REFERENCE]
        verdict = f"lower {'met' if ours < theirs else 'missed'}"
        lines.append(
            f"{'peak memory':18s}{'GiB':8s}{ours:9.2f}{theirs:11.2f}{theirs / ours:8.2f}   "
            f"{'':9s}    {verdict}"
        )
    return "\n".join(lines)


def show(found: dict[str, Any], notes: Sequence[str], lines: str, *, as_json: bool) -> None:
    """Print what was found: as JSON, or its environment, the notes, and the lines of its table."""
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print(found["environment"], *notes, lines, sep="\n")


def environment(*packages: str) -> str:
    """The versions of what computes here, and the machine. packages: named besides."""
    names = ("torch", "deepspeed", "transformers", *packages)
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{versions}; {device}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s)"


def race_parser(description: str) -> argparse.ArgumentParser:
    """What every race is asked: its clock, and the form of its results."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: judge by it, on a busy machine",
    )
    made.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    return made
