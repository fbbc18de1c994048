"""Questions and passages tokenised apart are the prompts tokenised whole; targets and answers as
published.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.facts import write_facts
from trainer.data.padding import flat, unflat
from trainer.data.vocabulary import load_tokenizer
from trainer.protocol.task import DRAW
from trainer.tasks.fid.config import Data
from trainer.tasks.fid.tokens import Prompts, drawn_target

PUBLIC = Path(__file__).resolve().parents[3] / "shared" / "data" / "tokenizers"
NAMES = ("t5", "starcoder", "facts")
# What could grow together over the cut, be eaten at it, or be read as a special token.
AWKWARD = [
    "  ",
    " ",
    "\n",
    "\r\n",
    "\t",
    "\u00a0",
    "\u3000",
    "\u200b",
    "\u200d",
    "\u0301",
    "\u0600",
    "\ufb01",
    "\u2581",
]
AWKWARD += [
    "</s>",
    "<pad>",
    "<unk>",
    "<extra_id_0>",
    "<extra_id_",
    "<|endoftext|>",
    "'s",
    "title:",
    "\U0001f3f3\ufe0f",
]
texts = st.lists(st.one_of(st.sampled_from(AWKWARD), st.text(max_size=6)), max_size=5).map("".join)
DATA = Data(source="stdlib_docs", contexts=9, passage_tokens=10**6)


def data(**changes: Any) -> Data:
    return DATA.model_copy(update=changes)


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folders = {name: PUBLIC / name for name in NAMES if (PUBLIC / name).is_dir()}
    folders["facts"] = write_facts(tmp_path_factory.mktemp("facts")) / "tokenizer"
    return {
        name: load_tokenizer(str(path), data_path=None, cache_dir=path)
        for name, path in folders.items()
    }


@pytest.fixture(params=NAMES)
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Any]) -> Any:
    if request.param not in tokenizers:
        pytest.skip(f"no {PUBLIC / request.param}")
    return tokenizers[request.param]


@pytest.fixture
def sentencepiece(tokenizers: dict[str, Any]) -> Any:
    if "t5" not in tokenizers:
        pytest.skip(f"no {PUBLIC / 't5'}")
    return tokenizers["t5"]


def whole(tokenizer: Any, text: str) -> list[int]:
    return tokenizer([text], add_special_tokens=False)["input_ids"][0]


# Prompts
# --------------------------------------------------------------------------------------------------


@given(question=texts, title=texts, text=texts)
@example(question="a  ", title="", text=" x ")
@example(question="ends in </s>", title="<extra_id_0>", text="</s>")
@example(question="", title="", text="")
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_question_and_a_passage_apart_have_the_ids_of_the_whole_prompt(
    question: str, title: str, text: str, tokenizer: Any
) -> None:
    prompts = Prompts(tokenizer, DATA)
    apart = [*prompts.question(question), *prompts.passages([{"title": title, "text": text}])[0]]
    assert apart == whole(tokenizer, f"question: {question} title: {title} context: {text}")


def test_a_passage_without_a_title_has_an_empty_one(tokenizer: Any) -> None:
    prompts = Prompts(tokenizer, DATA)
    untitled, titled = prompts.passages([{"text": "x"}, {"title": "", "text": "x"}])
    assert untitled == titled
    assert [*prompts.question("q"), *untitled] == whole(tokenizer, "question: q title:  context: x")


def test_passages_keep_their_order_and_are_cut_one_by_one(tokenizer: Any) -> None:
    passages = [{"title": "a", "text": "one two three four five"}, {"title": "b", "text": "six"}]
    full, cut = (
        Prompts(tokenizer, data(passage_tokens=most)).passages(passages) for most in (1000, 7)
    )
    assert [len(ids) for ids in cut] == [min(7, len(ids)) for ids in full]
    assert cut == [ids[:7] for ids in full]


def test_no_passages_are_no_passages(tokenizer: Any) -> None:
    assert Prompts(tokenizer, DATA).passages([]) == []


def test_a_prompt_holds_no_end_of_its_own(tokenizer: Any) -> None:
    prompts = Prompts(tokenizer, DATA)
    assert prompts.end not in [
        *prompts.question("who?"),
        *prompts.passages([{"title": "t", "text": "x."}])[0],
    ]


# Targets
# --------------------------------------------------------------------------------------------------


def test_a_target_is_its_text_and_one_end(tokenizer: Any) -> None:
    targets = Prompts(tokenizer, DATA).targets({"answers": ["2,718", "seven"]})
    assert targets == [
        [*whole(tokenizer, text), tokenizer.eos_token_id] for text in ("2,718", "seven")
    ]


def test_a_given_target_stands_before_all_answers(tokenizer: Any) -> None:
    prompts = Prompts(tokenizer, DATA)
    assert prompts.targets({"target": "b", "answers": ["a", "b"]}) == prompts.targets(
        {"answers": ["b"]}
    )


def test_a_row_without_answers_has_no_targets(tokenizer: Any) -> None:
    assert Prompts(tokenizer, DATA).targets({"answers": []}) == []


def test_a_target_that_is_cut_loses_its_end_and_one_that_fits_keeps_it(tokenizer: Any) -> None:
    row = {"answers": ["one two three four five six seven"]}
    [full] = Prompts(tokenizer, DATA).targets(row)
    for most in (len(full) - 1, len(full), len(full) + 1):
        assert Prompts(tokenizer, data(target_tokens=most)).targets(row) == [full[:most]]
    assert full[-1] == tokenizer.eos_token_id


def test_evaluation_takes_the_first_target_and_training_the_drawn_one() -> None:
    row: dict[str, Any] = flat([[5], [6, 7], [8]], "targets")
    assert drawn_target(row) == [5]
    assert [drawn_target({**row, DRAW: [draw]}) for draw in (0, 1, 2, 3, 10**18 + 1)] == [
        [5],
        [6, 7],
        [8],
        [5],
        [8],
    ]


def test_a_row_without_targets_draws_none() -> None:
    assert list(drawn_target(flat([], "targets"))) == []
    assert list(drawn_target({**flat([], "targets"), DRAW: [4]})) == []


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=6))
def test_lists_come_back_from_their_two_fields(lists: list[list[int]]) -> None:
    assert unflat(flat(lists, "x"), "x") == lists


# Answers
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("5 , 000", "5, 000"),
        ("it 's done .", "it's done."),
        ("I do n't know", "I don't know"),
        ("why ?", "why?"),
    ],
)
def test_answers_lose_the_spaces_that_published_tokenizers_took(
    text: str, clean: str, sentencepiece: Any
) -> None:
    ids = whole(sentencepiece, text)
    assert Prompts(sentencepiece, DATA).answer(ids).text == clean
    assert Prompts(sentencepiece, data(clean_up_spaces=False)).answer(ids).text == text


def test_an_answer_stops_at_its_end_and_shows_no_special_token(tokenizer: Any) -> None:
    prompts = Prompts(tokenizer, DATA)
    seven = whole(tokenizer, "seven")
    assert prompts.answer([*seven, prompts.end, *seven, prompts.end]).text == "seven"
    assert prompts.answer([prompts.end]).text == ""
    assert prompts.answer([]).text == ""
    pad = tokenizer.pad_token_id
    if pad is not None:
        assert prompts.answer([*seven, pad, pad]).text == "seven"
