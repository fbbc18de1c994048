"""OpenAI's own client, with its strict types, asks models: which parameters are obeyed, which are
taken, which are refused by name. A stand-in answers for the model, and keeps what it was asked.
"""

from __future__ import annotations

import json
import math
import struct
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from jobs.serve.answers.replies import ModelAnswer
from jobs.serve.answers.workers import GONE, CannotAnswer
from tests.serve.conftest import CHAT, Service, Stub, jsonl, own_queue, serving, until_status
from tests.wording import says
from trainer.config.readers.json_text import without_twins

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
FUNCTION = {"name": "look_up", "parameters": {"type": "object", "properties": {}}}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@dataclass
class StandinWorker:
    """Answers "ab" to every prompt, as often as it is asked to."""

    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    calls: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    breaks: bool = False  # behind its first piece

    async def of(self, run: Any, weights: str) -> StandinWorker:
        return self

    async def stop(self) -> None:
        pass

    async def ask(self, question: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        self.asked.append(question)
        if "texts" in question:
            vectors = [
                b64encode(struct.pack("<2f", 0.5, at)).decode()
                for at, _ in enumerate(question["texts"])
            ]
            yield {"vectors": vectors, "tokens": 7}
            return
        count = len(question.get("prompts", [0])) * question["n"]
        for choice in range(count):
            end: dict[str, Any] = {
                "finish": "stop",
                "prompt_tokens": 3,
                "tokens": 2,
                "choice": choice,
            }
            if question.get("logprobs") is not None:
                likeliest = [{"token": "a", "logprob": -0.5}][: question["logprobs"]]
                value = -0.5 - (choice + 1) % 3  # the third choice is the likeliest
                end["logprobs"] = [
                    {"token": one, "logprob": value, "likeliest": likeliest} for one in "ab"
                ]
            if question.get("tools"):
                end |= {"content": "" if self.calls else "ab", "calls": self.calls}
                end |= {"finish": "tool_calls"} if self.calls else {}
            for text in "ab":
                yield {"text": text, "choice": choice}
                if self.breaks:
                    raise CannotAnswer(GONE)
            yield {**end, "is_last": choice == count - 1}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, OpenAI, str]]:
    folder = tmp_path_factory.mktemp("service")
    stub = Stub(folder / "stub")
    with own_queue(folder / "queue"), serving(folder / "base", python=stub.python) as running:
        client = running.client()
        file = client.files.create(file=("chat.jsonl", jsonl(CHAT)), purpose="fine-tune")
        job = client.fine_tuning.jobs.create(model="tiny-chat", training_file=file.id)
        done = until_status(client, job.id, "succeeded")
        yield running, client, done["fine_tuned_model"]


@pytest.fixture
def standin(world: Any) -> StandinWorker:
    running, _, _ = world
    running.app.app.state.workers = StandinWorker()
    return running.app.app.state.workers


def chat(world: Any, **more: Any) -> Any:
    _, client, model = world
    return client.chat.completions.create(**{"model": model, "messages": MESSAGES, **more})


def text(world: Any, **more: Any) -> Any:
    _, client, model = world
    return client.completions.create(**{"model": model, "prompt": "Hello", **more})


def refused_by_name(call: Any, param: str) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        call()
    assert caught.value.param == param, caught.value
    return caught.value


def test_what_changes_the_answer_reaches_the_model(world: Any, standin: StandinWorker) -> None:
    how = {
        "top_p": 0.5,
        "frequency_penalty": 1.5,
        "presence_penalty": -1,
        "logit_bias": {"7": -100},
    }
    chat(world, n=2, seed=-3, stop="x", max_completion_tokens=9, temperature=0.5, **how)
    (asked,) = standin.asked
    want = {**how, "n": 2, "seed": -3, "stop": ["x"], "max_tokens": 9, "temperature": 0.5}
    assert {name: asked[name] for name in want} == want
    assert asked["messages"] == MESSAGES
    assert asked["schema"] is None


