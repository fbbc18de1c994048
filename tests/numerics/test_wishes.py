"""What a request asks of a language model changes its text as it says: the bias and the penalties of
tokens, a schema, tools, an echo.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.facts import LLAMA, write_facts
from tests.numerics.test_ways_to_generate import QUESTION, exported, values_of
from tests.unit.test_calls import HERMES
from tests.wording import says
from trainer.commands.answer import answers
from trainer.evaluation.predict import OpenExport
from trainer.models.generation import grammar
from trainer.models.generation.sampling import Adjustment, draw
from trainer.models.generation.texts import GrowingText

ASKED: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "seed": 1, "stop": []}
MESSAGES = [{"role": "user", "content": QUESTION}]
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}
FUNCTION = {"name": "look_up", "parameters": COLOUR}
TOOLS = [{"type": "function", "function": FUNCTION}]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpenExport]:
    """By its template: a random model. "texts" has none."""
    folder = write_facts(tmp_path_factory.mktemp("facts"))
    # it lists no tools, only says that there are some
    (folder / "hermes.jinja").write_text("{% if tools %}{{ 'Tools. ' }}{% endif %}" + HERMES)
    made: dict[str, OpenExport] = {}
    for kind in ("texts", "hermes"):
        values = values_of("texts" if kind == "texts" else "chatml", folder)
        if kind == "hermes":
            config = LLAMA["config"] | {"max_position_embeddings": 512}
            values = values_of("chatml", folder, base={**LLAMA, "config": config})
            values["data"] |= {"chat_template": "hermes.jinja"}
        made[kind] = exported(values, folder, tmp_path_factory.mktemp("export") / kind)[2]
    return made


def asked(model: OpenExport, **more: Any) -> tuple[str, dict[str, Any]]:
    """(the text, its last piece)"""
    pieces = list(answers(model, [{**ASKED, **more}]))
    return "".join(piece.get("text", "") for piece in pieces), pieces[-1]


def tokens_of(model: OpenExport, text: str) -> list[int]:
    return model.task.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_adjusted_logits_are_those_of_the_formula() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0])
    changed = Adjustment({3: -5.0}, frequency_penalty=0.5, presence_penalty=0.25).of(
        logits, [1, 1, 2]
    )
    assert changed.tolist() == [1.0, 2.0 - 2 * 0.5 - 0.25, 3.0 - 0.5 - 0.25, -1.0]
    assert logits.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert draw(changed, temperature=1.0, top_p=0.0, chance=torch.Generator()) == 2


def test_a_bias_forbids_a_token_and_a_penalty_ends_repetition(
    opened: dict[str, OpenExport],
) -> None:
    model = opened["texts"]
    plain = asked(model, prompt=QUESTION)[0]
    with torch.no_grad():
        ids = torch.tensor([model.task.prompt_ids({"text": QUESTION}, "here")])
        first = int(model.model.base(input_ids=ids).logits[0, -1].argmax())
    for value, is_other in ((-100, True), (0, False)):
        text = asked(model, prompt=QUESTION, logit_bias={str(first): value})[0]
        assert (text != plain) == is_other
    # a bias of 8 makes a token the likeliest until three times the penalties have made up for it
    wanted = {str(tokens_of(model, "a")[0]): 8}
    assert asked(model, prompt=QUESTION, logit_bias=wanted)[0] == "a" * ASKED["max_tokens"]
    penalties = {"frequency_penalty": 2.0, "presence_penalty": 2.0}
    text, _ = asked(model, prompt=QUESTION, logit_bias=wanted, **penalties)
    assert text.startswith("aa")
    assert text.count("a") < ASKED["max_tokens"]
    _, wrong = asked(model, prompt=QUESTION, logit_bias={"99999": 1})
    assert wrong["param"] == "logit_bias"
    says("token_out", wrong["error"], token=99999)


def test_an_echo_repeats_the_prompt_and_scores_it_as_one_forward_does(
    opened: dict[str, OpenExport],
) -> None:
    model = opened["texts"]
    ids = tokens_of(model, QUESTION)
    text, last = asked(model, prompts=[ids], echo=True, logprobs=1, max_tokens=0)
    assert text == QUESTION
    assert (last["finish"], last["prompt_tokens"], last["tokens"]) == ("length", len(ids), 0)
    told = last["logprobs"]
    assert "".join(one["token"] for one in told) == QUESTION
    with torch.no_grad():
        logits = model.model.base(input_ids=torch.tensor([ids])).logits[0]
    want = logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    assert told[0]["logprob"] is None
    assert [one["logprob"] for one in told[1:]] == pytest.approx(want.tolist(), abs=1e-5)
    special = [model.task.end, *ids]  # what is repeated is what its tokens are together
    text, last = asked(model, prompts=[special], echo=True, logprobs=0, max_tokens=0)
    assert text == model.task.tokenizer.decode([model.task.end]) + QUESTION
    assert "".join(one["token"] for one in last["logprobs"]) == text
    whole, last = asked(model, prompts=[QUESTION], echo=True, logprobs=1, max_tokens=3)
    assert whole.startswith(QUESTION)
    assert len(last["logprobs"]) == len(ids) + last["tokens"]


def test_prompts_of_one_request_are_continued_each_as_if_alone(
    opened: dict[str, OpenExport],
) -> None:
    model = opened["texts"]
    texts = [QUESTION, "The attic", "Ada"]
    alone = [asked(model, prompt=text)[0] for text in texts]
    together = ["", "", ""]
    for piece in answers(model, [{**ASKED, "prompts": [tokens_of(model, text) for text in texts]}]):
        together[piece["choice"]] += piece.get("text", "")
    assert together == alone
    _, last = asked(model, prompts=[[1], [-1]])
    assert last["param"] == "prompt"
    says("token_out", last["error"], token=-1)


def test_log_probabilities_of_an_answer_without_a_token_are_none(
    opened: dict[str, OpenExport],
) -> None:
    model = opened["texts"]
    ends = {str(model.task.end): 100}
    text, last = asked(model, prompt=QUESTION, logit_bias=ends, logprobs=1)
    assert (text, last["finish"], last["tokens"], last["logprobs"]) == ("", "stop", 0, [])


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_an_answer_follows_its_schema_whatever_the_model_would_say(
    opened: dict[str, OpenExport], temperature: float
) -> None:
    pytest.importorskip("llguidance")
    model = opened["hermes"]
    how = {"messages": MESSAGES, "max_tokens": 80, "temperature": temperature}
    for seed in range(3):
        text, last = asked(model, schema=COLOUR, **{**how, "seed": seed})
        value = json.loads(text)
        assert (value.keys(), last["finish"]) == ({"colour", "sure"}, "stop")
    texts = ["", ""]  # each follows the grammar from its beginning
    for piece in answers(model, [{**ASKED, **how, "schema": COLOUR, "n": 2}, {**ASKED, **how}]):
        if piece["of"] == 0:
            texts[piece["choice"]] += piece.get("text", "")
    assert [json.loads(text).keys() for text in texts] == [value.keys()] * 2
    _, last = asked(model, schema=COLOUR, **{**how, "max_tokens": 2})
    assert last["finish"] == "length"
    _, last = asked(model, schema={"type": "strange"}, **how)
    assert last["param"] == "response_format"
    says("schema_beyond", last["error"])
    _, last = asked(model, schema={"$ref": "#"}, **how)  # no text fits it
    assert last["param"] == "response_format"
    says("schema_beyond", last["error"], reason="no text fits it")


def test_a_text_whose_grammar_has_failed_is_not_called_whole(
    opened: dict[str, OpenExport],
) -> None:
    pytest.importorskip("llguidance")
    task = opened["hermes"].task
    size = len(task.tokenizer)
    library, tokens = grammar._tokens_of(task.tokenizer, tuple(task.ends), size)
    for schema, want in (({"$ref": "#"}, "length"), ({"const": 7}, "stop")):
        matcher = library.LLMatcher(tokens, library.LLMatcher.grammar_from_json_schema(schema))
        text = GrowingText(
            prompt=[1],
            most=9,
            ends=task.ends,
            spell=task.tokenizer.decode,
            adjustment=Adjustment(grammar=grammar.Grammar(matcher, size)),
        )
        while not text.finish:
            text.take(text.next_token(torch.zeros(size), 0))
        assert text.finish == want


def test_a_call_follows_the_parts_that_its_schema_refers_to(
    opened: dict[str, OpenExport],
) -> None:
    pytest.importorskip("llguidance")
    part = {"type": "object", "additionalProperties": False, "required": ["colour"]}
    part |= {"properties": {"colour": {"$ref": "#/$defs/colour"}}}
    part |= {"$defs": {"colour": {"enum": ["red", "blue"]}}}
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": part}}]
    how = {"messages": MESSAGES, "tools": tools, "tool_choice": "required", "max_tokens": 80}
    _, last = asked(opened["hermes"], **how)
    (call,) = last["calls"]
    assert json.loads(call["arguments"])["colour"] in ("red", "blue")


def test_a_forced_call_is_one_of_the_tools_and_its_opening_is_counted_as_answer(
    opened: dict[str, OpenExport],
) -> None:
    pytest.importorskip("llguidance")
    model = opened["hermes"]
    how = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 80}
    _, free = asked(model, **{**how, "tool_choice": "auto"})
    assert (free["calls"], free["content"]) == ([], asked(model, **how)[0])
    for choice in ("required", "look_up"):
        _, last = asked(model, tool_choice=choice, **how)
        (call,) = last["calls"]
        assert call["name"] == "look_up"
        assert json.loads(call["arguments"]).keys() == {"colour", "sure"}
        assert (last["finish"], last["content"]) == ("tool_calls", "")
        assert last["prompt_tokens"] == free["prompt_tokens"]
    result = {"role": "tool", "tool_call_id": "a", "content": "dark"}
    said = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": call}]}
    _, last = asked(model, **{**how, "messages": [*MESSAGES, said, result]})
    assert last["prompt_tokens"] > free["prompt_tokens"]


def without(model: OpenExport, part: str, other: str, **more: Any) -> dict[str, Any]:
    """The last piece of an answer while the template has something else in place of a part."""
    tokenizer = model.task.chat.tokenizer
    template = tokenizer.chat_template
    assert part in template
    try:
        tokenizer.chat_template = template.replace(part, other)
        return asked(model, **more)[1]
    finally:
        tokenizer.chat_template = template


def test_what_a_template_does_not_write_is_refused_by_name(opened: dict[str, OpenExport]) -> None:
    model = opened["hermes"]
    last = without(model, "if tools", "if false", messages=MESSAGES, tools=TOOLS)
    assert last["param"] == "tools"
    says("tools_unwritten", last["error"])
    assert "finish" in asked(model, messages=MESSAGES, tools=TOOLS, tool_choice="none")[1]
    brief = [{"role": "system", "content": "Briefly."}, *MESSAGES]
    last = without(
        model, "(m.content or '')", "(m.content if m.role == 'user' else '')", messages=brief
    )
    assert last["param"] == "messages"
    says("message_unwritten", last["error"], number=1)
    assert "finish" in asked(model, messages=brief)[1]
