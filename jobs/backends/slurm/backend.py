"""Slurm by its command line: sbatch, squeue, scontrol, scancel, sinfo, and sacct where there is
accounting.

The commands are the stable interface: columns asked for by name have not changed in years, the JSON
changes with every release, and many clusters keep no accounting. Everything goes over as a list of
arguments, which also beat the user's SBATCH_* variables; the batch script holds nothing but `cd`
and `exec` of quoted words. Tried against Slurm 22.05.8.
"""

from __future__ import annotations

import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, ClassVar

from jobs.backends.slurm.squeue import (
    ASK_S,
    ENDED,
    ID,
    NO_NODES,
    OUT_OF_USE,
    QueueLine,
    arrays_in_queue,
    ask,
    call,
    config,
    history,
    list_lines,
    nodes,
    observe,
    past,
    queue_lines,
    rejection,
)
from jobs.errors import Refused, Unreachable
from jobs.job_state import ACTIVE, Observed
from jobs.protocol import Finding, JobSpec, Rendered, Traits
from trainer.errors import ConfigError

if TYPE_CHECKING:
    pass

RESOURCES = (
    "partition",
    "account",
    "qos",
    "constraint",
    "reservation",
    "exclude",
    "nodelist",
)  # as sbatch calls them
OWN = (*RESOURCES, "gres", "time", "requeue", "signal_s")
PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun")
SEND_S = 180.0  # a busy controller lets sbatch wait and try again for a minute or two by itself
FOLLOW_S, ALIVE_S = 0.5, 5.0
MANY = 400  # ids in one call
FIND_DAYS = 14  # how far back sacct looks for a name; whoever asks has sent it minutes ago

# Slurm keeps no row of an element that is cancelled while it waits (22.05, without accounting).
MISSING = Observed(
    "cancelled", "Slurm knows its array, but not this element", never_ran=True, is_missing=True
)
ANSWER = re.compile(r"(\d+)(;\S*)?\Z")  # sbatch --parsable: ID, or ID;CLUSTER
TOKEN = re.compile(r"[a-z0-9_]{1,64}\Z")
CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # with what is no UTF-8 in the name of a file