def test_what_changes_no_answer_is_taken(world: Any, standin: StandinWorker) -> None:
    chat(
        world,
        user="anna",
        metadata={"a": "b"},
        store=True,
        service_tier="flex",
        prediction={"type": "content", "content": "Hello"},
        modalities=["text"],
        reasoning_effort="none",
        verbosity="medium",
        prompt_cache_key="a",
        safety_identifier="b",
        parallel_tool_calls=True,
        logprobs=None,
        function_call="none",
        response_format={"type": "text"},
    )
    assert "tools" not in standin.asked[0]


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("web_search_options", {}),
        ("functions", [FUNCTION]),
        ("function_call", "auto"),
        ("n", 129),
        ("top_p", 1.1),
        ("stop", ["1", "2", "3", "4", "5"]),
        ("top_logprobs", 2),
        ("tool_choice", "required"),
        ("seed", 2**64),
        ("contexts", ["a"]),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(
    world: Any, standin: StandinWorker, param: str, value: Any
) -> None:
    refused_by_name(lambda: chat(world, extra_body={param: value}), param)
    assert not standin.asked


def test_two_limits_and_parameters_that_are_no_object_are_refused(
    world: Any, standin: StandinWorker
) -> None:
    limits = {"max_tokens": 3, "max_completion_tokens": 4}
    says(
        "limits_twice",
        refused_by_name(lambda: chat(world, **limits), "max_tokens"),
        **{"got": 3, "other": 4},
    )
    chat(world, max_tokens=3, max_completion_tokens=3)
    assert standin.asked[-1]["max_tokens"] == 3
    wrong: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]
    error = refused_by_name(lambda: chat(world, tools=wrong), "tools")
    says("parameters_of_no_object", error, type="string", name="f")


def test_an_offer_that_the_list_of_models_has_is_said_to_answer_nothing(
    world: Any, standin: StandinWorker
) -> None:
    _, client, _ = world
    assert "tiny-chat" in {one.id for one in client.models.list()}
    with pytest.raises(openai.NotFoundError) as caught:
        chat(world, model="tiny-chat")
    assert caught.value.code == "model_not_found"
    says("offer_answers_nothing", caught.value, name="tiny-chat")


def test_half_of_a_character_is_refused_by_its_place(world: Any, standin: StandinWorker) -> None:
    running, _, model = world
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "a\ud83d"}]})
    answer = httpx2.post(
        f"{running.url}/v1/chat/completions",
        content=body,
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400
    says("json_half_pair", answer.json()["error"]["message"], escape="\\ud83d")


def test_a_body_of_many_keys_is_read_in_the_time_of_few() -> None:
    text = json.dumps({str(number): 0 for number in range(40_000)})
    start = time.process_time()
    assert len(json.loads(text, object_pairs_hook=without_twins)) == 40_000
    assert time.process_time() - start < 3, "the time has grown with the square of the keys"
    with pytest.raises(ValueError, match="a, b"):
        json.loads('{"b": 1, "a": 1, "a": 2, "b": 2}', object_pairs_hook=without_twins)


def test_two_keys_for_one_token_are_refused(world: Any, standin: StandinWorker) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(world, logit_bias={"7": 1, "007": 2})
    assert str(caught.value.param).startswith("logit_bias.007")


def test_an_unknown_parameter_is_refused_by_name(world: Any, standin: StandinWorker) -> None:
    error = refused_by_name(lambda: chat(world, extra_body={"top_k": 3}), "top_k")
    says("request_key_unknown", error, key="top_k")


def test_an_answer_comes_back_as_it_went(world: Any, standin: StandinWorker) -> None:
    standin.calls = [{"name": "look_up", "arguments": '{"a": 1}'}]
    first = chat(world, tools=TOOLS).choices[0]
    assert (first.finish_reason, first.message.content) == ("tool_calls", None)
    (call,) = first.message.tool_calls
    assert len(call.id) == 9
    result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "1"}]}
    plain = chat(world).choices[0].message
    for message in (first.message, first.message.model_dump()):
        said = {**plain.model_dump(), "annotations": [], "audio": None, "unknown": None}
        rest = [
            {"role": "user", "content": "b", "name": "anna"},
            {"role": "developer", "content": "c"},
        ]
        chat(world, messages=[*MESSAGES, message, result, said, *rest], tools=TOOLS)
        rows = standin.asked[-1]["messages"]
        function = {"name": "look_up", "arguments": '{"a": 1}'}
        assert rows[1] == {
            "role": "assistant",
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        }
        assert rows[2] == {"role": "tool", "content": "1", "tool_call_id": call.id}
        assert rows[3] == {"role": "assistant", "content": "ab"}
        assert rows[4]["name"] == "anna"
        assert rows[5] == {"role": "developer", "content": "c"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]},
            "messages.content",
        ),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}, "messages.content"),
        ({"role": "user"}, "messages"),
        ({"role": "function", "name": "a", "content": "b"}, "messages"),
        (
            {"role": "user", "content": "a", "tool_calls": [{"function": FUNCTION}]},
            "messages.tool_calls.function.arguments",
        ),
        ({"role": "narrator", "content": "a"}, "messages.role"),
        ({"role": "user", "content": "a", "weight": 1}, "messages.weight"),
        ({"role": "assistant", "content": "a"}, "messages"),
        ({"role": "assistant", "content": "a", "refusal": "No."}, "messages.refusal"),
    ],
)
def test_a_message_that_would_be_lost_is_refused(
    world: Any, standin: StandinWorker, message: Any, param: str
) -> None:
    refused_by_name(lambda: chat(world, messages=[*MESSAGES, message]), param)


