"""The experiments of a loop of rounds: plain dictionaries, each beginning with the model of the one
before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from trainer import tasks
from trainer.config.schema import RandomBase
from trainer.config.userfile import placed
from trainer.errors import ConfigError
from trainer.tasks.retriever.config import Config, Data

Values = dict[str, Any]

START = 0  # the number of the model that the first round begins with
VALID = "valid.jsonl"  # below the folder of the loop, as all files of its rounds
# What says where rows come from. A round has rows of its own.
_OF_SOURCE = (Data.of_source | {"mix", "mixing", "valid_sets"}) - {"query_prefix", "passage_prefix"}


def rows_file(number: int) -> str:
    """The training rows of a round, below the folder of the loop."""
    return f"round-{number}/rows.jsonl"


def of_round(values: Values, before: Values | None, number: int, *, digest: str) -> Values:
    """The dictionary of a round: the experiment's own, with the rows of the round, and from the
    second round on with the trained model of the round before as its base.

    digest: of the plan of its loop. It stands in the label, so that rounds on other rows have
    another id: of its rows, the dictionary itself has only a file's name.
    """
    own = values.get("label") or "rounds"
    values = {**values, "label": f"{own} {digest[:12]}, round {number}"}
    given = cast("Values", values["data"])
    data = {key: value for key, value in given.items() if key not in _OF_SOURCE}
    data |= {"source": "tevatron", "files": {"train": rows_file(number), "valid": VALID}}
    if before is None:
        return {**values, "data": data}
    rest = {key: value for key, value in values.items() if key != "tokenizer"}  # the model has it
    return {**rest, "base": {"experiment": before}, "data": data}


def all_rounds(values: Values, rounds: int, *, digest: str) -> list[Values]:
    """The dictionaries of all rounds, the first one first."""
    made: list[Values] = []
    for number in range(1, rounds + 1):
        made.append(of_round(values, made[-1] if made else None, number, digest=digest))
    return made


def checked(values: Values, data_path: Path | None) -> Values:
    """The experiment as its rounds take it: the tokenizer, and the model of data.batches.topics,
    are found without --data_path, which is another folder for them. ConfigError for one that cannot
    be trained in rounds.
    """
    cfg = tasks.parse(values)
    if not isinstance(cfg, Config) or cfg.form != "bi":
        form = "" if not isinstance(cfg, Config) else f', form="{cfg.form}"'
        raise ConfigError(
            f'rounds: got task "{values["task"]}"{form}, want a retriever of vectors (task '
            '"retriever", form "bi"), whose search gives the negatives of the next round.'
        )
    if isinstance(cfg.base, RandomBase):
        raise ConfigError(
            "rounds: the base of this experiment has random weights, whose vectors find nothing to "
            'mine. Train a first model by itself, and name it: "base": {"experiment": ...}.'
        )
    taken = {
        "init_from": cfg.init_from is not None,
        "continues": cfg.continues is not None,
        "data.mix": bool(cfg.data.mix),
        "data.valid_sets": bool(cfg.data.valid_sets),
        "encoder.learn_temperature": cfg.encoder.learn_temperature,
        'data.batches.topics.by="field"': cfg.data.batches is not None
        and cfg.data.batches.reads_topics,
    }
    unread = [name for name, is_set in taken.items() if is_set]
    if unread:
        raise ConfigError(
            f"rounds: {', '.join(unread)} of this experiment has no meaning there: a round begins "
            "with the weights of the round before, at the temperature of the dictionary, and "
            "trains on what was mined alone. Leave it out."
        )
    name = values.get("tokenizer")
    if isinstance(name, str) and data_path is not None and not Path(name).is_dir():
        folder = data_path / name
        if folder.is_dir():
            values = {**values, "tokenizer": str(folder.resolve())}
    topics = None if cfg.data.batches is None else cfg.data.batches.topics
    if topics is not None and topics.model is not None:
        folder = (data_path or Path()) / placed(topics.model)
        batches = values["data"]["batches"]
        of_topics = {**batches["topics"], "model": str(folder.resolve())}
        data = {**values["data"], "batches": {**batches, "topics": of_topics}}
        values = {**values, "data": data}
    return values


def refuse_no_teacher(values: Values, *, has_judge: bool) -> None:
    """ConfigError for an experiment that learns from a teacher's scores, of which there are none
    without a judge.
    """
    cfg = tasks.parse(values)
    if isinstance(cfg, Config) and cfg.needs_teacher and not has_judge:
        raise ConfigError(
            "rounds: loss.distillation (or false_negatives.by) of this experiment learns from a "
            "teacher's scores, and what is mined has none. Name a cross-encoder in --judge: its "
            "scores are written into the rows."
        )
