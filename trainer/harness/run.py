"""Runs published tasks on a run's model; the scores go into a file of the run, to wandb, and are
returned as lines.
"""

from __future__ import annotations

import time
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError
from trainer.evaluation.run import Question
from trainer.harness import lm_eval, mteb, records
from trainer.runtime import distributed
from trainer.runtime.distributed import on_main
from trainer.telemetry.wandb_run import tell_wandb
from trainer.version import lathe_version

if TYPE_CHECKING:
    from trainer.evaluation.named_run import NamedRun
    from trainer.harness.flags import HarnessFlags
    from trainer.training.options import Options

_OF_BOTH = ("values", "model", "limit", "batch")  # of a question about a split, and of tasks
_FLAGS = {
    "split": "--split",
    "search": "--num_beams, --num_answers, --temperature, --top_p and --seed",
    "predictions": "--pred",
    "bertscore_model": "--bertscore_model",
    "measures": "--measure",
    "passage_scores": "--write_scores",
}


def run(named: NamedRun, question: Question, flags: HarnessFlags, options: Options) -> list[str]:
    """The lines that tell the scores. A collective; the file is written by one rank.

    ConfigError for a package that is not installed, unknown tasks, a model that cannot do them,
    and what else a question about a split may ask.
    """
    _check(question)
    program = lm_eval if flags.lm_eval is not None else mteb
    about = {program.__name__.rpartition(".")[2]: program.version(), "lathe": lathe_version()}
    settings = options.wandb(named.values)
    start = time.monotonic()
    questions = [question]
    if flags.against is not None:
        limits: dict[str, Any] = {"limit": question.limit, "batch": question.batch}
        questions.append(named.question(flags.against, **limits))
    evaluation, how = program.evaluate(questions, flags, options)
    about |= {"seconds": round(time.monotonic() - start, 1), "how": how}
    path = named.folder / program.FILE
    on_main(lambda: records.add(path, evaluation, about))
    if settings is not None and distributed.is_main():
        name = path.stem
        tell_wandb(settings, named.folder, name, evaluation.of.scalars(), [])
    return [*evaluation.lines()]


def _check(question: Question) -> None:
    plain = Question(question.values)
    foreign = [
        _FLAGS.get(one.name, f"--{one.name}")
        for one in fields(question)
        if one.name not in _OF_BOTH
        if getattr(question, one.name) != getattr(plain, one.name)
    ]
    if foreign:
        raise ConfigError(
            f"--lm_eval, --mteb: got {', '.join(foreign)} as well, which say how a split of the "
            "run's own data is evaluated. Leave that out."
        )
