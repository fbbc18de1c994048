"""Slurm's programs as scripts: a queue in a folder, of which one submission may hang."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

# `hang`: the next submission, and `hang-cancel`: the next cancellation waits until the file
# `release` is there. `arrives`: the submission that hangs has arrived before.
SCRIPTS = {
    "sbatch": """
        cat > /dev/null
        for word in "$@"; do case $word in --job-name=*) name=${word#--job-name=};; esac; done
        echo "$name" >> asked
        add() { id=1; until mkdir jobs/$id 2>/dev/null; do id=$((id + 1)); done; echo "$name" > jobs/$id/name; }
        if mv hang hanging 2>/dev/null; then
            [ -e arrives ] && add
            while [ ! -e release ]; do sleep 0.1; done
            exit 1
        fi
        add
        echo $id""",
    "squeue": """
        for word in "$@"; do case $word in --name=*) name=${word#--name=};; --jobs=*) ids=${word#--jobs=};; esac; done
        for job in jobs/*; do
            [ -e "$job/name" ] || continue
            id=${job#jobs/}
            [ -n "$name" ] && [ "$(cat $job/name)" = "$name" ] && echo $id
            [ -z "$name" ] && case ",$ids," in *,$id,*) echo "$id|PENDING|0|0||1|debug||None";; esac
        done""",
    "scancel": """
        if mv hang-cancel hanging-cancel 2>/dev/null; then while [ ! -e release ]; do sleep 0.1; done; fi
        echo "$1" >> cancelled""",
    "scontrol": """
        [ "$1" = ping ] && echo "Slurmctld(primary) at here is UP" || echo "MaxArraySize = 1001" """,
    "sinfo": 'echo "debug|up|infinite|1|(null)|idle"',
    "sacct": "echo 'Slurm accounting storage is disabled' >&2; exit 1",
    "srun": "",
}


@dataclass(frozen=True)
class FakeSlurm:
    """The folder of the queue."""

    folder: Path

    def make(self, patch: pytest.MonkeyPatch) -> None:
        """Write the programs, and let them be found before all others."""
        (self.folder / "jobs").mkdir(parents=True)
        (self.folder / "bin").mkdir()
        for name, text in SCRIPTS.items():
            path = self.folder / "bin" / name
            path.write_text(f"#!/bin/sh\ncd '{self.folder}'\n{text}\ntrue\n")
            path.chmod(0o755)
        patch.setenv("PATH", f"{self.folder / 'bin'}:/usr/bin:/bin")

    def says(self, name: str) -> None:
        """Make one of the files that the programs look for."""
        (self.folder / name).touch()

    def is_there(self, name: str) -> bool:
        return (self.folder / name).exists()

    def lines(self, name: str) -> list[str]:
        """What was asked of a program, in order."""
        path = self.folder / name
        return path.read_text().split() if path.exists() else []

    def jobs(self) -> list[str]:
        """The names of the jobs that have arrived."""
        return [path.read_text().strip() for path in self.folder.glob("jobs/*/name")]
