"""A device that computes nothing and counts every byte that CUDA would allocate, without a GPU.

Its tensors are fake (they have only shapes). The device is a Python backend of torch, so that torch
takes CUDA's path where a kernel depends on the device: dropout keeps a mask of one byte, AdamW may
be fused. Fake "cuda" tensors cannot be used: without CUDA, torch 2.13 aborts the process in
autograd (SIGABRT in getDeviceGuardImpl). The backend is registered for the whole process, and
functions of torch are replaced, so a fake device needs a process of its own
(trainer.plan.memory.measure).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from trainer.models.processor import products
from trainer.plan.memory.fake_values import run_with_twins
from trainer.plan.memory.tracker import Tracker

# B batch, H heads, Q queries, K keys

T = TypeVar("T")

FAKE_GPU = "fakegpu"
# cpu: what a processor's kernels allocate
DeviceName = Literal["fakegpu", "cpu"]
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_WIDTH = 256  # widest head that the flash kernel takes
# elements; the efficient kernel pads masks to it (torch 2.13, sdp_utils pad_bias)
_MASK_ALIGNMENT = 8


class _Module:
    """The module of a torch device: one device, without a random state of its own."""

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


# for each call of attention: bytes of fp32 sums that its backward allocates for the queries
_scratch: list[int] = []
_torch_tensor = torch.tensor
_torch_attention = F.scaled_dot_product_attention
_torch_attention_of_rows: Any = varlen.varlen_attn


def _tensor(
    data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **more: Any
) -> Tensor:
    """torch.tensor for the fake GPU. Dispatch modes do not see torch's own, which would allocate
    real memory there.
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
    """Attention with the kernel that CUDA would use: flash without a mask, memory-efficient with a
    mask or in fp32; none of them with a mask whose last axis is not dense (torch 2.11 to 2.13,
    sdp_utils check_last_dim_stride_equals_1), as stock T5's: then products and a softmax in fp32.

    A TorchFunctionMode cannot replace it: it is off inside backward(), so that a recomputed block
    would use another kernel, which aborts on a Python backend.
    """
    if query.device.type != FAKE_GPU:
        how = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        return _torch_attention(query, key, value, **how, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.stride(-1) != 1:
        unfused = torch.ops.aten._scaled_dot_product_attention_math
        how = {"scale": scale, "enable_gqa": enable_gqa}
        return unfused(query, key, value, attn_mask, dropout_p, is_causal, **how)[0]
    _scratch.append(4 * query.numel())
    if attn_mask is None and query.dtype in _FLASH_DTYPES and query.shape[-1] <= _FLASH_WIDTH:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if key.shape[1] != query.shape[1]:  # the efficient kernel has no grouped queries
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if attn_mask is not None:  # (B, H, Q, K) floats, aligned, expanded without a copy
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = bias.masked_fill_(attn_mask.logical_not(), float("-inf"))
        num_keys = key.shape[2]
        if attn_mask.shape[-1] % _MASK_ALIGNMENT and attn_mask.shape[-1] == num_keys:
            attn_mask = F.pad(attn_mask, (0, -num_keys % _MASK_ALIGNMENT))[..., :num_keys]
        attn_mask = attn_mask.expand(*query.shape[:3], num_keys)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    keeps_sums = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    return efficient(query, key, value, attn_mask, keeps_sums, dropout_p, is_causal, scale=scale)[0]


def _attention_of_rows(query: Tensor, *rest: Any, **how: Any) -> Tensor:
    """torch's padding-free attention. Counts the sums that its backward allocates."""
    _scratch.append(4 * query.numel())
    return _torch_attention_of_rows(query, *rest, **how)


def _safe_softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """The softmax of unfused attention with its mask of one byte per score. The CPU's allocator
    recorded this mask, but torch's fake softmax (2.13) does not make it.
    """
    shares = torch.softmax(scores, dim, dtype)
    is_hidden = scores.eq(-torch.inf)
    return shares.masked_fill_(is_hidden.all(dim, keepdim=True), 0.0)


def _scaled_product(rows: Tensor, weight: Tensor, scales: Any, of_weight: Any, bias: Any) -> Tensor:
    """The product of FP8 on a CPU, which computes it in fp32, of copies that are scaled beforehand
    (torch 2.13, _scaled_mm_out_cpu_emulated).
    """
    result = torch.empty(len(rows), weight.shape[1], dtype=torch.bfloat16, device=rows.device)
    dense = weight.contiguous()
    scaled_rows = rows.to(torch.float32) * scales
    scaled_weight = dense.to(torch.float32) * of_weight
    product = scaled_rows @ scaled_weight
    if bias is not None:
        product.add_(bias)
    return result.copy_(product.to(torch.bfloat16))


def _where(tensor: FakeTensor) -> torch.device:
    """The device of a fake tensor, as torch (2.13) finds it, without its overhead."""
    return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


class _Counted(TorchDispatchMode):
    """Reports every operation to the tracker, and computes known values beside fake ones."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # half of all calls ask for the device
            return _where(args[0])
        if func is torch.ops.aten._safe_softmax.default:
            with self:
                return _safe_softmax(*args, **(kwargs or {}))
        if func is torch.ops.aten._scaled_mm_v2.default and _where(args[0]).type == "cpu":
            (scales,), (of_weight,) = args[2], args[5]
            with self:
                return _scaled_product(args[0], args[1], scales, of_weight, args[8])
        name, named = products.BY_OPERATOR.get(func), kwargs or {}
        if name and _where(args[0]).type == "cpu" and products.takes(name, args, named):
            with self:
                return products.by_way_of_32_bits(name, args, named)
        out = run_with_twins(func, args, kwargs or {})
        self._tracker.see(out, func, args, kwargs)
        return out


class FakeDevice:
    """The device inside `fake_device()`: it takes models and batches, and its tracker counts."""

    def __init__(self, name: DeviceName, mode: FakeTensorMode) -> None:
        self.device, self._mode = torch.device(name), mode
        self.tracker = Tracker(name)

    @property
    def scratch(self) -> int:
        """The most bytes that one attention kernel allocates in backward; fake tensors do not show
        them.
        """
        return max(_scratch, default=0)

    def place(self, model: nn.Module) -> nn.Module:
        """Replace parameters and buffers by fake ones on this device; tied ones stay tied."""
        placed: dict[int, Any] = {}
        with _disable_current_modes():  # operations on each weight would take as long as a step
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
        fake._is_param = isinstance(tensor, nn.Parameter)  # as torch marks a Parameter
        return fake

    def copy_of(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A fake copy of a real batch on this device; its values stay known (fake_values.py)."""
        placed: dict[str, Any] = {}
        for name, tensor in batch.items():
            placed[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            placed[name].twin = tensor
        return placed


@contextmanager
def fake_device(name: DeviceName) -> Iterator[FakeDevice]:
    """Inside, operators compute nothing, and allocations on the device are counted. Use it only in
    a process of its own.
    """
    if name == FAKE_GPU:
        register()
    else:
        for dtype in products.lacking():
            products.use(dtype)
    # transformers (5.23) reads the values of masks, to leave out masks that hide nothing; fake ones
    # have twins that answer
    values_are_known = replaced(import_utils, "is_fake_tensor", lambda x: False)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, values_are_known:
        _scratch.clear()
        device = FakeDevice(name, mode)
        with _Counted(device.tracker):
            yield device


class _LinearOfPartitioned(torch.autograd.Function):
    """A linear layer as DeepSpeed 0.19.8 computes it at ZeRO-3 (runtime/zero/linear.py): it saves
    its input for the backward pass even where the weight is frozen, and torch would not.
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
    """Inside, linear layers compute as they do at ZeRO-3."""

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return _LinearOfPartitioned.apply(input, weight, bias)

    with replaced(F, "linear", linear):
        yield


# The newest input, and the one whose copy is on its way: deepspeed 0.19.8, whose engine of offloads
# has keep_last_count=1, and max_fwd_stash_count=2, of which the newest is one.
_KEPT = 2
_SMALLEST = 1024  # bytes of an input that it takes: min_offload_bytes


class PlannedInputs:
    """The store of DeepSpeed under fake tensors: which inputs lie on the device, and how many bytes
    in host memory.

    It restores one input after the other, when its block is computed again. A host that runs ahead
    may ask for the next ones before: torch counts those only while copies are on their way.
    """

    def __init__(self) -> None:
        self.most = 0  # bytes of host memory at once
        self._count = 0
        self._nbytes: dict[int, int] = {}  # of what has host memory
        self._kept: dict[int, Tensor] = {}
        self._away: dict[int, dict[str, Any]] = {}  # how each of the others is made again

    def offload_input(self, tensor: Tensor) -> int | None:
        """Keep the newest inputs, and let go of an older one. Small ones stay."""
        if tensor.nbytes < _SMALLEST:
            return None
        self._count += 1
        before = self._count - 1
        self._kept[self._count] = tensor
        if before in self._kept:
            self._nbytes[before] = _pinned(self._kept[before].nbytes)
            self.most = max(self.most, sum(self._nbytes.values()))
        for number in [one for one in self._kept if one <= self._count - _KEPT]:
            old = self._kept.pop(number)
            shape = {"size": old.shape, "stride": old.stride()}
            self._away[number] = {**shape, "dtype": old.dtype, "device": old.device}
        return self._count

    def restore_input(self, tensor_id: int) -> Tensor:
        """The input, or new memory for it."""
        self._nbytes.pop(tensor_id, None)
        kept = self._kept.pop(tensor_id, None)
        return torch.empty_strided(**self._away.pop(tensor_id)) if kept is None else kept

    def forget_input(self, tensor_id: int) -> None:
        """Let go of an input that no backward pass needs."""
        for table in (self._nbytes, self._kept, self._away):
            table.pop(tensor_id, None)


def _pinned(nbytes: int) -> int:
    """The bytes that torch's pool of pinned memory takes for so many: a power of 2 (torch 2.13)."""
    return 1 << (nbytes - 1).bit_length()


_GROUPS = 4  # of rows of similar length; the middle row of each is measured


@contextmanager
def rows_in_groups(tracker: Tracker) -> Iterator[None]:
    """Inside, attention that a processor computes row by row (packed/stream_attention.py,
    processor/row_attention.py) computes one row of each group of rows of similar length, and counts
    it once for each row of the group.
    """
    from trainer.models.packed import stream_attention
    from trainer.models.processor import row_attention

    before, before_pieces = stream_attention.spans_of, row_attention.each

    def each(pieces: Any) -> Iterator[Any]:
        return _standing(sorted(before_pieces(pieces), key=lambda piece: piece.num_scores))

    def _standing(like: list[Any]) -> Iterator[Any]:
        for number in range(_GROUPS):
            start, stop = (len(like) * n // _GROUPS for n in (number, number + 1))
            if start < stop:
                with tracker.standing_for(stop - start):
                    yield like[(start + stop) // 2]

    def spans_of(rows: Any) -> Iterator[Any]:
        return _standing(sorted(before(rows), key=lambda x: sum(s.stop - s.start for s in x)))

    with replaced(stream_attention, "spans_of", spans_of), replaced(row_attention, "each", each):
        yield


@contextmanager
def equal_chunks_once(tracker: Tracker) -> Iterator[None]:
    """Inside, of the chunks of an output layer (models/losses.py) between the first and the last,
    one is computed and counted for all of them.
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


@contextmanager
def exchanges_alone() -> Iterator[None]:
    """Inside, what neighbours that share rows would send is memory that is allocated and filled by
    nobody (distributed.exchanged).
    """
    from trainer.runtime import distributed

    with replaced(distributed, "exchanged", torch.empty_like):
        yield


def for_real(function: Callable[..., T]) -> Callable[..., T]:
    """The function, run as outside of `fake_device()`: for functions that make real batches."""

    def run(*args: Any, **kwargs: Any) -> T:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run
