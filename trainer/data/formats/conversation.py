"""A conversation out of an object that a person wrote: the one rule for training rows, uploads and
prompts.

A conversation is {"messages", "tools"?}. What a row says about who speaks and what is learnt is
obeyed or refused: no role and no key with such a meaning is passed over in silence.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from trainer.data.formats.json_text import json_value, preview
from trainer.data.formats.lists import parsed
from trainer.data.formats.roles import ASSISTANT, CALL, ROLES, role_of
from trainer.errors import DataError, nearest

Row = dict[str, Any]
_WANTED_ROLES = "system, user, assistant or tool"
# Keys that say whether a turn is learnt: OpenAI (weight), axolotl (train, training), others.
_LEARNS = ("weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight")
# A key of a turn, or of a row, that seems to say what is learnt and that is not one of these.
_ON_LEARNING = re.compile(
    r"(^|_)(train(ing|able|ed)?|loss|(un)?mask(ed|s)?|weights?|(un)?learn(t|ed)?"
    r"|ignored?|skip(ped)?|supervised?)(_|$)"
)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")  # lossMask, loss-mask
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
    turns = _turns(raw, report)
    if turns is None or (is_learnt and not turns):
        want = "a list of objects with role and content that is not empty"
        report(RowProblem("messages", raw.get("messages"), want))
        return {"messages": []}
    read_turns = (_message(value, name, report, is_learnt=is_learnt) for name, value in turns)
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


def _turns(raw: Mapping[str, Any], report: Report) -> list[tuple[str, Any]] | None:
    """(name, message) of a row's messages; those of a row with prompt and completion are a question
    and its answer, or what TRL calls conversational: two lists, of which the second is learnt. None
    for messages that are no list.
    """
    if raw.get("messages") is not None:
        values = _listed(raw["messages"])
        return _named("messages", values) if isinstance(values, list) else None
    if raw.get("prompt") is not None and raw.get("completion") is not None:
        return _of_prompt(raw, report)
    report(
        RowProblem(
            "",
            "'messages' is missing, and so are 'prompt' and 'completion' (keys: "
            f"{', '.join(raw) or 'none'}). Say in data.columns what yours are called",
            '{"messages": "conversations"}',
        )
    )
    return [("messages[0]", {"role": "user", "content": ""})]


def _of_prompt(raw: Mapping[str, Any], report: Report) -> list[tuple[str, Any]]:
    """(name, message) of a prompt and its completion, each a text or a list of turns."""
    prompt, completion = (_conversational(raw[name]) for name in ("prompt", "completion"))
    for name, turns in (("prompt", prompt), ("completion", completion)):
        if turns is None and not isinstance(raw[name], str):
            report(RowProblem(name, raw[name], "text, or a list of objects with role and content"))
            return [("messages[0]", {"role": "user", "content": ""})]
    more = raw.get("input")
    if not isinstance(more, str | None):
        report(RowProblem("input", more, "text"))
    elif prompt is not None and more and more.strip():
        report(RowProblem("input", more, 'it in a turn of "prompt", which is a list of turns'))
    if prompt is None:
        turns = [("messages[0]", {"role": "user", "content": with_input(raw)})]
    else:
        turns = [(name, _unlearnt(turn)) for name, turn in _named("prompt", prompt)]
    if completion is None:
        answer = {"role": ASSISTANT, "content": raw["completion"]}
        return [*turns, (f"messages[{len(turns)}]", answer)]
    return turns + _named("completion", completion)


def _named(name: str, turns: list[Any]) -> list[tuple[str, Any]]:
    return [(f"{name}[{number}]", turn) for number, turn in enumerate(turns)]


def _conversational(value: Any) -> list[Any] | None:
    """The turns that a prompt or a completion is, or holds as text; None for any other one."""
    turns = _listed(value)
    if not isinstance(turns, list) or not turns:
        return None
    turns = cast("list[Any]", turns)
    is_of_turns = all(isinstance(turn, dict) and {"role", "from"} & {*turn} for turn in turns)
    return turns if is_of_turns else None


def _unlearnt(turn: Row) -> Row:
    """A turn of a prompt, which is not learnt unless it says so."""
    is_of_assistant = role_of(turn.get("role") or turn.get("from")) in (ASSISTANT, CALL)
    is_open = all(turn.get(key) is None for key in _LEARNS)
    return {**turn, "weight": 0} if is_of_assistant and is_open else turn


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


def question_in(value: Any) -> Any:
    """What a conversation asks: the texts of its first turns that neither instruct the assistant
    nor are said by it. Any other value unchanged.
    """
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):  # pyright: ignore[reportUnknownVariableType]
        return cast("Any", value)
    turns = [
        (role_of(turn.get("role") or turn.get("from")), turn) for turn in cast("list[Row]", value)
    ]
    turns = list(itertools.dropwhile(lambda turn: turn[0] not in (None, "user"), turns))
    said = itertools.takewhile(lambda turn: turn[0] == turns[0][0], turns)
    contents = (turn.get("content") or turn.get("value") for _, turn in said)
    texts = [_text(content, "", lambda _: None) for content in contents]
    return texts or cast("Any", value)


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
    role = role_of(given)
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
    message["content"] = _text(message["content"], f"{name}.content", report)
    if not isinstance(message["content"], str):
        report(RowProblem(f"{name}.content", message["content"], "text"))


def _text(content: Any, name: str, report: Report) -> Any:
    """The text of OpenAI's parts, {"type": "text", "text"}, together; any other content unchanged.
    Parts of another type are reported.
    """
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    if not parts or not all(isinstance(part, dict) for part in parts):
        return content
    texts: list[str] = []
    for number, part in enumerate(cast("list[Row]", parts)):
        if part.get("type") != "text":
            report(RowProblem(f"{name}[{number}].type", part.get("type"), "'text' alone"))
        elif not isinstance(part.get("text"), str):
            report(RowProblem(f"{name}[{number}].text", part.get("text"), "text"))
        else:
            texts.append(part["text"])
    return "".join(texts)


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
        elif _ON_LEARNING.search(_HUMP.sub("_", key).lower()):
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
