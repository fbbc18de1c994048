"""A conversation out of an object that a person wrote: the one rule for training rows, uploads and
prompts.

A conversation is {"messages", "tools"?}. What a row says about who speaks and what is learnt is
obeyed or refused: no role and no key with such a meaning is passed over in silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from trainer.data.formats.json_text import json_value, preview
from trainer.data.formats.lists import parsed
from trainer.errors import DataError, nearest

Row = dict[str, Any]
ASSISTANT = "assistant"
# The names that people give to the roles, in lower case: OpenAI; ShareGPT (human, gpt, bing, bard);
# Gemini (model); LLaMA-Factory (function_call, observation); OpenAssistant (prompter); Cohere
# (chatbot); Llama 3 (ipython); Hermes (tool_call, tool_response) and Glaive (function_response).
CALL = "function_call"
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard"), ASSISTANT),
    **dict.fromkeys(("model", "bot", "chatbot", "ai"), ASSISTANT),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
    **dict.fromkeys(("tool_response", "function_response"), "tool"),
    **dict.fromkeys((CALL, "tool_call"), CALL),
}
_WANTED_ROLES = "system, user, assistant or tool"
# Keys that say whether a turn is learnt: OpenAI (weight), axolotl (train, training), others.
_LEARNS = ("weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight")
# A key of a turn, or of a row, that seems to say what is learnt and that is not one of these.
_ON_LEARNING = re.compile(
    r"(^|_)(train(ing|able|ed)?|loss|(un)?mask(ed|s)?|weights?|(un)?learn(t|ed)?"
    r"|ignored?|skip(ped)?|supervised?)(_|$)"
)
# Keys whose value would be lost, with what to write in their place.
_UNREAD = {
    "function_call": 'a call in "tool_calls": [{"type": "function", "function": {...}}]',
    "refusal": 'the refusal as "content"',
    "audio": "text",
    **dict.fromkeys(("images", "image", "videos", "video", "audios"), "text alone"),
}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class RowProblem(NamedTuple):
    """What is wrong with a row."""

    name: str  # of the field: "messages[0].role"; "" where the whole row is wrong
    value: Any
    want: str

    def at(self, place: str) -> DataError:
        """The error of the row that was read at `place`."""
        if not self.name:
            return DataError(f"{place}: {self.value}, want {self.want}.", place=place)
        name = repr(self.name) if self.name.isidentifier() else self.name
        message = f"{place}: {name} is {preview(self.value)}, want {self.want}."
        return DataError(message, place=place, field=self.name)


Report = Callable[[RowProblem], None]


def learnable(raw: Mapping[str, Any], place: str) -> Row:
    """The conversation of a row that is learnt from. DataError names the place of a wrong row."""
    return read(raw, _refusal_at(place))


def opened(raw: Mapping[str, Any], place: str) -> Row:
    """The conversation of an object, without turns of the assistant at its end, so that the
    assistant speaks next. DataError names the place of a wrong object.
    """
    if raw.get("messages") is None and raw.get("prompt") is not None:
        raw = {**raw, "completion": ""}
    conversation = _conversation(raw, _refusal_at(place), is_learnt=False)
    messages = conversation["messages"]
    while messages and messages[-1]["role"] == ASSISTANT:
        del messages[-1]
    if not messages:
        raise DataError(
            f"{place}: nobody but the assistant speaks. Give a turn of the user.", place=place
        )
    return conversation


def read(raw: Mapping[str, Any], report: Report) -> Row:
    """The conversation of a row that is learnt from; `report` is called with everything that is
    wrong with it.
    """
    conversation = _conversation(raw, report, is_learnt=True)
    messages = conversation["messages"]
    if messages and not any(counts(message) for message in messages):
        report(
            RowProblem(
                "",
                "no turn of the assistant counts, so there is nothing to learn",
                "one that does, or the row taken out",
            )
        )
    return conversation


def counts(message: Mapping[str, Any]) -> bool:
    """Whether a turn is learnt."""
    return message["role"] == ASSISTANT and message.get("weight", 1) == 1


def _refusal_at(place: str) -> Report:
    def refuse(problem: RowProblem) -> None:
        raise problem.at(place)

    return refuse


def _conversation(raw: Mapping[str, Any], report: Report, *, is_learnt: bool) -> Row:
    for name, value in raw.items():
        _check_row_key(name, value, report)
    values = _listed(_turns(raw, report))
    if not isinstance(values, list) or (is_learnt and not values):
        want = "a list of objects with role and content that is not empty"
        report(RowProblem("messages", values, want))
        return {"messages": []}
    read_turns = (
        _message(value, f"messages[{number}]", report, is_learnt=is_learnt)
        for number, value in enumerate(cast("list[Any]", values))
    )
    messages = [message for message in read_turns if message is not None]
    _add_system(raw.get("system"), messages, report)
    conversation: Row = {"messages": messages}
    tools = _tools(raw.get("tools"), report)
    return {**conversation, "tools": tools} if tools else conversation


def _check_row_key(name: str, value: Any, report: Report) -> None:
    """Report a key of a whole row that says what is learnt, or whose value would be lost."""
    if value is None or value in ("", [], {}):
        return
    says_on_learning = name in (*_LEARNS, "mask", "loss_masks", "sample_weight")
    if says_on_learning and not (isinstance(value, int | float) and value == 1):
        report(RowProblem(name, value, 'a "weight" of 0 or 1 on turns of the assistant'))
    elif name in _UNREAD:
        report(RowProblem(name, value, _UNREAD[name]))
    elif name == "functions":
        want = 'the functions in "tools": [{"type": "function", "function": {...}}]'
        report(RowProblem(name, value, want))
    elif name == "history":
        report(RowProblem(name, value, 'earlier turns in "messages"'))


def _turns(raw: Mapping[str, Any], report: Report) -> Any:
    """The messages of a row; those of a row with prompt and completion are a question and its
    answer.
    """
    if raw.get("messages") is not None:
        return raw["messages"]
    if raw.get("prompt") is not None and raw.get("completion") is not None:
        if not isinstance(raw.get("input"), str | None):
            report(RowProblem("input", raw.get("input"), "text"))
        return [
            {"role": "user", "content": with_input(raw)},
            {"role": ASSISTANT, "content": raw["completion"]},
        ]
    report(
        RowProblem(
            "",
            "'messages' is missing, and so are 'prompt' and 'completion' (keys: "
            f"{', '.join(raw) or 'none'}). Say in data.columns what yours are called",
            '{"messages": "conversations"}',
        )
    )
    return [{"role": "user", "content": ""}]


def _listed(values: Any) -> Any:
    """The list that a text holds, as tables write lists; any other value unchanged."""
    try:
        items = parsed(values, "", "messages") if isinstance(values, str) else None
    except DataError:
        return values
    return values if items is None else items


def with_input(raw: Mapping[str, Any]) -> Any:
    """The prompt of a row, with Alpaca's "input" in a line of its own behind it."""
    prompt, more = raw.get("prompt"), raw.get("input")
    is_more = isinstance(more, str) and bool(more.strip()) and more != prompt
    return f"{prompt}\n{more}" if is_more and isinstance(prompt, str) else prompt