class Slurm:
    """Jobs on a Slurm cluster, found by SLURM_CONF or the commands' own configuration."""

    name: ClassVar[str] = "slurm"
    traits: ClassVar[Traits] = Traits(shares_disk=True, account_key="account")
    validation: ClassVar[str] = "real Slurm 22.05 on one machine; GPUs pretended"

    def check(self) -> list[Finding]:
        """Programs, the controller and its version, accounting, and what the partitions offer."""
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            text = (
                f"not on PATH: {', '.join(missing)}. Log in to a node of the cluster, or load "
                "Slurm's module."
            )
            return [Finding("programs", False, text)]
        findings = [Finding("programs", True, str(shutil.which("sbatch")))]
        try:
            findings.extend(_examine())
        except Unreachable as error:
            text = f"{error}. Look at SLURM_CONF, `scontrol ping`, and whether munged runs."
            findings.append(Finding("controller", False, text))
        return findings

    def render(self, spec: JobSpec) -> Rendered:
        """The sbatch call of one attempt.

        ConfigError for keys of other schedulers and for values it cannot carry.
        """
        attempt = PurePath(spec.folder) / "attempts" / str(spec.attempt)
        options = [f"--comment=lathe {spec.exp_id} {spec.attempt}", *_options(spec, spec.token)]
        argv = _sbatch([*options, *_output(attempt, "slurm-%j.txt")])
        return Rendered(spec.token, "rendered.sbatch", _script(argv, spec, spec.wrapper), argv)

    def rehearse(self, rendered: Rendered) -> str | None:
        """When and where it would start, by `sbatch --test-only`. Refused, Unreachable."""
        reply = call(
            [rendered.argv[0], "--test-only", *rendered.argv[1:]],
            text=rendered.text,
            timeout_s=SEND_S,
        )
        if reply.code != 0:
            raise rejection(reply, rendered.token)
        return reply.words.removeprefix("sbatch: ") or None

    def submit(self, rendered: Rendered) -> str:
        """The id of the job.

        Refused: Slurm rejected the job. NotYet: it takes no more jobs now. Unreachable: there was
        no clear answer, so the job may exist.
        """
        if shutil.which(rendered.argv[0]) is None:
            raise Refused(
                f"{rendered.argv[0]} is not on PATH, so nothing was sent. Log in to a node of "
                "the cluster."
            )
        reply = call(rendered.argv, text=rendered.text, timeout_s=SEND_S)
        for line in reversed(reply.out.splitlines()):
            if answer := ANSWER.match(line.strip()):
                return answer[1]
        if reply.code == 0:
            raise Unreachable(
                f"{rendered.token}: sbatch ended well but printed no id: {reply.words}"
            )
        raise rejection(reply, rendered.token)

    def find(self, token: str) -> list[str]:
        """Ids of all jobs of this name (of an array: its own id), as far back as Slurm remembers.

        Unreachable when the scheduler cannot be seen.
        """
        if not TOKEN.match(token):
            return []
        lines = ask(
            "squeue", "--noheader", "--array", "--states=all", f"--name={token}", "--format=%F"
        )
        lines += history(f"--name={token}", f"--starttime=now-{FIND_DAYS}days", "--format=JobID")
        ids = {line.partition("_")[0].strip() for line in lines}
        return sorted((text for text in ids if ID.match(text)), key=int)

    def query(self, ids: Sequence[str]) -> dict[str, Observed]:
        """States of these jobs and array elements; Unreachable when the scheduler cannot be seen.

        Without accounting, ended ones are known for MinJobAge only.
        """
        own_ids = [job_id for job_id in dict.fromkeys(ids) if ID.match(job_id)]
        rows: dict[str, QueueLine] = {}
        for first in range(0, len(own_ids), MANY):
            rows |= {row.id: row for row in queue_lines(own_ids[first : first + MANY])}
        gone = [job_id for job_id in own_ids if job_id not in rows]
        for first in range(0, len(gone), MANY):
            rows |= {row.id: row for row in past(gone[first : first + MANY])}
        missing = {job_id for job_id in gone if job_id not in rows and "_" in job_id}
        arrays = sorted({job_id.partition("_")[0] for job_id in missing})
        known = arrays_in_queue(arrays) if arrays else set[str]()
        is_short = any(row.reason.startswith(NO_NODES) for row in rows.values())
        around = nodes() if is_short else []
        return {
            job_id: observe(rows[job_id], around) if job_id in rows else MISSING
            for job_id in own_ids
            if job_id in rows or (job_id in missing and job_id.partition("_")[0] in known)
        }

    def cancel(self, job_id: str) -> None:
        """Ask for the end of a job. Nothing happens if it has ended or Slurm has forgotten it.

        Refused when it is not ours, Unreachable when the scheduler cannot be seen.
        """
        if not ID.match(job_id):
            raise Refused(f"{job_id!r} is not the id of a Slurm job")
        reply = call(["scancel", job_id], timeout_s=ASK_S)
        if reply.code != 0 and not ENDED.search(reply.err):
            raise rejection(reply, f"cancel {job_id}")

    def logs(self, job_id: str, *, follow: bool) -> Iterator[str]:
        """Lines of slurm-<id>.txt: messages of Slurm, and output from before the wrapper."""
        if not ID.match(job_id):
            return
        # the folder that the job was sent from, where its text lies
        folders = list_lines([job_id], "--format=%Z") or history(
            f"--jobs={job_id}", "--format=WorkDir"
        )
        if not folders or not folders[0].startswith("/"):  # Slurm forgot the job
            return
        path, at, asked_at = Path(folders[0]) / f"slurm-{job_id}.txt", 0, float("-inf")
        rest, is_alive = b"", follow
        while True:
            if is_alive and time.monotonic() - asked_at > ALIVE_S:
                now = self.query([job_id]).get(job_id)
                is_alive, asked_at = now is not None and now.state in ACTIVE, time.monotonic()
            content = _content(path, at)
            at += len(content)
            *lines, rest = (rest + content).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            if not is_alive and not content:
                break
            if is_alive and not content:
                time.sleep(FOLLOW_S)
        if rest:
            yield rest.decode(errors="replace")

    def max_array(self) -> int:
        """MaxArraySize (its largest index is one less), or max_array_tasks where that is smaller.

        Unreachable when the scheduler cannot be seen.
        """
        settings = config()
        sizes = [settings.get("MaxArraySize", "0")]
        sizes += re.findall(r"max_array_tasks=(\d+)", settings.get("SchedulerParameters", ""))
        return min(int(size) for size in sizes if size.isdigit())

    def render_array(
        self, specs: Sequence[JobSpec], *, token: str, index_file: str, max_parallel: int | None
    ) -> Rendered:
        """One `sbatch --array`. ConfigError when the specs differ in what its elements share."""
        first = specs[0]
        for spec in specs:
            differs = [
                key
                for key in ("job", "workdir", "after")
                if getattr(spec, key) != getattr(first, key)
            ]
            if differs or spec.wrapper[0] != first.wrapper[0]:
                text = ", ".join(differs) or "python"
                raise ConfigError(
                    f"array {token}: {spec.exp_id} and {first.exp_id} differ in {text}. Submit "
                    "them apart."
                )
        limit = "" if max_parallel is None else f"%{max_parallel:d}"
        options = [f"--array=0-{len(specs) - 1}{limit}", f"--comment=lathe array of {len(specs)}"]
        options += [
            *_options(first, token),
            *_output(PurePath(index_file).parent, "slurm-%A_%a.txt"),
        ]
        argv = _sbatch(options)
        wrapper = [first.wrapper[0], "-m", "jobs.node.wrapper", "--array", index_file]
        return Rendered(token, "rendered.sbatch", _script(argv, first, wrapper), argv)

    def element(self, array_id: str, index: int) -> str:
        """ARRAY_INDEX, as squeue shows it and scancel takes it."""
        return f"{array_id}_{index}"