def test_a_stream_tells_each_choice_its_calls_and_the_usage(
    world: Any, standin: StandinWorker
) -> None:
    chunks = list(chat(world, n=2, stream=True, stream_options={"include_usage": True}))
    whole = chat(world, n=2)
    assert [one.message.content for one in whole.choices] == ["ab", "ab"]
    told = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        told[choice.index] += choice.delta.content or ""
    assert told == ["ab", "ab"]
    assert chunks[-1].usage == whole.usage
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 4)
    assert not chunks[-1].choices
    standin.calls = [{"name": "look_up", "arguments": "{}"}]
    (end,) = [one.choices[0] for one in chat(world, tools=TOOLS, stream=True)]
    assert (end.finish_reason, end.delta.content) == ("tool_calls", None)
    assert end.delta.tool_calls[0].function.name == "look_up"
    standin.calls = []
    (end,) = [one.choices[0] for one in chat(world, tools=TOOLS, stream=True)]
    assert end.delta.content == "ab"


def test_what_goes_wrong_in_the_middle_of_a_stream_is_said_in_it(
    world: Any, standin: StandinWorker
) -> None:
    standin.breaks = True
    chunks = iter(chat(world, stream=True))
    assert next(chunks).choices[0].delta.content == "a"
    with pytest.raises(openai.APIError) as caught:
        list(chunks)
    says("worker_ended", caught.value)
    assert caught.value.param == "model"


