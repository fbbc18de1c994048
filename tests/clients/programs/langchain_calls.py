"""LangChain's chat model, text model and embeddings."""

from typing import Literal

from calls import CHAT, QUESTION, TOOLS, URL, VECTORS, tried
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

HOW = {"base_url": URL, "api_key": "none", "max_retries": 0}
model = ChatOpenAI(model=CHAT, temperature=0, max_tokens=64, **HOW)
QUESTIONS = [(one["role"], one["content"]) for one in QUESTION]


class Colour(BaseModel):
    colour: Literal["red", "blue"]
    sure: bool


def chat():
    answer = model.invoke(QUESTIONS)
    assert answer.content
    assert answer.usage_metadata["output_tokens"]


def answer_back():
    answer = model.invoke([*QUESTIONS, model.invoke(QUESTIONS), ("user", "And blue 1?")])
    assert answer.usage_metadata["input_tokens"] > 80


def stream():
    parts = list(model.stream(QUESTIONS, stream_usage=True))
    assert "".join(one.content for one in parts) == model.invoke(QUESTIONS).content
    assert any(one.usage_metadata for one in parts)


def several():
    other = ChatOpenAI(
        model=CHAT, n=2, top_p=0.9, seed=3, presence_penalty=0.5, max_tokens=9, **HOW
    )
    assert len(other.generate([model._convert_input(QUESTIONS).to_messages()]).generations[0]) == 2


def logprobs():
    assert model.bind(logprobs=True, top_logprobs=2).invoke(QUESTIONS).response_metadata["logprobs"]


def schema():
    for method in ("json_schema", "function_calling"):
        answer = model.with_structured_output(Colour, method=method).invoke(QUESTIONS)
        assert isinstance(answer, Colour)


def tools():
    bound = model.bind_tools(TOOLS, tool_choice="look_up")
    answer = bound.invoke(QUESTIONS)
    (call,) = answer.tool_calls
    result = ToolMessage("It is dark.", tool_call_id=call["id"])
    assert bound.invoke([*QUESTIONS, answer, result])


def texts():
    llm = OpenAI(model=CHAT, temperature=0, max_tokens=9, **HOW)
    assert len(llm.generate(["a red", "a blue"]).generations) == 2


def embeddings():
    one = OpenAIEmbeddings(model=VECTORS, check_embedding_ctx_length=False, **HOW)
    assert len(one.embed_documents(["a red thing", "b"])) == 2


def picture():
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    model.invoke([("user", [part])])


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
