"""Attention of a processor that leaves rows where they lie, against its formula row by row in
fp64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.bases import base_of
from tests.facts import experiment, write_facts
from trainer import tasks
from trainer.models.processor import row_attention
from trainer.models.processor.row_attention import (
    FEW_KEYS,
    Piece,
    attend,
    attend_biased,
    is_wide,
    pieces_of,
    with_short_rows_together,
)
from trainer.protocol.task import Places
from trainer.retrieval.embeddings import encoder_of


@pytest.fixture(autouse=True)
def _chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows one by one, and losses in the tensor of their logits."""
    monkeypatch.setenv("LATHE_CPU_KERNELS", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


# Neighbours of equal length, a row alone, a row of one token
LENGTHS = [7, 7, 7, 5, 2, 2, 1]
KEYS = [4, 4, 6, 3, 2, 2, 9]
HEADS, WIDTH = 4, 8


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def _drawn(lengths: list[int], heads: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randn(sum(lengths), heads, WIDTH, generator=random, dtype=torch.float64)
    return drawn.requires_grad_()


def _row_by_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: list[int],
    bias: Tensor,
    *,
    scale: float,
    queries: list[int] = LENGTHS,
) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    mixed: list[Tensor] = []
    for own, others, values in zip(q.split(queries), k.split(keys), v.split(keys), strict=True):
        scores = own.transpose(0, 1) @ others.permute(1, 2, 0) * scale
        scores = scores + bias[:, : len(own), : len(others)]
        mixed.append((scores.softmax(-1) @ values.transpose(0, 1)).transpose(0, 1))
    return torch.cat(mixed)


def _assert_same(got: Tensor, want: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    weights = torch.arange(want.numel(), dtype=want.dtype).view_as(want).sin()
    of_got, of_want = (torch.autograd.grad(x, inputs, weights) for x in (got, want))
    for one, other in zip(of_got, of_want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_neighbours_of_equal_length_stand_in_one_piece() -> None:
    pieces = pieces_of(_starts(LENGTHS), _starts(KEYS))
    assert [(piece.rows, piece.num_queries, piece.num_keys) for piece in pieces] == [
        (2, 7, 4),
        (1, 7, 6),
        (1, 5, 3),
        (2, 2, 2),
        (1, 1, 9),
    ]
    assert pieces[3] == Piece(2, 26, 17, 2, 2)


@pytest.mark.parametrize(
    ("short", "most", "rows"),
    [
        (64, 1024, [1, 1, 3, 3]),
        (64, 10, [1, 1, 1, 1, 1, 3]),  # of seven tokens each one alone
        (5, 1024, [1, 1, 1, 1, 1, 3]),  # those of seven tokens are not short
    ],
)
@pytest.mark.parametrize("is_fused", [False, True])
def test_short_rows_of_equal_length_stand_in_few_pieces_wherever_they_lie(
    is_fused: bool, short: int, most: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_attention, "SHORT", short)
    monkeypatch.setattr(row_attention, "MOST_COPIED", most)
    queries, keys = [7, 2, 7, 5, 2, 2, 7, 1], [4, 2, 4, 3, 2, 2, 4, 9]
    pieces = with_short_rows_together(pieces_of(_starts(queries), _starts(keys)))
    assert sorted(piece.rows for piece in pieces) == rows
    q = _drawn(queries, HEADS, 0)
    k, v = (_drawn(keys, HEADS, n) for n in (1, 2))
    bias = torch.zeros(HEADS, 7, 9, dtype=torch.float64)
    if not is_fused:
        bias = _drawn([7 * HEADS], 9, 5)[..., 0].detach().view(HEADS, 7, 9).requires_grad_()
    got = attend(q, k, v, pieces, scale=1.0) if is_fused else attend_biased(q, k, v, bias, pieces)
    want = _row_by_row(q, k, v, keys, bias, scale=1.0, queries=queries)
    _assert_same(got, want, [q, k, v] if is_fused else [q, k, v, bias])


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_of_one_length_have_the_results_of_rows_one_by_one(is_causal: bool) -> None:
    q, k, v = (_drawn([6, 6, 6], HEADS, n) for n in range(3))
    whole = attend(q, k, v, pieces_of(_starts([6, 6, 6])), is_causal=is_causal)
    alone = [Piece(1, at, at, 6, 6) for at in (0, 6, 12)]
    one_by_one = attend(q, k, v, alone, is_causal=is_causal)
    assert (whole._base, one_by_one._base) == (None, None), "compiled blocks see no difference"
    _assert_same(whole, one_by_one, [q, k, v])


@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_are_attended_to_where_they_lie(is_causal: bool, groups: int) -> None:
    q, k, v = (_drawn(LENGTHS, heads, n) for n, heads in enumerate((HEADS, groups, groups)))
    bias = torch.zeros(HEADS, 7, 7, dtype=torch.float64)
    if is_causal:
        bias.masked_fill_(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    got = attend(q, k, v, pieces_of(_starts(LENGTHS)), is_causal=is_causal)
    want = _row_by_row(q, k, v, LENGTHS, bias, scale=WIDTH**-0.5)
    _assert_same(got, want, [q, k, v])


@pytest.mark.parametrize("rows", [LENGTHS, [FEW_KEYS + 1, 9]])
def test_gradients_of_short_rows_in_bf16_are_rounded_once(rows: list[int]) -> None:
    """In fp32 the gradients are wrong by their own rounding alone, 2^-9 of each number at most."""
    q, k, v = (_drawn(rows, HEADS, n).detach().bfloat16().requires_grad_() for n in range(3))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    got, want = (attend(*inputs, pieces_of(_starts(rows))) for inputs in ((q, k, v), exact))
    weights = torch.arange(want.numel(), dtype=want.dtype).view_as(want).sin().bfloat16()
    of_got = torch.autograd.grad(got, (q, k, v), weights)
    of_want = torch.autograd.grad(want, exact, weights.double())
    first = slice(None) if max(rows) <= FEW_KEYS else slice(FEW_KEYS + 1, None)
    for one, other in zip(of_got, of_want, strict=True):
        wrong = (one.double() - other)[first].norm() / other[first].norm()
        assert float(wrong) < 2**-8.5, "mixed was rounded too, and is read by the backward pass"


@pytest.mark.parametrize("is_fused", [False, True])
def test_queries_see_the_keys_of_their_own_row(is_fused: bool) -> None:
    q = _drawn(LENGTHS, HEADS, 0)
    k, v = (_drawn(KEYS, HEADS, n) for n in (1, 2))
    pieces = pieces_of(_starts(LENGTHS), _starts(KEYS))
    got = attend(q, k, v, pieces, scale=1.0) if is_fused else attend_biased(q, k, v, None, pieces)
    want = _row_by_row(q, k, v, KEYS, torch.zeros(HEADS, 7, 9, dtype=q.dtype), scale=1.0)
    _assert_same(got, want, [q, k, v])


def test_biases_are_added_and_have_a_gradient() -> None:
    q, k, v = (_drawn(LENGTHS, HEADS, n) for n in range(3))
    bias = _drawn([7 * HEADS], 7, 5)[..., 0].view(HEADS, 7, 7)
    got = attend_biased(q, k, v, bias, pieces_of(_starts(LENGTHS)))
    want = _row_by_row(q, k, v, LENGTHS, bias, scale=1.0)
    _assert_same(got, want, [q, k, v, bias])


@pytest.mark.parametrize("is_together", [False, True])
@pytest.mark.parametrize("is_fused", [False, True])
def test_keys_that_no_query_reads_have_no_gradient(is_fused: bool, is_together: bool) -> None:
    queries, keys = [3, 0, 3], [2, 4, 2]
    q = _drawn(queries, HEADS, 0)
    k, v = (_drawn(keys, HEADS, n) for n in (1, 2))
    pieces = pieces_of(_starts(queries), _starts(keys))
    assert [piece.first_key for piece in pieces] == [0, 6], "keys between them belong to no query"
    if is_together:
        (together,) = pieces = with_short_rows_together(pieces)
        assert together.key_places is not None
        assert together.key_places.tolist() == [0, 1, 6, 7]
    mixed = attend(q, k, v, pieces) if is_fused else attend_biased(q, k, v, None, pieces)
    for gradient in torch.autograd.grad(mixed.square().sum(), (k, v)):
        assert bool((gradient[2:6] == 0).all())
        assert bool((gradient[:2] != 0).any())


def test_dropout_takes_its_share_in_both_passes() -> None:
    """With equal states of torch's generator the numeric gradient is that of the backward pass."""
    q, k, v = (_drawn(LENGTHS, HEADS, n) for n in range(3))
    bias = _drawn([7 * HEADS], 7, 5)[..., 0].detach().view(HEADS, 7, 7).requires_grad_()
    pieces = pieces_of(_starts(LENGTHS))

    def mixed(*inputs: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attend_biased(*inputs, pieces, dropout=0.3)

    assert not torch.equal(mixed(q, k, v, bias), attend_biased(q, k, v, bias, pieces))
    assert torch.autograd.gradcheck(mixed, (q, k, v, bias), fast_mode=True)
    ones = torch.ones_like(v)
    many = torch.stack(
        [attend_biased(q, k, ones, bias, pieces, dropout=0.3).detach() for _ in range(400)]
    )
    assert float(many.mean()) == pytest.approx(1.0, abs=0.02), "what stays is scaled up"


def test_autocast_gives_attention_one_dtype() -> None:
    """Rotations leave queries and keys in fp32, while the values come from a product in bf16."""
    q, k, v = (_drawn(LENGTHS, HEADS, n).detach().float() for n in range(3))
    pieces = pieces_of(_starts(LENGTHS))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attend(q, k, v.bfloat16(), pieces)
    assert torch.equal(mixed, attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), pieces))


def test_autocast_leaves_biased_scores_to_kernels_that_keep_them_in_fp32() -> None:
    assert is_wide(torch.ones(1))
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_wide(torch.ones(1))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_vectors_in_bf16_are_near_those_in_fp32(name: str, folder: Path) -> None:
    base = base_of("retriever", name, vocab_size=384)
    cfg = tasks.parse({**experiment("retriever", folder), "base": base})
    task: Any = tasks.load(cfg, Places(folder, folder / "cache", folder / "runs"))
    model = task.model().eval()
    texts = [{"text": f"{'it is there ' * n}."} for n in range(4)]
    exact, rounded = (
        encoder_of(task, model, side="passage", batch=4, precision=precision)(texts)
        for precision in ("fp32", "bf16")
    )
    assert float((rounded - exact).norm() / exact.norm()) < 0.02


def test_sixteen_bits_keep_their_dtype() -> None:
    q, k, v = (_drawn(LENGTHS, HEADS, n).detach().bfloat16().requires_grad_() for n in range(3))
    mixed = attend(q, k, v, pieces_of(_starts(LENGTHS)), is_causal=True)
    assert mixed.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(mixed.float().sum(), v)
    assert gradient.dtype == torch.bfloat16
    want = F.scaled_dot_product_attention(
        *(x[:7].transpose(0, 1)[None].float() for x in (q, k, v)), is_causal=True
    )
    torch.testing.assert_close(mixed[:7].float(), want[0].transpose(0, 1), rtol=0.02, atol=0.02)
