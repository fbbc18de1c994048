"""Prepared states train and answer like contexts that are encoded online, and nothing but the right
ones is read.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.facts import experiment, write_facts
from tests.tolerance import assert_close, assert_same_step, depth_of
from tests.wording import refused
from trainer import tasks
from trainer.data.order import Sharding, padding_share, sizes_of
from trainer.data.token_store import TokenStore, store_of
from trainer.protocol.task import Batch, Places
from trainer.recipes.cross_attention import preparation
from trainer.recipes.cross_attention.preparation import Preparation, Prepared
from trainer.tasks.cross_attention.encoder_states.reading import StateCache
from trainer.tasks.cross_attention.task import Task

Values = dict[str, Any]


# Margins, as tests/tolerance.py means them.
STEP: Values = {"loss": 0.06, "gradients": 0.15}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=20, valid=8)


def chunked(folder: Path) -> Path:
    """The same facts with two contexts in each row."""
    other = folder / "chunked"
    other.mkdir(exist_ok=True)
    for split in ("train", "valid"):
        rows = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        for row in rows:
            row["contexts"] = [row.pop("context"), "Elsewhere there is nothing."]
            row["useful_contexts"] = [1, 0]
        (other / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return other


def values_of(folder: Path, **data: Any) -> Values:
    return experiment("cross_attention", folder, data={"state_dtype": "fp32", **data})


def prepare(values: Values, folder: Path | None, out: Path, **wanted: Any) -> Prepared:
    cfg: Any = tasks.parse(values)
    places = Places(folder, out.parent / "cache", out.parent)
    asked = Preparation(out, **{"sources": {}, **wanted})
    preparation.write_rows(cfg, places, asked)
    return preparation.write_states(cfg, places, asked)


def task_of(values: Values, data_path: Path, cache_dir: Path) -> Task:
    return Task(tasks.parse(values), Places(data_path, cache_dir, cache_dir))  # pyright: ignore[reportArgumentType]


def stored(task: Task, split: str) -> TokenStore:
    return store_of(task, split, task.places.cache_dir)


def cached(values: Values) -> Values:
    return {**values, "data": {**values["data"], "encode": "cached"}}


def trained(task: Task, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a batch in training, and the gradients that it leaves."""
    model = task.model().train()
    torch.manual_seed(3)  # key dropout
    (loss,) = task.losses(model, [batch])
    loss.backward()
    return float(loss.detach()), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


VARIANTS: dict[str, Values] = {
    "plain": {},
    "contexts too": {"include_context_ids": True, "fim_rate": 0.0},
    "question on context": {"question_on_context": True},
    "chunked": {"chunked": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_fp32_cached_losses_and_gradients_are_the_online_ones(
    folder: Path, tmp_path: Path, variant: str
) -> None:
    values = values_of(folder, **VARIANTS[variant])
    raw = chunked(folder) if variant == "chunked" else folder
    prepare(values, raw, tmp_path / "out")
    online, read = (
        task_of(values, raw, tmp_path / "c"),
        task_of(cached(values), tmp_path / "out", tmp_path / "c"),
    )
    store = stored(online, "train")
    rows = [store[index] for index in (0, 1, 5, len(store) - 1)]
    batches = [task.collate(rows) for task in (online, read)]
    assert "encoder_hidden_states" in batches[1]
    assert "context_input_ids" not in batches[1]
    want, got = (trained(task, batch) for task, batch in zip((online, read), batches, strict=True))
    assert_same_step(got, want, depth=depth_of(online.model()), **STEP)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 2e-3), ("int8", 1e-2)])
def test_smaller_states_lose_little(
    folder: Path, tmp_path: Path, dtype: str, tolerance: float
) -> None:
    values = values_of(folder, state_dtype=dtype)
    prepare(values, folder, tmp_path / "out")
    online, read = (
        task_of(values, folder, tmp_path / "c"),
        task_of(cached(values), tmp_path / "out", tmp_path / "c"),
    )
    rows = [stored(online, "train")[index] for index in range(4)]
    want, got = (trained(task, task.collate(rows))[0] for task in (online, read))
    assert 0 < abs(got - want) < tolerance * want


