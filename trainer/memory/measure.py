"""What a step of a model needs: it runs under fake tensors, in a process of its own, which
`measure()` starts. Imports no torch.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
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


def measure(requests: Sequence[MeasureRequest], places: Places) -> list[Measured]:
    """What each request needs.

    MeasuringError, with the process's own words, when a step cannot be run.
    """
    job = {
        "requests": [asdict(request) for request in requests],
        "places": {
            name: None if path is None else str(path) for name, path in asdict(places).items()
        },
    }
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
    command = [sys.executable, "-m", "trainer.memory.fake_step"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(job),
            capture_output=True,
            text=True,
            check=False,
            timeout=TIME_LIMIT_S,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise MeasuringError(
            f"measuring memory took more than {TIME_LIMIT_S:.0f} s and was given up"
        ) from None
    if done.returncode:
        words = "\n".join(done.stderr.strip().splitlines()[-_SHOWN_LINES:])
        raise MeasuringError(
            f"memory could not be measured (exit code {done.returncode}):\n{words}"
        )
    return [Measured.of(values) for values in json.loads(done.stdout)]
