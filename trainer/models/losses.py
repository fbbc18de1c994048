"""Summed losses: the loop divides once, by the units of all micro-batches on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

# B batch, T tokens, D width, N labelled positions, V vocabulary

IGNORED = -100  # the label of a position that is not scored


def token_cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """() fp32: the SUM of cross-entropies, in nats, over the targets that are not IGNORED; 0 when
    there is none.
    """
    return F.cross_entropy(logits_NV.float(), targets_N, ignore_index=IGNORED, reduction="sum")


def next_token_loss(
    hidden_BTD: Tensor, labels_BT: Tensor, head: Callable[[Tensor], Tensor]
) -> Tensor:
    """() fp32: the SUM of next-token cross-entropies; position t is scored against the label of t +
    1.

    head: (N, D) -> (N, V). It sees the scored positions only, so prompts and pads cost no logits.
    It is called even when nothing is scored, because under ZeRO-3 every rank must make the same
    calls.
    """
    targets_BT = labels_BT[:, 1:]
    scored_BT = targets_BT != IGNORED
    return token_cross_entropy(head(hidden_BTD[:, :-1][scored_BT]), targets_BT[scored_BT])
