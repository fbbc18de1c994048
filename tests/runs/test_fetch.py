"""`python -m trainer fetch` from a server on loopback: what it writes is what the groups read, and
what is wrong is told and leaves nothing behind.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import shutil
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from trainer.__main__ import app
from trainer.recipes.public_sets import layouts
from trainer.recipes.public_sets.catalogue import SETS

DATA = Path(__file__).resolve().parents[2] / os.environ.get("LATHE_DATA", "../shared/data")
SCIFACT = DATA / "retrieval" / "scifact"

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no {DATA}; set LATHE_DATA")


def fetch(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["fetch", *map(str, arguments)])


class Quiet(SimpleHTTPRequestHandler):
    """Files of a folder, without a word on the console."""

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address of a server that serves it."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(Quiet, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@needs_data
def test_natural_questions_become_the_corpus_and_questions_that_our_groups_read(
    served: tuple[Path, str], tmp_path: Path
) -> None:
    folder, address = served
    (folder / "nq").mkdir()
    shutil.copy(DATA / "nq" / "nq-open-oracle.jsonl.gz", folder / "nq")
    out = tmp_path / "nq"
    done = fetch("nq", "--out", out, "--mirror", address)
    assert done.exit_code == 0, done.output
    assert "Licence: repository MIT; text CC BY-SA 3.0" in done.output
    assert (out / "corpus.tsv").read_bytes() == (DATA / "nq" / "corpus.tsv").read_bytes()
    pairs = list(
        zip(lines(out / "queries.jsonl"), lines(DATA / "nq" / "queries.jsonl"), strict=True)
    )
    hits = [(ours.pop("bm25"), theirs.pop("bm25")) for ours, theirs in pairs]
    assert all(ours == theirs for ours, theirs in pairs)
    # the others differ where scores are equal: theirs are in no order
    assert sum(set(ours) == set(theirs) for ours, theirs in hits) >= 0.98 * len(hits)
    assert "6a7f72b846f663a1" in (out / "SOURCE.md").read_text()


@pytest.mark.long
@needs_data
def test_scifact_becomes_what_the_retriever_reads(tmp_path: Path) -> None:
    with gzip.open(SCIFACT / "corpus.jsonl.gz", "rt", encoding="utf-8") as file:
        corpus = [json.loads(line) for line in file]
    queries = [
        row for split in ("train", "test") for row in lines(SCIFACT / f"queries.{split}.jsonl")
    ]
    as_beir = {
        "corpus": [
            {"_id": row["docid"], "title": row["title"], "text": row["text"]} for row in corpus
        ],
        "queries": [{"_id": row["query_id"], "text": row["query"]} for row in queries],
    }
    with zipfile.ZipFile(tmp_path / "scifact.zip", "w") as packed:
        for name, rows in as_beir.items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            packed.writestr(f"scifact/{name}.jsonl", text)
        for split in ("train", "test"):
            packed.write(SCIFACT / "qrels" / f"{split}.tsv", f"scifact/qrels/{split}.tsv")
    layouts.lay_out("scifact", tmp_path)
    for name in (
        "queries.train.jsonl",
        "queries.test.jsonl",
        "qrels/test.tsv",
        "test_no_overlap.txt",
    ):
        assert (tmp_path / name).read_bytes() == (SCIFACT / name).read_bytes(), name
    with gzip.open(tmp_path / "corpus.jsonl.gz", "rt", encoding="utf-8") as file:
        assert [json.loads(line) for line in file] == corpus
    rows = lines(tmp_path / "train_tevatron_ids.jsonl")
    wanted = lines(SCIFACT / "train_tevatron_ids.jsonl")
    negatives = [row.pop("negative_docids") for row in rows]
    assert all(0 < len(ids) <= 30 for ids in negatives)
    for row, ids, other in zip(rows, negatives, wanted, strict=True):
        other.pop("negative_docids")
        assert row == other
        assert not set(ids) & set(row["positive_docids"])


@needs_data
def test_files_that_are_published_packed_are_kept_unpacked(
    served: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = served
    for file in SETS["csqa2"].files:
        packed = folder / Path(file.url).name
        packed.write_bytes(gzip.compress((DATA / "statements" / "csqa2" / file.name).read_bytes()))
    published = "https://raw.githubusercontent.com/allenai/csqa2"
    commit = SETS["csqa2"].files[0].url.removeprefix(published).split("/")[1]
    assert all(
        file.url.startswith(f"{published}/{commit}/dataset/") for file in SETS["csqa2"].files
    )
    moved = tuple(
        type(file)(file.name, f"{address}/{Path(file.url).name}", file.sha256)
        for file in SETS["csqa2"].files
    )
    monkeypatch.setitem(SETS, "csqa2", type(SETS["csqa2"])("about", "licence", moved))
    done = fetch("csqa2", "--out", tmp_path / "csqa2")
    assert done.exit_code == 0, done.output
    for file in moved:
        got = (tmp_path / "csqa2" / file.name).read_bytes()
        assert got == (DATA / "statements" / "csqa2" / file.name).read_bytes()


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "missing"])
def test_what_is_not_what_was_published_is_told_and_nothing_is_left(
    served: tuple[Path, str], tmp_path: Path, *, is_cut: bool
) -> None:
    folder, address = served
    if is_cut:
        (folder / "wsc273").mkdir()
        (folder / "wsc273" / "WSCollection.xml").write_text("<collection>")
    done = fetch("wsc273", "--out", tmp_path / "sets" / "wsc273", "--mirror", address)
    assert done.exit_code == (2 if is_cut else 1)
    said = (
        "got sha256 "
        if is_cut
        else "cannot be fetched: File not found. Try again, or give --mirror"
    )
    assert said in done.output
    assert f"{address}/wsc273/WSCollection.xml" in done.output
    assert list((tmp_path / "sets").iterdir()) == []


def test_every_set_is_listed_and_a_wrong_name_or_folder_is_told(tmp_path: Path) -> None:
    listed = fetch().output
    assert all(f"{name}: " in listed for name in SETS)
    for name, public in SETS.items():
        assert public.licence, name
        assert all(len(file.sha256) == 64 for file in public.files), name
        assert all(file.url.startswith("https://") for file in public.files), name
    for arguments, said in [
        (
            ("scifct", "--out", tmp_path / "new"),
            "set 'scifct' does not exist. Did you mean 'scifact'?",
        ),
        (("scifct",), "set 'scifct' does not exist."),
        (("nq",), "--out is missing: name the folder to write."),
        (("nq", "--out", tmp_path), "exists already, and nothing is overwritten."),
    ]:
        done = fetch(*arguments)
        assert done.exit_code == 2
        assert said in done.output
