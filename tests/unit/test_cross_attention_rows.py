"""The rows of the cross-attention task: contexts as targets, filled in the middle, subsets, and
beginning-of-text.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.facts import experiment, write_facts
from tests.wording import refused
from trainer import tasks
from trainer.data.content import content_of_rows
from trainer.data.token_store import store_of
from trainer.launch.run_folder import check_identity, kernels_of
from trainer.protocol.task import DRAW, Places
from trainer.tasks.cross_attention.text.fim import Sentinels, fill_in_the_middle
from trainer.tasks.cross_attention.text.prompts import Prompts
from trainer.tasks.cross_attention.text.templates import context_text
from trainer.training.options import Options
from trainer.training.run_plan import plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Facts whose rows name the data sets nq and squad in turn."""
    made = write_facts(tmp_path_factory.mktemp("facts"))
    for split in ("train", "valid"):
        path = made / f"{split}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        named = [{**row, "dataset": ("nq", "squad")[n % 2]} for n, row in enumerate(rows)]
        path.write_text("".join(json.dumps(row) + "\n" for row in named))
    return made


def loaded(folder: Path, **data: Any) -> Any:
    cfg = tasks.parse(
        experiment("cross_attention", folder, data={"shuffled_context": False, **data})
    )
    return tasks.load(cfg, Places(folder, folder / "cache", folder / "runs"))


def test_in_training_every_context_is_a_target_once_more_and_in_validation_none_is(
    folder: Path,
) -> None:
    task, plain = loaded(folder, include_context_ids=True), loaded(folder)
    rows, questions = list(task.rows("train")), list(plain.rows("train"))
    assert [row["question"] for row in rows] == [row["question"] for row in questions] * 2
    encoded = [task.encode(row) for row in rows]
    assert [row["is_context"] for row in encoded] == [[0]] * 64 + [[1]] * 64
    assert [row["decoder"] for row in encoded[:64]] == [
        plain.encode(row)["decoder"] for row in questions
    ]
    assert len(list(task.rows("valid"))) == 22


def test_a_context_as_target_reads_itself_and_ends_like_an_answer(folder: Path) -> None:
    task = loaded(folder, include_context_ids=True, decoder_tokens=120, context_tokens=120)
    row = list(task.rows("train"))[64]
    encoded = task.encode(row)
    text = context_text("", [row["context"]], "chat", question_on_context=False)
    assert encoded["decoder"] == [*task.tokenizer(text)["input_ids"], task.tokenizer.eos_token_id]
    assert encoded["context"] == encoded["decoder"][:-1]
    batch = task.collate([encoded])
    assert int(task.units(batch)) == len(encoded["decoder"]) - 1


def test_a_bare_answer_has_the_tokens_that_it_has_in_its_context(folder: Path) -> None:
    task = loaded(folder, template="bare")
    row = {"question": "Who?", "answers": ["in the attic"], "context": "It is in the attic."}
    encoded = task.encode(row)
    (start,) = encoded["answer_start"]
    answer = encoded["decoder"][start:-1]
    assert any(
        encoded["context"][place : place + len(answer)] == answer
        for place in range(len(encoded["context"]))
    )
    assert task.prompts.text(encoded["decoder"][start:]) == "in the attic"


def test_a_chunked_context_as_target_is_its_useful_chunks(folder: Path) -> None:
    task = loaded(folder, include_context_ids=True, chunked=True, decoder_tokens=120)
    row = {
        "question": "q",
        "answers": ["a"],
        "contexts": ["one", "two", "three"],
        "useful_contexts": [0, 1, 1],
    }
    encoded = task.encode({**row, "is_context": True})
    assert task.tokenizer.decode(encoded["decoder"][:-1]) == context_text(
        "", ["two", "three"], "chat", question_on_context=False
    )
    assert len(encoded["context_lengths"]) == 3


def test_a_drawn_share_of_contexts_is_filled_in_the_middle_and_questions_and_evaluation_never_are(
    folder: Path,
) -> None:
    task = loaded(folder, include_context_ids=True, decoder_tokens=120)
    rows = [task.encode(row) for row in task.rows("train")]
    question, context = rows[0], rows[64]
    prefix = task.sentinels.prefix

    def first_tokens(row: dict[str, Any], draw: int) -> list[int]:
        ids = task.collate([{**row, DRAW: np.array([draw])}])["tokens"].tolist()
        return ids[: len(prefix)]

    share = np.mean([first_tokens(context, draw) == prefix for draw in range(400)])
    assert share == pytest.approx(0.5, abs=0.1)
    assert not any(first_tokens(question, draw) == prefix for draw in range(20))
    assert task.collate([context])["tokens"].tolist() == context["decoder"]


def test_filling_keeps_every_token_and_the_end_within_the_limit(folder: Path) -> None:
    task = loaded(folder, include_context_ids=True, decoder_tokens=48, fim_rate=1.0)
    for context in [task.encode(row) for row in list(task.rows("train"))[64:80]]:
        batch = task.collate([{**context, DRAW: np.array([5])}])
        ids = batch["tokens"].tolist()
        assert len(ids) <= 48
        assert (ids[-1] == task.tokenizer.eos_token_id) == (
            context["decoder"][-1] == task.tokenizer.eos_token_id
        )


