"""Masks of transformers on a device."""

from __future__ import annotations

import torch

from trainer.models import masks


def test_a_mask_is_looked_into_on_the_cpu_alone() -> None:
    """transformers keeps a mask without a look where this says so; a look is a wait on a GPU."""
    assert masks._is_kept(torch.ones(2, 4, device="meta"))
    assert not masks._is_kept(torch.ones(2, 4))
