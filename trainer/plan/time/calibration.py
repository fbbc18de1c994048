"""Measures the rates of this process's device (Rates), on one rank or several."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer import devices
from trainer.plan.memory.fake_values import tensors_in
from trainer.plan.operators import Operator, operator_of
from trainer.plan.time.rates import Link, Rates
from trainer.plan.time.stopwatch import Stopwatch
from trainer.runtime import distributed, host_memory

_PASSES = 3  # how often everything is measured: see Stopwatch
# Sizes of tensors, in numbers, that are copied. Several tensors take turns, as in a training step.
_CPU_NUMBERS, _GPU_NUMBERS = (1 << 14, 1 << 18, 1 << 21), (1 << 20, 1 << 23, 1 << 26)
# The tensors that take turns have _ROTATED numbers together; they are _FEWEST to _MOST.
_ROTATED, _FEWEST, _MOST = 1 << 22, 2, 64
_CPU_SIDES, _GPU_SIDES = (16, 32, 64, 128, 256, 512), (128, 512, 1024, 2048, 4096, 8192)
_WIDE = 1024  # a linear layer of this width or more is measured with as many rows as columns
_COLD_NUMBERS = 1 << 24  # numbers of all layers that take turns: more than any cache holds
_LONG_S = 0.2
_CPU_LENGTHS, _GPU_LENGTHS = (32, 64, 128, 256, 512), (256, 1024, 4096)
_DISK_BYTES = 64 << 20
# More than caches hold, and more freed memory than the C library keeps (32 MiB).
_SENT_NUMBERS = 12 << 20
_FRESH_NUMBERS = 16 << 20  # a tensor whose freed memory malloc does not keep (host_memory.py)
_GUESSED = Link(1e9, 2e-4)  # between ranks on one processor, if there is only one rank


def calibrate(folder: Path) -> Rates:
    """Measure the rates of this process's device and of the links between all ranks. A collective.

    folder: lies on the disk that checkpoints are written to.
    """
    watch = Stopwatch(distributed.device())
    if not distributed.is_gpu():
        host_memory.keep(os.environ)  # as a run does
    for _ in range(_PASSES - 1):
        _measure(watch, folder)
    return _measure(watch, folder)


def _measure(watch: Stopwatch, folder: Path) -> Rates:
    """Measure everything once more; the rates are the fastest of all passes so far."""
    dtypes = (torch.float32, torch.bfloat16)
    operators = _moving(watch)
    links, (tracked, plain) = _links(watch), _launches(watch)
    return Rates(
        name=_name(),
        is_measured=True,
        matmul={str(dtype)[6:]: _products(watch, dtype) for dtype in dtypes},
        attention=_attention(watch),
        operators=operators,
        launch_s=tracked,
        plain_launch_s=plain,
        overlaps_launches=watch.device.type == "cuda",
        update_s=_update(watch),
        within=links["within"],
        between=links["within"],
        gathering=links.get("gathering"),
        scattering=links.get("scattering"),
        host_bytes_per_s=_host_link(watch, operators),
        disk_bytes_per_s=_disk(watch, folder),
        fresh_bytes_per_s=_fresh(watch),
        nbytes=_memory(watch.device),
        machine=machine(),
    )


def machine() -> dict[str, Any]:
    """The machine and versions that the rates were measured with."""
    return {
        "host": platform.node(),
        "device": _name(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "ranks": distributed.world(),
        "torch": torch.__version__,
    }


def _name() -> str:
    return torch.cuda.get_device_name() if distributed.is_gpu() else _processor()


def _processor() -> str:
    name = devices.of_processor("model name") or platform.machine()
    return f"{name}, {torch.get_num_threads()} thread(s)"


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total // distributed.world()


def _bare(watch: Stopwatch) -> float:
    """Seconds that a call takes on a processor without computing anything; 0 for a GPU."""
    if watch.device.type == "cuda":
        return 0.0
    tiny = torch.zeros(1)
    return watch.seconds("bare", lambda: tiny + tiny)


def _working(took: float, calls: int, bare: float) -> float:
    """Seconds of the computation alone, without the overhead of the calls."""
    return max(took - calls * bare, 0.2 * took)


def _products(watch: Stopwatch, dtype: torch.dtype) -> list[list[float]]:
    """[FLOPs of one product, FLOP/s] of a linear layer's three products, forward and backward."""
    device, bare = watch.device, _bare(watch)
    is_gpu = device.type == "cuda"
    curve: list[list[float]] = []
    for width in _GPU_SIDES if is_gpu else _CPU_SIDES:
        rows = 4 * width if width < _WIDE else width
        layer = [torch.randn(n, width, device=device).to(dtype) for n in (rows, rows, width)]
        numbers = (2 * rows + width) * width
        count = max(_FEWEST, min(_MOST, -(-_COLD_NUMBERS // numbers)))
        sets = _Rotation([[tensor.clone() for tensor in layer] for _ in range(count)])

        def run(sets: Any = sets) -> None:
            x_ND, of_y_ND, weight_DD = sets.next()
            torch.mm(x_ND, weight_DD.t())
            torch.mm(of_y_ND, weight_DD)
            torch.mm(of_y_ND.t(), x_ND)

        flops = 2.0 * rows * width**2
        took = watch.seconds(f"products {dtype} {width}", run)
        curve.append([flops, 3 * flops / _working(took, 3, bare)])
        if took > _LONG_S and not is_gpu:
            break  # larger ones are as fast
    return curve


class _Rotation:
    """Sets of tensors that take turns, so that no cache holds the next set."""

    def __init__(self, sets: list[Any]) -> None:
        self._sets, self._next = sets, 0

    def next(self) -> Any:
        self._next = (self._next + 1) % len(self._sets)
        return self._sets[self._next]


def _attention(watch: Stopwatch) -> dict[str, list[list[float]]]:
    """[FLOPs of one head of one row, FLOP/s] of fused attention, forward and backward."""
    device = watch.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    curves: dict[str, list[list[float]]] = {"forward": [], "backward": []}
    for length in _GPU_LENGTHS if device.type == "cuda" else _CPU_LENGTHS:
        shape = (4, 8, length, 64)
        query, key, value = (
            torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
        )

        def forward(qkv: Any = (query, key, value)) -> Tensor:
            return F.scaled_dot_product_attention(*qkv)

        def both(forward: Any = forward, qkv: Any = (query, key, value)) -> Any:
            mixed = forward()
            return torch.autograd.grad(mixed, qkv, mixed)

        ahead = watch.seconds(f"attention {length}", forward)
        whole = watch.seconds(f"attention both ways {length}", both)
        product, heads = 2.0 * length**2 * shape[3], shape[0] * shape[1]
        back = max(whole - ahead, ahead)
        size = product * (heads if device.type == "cuda" else 1)
        curves["forward"].append([2 * size, 2 * product * heads / ahead])
        curves["backward"].append([5 * size, 5 * product * heads / back])
    return curves


class Listing(TorchDispatchMode):
    """Lists the operators that run inside, and counts the host's calls."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs, outputs = list(tensors_in(args, kwargs or {})), list(tensors_in(out))
        operator = operator_of(func, args, kwargs or {}, out, inputs=inputs, outputs=outputs)
        self.operators += [] if operator is None else [operator]
        self.calls += 1
        return out


def operators_of(run: Callable[[], Any]) -> list[Operator]:
    """The operators that `run` calls, in order."""
    with Listing() as listing:
        run()
    return listing.operators


def _moving(watch: Stopwatch) -> dict[str, list[list[float]]]:
    """[bytes, bytes/s] of operators that only move memory. Bytes are counted as in a step."""
    rates: dict[str, dict[float, float]] = {}
    device, bare = watch.device, _bare(watch)
    for numbers in _GPU_NUMBERS if device.type == "cuda" else _CPU_NUMBERS:
        count = max(_FEWEST, min(_MOST, _ROTATED // numbers))
        sets = [_Moved(numbers, device) for _ in range(count)]
        for place in range(len(sets[0].runs)):

            def run(place: int = place, sets: list[_Moved] = sets) -> list[Any]:
                return [one.runs[place]() for one in sets]  # the results are kept, as in a step

            operators = operators_of(sets[0].runs[place])
            nbytes = sum(operator.nbytes for operator in operators)
            took = watch.seconds(f"moving {numbers} {place}", run)
            rate = nbytes * count / _working(took, count * len(operators), bare)
            rates.setdefault(operators[-1].name.rstrip("_"), {})[float(nbytes)] = rate
    curves = {name: [[size, rate] for size, rate in by.items()] for name, by in rates.items()}
    return {**curves, "": curves["add"]}


class _Moved:
    """Tensors of one size, and the operators that are timed with them."""

    def __init__(self, numbers: int, device: torch.device) -> None:
        x_ND = torch.randn(numbers // 512, 512, device=device)
        y_ND, gate_ND = torch.randn_like(x_ND), x_ND > 0
        weight_D = torch.ones(512, device=device)
        ids_N = torch.randperm(len(x_ND), device=device)
        wide_NV = x_ND.view(-1, min(2048, numbers))  # as wide as logits over a vocabulary
        of_wide_NV = y_ND.view_as(wide_NV)
        aten = torch.ops.aten
        rows_N = ids_N[:, None].expand(-1, 512)
        stats = aten.native_layer_norm(x_ND, [512], weight_D, weight_D, 1e-5)
        self.runs: list[Callable[[], Any]] = [
            lambda: x_ND + y_ND,
            lambda: x_ND * y_ND,
            lambda: x_ND / 2.0,
            lambda: x_ND.clone(),
            lambda: y_ND.copy_(x_ND),
            lambda: x_ND.bfloat16(),
            lambda: torch.empty_like(x_ND).zero_(),
            lambda: x_ND.pow(2),
            lambda: x_ND.mean(-1),
            lambda: x_ND.sum(0),
            lambda: aten.rsqrt(x_ND),
            lambda: torch.exp(x_ND),
            lambda: torch.relu(x_ND),
            lambda: aten.threshold_backward(x_ND, y_ND, 0),
            lambda: F.gelu(x_ND),
            lambda: aten.gelu_backward(x_ND, y_ND),
            lambda: aten.silu(x_ND),
            lambda: aten.silu_backward(x_ND, y_ND),
            lambda: torch.tanh(x_ND),
            lambda: aten.tanh_backward(x_ND, y_ND),
            lambda: torch.sigmoid(x_ND),
            lambda: aten.bernoulli_.float(torch.empty_like(x_ND), 0.9),
            lambda: aten.native_dropout(x_ND, 0.1, True),
            lambda: aten._softmax(x_ND, -1, False),
            lambda: aten._softmax_backward_data(x_ND, y_ND, -1, torch.float32),
            lambda: aten._log_softmax(wide_NV, -1, False),
            lambda: aten._log_softmax_backward_data(wide_NV, of_wide_NV, -1, torch.float32),
            lambda: aten.native_layer_norm(x_ND, [512], weight_D, weight_D, 1e-5),
            lambda: aten.native_layer_norm_backward(
                y_ND, x_ND, [512], stats[1], stats[2], weight_D, weight_D, [True] * 3
            ),
            lambda: torch.where(gate_ND, x_ND, y_ND),
            lambda: x_ND.masked_fill(gate_ND, 0.0),
            lambda: torch.cat([x_ND, y_ND], -1),
            lambda: aten.embedding(x_ND, ids_N),
            lambda: aten.index_select(x_ND, 0, ids_N),
            lambda: aten.index_add(x_ND, 0, ids_N, y_ND),
            lambda: aten.scatter_add(x_ND, 0, rows_N, y_ND),
            lambda: aten.embedding_dense_backward(x_ND, ids_N, len(x_ND), -1, False),
        ]


class _Block(nn.Module):
    """A decoder block that is so small that only the host's calls take time. It has as many calls
    per module as the block of a model.
    """

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(2)])
        names = ("query", "key", "value", "mixed", "gate", "up", "down")
        self.layers = nn.ModuleDict({name: nn.Linear(width, width, bias=False) for name in names})

    def forward(self, x_BLD: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
        normed_BLD = self._norm(x_BLD, 0)
        rows, length, _ = x_BLD.shape
        query, key, value = (
            self.layers[name](normed_BLD).view(rows, length, self.heads, -1).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        rotated: list[Tensor] = []
        for side in (query, key):
            low, high = side.chunk(2, dim=-1)
            rotated.append(side * cos_LK + torch.cat((-high, low), dim=-1) * sin_LK)
        query, key = rotated
        mixed_BHLK = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed_BLD = mixed_BHLK.transpose(1, 2).reshape(x_BLD.shape)
        x_BLD = x_BLD + self.layers["mixed"](mixed_BLD)
        normed_BLD = self._norm(x_BLD, 1)
        gate_BLD = F.silu(self.layers["gate"](normed_BLD))
        return x_BLD + self.layers["down"](gate_BLD * self.layers["up"](normed_BLD))

    def _norm(self, x_BLD: Tensor, place: int) -> Tensor:
        variance_BL1 = x_BLD.pow(2).mean(-1, keepdim=True)
        return self.norms[place] * (x_BLD * torch.rsqrt(variance_BL1 + 1e-6))


def _launches(watch: Stopwatch) -> tuple[float, float]:
    """The host's seconds for one call: (forward, while autograd records a graph; backward). The
    model is so small that the computation itself takes no time.
    """
    blocks = nn.ModuleList([_Block() for _ in range(4)]).to(watch.device)
    x_BLD = torch.randn(2, 4, 8, device=watch.device)
    angles_LK = torch.randn(4, 4, device=watch.device)
    cos_LK, sin_LK = angles_LK.cos(), angles_LK.sin()

    def forward() -> Tensor:
        hidden_BLD = x_BLD
        for block in blocks:
            hidden_BLD = block(hidden_BLD, cos_LK, sin_LK)
        return hidden_BLD.sum()

    def both() -> None:
        forward().backward()

    ahead, whole = watch.seconds("forward", forward), watch.seconds("both ways", both)
    calls, all_calls = _calls(forward), _calls(both)
    return ahead / calls, max(whole - ahead, 0.1 * ahead) / (all_calls - calls)


def _calls(run: Callable[[], Any]) -> int:
    with Listing() as listing:
        run()
    return listing.calls


def _update(watch: Stopwatch) -> float:
    """Seconds that AdamW takes to update one number."""
    device = watch.device
    weights = [nn.Parameter(torch.randn(1 << 18, device=device)) for _ in range(16)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    step = torch.optim.AdamW(weights, fused=True).step
    return watch.seconds("update", step) / (16 << 18)


def _host_link(watch: Stopwatch, operators: dict[str, list[list[float]]]) -> float:
    if watch.device.type != "cuda":
        return operators["copy"][-1][1]
    there = torch.empty(16 << 20, device=watch.device)
    here = torch.empty(16 << 20, pin_memory=True)
    return here.nbytes / watch.seconds("host link", lambda: here.copy_(there))


def _disk(watch: Stopwatch, folder: Path) -> float:
    """bytes/s of writing a file, until the disk has it (fsync)."""
    content = os.urandom(1 << 20) * (_DISK_BYTES >> 20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return len(content) / watch.quickest("disk", time.perf_counter() - start)


def _fresh(watch: Stopwatch) -> float:
    """bytes/s read and written when the result goes to new memory, which is freed afterwards."""
    parts = [torch.randn(_FRESH_NUMBERS // 4, device=watch.device) for _ in range(4)]
    return 2 * 4 * _FRESH_NUMBERS / watch.seconds("fresh", lambda: torch.cat(parts))


def _links(watch: Stopwatch) -> dict[str, Link]:
    """The links between all ranks, by their names in Rates."""
    world = distributed.world()
    if world == 1:
        return {"within": _GUESSED}
    group, device = torch.distributed, watch.device

    def reduce(numbers: int) -> Callable[[], Any]:
        tensor = torch.zeros(numbers, device=device)
        return lambda: group.all_reduce(tensor)

    def gather(numbers: int) -> Callable[[], Any]:
        own = torch.zeros(numbers // world, device=device)
        # into new memory, as stage 3 does
        return lambda: group.all_gather_into_tensor(own.new_empty(world * len(own)), own)

    def scatter(numbers: int) -> Callable[[], Any]:
        whole = torch.zeros(numbers // world * world, device=device)
        own = torch.empty(numbers // world, device=device)
        return lambda: group.reduce_scatter_tensor(own, whole)

    share = (world - 1) / world
    return {
        "within": _link(watch, "reducing", reduce, 2 * share),  # a reduction sends the bytes twice
        "gathering": _link(watch, "gathering", gather, share),
        "scattering": _link(watch, "scattering", scatter, share),
    }


def _link(
    watch: Stopwatch, name: str, collective_of: Callable[[int], Callable[[], Any]], share: float
) -> Link:
    """Bandwidth and latency of a collective. share: of its bytes that a rank sends."""
    latency = watch.together(f"{name}, few", collective_of(distributed.world()))
    took = watch.together(f"{name}, many", collective_of(_SENT_NUMBERS))
    return Link(share * 4 * _SENT_NUMBERS / max(1e-9, took - latency), latency)
