"""LiteLLM, which sends what is asked of many providers in the dialect of each."""

import json

from calls import CHAT, MODEL, QUESTION, ROWS, SCHEMA, TOOLS, URL, VECTORS, tried, until
from litellm import (
    completion,
    create_file,
    create_fine_tuning_job,
    embedding,
    retrieve_fine_tuning_job,
    text_completion,
)

TO = {"api_base": URL, "api_key": "none"}
HOW = {**TO, "model": f"openai/{CHAT}", "temperature": 0, "max_tokens": 64, "num_retries": 0}


def chat():
    answer = completion(messages=QUESTION, **HOW)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens


def answer_back():
    message = completion(messages=QUESTION, **HOW).choices[0].message
    again = {"role": "user", "content": "And blue 1?"}
    for one in (message, message.model_dump()):
        assert completion(messages=[*QUESTION, one, again], **HOW).choices


def stream():
    how = {**HOW, "stream": True, "stream_options": {"include_usage": True}}
    parts = list(completion(messages=QUESTION, **how))
    text = "".join(one.choices[0].delta.content or "" for one in parts if one.choices)
    assert text == completion(messages=QUESTION, **HOW).choices[0].message.content
    assert parts[-1].usage.completion_tokens


def several():
    more = {"n": 2, "top_p": 0.9, "seed": 3, "presence_penalty": 0.5, "stop": ["\n"]}
    assert len(completion(messages=QUESTION, **{**HOW, "temperature": 1}, **more).choices) == 2


def logprobs():
    answer = completion(messages=QUESTION, logprobs=True, top_logprobs=2, **HOW)
    assert answer.choices[0].logprobs.content


def schema():
    form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
    answer = completion(messages=QUESTION, response_format=form, **HOW)
    assert json.loads(answer.choices[0].message.content).keys() == {"colour", "sure"}


def tools():
    how = {**HOW, "tools": TOOLS}
    message = completion(messages=QUESTION, tool_choice="required", **how).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is dark."}
    assert completion(messages=[*QUESTION, message, result], **how).choices


def picture():
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    completion(messages=[{"role": "user", "content": [part]}], **HOW)


def texts():
    how = {**HOW, "model": f"text-completion-openai/{CHAT}"}
    assert len(text_completion(prompt=["a red", "a blue"], **how).choices) == 2


def embeddings():
    answer = embedding(model=f"openai/{VECTORS}", input=["a red thing", "b"], **TO)
    assert len(answer.data) == 2


def tune():
    with open(ROWS, "rb") as rows:
        file = create_file(file=rows, purpose="fine-tune", custom_llm_provider="openai", **TO)
    more = {"custom_llm_provider": "openai", **TO}
    how = {"hyperparameters": {"n_epochs": 1}}
    job = create_fine_tuning_job(model=MODEL, training_file=file.id, **how, **more)
    done = until(
        lambda: retrieve_fine_tuning_job(fine_tuning_job_id=job.id, **more),
        lambda one: one.status in ("succeeded", "failed"),
    )
    assert done.status == "succeeded", done.error


tried("chat", chat)
tried("chat: an answer's message sent back", answer_back)
tried("chat: streamed, with usage", stream)
tried("chat: n, seed, top_p, penalties, stop", several)
tried("chat: log-probabilities", logprobs)
tried("chat: JSON by a schema", schema)
tried("chat: a tool called, its result sent back", tools)
tried("chat: a picture", picture)
tried("completions: texts, token ids", texts)
tried("embeddings: base64", embeddings)
tried("fine-tuning, to an answer of the model", tune)
