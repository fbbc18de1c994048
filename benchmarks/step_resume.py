"""The same loop of 40 steps in several trainers, killed (-9) behind steps 13, 20 and 37 and resumed
as each one documents: what was done again, which rows were others, which losses are not the same.

    python benchmarks/step_resume.py [--only NAME] [--kills 13 20 37] [--folder DIR]

The loop is in benchmarks/resumes/. Trainers that are not among our packages are installed beside
them into layers of their own (LATHE_TRL, LATHE_LIGHTNING, LATHE_IGNITE name other folders). It
prints the table of docs/step-resume.md. Two cores, minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "benchmarks" / "resumes"
sys.path.insert(0, str(ROOT))

from benchmarks.driven_kills import (  # noqa: E402
    DisturbedLoop,
    operations_of,
    records_of,
    results_of,
)
from tests.environments import Layer  # noqa: E402
from tests.trl_1_16.environment import TRL, VERSION  # noqa: E402
from trainer.operations.operation_log import LOG  # noqa: E402
from trainer.operations.results import RESULTS  # noqa: E402

STEPS, KILLS = 40, (13, 20, 37)
LIGHTNING_VERSION, IGNITE_VERSION = "2.6.6", "0.5.5"
LIGHTNING = Layer(
    f"lightning-{LIGHTNING_VERSION}",
    (
        f"lightning=={LIGHTNING_VERSION}",
        f"pytorch-lightning=={LIGHTNING_VERSION}",
        "lightning-utilities==0.15.3",
    ),
    "LATHE_LIGHTNING",
)
IGNITE = Layer(f"ignite-{IGNITE_VERSION}", (f"pytorch-ignite=={IGNITE_VERSION}",), "LATHE_IGNITE")
Line = dict[str, Any]  # step, rows, loss


def ours() -> Path:
    """The interpreter of this environment."""
    return Path(sys.executable)


@dataclass(frozen=True)
class Trainer:
    """A trainer of the table: its program, its interpreter, and what it is called."""

    program: str
    python: Callable[[], Path]
    name: str


TRAINERS = {
    "hf": Trainer("hf_trainer.py", ours, f"transformers {version('transformers')} `Trainer`"),
    "trl": Trainer("trl_sft.py", TRL.python, f"trl {VERSION} `SFTTrainer`"),
    "accelerate": Trainer("accelerate_loop.py", ours, f"accelerate {version('accelerate')} loop"),
    "lightning": Trainer(
        "lightning_fit.py", LIGHTNING.python, f"lightning {LIGHTNING_VERSION} `Trainer`"
    ),
    "ignite": Trainer(
        "ignite_loop.py", IGNITE.python, f"pytorch-ignite {IGNITE_VERSION} `DeterministicEngine`"
    ),
}


def start(trainer: Trainer, folder: Path, *words: str) -> list[Line]:
    """Run a trainer to its end or its kill; everything its record says."""
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    own |= {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [str(trainer.python()), str(PROGRAMS / trainer.program), str(folder), *words],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
    )
    wanted = -signal.SIGKILL if "--kill" in words else 0
    if done.returncode != wanted:
        raise SystemExit(f"{trainer.name}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return lines_of(folder / "record.jsonl")


def lines_of(path: Path) -> list[Line]:
    """The lines of a record that tell of steps."""
    return [one for one in map(json.loads, path.read_text().splitlines()) if "step" in one]


@dataclass(frozen=True)
class Outcome:
    """What became of a loop that was killed and resumed, against the undisturbed one."""

    again: int  # steps that were run twice
    left_out: int  # that were never run
    other_rows: int  # steps behind the kill that had other rows
    other_losses: int  # steps behind the kill whose loss is not the same to the bit
    most: float  # the largest difference of a loss
    behind: int  # steps behind the kill

    @classmethod
    def of(cls, quiet: Sequence[Line], before: Sequence[Line], after: Sequence[Line]) -> Outcome:
        """before, after: the lines of the two starts."""
        wanted = {line["step"]: line for line in quiet}
        had, later = ({line["step"]: line for line in lines} for lines in (before, after))
        pairs = [(wanted[step], line) for step, line in later.items() if step in wanted]
        differences = [abs(one["loss"] - other["loss"]) for one, other in pairs]
        return cls(
            again=len(had.keys() & later.keys()),
            left_out=len(wanted.keys() - had.keys() - later.keys()),
            other_rows=sum(one["rows"] != other["rows"] for one, other in pairs),
            other_losses=sum(difference != 0 for difference in differences),
            most=max(differences, default=0.0),
            behind=len(pairs),
        )

    def cells(self) -> list[str]:
        """The cells of a row of the table."""
        losses = "all equal"
        if self.other_losses:
            losses = f"{self.other_losses} of {self.behind} differ, by up to {self.most:.2g}"
        rows = f"{self.other_rows} of {self.behind}" if self.other_rows else "none"
        return [str(self.again), str(self.left_out), rows, losses]


def of_trainer(trainer: Trainer, folder: Path, kills: Sequence[int]) -> dict[int, Outcome]:
    """The outcome of a trainer by the step behind which it was killed."""
    quiet, repeated = (start(trainer, folder / name) for name in ("quiet", "repeated"))
    if quiet != repeated:
        raise SystemExit(f"{trainer.name}: two undisturbed runs differ: nothing can be compared")
    outcomes: dict[int, Outcome] = {}
    for kill in kills:
        place = folder / f"killed-{kill}"
        before = start(trainer, place, "--kill", str(kill))
        after = start(trainer, place, "--resume")[len(before) :]
        outcomes[kill] = Outcome.of(quiet, before, after)
        print(f"{trainer.name}, {kill}: {outcomes[kill]}", flush=True)
    return outcomes


@dataclass
class ServedLoop(DisturbedLoop):
    """The loop of over_http.py, whose server, worker and client are killed at the same moment."""

    program: Path = PROGRAMS / "over_http.py"

    def killed_behind(self, kill: int) -> None:
        """Drive the loop to its end; kill everything behind a step (0: nothing), and start the
        server and the client again.
        """
        (self.folder / "base").mkdir()
        self.start_server()
        self.start_client()
        assert self.client is not None, "it was started"
        assert self.server is not None, "it was started"
        while kill and not any(line.get("step") == kill for line in self.lines()):
            if self.client.poll() is not None:
                raise SystemExit(f"the client failed: {self.folder / 'client.log'}")
            time.sleep(0.002)
        if kill:
            for process in (self.server, self.client):
                process.kill()
            for pid in self.processes(with_launcher=True):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.server.wait()
            self.client.wait()
            shutil.copyfile(self.journal, self.folder / "before.jsonl")
            self.start_server()
            self.start_client()
        if self.client.wait():
            raise SystemExit(f"the client failed: {self.folder / 'client.log'}")
        self.end()


def of_server(folder: Path, kills: Sequence[int]) -> dict[int, Outcome]:
    """The outcome of this server by the step behind which everything was killed."""
    outcomes: dict[int, Outcome] = {}
    quiet: list[Line] = []
    for kill in (0, *kills):
        loop = ServedLoop(folder / f"killed-{kill}", STEPS)
        try:
            loop.killed_behind(kill)
        finally:
            loop.stop()
        lines = lines_of(loop.journal)
        if not kill:
            quiet = lines
            continue
        before = lines_of(loop.folder / "before.jsonl")
        after = lines[len(before) :]
        # the client is told again what it was told; what counts as run is in the logs of the server
        told = {line["step"]: line for line in after}
        assert all(told[line["step"]] == line for line in before)
        count = len(operations_of(loop.run()))
        for stem in (LOG, RESULTS):
            assert records_of(loop.run(), stem) == list(range(count)), stem
        steps = [one for one in results_of(loop.run()) if "step" in one.fields.get("metrics", {})]
        assert len(steps) == STEPS
        new = [line for line in after if line["step"] > before[-1]["step"]]
        outcomes[kill] = Outcome.of(quiet, before, new)
        print(f"this server, {kill}: {outcomes[kill]}", flush=True)
    return outcomes


def main() -> None:
    """Measure, and print the table."""
    flags = argparse.ArgumentParser(description="What a kill costs, trainer by trainer.")
    flags.add_argument("--only", choices=("server", *TRAINERS), action="append")
    flags.add_argument("--kills", type=int, nargs="+", default=KILLS)
    flags.add_argument("--folder", type=Path, help="Kept afterwards; a new one.")
    given = flags.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = (given.folder or Path(tempfile.mkdtemp(prefix="step-resume-"))).absolute()
    lines = ["| trainer | killed behind | steps run twice | left out | other rows | losses |"]
    lines.append("|---|---|---|---|---|---|")
    for key in given.only or ("server", *TRAINERS):
        if key == "server":
            name, outcomes = "`lathe serve`, tinker 0.38.0", of_server(folder / key, given.kills)
        else:
            name = TRAINERS[key].name
            outcomes = of_trainer(TRAINERS[key], folder / key, given.kills)
        for kill, outcome in outcomes.items():
            lines.append(f"| {name} | {kill} | {' | '.join(outcome.cells())} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
