"""Where everything of a submitted experiment lies: every path in one place. Standard library only.

<savedir_base>/<exp_id>/
    exp_dict.json          the dictionary as written
    job.jsonl              append-only events; what happened to this experiment is a fold over them
    job_dict.json          {"job_id", "command"}, derived, for haven
    code                   link to the snapshot, ../_jobs/code/<digest>/tree
    attempts/<n>/          one folder for each time it was sent out
        spec.json          what was sent (JobSpec)
        rendered.<kind>    the text the scheduler got
        env.json           versions and devices where it ran
        started-<k>.json   start k of this attempt: a scheduler that requeues runs one attempt
                           several times
        heartbeat.json     rewritten every 30 s by the wrapper
        cancelled          somebody asked for its end
        exit.json          the outcome, written once: the truth
        logs.txt err.txt   what the training printed, all starts in one
<savedir_base>/_jobs/      code snapshots, arrays
<savedir_base>/deleted/    what `reset` moved aside
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ConfigError

EXP_DICT, RECORD, JOB_DICT, CODE, STATUS, METRICS, CONSOLE = (
    "exp_dict.json",
    "job.jsonl",
    "job_dict.json",
    "code",
    "status.json",
    "metrics.jsonl",
    "console.log",
)


@dataclass(frozen=True)
class Attempt:
    """The files of one attempt."""

    folder: Path

    @property
    def number(self) -> int:
        return int(self.folder.name)

    @property
    def spec(self) -> Path:
        return self.folder / "spec.json"

    @property
    def env(self) -> Path:
        return self.folder / "env.json"

    @property
    def heartbeat(self) -> Path:
        return self.folder / "heartbeat.json"

    @property
    def exit(self) -> Path:
        return self.folder / "exit.json"

    @property
    def outcome(self) -> Path:
        """Where the training leaves its own exit code: torchrun turns every other code into 1."""
        return self.folder / "outcome.json"

    @property
    def give_up_file(self) -> Path:
        """This file forbids the attempt to start: another attempt has been sent in its place."""
        return self.folder / "given-up"

    @property
    def cancel_file(self) -> Path:
        """There when somebody asked for the end of this attempt.

        The wrapper obeys it, whatever its scheduler does.
        """
        return self.folder / "cancelled"

    @property
    def logs(self) -> Path:
        return self.folder / "logs.txt"

    @property
    def err(self) -> Path:
        return self.folder / "err.txt"

    def start_file(self, k: int) -> Path:
        return self.folder / f"started-{k}.json"

    def starts(self) -> list[Path]:
        """started-1.json, started-2.json, ... as far as they exist, in order."""
        paths: list[Path] = []
        while (path := self.start_file(len(paths) + 1)).exists():
            paths.append(path)
        return paths


@dataclass(frozen=True)
class RunFolder:
    """The files of one experiment."""

    path: Path

    @property
    def exp_dict(self) -> Path:
        return self.path / EXP_DICT

    @property
    def record(self) -> Path:
        return self.path / RECORD

    @property
    def job_dict(self) -> Path:
        return self.path / JOB_DICT

    @property
    def code(self) -> Path:
        return self.path / CODE

    @property
    def status(self) -> Path:
        """status.json of the training itself: state, step, total, host, updated_at, error."""
        return self.path / STATUS

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def console(self) -> Path:
        """What a run by hand said on its console; a job has logs.txt of its attempts."""
        return self.path / CONSOLE

    @property
    def lock(self) -> Path:
        """Held while somebody decides about this experiment.

        It lies beside the folder, so that reset can move the folder.
        """
        return self.path.with_name(f".{self.path.name}.job.lock")

    @property
    def was_submitted(self) -> bool:
        """Whether it has a record. True too where that cannot be told: reading it says why."""
        return is_there(self.record)

    def attempt(self, number: int) -> Attempt:
        return Attempt(self.path / "attempts" / str(number))


@dataclass(frozen=True)
class BaseFolder:
    """<savedir_base>: the run folders, and the folders that they share."""

    path: Path

    def run(self, exp_id: str) -> RunFolder:
        return RunFolder(self.path / exp_id)

    @property
    def snapshots(self) -> Path:
        return self.path / "_jobs" / "code"

    def snapshot(self, digest: str) -> Path:
        """The tree of one code snapshot; its manifest and archive lie beside it."""
        return self.snapshots / digest / "tree"

    @property
    def arrays(self) -> Path:
        return self.path / "_jobs" / "arrays"

    @property
    def deleted_folder(self) -> Path:
        return self.path / "deleted"

    def runs(self) -> list[RunFolder]:
        """Every folder that is named like an experiment, by name."""
        try:
            with os.scandir(self.path) as entries:
                names = sorted(entry.name for entry in entries if is_exp_id(entry.name))
        except FileNotFoundError:
            return []
        return [self.run(name) for name in names]

    def submitted_runs(self) -> list[RunFolder]:
        """Every experiment that was ever submitted from here, by name."""
        return [folder for folder in self.runs() if folder.was_submitted]


def is_there(path: Path) -> bool:
    """Whether there is a file of this name. True too where the disk does not tell: its folder may
    not be entered, or it is a link to itself.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def is_exp_id(name: str) -> bool:
    """Whether `name` looks like haven's hash: 32 lower-case hexadecimal digits."""
    return len(name) == 32 and all(letter in "0123456789abcdef" for letter in name)


def check_base(base: Path) -> None:
    """Return when a path can stand in scripts, records and messages. ConfigError otherwise."""
    text = str(base)
    if any(
        ord(letter) < 32 or ord(letter) == 127 or "\ud800" <= letter <= "\udfff" for letter in text
    ):
        raise ConfigError(
            f"--savedir_base {text!a}: want UTF-8 text without control characters. Use another "
            "folder."
        )
