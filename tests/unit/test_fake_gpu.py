"""Which kernel of attention the fake GPU of a plan takes, by what it keeps for backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ranks import run_alone
from trainer.plan.memory.fake_device import fake_device

HEADS, TOKENS, WIDTH = 4, 64, 16
SCORES = HEADS * TOKENS**2


def _kept(*, is_dense: bool) -> int:
    """Bytes that attention with a mask of biases holds when it has run."""
    with fake_device("fakegpu") as device:
        how = {"device": device.device, "dtype": torch.bfloat16}
        biases_QKH = torch.zeros(TOKENS, TOKENS, HEADS, **how, requires_grad=True)
        mask_1HQK = biases_QKH.permute(2, 0, 1)[None]
        mask_1HQK = mask_1HQK.contiguous() if is_dense else mask_1HQK
        qkv = [torch.zeros(1, HEADS, TOKENS, WIDTH, **how, requires_grad=True) for _ in range(3)]
        before = device.tracker.live["activations"]
        mixed = F.scaled_dot_product_attention(*qkv, attn_mask=mask_1HQK, dropout_p=0.1)
        assert mixed.shape == qkv[0].shape
        return device.tracker.live["activations"] - before


def _both() -> list[int]:
    return [_kept(is_dense=is_dense) for is_dense in (True, False)]


@pytest.fixture(scope="module")
def kept() -> list[int]:
    return run_alone(_both)  # a process cannot forget a fake GPU


def test_a_dense_mask_is_read_by_the_fused_kernel_which_keeps_no_scores(kept: list[int]) -> None:
    assert kept[0] < SCORES


def test_with_a_mask_that_is_not_dense_the_scores_are_kept_in_fp32(kept: list[int]) -> None:
    """As on an H200 in stock T5 of transformers 5.17: docs/log.md."""
    assert kept[1] >= 2 * 4 * SCORES