def _add_system(system: Any, messages: list[Row], report: Report) -> None:
    """Make a row's "system" its first turn."""
    if system is None or system == "":
        return
    if not isinstance(system, str):
        report(RowProblem("system", system, "text"))
        return
    first = messages[0] if messages else {}
    if not system.strip() or (first.get("role"), first.get("content")) == ("system", system):
        return
    if first.get("role") == "system":
        want = f"the same text as in the first turn, {preview(first.get('content'))}, or none"
        report(RowProblem("system", system, want))
        return
    messages.insert(0, {"role": "system", "content": system})


def _message(value: Any, name: str, report: Report, *, is_learnt: bool) -> Row | None:
    if not isinstance(value, dict):
        report(RowProblem(name, value, "an object with role and content"))
        return None
    given = {key: one for key, one in cast("Row", value).items() if one is not None}
    for ours, theirs in (("role", "from"), ("content", "value")):
        if ours in given and theirs in given and given[ours] != given[theirs]:
            report(RowProblem(f"{name}.{theirs}", given[theirs], f"no other one than its {ours}"))
    message: Row = {
        "role": given.pop("role", given.pop("from", None)),
        "content": given.pop("content", given.pop("value", None)),
    }
    given.pop("from", None)
    given.pop("value", None)
    role = _role(message["role"], name, report)
    for key, want in _UNREAD.items():
        if given.get(key) not in (None, "", [], {}):
            report(RowProblem(f"{name}.{key}", given[key], want))
    if role == CALL:
        role = ASSISTANT
        message |= {"content": "", "tool_calls": _calls(message["content"], name, report)}
    if given.get("tool_calls"):
        message["tool_calls"] = _tool_calls(given["tool_calls"], name, report)
    if message.get("tool_calls") and message["content"] is None:
        message["content"] = ""
    message["role"] = role
    is_thought = any(given.get(key) for key in _THOUGHTS)
    _check_content(message, is_thought, name, report)
    weight = _weight(given, role, name, report)
    rest = {key: one for key, one in given.items() if key not in (*_LEARNS, "tool_calls")}
    message = {**message, **rest} if weight is None else {**message, **rest, "weight": weight}
    if is_learnt and counts(message) and _is_empty(message, is_thought):
        want = 'what the assistant says, or "weight": 0'
        report(RowProblem(f"{name}.content", message["content"], want))
    return message


