"""The memory and the operators of one step: it runs under fake tensors, in a process of its own,
which `measure()` starts. Imports no torch.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TextIO, cast

from trainer.config.identity import digest
from trainer.errors import LatheError, StorageError
from trainer.files.atomic import read_json, write_json
from trainer.switches import uses_cpu_kernels, uses_liger

if TYPE_CHECKING:
    from trainer.protocol.task import Places

ROOT = Path(__file__).resolve().parent.parent.parent.parent  # of the project
TIME_LIMIT_S = 600.0
_SHOWN_LINES = 12  # of the error output of a failed process
# The phases of a run.
TRAINING, EVALUATION, GENERATION = "training step", "evaluation", "generation"
TEACHING = "teacher's pass"  # the first one, of a run that learns from a teacher
Kind = Literal["train", "evaluate", "answer", "teach"]
Kernels = Literal["fakegpu", "cpu"]  # those of a GPU, or of a processor


@dataclass(frozen=True)
class MeasureRequest:
    """One step to run under fake tensors."""

    experiment: dict[str, Any]
    kind: Kind
    rows: list[dict[str, list[int]]]  # encoded, of one micro-batch
    raw: list[dict[str, Any]] = field(default_factory=list)  # the same as text, for answers
    answer_tokens: int | None = None  # of an answer; None: as many as the experiment allows
    accumulates: bool = False  # a second micro-batch of the same rows follows
    device: Kernels = "fakegpu"  # whose kernels are taken
    # for predictions of time: where a processor takes rows one by one, one row stands for a group
    # of rows of similar length
    groups_rows: bool = False
    sharing: int = 1  # ranks that share the tokens of the rows


@dataclass(frozen=True)
class Moment:
    """Bytes that are allocated besides weights and buffers at one moment of a step.

    A step keeps the Pareto front of finished gradients against all other memory: any of these
    moments may be the peak, depending on what a gradient costs at a stage of ZeRO.
    """

    gradients: int  # bytes, of gradients that are complete
    # everything else: saved tensors, temporaries, a gradient in the making, the batch
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.gradients + self.activations + self.logits


@dataclass(frozen=True)
class SteppedTogether:
    """A group of weights that the optimizer steps at once: ZeRO steps one group after the other."""

    numbers: int
    largest: int  # numbers of its largest weight
    # Bytes that the optimizer makes for a step and frees: for each number, of so many numbers at
    # once at most; of one weight; and of one matrix that ranks have cut.
    of_number: int = 0
    at_once: int | None = None
    of_weight: int = 0
    of_cut_matrix: int = 0

    def copies(self, numbers: int, *, is_cut: bool) -> int:
        """Bytes that stepping so many of its numbers at once makes, and frees."""
        at_once = numbers if self.at_once is None else min(numbers, self.at_once)
        cut = self.of_cut_matrix if is_cut else 0
        return self.of_number * at_once + self.of_weight + cut


@dataclass(frozen=True)
class Measured:
    """Bytes of one step."""

    weights: int
    buffers: int
    trainable: int  # numbers, not bytes
    frozen: int
    largest: int  # numbers of the largest trainable weight
    states: int  # numbers of 4 bytes in the optimizer's states, and in the average of the weights
    moments: list[Moment]
    scratch: int  # of attention kernels
    shapes: dict[str, list[int]]  # of the batch
    tensors: list[tuple[str, int]]  # the largest at the end of the forward
    seconds: float
    # the moments of a step at ZeRO-3 where they differ, as its linear layers keep their inputs
    partitioned: list[Moment] = field(default_factory=list)
    # the highest moment of a step at ZeRO-3 before the last large weight is read
    reading: Moment = field(default_factory=lambda: Moment(0, 0, 0))
    # of one micro-batch: the fields of each Operator, then how often it runs
    operators: list[list[Any]] = field(default_factory=list)
    calls: dict[str, int] = field(
        default_factory=dict
    )  # how often the host calls, by kind: tracker.py
    # the same for a step's last micro-batch, where it computes less than the others (GradCache)
    operators_of_last: list[list[Any]] = field(default_factory=list)
    calls_of_last: dict[str, int] = field(default_factory=dict)
    units: int = 0  # over which the loss of the batch is summed
    sizes: list[list[int]] = field(
        default_factory=list
    )  # [numbers of a weight, how many weights have this size]
    blocks: int = 0  # in the longest stack
    offloaded: int = 0  # bytes of inputs of blocks that wait in host memory at once
    groups: list[SteppedTogether] = field(default_factory=list)  # in the order of their steps

    @property
    def num_weights(self) -> int:
        return sum(count for _, count in self.sizes)

    @property
    def waits(self) -> bool:
        """Whether every micro-batch of a step runs forward before the first one runs backward."""
        return bool(self.operators_of_last)

    def moments_at(self, stage: int) -> list[Moment]:
        """The moments of a training step at this stage of ZeRO."""
        return self.partitioned if stage == 3 and self.partitioned else self.moments

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Measured:
        lists = {name: [Moment(**moment) for moment in values[name]] for name in _MOMENTS}
        return cls(
            **{
                **values,
                **lists,
                "reading": Moment(**values["reading"]),
                "groups": [SteppedTogether(**group) for group in values["groups"]],
                "tensors": [(name, size) for name, size in values["tensors"]],
            }
        )

    def plain(self) -> dict[str, Any]:
        # asdict() would copy every number of thousands of operators
        lists = {name: [vars(one) for one in getattr(self, name)] for name in _MOMENTS}
        groups = [vars(group) for group in self.groups]
        return {**vars(self), **lists, "reading": vars(self.reading), "groups": groups}


_MOMENTS = ("moments", "partitioned")


def scale_to_rows(few: tuple[int, Measured], some: tuple[int, Measured], rows: int) -> Measured:
    """The step of `rows` rows, extrapolated from steps of two other numbers of rows: at equal bytes
    of complete gradients, all other memory is linear in the number of rows.
    """
    (few_rows, less), (some_rows, more) = few, some
    part = (rows - few_rows) / (some_rows - few_rows)
    moments = _between(less.moments, more.moments, part)
    partitioned = _between(less.partitioned, more.partitioned, part)
    (reading,) = _between([less.reading], [more.reading], part) or [more.reading]
    scratch = max(0, round(less.scratch + part * (more.scratch - less.scratch)))
    offloaded = max(0, round(less.offloaded + part * (more.offloaded - less.offloaded)))
    return replace(
        more,
        moments=moments,
        partitioned=partitioned,
        reading=reading,
        scratch=scratch,
        offloaded=offloaded,
    )


def _between(less: list[Moment], more: list[Moment], part: float) -> list[Moment]:
    moments: list[Moment] = []
    for gradients in sorted({moment.gradients for moment in [*less, *more]}, reverse=True):
        low, high = _highest(less, gradients), _highest(more, gradients)
        if low is None or high is None:
            continue
        activations = low.activations + part * (high.activations - low.activations)
        logits = low.logits + part * (high.logits - low.logits)
        moments.append(Moment(gradients, max(0, round(activations)), max(0, round(logits))))
    return moments


def _highest(moments: list[Moment], gradients: int) -> Moment | None:
    """The highest of the moments with at least so many bytes of gradients. This is the last of
    them, because all other memory grows along the front.
    """
    place = bisect_right([-moment.gradients for moment in moments], -gradients)
    return moments[place - 1] if place else None


def with_value(values: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
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


_measurer: ContextVar[_Measurer | None] = ContextVar("_measurer", default=None)


@contextmanager
def measuring(forked: Callable[[TextIO, TextIO], None] | None = None) -> Iterator[None]:
    """Inside, all calls of measure() share one process, which takes seconds to start and half a GiB
    of host memory. Outside, each call starts its own.

    forked: fake_step.answer_all, of a command that has neither threads nor a GPU: the process is a
    fork of this one, with all that has been imported here.
    """
    if _measurer.get() is not None:
        yield
        return
    measurer = _Measurer(forked)
    token = _measurer.set(measurer)
    try:
        yield
    finally:
        _measurer.reset(token)
        measurer.close()


def measure(requests: Sequence[MeasureRequest], places: Places) -> list[Measured]:
    """The measured step of each request. Steps that were measured before are read from the cache,
    for they depend on nothing but shapes and this program.

    MeasuringError, with the error output of the process, when a step cannot be run.
    """
    program = _program()
    paths = [places.cache_dir / "steps" / f"{_key(one, program)}.json" for one in requests]
    steps = {path: _read(path) for path in dict.fromkeys(paths)}
    missing = {path: one for path, one in zip(paths, requests, strict=True) if not steps[path]}
    if missing:
        with measuring():
            measurer = _measurer.get()
            assert measurer is not None
            answers = measurer.answer(list(missing.values()), places)
        for path, step in zip(missing, answers, strict=True):
            steps[path] = step
            with contextlib.suppress(StorageError, OSError):  # a plan needs no disk
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, replace(step, seconds=0.0).plain(), is_durable=False)
    return [cast("Measured", steps[path]) for path in paths]


def _read(path: Path) -> Measured | None:
    try:
        values = read_json(path)
        return None if values is None else Measured.of(values)
    except (TypeError, ValueError, KeyError):  # half written, or by another version of Measured
        return None


def _key(request: MeasureRequest, program: str) -> str:
    """A digest of everything that a step's bytes and operators depend on."""
    shapes = [_shape_of(request.experiment.get("base"))]
    if request.kind == "teach":
        shapes.append(_shape_of(request.experiment["teacher"].get("base")))
    kernels = switched(request.device)
    return digest({"program": program, "base": shapes, **kernels, **vars(request)})


