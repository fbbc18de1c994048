"""The template strings equal the published ones, character for character."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.parity.recordings import file_params
from trainer.tasks.cross_attention.text import templates
from trainer.tasks.cross_attention.text.templates import (
    Template,
    chunk_texts,
    context_text,
    in_context_prompt,
    prompt,
)

_FAMILIES: dict[str, Template] = {
    "gptbigcode_and_tulu": "chat",
    "llama": "chat",
    "mistral": "mistral",
}


@pytest.fixture(scope="module", params=file_params("cross_attention", "text/formats.json"))
def formats(request: pytest.FixtureRequest) -> dict[str, Any]:
    return json.loads(request.param.read_text(encoding="utf-8"))


def _family_strings(example: dict[str, Any], name: str) -> dict[str, Any]:
    family, chunked, answered = name.split("|")
    template, question, contexts = _FAMILIES[family], example["question"], example["contexts_list"]
    useful = [
        text for text, wanted in zip(contexts, example["useful_contexts"], strict=True) if wanted
    ]
    answer = example["answer"] if answered == "answered=True" else ""
    if chunked == "chunked=True":
        bare = chunk_texts(question, contexts, template, question_on_context=False)
        asked: Any = chunk_texts(question, contexts, template, question_on_context=True)
        target = context_text(question, useful, template, question_on_context=False)
    else:
        bare = context_text(question, contexts, template, question_on_context=False)
        asked = context_text(question, contexts, template, question_on_context=True)
        target = bare  # the published context target of an unchunked row is all its contexts
    return {
        "self_input_str": prompt(question, template) + answer,
        "no_answer_self_input_str": prompt(question, template),
        "cross_input_str": bare,
        "cross_input_str_with_question": asked,
        "raw_answer": answer,
        "useful_contexts": target,
    }


def _other_strings(example: dict[str, Any]) -> dict[str, dict[str, str]]:
    question, contexts = example["question"], example["contexts_list"]
    return {
        "early_colon|answered=True": {
            "self_input_str": prompt(question, "plain") + example["answer"],
            "cross_input_str": context_text(question, contexts, "plain", question_on_context=False),
        },
        "tulu_prompt_baseline": {"input_str": in_context_prompt(question, contexts, "tulu")},
        "llama_chat_prompt_baseline": {
            "input_str": in_context_prompt(question, contexts, "llama_chat")
        },
    }


def test_every_published_string_is_reproduced(formats: dict[str, Any]) -> None:
    others = _other_strings(formats["example"])
    ours = {
        name: others[name] if name in others else _family_strings(formats["example"], name)
        for name in formats["formats"]
    }
    assert ours == formats["formats"]


@pytest.mark.parametrize("template", ["chat", "plain", "mistral"])
def test_a_chunk_reads_like_a_context_of_its_own(template: Template) -> None:
    chunks = chunk_texts("q", ["a", "b"], template, question_on_context=True)
    assert chunks == [
        context_text("q", [one], template, question_on_context=True) for one in ("a", "b")
    ]


def test_the_plain_template_can_carry_the_question_too() -> None:
    assert (
        context_text("who", ["a", "b"], "plain", question_on_context=True)
        == "question: who context: a b"
    )


def test_a_bare_template_is_the_texts_themselves_and_its_answer_is_read_back() -> None:
    assert prompt("Who?", "bare") == "Who?"
    assert context_text("Who?", ["a", "b"], "bare", question_on_context=False) == "a b"
    assert context_text("Who?", ["a", "b"], "bare", question_on_context=True) == "Who? a b"
    assert templates.answer("me", "bare") == " me"
    assert templates.answered(" me", "bare") == "me"
    assert templates.answer(" me", "plain") == templates.answered(" me", "plain") == " me"
