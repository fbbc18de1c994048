"""Ten questions to a reader, and what it answers with their contexts and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from trainer.data import lookup
from trainer.metrics.mergeable import exact_match

if TYPE_CHECKING:
    from torch import nn

    from trainer.protocol.task import Row

NUM_QUESTIONS = 10
_SPLIT = "test"  # its names stand in no row that is trained on


@dataclass(frozen=True)
class Talk:
    """Questions with the answers to them, in the order of the questions."""

    rows: Sequence[Row]  # each with question, answers and ctxs
    with_context: Sequence[str]
    without: Sequence[str]
    before: Sequence[str]  # of the base, before the training, with the contexts

    def num_right(self, answers: Sequence[str]) -> int:
        """How many of some answers are exact, as published readers are scored."""
        pairs = zip(answers, self.rows, strict=True)
        return sum(int(exact_match(answer, row["answers"])) for answer, row in pairs)

    def text(self) -> str:
        """The talk as a person reads it: what is read with the first question, a line for each
        question, and the scores.
        """
        facts = " ".join(passage["text"] for passage in self.rows[0]["ctxs"])
        own = [self._judged(at, text) for at, text in enumerate(self.with_context)]
        others = [self._judged(at, text) for at, text in enumerate(self.without)]
        table = [("question", "with its context", "without")]
        table += zip((row["question"] for row in self.rows), own, others, strict=True)
        counts = [f"{self.num_right(of)} of {len(of)}" for of in (self.with_context, self.without)]
        table.append(("right", counts[0], counts[1]))
        widths = [max(len(line[column]) for line in table) for column in (0, 1)]
        lines = [
            f"{len(self.rows)} questions about people whom no training row names. The first one's "
            "context is:",
            f"  {facts}",
            "",
        ]
        for question, first, second in table:
            lines.append(f"{question:<{widths[0]}}  {first:<{widths[1]}}  {second}")
        right_before = f"{self.num_right(self.before)} of {len(self.before)}"
        lines.append(f"Before the training {right_before}; the first answer was: {self.before[0]}")
        return "\n".join(lines)

    def _judged(self, at: int, answer: str) -> str:
        (wanted,) = self.rows[at]["answers"]
        is_right = exact_match(answer, [wanted]) == 1.0
        return f"{answer}, right" if is_right else f"{answer or '(nothing)'}, not {wanted}"


def questions(passages: int) -> list[Row]:
    """The ten questions, each with its own passages, of which one answers."""
    return list(islice(lookup.questions(_SPLIT, passages=passages), NUM_QUESTIONS))


def without_contexts(asked: Sequence[Row]) -> list[Row]:
    """The same questions without a passage."""
    return [{**row, "ctxs": []} for row in asked]


@torch.inference_mode()
def answers(task: Any, model: nn.Module, asked: Sequence[Row]) -> list[str]:
    """The answer of a reader to each row, in one forward."""
    return task.answers(model, [task.encode(row) for row in asked], asked).predictions
