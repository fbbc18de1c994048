"""OpenAI's client for Python, of any major version, with its strict types."""

import json

from calls import CHAT, LOOK_UP, MODEL, QUESTION, ROWS, SCHEMA, TOOLS, URL, VECTORS, tried, until
from openai import VERSION, OpenAI

HERE = {"base_url": URL, "api_key": "none", "max_retries": 0}
client = OpenAI(**HERE, _strict_response_validation=True)
ask = client.chat.completions.create
HOW = {"model": CHAT, "temperature": 0, "max_tokens": 12}


def models():
    assert CHAT in [one.id for one in client.models.list()]
    assert client.models.retrieve(CHAT).id == CHAT


def chat():
    answer = ask(messages=QUESTION, **HOW)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 12


def answer_back():
    first = ask(messages=QUESTION, **HOW).choices[0].message
    again = {"role": "user", "content": [{"type": "text", "text": "And blue 1?"}], "name": "anna"}
    for message in (first, first.model_dump()):
        assert ask(messages=[*QUESTION, message, again], **HOW).usage.prompt_tokens > 80


def stream():
    chunks = list(
        ask(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **HOW)
    )
    whole = ask(messages=QUESTION, **HOW)
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def several():
    how = {**HOW, "temperature": 1.5, "top_p": 0.9, "presence_penalty": 0.5, "seed": 3, "n": 2}
    first, second = (ask(messages=QUESTION, stop=["\n", "?"], **how) for _ in range(2))
    texts = [one.message.content for one in first.choices]
    assert len(texts) == 2
    assert texts == [one.message.content for one in second.choices]


def logprobs():
    choice = ask(messages=QUESTION, logprobs=True, top_logprobs=3, **HOW).choices[0]
    assert "".join(one.token for one in choice.logprobs.content) == choice.message.content
    assert len(choice.logprobs.content[0].top_logprobs) == 3


def schema():
    form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
    answer = ask(messages=QUESTION, response_format=form, **{**HOW, "max_tokens": 64})
    assert json.loads(answer.choices[0].message.content).keys() == {"colour", "sure"}


def tools():
    choice = {"type": "function", "function": {"name": LOOK_UP["name"]}}
    how = {**HOW, "max_tokens": 64, "tools": TOOLS}
    answer = ask(messages=QUESTION, tool_choice=choice, **how).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert json.loads(call.function.arguments)["name"] in ("red", "blue")
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is dark."}
    assert ask(messages=[*QUESTION, answer.message, result], **how).choices


def texts():
    whole = client.completions.create(prompt=["a red", "a blue"], **HOW)
    assert [one.index for one in whole.choices] == [0, 1]
    assert client.completions.create(prompt=[[70, 71], [72]], n=2, **HOW).choices[3].index == 3


def echo():
    how = {**HOW, "max_tokens": 0}
    (choice,) = client.completions.create(prompt=[70, 71, 72], echo=True, logprobs=1, **how).choices
    assert len(choice.logprobs.tokens) == 3
    assert choice.logprobs.token_logprobs[1] < 0


def embeddings():
    # a client without a wish asks for base64, which is no list of numbers to a strict one
    answer = OpenAI(**HERE).embeddings.create(model=VECTORS, input=["a red thing", "b"])
    assert [one.index for one in answer.data] == [0, 1]


def floats():
    answer = client.embeddings.create(model=VECTORS, input=["a", "b"], encoding_format="float")
    ids = client.embeddings.create(model=VECTORS, input=[[70], [72]], encoding_format="float")
    assert all(isinstance(one, float) for one in answer.data[0].embedding + ids.data[1].embedding)
    assert answer.usage.prompt_tokens


def dimensions():
    client.embeddings.create(model=VECTORS, input="a", dimensions=3)


def picture():
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    ask(messages=[{"role": "user", "content": [part]}], **HOW)


def files():
    with open(ROWS, "rb") as rows:
        file = client.files.create(file=rows, purpose="fine-tune")
    assert file.id in [one.id for one in client.files.list()]
    with open(ROWS) as rows:
        assert client.files.content(file.id).text == rows.read()
    assert client.files.delete(file.id).deleted


def tune():
    with open(ROWS, "rb") as rows:
        file = client.files.create(file=rows, purpose="fine-tune")
    jobs = client.fine_tuning.jobs
    job = jobs.create(model=MODEL, training_file=file.id, hyperparameters={"n_epochs": 1})
    done = until(
        lambda: jobs.retrieve(job.id),
        lambda one: one.status in ("succeeded", "failed", "cancelled"),
    )
    assert done.status == "succeeded", done.error
    assert [one.message for one in jobs.list_events(job.id, limit=5)]
    assert list(jobs.checkpoints.list(job.id))
    assert ask(messages=QUESTION, **{**HOW, "model": done.fine_tuned_model}).choices


def preferences():
    lines = [
        {
            "input": {"messages": [{"role": "user", "content": f"What colour is {number}?"}]},
            "preferred_output": [{"role": "assistant", "content": f"It is red, {number}."}],
            "non_preferred_output": [{"role": "assistant", "content": f"No, {number}."}],
        }
        for number in range(8)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("pairs.jsonl", content), purpose="fine-tune")
    method = {"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 1, "beta": 0.1}}}
    jobs = client.fine_tuning.jobs
    job = jobs.create(model=MODEL, training_file=file.id, method=method)
    done = until(lambda: jobs.retrieve(job.id), lambda one: one.status in ("succeeded", "failed"))
    assert done.status == "succeeded", done.error
    assert ask(messages=QUESTION, **{**HOW, "model": done.fine_tuned_model}).choices
    (point, *_) = jobs.checkpoints.list(job.id)
    assert ask(messages=QUESTION, **{**HOW, "model": point.fine_tuned_model_checkpoint}).choices


def batch():
    bodies = [{**HOW, "messages": QUESTION, "n": number} for number in (1, 2)]
    lines = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for at, body in enumerate(bodies)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("asked.jsonl", content), purpose="batch")
    how = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    made = client.batches.create(input_file_id=file.id, **how)
    over = ("completed", "failed", "expired", "cancelled")
    done = until(lambda: client.batches.retrieve(made.id), lambda one: one.status in over)
    assert done.status == "completed", done
    told = client.files.content(done.output_file_id).text.splitlines()
    bodies = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, told)}
    assert [len(bodies[name]["choices"]) for name in ("0", "1")] == [1, 2]


tried("models", models)
tried("chat", chat)
tried("chat: an answer's message sent back", answer_back)
tried("chat: streamed, with usage", stream)
tried("chat: n, seed, top_p, penalties, stop", several)
tried("chat: log-probabilities", logprobs)
tried("chat: JSON by a schema", schema)
tried("chat: a tool called, its result sent back", tools)
tried("chat: a picture", picture)
tried("completions: texts, token ids", texts)
tried("completions: echo with log-probabilities", echo)
tried("embeddings: base64", embeddings)
tried("embeddings: floats, token ids", floats)
tried("embeddings: fewer dimensions", dimensions)
tried("files", files)
tried("fine-tuning, to an answer of the model", tune)
if VERSION.startswith("3."):
    tried("fine-tuning by preferences, a checkpoint asked", preferences)
tried("batches", batch)
