"""Attention on a GPU leaves rows where they lie in a stream: what torch's kernel is asked for, by a
stand-in that does what torch 2.13 documents, against rectangles.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from tests.facts import experiment, write_facts
from tests.families import DEPTH, base, ids_of, streaming, streams_for_causal_lm
from tests.ranks import run_alone
from tests.tolerance import Step, assert_same_step
from trainer import tasks
from trainer.models.decoder.streams import reader_of
from trainer.models.packed import stock
from trainer.models.packed.layout import pack
from trainer.plan.memory import fake_step
from trainer.plan.memory.measure import MeasureRequest
from trainer.plan.operators import Operator
from trainer.protocol.task import DRAW, EPOCH, Places

LENGTHS = [9, 3, 12]


def stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    of_keys: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """varlen_attn, row by row: a query sees so many keys to its left and to its right, -1: all."""
    assert torch.equal(starts, of_keys)
    assert starts.dtype == torch.int32
    assert max_q == max_k >= int(starts.diff().max())
    assert (query.shape[1] != key.shape[1]) == enable_gqa
    left, right = (2**30 if reach < 0 else reach for reach in window_size)
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    mixed: list[Tensor] = []
    for start, stop in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))
        behind = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        is_seen = (behind <= left) & (-behind <= right)
        shares = (q @ k.mT * factor).masked_fill(~is_seen, -torch.inf).softmax(-1)
        mixed.append((shares @ v).transpose(0, 1))
    return torch.cat(mixed)


def step(task: str, name: str) -> Step:
    """Loss and gradients of a language model, or of the states of an encoder."""
    model = base(task, name)
    if task == "causal_lm":
        loss = streaming(model)(**streams_for_causal_lm())["loss"]
    else:
        batch = pack(ids_of(LENGTHS, 3), bucketed=True)
        loss = reader_of(model)(batch).square().sum()
    loss.backward()
    gradients = {of: p.grad for of, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("causal_lm", "gpt_bigcode"),  # one head of keys
        ("causal_lm", "mistral"),  # groups, and a window that rows reach beyond
        ("causal_lm", "gemma3"),  # a window in some blocks, and a scale of its own
        ("retriever", "bert"),
        ("retriever", "modernbert"),  # windows to both sides
    ],
)
def test_rows_where_they_lie_give_the_step_of_rectangles(
    task: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = step(task, name)
    asked: list[Any] = []
    monkeypatch.setattr(stock, "_has_kernel", lambda *qk: not asked.append(qk))
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    monkeypatch.setattr(stock, "in_rectangles", None)
    assert_same_step(step(task, name), want, depth=DEPTH, loss=0.15, gradients=1.2)
    assert asked


@pytest.mark.parametrize(
    ("changes", "has"),
    [
        ({}, True),
        ({"groups": 2}, stock._KNOWS_GROUPS),
        ({"dtype": torch.float32}, False),
        ({"device": "cpu"}, False),
        ({"width": 288}, False),
        ({"width": 20}, False),
    ],
    ids=str,
)
def test_the_kernel_is_for_what_flash_attention_takes(changes: dict[str, Any], has: bool) -> None:
    given: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta", "width": 64} | changes
    width, groups = given.pop("width"), given.pop("groups", 4)
    query, key = (torch.empty(1, heads, 5, width, **given) for heads in (4, groups))
    assert stock._has_kernel(query, key) is has


def _operators(folder: Path) -> list[list[Any]]:
    """Of a step in bf16 on the plan's GPU: [name, FLOPs, bytes, sides, dtype, how often]."""
    values = experiment("causal_lm", write_facts(folder), train={"precision": "bf16"})
    task: Any = tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))
    row = {name: list(map(int, ids)) for name, ids in task.encode(task.specimen()).items()}
    rows = [row | {DRAW: [5], EPOCH: [0]}] * 2
    return fake_step._measure(MeasureRequest(values, "train", rows), task.places).operators


@pytest.mark.skipif(not stock._KNOWS_GROUPS, reason="torch 2.11 knows no groups of heads there")
def test_a_plan_counts_the_kernel_and_no_rectangle(tmp_path: Path) -> None:
    operators = run_alone(_operators, tmp_path)
    flops = {
        name: [one[1] for one in operators if one[0] == name for _ in range(int(one[5]))]
        for name in ("_varlen_attn", "_varlen_attn_backward")
    }
    assert [len(each) for each in flops.values()] == [4, 4], "of four blocks"
    assert min(flops["_varlen_attn_backward"]) > max(flops["_varlen_attn"]) > 0
    assert Operator("_varlen_attn", 1.0, 1).kind == "attention"
    assert "index_copy_" not in {one[0] for one in operators}
