"""The launch line of a job: --python_binary read as words, never given to a shell."""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from jobs.node import rendezvous
from trainer.errors import ConfigError
from trainer.files import survive as spec

if TYPE_CHECKING:
    from jobs.config import JobConfig

PYTHON = re.compile(r"python(\d+(\.\d+)*)?\Z")
LAUNCHERS = ("torchrun", "deepspeed")
SHELL = re.compile(r"[$`|&<>(){}*?!\\\n\r\0]")
COUNTS = ("--nproc-per-node", "--nproc_per_node", "--num_gpus", "--num_accelerators")
FORM = (
    "Want: [source|conda activate ENV ;] python | torchrun FLAGS | deepspeed FLAGS, for example "
    "'source activate /envs/lathe ; torchrun --nproc-per-node NGPUS'. Modules, containers, conda "
    "run and uv: docs/launch-line.md."
)


@dataclass(frozen=True)
class LaunchLine:
    """How the training starts: the environment to activate first, and argv before the program."""

    activate: str | None
    argv: tuple[str, ...]


def read(text: str, job: JobConfig, *, python: str) -> LaunchLine:
    """The launch of one job. NGPUS stands for the GPUs of a node of this very job (1 where it has
    none).

    text: "" chooses by itself: torchrun for several GPUs or nodes, else `python`, the interpreter
    of the job. Raises ConfigError for anything but activating an environment and one python,
    torchrun or deepspeed.
    """
    activate, words = _split(text)
    if not words:
        torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", "NGPUS"]
        is_torchrun = (job.gpus > 1 or job.nodes > 1) and not job.survive
        words = torchrun if is_torchrun else [python]
    name = PurePath(words[0]).name
    if name not in LAUNCHERS and not PYTHON.match(name):
        raise ConfigError(
            f"--python_binary {text!r}: {words[0]!r} is not python, torchrun or deepspeed. {FORM}"
        )
    if job.survive and (not PYTHON.match(name) or "-m" in words or job.nodes > 1):
        raise ConfigError(
            f"survive={job.survive!r}: got nodes={job.nodes}, launch line {shlex.join(words)!r}."
            " It starts its ranks itself, on one machine: use nodes=1 and python, or no survive."
        )
    if job.nodes > 1:
        words = _across_nodes(words, job)
    return LaunchLine(
        activate, tuple(word.replace("NGPUS", str(max(job.gpus, 1))) for word in words)
    )


def _split(text: str) -> tuple[str | None, list[str]]:
    """The environment to activate, and the words of the one command after it."""
    if match := SHELL.search(text):
        raise ConfigError(
            f"--python_binary {text!r}: {match.group()!r} belongs to a shell, and none runs. {FORM}"
        )
    try:
        parts = [words for part in text.split(";") if (words := shlex.split(part))]
    except ValueError as error:
        raise ConfigError(f"--python_binary {text!r}: {error}. {FORM}") from None
    activate = None
    while parts and parts[0][0] in ("source", "conda", "."):
        if activate is not None:
            raise ConfigError(f"--python_binary {text!r}: it activates two environments. Keep one.")
        activate = _environment(text, parts.pop(0))
    if len(parts) > 1:
        raise ConfigError(f"--python_binary {text!r}: {len(parts)} commands, want one. {FORM}")
    return activate, parts[0] if parts else []


def _environment(text: str, words: list[str]) -> str:
    is_named = len(words) == 3 and words[0] in ("source", "conda") and words[1] == "activate"
    is_script = (
        len(words) == 2 and words[0] in ("source", ".") and words[1].endswith("/bin/activate")
    )
    if not (is_named or is_script) or words[-1].startswith("-"):
        raise ConfigError(f"--python_binary {text!r}: cannot read {' '.join(words)!r}. {FORM}")
    return words[-1]


def _across_nodes(words: list[str], job: JobConfig) -> list[str]:
    """The same torchrun with a rendezvous at the first node.

    The wrapper fills in its host, port and id (jobs/node/rendezvous.py).
    """
    is_torchrun = PurePath(words[0]).name == "torchrun"
    at = 1 if is_torchrun else 3
    if not is_torchrun and words[1:3] != ["-m", "torch.distributed.run"]:
        raise ConfigError(
            f"nodes={job.nodes}: {words[0]!r} cannot start on several nodes. Use torchrun."
        )
    if any(word.startswith(("--nnodes", "--rdzv", "--master")) for word in words):
        return words
    meeting = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{rendezvous.HEAD}:{rendezvous.PORT}",
        "--rdzv-id",
        rendezvous.ID,
    ]
    return [*words[:at], "--nnodes", str(job.nodes), *meeting, *words[at:]]


def processes(argv: tuple[str, ...], job: JobConfig) -> int | None:
    """World size that a launcher will start.

    None when only the node knows (nproc-per-node "auto" or "gpu").
    """
    if job.survive:
        return spec.parse(job.survive, environment={}).ranks
    counts = dict(itertools.pairwise(argv)) | dict(
        word.split("=", 1) for word in argv if "=" in word
    )
    per_node_values = [counts[flag] for flag in COUNTS if flag in counts]
    is_launcher = PurePath(argv[0]).name in LAUNCHERS or argv[1:3] == (
        "-m",
        "torch.distributed.run",
    )
    if not is_launcher:
        return 1
    if not per_node_values and PurePath(argv[0]).name == "deepspeed":
        return job.gpus * job.nodes or None  # every device that it sees
    per_node = per_node_values[0] if per_node_values else "1"
    return int(per_node) * job.nodes if per_node.isdigit() else None
