"""What is sent (JobSpec), what a scheduler says of it (Observed), and what every backend can do
(Backend).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import Field

from jobs.config import JobConfig
from trainer.config.block import Strict

if TYPE_CHECKING:
    from jobs.job_state import Observed


# a python of an environment module, or of conda, may find libpython by it alone
OF_WRAPPER = ("LD_LIBRARY_PATH",)


class JobSpec(Strict):
    """One attempt at one experiment: everything a backend needs to render it, and the wrapper to
    run it.
    """

    # ft_<12 of exp_id>_<6 of the record's nonce>_<attempt>: [a-z0-9_], unique, the key to
    # idempotency
    token: str
    exp_id: str
    digest: str  # sha256 of the canonical dictionary
    group: str
    attempt: int
    backend: str
    folder: str  # run folder, absolute
    workdir: str  # code snapshot, absolute: where the job runs
    wrapper: list[str]  # argv of the wrapper: python -m jobs.node.wrapper FOLDER ATTEMPT
    launcher: list[str]  # argv before the program: python, or torchrun --nproc-per-node 4
    program: list[str]  # trainval.py and its flags
    # environment to activate: a folder, or the name of a conda environment
    activate: str | None = None
    environment: dict[str, str] = Field(default_factory=dict)  # of the training; holds no secret
    job: JobConfig = JobConfig()
    after: list[str] = Field(default_factory=list)  # scheduler ids that must have succeeded
    # of this group at once, where the backend keeps a queue of its own
    max_parallel: int | None = None
    # run folder of the experiment whose model it begins with; None: it begins with something else
    base: str | None = None

    @property
    def wrapper_environment(self) -> dict[str, str]:
        """What of the training's environment the wrapper's own python may need to start at all."""
        return {name: self.environment[name] for name in OF_WRAPPER if name in self.environment}


@dataclass(frozen=True)
class Rendered:
    """The text that a scheduler gets for one job (or one array of jobs), and under which name."""

    token: str  # the name of the job: how `find` knows it
    file: str  # where the text is kept in the attempt's folder: "rendered.sbatch"
    text: str
    argv: tuple[str, ...] = ()  # the command that takes it, where there is one


@dataclass(frozen=True)
class Finding:
    """One line of `doctor`: what was checked, and whether it is good."""

    name: str
    is_good: bool
    text: str
    # a bad one: whether it stops every job, or only concerns some (a partition that is down)
    is_blocking: bool = True


@dataclass(frozen=True)
class Traits:
    """Properties of a backend. Submission asks for them, and never for a backend's name."""

    # `submit` runs the job in this process and returns when it has ended: one after the other, with
    # this terminal, and from the project itself instead of a snapshot
    is_in_process: bool = False
    # jobs run on the machine that submits, so they inherit what is true of this machine only
    runs_here: bool = False
    # its nodes see the submitter's file system, so a folder that is absent here is absent there
    shares_disk: bool = False
    # it counts the live jobs of a group itself, so submission does not count max_parallel
    keeps_queue: bool = False
    # it holds a job back until the run that is its base has left a model, so submission need not
    awaits_bases: bool = False
    # a job is computed by the worker of another one, which its environment names
    needs_host: bool = False
    # the key of a job dictionary under which haven's account of the jobs goes
    account_key: Literal["account", "account_id"] = "account_id"


class Backend(Protocol):
    """A place where jobs run. Made anew for each command; keeps no state of its own."""

    name: ClassVar[str]
    traits: ClassVar[Traits]
    # how far this was tried, shown in --help: "real Slurm 22.05", "offline only"
    validation: ClassVar[str]

    def check(self) -> list[Finding]:
        """The findings of `doctor`. Never raises; a bad finding says what to do."""
        ...

    def render(self, spec: JobSpec) -> Rendered:
        """The text for the scheduler. Pure. ConfigError for what this backend cannot do."""
        ...

    def rehearse(self, rendered: Rendered) -> str | None:
        """What the scheduler says to a dry run; None when it has none. Refused, Unreachable."""
        ...

    def submit(self, rendered: Rendered) -> str:
        """Hand a job to the scheduler; returns the scheduler's id of it.

        Refused: the scheduler does not accept it. NotYet: it accepts no more jobs now, and may
        accept this one later. Unreachable: whether it has accepted the job is not known.
        """
        ...

    def find(self, token: str) -> list[str]:
        """Ids of all jobs, dead ones too, that carry this token. Unreachable."""
        ...

    def query(self, ids: Sequence[str]) -> dict[str, Observed]:
        """The states of these ids, without those that the scheduler does not know. Unreachable."""
        ...

    def cancel(self, job_id: str) -> None:
        """Ask for the end of a job. Nothing happens if it has ended already. Unreachable."""
        ...

    def logs(self, job_id: str, *, follow: bool) -> Iterator[str]:
        """Lines of the scheduler's own log of a job; nothing when it keeps none."""
        ...


@runtime_checkable
class ArrayBackend(Protocol):
    """A backend that takes many jobs in one submission."""

    def max_array(self) -> int:
        """How many jobs one array may hold. Unreachable."""
        ...

    def render_array(
        self, specs: Sequence[JobSpec], *, token: str, index_file: str, max_parallel: int | None
    ) -> Rendered:
        """The text for one array named `token`. Pure.

        Element i runs `wrapper --array index_file` for specs[i].
        """
        ...

    def element(self, array_id: str, index: int) -> str:
        """The scheduler's id of one job of an array."""
        ...


def token_of(exp_id: str, nonce: str, attempt: int) -> str:
    """The name under which a scheduler knows an attempt: letters that all of them allow."""
    return f"ft_{exp_id[:12]}_{nonce}_{attempt}"


def array_token(tokens: Sequence[str]) -> str:
    """The name of an array of these jobs: the same jobs always make the same name."""
    return f"fta_{hashlib.sha256(' '.join(tokens).encode()).hexdigest()[:16]}"
