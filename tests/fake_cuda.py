"""A GPU that is none: a run does what it would do on CUDA, with CPU tensors, and every wait of the
host for the device is written down with its place.

Tensors of the device are CPU tensors whose storage is marked; `tensor.device` says cpu:0 of them,
and cpu of all others. So the numbers are those of the CPU. DeepSpeed (0.19.8) is given an
accelerator that says it is not synchronous, as CUDA's does, with streams and events that do nothing.
The host waits when a number of the device is asked for (item, tolist, nonzero, a boolean index),
when memory is copied to the host, when memory that is not pinned is copied to the device, and when
somebody synchronizes. Patches torch for the whole process: install() belongs into one of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent
aten = torch.ops.aten
_ASKING = {
    aten._local_scalar_dense.default: "item",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.unique_dim.default: "unique",
    aten.unique_consecutive.default: "unique",
    aten.bincount.default: "bincount",
    aten.equal.default: "equal",
}
_INDEXING = {aten.index.Tensor, aten._unsafe_index.Tensor}
_WRITING = {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_of_device = Tensor.device.__get__  # type: ignore[attr-defined]


@dataclass
class Device:
    """What is known of the device, and what was seen."""

    file: Path  # a JSON line for each wait and each copy
    step: int = -1  # optimizer steps begun
    on_device: dict[int, Any] = field(default_factory=dict)  # storages, by their address
    pinned: dict[int, Any] = field(default_factory=dict)
    stream: int = 0  # the current one; 0 computes
    modes: int = 0
    is_asleep: bool = False  # nothing is written down

    def mark(self, table: dict[int, Any], tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in table:
            table[key] = weakref.ref(storage, lambda _: table.pop(key, None))

    def has(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self.on_device

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.pinned

    def wait(self, kind: str) -> None:
        self.write({"wait": kind, "place": _place()})

    def copy(self, nbytes: int, direction: str, *, waits: bool) -> None:
        self.write({"copy": direction, "nbytes": nbytes, "stream": self.stream, "waits": waits})
        if waits:
            self.wait(f"copy {direction}")

    def write(self, line: dict[str, Any]) -> None:
        if self.is_asleep:
            return
        with self.file.open("a") as file:
            file.write(json.dumps({"step": self.step, **line}) + "\n")


def _place() -> str:
    """Where a wait is: the innermost line outside of torch, and the innermost one of ours."""
    frame: Any = sys._getframe(2)
    theirs = None
    while frame is not None:
        file = frame.f_code.co_filename
        is_between = "/torch/" in file or file in (
            __file__,
            contextlib.__file__,
            functools.__file__,
        )
        is_between |= frame.f_code.co_name == "__torch_function__"
        if file.startswith(str(ROOT / "trainer")) and not is_between:
            ours = f"{file.removeprefix(str(ROOT) + '/')}:{frame.f_code.co_name}"
            return ours if theirs is None else f"{theirs} < {ours}"
        if theirs is None and not is_between and "<frozen" not in file:
            short = file.partition("site-packages/")[2] or file
            theirs = f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return str(theirs)


def _is_collective() -> bool:
    """Whether gloo copies here, which NCCL would not."""
    frame: Any = sys._getframe(3)
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        if "/torch/distributed/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return "deprecated" in str(frame) or "typing_extensions" in str(frame)


class _Watching(TorchDispatchMode):
    """Sees every operation: which results lie on the device, and which operations wait for it."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = self._device
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        is_here = any(map(device.has, tensors))
        if is_here:
            self._waits(func, args, kwargs)
        out = func(*args, **kwargs)
        target = kwargs.get("device")
        # C++ knows one kind of CPU: what it makes in backward lies where the gradients do
        is_known = target is not None and torch._C._current_graph_task_id() == -1
        if func is aten._to_copy.default:
            is_here = target.index == 0 if is_known and target.index == 0 else is_here
            self._moved(args[0], is_to_device=is_here, kwargs=kwargs)
        elif func is aten.copy_.default:
            self._copied(args[0], args[1], is_blocking=not (args[2:] or (False,))[0])
        elif target is not None:
            is_here = target.index == 0 if is_known else True
        if is_here and func is not aten.copy_.default:
            for tensor in tree_iter(out):
                if isinstance(tensor, Tensor):
                    device.mark(device.on_device, tensor)
        return out

    def _waits(self, func: Any, args: Any, kwargs: Any) -> None:
        if func in _ASKING:
            self._device.wait(_ASKING[func])
        elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self._device.wait("repeat_interleave")
        elif func in _INDEXING or func in _WRITING:
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if masks and not (func in _WRITING and args[2].numel() == 1):  # that one is a fill
                self._device.wait("boolean index")
            for index in args[1]:
                if index is not None and index.ndim and not self._device.has(index):
                    self._device.copy(index.nbytes, "to device", waits=True)

    def _moved(self, source: Tensor, *, is_to_device: bool, kwargs: Any) -> None:
        """The way to the host begins in Tensor.to, which sees what its caller meant."""
        if is_to_device and not self._device.has(source):
            is_free = kwargs.get("non_blocking") and self._device.is_pinned(source)
            self._device.copy(source.nbytes, "to device", waits=not is_free)

    def _copied(self, target: Tensor, source: Tensor, *, is_blocking: bool) -> None:
        to, of = self._device.has(target), self._device.has(source)
        if to == of or (to and source.ndim == 0) or _is_collective():
            return  # a number travels as an argument of a kernel
        host = source if to else target
        waits = is_blocking or not self._device.is_pinned(host)
        self._device.copy(source.nbytes, "to device" if to else "to host", waits=waits)


