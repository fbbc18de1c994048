"""From an experiment to the subject of a plan, also where its data or its base are out of reach."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainer import tasks
from trainer.data.order import Sharding
from trainer.data.token_store import TokenStore
from trainer.errors import ConfigError, DataError
from trainer.memory.plan import Subject, changed
from trainer.memory.planned_rows import Rows, Specimens, StoredRows
from trainer.memory.published_shapes import published_shape
from trainer.models import base_model
from trainer.tasks.protocol import Places, Task

# The embedded tokenizer that stands in for a published one: its ids of padding and end.
_HUB_TIMEOUT_S = 3.0
_STAND_IN: dict[str, Any] = {"pad_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 0}


def subject_of(
    values: dict[str, Any],
    *,
    ds: dict[str, Any],
    sharding: Sharding,
    places: Places,
    store_of: Callable[[Task, str], TokenStore],
    answers: bool,
) -> Subject:
    """What is planned for. store_of: the encoded rows of a split, as the run opens them.

    ConfigError when the base is out of reach and no published shape that is known here.
    """
    values, notes = reachable(values, places)
    cfg = tasks.parse(values)
    task = tasks.load(cfg, places)
    try:
        if len(notes) > 1:
            raise DataError(notes.pop())
        opened = {
            split: StoredRows(store_of(task, split), task, split) for split in ("train", "valid")
        }
        rows: dict[str, Rows] = {**opened}
    except (DataError, ConfigError) as error:
        specimens = Specimens(task)
        rows = {"train": specimens, "valid": specimens}
        notes = [
            *notes,
            f"{str(error).splitlines()[0].rstrip('.')}: every row is taken to fill its limits",
        ]
    return Subject(
        values, cfg, ds, sharding, task, places, rows["train"], rows["valid"], answers, notes
    )


def reachable(values: dict[str, Any], places: Places) -> tuple[dict[str, Any], list[str]]:
    """The experiment with a base that can be seen from here, and a note on each thing put in
    another's place.
    """
    cfg = tasks.parse(values)
    shape = published_shape(cfg.base) if isinstance(cfg.base, str) else None
    if shape is None:
        return values, []
    try:
        if not _hub_may_answer() and not Path(str(cfg.base)).is_dir():
            raise ConfigError("no connection")  # transformers would try for half a minute
        base_model.config_of(cfg.base, places)
        return values, []
    except ConfigError:
        notes = [f"the Hub is out of reach: {cfg.base} is planned for by its published shape"]
    if cfg.tokenizer is not None:
        return changed(values, "base", {"config": shape}), notes
    values = changed(
        changed(values, "base", {"config": shape | _STAND_IN}), "tokenizer", {"vocab_size": 2048}
    )
    return values, [*notes, "the tokenizer of the base is out of reach"]


def _hub_may_answer() -> bool:
    """Whether it is worth asking: a proxy may, or the host can be reached."""
    from huggingface_hub.constants import ENDPOINT

    if urllib.request.getproxies():
        return True
    parts = urlsplit(ENDPOINT)
    try:
        socket.create_connection(
            (parts.hostname or "", parts.port or 443), timeout=_HUB_TIMEOUT_S
        ).close()
    except OSError:
        return False
    return True
