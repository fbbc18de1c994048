"""The files of MS MARCO's passage ranking: collection.tsv, queries.*.tsv, qrels.*.tsv and triples.

None of them has a header, and quotes in them are plain characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data.left_out import note
from trainer.data.readers.folders import required_folder, split_names
from trainer.data.readers.jsonl import tabbed
from trainer.data.readers.rankings import read_qrels
from trainer.data.usual.beir import negative_ids
from trainer.data.usual.placed import Placed, texts_by_id
from trainer.data.usual.questions import WITHOUT_POSITIVE
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row

COLLECTION = "collection.tsv"
_WANTED = f"{COLLECTION}, queries.<split>.tsv, and triples or qrels.<split>.tsv"


def msmarco(
    folder: Path | None,
    split: str,
    *,
    file: str | None,
    corpus: str | None,
    negatives: str | None,
) -> tuple[Path, Placed]:
    """The file that a split is read from, and its rows, {"query_id"?, "query", "positive_passages",
    "negative_passages"}.

    file: the name of that file, triples or qrels; None: the only one that is named after the split,
    triples where there are some. corpus: of the passages; None: collection.tsv. negatives: a file
    of more ids, for qrels (beir.negative_ids). The passages are held in memory where rows name them
    by id.
    """
    folder = required_folder(folder, _WANTED)
    path = folder / file if file else _file_of(folder, split)
    if "triples" in path.name:
        return path, _triples(path, folder, corpus)
    ids = negative_ids(folder / negatives) if negatives else {}
    return path, _judgements(path, folder, corpus, ids)


def _file_of(folder: Path, split: str) -> Path:
    names = split_names(split)
    files = [path for path in sorted(folder.glob("*.tsv*")) if path.is_file()]
    of_split = [path for path in files if set(names) & set(path.name.split("."))]
    for kind in ("triples", "qrels"):
        paths = [path for path in of_split if kind in path.name]
        if len(paths) > 1:
            raise DataError(
                f"{folder} holds {' and '.join(path.name for path in paths)}. Say in data.files."
                f"{split} which one is the {split} split."
            )
        if paths:
            return paths[0]
    raise DataError(
        f"{folder} holds no {split} split of MS MARCO: neither triples.{names[-1]}.*.tsv nor "
        f"qrels.{names[-1]}.tsv (or {', '.join(names[:-1]) or 'another name'}). Put it there, or "
        f"name it in data.files.{split}."
    )


def _triples(path: Path, folder: Path, corpus: str | None) -> Placed:
    """A row a line: query, a passage that answers it, and one that does not, as texts or as ids."""
    texts: dict[str, str] | None = None
    queries: dict[str, str] = {}
    for line, (query, positive, negative) in tabbed(path, 3, "query, positive and negative"):
        place = f"{path}, line {line}"
        if not all(one.isdecimal() for one in (query, positive, negative)):
            row: Row = {"query": query}
            sides = [{"text": positive}], [{"text": negative}]
        else:
            if texts is None:
                texts, queries = _collection(folder, corpus), _queries(folder)
            row = {"query_id": query, "query": _text_of(queries, query, "query", place)}
            sides = (
                [_passage(texts, positive, place)],
                [_passage(texts, negative, place)],
            )
        yield place, {**row, "positive_passages": sides[0], "negative_passages": sides[1]}


def _judgements(
    path: Path, folder: Path, corpus: str | None, negatives: Mapping[str, Sequence[str]]
) -> Placed:
    """A row for each query of the judgements, in their order. Queries without a relevant passage
    are left out.
    """
    qrels, queries = read_qrels(path), _queries(folder)
    texts = _collection(folder, corpus)
    for query, judged in qrels.items():
        place = f"{path}, query {query!r}"
        relevant = [passage for passage, score in judged.items() if score > 0]
        if not relevant:
            note(place, WITHOUT_POSITIVE, field="score")
            continue
        others = [one for one in negatives.get(query, ()) if one not in relevant]
        yield (
            place,
            {
                "query_id": query,
                "query": _text_of(queries, query, "query", place),
                "positive_passages": [_passage(texts, one, place) for one in relevant],
                "negative_passages": [_passage(texts, one, place) for one in others],
            },
        )


def _passage(texts: Mapping[str, str], number: str, place: str) -> Row:
    return {"docid": number, "text": _text_of(texts, number, "passage", place)}


def _text_of(texts: Mapping[str, str], number: str, what: str, place: str) -> str:
    if number not in texts:
        where = "queries*.tsv" if what == "query" else COLLECTION
        raise DataError(f"{place}: {what} {number!r} is in no {where}. Add it.", place=place)
    return texts[number]


def _collection(folder: Path, corpus: str | None) -> dict[str, str]:
    name = corpus or COLLECTION
    path = folder / name
    packed = path.with_name(f"{path.name}.gz")
    path = path if path.is_file() or not packed.is_file() else packed
    pairs = ((number, text) for _, (number, text) in tabbed(path, 2, "id and passage"))
    return texts_by_id(pairs, path, what="passages")


def _queries(folder: Path) -> dict[str, str]:
    """The text of every query of queries*.tsv, by its id."""
    files = sorted(folder.glob("queries*.tsv")) + sorted(folder.glob("queries*.tsv.gz"))
    if not files:
        raise DataError(f"{folder} holds no queries.<split>.tsv. Put an id and a query a line.")
    pairs = (
        (number, text) for path in files for _, (number, text) in tabbed(path, 2, "id and query")
    )
    return texts_by_id(pairs, folder, what="queries")
