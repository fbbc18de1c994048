"""Ids and masks of conversations against TRL's SFTTrainer, templates x rows.

    python benchmarks/trl_masks.py [--tell] [--base starcoder] [--form]

TRL runs in an environment of its own, which is made in seconds where it is not there yet. The words
of the table are those of tests/trl_1_16/masks.py, and tests/numerics/test_trl_masks.py has the
reason of each. --form: TRL's own form of a template is ours as well.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # runs from a checkout that is not installed

from tests.numerics.test_trl_masks import found
from tests.trl_1_16 import masks
from tests.trl_1_16.environment import TRL


def main() -> None:
    """Print the table."""
    flags = argparse.ArgumentParser(description="Ids and masks against TRL's SFTTrainer.")
    flags.add_argument("--tell", action="store_true", help="Print what differs.")
    flags.add_argument("--base", choices=("bytes", "starcoder"), default="bytes")
    flags.add_argument("--form", action="store_true", help="TRL's form is our template, too.")
    given = flags.parse_args()
    trl = TRL.python()
    pairs = masks.templates(trl)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        masks.write_tokenizers(given.base, pairs, folder)
        of_trl = masks.told(trl, folder)[given.base]
        print(f"{'':24}" + "".join(f"{row:>9}" for row in masks.ROWS))
        line: list[str] = []
        for (template, row), word, seen in found(
            pairs, folder / given.base, of_trl, in_trls_form=given.form
        ):
            if given.tell and word != "=":
                print(f"    {row}: {seen}")
            line.append(f"{word:>9}")
            if len(line) == len(masks.ROWS):
                print(f"{template:24}" + "".join(line), flush=True)
                line = []


if __name__ == "__main__":
    main()
