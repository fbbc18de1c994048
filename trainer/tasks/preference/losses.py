"""Losses of preferences, one number for each pair or answer; the loop divides their sums once.

P pairs, B answers. Log-probabilities are those of an answer behind its prompt: sums over its
tokens, or means where a text says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.tasks.preference.config import Preference


@dataclass(frozen=True)
class ScoredAnswers:
    """What a model says of some answers."""

    logps: Tensor  # (B,) fp32
    tokens: Tensor  # (B,) how many tokens an answer has
    start: Tensor  # (B,) fp32: the log-probabilities under the model that the run began with

    @property
    def ratios(self) -> Tensor:
        """(B,) log of the probability now over that of the start."""
        return self.logps - self.start

    @property
    def means(self) -> Tensor:
        """(B,) log-probability by token."""
        return self.logps / self.tokens

    def halves(self) -> tuple[ScoredAnswers, ScoredAnswers]:
        """The chosen answers, and the rejected ones behind them."""
        pairs = zip(self.logps.chunk(2), self.tokens.chunk(2), self.start.chunk(2), strict=True)
        chosen, rejected = (ScoredAnswers(*one) for one in pairs)
        return chosen, rejected


def rewards(answers: ScoredAnswers, how: Preference) -> Tensor:
    """(B,) what the loss counts as the reward of each answer."""
    if how.loss in ("simpo", "orpo"):
        return how.strength * answers.means
    is_mean = how.loss == "ipo" or how.length_normalised
    return how.strength * (answers.ratios / answers.tokens if is_mean else answers.ratios)


def of_pairs(answers: ScoredAnswers, how: Preference) -> Tensor:
    """(P,) the losses of DPO, IPO and SimPO, and ORPO's without its cross-entropy.

    answers: the P chosen ones, then the P rejected ones.
    """
    if how.loss == "orpo":
        return -how.strength * F.logsigmoid(log_odds_ratio(answers))
    chosen, rejected = rewards(answers, how).chunk(2)
    gap = chosen - rejected
    if how.loss == "ipo":
        return ipo(gap / how.strength, how.strength)
    if how.loss == "simpo":
        return -F.logsigmoid(gap - how.gamma)
    return dpo(gap, how.label_smoothing)


def dpo(gap_P: Tensor, smoothing: float) -> Tensor:
    """(P,) -log sigmoid of the gap between two rewards. smoothing: this share of each loss is that
    of the pair the other way round.

    Source: Rafailov et al. 2023, eq. 7; Mitchell 2023, "A note on DPO with noisy preferences".
    """
    return -(1 - smoothing) * F.logsigmoid(gap_P) - smoothing * F.logsigmoid(-gap_P)


def ipo(ratio_gap_P: Tensor, tau: float) -> Tensor:
    """(P,) the squared distance of the gap between two mean log-ratios from 1 / (2 tau).

    Source: Azar et al. 2023, eq. 17. The means over tokens are those of its authors (TRL 1.16).
    """
    return (ratio_gap_P - 1 / (2 * tau)).square()


def log_odds_ratio(answers: ScoredAnswers) -> Tensor:
    """(P,) log of the odds of the chosen answer over those of the rejected one. The probability of
    an answer is the geometric mean over its tokens.

    Source: Hong et al. 2024, eq. 4 and 7.
    """
    chosen, rejected = answers.halves()
    return (chosen.means - rejected.means) - (_log1mexp(chosen.means) - _log1mexp(rejected.means))


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of x < 0. Source: Maechler 2012, eq. 7."""
    # below the smallest distance from 0 the odds are infinite, and so would be the gradient
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    is_near = x > -0.6931472
    near = torch.log(-torch.expm1(torch.where(is_near, x, -1.0)))
    return torch.where(is_near, near, torch.log1p(-torch.exp(torch.where(is_near, -1.0, x))))


def kto(answers: ScoredAnswers, label_B: Tensor, kl: Tensor, how: Preference) -> Tensor:
    """(B,) how far the value of each answer is from the best one.

    label_B: True where an answer is desired. kl: () how far the model is from its start, 0 at
    least, without a gradient. Source: Ethayarajh et al. 2024, eq. 7 and 8.
    """
    gap_B = torch.where(label_B, answers.ratios - kl, kl - answers.ratios)
    weight_B = torch.where(label_B, how.desirable, how.undesirable)
    return weight_B * (1 - torch.sigmoid(how.strength * gap_B))


def reward(score_B: Tensor, margin_P: Tensor, how: Preference) -> Tensor:
    """(P,) -log sigmoid of the gap between two scores, of which a margin is taken.

    score_B: of the P chosen answers, then of the P rejected ones. Source: Touvron et al. 2023
    (Llama 2), eq. 2; Eisenstein et al. 2023 of how.centre.
    """
    chosen, rejected = score_B.chunk(2)
    gap = chosen - rejected - margin_P if how.margin else chosen - rejected
    loss = -F.logsigmoid(gap)
    return loss + how.centre * (chosen + rejected).square() if how.centre else loss
