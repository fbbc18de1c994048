"""What a loop of rounds does, and where its files lie.

plan.json              what makes up the rounds: experiment, texts, mining, judge
bm25.train.trec, bm25.valid.trec    what a search by words ranks for these questions
valid.jsonl            the validation rows of every training
round-<n>/             of the model after n rounds; round-0 is the model that they begin with
  mined.jsonl          from round 1 on: what was mined with the vectors of the round before
  scores/              the judge's scores of them
  rows.jsonl           what the round trained on
  mined.json           the model that mined, and how many negatives were judged
  passages/, train/, valid/     vectors
  train.trec, valid.trec        rankings
  measures.json        of the validation questions
  seconds.json         by stage
rounds.json            the table
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from trainer.config.identity import exp_id
from trainer.errors import ConfigError
from trainer.files.packages import require
from trainer.retrieval.false_negatives import JudgeLimits
from trainer.rounds.leaks import Guard

if TYPE_CHECKING:
    from trainer.evaluation.run import Question
    from trainer.retrieval.negatives import RankRange
    from trainer.rounds.dictionaries import Values

MiningBy = Literal["model", "bm25", "both"]
Precision = Literal["fp32", "bf16"]
DEPTH = 100  # at least so many hits of a question are ranked and measured
BATCH = 64  # texts, or pairs of the judge, of one forward


@dataclass(frozen=True)
class NegativeJudge:
    """A cross-encoder that scores what was mined."""

    question: Question  # its run and model
    verdict: JudgeLimits  # may have no limit: then its scores are only written


@dataclass(frozen=True)
class Mining:
    """How negatives are found."""

    window: RankRange
    by: MiningBy = "model"
    judge: NegativeJudge | None = None

    def __post_init__(self) -> None:
        if self.by not in get_args(MiningBy):
            raise ConfigError(f"--by {self.by}: want {', '.join(get_args(MiningBy))}.")
        if self.by != "model":
            require("bm25s", "bm25")  # before a corpus is encoded


@dataclass(frozen=True)
class Loop:
    """A loop of rounds."""

    values: Values  # the experiment (dictionaries.checked)
    rounds: int
    out: Path
    mining: Mining
    guard: Guard = field(default_factory=Guard)
    precision: Precision = "fp32"  # of encoding and judging

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ConfigError(f"--precision {self.precision}: want fp32 or bf16.")

    @property
    def depth(self) -> int:
        return max(DEPTH, self.mining.window.last)

    def folder(self, number: int) -> Path:
        """The folder of the model after `number` rounds."""
        return self.out / f"round-{number}"

    def identity(self, digests: dict[str, str], judge: str | None) -> dict[str, Any]:
        """What plan.json says, which must be the same when a loop goes on, with more rounds or not.

        judge: the fingerprint of its model.
        """
        mining = self.mining
        verdict = None if mining.judge is None else asdict(mining.judge.verdict)
        return {
            "experiment": exp_id(self.values),
            "precision": self.precision,
            "by": mining.by,
            **asdict(mining.window),
            "judge": judge,
            "verdict": verdict,
            "texts": digests,
        }