def _sbatch(options: Sequence[str]) -> tuple[str, ...]:
    for option in options:
        if CONTROL.search(option):
            raise ConfigError(
                f"{option!r} holds a control character, which sbatch cannot carry. Rename it."
            )
    return ("sbatch", "--parsable", "--export=ALL", *options)


def _options(spec: JobSpec, token: str) -> list[str]:
    """The options of sbatch for this job, one argument each. ConfigError."""
    job, wrong = spec.job, list[str]()  # wrong: every value that Slurm would misread
    job.refuse_foreign("slurm", OWN)
    if not TOKEN.match(token):
        wrong.append(f"token {token!r}: want [a-z0-9_], at most 64")
    wrong += [
        f"after {text!r}: not the id of a Slurm job" for text in spec.after if not ID.match(text)
    ]
    for key in ("nodelist", "exclude"):
        if "/" in (getattr(job, key) or ""):  # sbatch would read it as the name of a file
            wrong.append(f"{key} {getattr(job, key)!r}: want names of nodes, not a file")
    if job.signal_s is not None and job.signal_s > 65535:
        wrong.append(f"signal_s={job.signal_s}: at most 65535")
    for key in ("gpu_mem", "gpu_model"):
        if (value := getattr(job.resources, key)) is not None:
            wrong.append(f"resources.{key}={value!r}: ask by gres ('gpu:a100:4') or constraint")
    if wrong:
        raise ConfigError("slurm: " + "\n".join(wrong))
    gres = job.gres or (f"gpu:{job.resources.gpu}" if job.resources.gpu else None)
    after = [f"afterok:{':'.join(spec.after)}"] if spec.after else []
    options = [
        f"--job-name={token}",
        # a second copy of the same attempt waits for the first
        f"--dependency={','.join(['singleton', *after])}",
        # or it would wait for ever once a job that it depends on has failed
        "--kill-on-invalid-dep=yes",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.resources.cpu}",
        f"--mem={job.resources.mem}G",
        "--requeue" if job.requeue else "--no-requeue",
    ]
    limit = None
    if job.max_run_time is not None:  # Slurm's own limit comes after that of the wrapper
        seconds = job.max_run_time + job.grace_s + 60
        limit = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    values = {
        "gres": gres,
        "time": job.time or limit,
        **{key: getattr(job, key) for key in RESOURCES},
    }
    options += [f"--{name}={value}" for name, value in values.items() if value is not None]
    return options + ([f"--signal=B:USR1@{job.signal_s}"] if job.signal_s is not None else [])