def test_scores_under_the_own_and_another_context_are_the_online_ones(
    folder: Path, tmp_path: Path
) -> None:
    values = values_of(folder)
    prepare(values, folder, tmp_path / "out")
    found = []
    for task in (
        task_of(values, folder, tmp_path / "c"),
        task_of(cached(values), tmp_path / "out", tmp_path / "c"),
    ):
        store = stored(task, "valid")
        scores = task.scores(
            task.model().eval(), task.collate([store[index] for index in range(5)])
        )
        found.append({name: float(score.num) / float(score.den) for name, score in scores.items()})
    assert found[0].keys() == {"loss", "shuffled_loss"}
    how = {"what": "scores", "depth": depth_of(task.model()), "margin": STEP["loss"]}
    for name, score in found[0].items():
        assert_close(found[1][name], score, of=name, **how)
    assert found[0]["loss"] != found[0]["shuffled_loss"]


def test_answers_from_states_are_the_online_ones(folder: Path, tmp_path: Path) -> None:
    values = values_of(folder, answer_tokens=6)
    prepare(values, folder, tmp_path / "out")
    answers = []
    for task in (
        task_of(values, folder, tmp_path / "c"),
        task_of(cached(values), tmp_path / "out", tmp_path / "c"),
    ):
        store = stored(task, "valid")
        raw = [
            {"question": row["question"], "answers": row["answers"]} for row in task.rows("valid")
        ]
        answers.append(
            task.answers(task.model().eval(), [store[n] for n in range(4)], raw[:4]).predictions
        )
    assert answers[0] == answers[1]


# What prepare writes


def test_prepared_rows_are_the_raw_ones_and_their_tokens_are_not_made_again(
    folder: Path, tmp_path: Path
) -> None:
    values = values_of(folder)
    made = prepare(values, folder, tmp_path / "out")
    raw, out = (task_of(values, place, tmp_path / "c") for place in (folder, tmp_path / "out"))
    for split in ("train", "valid"):
        assert list(raw.rows(split)) == list(out.rows(split))
        assert stored(raw, split).folder == stored(out, split).folder
    assert made.rows == {"train": 20, "valid": 8}


def test_a_context_that_is_read_and_predicted_is_encoded_once(folder: Path, tmp_path: Path) -> None:
    once = prepare(values_of(folder), folder, tmp_path / "once")
    twice = prepare(values_of(folder, include_context_ids=True), folder, tmp_path / "twice")
    assert twice.met == once.met + 20
    assert twice.plan.count == once.plan.count == len(StateCache(twice.folder))


def test_prepare_again_encodes_nothing_and_changes_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = values_of(folder)
    made = prepare(values, folder, tmp_path / "out", shard_tokens=200)
    before = {path: path.read_bytes() for path in made.folder.iterdir()}
    monkeypatch.setattr(Task, "model", lambda _: pytest.fail("the model was loaded"))
    prepare(values, folder, tmp_path / "out")
    assert {path: path.read_bytes() for path in made.folder.iterdir()} == before


def test_a_lost_shard_is_made_again_byte_by_byte(folder: Path, tmp_path: Path) -> None:
    values = values_of(folder)
    made = prepare(values, folder, tmp_path / "out", shard_tokens=200)
    lost = made.folder / "states-00001.safetensors"
    before = lost.read_bytes()
    lost.unlink()
    prepare(values, folder, tmp_path / "out")
    assert lost.read_bytes() == before


def test_sets_in_their_publishers_form_become_rows_of_a_jsonl_group(
    folder: Path, tmp_path: Path
) -> None:
    asked = [
        {"id": "1", "question": "Who?", "answers": [{"text": "Ann"}]},
        {"id": "2", "question": "Why?", "answers": []},
    ]
    squad = {
        "version": "v2.0",
        "data": [{"title": "T", "paragraphs": [{"context": "Ann wrote it.", "qas": asked}]}],
    }
    (tmp_path / "raw/squad_v2").mkdir(parents=True)
    for part in ("train", "dev"):
        (tmp_path / f"raw/squad_v2/{part}-v2.0.json").write_text(json.dumps(squad))
    made = prepare(values_of(folder), tmp_path / "raw", tmp_path / "out")
    assert made.rows == {"train": 2, "valid": 2}
    assert (made.met, made.plan.count) == (
        2 + 2 * 2,
        1,
    )  # evaluation also reads another row's context
    read = task_of(cached(values_of(folder)), tmp_path / "out", tmp_path / "c")
    assert [row["answers"] for row in read.rows("train")] == [["Ann"], ["UNANSWERABLE"]]


