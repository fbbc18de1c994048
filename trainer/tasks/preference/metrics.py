"""What evaluations say of preferences: whether chosen answers get more, how far the model went from
its start, and whether it prefers long answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.metrics.mergeable import Ratio
from trainer.tasks.preference import losses
from trainer.tasks.preference.config import Preference
from trainer.tasks.preference.losses import ScoredAnswers


def of_pairs(rewards: Tensor, tokens: Tensor, ratios: Tensor | None) -> dict[str, Ratio]:
    """Over P pairs:

    - accuracy: the share in which the chosen answer gets more.
    - reward_gap: how much more, on average.
    - chosen_tokens, rejected_tokens: the mean length of answers.
    - longer_chosen, longer_preferred: of pairs of different lengths, the share in which the longer
      answer is the chosen one, and in which it gets more.
    - kl: nats by answer, the mean of log start - log model. Where the start wrote the answers, it
      estimates the divergence of the model from it, KL(start || model).

    rewards, tokens, ratios: (2 P,), those of the chosen answers first. ratios: log model - log
    start; None where the loss compares with no start, and kl is missing.
    """
    chosen, rejected = rewards.chunk(2)
    long, short = tokens.chunk(2)
    count = torch.tensor(len(chosen), device=chosen.device)
    differs, is_longer = long != short, long > short
    scores = {
        "accuracy": Ratio((chosen > rejected).sum(), count),
        "reward_gap": Ratio((chosen - rejected).double().sum(), count),
        "chosen_tokens": Ratio(long.sum(), count),
        "rejected_tokens": Ratio(short.sum(), count),
        "longer_chosen": Ratio((differs & is_longer).sum(), differs.sum()),
        "longer_preferred": Ratio(
            (differs & (is_longer == (chosen > rejected)) & (chosen != rejected)).sum(),
            differs.sum(),
        ),
    }
    if ratios is not None:
        scores["kl"] = Ratio(-ratios.double().sum(), 2 * count)
    return scores


def orpo_loss(table: Tensor) -> float:
    """The mean cross-entropy by token, and the mean of the odds' losses by pair."""
    nll, tokens, odds, pairs = table.sum(0)
    return float(nll / tokens + odds / pairs)


def table_of_singles(answers: ScoredAnswers, others: ScoredAnswers, is_desired: Tensor) -> Tensor:
    """(B, 4) fp64 of answers with a label: the log-ratio, the log-ratio behind another prompt, the
    tokens, the label.
    """
    columns = (answers.ratios, others.ratios, answers.tokens, is_desired)
    return torch.stack([column.double() for column in columns], dim=1)


def of_singles(table: Tensor, how: Preference) -> dict[str, float]:
    """KTO's loss over all rows, with one divergence for all of them (kl); reward_gap: the mean
    reward of desired answers over that of the others; and the mean tokens of each kind.
    """
    ratios, others, tokens, label = table.unbind(1)
    is_desired, kl = label.bool(), others.mean().clamp(min=0)
    answers = ScoredAnswers(ratios, tokens, torch.zeros_like(ratios))
    numbers = {
        "loss": float(losses.kto(answers, is_desired, kl, how).mean()),
        "kl": float(kl),
    }
    if bool(is_desired.any()) and not bool(is_desired.all()):
        rewards = how.strength * ratios
        gap = rewards[is_desired].mean() - rewards[~is_desired].mean()
        numbers["reward_gap"] = float(gap)
        numbers["desired_tokens"] = float(tokens[is_desired].mean())
        numbers["undesired_tokens"] = float(tokens[~is_desired].mean())
    return numbers
