"""What a request asks of a language model: the prompts, and how each is continued."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.commands.texts.echo import spelt
from trainer.data.chat.calls import CallSyntax, Said, syntax_of
from trainer.data.formats.conversation import opened
from trainer.errors import ConfigError, LatheError
from trainer.models.generation.grammar import Grammar, grammar_of
from trainer.models.generation.sampling import Adjustment
from trainer.models.generation.texts import GrowingText
from trainer.protocol.abilities import Search
from trainer.tasks import continuation

_PLACE = "the request"
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


class WrongWish(ConfigError):
    """A request that the model cannot obey. param: the name of what is wrong with it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class ToolUse:
    """How the model may call tools, or has to (`is_forced`): then the prompt ends with the ids that
    open a call.
    """

    syntax: CallSyntax
    is_parallel: bool
    is_forced: bool
    opening: list[int]  # empty if no call is forced, or if nothing stands before one

    def said(self, text: str) -> Said | None:
        """What was said and called in a text, behind what is forced; None without a whole call."""
        said = self.syntax.said(self.syntax.opening + text if self.is_forced else text)
        if said is None or self.is_parallel:
            return said
        return Said(said.text, said.calls[:1])


@dataclass(frozen=True)
class PromptOfText:
    """One prompt of a request, and the texts that continue it."""

    ids: list[int]
    text: str | None  # what its answer repeats; None where it repeats nothing
    texts: list[GrowingText]
    tools: ToolUse | None


def begun(task: Any, base: Any, one: Mapping[str, Any]) -> list[PromptOfText]:
    """The prompts of a request, with their texts, none of which has begun.

    one: {"prompt"}, {"prompts"} (texts, or lists of token ids) or {"messages"}, and how it is
    continued. WrongWish.
    """
    is_chat = "messages" in one
    param = "messages" if is_chat else "prompt"
    tools = _tools(task, one) if is_chat else None
    adjustment = _adjustment(task, base, one, tools)
    prompts = [one] if is_chat else one.get("prompts", [one.get("prompt")])
    wishes: list[PromptOfText] = []
    for number, prompt in enumerate(prompts):
        try:
            row = _row(task, base, prompt, is_with_tools=tools is not None)
            opening = tools.opening if tools is not None else []
            texts = _texts(task, base, {**row, "ids": [*row["ids"], *opening]}, one, adjustment)
        except WrongWish:
            raise
        except LatheError as error:
            which = f"prompt {number + 1} of {len(prompts)}: " if len(prompts) > 1 else ""
            raise WrongWish(which + str(error).rstrip("."), param) from None
        text: str | None = None
        if one.get("echo"):
            text = prompt if isinstance(prompt, str) else spelt(task, row["ids"])
        wishes.append(PromptOfText(row["ids"], text, texts, tools))
    return wishes


def _row(task: Any, base: Any, prompt: Any, *, is_with_tools: bool) -> dict[str, Any]:
    """The row of one prompt: a text, token ids, or an object with messages."""
    if isinstance(prompt, str):
        return continuation.row_to_predict(task, {"text": prompt}, _PLACE)
    if isinstance(prompt, list):
        size = base.get_input_embeddings().weight.shape[0]
        wrong = next((token for token in prompt if not 0 <= token < size), None)
        if wrong is not None:
            raise ConfigError(
                f"got the token {wrong}, want 0 to {size - 1}: ids are those of this model's own "
                "tokenizer. Send the text"
            )
        return {"ids": prompt, "is_turn": False}
    raw = {"messages": prompt["messages"], "tools": prompt.get("tools") if is_with_tools else None}
    row = continuation.row_to_predict(task, raw, _PLACE)
    conversation = opened(raw, _PLACE)
    _refuse_unwritten(task, conversation["messages"], task.chat.opened(conversation))
    return row


