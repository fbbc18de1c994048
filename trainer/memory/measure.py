"""What a step of a model needs: it runs under fake tensors, in a process of its own, which
`measure()` starts. Imports no torch.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainer.errors import LatheError

if TYPE_CHECKING:
    from trainer.tasks.protocol import Places

ROOT = Path(__file__).resolve().parent.parent.parent
TIME_LIMIT_S = 600.0
_SHOWN_LINES = 12  # of what a failed process said
TRAINING, EVALUATION, GENERATION = "training step", "evaluation", "generation"  # phases of a run
Kind = Literal["train", "evaluate", "answer"]


@dataclass(frozen=True)
class MeasureRequest:
    """One thing to run under fake tensors."""

    experiment: dict[str, Any]
    kind: Kind
    rows: list[dict[str, list[int]]]  # encoded, of one micro-batch
    raw: list[dict[str, Any]] = field(default_factory=list)  # the same as text, for answers
    answer_tokens: int | None = None  # of an answer; None: as many as the experiment allows
    accumulates: bool = False  # a second micro-batch of the same rows follows


@dataclass(frozen=True)
class Moment:
    """What is alive besides weights and buffers at one moment of a step.

    A step keeps the moments that may be its peak: no other one has both more gradients that are
    complete and more of everything else.
    """

    gradients: int  # bytes, of gradients that are complete
    # everything else: saved tensors, temporaries, a gradient in the making, the batch
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.gradients + self.activations + self.logits


@dataclass(frozen=True)
class Measured:
    """Bytes of one step."""

    weights: int
    buffers: int
    trainable: int  # numbers, not bytes
    frozen: int
    largest: int  # numbers of the largest trainable weight
    states: int  # numbers that the optimizer remembers of all weights
    moments: list[Moment]
    scratch: int  # of attention kernels
    shapes: dict[str, list[int]]  # of the batch
    tensors: list[tuple[str, int]]  # the largest at the end of the forward
    seconds: float
    # the moments of a step at ZeRO-3, where they are others: its linear layers keep their inputs
    partitioned: list[Moment] = field(default_factory=list)

    def moments_at(self, stage: int) -> list[Moment]:
        """The moments of a training step at this stage of ZeRO."""
        return self.partitioned if stage == 3 and self.partitioned else self.moments

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Measured:
        lists = {
            name: [Moment(**moment) for moment in values[name]]
            for name in ("moments", "partitioned")
        }
        return cls(
            **{
                **values,
                **lists,
                "tensors": [(name, size) for name, size in values["tensors"]],
            }
        )

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def changed(values: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The experiment with one key of a block set, such as data.source_tokens."""
    copied = copy.deepcopy(dict(values))
    *blocks, key = path.split(".")
    block = copied
    for name in blocks:
        block = block.setdefault(name, {})
    block[key] = value
    return copied


class MeasuringError(LatheError):
    """The step could not be run under fake tensors."""


_kept: ContextVar[_Measurer | None] = ContextVar("_kept", default=None)


@contextmanager
def measuring() -> Iterator[None]:
    """Inside, every measure() asks one and the same process, which takes seconds to start and half
    a GiB of the host until the end. Outside, each starts its own.
    """
    if _kept.get() is not None:
        yield
        return
    measurer = _Measurer()
    token = _kept.set(measurer)
    try:
        yield
    finally:
        _kept.reset(token)
        measurer.close()


def measure(requests: Sequence[MeasureRequest], places: Places) -> list[Measured]:
    """What each request needs.

    MeasuringError, with the process's own words, when a step cannot be run.
    """
    with measuring():
        measurer = _kept.get()
        assert measurer is not None
        return measurer.answer(requests, places)


class _Measurer:
    """The process that runs steps under fake tensors: a line of JSON in, a line out."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._said = None  # what it writes to standard error

    def answer(self, requests: Sequence[MeasureRequest], places: Places) -> list[Measured]:
        job = {
            "requests": [asdict(request) for request in requests],
            "places": {
                name: None if path is None else str(path) for name, path in asdict(places).items()
            },
        }
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        is_late = threading.Event()
        timer = threading.Timer(TIME_LIMIT_S, lambda: (is_late.set(), process.kill()))
        timer.start()
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            return [Measured.of(values) for values in json.loads(line)]
        raise self._failed(process, is_late=is_late.is_set())

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._said is not None:
            self._said.close()
        self._process = self._said = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (close)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainer.memory.fake_step"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                env=_environment(),
            )
        return self._process

    def _failed(self, process: subprocess.Popen[str], *, is_late: bool) -> MeasuringError:
        code = process.wait()
        assert self._said is not None
        self._said.seek(0)
        words = "\n".join(self._said.read().strip().splitlines()[-_SHOWN_LINES:])
        self.close()  # the next one gets a new process
        if is_late:
            return MeasuringError(
                f"measuring memory took more than {TIME_LIMIT_S:.0f} s and was given up"
            )
        return MeasuringError(f"memory could not be measured (exit code {code}):\n{words}")


def _environment() -> dict[str, str]:
    # no GPU: the plan must not open a context on it; one thread: fake tensors compute nothing
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    return environment
