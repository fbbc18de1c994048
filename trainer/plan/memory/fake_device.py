"""A device that computes nothing and counts every byte: CUDA's allocations without a GPU.

Tensors are fake (shapes only) and lie on a Python backend of torch, which takes CUDA's path where a
kernel chooses by device: dropout keeps a mask of one byte, AdamW may be fused. Fake "cuda" tensors
cannot be used: without CUDA, torch 2.13 aborts the process in autograd (SIGABRT in
getDeviceGuardImpl). The backend is registered for the whole process and functions of torch are
replaced, so this belongs into a process of its own (trainer.plan.memory.measure).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers.utils import import_utils

from trainer.models.packed.replaced import replaced
from trainer.plan.memory.fake_values import run_with_twins
from trainer.plan.memory.tracker import Tracker

# B batch, H heads, Q queries, K keys

T = TypeVar("T")

FAKE_GPU = "fakegpu"
# cpu: what the CPU's own kernels allocate, to be held against real runs
DeviceName = Literal["fakegpu", "cpu"]
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_WIDTH = 256  # widest head that the flash kernel takes
# elements; the efficient kernel pads masks to it (torch 2.13, sdp_utils pad_bias)
_MASK_ALIGNMENT = 8


class _Module:
    """What torch asks a device's module: one device, no random state of its own."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return list(_FLASH_DTYPES)

    def manual_seed_all(self, seed: int) -> None:
        del seed

    def get_rng_state(self, device: Any = None) -> Tensor:
        del device
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        del state, device

    def device(self, index: Any) -> Any:
        return torch.device(FAKE_GPU, 0) if index is None else _NoGuard()


class _NoGuard:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_is_registered = False


def register() -> None:
    """Make the fake GPU a device of this process, once. It cannot be undone."""
    global _is_registered
    if _is_registered:
        return
    _setup_privateuseone_for_python_backend(FAKE_GPU, backend_module=_Module())
    torch.tensor = _tensor
    FakeTensor.tolist = lambda self: self.twin.tolist()  # pyright: ignore
    F.scaled_dot_product_attention = _attention
    varlen.varlen_attn = _attention_of_rows
    _is_registered = True


# bytes of fp32 sums that the backward of each attention takes for its queries
_scratch: list[int] = []
_torch_tensor = torch.tensor
_torch_attention = F.scaled_dot_product_attention
_torch_attention_of_rows: Any = varlen.varlen_attn


def _tensor(
    data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **more: Any
) -> Tensor:
    """torch.tensor, which hides from dispatch modes.

    Left alone, it would ask the fake GPU for real memory.
    """
    if device is None or torch.device(device).type != FAKE_GPU:
        return _torch_tensor(data, dtype=dtype, device=device, requires_grad=requires_grad, **more)
    return _torch_tensor(data, dtype=dtype, **more).to(device).requires_grad_(requires_grad)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the kernel that CUDA would take: flash without a mask, memory-efficient with one
    or in fp32.

    A TorchFunctionMode would not do: it is off inside backward(), so that a checkpointed block
    recomputes by another kernel, which aborts on a Python backend.
    """
    if query.device.type != FAKE_GPU:
        how = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        return _torch_attention(query, key, value, **how, scale=scale, enable_gqa=enable_gqa)
    _scratch.append(4 * query.numel())
    if attn_mask is None and query.dtype in _FLASH_DTYPES and query.shape[-1] <= _FLASH_WIDTH:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if key.shape[1] != query.shape[1]:  # the efficient kernel knows no grouped queries
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    mask = None if attn_mask is None else _as_bias(attn_mask, query, key)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    keeps_sums = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    return efficient(query, key, value, mask, keeps_sums, dropout_p, is_causal, scale=scale)[0]


def _attention_of_rows(query: Tensor, *rest: Any, **how: Any) -> Tensor:
    """torch's attention for rows where they lie, with the sums that its backward takes."""
    _scratch.append(4 * query.numel())
    return _torch_attention_of_rows(query, *rest, **how)


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """(B, H, Q, K) as the efficient kernel reads it: numbers, aligned, expanded without a copy."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(
            mask.logical_not(), float("-inf")
        )
    num_keys = key.shape[2]
    if mask.shape[-1] % _MASK_ALIGNMENT and mask.shape[-1] == num_keys:
        mask = F.pad(mask, (0, -num_keys % _MASK_ALIGNMENT))[..., :num_keys]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], num_keys)


def _safe_softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """The softmax of unfused attention with its mask of one byte a score, of which torch's own
    (2.13) fake one makes none; the CPU's allocator recorded it.
    """
    shares = torch.softmax(scores, dim, dtype)
    is_hidden = scores.eq(-torch.inf)
    return shares.masked_fill_(is_hidden.all(dim, keepdim=True), 0.0)


def _where(tensor: FakeTensor) -> torch.device:
    """What torch's own fake tensor answers (2.13), without the way there."""
    return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


