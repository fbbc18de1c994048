"""`search` as a person starts it, on folders of vectors: with an index, with flags that do not meet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import forked
from tests.forked import TRAINER
from tests.vector_folders import write_vectors
from tests.wording import says
from trainer.data.readers.rankings import read_run

WIDTH = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("vectors"), np.random.default_rng(0)
    vectors = random.standard_normal((370, WIDTH)).astype(np.float32)
    write_vectors(folder / "q", vectors[:20], side="query")
    write_vectors(folder / "p", vectors[20:320])
    write_vectors(folder / "new", vectors[320:], first=300)
    return folder


def searched(place: Path, *flags: str, corpora: tuple[str, ...] = ("p",)) -> str:
    """What the command prints, after a check that it ended well."""
    done = forked.run(*TRAINER, *words(place, *flags, corpora=corpora))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def words(place: Path, *flags: str, corpora: tuple[str, ...] = ("p",)) -> list[str]:
    folders = [word for name in corpora for word in ("--passages", str(place / name))]
    out = ["--out", str(place / "run.trec"), "--depth", "10"]
    return ["search", "--queries", str(place / "q"), *folders, *out, *flags]


def test_an_index_lies_beside_the_vectors_tells_its_recall_and_grows(place: Path) -> None:
    pytest.importorskip("faiss", reason="the extra faiss is not installed")
    first = searched(place, "--faiss", "IVF4,Flat", "--nprobe", "4")
    assert (place / "p" / "index-IVF4_Flat" / "index.json").is_file()
    assert "IVF4,Flat, nprobe 4: recall@10 1.000" in first
    again = searched(place, "--faiss", "IVF4,Flat", "--nprobe", "4", "--verify")
    assert first.endswith(again), "what was measured at first is told again"
    assert "300 vectors in IVF4,Flat" in first.removesuffix(again), "what is built is told once"
    both = ("p", "new")
    searched(place, "--faiss", "IVF4,Flat", "--nprobe", "4", corpora=both)
    of_index = read_run(place / "run.trec")
    searched(place, corpora=both)
    exact = read_run(place / "run.trec")
    for question, hits in of_index.items():
        assert [hit.passage for hit in hits] == [hit.passage for hit in exact[question]]


def test_flags_of_an_index_want_one(place: Path) -> None:
    for flags in (["--nprobe", "2"], ["--ef_search", "20"], ["--index", str(place / "i")]):
        done = forked.run(*TRAINER, *words(place, *flags))
        assert done.returncode == 2
        says("index_flags", done.stderr)


def test_an_id_of_two_folders_is_refused_by_name(place: Path) -> None:
    random = np.random.default_rng(1)
    write_vectors(place / "late", random.standard_normal((5, WIDTH)).astype(np.float32), first=299)
    (place / "run.trec").unlink(missing_ok=True)
    done = forked.run(*TRAINER, *words(place, corpora=("p", "late")))
    assert done.returncode == 2
    both = {"folder": str(place / "p"), "other": str(place / "late")}
    says("id_of_two_vectors", done.stderr, id="p299", **both)
    assert not (place / "run.trec").exists()
