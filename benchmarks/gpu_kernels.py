"""What `benchmarks/gpu.py` measures without a run: versions, kernels of attention, the output
layer, and the device's rates. Every function is called in a process of its own.
"""

from __future__ import annotations

import gc
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# N rows, H heads, L tokens, C width of a head, V vocabulary

_ROUNDS = 5


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype() -> torch.dtype:
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], rounds: int = _ROUNDS) -> dict[str, float]:
    """The first call, and the median of those behind it; GiB at the peak."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    for _ in range(rounds + 1):
        _wait()
        started = time.perf_counter()
        work()
        _wait()
        times.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return {"first_s": times[0], "s": sorted(times[1:])[rounds // 2], "peak_gib": peak}


def environment(is_rehearsed: bool) -> dict[str, Any]:
    """Versions, and which kernel of attention torch would take first."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("transformers", "deepspeed", "triton", "peft", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["cudnn"] = torch.backends.cudnn.version()
        found["sdp_priority"] = [str(x) for x in torch._C._get_sdp_priority_order()]  # pyright: ignore
    return found


def attention(is_rehearsed: bool) -> dict[str, Any]:
    """T5's attention with position biases, forward and backward, by every way there is."""
    lengths = (32, 64) if is_rehearsed else (250, 512, 1024, 2048, 4096, 8192, 16384)
    tokens = 128 if is_rehearsed else 16384
    found: dict[str, Any] = {}
    for length in lengths:
        for name, make in _ways().items():
            try:
                work = make(max(1, tokens // length), length)
                found[f"{name}-{length}"] = seconds_of(work, 2 if is_rehearsed else _ROUNDS)
            except (RuntimeError, ImportError) as error:  # no Triton, or no room for the scores
                found[f"{name}-{length}"] = {"failed": str(error).splitlines()[0][:200]}
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return {"attention": found}


def _heads(rows: int, length: int, heads: int = 12, width: int = 64) -> list[Tensor]:
    shape = (rows, heads, length, width)
    how: dict[str, Any] = {"device": _device(), "dtype": _dtype(), "requires_grad": True}
    return [torch.randn(shape, **how) for _ in range(3)]


def _both_ways(of: Callable[..., Tensor], qkv: Sequence[Tensor]) -> Callable[[], None]:
    gradient = torch.randn_like(of(*qkv))

    def work() -> None:
        torch.autograd.grad(of(*qkv), list(qkv), gradient)

    return work


def _bias(length: int, heads: int = 12) -> Tensor:
    return torch.randn(1, heads, length, length, device=_device(), dtype=_dtype())


def _eager(rows: int, length: int) -> Callable[[], None]:
    bias = _bias(length)

    def of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) + bias).softmax(-1) @ v

    return _both_ways(of, _heads(rows, length))


def _sdpa(rows: int, length: int) -> Callable[[], None]:
    bias = _bias(length)

    def of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)

    return _both_ways(of, _heads(rows, length))


def _causal(rows: int, length: int) -> Callable[[], None]:
    def of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return _both_ways(of, _heads(rows, length))


def _stream(rows: int, length: int) -> Callable[[], None]:
    from trainer.models.packed.stream_attention import Biases, RowStarts, attend

    starts = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=_device())
    table = torch.randn(32, 12, device=_device(), dtype=_dtype())
    buckets = torch.arange(257, device=_device(), dtype=torch.int32) % 32
    of_rows = RowStarts(starts, starts, length)
    flat = [x.detach().transpose(1, 2).flatten(0, 1).contiguous() for x in _heads(rows, length)]
    qkv = [x.requires_grad_() for x in flat]

    def of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, of_rows, biases=Biases(table, buckets))

    return _both_ways(of, qkv)


