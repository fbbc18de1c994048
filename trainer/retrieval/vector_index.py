"""A FAISS index that is built once, lies beside the vectors, and grows with new passages.

index-<n>.faiss  the index of n vectors, as faiss.read_index reads it
index.json       what it is an index of, its checksum, and what it finds of an exact search's hits;
                 written after the index, so that a killed search leaves the one before
.NAME.lock       beside the folder: held by the one search that builds, grows or measures it

An index finds more of the best passages the more of it a question visits: efSearch of HNSW, nprobe
of IVF. This number is chosen by measurement: the least of a doubling series whose recall, less its
standard error, is at least TARGET on a sample of the questions that are searched for.
"""

# Q questions, D width, K depth

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout

from trainer.errors import ConfigError, DataError
from trainer.files.atomic import aside, read_json, refusals, sha256_of, write_json
from trainer.files.packages import extra
from trainer.files.safetensors_file import WrittenFile, checksum_problem
from trainer.retrieval.embeddings import Embeddings
from trainer.retrieval.exact_search import Hits, check
from trainer.retrieval.index_recall import IndexRecall, Knob, Searcher, Setting, measure
from trainer.retrieval.stored_forms import floats

logger = logging.getLogger(__name__)

ADD_ROWS = 65_536  # vectors that are fp32 in memory at a time
POINTS_OF_A_LIST = 256  # FAISS's k-means takes at most so many vectors for each centre
LARGEST_EF = 2**14  # of efSearch in the series
_RECORD = "index.json"
_NO_GRAPH = re.compile(r"(HNSW|NSG)0*[01](?!\d)")  # FAISS 1.15 does not survive it


@dataclass(frozen=True)
class IndexPart:
    """A folder of vectors that an index holds."""

    folder: str  # where the vectors lay
    digest: str  # Embeddings.digest
    count: int  # vectors


@dataclass(frozen=True)
class IndexRecord:
    """What index.json says."""

    model: str  # that made the vectors (EmbeddingsPlan.model)
    spec: str  # as FAISS's index_factory spells it
    knob: str | None  # efSearch or nprobe; None for an index that has neither
    parts: list[IndexPart]  # in the order of positions
    file: WrittenFile
    recall: IndexRecall


@dataclass(frozen=True)
class IndexOptions:
    """Which index is wanted."""

    folder: Path
    spec: str
    depth: int
    ef_search: int | None = None  # None: chosen by measurement
    nprobe: int | None = None

    @property
    def wish(self) -> tuple[str, int] | None:
        """The knob that is set by hand, and its value."""
        values = {"efSearch": self.ef_search, "nprobe": self.nprobe}
        return next(((name, value) for name, value in values.items() if value is not None), None)


@dataclass(frozen=True)
class VectorIndex:
    """An index in memory, with the setting that it is searched with."""

    record: IndexRecord
    setting: Setting
    faiss_index: Any

    def search(self, queries: np.ndarray, depth: int) -> Hits:
        """The hits of (Q, D) questions. Equal scores stand in FAISS's own order."""
        return _hits(self.faiss_index, queries, depth)

    def lines(self, folder: Path) -> Iterator[str]:
        """What a person is told: the recall, the time of a question, and warnings."""
        record = self.record
        return record.recall.lines(f"{folder}: {record.spec}", record.knob, self.setting)


def folder_of(vectors: Path, spec: str) -> Path:
    """Where the index of a folder of vectors lies unless another place is named."""
    return vectors / f"index-{re.sub('[^A-Za-z0-9]+', '_', spec)}"


def open_index(
    options: IndexOptions, corpora: Sequence[Embeddings], queries: np.ndarray
) -> VectorIndex:
    """The index of the corpora, one after the other: loaded, grown by the last ones, or built.

    queries: (Q, D), a sample of which measures the recall, when the index is built or grown, when
    the depth of `options` is larger than before, the setting is new, or more questions (up to
    SAMPLE) are there than were then. ConfigError when the folder holds an index of another model,
    of other vectors or of another kind; DataError when its file is torn.
    """
    faiss = _faiss()
    faiss.omp_set_num_threads(torch.get_num_threads())
    check(queries, [vectors for corpus in corpora for vectors in corpus.vectors], options.depth)
    empty = _empty(options.spec, queries.shape[1])
    knob = _knob(empty, sum(corpus.plan.count for corpus in corpora))
    _check_knob(options, knob)
    value = None if options.wish is None else options.wish[1]
    if knob is not None and value is not None:
        value = knob.effective(value, options.depth)

    def is_complete(record: IndexRecord | None) -> bool:
        """Whether the record says all that this search wants to know."""
        if record is None or len(record.parts) < len(corpora):
            return False
        return record.recall.covers(depth=options.depth, value=value, questions=len(queries))

    record = _record_for(options, corpora)
    index = _loaded(options.folder, record) if record is not None and is_complete(record) else None
    if record is None or index is None:
        with _alone(options.folder):
            record = _record_for(options, corpora)  # another search may have written it meanwhile
            index = empty if record is None else _load(options.folder, record)
            if record is None or not is_complete(record):
                work = _Work(options, corpora, queries, knob, value)
                record = work.completed(index, record)
    setting = record.recall.setting(value)
    _set(index, knob, setting.value)
    return VectorIndex(record, setting, index)


