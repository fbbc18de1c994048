"""Does it learn? Readers on the made-up corpus, from nothing, judged with and without what answers.

    python benchmarks/learns.py [--full] [--group NAME ...] [--killed] [--out DIR]

Trains the groups *_lookup_tiny of exp_configs.py, or with --full the groups *_lookup_cpu, two at a
time with one thread each, and evaluates the last reader of each on 500 held-out rows, whose names
no training row holds, and on the control: the same rows with what answers taken away. Prints one
table and writes it as JSON; ends with 1 when a bound is missed. Started again after a kill it goes
on where it was. --killed: the training of the last reader is killed with signal 9 half way and
started again; the digest of its weights must be the one of a run without.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import sys
from collections import ChainMap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout

from log_tables import table
from our_commands import figures, run

from exp_configs import EXP_GROUPS
from trainer.config.identity import exp_id
from trainer.data.lookup import CONTROL


@dataclass(frozen=True)
class Bound:
    """What the last experiment of a group must reach."""

    metric: str  # as `trainer evaluate` names it
    at_least: float  # on the held-out rows
    at_most: float  # on the control


# What nobody reads cannot be guessed: the control of a reader is a name among 45,000. A summary of
# another document still has the words around the names. Of two facts, a name is right by chance one
# time in two.
BOUNDS = {
    "fid_lookup_tiny": Bound("em", 0.90, 0.02),
    "summarise_lookup_tiny": Bound("rougel", 0.80, 0.75),
    "crossattn_lookup_tiny": Bound("em", 0.80, 0.02),
    "vera_lookup_tiny": Bound("auroc/all", 0.90, 0.55),
    "fid_lookup_cpu": Bound("em", 0.95, 0.02),
    "summarise_lookup_cpu": Bound("rougel", 0.90, 0.75),
    "crossattn_lookup_cpu": Bound("em", 0.90, 0.02),
    "vera_lookup_cpu": Bound("auroc/all", 0.95, 0.55),
}
# Two chains of like length. FiD and the summariser, or cross-attention and the summariser, begin
# with the same experiment, FID_COPIES or LM_LOOKUP, and so are one after the other.
IN_TURN = {
    "tiny": [["fid", "summarise", "vera"], ["crossattn"]],
    "cpu": [["fid", "vera"], ["crossattn", "summarise"]],
}


def measured(group: str, out: Path, *, is_killed: bool) -> dict[str, Any]:
    """The metric of a group's last reader on the held-out rows and on the control; CPU minutes of
    all that this call ran, and the first digits of the sha256 of the reader's weights.
    """
    where = ["-e", group, "-sb", out / "runs", "--cache_dir", out / "cache"]
    values, last = EXP_GROUPS[group][-1], exp_id(EXP_GROUPS[group][-1])
    half, lines = values["train"]["steps"] // 2, out / "runs" / last / "metrics.jsonl"
    at_half = functools.partial(_has_reached, lines, half) if is_killed else None
    _, cpu_s = run("trainval.py", *where, log=out / f"{group}.log", killed_when=at_half)
    found: dict[str, Any] = {}
    for split in ("valid", CONTROL):
        asked = ("evaluate", *where, "--exp_id", last, "--split", split)
        text, seconds = run("-m", "trainer", *asked, log=out / f"{group}.{split}.log")
        found[split] = float(figures(text)[f"{split}/{BOUNDS[group].metric}"])
        cpu_s += seconds
    digest = hashlib.sha256()
    for path in sorted((out / "runs" / last / "final").glob("*.safetensors")):
        digest.update(path.read_bytes())
    return {**found, "cpu_min": cpu_s / 60, "weights": digest.hexdigest()[:12]}


def _has_reached(lines: Path, step: int) -> bool:
    """Whether a run has written about this step."""
    if not lines.is_file():
        return False
    *_, last = [0, *(json.loads(line)["step"] for line in lines.read_text().splitlines()[-2:-1])]
    return last >= step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the groups of up to half an hour each")
    parser.add_argument("--group", nargs="+", choices=BOUNDS, help="given: only these")
    parser.add_argument("--killed", action="store_true", help="kill -9 half way, and go on")
    parser.add_argument("--out", type=Path, default=Path("out/learns"))
    given = parser.parse_args()
    out, size = given.out.resolve(), "cpu" if given.full else "tiny"
    every = [[f"{name}_lookup_{of}" for name in names] for of in IN_TURN for names in IN_TURN[of]]
    wanted = given.group or [group for group in BOUNDS if group.endswith(size)]
    chains = [[group for group in chain if group in wanted] for chain in every]

    def in_turn(groups: list[str]) -> dict[str, dict[str, Any]]:
        return {group: measured(group, out, is_killed=given.killed) for group in groups}

    with ThreadPoolExecutor(2) as pool:
        found = dict(ChainMap(*pool.map(in_turn, chains)))
    missed, rows = False, list[list[str]]()
    for group, values in sorted(found.items()):
        bound = BOUNDS[group]
        missed |= values["valid"] < bound.at_least or values[CONTROL] > bound.at_most
        cells = [values["valid"], bound.at_least, values[CONTROL], bound.at_most]
        ends = [f"{values['cpu_min']:.1f}", str(values["weights"])]
        rows.append([group, bound.metric, *(f"{cell:.4f}" for cell in cells), *ends])
    heads = "group, metric, held-out, at least, control, at most, CPU minutes, weights"
    print(table(heads.split(", "), rows))
    (out / "learns.json").write_text(json.dumps(found, indent=2) + "\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
