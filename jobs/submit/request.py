"""A request to send a group, and the checked specs of its experiments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.errors import Unreachable
from jobs.protocol import Backend, JobSpec, Rendered, token_of
from jobs.record import events as record
from jobs.record.bases import base_of, has_needed
from jobs.record.paths import is_there
from jobs.submit import launch_line, refusals
from trainer import tasks
from trainer.config import auto, deepspeed_config, groups
from trainer.config.identity import base_id, digest, exp_id
from trainer.errors import ConfigError, LatheError, ResumeError
from trainer.files.atomic import read_json

if TYPE_CHECKING:
    from jobs.code.snapshot import Snapshot
    from jobs.config import JobConfig
    from jobs.job_state import JobState
    from jobs.record.paths import BaseFolder, RunFolder
    from trainer.config.schema import Experiment

LOCK_WAIT_S = 60.0

# how old an intent must be before a name that the scheduler does not know is sent again
RESEND_S = 10.0


@dataclass(frozen=True)
class AttemptDraft:
    """An attempt and the text that its scheduler gets."""

    spec: JobSpec
    rendered: Rendered
    nonce: str  # of its record


@dataclass(frozen=True)
class Request:
    """A group of experiments with the backend, the job dictionary and the flags to send it."""

    base: BaseFolder
    group: str
    experiments: Sequence[dict[str, Any]]
    job: JobConfig
    backend: Backend
    backend_of: Callable[[str], Backend]  # of earlier attempts, which may have gone elsewhere
    workdir: Path  # where the job runs: the snapshot's copy of the project
    snapshot: Snapshot | None  # None: the project itself (inline, or only a plan)
    python: str  # interpreter of the wrapper, unless the job dictionary names one
    flags: Sequence[str] = ()  # of the training: "--data_path=/data/nq"
    deepspeed: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    retry: Collection[JobState] = ()
    with_bad_input: bool = False  # also those that ended by bad input
    max_parallel: int | None = None
    use_array: bool = False
    after: Sequence[str] = ()
    resend_s: float = RESEND_S
    program: Sequence[str] = ()  # of a job, with its arguments; (): trainval.py with `flags`
    # what people call the experiments, by id; {}: by their places among `experiments`
    shown: Mapping[str, str] = field(default_factory=dict[str, str])
    lock_wait_s: float = LOCK_WAIT_S  # for another process that holds the lock of an experiment
    # how long a submission without an answer is asked about; None: until it was sent again, too
    answer_wait_s: float | None = None

    @functools.cached_property
    def templates(self) -> dict[str, JobSpec]:
        """A spec for each experiment, without attempt and token; ConfigError names each mistake."""
        launch = launch_line.read(self.job.python_binary, self.job, python=self.python)
        mistakes = list(
            refusals.of_flags(
                self.flag_texts,
                world=launch_line.processes(launch.argv, self.job),
                shares_disk=self.backend.traits.shares_disk,
            )
        )
        templates: dict[str, JobSpec] = {}
        for name, values in self.by_id.items():
            try:
                templates[name] = _template(self, name, values)
            except ConfigError as error:
                mistakes.append(str(error))
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        problems = [
            f"{finding.name}: {finding.text}"
            for finding in self.backend.check()
            if not finding.is_good and finding.is_blocking
        ]
        if problems:
            raise Unreachable(
                f"-j {self.backend.name} cannot be used from here:\n  " + "\n  ".join(problems)
            )
        return templates

    @property
    def flag_texts(self) -> dict[str, str]:
        """The flags by name: {"data_path": "/data/nq"}; "" of a switch."""
        parts = [flag.removeprefix("--").partition("=") for flag in self.flags]
        return {name: text for name, _, text in parts}

    @functools.cached_property
    def trials(self) -> dict[str, AttemptDraft]:
        """Each template as an attempt 0, which stands in no record and is never sent."""
        nonce = "000000"
        trials: dict[str, AttemptDraft] = {}
        for name, template in self.templates.items():
            spec = template.model_copy(update={"token": token_of(template.exp_id, nonce, 0)})
            trials[name] = AttemptDraft(spec, self.backend.render(spec), nonce)
        return trials

    @functools.cached_property
    def drafts(self) -> dict[str, AttemptDraft]:
        """Each template as the attempt that is sent if its record does not change meanwhile.

        ConfigError for a value that the backend cannot express: it stops the group before anything
        is sent.
        """
        drafts: dict[str, AttemptDraft] = {}
        for name, template in self.templates.items():
            folder = self.base.run(template.exp_id)
            try:
                job = record.read(folder)
            except (LatheError, OSError):  # whoever takes the lock reads it again, and says why
                job = None
            nonce = record.new_nonce() if job is None else job.nonce
            number = 1 if job is None else len(job.attempts) + 1
            spec = as_attempt(template, number, nonce, folder=folder)
            drafts[name] = AttemptDraft(spec, self.backend.render(spec), nonce)
        return drafts

    def check_bases(self) -> None:
        """ConfigError for every experiment whose base neither is in this group nor was ever sent or
        run: its training would find no model.
        """
        mistakes: list[str] = []
        for name, values in self.by_id.items():
            base = base_of(self.base.run(name), values)
            if base is None or base.path.name in self.by_id or has_needed(base.path, values):
                continue
            if not is_there(base.record) and not is_there(base.status):
                task = values.get("continues", values["base"])["experiment"].get("task")
                what = "the run that it goes on with" if "continues" in values else "its base"
                mistakes.append(
                    f"experiment {name}: {what}, experiment {base.path.name} (task {task}), was "
                    f"never run in {self.base.path}. Submit that one's group first, or put both in "
                    "one group."
                )
        if mistakes:
            raise ConfigError("\n".join(mistakes))

    def levels(self) -> list[list[str]]:
        """The ids in the order in which they can be trained: first those that need no other of this
        group, then those whose base is among the first, and so on.
        """
        depths: dict[str, int] = {}
        for name in self.by_id:
            depth, before = 0, base_id(self.by_id[name])
            while before in self.by_id:
                depth, before = depth + 1, base_id(self.by_id[before])
            depths[name] = depth
        return [
            [name for name in self.by_id if depths[name] == depth]
            for depth in range(max(depths.values(), default=-1) + 1)
        ]

    @functools.cached_property
    def names(self) -> dict[str, str]:
        """What people call each experiment, by id, on one line."""
        texts = self.shown or groups.names(self.group, list(self.experiments))
        return {name: " ".join(text.split()) for name, text in texts.items()}

    @functools.cached_property
    def by_id(self) -> dict[str, dict[str, Any]]:
        """The dictionaries by experiment id."""
        return {exp_id(values): values for values in self.experiments}


@dataclass(frozen=True)
class ActionResult:
    """The action that was (or would be) taken for one experiment."""

    exp_id: str
    action: str  # send, settle, skip, wait, unread, failed
    text: str
    state: JobState
    is_bad: bool = False
    is_unanswered: bool = False
    is_transient: bool = False  # it failed, and may succeed later although nobody changes anything


def until_of(words: Sequence[str]) -> int | None:
    """The step of --until among the words of a job's program; None without any."""
    texts = [word.partition("=")[2] for word in words if word.startswith("--until=")]
    return int(texts[-1]) if texts and texts[-1].isdigit() else None


