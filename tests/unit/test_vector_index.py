"""An index is built once, loaded, grown, measured against exact search, and refused to others."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from tests.vector_folders import write_vectors
from tests.wording import refused
from trainer.retrieval import vector_index
from trainer.retrieval.embeddings import Embeddings
from trainer.retrieval.exact_search import search
from trainer.retrieval.index_recall import TARGET, Knob, shares_found
from trainer.retrieval.stored_forms import Form
from trainer.retrieval.vector_index import IndexOptions, folder_of, open_index

WIDTH = 8
RNG = np.random.default_rng(3)
PASSAGES = RNG.standard_normal((400, WIDTH)).astype(np.float32)
QUERIES = RNG.standard_normal((30, WIDTH)).astype(np.float32)


def have_faiss() -> None:
    pytest.importorskip("faiss", reason="the extra faiss is not installed")


@pytest.fixture
def corpus(tmp_path: Path) -> Embeddings:
    have_faiss()
    return write_vectors(tmp_path / "v", PASSAGES)


def wish(folder: Path, spec: str = "HNSW8", depth: int = 10, **knob: int) -> IndexOptions:
    return IndexOptions(folder, spec, depth, **knob)


@pytest.mark.parametrize("spec", ["Flat", "IVF4,Flat", "HNSW8", "PCA4,IVF4,Flat"])
def test_an_index_tells_what_it_finds_of_the_exact_hits(
    spec: str, corpus: Embeddings, tmp_path: Path
) -> None:
    index = open_index(wish(tmp_path / "i", spec), [corpus], QUERIES)
    rows = index.search(QUERIES, 10).rows
    exact = search(QUERIES, corpus.vectors, depth=10).rows
    shares = [len({*a} & {*b}) / 10 for a, b in zip(rows.tolist(), exact.tolist(), strict=True)]
    assert index.setting.recall == pytest.approx(np.mean(shares))
    assert (index.record.recall.questions, index.record.recall.depth) == (30, 10)
    if spec != "PCA4,IVF4,Flat":  # four of eight numbers are not enough for .99
        assert index.setting.recall >= TARGET
    (first, *more) = index.lines(tmp_path / "i")
    assert f"recall@10 {index.setting.recall:.3f}" in first
    assert any("below" in line for line in more) == (index.setting.recall < TARGET)


def test_the_scores_of_a_flat_index_are_those_of_an_exact_search(
    corpus: Embeddings, tmp_path: Path
) -> None:
    hits = open_index(wish(tmp_path / "i", "Flat"), [corpus], QUERIES).search(QUERIES, 10)
    exact = search(QUERIES, corpus.vectors, depth=10)
    np.testing.assert_array_equal(hits.rows, exact.rows)
    np.testing.assert_allclose(hits.scores, exact.scores, rtol=1e-5)


def test_the_default_is_the_least_setting_that_reaches_the_target(
    corpus: Embeddings, tmp_path: Path
) -> None:
    recall = open_index(wish(tmp_path / "i", "IVF16,Flat"), [corpus], QUERIES).record.recall
    values = [setting.value for setting in recall.settings]
    assert values == [1, 2, 4, 8, 16][: len(values)]
    reach = [setting.reaches_target for setting in recall.settings]
    assert reach == [False] * (len(reach) - 1) + [True]
    assert recall.default == values[-1] > 1


def test_a_knob_doubles_up_to_everything() -> None:
    assert Knob("nprobe", 5).series == [1, 2, 4, 5]
    assert Knob("efSearch", 16).series == [16]


def test_an_index_is_searched_by_what_was_measured_also_for_fewer_hits(
    corpus: Embeddings, tmp_path: Path
) -> None:
    deep = open_index(wish(tmp_path / "i", depth=100), [corpus], QUERIES)
    assert deep.setting.value >= 100, "with fewer candidates than hits FAISS takes as many"
    few = open_index(wish(tmp_path / "i", depth=1, ef_search=100), [corpus], QUERIES)
    assert few.record == deep.record
    by_hand = open_index(wish(tmp_path / "i", depth=1, ef_search=2), [corpus], QUERIES)
    assert (by_hand.record.recall.depth, by_hand.setting.value) == (1, 2)


def test_one_question_does_not_speak_for_all_that_follow(
    corpus: Embeddings, tmp_path: Path
) -> None:
    first = open_index(wish(tmp_path / "i", "IVF16,Flat"), [corpus], QUERIES[:1])
    assert first.record.recall.questions == 1
    later = open_index(wish(tmp_path / "i", "IVF16,Flat"), [corpus], QUERIES)
    assert later.record.recall.questions == len(QUERIES)
    assert later.record.file == first.record.file


def test_the_next_call_loads_and_measures_nothing(
    corpus: Embeddings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_index(wish(tmp_path / "i"), [corpus], QUERIES)
    names = sorted(path.name for path in (tmp_path / "i").iterdir())
    assert names == ["index-400.faiss", "index.json"]
    times = [path.stat().st_mtime_ns for path in sorted((tmp_path / "i").iterdir())]
    monkeypatch.setattr(vector_index, "measure", None)
    monkeypatch.setattr(vector_index, "_training_sample", None)
    again = open_index(wish(tmp_path / "i", depth=5), [corpus], QUERIES)
    assert again.record == first.record
    assert [path.stat().st_mtime_ns for path in sorted((tmp_path / "i").iterdir())] == times
    np.testing.assert_array_equal(again.search(QUERIES, 5).rows, first.search(QUERIES, 5).rows)


def test_a_deeper_search_and_a_setting_by_hand_are_measured(
    corpus: Embeddings, tmp_path: Path
) -> None:
    first = open_index(wish(tmp_path / "i", "IVF16,Flat"), [corpus], QUERIES)
    by_hand = open_index(wish(tmp_path / "i", "IVF16,Flat", nprobe=3), [corpus], QUERIES)
    assert by_hand.setting.value == 3
    assert by_hand.record.recall.default == first.record.recall.default
    assert by_hand.setting in by_hand.record.recall.settings
    deeper = open_index(wish(tmp_path / "i", "IVF16,Flat", depth=50), [corpus], QUERIES)
    assert deeper.record.recall.depth == 50
    assert deeper.record.file == first.record.file


def test_new_passages_make_the_index_grow(corpus: Embeddings, tmp_path: Path) -> None:
    open_index(wish(tmp_path / "i", "Flat"), [corpus], QUERIES)
    more = write_vectors(tmp_path / "more", PASSAGES[:60] * np.float32(2), form="float16")
    index = open_index(wish(tmp_path / "i", "Flat"), [corpus, more], QUERIES)
    exact = search(QUERIES, [*corpus.vectors, *more.vectors], depth=10)
    np.testing.assert_array_equal(index.search(QUERIES, 10).rows, exact.rows)
    assert [part.count for part in index.record.parts] == [400, 60]
    assert [path.name for path in (tmp_path / "i").glob("*.faiss")] == ["index-460.faiss"]
    for wrong in ([more, corpus], [corpus]):
        with refused("index_of_other_vectors", at=str(tmp_path / "i")):
            open_index(wish(tmp_path / "i", "Flat"), wrong, QUERIES)


def test_a_kill_while_it_grows_leaves_the_index_before(
    corpus: Embeddings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_index(wish(tmp_path / "i", "Flat"), [corpus], QUERIES)
    more = write_vectors(tmp_path / "more", PASSAGES[:60])

    def dying(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(vector_index, "write_json", dying)
        with pytest.raises(KeyboardInterrupt):
            open_index(wish(tmp_path / "i", "Flat"), [corpus, more], QUERIES)
    assert open_index(wish(tmp_path / "i", "Flat"), [corpus], QUERIES).faiss_index.ntotal == 400
    grown = open_index(wish(tmp_path / "i", "Flat"), [corpus, more], QUERIES)
    assert grown.faiss_index.ntotal == 460


def test_an_index_of_another_model_is_refused_by_name(corpus: Embeddings, tmp_path: Path) -> None:
    open_index(wish(tmp_path / "i"), [corpus], QUERIES)
    other = write_vectors(tmp_path / "other", PASSAGES, model="n")
    with refused("index_of_other_model", has="m", wanted="n", at=str(tmp_path / "i")):
        open_index(wish(tmp_path / "i"), [other], QUERIES)
    with refused("index_of_other_kind", has="HNSW8", wanted="HNSW16"):
        open_index(wish(tmp_path / "i", "HNSW16"), [corpus], QUERIES)
    changed = write_vectors(tmp_path / "changed", PASSAGES, form="int8")
    with refused("index_of_other_vectors"):
        open_index(wish(tmp_path / "i"), [changed], QUERIES)


def test_a_torn_index_is_refused(corpus: Embeddings, tmp_path: Path) -> None:
    folder = tmp_path / "i"
    open_index(wish(folder), [corpus], QUERIES)
    path = folder / "index-400.faiss"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with refused("index_torn", at=str(folder)):
        vector_index.verify(folder)
    path.write_bytes(content[: len(content) // 2])
    with refused("index_torn", at=str(folder)):
        open_index(wish(folder), [corpus], QUERIES)
    path.write_bytes(b"\0" * len(content))
    with refused("index_torn", at=str(folder)):
        open_index(wish(folder), [corpus], QUERIES)
    path.write_bytes(content + b"x")
    with refused("index_torn", at=str(folder)):
        open_index(wish(folder), [corpus], QUERIES)
    path.unlink()
    with refused("index_torn", at=str(folder)):
        open_index(wish(folder), [corpus], QUERIES)
    (folder / "index.json").write_text(json.dumps({"model": "m"}))
    with refused("index_torn", at=str(folder)):
        open_index(wish(folder), [corpus], QUERIES)


def test_more_hits_than_passages_are_no_hits(corpus: Embeddings, tmp_path: Path) -> None:
    index = open_index(wish(tmp_path / "i", "Flat", depth=500), [corpus], QUERIES)
    hits = index.search(QUERIES, 500)
    assert (hits.rows[:, 400:] == -1).all()
    assert np.isneginf(hits.scores[:, 400:]).all()
    assert index.setting.recall == 1


@pytest.mark.parametrize("spec", ["Flat", "HNSW32", "IVF2,Flat"])
@pytest.mark.parametrize("form", ["float32", "int8"])
def test_of_equal_passages_any_are_the_hits(spec: str, form: Form, tmp_path: Path) -> None:
    have_faiss()
    equal = np.repeat(PASSAGES[:10], 20, axis=0)[RNG.permutation(200)]
    corpora = [write_vectors(tmp_path / "v", equal, form=form)]
    index = open_index(wish(tmp_path / "i", spec), corpora, QUERIES)
    assert index.setting.recall == 1
    assert not any("warning" in line for line in index.lines(tmp_path / "i"))


def test_a_passage_of_the_last_score_takes_the_place_of_one_such_hit_alone() -> None:
    passages = [np.array([[3], [2], [1]], np.float32), np.array([[1], [1], [0]], np.float32)]
    query = np.ones((1, 1), np.float32)
    exact = search(query, passages, depth=3)
    assert exact.rows.tolist() == [[0, 1, 2]]
    for rows, share in (
        ([0, 1, 4], 1),
        ([1, 3, 4], 2 / 3),
        ([0, 1, 5], 2 / 3),
        ([3, 4, 5], 1 / 3),
        ([0, -1, -1], 1 / 3),
    ):
        shares = shares_found(exact, np.array([rows]), query, passages)
        assert shares == [pytest.approx(share)], rows


def test_an_index_that_visits_everything_is_not_told_to_visit_more(
    corpus: Embeddings, tmp_path: Path
) -> None:
    index = open_index(wish(tmp_path / "i", "PCA2,IVF4,Flat"), [corpus], QUERIES)
    assert index.setting.value == 4
    assert any("Take another --faiss" in line for line in index.lines(tmp_path / "i"))
    by_hand = open_index(wish(tmp_path / "i", "PCA2,IVF4,Flat", nprobe=1), [corpus], QUERIES)
    assert any("Give a larger nprobe" in line for line in by_hand.lines(tmp_path / "i"))


def test_a_second_search_waits_for_the_one_that_builds_and_builds_nothing(
    corpus: Embeddings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, begun, may_end = tmp_path / "i", Event(), Event()
    waiting, builds = Event(), list[int]()
    measured, say = vector_index.measure, vector_index.logger.info

    def measure(*arguments: Any, **how: Any) -> Any:
        builds.append(1)
        begun.set()
        assert may_end.wait(60)
        return measured(*arguments, **how)

    def info(message: str, *arguments: object) -> None:
        say(message, *arguments)
        if "waiting" in message:
            waiting.set()

    monkeypatch.setattr(vector_index, "measure", measure)
    monkeypatch.setattr(vector_index.logger, "info", info)
    with ThreadPoolExecutor(2) as pool:
        try:
            first = pool.submit(open_index, wish(folder), [corpus], QUERIES)
            assert begun.wait(60)
            second = pool.submit(open_index, wish(folder), [corpus], QUERIES)
            assert waiting.wait(60)
        finally:
            may_end.set()
        assert first.result().record == second.result().record
    assert len(builds) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["i", "v"]


def test_a_search_reads_the_index_that_another_one_puts_in_place_meanwhile(
    corpus: Embeddings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = tmp_path / "i", vector_index._load
    open_index(wish(folder), [corpus], QUERIES)

    def load(place: Path, record: Any) -> Any:
        monkeypatch.setattr(vector_index, "_load", read)
        for path in place.iterdir():
            path.unlink()
        open_index(wish(place, depth=20), [corpus], QUERIES)
        path = place / record.file.name
        path.rename(place / "index-999.faiss")
        text = (place / "index.json").read_text().replace(record.file.name, "index-999.faiss")
        (place / "index.json").write_text(text)
        return read(place, record)

    monkeypatch.setattr(vector_index, "_load", load)
    assert open_index(wish(folder), [corpus], QUERIES).record.file.name == "index-999.faiss"


def test_what_faiss_cannot_do_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    have_faiss()
    few = [write_vectors(tmp_path / "few", PASSAGES[:60])]
    for spec in ("IDMap,Flat", "NSG8", "IVF0,Flat"):
        with refused("faiss_cannot", index=spec):
            open_index(wish(tmp_path / "i", spec), few, QUERIES)
    for spec in ("HNSW0", "HNSW1", "IVF4_HNSW1,Flat", "NSG1"):  # FAISS crashes, or never ends
        with refused("faiss_no_graph", index=spec):
            open_index(wish(tmp_path / "i", spec), few, QUERIES)
    assert [path.name for path in tmp_path.iterdir()] == ["few"]


def test_what_cannot_be_built_is_refused_before_a_file_is_written(
    corpus: Embeddings, tmp_path: Path
) -> None:
    folder = tmp_path / "i"
    with refused("faiss_unknown", index="Falt"):
        open_index(wish(folder, "Falt"), [corpus], QUERIES)
    with refused("faiss_training", index="IVF1024,Flat", count=400):
        open_index(wish(folder, "IVF1024,Flat"), [corpus], QUERIES)
    with refused("index_knob", flag="--nprobe", index="HNSW8", fix="Give --ef_search"):
        open_index(wish(folder, nprobe=4), [corpus], QUERIES)
    with refused("index_knob", flag="--ef_search", index="Flat", fix="Leave it out"):
        open_index(wish(folder, "Flat", ef_search=4), [corpus], QUERIES)
    with refused("index_two_knobs"):
        open_index(wish(folder, ef_search=4, nprobe=4), [corpus], QUERIES)
    with refused("vectors_of_two_widths", width=4, other=WIDTH):
        open_index(wish(folder), [corpus], QUERIES[:, :4])
    assert not folder.exists()


def test_the_folder_of_an_index_is_named_by_what_it_is() -> None:
    assert folder_of(Path("v"), "IVF1024,Flat") == Path("v/index-IVF1024_Flat")


def test_a_missing_extra_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = write_vectors(tmp_path / "v", PASSAGES)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with refused("extra_not_installed", name="faiss", extra="faiss"):
        open_index(wish(tmp_path / "i"), [vectors], QUERIES)
