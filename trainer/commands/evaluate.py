"""Evaluates a trained model on a split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.commands import options
from trainer.config.flags import Strict
from trainer.harness.flags import HarnessFlags

if TYPE_CHECKING:
    from trainer.evaluation.run import Evaluated

Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        min=1e-3,
        help="Sample tokens at this temperature, instead of taking the most likely one.",
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        "--top_p",
        min=0.0,
        max=1.0,
        help="Sample from the most likely tokens that together have this probability.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Random seed for sampling.")]
BestAnswer = Annotated[
    bool,
    typer.Option(
        "--best_answer",
        help="Count rows with equal question and context once, with the answers of all.",
    ),
]
AnotherContext = Annotated[
    bool,
    typer.Option(
        "--another_context",
        help="Give each row the context of another row, to measure what reading contributes.",
    ),
]
CutAt = Annotated[
    list[str] | None,
    typer.Option("--cut_at", help="End answers before this text; may be given several times."),
]
Measures = Annotated[
    list[str] | None,
    typer.Option(
        "--measure", help="Another metric: rouge, meteor or bertscore; may be given several times."
    ),
]
Entity = Annotated[
    str | None,
    typer.Option(
        "--wandb_entity_name",
        help="wandb entity, where it is not your default one.",
    ),
]
Project = Annotated[
    str | None,
    typer.Option(
        "--wandb_project_name",
        help="wandb project; the run in wandb gets the scores.",
    ),
]
BertscoreModel = Annotated[
    str | None,
    typer.Option("--bertscore_model", help="Model that bertscore uses; default roberta-large."),
]


@options.guard
def evaluate(
    which: options.RunOptions,
    harness: HarnessFlags,
    model: options.Model = "best",
    split: options.Split = "valid",
    limit: options.Limit = None,
    batch: options.BatchSize = None,
    num_beams: options.NumBeams = 1,
    num_answers: options.NumAnswers = 1,
    temperature: Temperature = None,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    best_answer: BestAnswer = False,
    another_context: AnotherContext = False,
    cut_at: CutAt = None,
    measure: Measures = None,
    bertscore_model: BertscoreModel = None,
    pred: options.Pred = None,
    write_scores: options.WriteScores = None,
    strict: Strict = False,
    wandb_entity_name: Entity = None,
    wandb_project_name: Project = None,
) -> None:
    """Score a trained model on a split, or on published tasks, every row exactly once; under
    torchrun, on all its ranks.
    """
    from trainer.evaluation.run import evaluated
    from trainer.metrics.similarity import BERTSCORE_MODEL
    from trainer.protocol.abilities import Search
    from trainer.runtime import distributed

    has_tasks = harness.is_set
    named = which.named_run()
    distributed.init()
    run_options = replace(
        which.run_options(
            wandb_entity_name=wandb_entity_name,
            wandb_project_name=wandb_project_name,
            strict=strict,
        ),
        savedir_base=named.savedir_base,
    )
    question = named.question(
        model,
        split=split,
        limit=limit,
        batch=batch,
        search=Search(num_beams, num_answers, temperature, top_p, seed),
        predictions=pred,
        best_answer=best_answer,
        another_context=another_context,
        cut_at=cut_at or (),
        measures=measure or (),
        bertscore_model=bertscore_model or BERTSCORE_MODEL,
        passage_scores=write_scores,
    )
    if has_tasks:
        from trainer.harness.run import run

        for line in run(named, question, harness, run_options):
            if distributed.is_main():
                typer.echo(line)
        return
    result = evaluated(question, run_options)
    for line in _lines(result, split) if distributed.is_main() else ():
        typer.echo(line)


def _lines(result: Evaluated, split: str) -> Iterator[str]:
    """Each score; of the test split with its interval."""
    from trainer.evaluation.run import TEST
    from trainer.metrics.intervals import OF_ALL_ROWS

    for name, value in result.scores.items():
        interval = ""
        if split == TEST and name in result.intervals:
            low, high = result.intervals[name]
            interval = f" (95%: {low:.6f} to {high:.6f})"
        elif split == TEST:
            interval = f" (no interval: {OF_ALL_ROWS})"
        yield f"{split}/{name} {value:.6f}{interval}"
