"""A trained model over a split."""

from __future__ import annotations

from pathlib import Path

import typer

from trainer.commands import options
from trainer.commands.options import (
    BatchSize,
    CacheDir,
    DataPath,
    ExpConfigs,
    ExpGroup,
    ExpId,
    Limit,
    Model,
    NumAnswers,
    NumBeams,
    Pred,
    SavedirBase,
    Split,
    Steps,
    WriteScores,
)


def evaluate(
    savedir_base: SavedirBase,
    exp_group: ExpGroup = None,
    exp_id: ExpId = None,
    exp_configs: ExpConfigs = None,
    steps: Steps = None,
    data_path: DataPath = None,
    cache_dir: CacheDir = Path("tmp-cache"),
    model: Model = "best",
    split: Split = "valid",
    limit: Limit = None,
    batch: BatchSize = None,
    num_beams: NumBeams = 1,
    num_answers: NumAnswers = 1,
    pred: Pred = None,
    write_scores: WriteScores = None,
) -> None:
    """Score a trained model on a split, every row exactly once; under torchrun, on all its ranks."""

    def command() -> None:
        from trainer import distributed
        from trainer.evaluation import Question, run
        from trainer.run import Options
        from trainer.task import Search

        values = options.experiment(exp_group, exp_id, exp_configs, savedir_base, steps)
        distributed.init()
        given = Options(savedir_base, data_path=data_path, cache_dir=cache_dir)
        asked = Question(
            values,
            model=model,
            split=split,
            limit=limit,
            batch=batch,
            search=Search(num_beams, num_answers),
            predictions=pred,
            passage_scores=write_scores,
        )
        for name, value in run(asked, given).items():
            if distributed.is_main():
                typer.echo(f"{split}/{name} {value:.6f}")

    options.run(command)
