"""Samples as token ids: their log-probabilities against a forward pass over the whole text."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.wording import refused, says
from trainer.commands.texts import exchanged
from trainer.commands.texts.samples import sample
from trainer.commands.texts.wishes import WrongWish

PROMPT = [5, 6, 7, 8]
TASK = SimpleNamespace(ends=[0], pad=0, tokenizer=None)


@pytest.fixture(scope="module")
def base() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    return GPT2LMHeadModel(config).eval()


def question(**changes: Any) -> dict[str, Any]:
    usual = {"num_samples": 2, "max_tokens": 5, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
    usual |= {"prompt": PROMPT, "seed": 1, "stop_tokens": [], "stops": [], "topk": 0}
    usual |= {"has_logprobs": False, "first": 1, "topk_prompt": 0, "targets": []}
    return {**usual, "alternatives": 0, **changes}


def logprobs_of(base: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return base(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)


def test_each_token_has_its_own_logprob_and_the_same_seed_gives_the_same_bits(base: Any) -> None:
    answer = sample(TASK, base, question(topk=3))
    assert sample(TASK, base, question(topk=3)) == answer
    assert sample(TASK, base, question(seed=2))["sequences"] != answer["sequences"]
    one, other = answer["sequences"]
    assert one["tokens"] != other["tokens"]
    whole = logprobs_of(base, PROMPT + one["tokens"])
    for place, (token, logprob) in enumerate(zip(one["tokens"], one["logprobs"], strict=True)):
        row = whole[len(PROMPT) - 1 + place]
        assert logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert [top for top, _ in one["topk"][place]] == row.topk(3).indices.tolist()


def test_a_token_that_ends_a_sample_is_part_of_it(base: Any) -> None:
    free = sample(TASK, base, question(num_samples=1))["sequences"][0]
    assert (len(free["tokens"]), free["finish"]) == (5, "length")
    asked = question(num_samples=1, stop_tokens=[free["tokens"][1]])
    stopped = sample(TASK, base, asked)["sequences"][0]
    count = free["tokens"].index(free["tokens"][1]) + 1
    assert (stopped["tokens"], stopped["finish"]) == (free["tokens"][:count], "stop")
    assert len(stopped["logprobs"]) == count


def test_the_likeliest_of_one_is_the_choice_without_chance(base: Any) -> None:
    greedy = sample(TASK, base, question(num_samples=1, temperature=0.0))["sequences"]
    assert sample(TASK, base, question(num_samples=1, top_k=1))["sequences"] == greedy


def test_what_is_asked_of_a_prompt_is_scored_behind_the_tokens_before_it(base: Any) -> None:
    how = {"has_logprobs": True, "first": 3, "topk_prompt": 2, "alternatives": 4}
    answer = sample(TASK, base, question(**how, targets=[[1, 9], [3, 8]]))
    whole = logprobs_of(base, PROMPT)
    own = [float(whole[place - 1, PROMPT[place]]) for place in (1, 2, 3)]
    assert answer["prompt_logprobs"][:3] == [None, None, None]
    assert answer["prompt_logprobs"][3] == pytest.approx(own[2], abs=1e-5)
    assert answer["topk_prompt"][:3] == [None, None, None]
    assert len(answer["topk_prompt"][3]) == 2
    assert answer["targets"] == pytest.approx([float(whole[0, 9]), own[2]], abs=1e-5)
    assert [len(row) for row in answer["alternatives"]] == [4, 4, 4]


def test_alternatives_at_a_tiny_temperature_are_the_likeliest_tokens(base: Any) -> None:
    """Their quotients would leave the numbers of 32 bits, and end the process of all tenants."""
    asked = {"num_samples": 1, "max_tokens": 1, "alternatives": 2}
    cold = sample(TASK, base, question(**asked, temperature=1e-42))
    assert (
        cold["alternatives"]
        == sample(TASK, base, question(**asked, temperature=0.0))["alternatives"]
    )


@pytest.mark.parametrize("wish", [{"num_samples": 1}, {"temperature": 0.5, "alternatives": 2}])
def test_a_model_that_gives_no_numbers_is_told_and_not_drawn_from(
    base: Any, wish: dict[str, Any]
) -> None:
    """The process that draws serves all runs on a base: no run may end it."""
    broken = copy.deepcopy(base)
    with torch.no_grad():
        broken.lm_head.weight.fill_(3e38)
    with refused("sample_not_finite"):
        sample(TASK, broken, question(**wish))


def test_a_question_for_which_there_is_no_memory_ends_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would be asked again for two hours, and end the process of everybody each time."""

    def full(task: Any, base: Any, one: dict[str, Any]) -> dict[str, Any]:
        if one["num_samples"] == 128:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"sequences": []}

    options: Any = None
    worker = exchanged.ExchangedWeights({}, options)
    model = SimpleNamespace(task=TASK, model=SimpleNamespace(base=None))
    monkeypatch.setattr(worker, "_with", lambda weights: model)
    monkeypatch.setattr(exchanged, "sample", full)
    asked = [{"weights": "", "sample": question(num_samples=count)} for count in (128, 2)]
    large, small = worker.answers(asked)
    assert (large["of"], large["param"]) == (0, "num_samples")
    says("sample_memory", large["error"], count=128, length=len(PROMPT))
    assert small == {"of": 1, "sequences": []}


def test_tokens_beyond_the_vocabulary_are_refused(base: Any) -> None:
    with pytest.raises(WrongWish):
        sample(TASK, base, question(prompt=[40]))