def switched(device: Kernels) -> dict[str, bool]:
    """What the environment switches on of the kernels that a step on this device takes."""
    kernels: dict[str, bool] = {}
    if device == "cpu" and uses_cpu_kernels(os.environ):
        from trainer.models.processor import products

        kernels["cpu_kernels"] = True
        kernels["by_way_of_32_bits"] = bool(products.lacking())
    if device != "cpu" and uses_liger(os.environ):
        kernels["liger"] = True
    return kernels


def _shape_of(base: Any) -> str:
    """The config.json of a folder; "" of any other base."""
    config = Path(base) / "config.json" if isinstance(base, str) else None
    return config.read_text() if config is not None and config.is_file() else ""


@cache
def _program() -> str:
    """A digest of this program's files and the versions of its libraries."""
    versions = [
        [str(file.relative_to(ROOT)), file.stat().st_size, file.stat().st_mtime_ns]
        for file in files_of_program()
    ]
    return digest({"files": versions, "torch": version("torch"), "with": version("transformers")})


def files_of_program() -> list[Path]:
    """The files that decide what a step needs: a step that others measured is measured again."""
    return sorted((ROOT / "trainer").rglob("*.py"))


class _Measurer:
    """The process that runs steps under fake tensors: a line of JSON in, a line out."""

    def __init__(self, forked: Callable[[TextIO, TextIO], None] | None) -> None:
        self._forked = forked
        self._process: subprocess.Popen[str] | _Fork | None = None
        self._errors = None  # what it writes to standard error

    def answer(self, requests: Sequence[MeasureRequest], places: Places) -> list[Measured]:
        job = {
            "requests": [vars(request) for request in requests],
            "places": {
                name: None if path is None else str(path) for name, path in asdict(places).items()
            },
        }
        if self._process is None:
            self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (close)
            if self._forked is not None:
                self._process = _Fork(self._errors, self._forked)
            else:
                self._process = _start(self._errors)
        process = self._process
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
        raise self._failure(process, is_late=is_late.is_set())

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
        if self._errors is not None:
            self._errors.close()
        self._process = self._errors = None

    def _failure(self, process: subprocess.Popen[str] | _Fork, *, is_late: bool) -> MeasuringError:
        code = process.wait()
        assert self._errors is not None
        self._errors.seek(0)
        words = "\n".join(self._errors.read().strip().splitlines()[-_SHOWN_LINES:])
        self.close()  # the next one gets a new process
        if is_late:
            return MeasuringError(
                f"measuring memory took more than {TIME_LIMIT_S:.0f} s and was given up"
            )
        return MeasuringError(f"memory could not be measured (exit code {code}):\n{words}")


def _start(errors: Any) -> subprocess.Popen[str]:
    """Start a new process. errors: the file that takes its standard error."""
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.plan.memory.fake_step"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=_environment(),
    )


class _Fork:
    """A copy of this process that answers requests, with the methods of a Popen that we use."""

    def __init__(self, errors: Any, answer: Callable[[TextIO, TextIO], None]) -> None:
        """errors: the file that takes its standard error."""
        requests, ours = os.pipe()
        theirs, answers = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._code: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            os.close(ours)
            os.close(theirs)
            os.dup2(errors.fileno(), 2)
            _answer_until_the_end(answer, requests, answers)
        os.close(requests)
        os.close(answers)
        self.stdin, self.stdout = open(ours, "w"), open(theirs)  # noqa: SIM115 (close)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit code."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code


def _answer_until_the_end(
    answer: Callable[[TextIO, TextIO], None], requests: int, answers: int
) -> NoReturn:
    """Answer requests in the forked process, then exit: the fork never returns to the caller."""
    code = 1
    try:
        sys.stdout = sys.stderr  # a print must not get among the answers
        answer(open(requests), open(answers, "w"))  # noqa: SIM115 (until the end)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


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
