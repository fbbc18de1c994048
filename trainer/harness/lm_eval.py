"""Tasks of lm-eval (EleutherAI's lm-evaluation-harness) on a trained language model, without an
export by hand.
"""

from __future__ import annotations

import importlib
import logging
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.errors import ConfigError, nearest
from trainer.evaluation.run import open_model
from trainer.files.packages import extra
from trainer.harness.records import (
    Evaluation,
    Gain,
    ModelScores,
    TaskScore,
    TaskScores,
    model_name,
)
from trainer.metrics.intervals import RowSums
from trainer.retrieval.embeddings import fingerprint
from trainer.runtime import distributed
from trainer.runtime.distributed import on_main
from trainer.tasks import names
from trainer.verdict.paired import Difference, compare

if TYPE_CHECKING:
    from trainer.evaluation.run import Question
    from trainer.harness.flags import HarnessFlags
    from trainer.training.options import Options

FILE = "lm_eval.json"  # in the run folder
EXTRA = "lm-eval"
# lm-eval's own defaults (simple_evaluate, 0.4.13): its command line gives the same numbers
_RANDOM_SEED, _OTHER_SEED, _DRAWS = 0, 1234, 100_000
_NO_FILTER = "none"
log = logging.getLogger(__name__)


def version() -> str:
    """Of lm-eval. ConfigError where it is not installed."""
    extra("lm_eval", EXTRA)
    return importlib.import_module("importlib.metadata").version("lm_eval")


def evaluate(
    questions: Sequence[Question], flags: HarnessFlags, options: Options
) -> tuple[Evaluation, dict[str, Any]]:
    """The tasks on one model, or on two that are compared; and how they were asked.

    questions: of the run's model, and perhaps of the model that it is compared with. A collective.
    ConfigError for tasks that lm-eval does not have, and for a model that writes no texts.
    """
    extra("lm_eval", EXTRA)
    for question in questions:
        _trained(question.values["task"])
    loaded = _load(flags)
    of_models: list[ModelScores] = []
    samples: list[Mapping[str, Any]] = []
    how: dict[str, Any] = {}
    for question in questions:
        scores, rows, how = _of_model(question, loaded, flags, options, keeps=len(questions) > 1)
        of_models.append(scores)
        samples.append(rows)
    if len(of_models) == 1:
        return Evaluation(of_models[0]), how
    of, against = of_models
    gains = {task: gains_of(task, of, against, samples) for task in of.tasks}
    return Evaluation(of, against, gains), how


def _load(flags: HarnessFlags) -> dict[str, Any]:
    """The tasks that are asked for, with their data: lm-eval's TaskDict."""
    tasks: Any = importlib.import_module("lm_eval.tasks")
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    task_names, path = flags.lm_eval_tasks, flags.include_path
    if path is not None and not path.is_dir():
        raise ConfigError(
            f"--include_path {path}: no such folder. Give one of YAML files of tasks."
        )
    manager: Any = None
    if path is not None:
        manager = tasks.TaskManager(include_path=path, include_defaults=False)
    # lm-eval reads its 14,000 files of tasks, which takes seconds, only where one is asked for
    if manager is None or any(name not in manager.all_tasks for name in task_names):
        manager = tasks.TaskManager(include_path=path)
    unknown = [name for name in task_names if name not in manager.all_tasks]
    if unknown:
        raise ConfigError(
            f"--lm_eval {unknown[0]}: lm-eval {version()} has no such task. "
            f"{nearest(unknown[0], manager.all_tasks)}"
        )
    _seed()
    try:
        loaded = manager.load(task_names)
    except Exception as error:  # any: of a YAML file, of data, of the Hub; lm-eval has no tree
        raise ConfigError(
            f"--lm_eval {','.join(task_names)}: lm-eval cannot read the tasks or their data "
            f"({type(error).__name__}: {error}). Mend the task's file, or fetch its data where "
            "there is a network."
        ) from error
    for name, task in loaded["tasks"].items():
        _refuse(name, task)
        _set_fewshot(name, task, flags.num_fewshot)
    return loaded


def _seed() -> None:
    random.seed(_RANDOM_SEED)
    np.random.seed(_OTHER_SEED)
    torch.manual_seed(_OTHER_SEED)


def _refuse(name: str, task: Any) -> None:
    reasons = {
        "UNSAFE_CODE": "it runs code that the model writes",
        "MULTIMODAL": "it shows pictures or sound",
    }
    for attribute, reason in reasons.items():
        if getattr(task, attribute, False):
            raise ConfigError(
                f"--lm_eval {name}: {reason}, which is not done here. Leave it out, or run lm-eval "
                "itself on an export."
            )


def _set_fewshot(name: str, task: Any, num_fewshot: int | None) -> None:
    """As lm-eval's own command does: a task that says 0 itself has none."""
    of_task = task.get_config("num_fewshot")
    if num_fewshot is not None and of_task == 0:
        log.warning("%s has no solved examples, as its file says: --num_fewshot is not used", name)
    elif num_fewshot is not None:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif of_task is None:
        task.set_config(key="num_fewshot", value=0)


