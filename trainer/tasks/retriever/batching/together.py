"""Which rows of a retriever share a step, as data.batches says it: fields that are encoded for it,
and the arrangement of the training rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.config.userfile import kind
from trainer.data.arranged.arrangement import Arrangement
from trainer.data.arranged.shared import Shared
from trainer.errors import DataError
from trainer.tasks.retriever.batching import topics
from trainer.tasks.retriever.batching.config import TOPIC

if TYPE_CHECKING:
    from trainer.data.token_store import TokenStore
    from trainer.protocol.task import Row
    from trainer.tasks.retriever.batching.config import Batching

# The field of an encoded row that has two 32-bit numbers for each positive with an id; `topic`, of
# the same name as in rows, has two.
IDS_OF_POSITIVES = "ids_of_positives"
_ODD = np.int64(0x9E3779B97F4A7C15 - (1 << 64))  # Knuth's golden ratio: an odd number of 64 bits


def settings(batches: Batching | None) -> dict[str, Any]:
    """What data.batches adds to the encoding of a row; {}: nothing."""
    found: dict[str, Any] = {}
    if batches is not None and batches.distinct:
        found[IDS_OF_POSITIVES] = True
    if batches is not None and batches.reads_topics:
        found[TOPIC] = True
    return found


def with_topics(rows: Iterable[Row]) -> Iterator[Row]:
    """The same rows. DataError for one without a topic, or with one that is no text or number."""
    for row in rows:
        topic = row.get(TOPIC)
        if topic is not None and not isinstance(topic, (str, int, float)):
            raise DataError(
                f'query {row["id"]!r}: got {kind(topic)} as "{TOPIC}", want a text or a number: '
                "a row has one topic.",
                field=TOPIC,
            )
        if topic is None or not str(topic).strip():
            raise DataError(
                f'query {row["id"]!r} has no "{TOPIC}", by which data.batches.topics puts rows '
                'together. Give every row one, map its column in data.columns ({"topic": "..."}), '
                'or use by="words".',
                field=TOPIC,
            )
        yield row


def fields(row: Row, batches: Batching | None) -> dict[str, list[int]]:
    """The fields of a row that data.batches needs."""
    found: dict[str, list[int]] = {}
    if batches is not None and batches.distinct:
        ids = [one.get("id") for one in row["positives"] if isinstance(one, Mapping)]
        found[IDS_OF_POSITIVES] = [
            word for number in ids if number is not None for word in _words(str(number))
        ]
    if batches is not None and batches.reads_topics:
        found[TOPIC] = _words(str(row.get(TOPIC)))
    return found


def arrangement_of(
    task: Any, batches: Batching, store: TokenStore, sources: tuple[int, ...]
) -> Arrangement | None:
    """The arrangement of the training rows; None where any rows may share a step."""
    if not batches.distinct and batches.topics is None:
        return None
    shared = _shared(store, sources) if batches.distinct else None
    topics_N, digest = None, None
    if batches.reads_topics:
        words, _ = store.texts(TOPIC)
        _, topics_N = np.unique(_numbers(words), return_inverse=True)
    elif batches.topics is not None:
        topics_N = topics.clusters(task, batches.topics, store)
        digest = hashlib.sha256(topics_N.astype("<i8").tobytes()).hexdigest()
    ends = tuple(np.cumsum(sources).tolist())
    is_by_step = batches.source == "one"
    return Arrangement(len(store), topics_N, shared, ends, is_by_step, digest)


def _shared(store: TokenStore, sources: tuple[int, ...]) -> Shared:
    """What rows share: a query, or a positive by its tokens or by its id. An id is of one source
    alone, for two sources may number other passages alike.
    """
    num_positives = store.numbers("num_positives")
    identities, starts = store.texts("identities")
    starts = starts // 2  # two words each
    row = np.repeat(np.arange(len(store)), np.diff(starts))
    is_positive = np.arange(len(row)) - starts[row] < num_positives[row]
    ids, starts = store.texts(IDS_OF_POSITIVES)
    row_of_id = np.repeat(np.arange(len(store)), np.diff(starts // 2))
    source = np.searchsorted(np.cumsum(sources), row_of_id, side="right")
    rows = [row[is_positive], row_of_id, np.arange(len(store))]
    with np.errstate(over="ignore"):
        of_ids = _numbers(ids) + source.astype(np.int64) * _ODD
    queries = store.row_hashes(["query"]).view(np.int64)
    things = [_numbers(identities)[is_positive], of_ids, queries]
    return Shared(np.concatenate(rows), np.concatenate(things), num_rows=len(store))


def _numbers(words: np.ndarray) -> np.ndarray:
    """(2 * K,) 32-bit numbers -> (K,) int64."""
    return np.ascontiguousarray(words, dtype="<i4").view("<i8")


def _words(text: str) -> list[int]:
    """Two 32-bit numbers; equal texts have equal ones."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return np.frombuffer(digest, dtype="<i4").tolist()
