"""A folder in BEIR's layout: corpus.jsonl, queries.jsonl and qrels/<split>.tsv."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data.formats.held_out import is_held_out
from trainer.data.left_out import note
from trainer.data.readers import fields
from trainer.data.readers.folders import required_folder, split_names
from trainer.data.readers.jsonl import numbered_jsonl
from trainer.data.readers.questions import queries
from trainer.data.readers.rankings import Qrels, read_qrels
from trainer.data.usual.placed import Placed, texts_by_id
from trainer.data.usual.questions import NEGATIVES, WITHOUT_POSITIVE
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.config.own_rows import Splits

_VALID_OF_1000 = 100  # queries held out of a set that has no validation split


def beir(folder: Path | None, split: str, *, files: Splits, negatives: str | None) -> Placed:
    """{"query_id", "query", "positive_docids", "negative_docids"} of the queries of
    qrels/<split>.tsv, in the order of that file.

    files: names of the files of judgements. negatives: a file of more ids (negative_ids). Where
    there is no validation file, a tenth of the training queries is held out for validation. The
    first relevant document decides, so that queries about one document stay in one split.
    """
    folder = required_folder(folder, "corpus.jsonl, queries.jsonl and qrels/<split>.tsv")
    judged, texts = _relevant(files, split, folder), _queries(folder)
    ids = negative_ids(folder / negatives) if negatives else {}
    for query, documents in judged.items():
        if query not in texts:
            raise DataError(
                f"{folder / 'qrels'}: query {query!r} of {split} is in no queries*.jsonl. Add it."
            )
        others = [one for one in ids.get(query, []) if one not in documents]
        row = {"query_id": query, "query": texts[query], "positive_docids": documents}
        yield f"{folder}, query {query!r}", {**row, "negative_docids": others}


def negative_ids(path: Path) -> dict[str, list[str]]:
    """Ids of passages by query: JSON lines of query_id and negative_docids. A query may have
    several lines.
    """
    negatives: dict[str, dict[str, None]] = {}
    for line, raw in numbered_jsonl(path):
        place = f"{path}, line {line}"
        id_name, number = fields.first_given(raw, fields.QUESTION_IDS)
        name, values = fields.first_given(raw, NEGATIVES)
        query = fields.identity(number, place, id_name)
        of_line = fields.passages(values or [], place, name)
        negatives.setdefault(query, {}).update(dict.fromkeys(one["id"] for one in of_line))
    return {query: [*ids] for query, ids in negatives.items()}


def _relevant(files: Splits, split: str, folder: Path) -> dict[str, list[str]]:
    """The ids of each query's relevant documents, for the queries of a split."""
    file = getattr(files, split)
    names = [Path(file).stem] if file else split_names(split)
    paths = [folder / "qrels" / f"{name}.tsv" for name in names]
    has_valid = files.valid or any(
        (folder / "qrels" / f"{name}.tsv").is_file() for name in split_names("valid")
    )
    if has_valid or split == "test":
        return _relevant_of(next((path for path in paths if path.is_file()), paths[0]))
    judged: dict[str, list[str]] = {}
    for query, documents in _relevant_of(folder / "qrels" / "train.tsv").items():
        is_valid = is_held_out(min(documents), per_mille=_VALID_OF_1000)
        if is_valid == (split == "valid"):
            judged[query] = documents
    return judged


def _relevant_of(path: Path) -> dict[str, list[str]]:
    qrels: Qrels = read_qrels(path)
    judged = {
        query: [document for document, score in scores.items() if score > 0]
        for query, scores in qrels.items()
    }
    for query in judged:
        if not judged[query]:
            note(f"{path}, query {query!r}", WITHOUT_POSITIVE, field="score")
    return {query: documents for query, documents in judged.items() if documents}


def _queries(folder: Path) -> dict[str, str]:
    """The text of each query by its id, from queries.jsonl or from all queries.<split>.jsonl."""
    files = (
        [folder / "queries.jsonl"]
        if (folder / "queries.jsonl").is_file()
        else sorted(folder.glob("queries.*.jsonl"))
    )
    if not files:
        raise DataError(
            f"{folder} holds no queries.jsonl. Put one JSON object of _id and text on every line."
        )
    pairs = ((query.id, query.text) for path in files for query in queries(path))
    return texts_by_id(pairs, folder, what="queries")