def _flex(rows: int, length: int) -> Callable[[], None]:
    from torch.nn.attention.flex_attention import flex_attention

    bias = torch.randn(12, 2 * length, device=_device(), dtype=_dtype())

    def score(x: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return x + bias[head, key - query + length]

    run: Any = torch.compile(flex_attention, dynamic=True)
    return _both_ways(lambda *qkv: run(*qkv, score_mod=score, scale=1.0), _heads(rows, length))


def _ways() -> dict[str, Callable[[int, int], Callable[[], None]]]:
    """By name, what makes the work of so many rows of such a length, on this device."""
    ways = {"eager": _eager, "sdpa": _sdpa, "causal": _causal, "stream": _stream}
    # torch's FlexAttention has no backward on the CPU (torch 2.13)
    return ways | ({"flex": _flex} if torch.cuda.is_available() else {})


def by_length(is_rehearsed: bool) -> dict[str, Any]:
    """Four blocks of T5's encoder in training, on grids and in the stream, by the tokens of a row:
    what decides LONG of trainer/models/packed/t5_encoder.py.
    """
    tokens, lengths = (16384, (256, 512, 1024, 2048, 4096, 8192, 16384))
    sizes = {"base": (768, 64, 3072, 12), "3b": (1024, 128, 16384, 32)}
    if is_rehearsed:
        tokens, lengths, sizes = 128, (32, 64), {"tiny": (32, 16, 64, 2)}
    found: dict[str, Any] = {}
    for (name, size), length, way in product(sizes.items(), lengths, ("grids", "stream")):
        try:
            work = _encoder(size, max(1, tokens // length), length, way)
            found[f"{name}-{way}-{length}"] = seconds_of(work)
        except RuntimeError as error:  # no room for the scores
            found[f"{name}-{way}-{length}"] = {"failed": str(error).splitlines()[0][:200]}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return {"by_length": found}


def _encoder(
    size: tuple[int, int, int, int], rows: int, length: int, way: str
) -> Callable[[], None]:
    from transformers import T5Config, T5EncoderModel

    from trainer.models.packed.attention import in_grids, in_streams
    from trainer.models.packed.layout import grids_of, pack
    from trainer.models.packed.t5_encoder import encode

    width, of_head, inner, heads = size
    config = T5Config(
        d_model=width, d_kv=of_head, d_ff=inner, num_heads=heads, num_layers=4, vocab_size=2048
    )
    model: Any = T5EncoderModel(config)
    encoder = model.to(_device(), _dtype()).train().encoder
    batch = {
        name: x.to(_device()) for name, x in pack([[1] * length] * rows, bucketed=True).items()
    }

    def attend_by(table: Any) -> Any:
        if way == "stream":
            return in_streams(table, batch, dropout=table.dropout)
        return in_grids(table, grids_of(batch), batch["cells"], dropout=table.dropout)

    def work() -> None:
        encoder.zero_grad()
        encode(encoder, batch, attend_by=attend_by).float().square().mean().backward()

    return work


def memory_of_stock(is_rehearsed: bool) -> dict[str, Any]:
    """What stock T5-base holds at its peak in a step of tests/gpu/test_memory_on_cuda.py: [bytes,
    how many, where each was allocated], the largest first.
    """
    from tests.gpu.test_memory_on_cuda import Case

    found: dict[str, Any] = {}
    for length, way in product((256, 512), ("eager", "sdpa")):
        if not torch.cuda.is_available():
            break
        case = Case("t5-base", length, way, False)
        model, before = case.build("cuda"), torch.cuda.memory_allocated()
        rows = {name: tensor.cuda() for name, tensor in case.rows().items()}
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory._record_memory_history(stacks="python")
        model(**rows).loss.backward()
        peak = torch.cuda.max_memory_allocated()
        snapshot: Any = torch.cuda.memory._snapshot()
        trace = snapshot["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
        found[f"{length}-{way}"] = {"before": before, "peak": peak, "held": _at_peak(trace)}
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return {"memory_of_stock": found}


def _at_peak(trace: Sequence[Any]) -> list[tuple[int, int, str]]:
    live: dict[int, Any] = {}
    now = highest = 0
    held: list[Any] = []
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            now += event["size"]
            if now > highest:
                highest, held = now, list(live.values())
        elif event["action"] == "free_completed" and event["addr"] in live:
            now -= live.pop(event["addr"])["size"]
    counts = Counter((event["size"], _where(event)) for event in held)
    ordered = sorted(counts.items(), key=lambda item: -item[0][0] * item[1])
    return [(size, count, where) for (size, where), count in ordered[:60]]


def _where(event: Any) -> str:
    frames = [f"{Path(x['filename']).name}:{x['line']} {x['name']}" for x in event["frames"][:3]]
    return " < ".join(frames)


def new_shapes(is_rehearsed: bool) -> dict[str, Any]:
    """Milliseconds a call of causal attention whose shape is new each time, with cuDNN's kernel and
    without: what a plan for each shape costs.
    """
    count, start = (3, 16) if is_rehearsed else (60, 300)
    found: dict[str, Any] = {}
    for name, is_allowed in (("with_cudnn", True), ("without_cudnn", False)):
        torch.backends.cuda.enable_cudnn_sdp(is_allowed)
        begun = time.perf_counter()
        for place in range(-1, count):  # the first one starts up the library
            if place == 0:
                _wait()
                begun = time.perf_counter()
            q, k, v = _heads(2, start + 8 * place)
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        _wait()
        found[name] = 1000 * (time.perf_counter() - begun) / count
    return {"ms_a_call": found}


def head(is_rehearsed: bool) -> dict[str, Any]:
    """The loss of an output layer in chunks against that of all logits at once."""
    sizes = [(64, 500, 32)] if is_rehearsed else [(16384, 49152, 2816), (16384, 151936, 1024)]
    return {"head": {"x".join(map(str, size)): _head_of(*size) for size in sizes}}


def _head_of(positions: int, vocabulary: int, width: int) -> dict[str, Any]:
    from torch import nn

    from trainer.models.losses import Scorer, Scoring, chunked_cross_entropy, positions_of_chunk

    layer = nn.Linear(width, vocabulary, bias=False, device=_device(), dtype=_dtype())
    hidden = torch.randn(positions, width, device=_device(), dtype=_dtype(), requires_grad=True)
    targets = torch.randint(vocabulary, (positions,), device=_device())
    scoring = Scoring(targets, positions_of_chunk(vocabulary), lambda logits: logits)
    inputs = [hidden, layer.weight]

    def whole() -> None:
        loss = F.cross_entropy(layer(hidden).float(), targets, reduction="sum")
        torch.autograd.grad(loss, inputs)

    def chunks() -> None:
        loss = chunked_cross_entropy(hidden, Scorer(layer.weight), scoring)
        torch.autograd.grad(loss, inputs)

    return {"whole": seconds_of(whole), "chunks": seconds_of(chunks)}


def calibration(is_rehearsed: bool) -> dict[str, Any]:
    """The device's rates: products, copies on it and to it, and the cost of a launch."""
    size, nbytes = (128, 1 << 16) if is_rehearsed else (8192, 1 << 30)
    left, right = (torch.randn(size, size, device=_device(), dtype=_dtype()) for _ in range(2))
    product = seconds_of(lambda: left @ right)["s"]
    block = torch.empty(nbytes, dtype=torch.uint8, device=_device())
    target = torch.empty_like(block)
    copied = seconds_of(lambda: target.copy_(block))["s"]
    host = torch.empty(nbytes, dtype=torch.uint8)
    rates = {"pageable_to_device": seconds_of(lambda: block.copy_(host))["s"]}
    if torch.cuda.is_available():
        pinned = host.pin_memory()
        rates["pinned_to_device"] = seconds_of(lambda: block.copy_(pinned, non_blocking=True))["s"]
        rates["pinned_to_host"] = seconds_of(lambda: pinned.copy_(block, non_blocking=True))["s"]
    number = torch.zeros((), device=_device())
    calls = 100 if is_rehearsed else 2000
    _wait()
    started = time.perf_counter()
    for _ in range(calls):
        number.add_(1)
    queued = time.perf_counter() - started
    _wait()
    return {
        "product_flops": 2 * size**3 / product,
        "copy_bytes_per_s": 2 * nbytes / copied,
        **{f"{name}_bytes_per_s": nbytes / seconds for name, seconds in rates.items()},
        "launch_s": queued / calls,
    }
