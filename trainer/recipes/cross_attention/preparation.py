"""What `python -m trainer prepare` does for cross-attention: a group's rows in a folder, and their
contexts' states.

<out>/prepared.json    what the rows were made of, and a digest of each split
<out>/<split>.jsonl    the rows, as data.source='jsonl' reads them
<out>/states/<name>/   see trainer/tasks/cross_attention/encoder_states/layout.py
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer import tasks
from trainer.config.own_rows import Splits
from trainer.data import left_out
from trainer.data.padding import unflat
from trainer.data.readers.folders import QUERIES, first_split_file, nq_folder, split_names
from trainer.data.readers.jsonl import read_jsonl
from trainer.data.readers.row_files import SUFFIXES
from trainer.data.token_store import TokenStore, store_of
from trainer.errors import ConfigError, DataError
from trainer.files.atomic import refusals, write_json
from trainer.models import base_model, base_source
from trainer.protocol.task import Places, Row
from trainer.recipes.cross_attention import sets as reading_sources
from trainer.runtime import distributed
from trainer.tasks.cross_attention.encoder_states import layout, writing
from trainer.tasks.cross_attention.text import contexts, questions
from trainer.telemetry.console import WorkProgress

if TYPE_CHECKING:
    from trainer.tasks.cross_attention.config import Config
    from trainer.tasks.cross_attention.task import Task

logger = logging.getLogger(__name__)

SPLITS = ("train", "valid", "test")
Rows = Callable[[], Iterable[Row]]


@dataclass(frozen=True)
class Preparation:
    """What is prepared, and how."""

    out: Path
    # sets of trainer/recipes/cross_attention/sets.py by name, and where they are
    sources: Mapping[str, str]
    hotpotqa_shuffles: int = reading_sources.HOTPOTQA_SHUFFLES
    batch_tokens: int = 16_384  # padded tokens per device and forward
    shard_tokens: int | None = None
    strict: bool = False  # refuse rows that are left out, or doubted


@dataclass(frozen=True)
class Prepared:
    """What the folder holds now."""

    folder: Path  # of the states
    rows: dict[str, int]
    met: int  # contexts of all rows
    plan: layout.StatesPlan

    @property
    def bytes_on_disk(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())


def write_rows(cfg: Config, places: Places, request: Preparation) -> None:
    """Write the rows of every split. On one rank only; ConfigError when other rows stand there."""
    out, splits = request.out, _splits(cfg, places, request)
    with refusals(out):
        out.mkdir(parents=True, exist_ok=True)
        is_ours = (out / questions.PREPARED).is_file()
        if not is_ours and any(not path.name.startswith(".") for path in out.iterdir()):
            raise ConfigError(
                f"--out {out}: holds other files. Name a new folder, or one that prepare began."
            )
        # a marker without rows: from here on the folder is ours, also after a kill
        if not is_ours:
            write_json(
                out / questions.PREPARED, {"source": cfg.data.source, "rows": {}, "sha256": {}}
            )
        before: dict[str, Any] = questions.prepared(out)
        counts: dict[str, int] = {}
        digests: dict[str, str] = {}
        for split, rows in splits.items():
            temporary = out / f".{split}.jsonl.{os.getpid()}.tmp"
            read = left_out.refusing(rows(), split, strict=request.strict)
            try:
                counts[split], digests[split] = _write_lines(temporary, read)
            except DataError:
                temporary.unlink()
                raise
            if (
                before["sha256"].get(split, digests[split]) != digests[split]
                or before["source"] != cfg.data.source
            ):
                temporary.unlink()
                raise ConfigError(
                    f"--out {out}: was begun with other {split} rows. Name a new folder."
                )
            os.replace(temporary, out / f"{split}.jsonl")
        write_json(
            out / questions.PREPARED, {"source": cfg.data.source, "rows": counts, "sha256": digests}
        )


def write_states(cfg: Config, places: Places, request: Preparation) -> Prepared:
    """Write the states of the contexts of the rows; shards that are there already, whole, are kept.
    A collective.

    ConfigError when the folder holds others, StorageError when the disk has no room for them.
    """
    online = cfg.model_copy(update={"data": cfg.data.model_copy(update={"encode": "online"})})
    task: Any = tasks.load(online, places)
    # a tokenizer may lie below the old one
    task.places = replace(places, data_path=request.out)
    counts: dict[str, int] = questions.prepared(request.out)["rows"]
    how: dict[str, Any] = {"num_proc": places.num_proc}
    with left_out.settling(None, strict=request.strict):
        stores = [store_of(task, split, places.cache_dir, **how) for split in counts]
    distinct = writing.distinct(_met(stores), lambda place: _chunk(stores, place))
    identity = contexts.identity(cfg, places, task.tokenizer)
    width = base_source.config_of(cfg.base, places).hidden_size
    states_plan = layout.plan_for(
        identity,
        distinct.keys,
        distinct.lengths,
        dtype=cfg.data.state_dtype,
        width=width,
        shard_tokens=request.shard_tokens,
    )
    folder = request.out / contexts.STATES / layout.folder_name(identity)
    with layout.shards_in(folder).as_begun():
        plan = writing.begun(folder, states_plan)
        _write_states(task, folder, distinct, plan, request)
    return Prepared(folder, counts, distinct.met, plan)


# States
# --------------------------------------------------------------------------------------------------


def _write_states(
    task: Task,
    folder: Path,
    distinct: writing.Contexts,
    plan: layout.StatesPlan,
    request: Preparation,
) -> None:
    lacking = writing.missing(folder, distinct, plan)
    logger.info(
        "%d distinct contexts of %d, %d tokens of %d numbers in %s; %d contexts are still to be "
        "encoded: %s of %s free",
        *(
            plan.count,
            distinct.met,
            plan.tokens,
            plan.width,
            plan.dtype,
            lacking.contexts,
            writing.gib(lacking.bytes),
        ),
        writing.gib(shutil.disk_usage(folder).free),
    )
    distributed.barrier()  # no rank writes before all have looked
    if not lacking.shards:
        # at most its last file is missing
        writing.write(folder, distinct, lambda _: [], plan=plan, batch_tokens=1)
        return
    writing.refuse_small_disk(folder, lacking)
    dtype = base_model.DTYPES[task.cfg.train.precision]
    model = task.model().to(distributed.device(), dtype).eval()
    progress = (
        WorkProgress(-(-lacking.contexts // distributed.world()), "context")
        if distributed.is_main()
        else None
    )
    writing.write(
        folder,
        distinct,
        lambda chunks: contexts.encoded_states(model, chunks, task.prompts.pad),
        plan=plan,
        batch_tokens=request.batch_tokens,
        tell=progress.add if progress else lambda _: None,
    )
    if progress:
        progress.close()


def _met(stores: list[TokenStore]) -> Iterator[tuple[writing.Place, np.ndarray]]:
    """Every context chunk of every row, with its place: store, row, field, chunk."""
    for number, store in enumerate(stores):
        for index in range(len(store)):
            row = store[index]
            for field, name in enumerate(contexts.FIELDS):
                for chunk, ids in enumerate(unflat(row, name) if name in row else ()):
                    yield (number, index, field, chunk), np.asarray(ids)


def _chunk(stores: list[TokenStore], place: writing.Place) -> np.ndarray:
    store, row, field, chunk = place
    return np.asarray(unflat(stores[store][row], contexts.FIELDS[field])[chunk])


# Rows
# --------------------------------------------------------------------------------------------------


def _splits(cfg: Config, places: Places, request: Preparation) -> dict[str, Rows]:
    """A reader of the raw rows of each split that there is."""
    source, data_path = cfg.data.source, places.data_path
    if request.sources and source not in questions.OWN:
        raise ConfigError(
            f"--source: the group reads data.source={source!r}. Set data.source='jsonl' to "
            "prepare sets."
        )
    own = cfg.data
    is_described = source == "files" or own.dataset or own.files != Splits() or own.valid_share
    has_rows = is_described or (
        data_path is not None
        and any(first_split_file(data_path, split, ".jsonl") for split in SPLITS)
    )
    # a user's own rows are read, rather than sets as their publishers give them
    if source in questions.OWN and (request.sources or not has_rows):
        sets = reading_sources.sources_in(data_path, request.sources)
        shuffles = request.hotpotqa_shuffles
        readers: dict[str, Rows] = {
            split: lambda split=split: reading_sources.rows(sets, split, hotpotqa_shuffles=shuffles)
            for split in SPLITS
        }
        has_test = reading_sources.has_test(sets)
    else:
        readers = {
            split: lambda split=split: questions.of_split(
                source,
                split,
                data_path,
                facts=own.facts,
                own=own,
                cache_dir=places.cache_dir,
            )
            for split in SPLITS
        }
        has_test = _has_test(cfg, data_path)
    return readers if has_test else {split: readers[split] for split in SPLITS[:2]}


def _has_test(cfg: Config, data_path: Path | None) -> bool:
    source = cfg.data.source
    if source in questions.OWN:
        if cfg.data.dataset:
            return cfg.data.splits.test is not None
        is_named = cfg.data.files.test is not None
        return is_named or any(first_split_file(data_path, "test", kind) for kind in SUFFIXES)
    if source == "nq":
        queries = read_jsonl(nq_folder(data_path) / QUERIES)
        return any(row.get("split") in split_names("test") for row in queries)
    return False


def _write_lines(path: Path, rows: Iterable[Row]) -> tuple[int, str]:
    digest, count = hashlib.sha256(), 0
    with path.open("wb") as file:
        for row in rows:
            line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
            file.write(line)
            digest.update(line)
            count += 1
        file.flush()
        os.fsync(file.fileno())
    return count, digest.hexdigest()
