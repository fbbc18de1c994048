"""How far a student's distribution over the vocabulary is from a teacher's, of which the likeliest
tokens are known.

The teacher's k likeliest tokens are k classes, and all other tokens together are one more class,
for both models. A divergence of the k + 1 classes is never above that of all V tokens (data
processing inequality, for each of the three), and with k = V it is that divergence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainer.config.origin.teacher import DivergenceName

# N positions, V vocabulary, K likeliest tokens, C classes: K, and one more if K < V

_IDS, _LOGPS, _REST = TEACHER_FIELDS = (  # of a batch
    "teacher_ids",
    "teacher_logps",
    "teacher_rest",
)


@dataclass(frozen=True)
class DistillationTerms:
    """How a teacher is learnt from; the keys of trainer/config/origin/teacher.py."""

    divergence: DivergenceName
    weight: float
    temperature: float
    vocabulary: int  # ids 0, 1, ... that both models have logits for; others are left out

    def tempered(self, logits_NV: Tensor) -> Tensor:
        """(N, vocabulary) fp32: logits over the temperature."""
        return logits_NV[:, : self.vocabulary].float() / self.temperature


@dataclass(frozen=True)
class Lesson:
    """What a teacher says of N positions, and how it is learnt."""

    how: DistillationTerms
    ids_NK: Tensor
    logps_NK: Tensor  # log-probabilities of these tokens
    rest_N: Tensor  # the log of the probability of all other tokens together

    @classmethod
    def of(cls, how: DistillationTerms | None, batch: Mapping[str, Tensor]) -> Lesson | None:
        """From a batch; None where it says nothing of a teacher."""
        if how is None or _IDS not in batch:
            return None
        return cls(how, batch[_IDS], batch[_LOGPS], batch[_REST])

    def part(self, rows: slice) -> Lesson:
        """Of some of the positions."""
        ids, logps, rest = self.ids_NK[rows], self.logps_NK[rows], self.rest_N[rows]
        return Lesson(self.how, ids, logps, rest)

    def alone(self) -> Lesson:
        """The same with the whole weight."""
        return replace(self, how=replace(self.how, weight=1.0))


def teacher_fields(ids_NK: Tensor, logps_NK: Tensor, rest_N: Tensor) -> dict[str, Tensor]:
    """What a batch says of its teacher."""
    return {_IDS: ids_NK, _LOGPS: logps_NK, _REST: rest_N}


def without_teacher(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch without teacher_fields, for models that take no tensor they do not know."""
    return {name: one for name, one in batch.items() if name not in TEACHER_FIELDS}


def likeliest(logits_NV: Tensor, how: DistillationTerms, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(N, k) int32 ids of the likeliest tokens, (N, k) fp32 log-probabilities, and (N,) fp32: the
    log of the probability of all others together, -inf where there is no other.
    """
    tempered_NV = how.tempered(logits_NV)
    total_N1 = tempered_NV.logsumexp(-1, keepdim=True)
    values_NK, ids_NK = tempered_NV.topk(k, dim=-1)
    rest_N = tempered_NV.scatter(1, ids_NK, -math.inf).logsumexp(-1)
    return ids_NK.int(), values_NK - total_N1, rest_N - total_N1[:, 0]


def divergences(logits_NV: Tensor, lesson: Lesson) -> Tensor:
    """(N,) fp32: the divergence of a student's logits from the teacher at each position, in nats.

    With p of the teacher and q of the student, sums over the classes: forward p (log p - log q);
    reverse q (log q - log p); mixed (p (log p - log m) + q (log q - log m)) / 2, m = (p + q) / 2.
    Sources: Hinton et al. 2015 (arXiv 1503.02531); MiniLLM, Gu et al. 2024 (2306.08543); GKD,
    Agarwal et al. 2024 (2306.13649), eq. 2 with beta = 0.5.
    """
    log_q_NC = _of_student(logits_NV, lesson)
    log_p_NC = lesson.logps_NK.float()
    if log_q_NC.shape[1] > log_p_NC.shape[1]:
        log_p_NC = torch.cat([log_p_NC, lesson.rest_N.float()[:, None]], dim=1)
    # they may have been stored in 16 bits
    log_p_NC = log_p_NC - log_p_NC.logsumexp(-1, keepdim=True)
    if lesson.how.divergence == "forward":
        return (log_p_NC.exp() * (log_p_NC - log_q_NC)).sum(-1)
    if lesson.how.divergence == "reverse":
        return (log_q_NC.exp() * (log_q_NC - log_p_NC)).sum(-1)
    log_m_NC = torch.logaddexp(log_p_NC, log_q_NC) - math.log(2.0)
    of_teacher_NC = log_p_NC.exp() * (log_p_NC - log_m_NC)
    return (of_teacher_NC + log_q_NC.exp() * (log_q_NC - log_m_NC)).sum(-1) / 2


def _of_student(logits_NV: Tensor, lesson: Lesson) -> Tensor:
    """(N, C) fp32: the student's log-probabilities of the classes."""
    tempered_NV, ids_NK = lesson.how.tempered(logits_NV), lesson.ids_NK.long()
    total_N1 = tempered_NV.logsumexp(-1, keepdim=True)
    log_q_NK = tempered_NV.gather(1, ids_NK) - total_N1
    if ids_NK.shape[1] == tempered_NV.shape[1]:  # no token is left for the last class
        return log_q_NK
    # not 1 minus the others, which would be 0 where they are nearly 1
    rest_N1 = tempered_NV.scatter(1, ids_NK, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_q_NK, rest_N1 - total_N1], dim=1)