@dataclass(frozen=True)
class _Work:
    """What an index is built, grown or measured for."""

    options: IndexOptions
    corpora: Sequence[Embeddings]
    queries: np.ndarray  # (Q, D)
    knob: Knob | None
    value: int | None  # of the knob, set by hand

    def completed(self, index: Any, record: IndexRecord | None) -> IndexRecord:
        """The record of the index of all corpora, to which the missing ones are added here. Both
        are written.

        record: what `index` holds; None: nothing.
        """
        options, corpora = self.options, self.corpora
        missing = corpora[0 if record is None else len(record.parts) :]
        with _refusals_of_faiss(options.spec):
            _grow(options.spec, index, missing)
            recall = measure(
                _searcher(index, self.knob),
                [block for corpus in corpora for block in corpus.vectors],
                self.queries,
                depth=options.depth,
                knob=self.knob,
                wish=self.value,
            )
        parts = [IndexPart(str(one.folder), one.digest, one.plan.count) for one in corpora]
        file = _write(options.folder, index) if missing or record is None else record.file
        name = None if self.knob is None else self.knob.name
        made = IndexRecord(corpora[0].plan.model, options.spec, name, parts, file, recall)
        write_json(options.folder / _RECORD, asdict(made))
        _delete_others(options.folder, file.name)
        return made


def verify(folder: Path) -> None:
    """DataError when the bytes of the index are not those that were written."""
    record = _read(folder)
    problem = None if record is None else checksum_problem(folder, record.file)
    if problem:
        raise _torn(folder, problem)


# FAISS
# --------------------------------------------------------------------------------------------------


def _faiss() -> Any:
    # its loader tells at INFO which instructions it was built for
    logging.getLogger("faiss").setLevel(logging.WARNING)
    return extra("faiss", "faiss")


@contextmanager
def _refusals_of_faiss(spec: str) -> Iterator[None]:
    """ConfigError for what FAISS cannot do with these vectors (too few for a graph, an index that
    takes ids of its own).
    """
    try:
        yield
    except RuntimeError as error:
        raise ConfigError(
            f"--faiss {spec}: FAISS makes no such index of these vectors ({error}). Try Flat or "
            "HNSW32."
        ) from error