class _Counted(TorchDispatchMode):
    """Shows every operation's result to the tracker, and lets integers keep their true values."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # half of all calls: torch asks where a tensor is
            return _where(args[0])
        if func is torch.ops.aten._safe_softmax.default:
            with self:
                return _safe_softmax(*args, **(kwargs or {}))
        out = run_with_twins(func, args, kwargs or {})
        self._tracker.see(out, func, args, kwargs)
        return out


class FakeDevice:
    """A device inside `fake_device()`: models and batches are put on it, its tracker counts."""

    def __init__(self, name: DeviceName, mode: FakeTensorMode) -> None:
        self.device, self._mode = torch.device(name), mode
        self.tracker = Tracker(name)

    @property
    def scratch(self) -> int:
        """The most that one attention kernel takes in backward, which fake tensors do not show."""
        return max(_scratch, default=0)

    def place(self, model: nn.Module) -> nn.Module:
        """The model's parameters and buffers as fake ones on this device; tied ones stay tied."""
        placed: dict[int, Any] = {}
        with _disable_current_modes():  # an operation for each weight would take as long as a step
            for module in model.modules():
                tables = ((module._parameters, "weights"), (module._buffers, "buffers"))
                for table, category in tables:
                    for name, tensor in table.items():
                        if tensor is None:
                            continue
                        if id(tensor) not in placed:
                            placed[id(tensor)] = self._like(tensor)
                            self.tracker.hold(placed[id(tensor)], category)
                        table[name] = placed[id(tensor)]
        return model

    def _like(self, tensor: Tensor) -> Tensor:
        shape = torch.empty(
            tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
        )
        fake = FakeTensor(self._mode, shape, self.device)
        fake._is_param = isinstance(tensor, nn.Parameter)  # as torch's own marks a Parameter
        return fake

    def put(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A real batch on this device; its values stay known (integers.py)."""
        placed: dict[str, Any] = {}
        for name, tensor in batch.items():
            placed[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            placed[name].twin = tensor
        return placed


@contextmanager
def fake_device(name: DeviceName) -> Iterator[FakeDevice]:
    """Inside, nothing is computed, and what is made on the device is counted.

    Only in a process of its own.
    """
    if name == FAKE_GPU:
        register()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _values_are_known():
        _scratch.clear()
        device = FakeDevice(name, mode)
        with _Counted(device.tracker):
            yield device


class _LinearOfPartitioned(torch.autograd.Function):
    """A linear layer as DeepSpeed 0.19.8 computes it at ZeRO-3 (runtime/zero/linear.py): it keeps
    what goes in for the backward pass, also where the weight is frozen and torch's would not.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(input, weight, bias)
        if input.dim() == 2 and bias is not None:
            return torch.addmm(bias, input, weight.t())
        output = input.matmul(weight.t())
        if bias is not None:
            output += bias
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        input, weight, bias = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_input = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = flat.t().matmul(input.reshape(-1, input.shape[-1]))
        needs_bias = bias is not None and ctx.needs_input_grad[2]
        return of_input, of_weight, flat.sum(0) if needs_bias else None


@contextmanager
def linear_of_partitioned() -> Iterator[None]:
    """Inside, linear layers are ZeRO-3's."""

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return _LinearOfPartitioned.apply(input, weight, bias)

    with replaced(F, "linear", linear):
        yield


_GROUPS = 4  # of rows by length, each counted by its middle one


@contextmanager
def rows_in_groups(tracker: Tracker) -> Iterator[None]:
    """Inside, attention that a processor computes row by row (packed/stream_attention.py) does so
    for a row of each group of like lengths, which counts as often as the group has rows.
    """
    from trainer.models.packed import stream_attention

    before = stream_attention.spans_of

    def spans_of(rows: Any) -> Iterator[Any]:
        spans = sorted(before(rows), key=lambda pair: sum(span.stop - span.start for span in pair))
        for number in range(_GROUPS):
            start, stop = (len(spans) * n // _GROUPS for n in (number, number + 1))
            if start < stop:
                with tracker.standing_for(stop - start):
                    yield spans[(start + stop) // 2]

    with replaced(stream_attention, "spans_of", spans_of):
        yield


@contextmanager
def equal_chunks_once(tracker: Tracker) -> Iterator[None]:
    """Inside, the chunks of an output layer (models/losses.py) between the first and the last one
    are one, which stands for all of them.
    """
    from trainer.models import losses

    before = losses.chunks_of

    def chunks_of(num_rows: int, size: int) -> Iterator[slice]:
        chunks = list(before(num_rows, size))
        yield chunks[0]
        if len(chunks) > 2:
            with tracker.standing_for(len(chunks) - 2):
                yield chunks[1]
        if len(chunks) > 1:
            yield chunks[-1]

    with replaced(losses, "chunks_of", chunks_of):
        yield


def for_real(function: Callable[..., T]) -> Callable[..., T]:
    """The same function, run as if outside of `fake_device()`: for what makes real batches."""

    def run(*args: Any, **kwargs: Any) -> T:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


def _values_are_known() -> AbstractContextManager[None]:
    """Inside, transformers (5.23) can look into masks: twins of the fake values answer.

    It looks there to leave out masks that hide nothing.
    """
    return replaced(import_utils, "is_fake_tensor", lambda x: False)