def _refuse_unwritten(task: Any, messages: list[dict[str, Any]], whole: str) -> None:
    """WrongWish for messages of which the chat template writes nothing."""
    lost = task.chat.lost_turns(messages, whole)
    calls = [at for at, one in enumerate(messages) if one.get("tool_calls")]
    if "tool_calls" not in task.chat.words:
        lost += calls
    if lost:
        first = min(lost)
        raise WrongWish(
            f"message {first + 1}: this model's chat template writes nothing of it (role "
            f"{messages[first]['role']!r}). Leave it out, or say it in a message of the user",
            "messages",
        )


def _texts(
    task: Any, base: Any, row: dict[str, Any], one: Mapping[str, Any], adjustment: Adjustment | None
) -> list[GrowingText]:
    temperature = 1.0 if one["temperature"] is None else one["temperature"]
    search = Search(
        num_answers=one.get("n", 1),
        temperature=temperature or None,  # 0: the likeliest tokens
        top_p=one.get("top_p", 1.0),
        seed=one["seed"],
    )
    how = {"stops": one["stop"], "is_told": True, "num_likeliest": one.get("logprobs")}
    texts = continuation.continuations(task, base, row, search, max_tokens=one["max_tokens"], **how)
    for text in texts:
        text.adjustment = adjustment.copy() if adjustment is not None else None
    return texts


def _adjustment(
    task: Any, base: Any, one: Mapping[str, Any], tools: ToolUse | None
) -> Adjustment | None:
    """What changes the logits, as the request asks; None where it asks for no change."""
    size = base.get_output_embeddings().weight.shape[0]
    bias = {int(token): float(value) for token, value in one.get("logit_bias", {}).items()}
    wrong = next((token for token in bias if not 0 <= token < size), None)
    if wrong is not None:
        raise WrongWish(f"logit_bias: got the token {wrong}, want 0 to {size - 1}", "logit_bias")
    adjustment = Adjustment(
        bias,
        frequency_penalty=one.get("frequency_penalty", 0.0),
        presence_penalty=one.get("presence_penalty", 0.0),
        grammar=_grammar(task, size, one, tools),
    )
    return None if adjustment == Adjustment() else adjustment


def _grammar(task: Any, size: int, one: Mapping[str, Any], tools: ToolUse | None) -> Grammar | None:
    """What a text must follow: the arguments of a call that is forced, or response_format."""
    schema, param = one.get("schema"), "response_format"
    if tools is not None and tools.is_forced:
        name = one["tool_choice"]
        allowed = {
            tool["function"]["name"]: tool["function"].get("parameters") or _ANY_OBJECT
            for tool in one["tools"]
            if name in ("required", tool["function"]["name"])
        }
        schema, param = tools.syntax.schema(allowed), "tools"
    if schema is None:
        return None
    try:
        return grammar_of(schema, task.tokenizer, ends=tuple(task.ends), size=size)
    except ConfigError as error:
        raise WrongWish(f"{param}: {error}", param) from None


def _tools(task: Any, one: Mapping[str, Any]) -> ToolUse | None:
    """How tools are called; None if the request has none, or forbids all calls. WrongWish if the
    template writes no tools, or calls of which we do not know the syntax.
    """
    choice = one.get("tool_choice", "auto")
    if not one.get("tools") or choice == "none" or task.chat is None:
        return None
    syntax = syntax_of(task.chat) if "tools" in task.chat.words else None
    if syntax is None:
        knows = "writes no tools"
        if "tools" in task.chat.words:
            knows = "writes calls of tools in another way than as JSON, which is not read here"
        raise WrongWish(
            f"tools: the chat template of this model {knows}. Leave them out, or give tool_choice "
            '"none"',
            "tools",
        )
    is_forced = choice != "auto"
    opening: list[int] = []
    if is_forced and syntax.opening:
        opening = task.tokenizer(syntax.opening, add_special_tokens=False)["input_ids"]
    return ToolUse(syntax, one.get("parallel_tool_calls", True), is_forced, opening)
