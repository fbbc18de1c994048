"""`rounds`: encode, mine and train, again and again, by one command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer.commands import options
from trainer.commands.retrieval import OfSplit, PassagesFile, QrelsFile, QueriesFile
from trainer.config.flags import Strict
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.retrieval.false_negatives import JudgeLimits
    from trainer.rounds.plan import Mining
    from trainer.rounds.sources import LoopFiles

ValidQueries = Annotated[
    Path | None,
    typer.Option("--valid_queries", help="Validation questions, if not those of --queries."),
]
ValidQrels = Annotated[Path | None, typer.Option("--valid_qrels", help="Their judgements.")]
ValidSplit = Annotated[
    str | None, typer.Option("--valid_split", help='Only those whose "split" is this one.')
]
TestQueries = Annotated[
    Path | None,
    typer.Option(
        "--test_queries",
        help="Test questions, if not those of --queries: near copies of them are not trained on.",
    ),
]


@dataclass(frozen=True)
class QuestionOptions:
    """Which questions are trained on, and which are held out."""

    queries: QueriesFile
    passages: PassagesFile
    qrels: QrelsFile = None
    split: OfSplit = None
    valid_queries: ValidQueries = None
    valid_qrels: ValidQrels = None
    valid_split: ValidSplit = None
    valid_share: Annotated[
        float,
        typer.Option(
            "--valid_share",
            help="Without validation questions of their own: this share of the training questions.",
        ),
    ] = 0.0
    test_queries: TestQueries = None
    test_qrels: Annotated[
        Path | None, typer.Option("--test_qrels", help="The judgements of the test questions.")
    ] = None
    test_split: Annotated[
        str | None, typer.Option("--test_split", help='Only those whose "split" is this one.')
    ] = None
    near: Annotated[
        float,
        typer.Option(
            "--near",
            help="Similarity from which on two questions are near copies: the share of their "
            "character 4-grams that both have.",
        ),
    ] = 0.8
    drop_copies: Annotated[
        bool,
        typer.Option(
            "--drop_copies",
            help="Leave near copies of held-out questions out of the training questions, instead "
            "of refusing them.",
        ),
    ] = False

    def files(self) -> LoopFiles:
        """The files that they lie in."""
        from trainer.rounds.sources import LoopFiles, QuestionFile

        def of(*flags: Any) -> QuestionFile | None:
            queries, qrels, split = flags
            return QuestionFile(queries or self.queries, qrels, split) if any(flags) else None

        return LoopFiles(
            self.passages,
            QuestionFile(self.queries, self.qrels, self.split),
            of(self.valid_queries, self.valid_qrels, self.valid_split),
            self.valid_share,
            of(self.test_queries, self.test_qrels, self.test_split),
        )


@dataclass(frozen=True)
class MiningOptions:
    """How negatives are found and judged."""

    by: Annotated[
        str,
        typer.Option(
            "--by",
            help="What ranks the passages out of which negatives are taken: model (that of the "
            "round before), bm25, or both in turn.",
        ),
    ] = "model"
    most: Annotated[
        int, typer.Option("--count", min=1, help="The largest number of negatives per question.")
    ] = 30
    first: Annotated[
        int, typer.Option("--first", min=1, help="The first rank that may be a negative.")
    ] = 1
    last: Annotated[
        int, typer.Option("--last", min=1, help="The last rank that may be a negative.")
    ] = 100
    seed: Annotated[int, typer.Option("--seed", help="Random seed of the sample of negatives.")] = (
        42
    )
    keep_answers: Annotated[
        bool,
        typer.Option("--keep_answers", help="Allow passages that hold an answer as negatives."),
    ] = False
    judge: Annotated[
        str | None,
        typer.Option(
            "--judge",
            help="A trained cross-encoder that scores what is mined: a run by its id, its folder, "
            "or an exported folder.",
        ),
    ] = None
    judge_above: Annotated[
        float | None,
        typer.Option("--judge_above", help="A negative whose score is above this one is left out."),
    ] = None
    judge_margin: Annotated[
        float | None,
        typer.Option(
            "--judge_margin",
            help="A negative whose score is above the best positive's less this margin is left "
            "out.",
        ),
    ] = None

    def verdict(self) -> JudgeLimits:
        """The limits of the judge's scores. Imports no torch."""
        from trainer.retrieval import false_negatives

        flags = ("--judge_above", "--judge_margin")
        verdict = false_negatives.checked(self.judge_above, self.judge_margin, flags)
        if self.judge is None and verdict.is_given:
            raise ConfigError(
                "--judge_above and --judge_margin are limits of a judge's scores. Name the judge "
                "in --judge, or leave them out."
            )
        return verdict

    def mining(self, savedir_base: Path) -> Mining:
        """All of it, with the run of the judge."""
        from trainer.evaluation.named_run import named_run
        from trainer.retrieval.negatives import RankRange
        from trainer.rounds.plan import Mining, NegativeJudge

        judge, verdict = None, self.verdict()
        if self.judge is not None:
            judge = NegativeJudge(named_run(self.judge, savedir_base).question("best"), verdict)
        window = RankRange(self.most, self.first, self.last, self.seed, self.keep_answers)
        by: Any = self.by
        return Mining(window, by, judge)


@options.guard
def rounds(
    which: options.ExperimentOptions,
    questions: QuestionOptions,
    mining: MiningOptions,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="The folder of the loop; an interrupted one is continued by the same words.",
        ),
    ],
    count: Annotated[int, typer.Option("--rounds", min=1, help="How many rounds.")] = 2,
    deepspeed: Annotated[
        str | None, typer.Option("--deepspeed", help="As trainval.py has it, of every training.")
    ] = None,
    precision: Annotated[
        str, typer.Option("--precision", help="Precision of encoding and judging: fp32 or bf16.")
    ] = "fp32",
    strict: Strict = False,
) -> None:
    """Encode, mine negatives and train so many times, each time from the model of the last round;
    then one table. Every round is an experiment of its own. Killed, the same command goes on.
    """
    from trainer.rounds import dictionaries

    own = dictionaries.checked(which.values(), which.data_path)
    mining.verdict()
    dictionaries.refuse_no_teacher(own, has_judge=mining.judge is not None)
    from trainer.launch.ending import leave
    from trainer.rounds.leaks import Guard
    from trainer.rounds.loop import run_rounds, table
    from trainer.rounds.plan import Loop
    from trainer.runtime import distributed

    guard = Guard(questions.near, questions.drop_copies)
    how = mining.mining(which.savedir_base)
    files = questions.files()
    in_precision: Any = precision
    loop = Loop(own, count, out, how, guard, in_precision)
    run_options = which.run_options(deepspeed=deepspeed, group=which.exp_group or "")
    distributed.init()
    code, lines = run_rounds(loop, files, run_options, strict=strict)
    if code == 0 and distributed.is_main():
        typer.echo("\n".join(table(lines)))
    if code:
        leave(code)