# What is refused


def test_a_cached_run_without_states_is_refused_before_anything_is_read(
    folder: Path, tmp_path: Path
) -> None:
    task = task_of(cached(values_of(folder)), folder, tmp_path / "c")
    with refused("states_absent"):
        task.rows("train")


@pytest.mark.parametrize(
    "change",
    [{"template": "plain"}, {"context_tokens": 32}, {"state_dtype": "bf16"}],
    ids=["template", "context_tokens", "dtype"],
)
def test_states_of_another_dictionary_are_refused_by_the_name_of_what_differs(
    folder: Path, tmp_path: Path, change: Values
) -> None:
    prepare(values_of(folder), folder, tmp_path / "out")
    task = task_of(cached(values_of(folder, **change)), tmp_path / "out", tmp_path / "c")
    (name,) = change
    with refused("states_of_others", key=name.removeprefix("state_")):
        task.rows("train")


def test_states_of_another_base_are_refused(folder: Path, tmp_path: Path) -> None:
    values = values_of(folder)
    prepare(values, folder, tmp_path / "out")
    other = {**cached(values), "base": {**values["base"], "seed": 7}}
    with refused("states_of_others", key="base", has=re.compile("'random:.*")):
        task_of(other, tmp_path / "out", tmp_path / "c").rows("train")


def test_a_row_that_was_not_prepared_is_refused_with_the_command(
    folder: Path, tmp_path: Path
) -> None:
    values = values_of(folder)
    prepare(values, folder, tmp_path / "out")
    task = task_of(cached(values), tmp_path / "out", tmp_path / "c")
    row = task.encode({"question": "q", "answers": ["a"], "context": "A new context."})
    with refused("states_not_prepared"):
        task.collate([row])


def test_states_are_also_found_in_the_cache_folder(folder: Path, tmp_path: Path) -> None:
    values = values_of(folder)
    made = prepare(values, folder, tmp_path / "out")
    shutil.copytree(made.folder, tmp_path / "c/states" / made.folder.name)
    task = task_of(cached(values), folder, tmp_path / "c")
    store = stored(task, "train")
    assert "encoder_hidden_states" in task.collate([store[0]])


def test_other_rows_are_not_written_into_a_folder_that_was_begun(
    folder: Path, tmp_path: Path
) -> None:
    prepare(values_of(folder), folder, tmp_path / "out")
    with refused("states_begun_with_other_rows"):
        prepare(values_of(folder), chunked(folder), tmp_path / "out")


def test_a_folder_with_other_files_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with refused("states_folder_taken"):
        prepare(values_of(folder), folder, tmp_path / "out")


def test_a_full_disk_is_refused_before_the_base_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage: Callable[[Path], Any] = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=1000))
    monkeypatch.setattr(Task, "model", lambda _: pytest.fail("the model was loaded"))
    with refused("states_do_not_fit", free="1.0 KiB"):
        prepare(values_of(folder), folder, tmp_path / "out")


def test_sets_are_not_prepared_for_a_group_that_reads_something_else(
    folder: Path, tmp_path: Path
) -> None:
    with refused("states_source", source="stdlib_docs"):
        prepare(
            values_of(folder, source="stdlib_docs"), folder, tmp_path / "out", sources={"nq": "x"}
        )


# Batches


def test_questions_and_contexts_share_no_micro_batch(folder: Path, tmp_path: Path) -> None:
    task = task_of(values_of(folder, include_context_ids=True, packed=False), folder, tmp_path)
    store = stored(task, "train")
    sizes = sizes_of(store, task)
    assert sizes.kinds_N.tolist() == [0] * 20 + [1] * 20
    assert sizes.lengths_N.tolist() == store.lengths.tolist()
    sharding = Sharding(40, 40, 1, 0, micro_tokens=500)
    kept_apart = padding_share(sizes, sharding, seed=1, steps=1)
    assert kept_apart < padding_share(
        sizes, replace(sharding, micro_tokens=None, micro_batch=20), seed=None, steps=1
    )
