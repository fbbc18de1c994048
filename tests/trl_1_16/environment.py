"""Makes the environment in which TRL runs, once:

    python -m tests.trl_1_16.environment

It prints its interpreter. It lies in .venv/ beside what `make setup` installs, has TRL for its own
and everything else from there (TRL asks for nothing that is not there, so nothing is fetched with
it), and is made anew when another TRL is asked for. 4 MB, seconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from filelock import FileLock

VERSION = "1.16.0"
# One try: who has no index is to know it soon.
PIP = ("-q", "--disable-pip-version-check", "--no-deps", "--retries", "0", "--timeout", "20")


class NotInstalledError(Exception):
    """TRL cannot be installed here; says what pip said."""


def python(folder: Path | None = None) -> Path:
    """The interpreter of the environment, which is made where it is not there yet.

    folder: where it lies; None: where LATHE_TRL says, else in this environment.
    NotInstalledError when pip cannot install TRL.
    """
    said = os.environ.get("LATHE_TRL")
    place = folder or Path(said or Path(sys.prefix) / f"trl-{VERSION}")
    interpreter, stamp = place / "bin" / "python", place / "made_from.txt"
    ours = sysconfig.get_path("purelib")
    with FileLock(place.with_suffix(".lock")):
        wanted = f"trl=={VERSION} beside {ours}\n"
        if stamp.is_file() and stamp.read_text() == wanted:
            return interpreter
        shutil.rmtree(place, ignore_errors=True)
        venv.create(place, with_pip=False)
        (packages,) = place.glob("lib/python*/site-packages")
        (packages / "ours.pth").write_text(f"{ours}\n")
        pip = [sys.executable, "-m", "pip", "install", *PIP, "--target", str(packages)]
        said = subprocess.run([*pip, f"trl=={VERSION}"], capture_output=True, text=True)
        if said.returncode:
            raise NotInstalledError(said.stderr.strip())
        stamp.write_text(wanted)
    return interpreter


if __name__ == "__main__":
    print(python())