def _of_model(
    question: Question,
    loaded: dict[str, Any],
    flags: HarnessFlags,
    options: Options,
    *,
    keeps: bool,
) -> tuple[ModelScores, Mapping[str, Any], dict[str, Any]]:
    """A model's scores; with `keeps` what each row adds to them, by task; how it was asked."""
    from trainer.harness.language_model import TrainedLM

    task, model, folder = open_model(question, options)
    base = _trained(task.cfg.task).language_model(task, model)
    batch = question.batch or task.cfg.train.eval_batch or task.cfg.train.micro_batch
    chat = is_chat(task, flags.apply_chat_template)
    lm = TrainedLM(base, task, batch=batch)
    _seed()
    for one in loaded["tasks"].values():
        one.set_fewshot_seed(seed=_OTHER_SEED)
    log.info("%s: tasks of lm-eval, %d rows at a time", folder, batch)
    results: Any = importlib.import_module("lm_eval.evaluator").evaluate(
        lm,
        loaded,
        limit=question.limit,
        bootstrap_iters=_DRAWS if distributed.is_main() else 0,
        log_samples=keeps,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
    )
    weights = on_main(lambda: fingerprint(folder, task.fingerprint()))
    scores = ModelScores(model_name(question.model, folder), folder, weights, tasks_of(results))
    how = {
        "tasks": flags.lm_eval_tasks,
        "limit": question.limit,
        "num_fewshot": flags.num_fewshot,
        "apply_chat_template": chat,
    }
    return scores, results.get("samples", {}), how


def _trained(task: str) -> Any:
    """The module that knows a task's trained models. ConfigError where they continue no texts."""
    modules = {name: importlib.import_module(f"trainer.tasks.{name}.trained") for name in names()}
    writers = [name for name, module in modules.items() if hasattr(module, "language_model")]
    if task not in writers:
        raise ConfigError(
            f"--lm_eval: task {task!r} trains no model that continues texts, which lm-eval's tasks "
            f"want. Tasks that do: {', '.join(writers)}."
        )
    return modules[task]


def is_chat(task: Any, wish: bool | None) -> bool:
    """Whether questions are written as conversations."""
    if wish and task.tokenizer.chat_template is None:
        raise ConfigError(
            "--apply_chat_template: the tokenizer of this run has no chat template. Leave it out."
        )
    return getattr(task, "chat", None) is not None if wish is None else wish


def tasks_of(results: Mapping[str, Any]) -> dict[str, TaskScores]:
    """The scores of lm-eval's results, by task and group, under its own names of metrics: "acc", or
    "exact_match,strict-match" where a filter chose the answer.
    """
    of_tasks: dict[str, TaskScores] = {}
    for name, metrics in {**results["results"], **results.get("groups", {})}.items():
        scores: dict[str, TaskScore] = {}
        for key, value in metrics.items():
            metric, comma, chooser = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{metric}_stderr,{chooser}")
            stderr = float(error) if isinstance(error, int | float) else None
            scores[metric if chooser == _NO_FILTER else key] = TaskScore(float(value), stderr)
        counts = results["n-samples"].get(name, {})
        rows = counts.get("effective", metrics.get("sample_len"))
        more = {"num_fewshot": results["n-shot"].get(name)}
        of_tasks[name] = TaskScores(results["versions"].get(name), rows, scores, more)
    return of_tasks


def gains_of(
    task: str, of: ModelScores, against: ModelScores, samples: Sequence[Mapping[str, Any]]
) -> dict[str, Gain]:
    """By metric, the difference of two models on a task, with an interval where the metric is a
    mean over rows.

    samples: of both models, lm-eval's samples by task.
    """
    gains: dict[str, Gain] = {}
    mine, others = of.tasks[task].scores, against.tasks[task].scores
    for metric in [one for one in mine if one in others]:
        value = mine[metric].value - others[metric].value
        rows = [_by_row(of_model.get(task, ()), metric) for of_model in samples]
        paired = _paired(*rows) if rows[0].keys() == rows[1].keys() else None
        # a metric that is no mean of what its rows say has no interval
        is_mean = paired is not None and np.isclose(paired.effect, value, rtol=1e-9, atol=1e-9)
        gains[metric] = Gain(value, paired if is_mean else None)
    return gains


def _paired(mine: Mapping[int, float], others: Mapping[int, float]) -> Difference | None:
    """Two models row by row; None without a row."""
    if not mine:
        return None
    sums: list[RowSums] = []
    for of_model in (others, mine):
        values_N = np.array([of_model[row] for row in sorted(mine)])
        sums.append(RowSums(values_N, np.ones_like(values_N)))
    return compare(sums[:1], sums[1:])


def _by_row(samples: Sequence[Mapping[str, Any]], metric: str) -> dict[int, float]:
    """What each row adds to a metric; {}: not a number for each row."""
    name, _, chooser = metric.partition(",")
    values: dict[int, float] = {}
    for sample in samples:
        if sample["filter"] == (chooser or _NO_FILTER) and name in sample["metrics"]:
            value = sample[name]
            if not isinstance(value, bool | int | float | np.number | np.bool_):
                return {}
            values[sample["doc_id"]] = float(value)
    return values
