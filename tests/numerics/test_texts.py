"""Texts that are made together are those that are made alone, and pieces add up to them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.bases import OF_TASK, VOCABULARY
from tests.families import END, PAD, base, ids_of
from trainer.models.texts import GrowingText, begun, grown, unsure

LETTERS = "".join(map(chr, range(0x100, 0x100 + VOCABULARY)))
ASKED: list[dict[str, Any]] = [
    {"max_tokens": 9, "temperature": 0, "seed": 1, "stop": []},
    {"max_tokens": 30, "temperature": None, "seed": 2, "stop": []},
    {"max_tokens": 1, "temperature": 0, "seed": 3, "stop": []},
    {"max_tokens": 12, "temperature": 0.7, "seed": 4, "stop": []},
]
LENGTHS = [11, 3, 7, 1]


class Tokenizer:
    """A letter for each id."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [LETTERS.index(letter) for letter in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join(LETTERS[token] for token in ids)


TASK = SimpleNamespace(tokenizer=Tokenizer(), pad=PAD, end=END)
PROMPTS = [TASK.tokenizer.decode(ids) for ids in ids_of(LENGTHS, 3)]


@torch.inference_mode()
def made(model: Any, asked: list[dict[str, Any]], prompts: list[str]) -> list[tuple[str, Any]]:
    """(text, its end) of each, put together from their pieces."""
    texts = [begun(TASK, model, prompt, one) for prompt, one in zip(prompts, asked, strict=True)]
    told, ends = [""] * len(texts), [None] * len(texts)
    for number, piece in grown(TASK, model, texts):
        assert ends[number] is None, "nothing comes after the end"
        if "finish" in piece:
            ends[number] = piece
        else:
            told[number] += piece["text"]
    return list(zip(told, ends, strict=True))


@pytest.mark.parametrize("family", sorted(OF_TASK["causal_lm"]))
def test_texts_made_together_are_those_made_alone(family: str) -> None:
    model = base("causal_lm", family)
    together = made(model, ASKED, PROMPTS)
    alone = [made(model, [one], [prompt])[0] for prompt, one in zip(PROMPTS, ASKED, strict=True)]
    assert together == alone
    counts = [end["tokens"] for _, end in together]
    assert counts[2] == 1
    assert len(set(counts)) > 2, "they end at different steps"
    assert [end["prompt_tokens"] for _, end in together] == LENGTHS


def test_a_text_alone_is_what_transformers_generates() -> None:
    model = base("causal_lm", "gpt_bigcode")
    prompt = torch.tensor([TASK.tokenizer(PROMPTS[0], add_special_tokens=False)["input_ids"]])
    want = model.generate(prompt, max_new_tokens=9, do_sample=False, eos_token_id=END)
    ids = [token for token in want[0, prompt.shape[1] :].tolist() if token != END]
    assert made(model, ASKED[:1], PROMPTS[:1])[0][0] == TASK.tokenizer.decode(ids)


def test_a_stop_text_ends_its_own_text_alone() -> None:
    model = base("causal_lm", "gpt_bigcode")
    asked = [{**ASKED[1], "temperature": 1.0} for _ in PROMPTS]
    plain = made(model, asked, PROMPTS)
    stop = plain[0][0][2:4]
    asked[0] = {**asked[0], "stop": [stop]}
    stopped = made(model, asked, PROMPTS)
    assert stopped[0][0] == plain[0][0].partition(stop)[0]
    assert stopped[0][1]["finish"] == "stop"
    assert stopped[1:] == plain[1:]


def test_a_text_ends_where_the_positions_of_its_model_do() -> None:
    model = base("causal_lm", "gpt_bigcode")  # 128 positions
    text: GrowingText = begun(TASK, model, LETTERS[5] * 120, {**ASKED[0], "max_tokens": 50})
    assert text.most == 8


def test_letters_that_may_become_a_stop_text_are_held_back() -> None:
    assert unsure("It is", ["s over"]) == 1
    assert unsure("It is", ["is it", "t is i"]) == 4
    assert unsure("It is", []) == 0
    assert unsure("It \ufffd\ufffd", ["x"]) == 2
    assert unsure("It \ufffd\ufffd", [" \u00e9"]) == 3
