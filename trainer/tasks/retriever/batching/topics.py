"""The topics of training rows, as clusters of their queries. They are computed once and kept, so
that every rank and every start of a run has the same.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainer.config.identity import digest
from trainer.config.userfile import placed
from trainer.data import vocabulary
from trainer.data.arranged.clusters import clusters_of, words_of
from trainer.errors import ConfigError
from trainer.files.build_once import build_once
from trainer.files.remembered import cached_sha256
from trainer.models import base_source
from trainer.runtime import distributed

if TYPE_CHECKING:
    from trainer.data.token_store import TokenStore
    from trainer.protocol.task import Places
    from trainer.tasks.retriever.batching.config import Topics

log = logging.getLogger(__name__)

_ROWS_OF_A_CLUSTER = 200  # TAS-B: 2000 clusters of 400 thousand queries
_AT_ONCE = 256  # queries that a model reads together
_SEED = 0  # of clusters; a constant, so that runs of several seeds share them
_FILE = "topics.npy"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".json")


def clusters(task: Any, topics: Topics, store: TokenStore) -> np.ndarray:
    """(rows,) the cluster of each row's query."""
    count = topics.clusters or max(1, len(store) // _ROWS_OF_A_CLUSTER)
    if count > len(store):
        raise ConfigError(
            f"data.batches.topics.clusters={count}: got more clusters than the {len(store)} "
            f"training rows, want fewer. Use about {max(1, len(store) // _ROWS_OF_A_CLUSTER)}."
        )
    folder = None if topics.model is None else _folder(task, topics.model)
    facts = {"rows": store.digest, "by": topics.by, "clusters": count, "seed": _SEED}
    if topics.by == "model":
        facts |= _of_vectors(task, folder)

    def build(temporary: Path) -> None:
        if topics.by == "words":
            tokens, starts = store.texts("query")
            vectors_ND = words_of(np.asarray(tokens, np.int64), starts, seed=_SEED)
        else:
            vectors_ND = _vectors(task, folder, store)
        log.info("data.batches: %d clusters of %d queries", count, len(store))
        np.save(temporary / _FILE, clusters_of(vectors_ND, count, seed=_SEED))

    whole = build_once(
        task.places.cache_dir / "topics" / digest(facts)[:32],
        build,
        is_whole=lambda path: (path / _FILE).is_file(),
    )
    return np.load(whole / _FILE)


def _of_vectors(task: Any, folder: Path | None) -> dict[str, Any]:
    """All that the vectors of `_vectors` depend on, besides the queries."""
    cfg, places = task.cfg, task.places
    started = task.init_from if folder is None else None
    if folder is None:
        source = base_source.resolve(cfg.base, places)
        folder = Path(source) if isinstance(source, str) and Path(source).is_dir() else None
    of_base = base_source.fingerprint(cfg.base, places) if folder is None else ""
    return {
        "model": of_base if folder is None else _digest_of(folder, places),
        "init_from": started and [started, _digest_of(Path(started), places)],
        "encoder": cfg.encoder.model_dump(mode="json", include={"tied", "pooling", "projection"}),
        "seed": cfg.train.seed if cfg.encoder.projection is not None else None,  # of a new one
        "precision": cfg.train.precision,
        "bits": cfg.train.base_bits,
    }


def _digest_of(folder: Path, places: Places) -> str:
    """A digest of the weights of a retriever, which may lie in folders of its two sides."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in _WEIGHTS and path.is_file():
            digest = cached_sha256(path, places.cache_dir / "fingerprints")
            total.update(f"{path.relative_to(folder)}:{digest};".encode())
    return total.hexdigest()


def _folder(task: Any, name: str) -> Path:
    """The folder of a trained retriever, whose tokens must be those of this experiment."""
    below = task.places.data_path
    folder = Path(placed(name)) if below is None else Path(below) / placed(name)
    if not folder.is_dir():
        raise ConfigError(
            f"data.batches.topics.model: there is no folder {folder}. Give that of a trained "
            "retriever, such as results/<id>/best."
        )
    theirs = vocabulary.load_tokenizer(str(folder), data_path=None, cache_dir=task.places.cache_dir)
    if vocabulary.tokenizer_id(theirs) != vocabulary.tokenizer_id(task.tokenizer):
        raise ConfigError(
            f"data.batches.topics.model: {folder} has another tokenizer than this experiment, "
            'whose tokens it would read. Use a retriever with the same one, or by="words".'
        )
    return folder


@torch.no_grad()
def _vectors(task: Any, folder: Path | None, store: TokenStore) -> Tensor:
    """(rows, D) the vectors of all queries by a trained retriever, or by the base."""
    other = type(task)(task.cfg, task.places)  # a task follows the model that it has read
    model = other.model() if folder is None else other.load_export(folder)
    model = model.to(distributed.device()).eval()
    tokens, starts = store.texts("query")
    longest_first = np.argsort(-np.diff(starts), kind="stable")
    vectors: list[Tensor] = []
    for numbers in np.split(longest_first, range(_AT_ONCE, len(store), _AT_ONCE)):
        rows = [tokens[starts[number] : starts[number + 1]].tolist() for number in numbers]
        vectors.append(other.embed(model, rows, side="query").cpu())
    return torch.cat(vectors)[torch.from_numpy(np.argsort(longest_first, kind="stable"))]
