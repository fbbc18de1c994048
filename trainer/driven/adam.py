"""One update with the parameters that its operation gives, at any ZeRO stage.

The optimizers inside DeepSpeed 0.19.8 read rate, betas, eps and decay out of their groups at every
step: torch's AdamW, and DeepSpeed's own where the state is offloaded. DeepSpeed's wrappers of every
stage read `clip_grad` at every step; in fp32 at stage 0 there is none, and the engine clips.
"""

from __future__ import annotations

import math

from trainer.driven.checks import AdamStep
from trainer.training.engine import Engine


def update(engine: Engine, how: AdamStep) -> float | None:
    """Take one step, and return the norm of the gradient before clipping. None: the gradient was
    not finite, so that it was dropped and nothing was updated. A collective.
    """
    for group in engine.optimizer.inner().param_groups:
        group["betas"], group["eps"] = (how.beta1, how.beta2), how.eps
        group["weight_decay"] = how.weight_decay
    engine.clip = how.grad_clip_norm
    if hasattr(engine.model.optimizer, "clip_grad"):
        engine.model.optimizer.clip_grad = how.grad_clip_norm
    engine.leaves_out_unsound = True
    engine.step(how.learning_rate)
    norm = engine.grad_norm()
    return None if engine.step_was_skipped() or not math.isfinite(norm) else norm