def _empty(spec: str, width: int) -> Any:
    faiss = _faiss()
    if _NO_GRAPH.search(spec):
        raise ConfigError(
            f"--faiss {spec}: a graph of less than 2 links for each vector leads nowhere, and "
            "FAISS crashes of it. Want more, as HNSW32 has."
        )
    try:
        return faiss.index_factory(width, spec, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ConfigError(
            f"--faiss {spec}: FAISS knows no such index ({error}). Try Flat or HNSW32."
        ) from error


def _knob(index: Any, count: int) -> Knob | None:
    """efSearch or nprobe of an index of so many vectors."""
    faiss = _faiss()
    space = faiss.ParameterSpace()
    space.initialize(index)
    names = {space.parameter_ranges.at(n).name for n in range(space.parameter_ranges.size())}
    if "nprobe" in names:
        return Knob("nprobe", int(faiss.extract_index_ivf(index).nlist))
    return Knob("efSearch", max(16, min(count, LARGEST_EF))) if "efSearch" in names else None


def _set(index: Any, knob: Knob | None, value: int) -> None:
    if knob is not None:
        _faiss().ParameterSpace().set_index_parameter(index, knob.name, value)


def _check_knob(options: IndexOptions, knob: Knob | None) -> None:
    if options.ef_search is not None and options.nprobe is not None:
        raise ConfigError("--ef_search is for HNSW, --nprobe for IVF: give one of them.")
    if options.wish is None or options.wish[0] == (knob and knob.name):
        return
    flags = {"efSearch": "--ef_search", "nprobe": "--nprobe"}
    fix = "Leave it out." if knob is None else f"Give {flags[knob.name]}."
    raise ConfigError(f"{flags[options.wish[0]]}: --faiss {options.spec} has no such number. {fix}")


def _searcher(index: Any, knob: Knob | None) -> Searcher:
    def search(queries: np.ndarray, depth: int, value: int) -> np.ndarray:
        _set(index, knob, value)
        return _hits(index, queries, depth).rows

    return search


def _hits(index: Any, queries: np.ndarray, depth: int) -> Hits:
    scores, rows = index.search(np.ascontiguousarray(queries, dtype=np.float32), depth)
    return Hits(rows.astype(np.int64), np.where(rows < 0, -np.inf, scores).astype(np.float32))


def _grow(spec: str, index: Any, corpora: Sequence[Embeddings]) -> None:
    """Add vectors; an index that needs training is trained on a sample of the first ones."""
    start = time.perf_counter()
    if not index.is_trained and corpora:
        sample = _training_sample(index, corpora)
        try:
            index.train(sample)
        except RuntimeError as error:
            raise ConfigError(
                f"--faiss {spec}: {len(sample)} vectors are too few to train it ({error}). Take "
                "fewer lists, or HNSW32, or leave --faiss out: exact search of so few is fast."
            ) from error
    for corpus in corpora:
        for shard in corpus.vectors:
            for first in range(0, len(shard), ADD_ROWS):
                index.add(np.ascontiguousarray(floats(shard[first : first + ADD_ROWS])))
        seconds = time.perf_counter() - start
        logger.info("%s: %d vectors in %s, %.1f s", corpus.folder, index.ntotal, spec, seconds)


def _training_sample(index: Any, corpora: Sequence[Embeddings]) -> np.ndarray:
    """(N, D): as many vectors as FAISS's k-means takes, at equal distances."""
    faiss = _faiss()
    try:
        lists = int(faiss.extract_index_ivf(index).nlist)
    except RuntimeError:  # no IVF
        lists = 1
    most = POINTS_OF_A_LIST * max(256, lists)  # 256: the centres of a product quantiser
    step = max(1, sum(corpus.plan.count for corpus in corpora) // most)
    shards = [shard for corpus in corpora for shard in corpus.vectors]
    return np.ascontiguousarray(np.concatenate([floats(shard[::step]) for shard in shards]))


# Files
# --------------------------------------------------------------------------------------------------


def _read(folder: Path) -> IndexRecord | None:
    if not (folder / _RECORD).exists():
        return None
    try:
        values = read_json(folder / _RECORD) or {}
        parts = [IndexPart(**part) for part in values.pop("parts")]
        file, recall = WrittenFile(**values.pop("file")), IndexRecall.of(values.pop("recall"))
        return IndexRecord(**values, parts=parts, file=file, recall=recall)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _torn(folder, f"{_RECORD}: {error!r}") from error


def _record_for(options: IndexOptions, corpora: Sequence[Embeddings]) -> IndexRecord | None:
    """What index.json says; None where there is none. ConfigError when it is of others."""
    record = _read(options.folder)
    if record is not None:
        _refuse_other(options, record, corpora)
    return record


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Inside, no other search builds, grows or measures the index: it waits until this one ends."""
    path = folder.resolve()
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    with refusals(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("%s: another search is at work on this index; waiting for it", folder)
            lock.acquire(timeout=-1)
    try:
        yield
    finally:
        # who waits for it sees that the file has no name any more, and makes another one
        path.with_name(f".{path.name}.lock").unlink(missing_ok=True)
        lock.release()


def _loaded(folder: Path, record: IndexRecord) -> Any:
    """The index that a record tells of; None when another search has put a larger one in its place
    meanwhile.
    """
    try:
        return _load(folder, record)
    except DataError:
        if _read(folder) == record:
            raise
        return None


def _load(folder: Path, record: IndexRecord) -> Any:
    path, count = folder / record.file.name, sum(part.count for part in record.parts)
    try:
        size = path.stat().st_size
        if size != record.file.size:
            raise _torn(folder, f"{path.name} has {size} bytes, want {record.file.size}")
        index = _faiss().read_index(str(path))
    except (OSError, RuntimeError) as error:
        raise _torn(folder, f"{path.name}: {error}") from error
    if index.ntotal != count:
        raise _torn(folder, f"{path.name} holds {index.ntotal} vectors, want {count}")
    return index


def _write(folder: Path, index: Any) -> WrittenFile:
    with refusals(folder):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"index-{index.ntotal}.faiss"
    with aside(path) as temporary:
        try:
            _faiss().write_index(index, str(temporary))
        except RuntimeError as error:  # FAISS's own, for a full disk too
            raise OSError(str(error)) from error
    with refusals(path):
        return WrittenFile(path.name, path.stat().st_size, sha256_of(path))


def _delete_others(folder: Path, name: str) -> None:
    with refusals(folder):
        for path in folder.glob("index-*.faiss"):
            if path.name != name:
                path.unlink(missing_ok=True)


def _torn(folder: Path, reason: str) -> DataError:
    return DataError(
        f"{folder}: the index cannot be read ({reason}). Delete this folder; the next search "
        "builds it anew."
    )


def _refuse_other(
    options: IndexOptions, record: IndexRecord, corpora: Sequence[Embeddings]
) -> None:
    fix = "Name another folder with --index, or delete this one: it is then built anew."
    folders = ", ".join(part.folder for part in record.parts)
    if record.spec != options.spec:
        raise ConfigError(
            f"{options.folder} holds an index {record.spec}, want {options.spec}. {fix}"
        )
    model = corpora[0].plan.model
    if record.model != model:
        raise ConfigError(
            f"{options.folder} is an index of vectors of the model {record.model[:12]} "
            f"({folders}); {corpora[0].folder} is of the model {model[:12]}. {fix}"
        )
    digests = [corpus.digest for corpus in corpora]
    if [part.digest for part in record.parts] != digests[: len(record.parts)]:
        names = ", ".join(str(corpus.folder) for corpus in corpora)
        raise ConfigError(
            f"{options.folder} is an index of other vectors, or of the same in another order: it "
            f"holds {folders}; --passages names {names}. An index grows by the folders that are "
            f"named last. {fix}"
        )
