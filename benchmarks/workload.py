"""The work that contestants do in turns: which rows a step has, and the experiment that trains on
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.protocol.task import Places

SEED = 5  # of the random weights


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`num_batches` steps of `batch` rows, again and again."""

    data_path: Path
    folder: Path  # for caches
    size: str = "small"
    batch: int
    num_batches: int
    dropout: float = 0.1

    @property
    def places(self) -> Places:
        return Places(self.data_path, self.folder / "cache", self.folder / "results")

    def span(self, number: int) -> range:
        """The rows of step `number`, by their place among those of all batches."""
        first = number % self.num_batches * self.batch
        return range(first, first + self.batch)

    def values(
        self,
        task: str,
        config: Mapping[str, Any],
        tokenizer: Path | str,
        *,
        train: Mapping[str, Any] | None = None,
        **blocks: Any,
    ) -> dict[str, Any]:
        """An experiment on a base of random weights, in fp32 at ZeRO 0 unless it says otherwise.

        train: keys that it has besides; blocks: the other blocks of the dictionary.
        """
        usual = {"steps": 1, "global_batch": self.batch, "micro_batch": self.batch}
        return {
            "task": task,
            "base": {"config": dict(config), "seed": SEED},
            "tokenizer": str(tokenizer),
            "train": {**usual, "precision": "fp32", **(train or {})},
            "schedule": {"shape": "constant"},
            "deepspeed": "zero0",
            **blocks,
        }
