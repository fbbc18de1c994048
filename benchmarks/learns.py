"""Does it learn? Readers on the made-up corpus, from nothing, judged with and without what answers.

    python benchmarks/learns.py [--group NAME ...] [--out DIR]

Trains the groups *_lookup_cpu of exp_configs.py, two at a time with one thread each, and evaluates
the last reader of each on 500 held-out rows, whose names no training row holds, and on the control:
the same rows with what answers taken away. Prints one table and writes it as JSON; ends with 1 when
a bound is missed. Started again after a kill it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout

from our_commands import run

from exp_configs import EXP_GROUPS
from trainer.config.identity import exp_id
from trainer.data.lookup import CONTROL


@dataclass(frozen=True)
class Bound:
    """What the last experiment of a group must reach."""

    metric: str  # as `trainer evaluate` names it
    at_least: float  # on the held-out rows
    at_most: float  # on the control


BOUNDS = {
    "fid_lookup_cpu": Bound("em", 0.95, 0.02),
    "vera_lookup_cpu": Bound("auroc/all", 0.95, 0.55),
}


def measured(group: str, out: Path) -> dict[str, float]:
    """The metric of a group's last reader on the held-out rows and on the control; CPU minutes of
    all that this call ran.
    """
    where = ["-e", group, "-sb", out / "runs", "--cache_dir", out / "cache"]
    _, cpu_s = run("trainval.py", *where, log=out / f"{group}.log")
    values: dict[str, float] = {}
    last = exp_id(EXP_GROUPS[group][-1])
    for split in ("valid", CONTROL):
        asked = ("evaluate", *where, "--exp_id", last, "--split", split)
        text, seconds = run("-m", "trainer", *asked, log=out / f"{group}.{split}.log")
        scores = dict(line.split() for line in text.splitlines() if len(line.split()) == 2)
        values[split] = float(scores[f"{split}/{BOUNDS[group].metric}"])
        cpu_s += seconds
    return {**values, "cpu_min": cpu_s / 60}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group", action="append", choices=BOUNDS, help="given: only these")
    parser.add_argument("--out", type=Path, default=Path("out/learns"))
    given = parser.parse_args()
    groups, out = given.group or list(BOUNDS), given.out.resolve()
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(groups, pool.map(lambda group: measured(group, out), groups), strict=True))
    print("| group | metric | held-out | at least | control | at most | CPU minutes |")
    print("|---|---|---|---|---|---|---|")
    missed = False
    for group, values in found.items():
        bound = BOUNDS[group]
        missed |= values["valid"] < bound.at_least or values[CONTROL] > bound.at_most
        cells = [values["valid"], bound.at_least, values[CONTROL], bound.at_most]
        shown = " | ".join(f"{cell:.4f}" for cell in cells)
        print(f"| {group} | {bound.metric} | {shown} | {values['cpu_min']:.1f} |")
    (out / "learns.json").write_text(json.dumps(found, indent=2) + "\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