def _role(given: Any, name: str, report: Report) -> str:
    role = ROLES.get(given.strip().lower().replace("-", "_")) if isinstance(given, str) else None
    if role is None:
        near = (
            f". {nearest(given, list(ROLES))}" if isinstance(given, str) and given.strip() else ""
        )
        report(RowProblem(f"{name}.role", given, f"{_WANTED_ROLES}{near.rstrip('.')}"))
        return str(given)
    return role


def _check_content(message: Row, is_thought: bool, name: str, report: Report) -> None:
    if message["content"] is None and is_thought and message["role"] == ASSISTANT:
        message["content"] = ""
    if not isinstance(message["content"], str):
        report(RowProblem(f"{name}.content", message["content"], "text"))


def _is_empty(message: Row, is_thought: bool) -> bool:
    """Whether a turn neither says nor calls nor thinks anything."""
    content = message["content"]
    is_blank = isinstance(content, str) and not content.strip()
    return is_blank and not message.get("tool_calls") and not is_thought


def _weight(given: Row, role: str, name: str, report: Report) -> int | None:
    """1 if a turn is learnt, 0 if it is not, None if it does not say."""
    said: dict[str, int] = {}
    for key, value in given.items():
        if key in _LEARNS:
            is_wrong = value not in (0, 1) or not isinstance(value, int | float)
            if is_wrong or (value and role != ASSISTANT):
                want = f"0 or 1, and 1 on turns of the assistant alone (this one is of {role!r})"
                report(RowProblem(f"{name}.{key}", value, want))
                continue
            said[key] = int(value)
        elif _ON_LEARNING.search(key.lower()):
            want = f'"weight": 0 or 1 on turns of the assistant; {key!r} is not known'
            report(RowProblem(f"{name}.{key}", value, want))
    if len({*said.values()}) > 1:
        report(RowProblem(f"{name}.{min(said)}", said[min(said)], f"the same as in {max(said)!r}"))
    if role != ASSISTANT or not said:
        return None
    return min(said.values())


def _calls(content: Any, name: str, report: Report) -> list[Any]:
    """The calls in the text of a turn of the role function_call: LLaMA-Factory's {"name",
    "arguments"}, or a list of such objects.
    """
    want = 'JSON of {"name", "arguments"}, or a list of such objects, in a turn of function_call'
    value = _from_json(content)
    calls = cast("list[Any]", value if isinstance(value, list) else [value])
    is_right = bool(calls) and all(
        isinstance(one, dict) and isinstance(one.get("name"), str) and "arguments" in one
        for one in calls
    )
    if not is_right:
        report(RowProblem(f"{name}.content", content, want))
        return []
    return _tool_calls([{"type": "function", "function": one} for one in calls], name, report)


def _from_json(text: Any) -> Any:
    try:
        return json_value(text) if isinstance(text, str) else text
    except ValueError:
        return None


def _tool_calls(calls: Any, name: str, report: Report) -> list[Any]:
    """Calls of tools with their arguments as objects, which templates need; OpenAI writes them as
    text.
    """
    if not isinstance(calls, list):
        report(RowProblem(f"{name}.tool_calls", calls, "a list of calls"))
        return []
    return [_call(call, name, report) for call in cast("list[Any]", calls)]


def _call(call: Any, name: str, report: Report) -> Any:
    function = cast("Row", call).get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        want = '{"type": "function", "function": {"name": ..., "arguments": ...}} in it'
        report(RowProblem(f"{name}.tool_calls", call, want))
        return {}
    fields = {key: one for key, one in cast("Row", function).items() if one is not None}
    arguments = fields.get("arguments")
    if isinstance(arguments, str):
        try:
            fields["arguments"] = json_value(arguments) if arguments.strip() else {}
        except ValueError as error:
            want = f"arguments that are JSON ({error})"
            report(RowProblem(f"{name}.tool_calls", arguments, want))
    others = {key: one for key, one in cast("Row", call).items() if one is not None}
    return {**others, "function": fields}


def _tools(tools: Any, report: Report) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json_value(tools) if tools.strip() else None
        except ValueError as error:
            report(RowProblem("tools", tools, f"JSON ({error})"))
            return None
    if not tools:
        return None
    listed = cast("list[Any]", tools)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in listed):
        report(RowProblem("tools", tools, "a list of JSON schemas"))
        return None
    return listed
