"""The losses of forward_backward: SUMS over target tokens, as the SDK `tinker` 0.38.0 documents
them (https://tinker-docs.thinkingmachines.ai/tinker/losses).

With l the log-probability of a target, q its log-probability when it was sampled ("logprobs"), A
its advantage, w its weight, r = exp(l - q) and c = clip(r, low, high):

    cross_entropy        -l w
    importance_sampling  -r A
    ppo                  -min(r A, c A)
    cispo                -c A l, where no gradient passes c
    dro                  -(l A - beta / 2 (l - q)^2)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# N target tokens

MOST_LOG_RATIO = 80.0  # exp() of more than 88 is infinite in fp32


@dataclass(frozen=True)
class DrivenLoss:
    """A loss by name. inputs: what a row must bring besides target_tokens; optional: what it may
    bring; config: the numbers that a request may set, with their defaults.
    """

    of_tokens: Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]
    inputs: tuple[str, ...]
    optional: tuple[str, ...]
    config: Mapping[str, float]

    def tokens(
        self, logps_N: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
    ) -> Tensor:
        """(N,) the loss of each target, whose sum is the loss. inputs: (N,) each; config: as the
        request gives it.
        """
        return self.of_tokens(logps_N, inputs, {**self.config, **config})


def _cross_entropy(
    logps_N: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> Tensor:
    weights_N = inputs.get("weights")
    return -logps_N if weights_N is None else -logps_N * weights_N


def _ratio(logps_N: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return (logps_N - inputs["logprobs"]).exp()


def _clipped(ratio_N: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """The ratio between its thresholds, which may differ by token."""
    low, high = (
        inputs.get(name, torch.full_like(ratio_N, config[name]))
        for name in ("clip_low_threshold", "clip_high_threshold")
    )
    return torch.minimum(torch.maximum(ratio_N, low), high)


def _importance_sampling(
    logps_N: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> Tensor:
    return -_ratio(logps_N, inputs) * inputs["advantages"]


def _ppo(logps_N: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    log_ratio_N, advantages_N = logps_N - inputs["logprobs"], inputs["advantages"]
    # Here the clipped part counts, and its gradient is 0. That of an infinite ratio is NaN.
    is_clipped_N = (log_ratio_N > MOST_LOG_RATIO) & (advantages_N >= 0)
    ratio_N = log_ratio_N.masked_fill(is_clipped_N, MOST_LOG_RATIO).exp()
    clipped_N = _clipped(ratio_N, inputs, config)
    return -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)


def _cispo(logps_N: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    clipped_N = _clipped(_ratio(logps_N.detach(), inputs), inputs, config)
    return -clipped_N * logps_N * inputs["advantages"]


def _dro(logps_N: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    squares_N = (logps_N - inputs["logprobs"]).square()
    return -(logps_N * inputs["advantages"] - 0.5 * config["beta"] * squares_N)


_SAMPLED = ("logprobs", "advantages")
_THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
_CLIP: dict[str, float] = dict(zip(_THRESHOLDS, (0.8, 1.2), strict=True))
LOSSES: dict[str, DrivenLoss] = {
    "cross_entropy": DrivenLoss(_cross_entropy, (), ("weights",), {}),
    "importance_sampling": DrivenLoss(_importance_sampling, _SAMPLED, (), {}),
    "ppo": DrivenLoss(_ppo, _SAMPLED, _THRESHOLDS, _CLIP),
    "cispo": DrivenLoss(_cispo, _SAMPLED, _THRESHOLDS, _CLIP),
    "dro": DrivenLoss(_dro, _SAMPLED, (), {"beta": 0.05}),
}
