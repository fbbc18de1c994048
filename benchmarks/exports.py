"""What every export makes in the program it is for, against what it makes here: the largest
difference of each, in one table.

    python benchmarks/exports.py [--keep FOLDER] [--earlier]

Tiny models of random weights, trained for two steps each, exported by the run, and loaded in one
process that cannot import `trainer` (tests/stranger.py): a loss, logits, vectors or scores of the
same input on both sides, absolute differences beside the largest number compared. Every family of
bases that cross_attention knows is there. Ends with 1 when a difference is above 1e-6 of that
number, or of 1. Half a minute on an idle core.

--earlier: every family of every task in transformers 4.57 against today's version instead, in an
environment that is made for it (tests/transformers_457); the bound is 1e-5. Ten minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout

from log_tables import table

from tests import exported
from tests.bases import DECODERS
from tests.facts import write_facts
from tests.families import experiment_on
from tests.ranks import run_on_ranks
from tests.transformers_457 import exports as exports_457

BOUND, BOUND_OF_EARLIER = 1e-6, 1e-5
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
    parser.add_argument("--earlier", action="store_true", help="Compare with transformers 4.57.")
    arguments = parser.parse_args()
    keep: Path | None = arguments.keep
    if arguments.earlier:
        return with_earlier(keep)
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
    rows = [row(name, values[name]["task"], *sides[name]) for name in values]
    heads = ("export", "loaded by", "largest difference", "of", "largest number")
    print(table(heads, [cells for cells, _ in rows]))
    return int(not all(is_good for _, is_good in rows))


def with_earlier(keep: Path | None) -> int:
    """The table of both versions; 1 when an export is further away than its bound."""
    with tempfile.TemporaryDirectory() as temporary:
        place = keep or Path(temporary)
        folder = write_facts(place / "facts")
        sides = exports_457.sides(exports_457.experiments(folder), folder, place / "runs")
    found = {name: exports_457.difference(*pair) for name, pair in sides.items()}
    rows = [[name, f"{far:.1e}", of] for name, (far, of) in found.items()]
    print(table(("export", "4.57 against today", "of"), rows))
    return int(not all(largest <= BOUND_OF_EARLIER for largest, _ in found.values()))


def row(
    name: str, task: str, own: dict[str, Any], theirs: dict[str, Any]
) -> tuple[list[str], bool]:
    """A row of the table, and whether it is within its bound."""
    compared = {of: tensor for of, tensor in own.items() if of != "said"}
    found = {of: float((x - theirs[of]).abs().max()) for of, x in compared.items()}
    worst = max(found, key=lambda of: found[of])
    largest = float(compared[worst].abs().max())
    cells = [name, LOADER[task], f"{found[worst]:.1e}", worst, f"{largest:.3g}"]
    return cells, found[worst] <= BOUND * max(1.0, largest)


if __name__ == "__main__":
    sys.exit(main())
