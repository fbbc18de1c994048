"""LlamaIndex's models for servers that speak OpenAI's dialect."""

from typing import Literal

from calls import CHAT, QUESTION, URL, VECTORS, tried
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

HOW = {"api_base": URL, "api_key": "none", "max_retries": 0}
model = OpenAILike(
    model=CHAT,
    temperature=0,
    max_tokens=64,
    is_chat_model=True,
    is_function_calling_model=True,
    **HOW,
)
QUESTIONS = [ChatMessage(**one) for one in QUESTION]


class Colour(BaseModel):
    """A colour."""

    colour: Literal["red", "blue"]
    sure: bool


def look_up(name: Literal["red", "blue"]) -> str:
    """Look up a colour."""
    return f"{name} is dark."


def chat():
    assert model.chat(QUESTIONS).message.content


def answer_back():
    message = model.chat(QUESTIONS).message
    assert model.chat([*QUESTIONS, message, ChatMessage(content="And blue 1?")]).raw.usage


def stream():
    parts = [one.delta for one in model.stream_chat(QUESTIONS)]
    assert "".join(parts) == model.chat(QUESTIONS).message.content


def several():
    assert model.chat(QUESTIONS, top_p=0.9, seed=3, presence_penalty=0.5, stop=["\n"]).message


def logprobs():
    other = OpenAILike(model=CHAT, is_chat_model=True, logprobs=True, top_logprobs=2, **HOW)
    assert other.chat(QUESTIONS, max_tokens=9).logprobs


def schema():
    other = OpenAILike(
        model=CHAT,
        max_tokens=64,
        is_chat_model=True,
        should_use_structured_outputs=True,
        **HOW,
    )
    assert isinstance(other.as_structured_llm(Colour).chat(QUESTIONS).raw, Colour)


def tools():
    tool = FunctionTool.from_defaults(look_up)
    answer = model.chat_with_tools([tool], chat_history=QUESTIONS, tool_required=True)
    (call,) = model.get_tool_calls_from_response(answer)
    result = ChatMessage(
        role="tool", content="It is dark.", additional_kwargs={"tool_call_id": call.tool_id}
    )
    assert model.chat_with_tools([tool], chat_history=[*QUESTIONS, answer.message, result])


def texts():
    other = OpenAILike(model=CHAT, max_tokens=9, is_chat_model=False, **HOW)
    assert other.complete("a red").text


def embeddings():
    other = OpenAILikeEmbedding(model_name=VECTORS, **HOW)
    assert len(other.get_text_embedding_batch(["a red thing", "b"])) == 2


tried("chat", chat)
tried("chat: an answer's message sent back", answer_back)
tried("chat: streamed, with usage", stream)
tried("chat: n, seed, top_p, penalties, stop", several)
tried("chat: log-probabilities", logprobs)
tried("chat: JSON by a schema", schema)
tried("chat: a tool called, its result sent back", tools)
tried("completions: texts, token ids", texts)
tried("embeddings: base64", embeddings)
