"""What a language model forgot: its loss on texts like those that its base learnt from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer import tasks
from trainer.data.token_store import store_of
from trainer.evaluation.run import Question, batch_of, model_folder
from trainer.judging.by_row import START, model_of
from trainer.metrics.intervals import RowSums
from trainer.training.scoring import Frozen, evaluate_rows

if TYPE_CHECKING:
    from trainer.training.options import Options

logger = logging.getLogger(__name__)

EMBEDDED = "stdlib_docs"
_MOST_TOKENS = 512  # of a text; longer ones are cut into pieces
_MOST_ROWS = 500
_SHARED = ("base", "tokenizer", "lora", "init_from", "optim")  # with the run
_OF_TRAIN = ("steps", "global_batch", "micro_batch", "eval_batch", "precision", "base_bits", "seed")


def loss_on_texts(
    question: Question, texts: str, options: Options, *, stop: Callable[[], None] | None = None
) -> RowSums | None:
    """The loss of question.model on the first _MOST_ROWS pieces of texts, by token. None for a task
    that trains no language model. A collective.

    texts: EMBEDDED, or a file of rows with "text" below --data_path.
    """
    opened = store_of_texts(question.values, texts, options)
    if opened is None:
        return None
    own, task, store = opened
    model = question.model
    folder = model if model == START else str(model_folder(question, options))
    of_texts = Question(own, model=folder, batch=question.batch)
    loaded = Frozen(model_of(task, of_texts, options))
    num_rows = min(_MOST_ROWS, len(store))
    _, sums = evaluate_rows(
        loaded, task, store, batch=batch_of(of_texts), num_rows=num_rows, stop=stop
    )
    return sums["loss"]


def store_of_texts(
    values: dict[str, Any], texts: str, options: Options
) -> tuple[dict[str, Any], Any, Any] | None:
    """The experiment, the task and the encoded pieces of the texts that a run may forget; None for
    a task that trains no language model. A collective. ConfigError and DataError for texts that
    cannot be read.
    """
    if not is_language_model(values):
        return None
    own = _experiment(values, texts)
    task = tasks.load(tasks.parse(own, source="judge.keep"), options.places)
    return own, task, store_of(task, "valid", options.cache_dir)


def is_language_model(values: dict[str, Any]) -> bool:
    """Whether an experiment trains a model that continues texts."""
    is_reward = values.get("preference", {}).get("loss") == "reward"
    return values["task"] in ("causal_lm", "preference") and not is_reward


def _experiment(values: dict[str, Any], texts: str) -> dict[str, Any]:
    """The dictionary of a language model on these texts, with the base and adapters of a run."""
    train = {key: values["train"][key] for key in _OF_TRAIN if key in values["train"]}
    data: dict[str, Any] = {"source": EMBEDDED}
    if texts != EMBEDDED:
        data = {"source": "files", "files": {"valid": texts}}
    tokens = min(_MOST_TOKENS, values.get("data", {}).get("max_tokens", _MOST_TOKENS))
    return {
        **{key: values[key] for key in _SHARED if key in values},
        "task": "causal_lm",
        "data": {**data, "max_tokens": tokens},
        "train": {"steps": 1, **train},
    }
