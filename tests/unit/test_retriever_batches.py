"""data.batches of a retriever: which rows share a step, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exp_configs import vary
from tests.facts import experiment, write_facts
from tests.unit.test_retriever_rows import write_lines
from tests.wording import Fault, fault, refused
from trainer import tasks
from trainer.data.mixed.mixture import Mix
from trainer.data.mixed.store import sources_in
from trainer.data.order import Sharding, sizes_of, window_rows
from trainer.data.token_store import store_of
from trainer.protocol.task import Places
from trainer.statistics import table
from trainer.statistics.report import report

TOPICS = ("cars", "soups", "stars")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_facts(tmp_path_factory.mktemp("facts"))
    nouns = {"cars": "wheel brake engine", "soups": "onion broth spoon", "stars": "orbit comet sun"}
    rows = []
    for n in range(60):
        topic = TOPICS[n % 3]
        words = nouns[topic].split()
        passage = {"docid": f"p{n // 2}", "text": f"about {words[n % 2]} number {n // 2}"}
        rows.append(
            {
                "query_id": str(n),
                "query": f"which {words[n // 3 % 3]} and {words[n // 9 % 3]} {n}",
                "positive_passages": [passage],
                "negative_passages": [{"docid": f"n{n}", "text": f"nothing {n}"}],
                "topic": topic,
            }
        )
    write_lines(folder / "topical.jsonl", rows)
    write_lines(folder / "untold.jsonl", [{**row, "topic": None} for row in rows])
    write_lines(folder / "blank.jsonl", [{**row, "topic": " "} for row in rows])
    write_lines(folder / "several.jsonl", [{**row, "topic": [row["topic"]]} for row in rows])
    # the same ids for other texts, and a text that two ids have
    renamed = [
        {**row, "positive_passages": [{"docid": f"p{n % 30}", "text": f"the text {n}"}]}
        for n, row in enumerate(rows)
    ]
    write_lines(folder / "renamed.jsonl", renamed)
    return folder


def values_of(folder: Path, name: str, batches: dict[str, Any], **data: Any) -> dict[str, Any]:
    files = {"train": name, "valid": "topical.jsonl"}
    more: dict[str, Any] = {"source": "tevatron", "files": files, "batches": batches, **data}
    return experiment("retriever", folder, data=more, train={"global_batch": 4, "micro_batch": 2})


def steps_of(
    folder: Path, values: dict[str, Any], count: int, *, cache: Path | None = None
) -> tuple[Any, list[np.ndarray]]:
    """The store of the training rows, and the rows of the first steps."""
    cache = cache or folder / "cache"
    task: Any = tasks.load(tasks.parse(values), Places(folder, cache, folder))
    store = store_of(task, "train", cache)
    sharding = Sharding(4, 2, 1, 0, mix=Mix.of(task.cfg.data))
    sizes = sizes_of(store, task)
    steps = [
        np.concatenate(window_rows(step, lengths=sizes, sharding=sharding, seed=3))
        for step in range(count)
    ]
    return store, steps


def test_no_step_has_two_questions_of_one_passage(folder: Path) -> None:
    store, steps = steps_of(folder, values_of(folder, "topical.jsonl", {"distinct": True}), 15)
    assert sorted(np.concatenate(steps)) == list(range(60))
    for rows in steps:
        positives = [tuple(store[int(row)]["identities"][:2]) for row in rows]
        assert len({*positives}) == 4


def test_passages_are_compared_by_their_ids_too(folder: Path) -> None:
    _, steps = steps_of(folder, values_of(folder, "renamed.jsonl", {"distinct": True}), 15)
    assert sorted(np.concatenate(steps)) == list(range(60))
    assert all(len({row % 30 for row in rows}) == 4 for rows in steps)
    values = values_of(folder, "renamed.jsonl", {"topics": {"by": "words", "clusters": 1}})
    _, any_rows = steps_of(folder, values, 15)
    assert any(len({row % 30 for row in rows}) < 4 for rows in any_rows), "by chance they meet"


def test_two_sources_may_number_other_passages_alike(folder: Path) -> None:
    mix = {"topical.jsonl": 0.5, "renamed.jsonl": 0.5}
    values = values_of(folder, "", {"distinct": True}, mix=mix, files={"valid": "topical.jsonl"})
    task: Any = tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))
    store = store_of(task, "train", folder / "cache")
    shared = task.arrangement(store, sources_in(store)).shared
    # of renamed.jsonl the rows n and n + 30, of topical.jsonl 2n and 2n + 1; queries are in both
    by_row = [{*shared.of(row)} for row in range(120)]
    assert by_row[0] & by_row[30], "one source, one id"
    assert not by_row[1] & by_row[60 + 2], "p1 of either"
    assert by_row[1] & by_row[60 + 1], "the same query"
    assert sources_in(store) == (60, 60)


def test_a_step_has_rows_of_one_topic_that_the_rows_say(folder: Path) -> None:
    batches = {"topics": {"by": "field"}, "distinct": True}
    _, steps = steps_of(folder, values_of(folder, "topical.jsonl", batches), 15)
    assert all(len({row % 3 for row in rows}) == 1 for rows in steps)
    assert sorted(np.concatenate(steps)) == list(range(60))


def test_a_row_without_a_topic_is_named(folder: Path) -> None:
    values = values_of(folder, "untold.jsonl", {"topics": {"by": "field"}})
    with refused("row_without_topic", id="0"):
        steps_of(folder, values, 1)
    with refused("row_without_topic", id="0"):
        steps_of(folder, values_of(folder, "blank.jsonl", {"topics": {"by": "field"}}), 1)
    with refused("topic_kind", id="0", kind="a list"):
        steps_of(folder, values_of(folder, "several.jsonl", {"topics": {"by": "field"}}), 1)
    mapped = values_of(
        folder, "topical.jsonl", {"topics": {"by": "field"}}, columns={"topic": "query_id"}
    )
    _, steps = steps_of(folder, mapped, 1)
    assert len(steps[0]) == 4


@pytest.mark.parametrize("by", ["words", "model"])
def test_questions_of_like_words_or_vectors_are_of_one_topic(
    by: str, folder: Path, tmp_path: Path
) -> None:
    batches = {"topics": {"by": by, "clusters": 3}}
    values = values_of(folder, "topical.jsonl", batches)
    store, steps = steps_of(folder, values, 15, cache=tmp_path)
    (kept,) = (tmp_path / "topics").glob("*/topics.npy")
    topics = np.load(kept)
    assert len({*topics}) == 3
    assert sorted(np.concatenate(steps)) == list(range(60))
    assert sum(len({*topics[rows]}) == 1 for rows in steps) >= 12
    if by == "words":
        return
    task: Any = tasks.load(tasks.parse(values), Places(folder, tmp_path, folder))
    queries = [store[row]["query"].tolist() for row in range(60)]
    vectors = task.embed(task.model().eval(), queries, side="query").detach().numpy()
    centres = np.stack([vectors[topics == topic].mean(0) for topic in range(3)])
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    assert ((vectors @ centres.T).argmax(1) == topics).mean() > 0.9


def test_clusters_of_one_encoder_are_not_taken_for_those_of_another(
    folder: Path, tmp_path: Path
) -> None:
    batches = {"topics": {"by": "model", "clusters": 3}}
    values = values_of(folder, "topical.jsonl", batches)
    count = 0
    for changes in (
        {},
        {"encoder": {"pooling": "cls"}},
        {"encoder": {"projection": {"width": 8}}},
        {"train": {"seed": 6}},  # which a new projection is drawn with
    ):
        steps_of(folder, vary(values, **changes), 1, cache=tmp_path)
        count += 1
        assert len([*(tmp_path / "topics").glob("*/topics.npy")]) == count, changes
    steps_of(folder, vary(values, encoder={"temperature": 0.5}), 1, cache=tmp_path)
    assert len([*(tmp_path / "topics").glob("*/topics.npy")]) == count, "vectors do not change"


def test_clusters_of_a_trained_model_follow_its_projection(folder: Path, tmp_path: Path) -> None:
    values = values_of(folder, "topical.jsonl", {"topics": {"by": "model", "clusters": 3}})
    task: Any = tasks.load(tasks.parse(values), Places(folder, tmp_path, folder))
    weights = dict(task.model().state_dict())
    for number in (1, 2):
        task.export(weights, tmp_path / "trained")
        own = {"topics": {"by": "model", "clusters": 3, "model": str(tmp_path / "trained")}}
        steps_of(folder, values_of(folder, "topical.jsonl", own), 1, cache=tmp_path)
        assert len([*(tmp_path / "topics").glob("*/topics.npy")]) == number
        shutil.rmtree(tmp_path / "trained")
        weights["pooler.linear_q.weight"] = -weights["pooler.linear_q.weight"]


def test_what_becomes_of_the_rows_is_told(folder: Path) -> None:
    values = values_of(folder, "topical.jsonl", {"topics": {"by": "field"}, "distinct": True})
    cfg = tasks.parse(values)
    task = tasks.load(cfg, Places(folder, folder / "cache", folder))
    found = report(cfg, task, ["train"], cache_dir=folder / "cache")
    told = found["splits"]["train"]["batches"]
    assert told == {"rows": 60, "left_out": 0, "mixed": 0, "sharing": 60, "topics": 3}
    assert "3 topics: 0 rows fill no step" in table.text(found, is_coloured=False).replace(
        "\n", " "
    )


def test_ids_are_those_of_before_where_batches_read_nothing(folder: Path) -> None:
    plain = values_of(folder, "topical.jsonl", {"topics": {"by": "words"}})
    without = json.loads(json.dumps(plain))
    del without["data"]["batches"]
    ids = [
        tasks.load(tasks.parse(one), Places(folder, folder / "cache", folder)).encoding_id()
        for one in (plain, without)
    ]
    assert ids[0] == ids[1]


_MIX = {"mix": {"topical.jsonl": 0.5, "renamed.jsonl": 0.5}, "files": {"valid": "topical.jsonl"}}


@pytest.mark.parametrize(
    ("wrong", "changes"),
    [
        (fault("batches_say_nothing"), {"data": {"batches": {}}}),
        (fault("batches_without_negatives"), {"loss": {"kind": "triplet", "margin": 0.1}}),
        (fault("one_source_of_no_mix"), {"data": {"batches": {"source": "one"}}}),
        (
            fault("topics_of_a_mix"),
            {"data": {**_MIX, "batches": {"topics": {}}}},
        ),
        (fault("batches_and_order", key="bucket_steps"), {"train": {"bucket_steps": 2}}),
        (fault("batches_and_order", key="order"), {"train": {"order": "as_given"}}),
        (
            fault("source_without_topics", source="'nq'"),
            {"data": {"source": "nq", "files": {}, "batches": {"topics": {"by": "field"}}}},
        ),
        (fault("field_with_clusters"), {"data": {"batches": {"topics": {"by": "field", "clusters": 2}}}}),
        (fault("model_of_topics_unread", by="words"), {"data": {"batches": {"topics": {"model": "x"}}}}),
        (fault("stream_with_keys", keys="batches"), {"data": {"stream": True, "source": "files"}}),
    ],
    ids=str,
)  # fmt: skip
def test_batches_that_cannot_be_made_are_refused(
    wrong: Fault, changes: dict[str, Any], folder: Path
) -> None:
    values = values_of(folder, "topical.jsonl", {"distinct": True})
    with refused(wrong):
        tasks.parse(vary(values, **changes))


def test_a_form_without_a_vector_of_a_query_has_no_topics_by_model(folder: Path) -> None:
    values = experiment("retriever, late", folder)
    tasks.parse(vary(values, data={"batches": {"topics": {"by": "words"}}}))
    with refused("topics_of_no_vectors", form="late"):
        tasks.parse(vary(values, data={"batches": {"topics": {"by": "model"}}}))


def test_a_model_of_topics_is_looked_for_and_must_read_these_tokens(
    folder: Path, tmp_path: Path
) -> None:
    batches = {"topics": {"by": "model", "model": "nowhere"}}
    with refused("topics_model_absent", folder=folder / "nowhere"):
        steps_of(folder, values_of(folder, "topical.jsonl", batches), 1)
    other = write_facts(tmp_path / "other", train=9)
    batches = {"topics": {"by": "model", "model": str(other / "tokenizer")}}
    with refused("topics_other_tokenizer"):
        steps_of(folder, values_of(folder, "topical.jsonl", batches), 1)
    batches = {"topics": {"clusters": 61}}
    with refused("clusters_above_rows", got=61, rows=60):
        steps_of(folder, values_of(folder, "topical.jsonl", batches), 1)
