"""The statistics of an experiment's data, as plain JSON values.

`python -m trainer stats` shows and writes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data.arranged import told
from trainer.data.mixed.mixture import Mix, mixture_of
from trainer.data.mixed.store import MixedStore
from trainer.data.order import Sharding, padding_share, sizes_of, window_rows
from trainer.data.token_store import TokenStore, store_of
from trainer.statistics.counts import Counts, count_rows
from trainer.statistics.examples import examples
from trainer.statistics.ledger import Ledger

if TYPE_CHECKING:
    from trainer.config.schema import Experiment, Train
    from trainer.protocol.task import Task

BINS = 30
PERCENTILES = (50, 90, 95, 99)
_MOST_STEPS = 200  # padding is counted over at most so many steps
_COLLATED = 10  # so many steps are collated, to count the padding in their tensors


def report(
    cfg: Experiment, task: Task, splits: Sequence[str], *, cache_dir: Path
) -> dict[str, Any]:
    """The statistics of each split, and how many rows each two splits share. Encodes the splits
    like a run, into the same cache.

    DataError for a split that does not exist, or rows that the task refuses.
    """
    statistics: dict[str, Any] = {
        "task": cfg.task,
        "unit": task.unit,
        "splits": {},
        "shared_rows": {},
    }
    counts: dict[str, Counts] = {}
    for split in splits:
        store = store_of(task, split, cache_dir)
        counts[split] = count_rows(task, task.rows(split), Ledger(task.decode))
        statistics["splits"][split] = of_split(cfg.train, task, store, counts[split])
        for other in list(counts)[:-1]:
            statistics["shared_rows"][f"{split} in {other}"] = counts[split].shared_with(
                counts[other]
            )
    return statistics


def of_split(train: Train, task: Task, store: TokenStore, counts: Counts) -> dict[str, Any]:
    """The statistics of one split."""
    lost, of = store.lost_labels()
    return {
        "rows": len(store),
        "fields": _fields(store, counts),
        "ledger": counts.ledger.report(),
        "frequencies": counts.frequencies.report(task.decode),
        "truncated_rows": store.summary()["truncated_rows"],
        "lost_labels": {"lost": lost, "of": of} if of else None,
        "padding": _padding(train, task, store),
        **_batches(train, task, store),
        **_sources(train, task, store),
        **counts.report(),
        "examples": examples(task, store, ids=counts.ids),
    }


def _fields(store: TokenStore, counts: Counts) -> dict[str, Any]:
    """Lengths by field, before the cut if the task shows them, else as stored; and of the row."""
    whole, limits = counts.ledger.lengths(), counts.ledger.limits()
    sizes_in_store = {} if whole else {name: store.sizes(name) for name in store.meta["fields"]}
    # fields of at most one id are numbers, not texts
    texts = {name: sizes for name, sizes in sizes_in_store.items() if sizes.max(initial=0) > 1}
    fields = {name: {**_lengths(sizes), "limit": limits.get(name), "is_whole": name in whole}
             for name, sizes in {**whole, **texts}.items()}  # fmt: skip
    return {
        **fields,
        "length": {**_lengths(np.asarray(store.lengths)), "limit": None, "is_whole": False},
    }


def _sources(train: Train, task: Task, store: TokenStore) -> dict[str, Any]:
    """Of a mix: the rows of each source and, of those that train, how many a run takes of each and
    how often it reads it. {} without a mix.
    """
    if not isinstance(store, MixedStore):
        return {}
    rows = dict(zip(store.stores, store.sources, strict=True))
    sources: dict[str, dict[str, Any]] = {name: {"rows": count} for name, count in rows.items()}
    mix = Mix.of(task.cfg.data)
    if store.meta["split"] == "train" and mix is not None:
        mixture = mixture_of(mix, store.sources, train.global_batch, train.seed)
        steps = train.steps or math.ceil(mixture.count(train.epochs or 1))
        steps = mixture.steps_of(steps)
        counts, epochs = mixture.taken(steps), mixture.epochs_after(steps)
        for place, of_source in enumerate(sources.values()):
            share = counts[place] / sum(counts)
            of_source |= {"taken": counts[place], "share": share, "epochs": epochs[place]}
    return {"sources": sources}


def _batches(train: Train, task: Task, store: TokenStore) -> dict[str, Any]:
    """What becomes of the rows of an epoch where data.batches puts rows together; else {}."""
    sizes = sizes_of(store, task)
    if sizes.arrangement is None or len(store) < train.global_batch:
        return {}
    is_whole, mix = train.epochs is not None, Mix.of(task.cfg.data)
    sharding = Sharding(train.global_batch, 1, 1, 0, is_whole=is_whole, mix=mix)
    epochs = sharding.epochs(len(store), train.seed, sizes.sources)
    return {"batches": told.facts(epochs, sizes.arrangement)}


def _lengths(sizes: np.ndarray) -> dict[str, Any]:
    """Count, sum, mean, percentiles and histogram of token lengths."""
    if not len(sizes):
        return {"texts": 0, "tokens": 0}
    percentiles = np.percentile(sizes, PERCENTILES, method="higher")
    most = int(sizes.max())
    # The width of a bin is 1, 2 or 5 times a power of ten, so that the histograms of several
    # splits can be drawn over each other.
    widths = (step * 10**power for power in range(10) for step in (1, 2, 5))
    width = next(width for width in widths if most + 1 <= BINS * width)
    edges = np.arange(0, most + width + 1, width)
    counts, _ = np.histogram(sizes, bins=edges)
    return {
        "texts": len(sizes),
        "tokens": int(sizes.sum()),
        "mean": float(sizes.mean()),
        "min": int(sizes.min()),
        **{f"p{p}": int(value) for p, value in zip(PERCENTILES, percentiles, strict=True)},
        "max": most,
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }


def _padding(train: Train, task: Task, store: TokenStore) -> dict[str, Any]:
    """The share of padding in the micro-batches of one device.

    `by_length` computes it from row lengths, as if each micro-batch were one rectangle as wide as
    its longest row. `collated` counts the padding in a few collated micro-batches; it is None for a
    task that packs. If the memory plan chooses micro_batch ("auto", here 0), it counts as the
    global batch.
    """
    micro_batch = train.micro_batch or train.global_batch
    if len(store) < train.global_batch:
        return {"by_length": None, "collated": None, "steps": 0, "micro_batch": micro_batch}
    is_training = store.meta["split"] == "train"
    mix = Mix.of(getattr(task.cfg, "data", None)) if is_training else None
    sharding = Sharding(
        train.global_batch, micro_batch, 1, 0, train.micro_tokens, train.bucket_steps, mix=mix
    )
    steps = min(_MOST_STEPS, max(1, len(store) // train.global_batch))
    seed = train.seed if train.order == "shuffled" else None
    without, sizes = replace(sharding, micro_tokens=None, bucket_steps=1), sizes_of(store, task)
    real = cells = 0
    for step in np.unique(np.linspace(0, steps - 1, _COLLATED).astype(int)):
        for rows in window_rows(
            int(step), lengths=sizes_of(store, task), sharding=sharding, seed=seed
        ):
            texts = task.describe(task.collate([store[int(row)] for row in rows])).values()
            for is_real in [text.is_real for text in texts if text.is_real is not None]:
                real, cells = real + int(is_real.sum()), cells + is_real.numel()
    return {
        "by_length": padding_share(sizes, sharding, seed=seed, steps=steps),
        "without_budget_and_buckets": padding_share(sizes, without, seed=seed, steps=steps),
        "collated": 1 - real / cells if cells else None,
        "steps": steps,
        "micro_batch": micro_batch,
    }
