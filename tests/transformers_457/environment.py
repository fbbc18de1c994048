"""Makes an environment with transformers 4.57, peft and sentence-transformers, once:

    python -m tests.transformers_457.environment

It prints its interpreter. It lies in .venv/ beside what `make setup` installs, has a torch of its
own, and is made anew when constraints.txt has changed. 1.4 GB, two minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from filelock import FileLock

CONSTRAINTS = Path(__file__).with_name("constraints.txt")
PACKAGES = ("transformers", "peft", "sentence-transformers", "sentencepiece")
# torch first and by itself: a plain request for it would fetch the CUDA build
STEPS = (("torch",), PACKAGES)


def python(folder: Path | None = None) -> Path:
    """The interpreter of the environment, which is made where it is not there yet.

    folder: where it lies; None: where LATHE_TRANSFORMERS_457 says, else in this environment.
    """
    said = os.environ.get("LATHE_TRANSFORMERS_457")
    place = folder or Path(said or Path(sys.prefix) / "transformers-4.57")
    interpreter, stamp = place / "bin" / "python", place / "made_from.txt"
    with FileLock(place.with_suffix(".lock")):
        wanted = CONSTRAINTS.read_text()
        if stamp.is_file() and stamp.read_text() == wanted:
            return interpreter
        shutil.rmtree(place, ignore_errors=True)
        venv.create(place, with_pip=True)
        pip = [str(interpreter), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        for packages in STEPS:
            subprocess.run([*pip, "-c", str(CONSTRAINTS), *packages], check=True)
        stamp.write_text(wanted)
    return interpreter


if __name__ == "__main__":
    print(python())
