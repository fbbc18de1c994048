"""Texts that are made together are those that are made alone, and pieces add up to them."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.bases import OF_TASK, VOCABULARY
from tests.families import END, PAD, base, ids_of
from tests.wording import refused
from trainer.models.generation.texts import GrowingText, chance_of, grown, unsure
from trainer.protocol.abilities import Prediction, Search
from trainer.tasks.continuation import continuations, predict

LETTERS = "".join(map(chr, range(0x100, 0x100 + VOCABULARY)))
ASKED: list[dict[str, Any]] = [
    {"max_tokens": 9, "temperature": None},
    {"max_tokens": 30, "temperature": 1.0, "seed": 2},
    {"max_tokens": 1, "temperature": None},
    {"max_tokens": 12, "temperature": 0.7, "seed": 4, "top_p": 0.8},
]
LENGTHS = [11, 3, 7, 1]


class Tokenizer:
    """A letter for each id."""

    def decode(self, ids: list[int], **_: bool) -> str:
        return "".join(LETTERS[token] for token in ids)


TASK = SimpleNamespace(tokenizer=Tokenizer(), pad=PAD, ends=[END])
PROMPTS = ids_of(LENGTHS, 3)


def begun(model: Any, prompt: list[int], asked: dict[str, Any], **more: Any) -> GrowingText:
    how = {name: one for name, one in asked.items() if name != "max_tokens"}
    row = {"ids": prompt, "is_turn": False}
    [text] = continuations(
        TASK, model, row, Search(**how), max_tokens=asked["max_tokens"], is_told=True, **more
    )
    return text


@torch.inference_mode()
def made(
    model: Any, asked: list[dict[str, Any]], prompts: list[list[int]], stop: str = ""
) -> list[tuple[str, Any]]:
    """(text, its end) of each, put together from their pieces. stop: ends the first."""
    texts = [begun(model, prompt, one) for prompt, one in zip(prompts, asked, strict=True)]
    texts[0].stops = [stop] if stop else []
    told, ends = [""] * len(texts), [None] * len(texts)
    for number, piece in grown(model, texts, pad=PAD):
        assert ends[number] is None, "nothing comes after the end"
        if "finish" in piece:
            ends[number] = piece
        else:
            told[number] += piece["text"]
    assert told == [text.whole().text for text in texts]
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
    prompt = torch.tensor([PROMPTS[0]])
    want = model.generate(prompt, max_new_tokens=9, do_sample=False, eos_token_id=END)
    ids = [token for token in want[0, prompt.shape[1] :].tolist() if token != END]
    assert made(model, ASKED[:1], PROMPTS[:1])[0][0] == TASK.tokenizer.decode(ids)


def test_a_stop_text_ends_its_own_text_alone() -> None:
    model = base("causal_lm", "gpt_bigcode")
    asked = [ASKED[1] for _ in PROMPTS]
    plain = made(model, asked, PROMPTS)
    stop = plain[0][0][2:4]
    stopped = made(model, asked, PROMPTS, stop)
    assert stopped[0][0] == plain[0][0].partition(stop)[0]
    assert stopped[0][1]["finish"] == "stop"
    assert stopped[1:] == plain[1:]


def test_a_text_ends_at_each_of_several_tokens_and_says_why() -> None:
    model = base("causal_lm", "gpt_bigcode")
    [(plain, end)] = made(model, ASKED[:1], PROMPTS[:1])
    assert (len(plain), end["finish"], end["tokens"]) == (9, "length", 9)
    text = begun(model, PROMPTS[0], ASKED[0])
    text.ends = [END, LETTERS.index(plain[4])]
    with torch.inference_mode():
        *_, (_, last) = grown(model, [text], pad=PAD)
    first = plain.index(plain[4])
    assert text.text == plain[:first]
    assert last == {"finish": "stop", "prompt_tokens": LENGTHS[0], "tokens": first}


def test_several_draws_of_a_prompt_differ_and_come_again_with_their_seed() -> None:
    model = base("causal_lm", "gpt_bigcode")
    row, search = {"ids": PROMPTS[0], "is_turn": False}, Search(num_answers=3, temperature=1.0)
    drawn: list[list[str]] = []
    for _ in range(2):
        texts = continuations(TASK, model, row, search, max_tokens=9)
        with torch.inference_mode():
            assert all("text" not in piece for _, piece in grown(model, texts, pad=PAD))
        drawn.append([text.whole().text for text in texts])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 3
    seeds = {chance_of(seed, ids, 0).initial_seed() for seed in (1, 2) for ids in PROMPTS[:2]}
    assert len(seeds) == 4


def test_draws_come_from_the_likeliest_tokens_that_have_the_share() -> None:
    model = base("causal_lm", "gpt_bigcode")
    [(greedy, _)] = made(model, ASKED[:1], PROMPTS[:1])
    narrow = {**ASKED[0], "temperature": 1.0, "top_p": 1e-6}
    assert made(model, [narrow], PROMPTS[:1])[0][0] == greedy


@pytest.mark.parametrize(
    "how",
    [{"temperature": 1.0, "top_p": 0.0}, {"temperature": 1e-30}, {"temperature": 5e-324}],
    ids=str,
)
def test_draws_at_the_edge_choose_the_likeliest_tokens(how: dict[str, float]) -> None:
    model = base("causal_lm", "gpt_bigcode")
    [(greedy, _)] = made(model, ASKED[:1], PROMPTS[:1])
    assert made(model, [{**ASKED[0], **how}], PROMPTS[:1])[0][0] == greedy


def test_as_many_texts_are_drawn_in_one_forward_as_there_are_rows() -> None:
    model = base("causal_lm", "gpt_bigcode")
    rows = [{"ids": prompt, "is_turn": False} for prompt in PROMPTS[:2]]
    how = Prediction(Search(num_answers=5, temperature=1.0), max_tokens=4)
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, given: sizes.append(len(given["input_ids"])), with_kwargs=True
    )
    task = SimpleNamespace(**vars(TASK), opening=[])
    try:
        together = predict(task, SimpleNamespace(base=model), rows, how)  # type: ignore
        alone = [predict(task, SimpleNamespace(base=model), [row], how)[0] for row in rows]  # type: ignore
    finally:
        hook.remove()
    assert max(sizes) == 2
    assert together == alone
    assert [len(one["n_best"]) for one in together] == [5, 5]


def test_log_probabilities_are_those_of_the_logits_that_a_token_was_chosen_by() -> None:
    model = base("causal_lm", "gpt_bigcode")
    text = begun(model, PROMPTS[0], ASKED[0], num_likeliest=2)
    with torch.inference_mode():
        list(grown(model, [text], pad=PAD))
        logits = model(torch.tensor([[*PROMPTS[0], *text.made]])).logits[0, LENGTHS[0] - 1 : -1]
    want = logits.log_softmax(-1).topk(2)
    got = torch.tensor([[value for _, value in one.likeliest] for one in text.chosen])
    torch.testing.assert_close(got, want.values, atol=1e-5, rtol=0)
    assert [one.token for one in text.chosen] == text.made == want.indices[:, 0].tolist()
    assert [one.logprob for one in text.chosen] == [one.likeliest[0][1] for one in text.chosen]


def test_a_text_ends_where_the_positions_of_its_model_do() -> None:
    model = base("causal_lm", "gpt_bigcode")  # 128 positions
    assert begun(model, [5] * 120, {**ASKED[0], "max_tokens": 50}).most == 8
    with refused("prompt_length_wanted", count=128, most=127):
        begun(model, [5] * 128, ASKED[0])
    with refused("prompt_length_wanted", count=0):
        begun(model, [], ASKED[0])


def test_letters_that_may_become_a_stop_text_are_held_back() -> None:
    assert unsure("It is", ["s over"]) == 1
    assert unsure("It is", ["is it", "t is i"]) == 4
    assert unsure("It is", []) == 0
    assert unsure("It \ufffd\ufffd", ["x"]) == 2
    assert unsure("It \ufffd\ufffd", [" \u00e9"]) == 3
    assert unsure("It is.\n", [], closing=".\n") == 2
    assert unsure("It is.\n\n", ["s"], closing=".\n") == 0


def test_a_long_stop_text_takes_no_memory_of_its_square() -> None:
    stop = "a" * 10_000
    tracemalloc.start()
    try:
        assert unsure("b" + stop[1:], [stop]) == len(stop) - 1
        assert tracemalloc.get_traced_memory()[1] < 10 * len(stop)
    finally:
        tracemalloc.stop()
