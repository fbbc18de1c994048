"""Passages of different lengths as one stream of real tokens, with the place of each token among
the tokens of its question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.models.packed import layout

if TYPE_CHECKING:
    from trainer.protocol.task import Batch

# B questions, P passages of all questions, M tokens of all passages, S tokens of the longest
# question (all its passages)


def pack(
    questions: Sequence[Sequence[Sequence[int]]], *, bucketed: bool, cross_width: int | None = None
) -> Batch:
    """The passages of B questions, each a list of token ids, as layout.pack packs them, with these
    tensors in addition:

    question (P,): the question of each passage. question_starts (B + 1,) int32: where the tokens of
    each question begin, and last where those of the last question end. fused_mask (B, S) bool: True
    where there is a token. fused (M,): the place of each token in fused_mask, flattened.

    cross_width: None puts the tokens of a question side by side; a number gives every passage that
    many places, as the reference implementations do. A question needs at least one passage, and a
    passage at least one token.
    """
    passages = [passage for question in questions for passage in question]
    assert all(questions), "a question without passages is encoded as one passage"
    batch = layout.pack(passages, bucketed=bucketed)
    lengths = np.array([len(passage) for passage in passages], dtype=np.int64)
    question = np.repeat(np.arange(len(questions)), [len(question) for question in questions])
    passage, position = batch["passage"].numpy(), batch["position"].numpy()
    rooms = lengths if cross_width is None else np.full_like(lengths, cross_width)
    per_question = np.bincount(question, weights=rooms).astype(np.int64)
    width = (
        int(-(-per_question.max() // layout.ALIGNED) * layout.ALIGNED)
        if cross_width is None
        else int(per_question.max())
    )
    before = np.cumsum(rooms) - rooms  # places of all earlier passages, of all questions
    before_question = np.cumsum(per_question) - per_question
    fused = question[passage] * width + (before - before_question[question])[passage] + position
    mask = np.zeros(len(per_question) * width, dtype=bool)
    mask[fused] = True
    of_questions = np.bincount(question, weights=lengths).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(of_questions)]).astype(np.int32)
    placed = {"question": question, "question_starts": starts}
    placed |= {"fused": fused, "fused_mask": mask.reshape(len(per_question), width)}
    return batch | {name: torch.from_numpy(values) for name, values in placed.items()}
