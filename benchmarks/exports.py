"""What every export makes in the program it is for, against what it makes here: the largest
difference of each, in one table.

    python benchmarks/exports.py [--keep FOLDER]

Tiny models of random weights, trained for two steps each, exported by the run, and loaded in one
process that cannot import `trainer` (tests/stranger.py): a loss, logits, vectors or scores of the
same input on both sides, absolute differences beside the largest number compared. Every family of
bases that cross_attention knows is there. Ends with 1 when a difference is above 1e-6 of that
number, or of 1. Half a minute on an idle core.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout

from tests import exported
from tests.bases import DECODERS
from tests.facts import write_facts
from tests.families import experiment_on
from tests.ranks import run_on_ranks

BOUND = 1e-6
LOADER = {
    "cross_attention": "AutoModelForCausalLM, trust_remote_code",
    "causal_lm": "AutoModelForCausalLM",
    "summariser": "AutoModelForSeq2SeqLM",
    "fid": "AutoModelForSeq2SeqLM, passages fused as on the card",
    "retriever": "SentenceTransformer",
    "vera": "plausibility.PlausibilityScorer",
}
FAMILIES = {f"cross_attention on {family}": family for family in DECODERS}


def main() -> int:
    """Train, export, load, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="A new folder for the runs; default: none stay.")
    keep: Path | None = parser.parse_args().keep
    with tempfile.TemporaryDirectory() as temporary:
        place = keep or Path(temporary)
        folder = write_facts(place / "facts")
        values = {name: exported.values_of(name, folder) for name in exported.NAMES}
        values |= {name: exported.values_of(name, folder) for name in exported.ADAPTED}
        for name, family in FAMILIES.items():
            values[name] = experiment_on("cross_attention", family, folder)
        (runs,) = run_on_ranks(1, exported.trained, values, folder, place / "runs")
        exports = {name: (values[name], run / "final") for name, (run, _) in runs.items()}
        sides = exported.both(exports, folder, place / "stranger")
    print("| export | loaded by | largest difference | of | largest number |")
    print("|---|---|---|---|---|")
    rows = [row(name, values[name]["task"], *sides[name]) for name in values]
    for text, _ in rows:
        print(text)
    return int(not all(is_good for _, is_good in rows))


def row(name: str, task: str, own: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, bool]:
    """A line of the table, and whether it is within its bound."""
    compared = {of: tensor for of, tensor in own.items() if of != "said"}
    found = {of: float((x - theirs[of]).abs().max()) for of, x in compared.items()}
    worst = max(found, key=lambda of: found[of])
    largest = float(compared[worst].abs().max())
    cells = [name, LOADER[task], f"{found[worst]:.1e}", worst, f"{largest:.3g}"]
    return f"| {' | '.join(cells)} |", found[worst] <= BOUND * max(1.0, largest)


if __name__ == "__main__":
    sys.exit(main())
