"""Attention of streams against a twin that makes every score, on the processor and by Triton's
interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

from tests.families import base
from tests.numerics.test_fid_model import t5
from tests.tolerance import assert_all_close, assert_close, assert_equal_step, depth_of
from trainer.models.packed import stream_attention, stream_kernels, t5_encoder
from trainer.models.packed.dropped import Dropout
from trainer.models.packed.layout import pack
from trainer.models.packed.stream_attention import Biases, RowStarts, attend

HEADS, WIDTH, BUCKETS, LARGEST = 3, 5, 8, 20
QUERIES, KEYS = [1, 150, 17], [5, 30, 70]


@dataclass(frozen=True)
class Form:
    """A kind of attention."""

    name: str
    dropout: float = 0.0

    @property
    def is_causal(self) -> bool:
        return self.name == "causal"

    def rows(self) -> RowStarts:
        keys = KEYS if self.name == "cross" else QUERIES
        return RowStarts(_starts(QUERIES), _starts(keys), max(QUERIES), self.is_causal)

    def biases(self, table_KH: Tensor) -> Biases | None:
        if self.name == "cross":
            return None
        distances = torch.arange(-LARGEST, LARGEST + 1)
        bucket_of = T5Attention._relative_position_bucket(
            distances,
            bidirectional=not self.is_causal,
            num_buckets=BUCKETS,
            max_distance=LARGEST,
        )
        return Biases(table_KH, bucket_of.to(torch.int32))

    def drop(self) -> Dropout | None:
        torch.manual_seed(3)
        return Dropout.with_seed(self.dropout, torch.device("cpu")) if self.dropout else None


FORMS = [Form(name, rate) for name in ("plain", "causal", "cross") for rate in (0.0, 0.3)]


def _starts(lengths: Sequence[int]) -> Tensor:
    """Every second number of a tensor, as where a row has two texts."""
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return torch.stack([starts, starts + 1], dim=1)[:, 0]


def _inputs(rows: RowStarts, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Queries, keys, values and the table of biases."""
    generator = torch.Generator().manual_seed(1)
    queries, keys = int(rows.queries[-1]), int(rows.keys[-1])
    shapes = [(n, HEADS, WIDTH) for n in (queries, keys, keys)] + [(BUCKETS, HEADS)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    return tuple(x.to(dtype).requires_grad_() for x in made)


def _twin(form: Form, q: Tensor, k: Tensor, v: Tensor, table_KH: Tensor) -> Tensor:
    """Row by row, with every score, bias and number of dropout at once."""
    rows, biases, drop = form.rows(), form.biases(table_KH), form.drop()
    mixed: list[Tensor] = []
    spans = zip(pairwise(rows.queries.tolist()), pairwise(rows.keys.tolist()), strict=True)
    for (first, end), (first_key, end_key) in spans:
        scores = torch.einsum("qhc,khc->hqk", q[first:end], k[first_key:end_key])
        distance = torch.arange(end_key - first_key) - torch.arange(end - first)[:, None]
        if biases is not None:
            bucket = biases.bucket_of.long()[distance.clamp(-LARGEST, LARGEST) + LARGEST]
            scores = scores + table_KH[bucket].permute(2, 0, 1)
        if form.is_causal:
            scores = scores.masked_fill(distance > 0, -torch.inf)
        shares = scores.float().softmax(-1).to(q.dtype)
        if drop is not None:
            places = torch.arange(first, end)
            is_dropped = drop.places(places, HEADS, end_key - first_key, slice(None))
            shares = shares.masked_fill(is_dropped, 0.0) / (1 - form.dropout)
        mixed.append(torch.einsum("hqk,khc->qhc", shares, v[first_key:end_key]))
    return torch.cat(mixed)


def _with_gradients(mixed: Tensor, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    own = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(2)).to(mixed.dtype)
    found = torch.autograd.grad(mixed, inputs, own, allow_unused=True)
    named = zip(("q", "k", "v", "table"), found, strict=True)
    return {"mixed": mixed.detach()} | {name: x for name, x in named if x is not None}


def _ours(form: Form, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    q, k, v, table = inputs = _inputs(form.rows(), dtype)
    torch.manual_seed(3)
    biases = form.biases(table)
    mixed = attend(q, k, v, form.rows(), biases=biases, dropout=form.dropout)
    return _with_gradients(mixed, inputs)


def _wanted(form: Form, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    inputs = _inputs(form.rows(), dtype)
    return _with_gradients(_twin(form, *inputs), inputs)


@pytest.fixture(params=[1 << 19, 1 << 10], ids=["all heads", "head by head"])
def scores_of_block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_attention, "_SCORES", request.param)


@pytest.mark.usefixtures("scores_of_block")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_stream_attends_as_its_rows_do_one_by_one(form: Form) -> None:
    got, want = _ours(form), _wanted(form)
    _assert_equal(got, want)


def _assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Up to rounding in fp32. Every score is a term of the table's gradient."""
    assert got.keys() == want.keys()
    for name, theirs in want.items():
        terms = sum(n * n for n in QUERIES) if name == "table" else 2 * max(QUERIES)
        assert_close(got[name], theirs, what="attention", of=name, depth=terms, margin=0.6)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_in_bf16_it_is_as_near_to_fp32_as_the_twin_is(form: Form) -> None:
    exact = _wanted(form)
    got, eager = (made(form, torch.bfloat16) for made in (_ours, _wanted))
    for name, want in exact.items():
        ours, theirs = ((x[name].float() - want).norm() for x in (got, eager))
        assert ours <= 1.05 * theirs, name


def test_a_hundred_runs_with_dropout_are_equal_to_the_last_bit() -> None:
    form = Form("plain", 0.1)
    first = _ours(form)
    for _ in range(99):
        again = _ours(form)
        assert all(torch.equal(again[name], first[name]) for name in first)


def test_dropout_takes_its_share_anew_at_every_draw_query_and_head() -> None:
    queries, keys = torch.arange(400), 500
    first, second = (Dropout.with_seed(0.1, torch.device("cpu")) for _ in range(2))
    is_dropped, other = (
        drop.places(queries, HEADS, keys, slice(None)).float() for drop in (first, second)
    )
    spread = (0.1 * 0.9 / is_dropped.numel()) ** 0.5
    assert abs(float(is_dropped.mean()) - 0.1) < 5 * spread
    pairs = [(is_dropped, other), (is_dropped[0], is_dropped[1])]
    pairs += [(is_dropped[:, 1:], is_dropped[:, :-1]), (is_dropped[..., 1:], is_dropped[..., :-1])]
    for one, two in pairs:  # independent: both at once as often as chance has it
        both = (one * two).mean()
        assert abs(float(both) - 0.01) < 5 * (0.01 / one.numel()) ** 0.5


# In an encoder
# --------------------------------------------------------------------------------------------------


def _encoded(
    model: Any, *, is_stream: bool, every: int | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of the states of three rows, and the encoder's gradients."""
    rows = [[2 + place % 17 for place in range(length)] for length in (40, 3, 19)]
    model.zero_grad()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(t5_encoder, "LONG", {"cpu": 1 if is_stream else 10**6})
        torch.manual_seed(4)
        batch = pack(rows, bucketed=True)
        states = t5_encoder.encode(model.encoder, batch, recompute_every=every)
        weights = torch.linspace(-1, 1, states.numel()).view_as(states)
        loss = (states * weights).sum()
        loss.backward()
    parameters = model.encoder.named_parameters()
    return loss.detach(), {name: p.grad.clone() for name, p in parameters if p.grad is not None}


@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_an_encoder_of_long_rows_gives_the_states_and_gradients_of_grids(family: str) -> None:
    model = base("fid", family)
    (loss, got), (want, wanted) = (_encoded(model, is_stream=is_it) for is_it in (True, False))
    depth = depth_of(model.encoder) + 62 * 40
    assert_close(loss, want, what="loss", depth=depth, margin=0.6, scale=float(want.abs()) + 40)
    assert_all_close(got, wanted, what="gradients", depth=2 * depth, margin=0.6, cancels=0.03)


def test_recomputed_blocks_drop_the_same() -> None:
    model = t5(dropout=0.3).train()
    kept = _encoded(model, is_stream=True)
    assert_equal_step(_encoded(model, is_stream=True, every=1), kept)
    with pytest.raises(AssertionError):  # as other numbers would not
        assert_equal_step(_encoded(t5(dropout=0.2).train(), is_stream=True), kept)


def test_kernels_get_starts_as_they_lie_in_memory() -> None:
    """On an H100 every second start was read as every start: gradients 200 times too large."""
    rows, starts = Form("cross").rows(), _starts(QUERIES)
    assert starts.stride() == (2,)
    assert rows.queries.stride() == rows.keys.stride() == (1,)
    assert rows.queries.tolist() == starts.tolist()
    launch = stream_kernels._Launch(torch.zeros(int(starts[-1]), HEADS, WIDTH), rows, None, None)
    assert all(tensor.is_contiguous() for tensor in launch.tensors)


# Triton
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton runs its kernels in Python (tests/conftest.py). Skips where it is not installed."""
    pytest.importorskip("triton", reason="pip install triton runs CUDA's kernels here")
    if "TRITON_INTERPRET" not in os.environ:
        pytest.skip("a GPU runs the kernels themselves: tests/gpu")
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    convert, patch_tensor = interpreter._convert_float, interpreter._patch_lang_tensor

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        """Triton 3.9's interpreter cuts bits off where a GPU rounds to the nearest number."""
        if (source.name, target.name) != ("fp32", "bf16"):
            return convert(values, source, target, mode)
        nearest = torch.from_numpy(np.ascontiguousarray(values).copy()).to(torch.bfloat16)
        return nearest.view(torch.uint16).numpy()

    def patched(tensor: Any, scope: Any) -> None:
        """Triton 3.6's takes arrays of one number for numbers, which NumPy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_tritons_kernels_give_what_the_processor_does(
    form: Form, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, ours = _ours(form), _ours(form, dtype)
    monkeypatch.setattr(stream_attention, "_forward", stream_kernels.forward)
    monkeypatch.setattr(stream_attention, "_backward", stream_kernels.backward)
    got = _ours(form, dtype)
    if dtype == torch.float32:
        _assert_equal(got, ours)
        return
    eager = _wanted(form, dtype)
    for name, want in exact.items():
        theirs, kernels = ((x[name].float() - want).norm() for x in (eager, got))
        assert kernels <= 1.05 * theirs, name


@pytest.mark.parametrize(
    ("device", "length", "dtype", "chosen", "way"),
    [
        ("cpu", 232, torch.float32, "1", "in_short_rows"),
        ("cpu", 232, torch.float32, "0", "in_grids"),
        ("cpu", 232, torch.bfloat16, "1", "in_grids"),
        ("cpu", 376, torch.float32, "1", "in_short_rows"),
        ("cpu", 384, torch.float32, "1", "in_streams"),
        ("cpu", 240, torch.float32, "0", "in_streams"),
        ("cpu", 240, torch.bfloat16, "1", "in_streams"),
        ("meta", 504, torch.float32, "1", "in_grids"),
        ("meta", 512, torch.float32, "1", "in_streams"),
    ],
)
def test_rows_are_attended_to_in_the_stream_from_a_length_that_the_device_decides(
    device: str,
    length: int,
    dtype: torch.dtype,
    chosen: str,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """meta: any device but a processor. Its length was measured on an H200: docs/log.md."""
    monkeypatch.setenv("LATHE_CPU_KERNELS", chosen)
    for name in ("in_grids", "in_short_rows", "in_streams"):
        monkeypatch.setattr(t5_encoder, name, lambda *_, name=name, **__: name)
    rows = pack([[1] * length, [1] * 8], bucketed=True)
    batch = {name: tensor.to(device) for name, tensor in rows.items()}
    choose = t5_encoder._by_length(SimpleNamespace(training=False), batch)
    table = torch.nn.Embedding(1, 1, dtype=dtype)
    assert choose(SimpleNamespace(dropout=0.1, relative_attention_bias=table)) == way
