"""A Dockerfile read and carried out without Docker: its stages for a target, and its instructions in
folders of this machine that stand for the places of the image.

Only what ours uses is understood: FROM, ARG, ENV, WORKDIR, COPY without flags, RUN in the shell's
form, and the instructions that say how a container starts.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import string
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

STARTS = {"USER", "VOLUME", "EXPOSE", "ENTRYPOINT", "CMD"}
APT = "apt-get update"  # what an instruction that installs packages of the distribution begins with


@dataclass(frozen=True)
class Instruction:
    """One instruction: its word in capitals, and the rest on one line."""

    word: str
    rest: str


def read(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile, without comments and with continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    parts = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [Instruction(word.upper(), " ".join(rest.split())) for word, rest in parts]


def chain(instructions: list[Instruction], arguments: Mapping[str, str]) -> list[Instruction]:
    """What is carried out for the last stage: the stages that it is made from, the first one first.

    arguments: --build-arg. KeyError for a stage whose base is neither a stage nor an image here.
    """
    given: dict[str, str] = {}
    stages: dict[str, tuple[str, list[Instruction]]] = {}
    name = ""
    for one in instructions:
        if one.word == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", one.rest).groups()  # type: ignore[union-attr]
            stages[name] = (string.Template(base).substitute(given), [])
        elif not stages:
            key, _, default = one.rest.partition("=")
            given[key] = arguments.get(key, default)
        else:
            stages[name][1].append(one)
    wanted: list[Instruction] = []
    while name in stages:
        name, own = stages[name]
        wanted = [*own, *wanted]
    return [Instruction("FROM", name), *wanted]


@dataclass
class Image:
    """What a Dockerfile has become: the variables of its containers, and how one starts.

    root: the folder that stands for "/" of the places /opt/lathe and /data. context: the folder of the
    Dockerfile. done: the RUN lines that were executed; left_out: those of apt-get, which would change
    this machine.
    """

    root: Path
    context: Path
    arguments: Mapping[str, str]
    environment: dict[str, str]
    workdir: Path = Path()
    starts: dict[str, str] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def placed(self, text: str) -> str:
        """A text with the image's places as folders of this machine, and its variables filled in."""
        text = re.sub(r"(?<![\w.}/])/(opt/lathe|data)\b", rf"{self.root}/\1", text)
        return string.Template(text).safe_substitute(self.environment)

    def build(self, instructions: list[Instruction]) -> None:
        """Carry out every instruction; CalledProcessError when a RUN line fails."""
        for one in instructions:
            if one.word in STARTS:
                self.starts[one.word] = self.placed(one.rest)
            elif one.word != "FROM":
                getattr(self, f"_{one.word.lower()}")(one.rest)

    def run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        """A command in the image, as its containers see it; CalledProcessError when it fails."""
        return subprocess.run(
            words,
            cwd=self.workdir,
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=3000,
        )

    def command(self, words: list[str]) -> list[str]:
        """The whole command line of a container that is started with `words`."""
        return [*json.loads(self.starts["ENTRYPOINT"]), *map(self.placed, words)]

    def _arg(self, rest: str) -> None:
        key, has_default, default = rest.partition("=")
        if has_default or key in self.arguments:
            self.environment[key] = self.arguments.get(key, default)

    def _env(self, rest: str) -> None:
        for pair in shlex.split(rest):
            key, _, value = pair.partition("=")
            self.environment[key] = self.placed(value)

    def _workdir(self, rest: str) -> None:
        self.workdir = Path(self.placed(rest))
        self.workdir.mkdir(parents=True, exist_ok=True)

    def _copy(self, rest: str) -> None:
        *sources, target = shlex.split(rest)
        for source in sources:
            path = self.context / source
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, self.workdir / target, ignore=ignored)
            else:
                shutil.copy(path, self.workdir / target)

    def _run(self, rest: str) -> None:
        if rest.startswith(APT):
            self.left_out.append(rest)
            return
        self.run(["/bin/sh", "-ec", self.placed(rest)])
        self.done.append(rest)


def clean_image(root: Path, context: Path, arguments: Mapping[str, str]) -> Image:
    """An image before its first instruction: of this machine's environment it has the way to Python
    and what pip is told.
    """
    path = os.environ["PATH"].split(os.pathsep)
    system = [part for part in path if not (Path(part).parent / "pyvenv.cfg").exists()]
    pip = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    return Image(root, context, arguments, {**pip, "PATH": os.pathsep.join(system)})