def test_log_probabilities_come_as_the_client_reads_them(
    world: Any, standin: StandinWorker
) -> None:
    content = chat(world, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    assert [(one.token, one.logprob) for one in content] == [("a", -1.5), ("b", -1.5)]
    assert (content[0].bytes, content[0].top_logprobs[0].token) == ([97], "a")
    told = text(world, logprobs=1).choices[0].logprobs
    assert (told.tokens, told.text_offset) == (["a", "b"], [0, 1])
    assert told.top_logprobs == [{"a": -1.5}, {"a": -0.5, "b": -1.5}]
    assert chat(world).choices[0].logprobs is None
    reply = ModelAnswer("m", is_chat=True, num_answers=1, num_texts=1, has_logprobs=True)
    torn = {"token": "\ufffd", "logprob": -1.0, "likeliest": []}
    told = reply.logprobs({"logprobs": [torn]})
    assert told is not None
    assert told["content"][0]["bytes"] is None, "half of a character has other bytes than these"


def test_tools_reach_the_model_with_the_choice(world: Any, standin: StandinWorker) -> None:
    named = {"type": "function", "function": {"name": "look_up"}}
    for choice, want in (("auto", "auto"), ("required", "required"), (named, "look_up")):
        chat(world, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        asked = standin.asked[-1]
        assert (asked["tool_choice"], asked["parallel_tool_calls"]) == (want, False)
        assert asked["tools"] == TOOLS
    chat(world, tools=TOOLS, tool_choice="none")
    assert "tools" not in standin.asked[-1]
    other = {"type": "function", "function": {"name": "other"}}
    refused_by_name(lambda: chat(world, tools=TOOLS, tool_choice=other), "tool_choice")
    refused_by_name(lambda: chat(world, tools=TOOLS * 2), "tools")
    refused_by_name(
        lambda: chat(world, tools=[{"type": "custom", "custom": {"name": "a"}}]), "tools.type"
    )
    strict: Any = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    refused_by_name(lambda: chat(world, tools=strict), "tools")
    chat(world, tools=strict, tool_choice="required")
    form: Any = {"type": "json_object"}
    refused_by_name(lambda: chat(world, tools=TOOLS, response_format=form), "response_format")


def test_a_response_format_reaches_the_model_as_a_schema(
    world: Any, standin: StandinWorker
) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
    }
    chat(world, response_format=form)
    chat(world, response_format={"type": "json_object"})
    assert [asked["schema"] for asked in standin.asked] == [SCHEMA, {"type": "object"}]
    for wrong in ({"type": "json_schema"}, {"type": "text", "json_schema": form["json_schema"]}):
        refused_by_name(lambda form=wrong: chat(world, response_format=form), "response_format")


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a"] * 2048, ["a"] * 2048),
    ],
    ids=["a text", "texts", "ids", "lists of ids", "2048 texts"],
)
def test_completions_and_embeddings_take_texts_and_tokens(
    world: Any, standin: StandinWorker, prompt: Any, want: Any
) -> None:
    _, client, model = world
    answer = text(world, prompt=prompt)
    assert standin.asked[-1]["prompts"] == want
    assert [one.index for one in answer.choices] == [*range(len(want))]
    assert answer.usage.prompt_tokens == 3 * len(want)
    vectors = client.embeddings.create(model=model, input=prompt, encoding_format="float")
    assert standin.asked[-1]["texts"] == want
    assert vectors.data[-1].embedding == [0.5, len(want) - 1]
    assert math.isfinite(vectors.usage.total_tokens)


@pytest.mark.parametrize("wrong", ["", [], [""], ["a", 1], [[1], []], ["a"] * 2049, 3, [True]])
def test_no_text_and_a_mixture_are_refused(world: Any, standin: StandinWorker, wrong: Any) -> None:
    _, client, model = world
    refused_by_name(lambda: text(world, extra_body={"prompt": wrong}), "prompt")
    refused_by_name(
        lambda: client.embeddings.create(model=model, input="a", extra_body={"input": wrong}),
        "input",
    )


def test_the_best_of_several_texts_is_that_of_the_highest_mean_log_probability(
    world: Any, standin: StandinWorker
) -> None:
    answer = text(world, best_of=3, n=1, logprobs=1, prompt=["a", "b"])
    assert [one.logprobs.token_logprobs for one in answer.choices] == [[-0.5, -0.5]] * 2
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 12)
    assert text(world, best_of=3).choices[0].logprobs is None
    refused_by_name(lambda: text(world, best_of=1, n=2), "best_of")
    refused_by_name(lambda: text(world, best_of=2, stream=True), "best_of")
    refused_by_name(lambda: text(world, prompt=["a"] * 2048, n=2), "prompt")


def test_an_echo_may_have_no_new_token_and_a_text_is_not_filled_in(
    world: Any, standin: StandinWorker
) -> None:
    text(world, echo=True, max_tokens=0, logprobs=0)
    assert (standin.asked[-1]["echo"], standin.asked[-1]["max_tokens"]) == (True, 0)
    refused_by_name(lambda: text(world, max_tokens=0), "max_tokens")
    refused_by_name(lambda: text(world, suffix="b"), "suffix")


def test_fewer_dimensions_than_the_model_has_are_refused(
    world: Any, standin: StandinWorker
) -> None:
    _, client, model = world
    asked: Any = {"model": model, "input": "a", "encoding_format": "float"}
    assert len(client.embeddings.create(**asked, dimensions=2).data[0].embedding) == 2
    error = refused_by_name(lambda: client.embeddings.create(**asked, dimensions=1), "dimensions")
    says("dimensions_fixed", error, got=1, width=2)