def test_a_text_too_short_for_three_parts_is_left_alone() -> None:
    sentinels = Sentinels(prefix=[1], middle=[2], suffix=[3])
    assert fill_in_the_middle(
        range(10, 15), sentinels, max_tokens=64, random=np.random.RandomState(0)
    ) == [*range(10, 15)]


def test_a_subset_trains_on_the_rows_of_its_data_set_alone(folder: Path) -> None:
    task = loaded(folder, training_data_subset="nq", validation_data_subset="squad")
    assert {row["dataset"] for row in task.rows("train")} == {"nq"}
    assert {row["dataset"] for row in task.rows("valid")} == {"squad"}
    assert len(list(task.rows("train"))) == 32


def test_a_subset_that_no_row_is_of_is_refused_with_those_that_there_are(folder: Path) -> None:
    with refused("row_of_other_set", split="train", dataset="squat", nearest="squad"):
        list(loaded(folder, training_data_subset="squat").rows("train"))


class Opened:
    """A tokenizer that puts its beginning-of-text token before every text and a space before every
    word, as Llama's.
    """

    bos_token_id, eos_token_id, pad_token_id = 1, 2, 0
    added_tokens_decoder, all_special_tokens, all_special_ids = {}, (), ()

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [ord(letter) for letter in ("" if text.startswith(("<", "[")) else " ") + text]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}


def test_a_tokenizer_that_opens_texts_opens_prompts_and_contexts_once_and_answers_never(
    folder: Path,
) -> None:
    prompts = Prompts(
        Opened(),
        loaded(folder).cfg.data.model_copy(update={"decoder_tokens": 99, "context_tokens": 99}),
    )
    encoded = prompts.encode({"question": "who", "answers": ["Ann"], "context": "text"})
    assert encoded["decoder"] == [1, *map(ord, "<|user|>\nwho\n<|assistant|>\nAnn"), 2]
    assert encoded["answer_start"] == [len(encoded["decoder"]) - 4]
    assert encoded["context"] == [1, *map(ord, "<|user|>\n<|C|>\n<|assistant|>\ntext")]
    assert encoded["context"].count(1) == encoded["decoder"].count(1) == 1


def test_a_tokenizer_that_opens_nothing_changes_nothing(folder: Path) -> None:
    assert loaded(folder).prompts.opening == []


def test_useful_contexts_of_another_number_are_refused(tmp_path: Path) -> None:
    row = {"question": "q", "answer": "a", "contexts": ["one", "two"], "useful_contexts": [1]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    from trainer.data.readers.questions import qa_rows

    with refused("flags_wanted", at="train.jsonl, line 1", key="useful_contexts", value=[1]):
        list(qa_rows(tmp_path, "train"))


# Runs that earlier versions began
# --------------------------------------------------------------------------------------------------


def test_rows_are_known_by_what_they_were_known_by_when_runs_began(folder: Path) -> None:
    """As recorded by the version of 2026-11-22, by those that counted `facts` for all rows, and by
    the first one, in which only questions trained.
    """
    recorded = {
        "chunked": False,
        "context_tokens": 64,
        "decoder_tokens": 48,
        "include_context_ids": False,
        "loss_on": "all",
        "question_on_context": False,
        "shuffled_context": False,
        "source": "jsonl",
        "template": "chat",
    }
    task = loaded(folder, context_tokens=64, decoder_tokens=48, loss_on="all")
    assert json.loads(task.encoding_id())["data"] == recorded
    between, first = (json.loads(name)["data"] for name in task.earlier_encoding_ids())
    assert between == {**recorded, "facts": 8}
    assert first == {name: of for name, of in recorded.items() if name != "include_context_ids"}
    lookup = loaded(folder, source="lookup", facts=3)
    assert json.loads(lookup.encoding_id())["data"]["facts"] == 3


@pytest.mark.parametrize("version", [0, 1])
def test_a_run_that_an_earlier_version_began_goes_on_and_one_of_other_rows_does_not(
    version: int, folder: Path, tmp_path: Path
) -> None:
    task = loaded(folder)
    planned = plan(experiment("cross_attention", folder), Options(tmp_path), world=1, rank=0)
    planned.folder.mkdir()
    stores = {split: store_of(task, split, folder / "cache") for split in ("train", "valid")}
    now = {"base": task.fingerprint(), **{name: store.digest for name, store in stores.items()}}
    name, rows = task.earlier_encoding_ids()[version], {name: task.rows(name) for name in stores}
    began = {split: content_of_rows(lambda split=split: rows[split], name, split) for split in rows}
    began = {"base": now["base"], **{split: digest for split, (digest, _) in began.items()}}
    path = planned.folder / "data.json"
    path.write_text(json.dumps({"identity": began}))
    assert not {*began.values()} & {stores["train"].digest, stores["valid"].digest}
    with kernels_of([planned], Options(tmp_path)):
        assert check_identity(planned, task, stores, None, places=task.places) == now
    assert json.loads(path.read_text())["identity"] == now
    written = json.dumps({"identity": {**began, "train": "0" * 64}})
    path.write_text(written)
    with refused("run_changed", key="train", was=re.compile("'0000")):
        check_identity(planned, task, stores, None, places=task.places)
    assert path.read_text() == written
