"""Environments in which a test runs programs that are no part of ours: a few packages of their own
over everything that `make setup` installs. Each is made once, beside it in .venv/.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

# One try: who has no index is to know it soon.
PIP = ("-q", "--disable-pip-version-check", "--no-deps", "--retries", "0", "--timeout", "20")


class NotInstalledError(Exception):
    """A package cannot be installed here; says what pip said."""


@dataclass(frozen=True)
class Layer:
    """Packages over ours, which are all that they want besides."""

    name: str  # of its folder
    packages: Sequence[str]  # such as "trl==1.16.0"; nothing that they ask for is fetched with them
    variable: str  # of the environment: where the folder lies instead

    def python(self, folder: Path | None = None) -> Path:
        """The interpreter, whose environment is made where it is not there yet, and anew where it
        was made of other packages.

        folder: where it lies; None: where the variable says, else in this environment.
        NotInstalledError when pip cannot install the packages.
        """
        said = os.environ.get(self.variable)
        place = folder or Path(said or Path(sys.prefix) / self.name)
        interpreter, stamp = place / "bin" / "python", place / "made_from.txt"
        ours = sysconfig.get_path("purelib")
        with FileLock(place.with_suffix(".lock")):
            wanted = f"{' '.join(self.packages)} beside {ours}\n"
            if stamp.is_file() and stamp.read_text() == wanted:
                return interpreter
            shutil.rmtree(place, ignore_errors=True)
            venv.create(place, with_pip=False)
            (packages,) = place.glob("lib/python*/site-packages")
            (packages / "ours.pth").write_text(f"{ours}\n")
            pip = [sys.executable, "-m", "pip", "install", *PIP, "--target", str(packages)]
            said = subprocess.run([*pip, *self.packages], capture_output=True, text=True)
            if said.returncode:
                raise NotInstalledError(said.stderr.strip())
            stamp.write_text(wanted)
        return interpreter


def interpreter_or_skip(layer: Layer, switch: str) -> Path:
    """A layer's interpreter. Without it the test is skipped, or fails where the variable `switch`
    is 1.
    """
    try:
        return layer.python()
    except NotInstalledError as error:
        must = os.environ.get(switch) == "1"
        (pytest.fail if must else pytest.skip)(f"{layer.name} cannot be installed: {error}")