class _Making(TorchFunctionMode):
    """Sees torch.tensor(..., device=): its values are copied from the host."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        target = (kwargs or {}).get("device")
        is_made = func in (torch.tensor, torch.as_tensor) and target is not None
        if is_made and torch.device(target).index == 0 and not self._device.has(out):
            self._device.copy(out.nbytes, "to device", waits=True)
            self._device.mark(self._device.on_device, out)
        return out


class _Stream:
    """A stream that only has a number."""

    numbers = iter(range(1, 1 << 30))

    def __init__(self, *args: Any, number: int | None = None, **kwargs: Any) -> None:
        self.number = next(self.numbers) if number is None else number

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _device().wait("stream.synchronize")


class _Event:
    """An event of which nobody waits: it is asked for long after it was recorded, or it counts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        _device().wait("event.synchronize")


_installed: list[Device] = []


def _device() -> Device:
    return _installed[0]


def install(file: Path) -> None:
    """From here on this process has a GPU, as far as Lathe and DeepSpeed can tell."""
    device = Device(file)
    _installed.append(device)
    _patch_tensors(device)
    _patch_lathe(device)
    _patch_kernels(device)
    _patch_deepspeed(device)
    _Making(device).__enter__()
    _Watching(device).__enter__()


def _patch_tensors(device: Device) -> None:
    move, tolist, numpy = Tensor.to, Tensor.tolist, Tensor.numpy

    def to_host(tensor: Tensor) -> Tensor:
        device.copy(tensor.nbytes, "to host", waits=True)
        out = tensor.clone()
        device.on_device.pop(out.untyped_storage()._cdata, None)
        return out

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = [*args, *kwargs.values()]
        is_host = any(
            (isinstance(x, torch.device) and x == HOST) or (isinstance(x, str) and x == "cpu")
            for x in given
        )
        if is_host and device.has(self):
            return move(to_host(self), *args, **kwargs)
        return move(self, *args, **kwargs)

    def read(ask: Callable[..., Any], kind: str, self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if device.has(self):
            device.wait(kind)
        return ask(self, *args, **kwargs)

    def pin(self: Tensor) -> Tensor:
        out = self.clone()
        device.mark(device.pinned, out)
        return out

    Tensor.to = to  # type: ignore[method-assign]
    Tensor.cpu = lambda self: to_host(self) if device.has(self) else self  # type: ignore[method-assign]
    Tensor.tolist = lambda self: read(tolist, "tolist", self)  # type: ignore[method-assign]
    Tensor.numpy = lambda self, **how: read(numpy, "numpy", self, **how)  # type: ignore[method-assign]
    Tensor.pin_memory = pin  # type: ignore[method-assign]
    Tensor.is_pinned = lambda self, *_: device.is_pinned(self)  # type: ignore[method-assign]
    Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    Tensor.device = property(lambda self: DEVICE if device.has(self) else _of_device(self))  # type: ignore[assignment,method-assign]


def _patch_lathe(device: Device) -> None:
    from trainer.runtime import distributed
    from trainer.training import loop

    train_step = loop.train_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        device.step += 1
        return train_step(*args, **kwargs)

    @contextlib.contextmanager
    def on(stream: _Stream) -> Any:
        before, device.stream = device.stream, stream.number
        yield
        device.stream = before

    loop.train_step = counted
    distributed.device = lambda: DEVICE
    distributed.is_gpu = lambda: True
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event  # type: ignore[misc,assignment]
    torch.cuda.stream = on  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *_: _Stream(number=device.stream)  # type: ignore[assignment,return-value]


def _patch_kernels(device: Device) -> None:
    """What Triton's kernels do on a GPU is done by the CPU here, row by row, which asks where rows
    begin: those questions are none.
    """
    from trainer.models.packed import stream_attention

    def quietly(run: Any) -> Any:
        @functools.wraps(run)
        def unseen(*args: Any) -> Any:
            device.is_asleep = True
            try:
                out = run(*args)
            finally:
                device.is_asleep = False
            for tensor in tree_iter(out):
                if isinstance(tensor, Tensor):
                    device.mark(device.on_device, tensor)
            return out

        return unseen

    for name in ("_forward", "_backward"):
        setattr(stream_attention, name, quietly(getattr(stream_attention, name)))


def _patch_deepspeed(device: Device) -> None:
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Accelerator(CPU_Accelerator):
        Stream, Event = _Stream, _Event  # type: ignore[assignment]

        def is_synchronized_device(self) -> bool:
            return False

        def device_name(self, device_index: int | None = None) -> str:
            return "cpu:0"

        def current_device(self) -> int:
            return 0

        def current_device_name(self) -> str:
            return "cpu:0"

        def synchronize(self, device_index: int | None = None) -> None:
            device.wait("synchronize")

        def stream(self, stream: _Stream) -> Any:
            return torch.cuda.stream(stream)

        def current_stream(self, device_index: int | None = None) -> Any:
            return _Stream(number=device.stream)

        def default_stream(self, device_index: int | None = None) -> Any:
            return _Stream(number=0)

        def on_accelerator(self, tensor: Tensor) -> bool:
            return device.has(tensor)

        def pin_memory(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return tensor.pin_memory()

        @property
        def FloatTensor(self) -> Any:
            return functools.partial(torch.tensor, dtype=torch.float32, device=DEVICE)

        @property
        def ByteTensor(self) -> Any:
            return functools.partial(torch.tensor, dtype=torch.uint8, device=DEVICE)

    real_accelerator.ds_accelerator = Accelerator()


def waits_of(file: Path, step: int) -> Counter[tuple[str, str]]:
    """How often the host waited in one optimizer step, by kind and place."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return Counter(
        (line["wait"], line["place"]) for line in lines if "wait" in line and line["step"] == step
    )
