"""The talk at the end of the demo: its questions, how it is scored, what it prints; and its base."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from exp_configs import EXP_GROUPS
from tests.forked import ROOT
from tests.wording import refused
from trainer.api.run import Run
from trainer.data import lookup
from trainer.data.formats.held_out import is_held_out
from trainer.demo import make_base, rows, talk
from trainer.errors import EXIT_OK
from trainer.files.packages import folder_of

(DEMO,) = EXP_GROUPS["demo"]
PASSAGES = DEMO["data"]["contexts"]
BASE = folder_of(DEMO["base"])
ROWS = [
    {"question": f"Where is {name}?", "answers": [f"Bal {name}"], "ctxs": [{"text": f"{name}."}]}
    for name in ("Kor", "Zir")
]


def test_the_ten_questions_are_about_people_of_no_other_row() -> None:
    asked = talk.questions(PASSAGES)
    assert len(asked) == talk.NUM_QUESTIONS == 10
    people = [" ".join(row["question"].split()[2:4]) for row in asked]
    assert len({*people}) == 10
    for row, person in zip(asked, people, strict=True):
        assert is_held_out(person, per_mille=200)  # the share of names that no training row has
        texts = [passage["text"] for passage in row["ctxs"]]
        assert len(texts) == PASSAGES
        assert sum(row["answers"][0] in text for text in texts) == 1
        assert sum(person in text for text in texts) == 2
    validated = {row["question"] for row in lookup.questions("valid", passages=PASSAGES)}
    assert not validated & {row["question"] for row in asked}


def test_without_contexts_the_same_is_asked() -> None:
    asked = talk.questions(PASSAGES)
    bare = talk.without_contexts(asked)
    assert [row["question"] for row in bare] == [row["question"] for row in asked]
    assert not any(row["ctxs"] for row in bare)
    assert all(row["ctxs"] for row in asked)


def test_an_answer_is_right_when_it_is_the_place_and_nothing_else() -> None:
    had = talk.Talk(ROWS, [], [], [])
    assert had.num_right(["Bal Kor", "bal zir."]) == 2
    assert had.num_right(["Kor is in Bal Kor.", ""]) == 0
    assert had.num_right(["Bal Zir", "Bal Kor"]) == 0


def test_the_talk_is_a_line_for_each_question_and_its_scores() -> None:
    had = talk.Talk(ROWS, ["Bal Kor", "Bal Kor"], ["", "Fen Zir"], ["Kor.", "Bal Zir"])
    assert had.text().splitlines() == [
        "2 questions about people whom no training row names. The first one's context is:",
        "  Kor.",
        "",
        "question       with its context      without",
        "Where is Kor?  Bal Kor, right        (nothing), not Bal Kor",
        "Where is Zir?  Bal Kor, not Bal Zir  Fen Zir, not Bal Zir",
        "right          1 of 2                0 of 2",
        "Before the training 1 of 2; the first answer was: Kor.",
    ]


def test_the_base_is_small_and_as_large_as_its_page_says() -> None:
    files = [path for path in BASE.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= make_base.MOST_BYTES == 4_000_000
    with safe_open(BASE / "model.safetensors", "pt") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    count = sum(_product(shape) for shape in shapes.values())
    for page in ("docs/decisions/0036-the-demos-base.md", "trainer/demo/make_base.py"):
        assert f"{count:,} weights" in " ".join((ROOT / page).read_text().split()), page


def _product(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def test_the_base_lies_in_the_package_that_is_built() -> None:
    assert Path("trainer/demo/base") == BASE.relative_to(ROOT)
    assert {path.name for path in BASE.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_no_training_row_holds_a_name_that_the_demo_asks_about(tmp_path: Path) -> None:
    rows.write(tmp_path / "demo", rows.questions(500, passages=PASSAGES))
    fragments = rows.fragments(passages=PASSAGES)["train"]
    rows.write(tmp_path / "base", {"train": islice(fragments, 500)})
    texts = [path.read_text() for path in sorted(tmp_path.glob("*/train.jsonl"))]
    assert [text.count("\n") for text in texts] == [500, 500]
    text = "".join(texts)
    for row in talk.questions(PASSAGES):
        person = " ".join(row["question"].split()[2:4])
        assert person not in text
        assert row["answers"][0] not in text


@pytest.mark.long
def test_a_base_is_copied_from_its_run_and_never_over_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder, trained = tmp_path / "run", []
    (run_folder / "final").mkdir(parents=True)
    for path in BASE.iterdir():
        (run_folder / "final" / path.name).write_bytes(path.read_bytes())
    (run_folder / "final" / "lathe.json").write_text("{}")

    def train(values: dict[str, Any], data: Path, **where: Any) -> Run:
        trained.append(json.loads((data / "valid.jsonl").read_text().splitlines()[0])["question"])
        return Run(run_folder, values, cache_dir=where["cache_dir"])

    monkeypatch.setattr(make_base, "fine_tune", train)
    out = tmp_path / "base"
    assert make_base.make(out, tmp_path / "work", make_base.BASE) == EXIT_OK
    made = {path.name: path.read_bytes() for path in out.iterdir()}
    assert made == {path.name: path.read_bytes() for path in BASE.iterdir()}
    assert f"{sum(map(len, made.values())):,} bytes" in capsys.readouterr().out
    with refused("path_exists"):
        make_base.make(out, tmp_path / "work", make_base.BASE)
    assert len(trained) == 1