def check_dictionary(folder: RunFolder, values: dict[str, Any]) -> None:
    """Return when the folder is free or holds this very dictionary; else ResumeError.

    An id is the md5 of joined text, so two dictionaries may share it; the digest tells them apart.
    """
    on_disk = read_json(folder.exp_dict)
    if on_disk is not None and digest(on_disk) != digest(values):
        differing = sorted(
            key for key in {*on_disk, *values} if on_disk.get(key) != values.get(key)
        )
        raise ResumeError(
            f"{folder.exp_dict} is of another experiment with the same id: {', '.join(differing)} "
            "differ(s). Use another --savedir_base."
        )


def as_attempt(template: JobSpec, number: int, nonce: str, *, folder: RunFolder) -> JobSpec:
    """`template` as one attempt: its own number, token and wrapper."""
    wrapper = [template.wrapper[0], "-m", "jobs.node.wrapper", str(folder.path), str(number)]
    changes = {
        "attempt": number,
        "token": token_of(template.exp_id, nonce, number),
        "wrapper": wrapper,
    }
    return template.model_copy(update=changes)


def _template(request: Request, name: str, values: dict[str, Any]) -> JobSpec:
    launch = launch_line.read(request.job.python_binary, request.job, python=request.python)
    cfg = tasks.parse(values, source=f"experiment {name}")
    folder = request.base.run(name)
    base = base_of(folder, values)
    problems = refusals.of_experiment(
        cfg,
        ds=_deepspeed_config(request, name, cfg, launch_line.processes(launch.argv, request.job)),
        job=request.job,
        folder=folder,
        flags=request.flag_texts,
        shares_disk=request.backend.traits.shares_disk,
    )
    if problems:
        raise ConfigError("\n".join(f"experiment {name}: {problem}" for problem in problems))
    program = [
        "trainval.py",
        f"--exp_id={name}",
        f"--savedir_base={request.base.path}",
        *([f"--survive={request.job.survive}"] if request.job.survive else []),
        *request.flags,
    ]
    return JobSpec(
        token="",
        exp_id=name,
        digest=digest(values),
        group=request.group,
        attempt=0,
        backend=request.backend.name,
        folder=str(folder.path),
        workdir=str(request.workdir),
        wrapper=[
            request.job.python or request.python,
            "-m",
            "jobs.node.wrapper",
            str(folder.path),
            "0",
        ],
        launcher=list(launch.argv),
        program=list(request.program) or program,
        activate=launch.activate,
        environment={
            **request.environment,
            groups.GROUP: request.group,
            groups.NAME: request.names[name],
            **request.job.environment_vars,
        },
        job=request.job,
        after=list(request.after),
        max_parallel=request.max_parallel,
        base=None if base is None else str(base.path),
    )


def _deepspeed_config(
    request: Request, name: str, cfg: Experiment, world: int | None
) -> dict[str, Any] | None:
    """The DeepSpeed dictionary of a training on `world` processes; ConfigError with its mistakes.

    None when only the node knows how many devices it has.
    """
    deepspeed = auto.placeholder(request.deepspeed or cfg.deepspeed, cfg)
    preset = deepspeed_config.read(deepspeed)
    if world is None:
        return None
    if cfg.train.micro_batch == 0:  # "auto": the training chooses
        cfg = auto.with_micro_batch(cfg, 1)
    return deepspeed_config.build(
        preset,
        train=cfg.train,
        optim=cfg.optim,
        world=world,
        source=f"DeepSpeed file {deepspeed!r} with experiment {name} on {world} processes",
    )