def _output(folder: PurePath, name: str) -> list[str]:
    r"""The options for Slurm's own log. In a file pattern "%" is doubled; Slurm 22.05 drops a
    backslash, so a path with one is refused.
    """
    text = str(folder)
    if not folder.is_absolute() or "\\" in text:
        raise ConfigError(
            f"{text!r}: Slurm writes only to an absolute path without a backslash. Use another "
            "folder."
        )
    return [f"--chdir={text}", f"--output={text.replace('%', '%%')}/{name}", "--open-mode=append"]


def _script(argv: Sequence[str], spec: JobSpec, wrapper: Sequence[str]) -> str:
    """The batch script: quoted words only, so that no value can be more than a word."""
    variables = spec.wrapper_environment
    for word in (spec.workdir, *wrapper, *variables.values()):
        if CONTROL.search(word):
            raise ConfigError(
                f"{word!r} holds a control character, which a batch script cannot carry. Rename it."
            )
    lines = (
        "#!/bin/sh",
        f"# sent with: {shlex.join(argv)}",
        f"export SRUN_CPUS_PER_TASK={spec.job.resources.cpu}  # srun has not inherited it from "
        "the job since 22.05",
        *(f"export {name}={shlex.quote(text)}" for name, text in variables.items()),
        f"cd -- {shlex.quote(spec.workdir)} || exit 1",
        f"exec {shlex.join(wrapper)}",
    )
    return "\n".join(lines) + "\n"


def _content(path: Path, at: int) -> bytes:
    """The content of a file from a position on; empty while the file does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            return file.read()
    except FileNotFoundError:
        return b""


def _examine() -> Iterator[Finding]:
    """Findings about a controller that answers. Unreachable."""
    # others try for 9 s before they say so
    if "UP" not in (ping := "; ".join(ask("scontrol", "ping")).strip()):
        raise Unreachable(ping)
    settings = config()
    version, auth = (
        settings.get("SLURM_VERSION", "of unknown version"),
        settings.get("AuthType", ""),
    )
    yield Finding(
        "controller",
        True,
        f"Slurm {version} of cluster {settings.get('ClusterName')} answers ({auth})",
    )
    storage = settings.get("AccountingStorageType", "").removeprefix("accounting_storage/")
    is_kept = storage not in ("", "none", "(null)")
    is_read = is_kept and call(["sacct", "-n", "-X", "-Snow"], timeout_s=ASK_S).code == 0
    age = f"ended jobs are remembered for MinJobAge={settings.get('MinJobAge')}"
    text = (
        "sacct answers"
        if is_read
        else f"sacct does not answer; {age}"
        if is_kept
        else f"none is kept; {age}"
    )
    yield Finding("accounting", is_read or not is_kept, text, is_blocking=False)
    yield Finding(
        "stopping",
        True,
        f"KillWait={settings.get('KillWait')} from TERM to KILL; grace_s must fit into it",
    )
    limits = ("JobRequeue", "PreemptMode", "MaxArraySize")
    yield Finding("limits", True, ", ".join(f"{name}={settings.get(name)}" for name in limits))
    for line in ask("sinfo", "--noheader", "--format=%P|%a|%l|%D|%G|%T"):
        name, state, limit, count, gres, node_state = (line.split("|") + [""] * 5)[:6]
        is_good = state == "up" and not OUT_OF_USE.match(node_state)
        text = f"{state}, {count} node(s) {node_state}, at most {limit}, {gres}"
        yield Finding(f"partition {name}", is_good, text, is_blocking=False)
