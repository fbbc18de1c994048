"""A conversation out of an object that a person wrote: the one rule for training rows, uploads and
prompts.

A conversation is {"messages", "tools"?}. What a row says about who speaks and what is learnt is
obeyed or refused: no role and no key with such a meaning is passed over in silence.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any, cast

from trainer.data.formats.json_text import preview
from trainer.data.formats.lists import parsed
from trainer.data.formats.normal_form import is_blank
from trainer.data.formats.problems import Report, RowProblem
from trainer.data.formats.roles import ASSISTANT, CALL, ROLES, role_of
from trainer.data.formats.tool_calls import calls_of, tool_calls, tools_of
from trainer.errors import DataError, nearest

Row = dict[str, Any]
_WANTED_ROLES = "system, user, assistant or tool"
# Keys that say whether a turn is learnt: OpenAI (weight), axolotl (train, training), others.
LEARNS = ("weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight")
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
# The names of a list of turns: OpenAI's, and ShareGPT's.
_LISTS = ("messages", "conversations")
# What a turn may hold in place of a content, or beside one.
_BESIDE = {"role", "from", "name", "tool_calls", "tool_call_id", "id", *LEARNS, *_THOUGHTS}
# OpenAI's types of a part that is text: of a chat, of what is told and of what is answered.
_TEXT_PARTS = ("text", "input_text", "output_text")


def learnable(raw: Mapping[str, Any], place: str) -> Row:
    """The conversation of a row that is learnt from. DataError names the place of a wrong row."""
    return read(raw, _refusal_at(place))


def opened(raw: Mapping[str, Any], place: str) -> Row:
    """The conversation of an object, without turns of the assistant at its end, so that the
    assistant speaks next. DataError names the place of a wrong object.
    """
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


def turns_in(value: Any) -> list[Any] | None:
    """The turns that a prompt or a completion is, or holds as text; None for any other one."""
    turns = _as_list(value)
    if not isinstance(turns, list) or not turns:
        return None
    turns = cast("list[Any]", turns)
    is_of_turns = all(isinstance(turn, dict) and {"role", "from"} & {*turn} for turn in turns)
    return turns if is_of_turns else None


def _refusal_at(place: str) -> Report:
    def refuse(problem: RowProblem) -> None:
        raise problem.at(place)

    return refuse


def _conversation(raw: Mapping[str, Any], report: Report, *, is_learnt: bool) -> Row:
    for name, value in raw.items():
        _check_row_key(name, value, report)
    turns = _turns(raw, report, is_learnt=is_learnt)
    if turns is None or (is_learnt and not turns):
        want = "a list of objects with role and content that is not empty"
        name = next((one for one in _LISTS if raw.get(one) is not None), _LISTS[0])
        report(RowProblem(name, raw.get(name), want))
        return {"messages": []}
    read_turns = (_message(value, name, report, is_learnt=is_learnt) for name, value in turns)
    messages = [message for message in read_turns if message is not None]
    _add_system(raw.get("system"), messages, report)
    conversation: Row = {"messages": messages}
    tools = tools_of(raw.get("tools"), report)
    return {**conversation, "tools": tools} if tools else conversation


def _check_row_key(name: str, value: Any, report: Report) -> None:
    """Report a key of a whole row that says what is learnt, or whose value would be lost."""
    if value is None or value in ("", [], {}):
        return
    says_on_learning = name in (*LEARNS, "mask", "loss_masks", "sample_weight")
    if says_on_learning and not (isinstance(value, int | float) and value == 1):
        report(RowProblem(name, value, 'a "weight" of 0 or 1 on turns of the assistant'))
    elif name in _UNREAD:
        report(RowProblem(name, value, _UNREAD[name]))
    elif name == "functions":
        want = 'the functions in "tools": [{"type": "function", "function": {...}}]'
        report(RowProblem(name, value, want))
    elif name == "history":
        report(RowProblem(name, value, 'earlier turns in "messages"'))


def _turns(
    raw: Mapping[str, Any], report: Report, *, is_learnt: bool
) -> list[tuple[str, Any]] | None:
    """(name, message) of a row's messages; those of a row with prompt and completion are a question
    and its answer, or what TRL calls conversational: two lists, of which the second is learnt. None
    for messages that are no list. Where nothing is learnt, a completion is not read.
    """
    for name in _LISTS:
        if raw.get(name) is not None:
            values = _as_list(raw[name])
            return _with_names(name, values) if isinstance(values, list) else None
    completion = raw.get("completion") if is_learnt else ""
    if raw.get("prompt") is not None and completion is not None:
        return _of_prompt(raw, completion, report)
    report(_missing(raw))
    return [("messages[0]", {"role": "user", "content": ""})]


def _missing(raw: Mapping[str, Any]) -> RowProblem:
    """What a row lacks that holds no conversation, with names of its own that differ by case."""
    is_half = raw.get("prompt") is not None
    lacks = "'messages' is missing, and so are 'prompt' and 'completion'"
    ours, example = ((*_LISTS, "prompt", "completion"), {"messages": "conversations"})
    if is_half:
        lacks, ours, example = "'completion' is missing", ("completion",), {"completion": "reply"}
    theirs = {key.casefold(): key for key in raw if key not in ours}
    alike = {name: theirs[name] for name in ours if name in theirs}
    columns = {"messages" if name in _LISTS else name: key for name, key in alike.items()}
    columns = columns or ({} if is_half else _proposal(raw))
    return RowProblem(
        "",
        f"{lacks} (keys: {', '.join(raw) or 'none'}). Say in data.columns what yours are called",
        json.dumps(columns or example, ensure_ascii=False),
    )


def _proposal(raw: Mapping[str, Any]) -> dict[str, str]:
    """Columns by what they hold: one of lists of objects, or two of texts. Empty where others are
    as likely.
    """
    turns: list[str] = []
    for name, value in raw.items():
        listed = _as_list(value)
        if isinstance(listed, list) and listed and isinstance(listed[0], dict):
            turns.append(name)
    texts = [
        name
        for name, value in raw.items()
        if isinstance(value, str) and not re.search(r"(?:^|_)id$", name.casefold())
    ]
    if len(turns) == 1:
        return {"messages": turns[0]}
    if len(texts) == 2 and not turns:
        return {"prompt": texts[0], "completion": texts[1]}
    return {}


def _of_prompt(raw: Mapping[str, Any], answer: Any, report: Report) -> list[tuple[str, Any]]:
    """(name, message) of a prompt and its completion, each a text or a list of turns."""
    prompt, completion = turns_in(raw["prompt"]), turns_in(answer)
    sides = {"prompt": (raw["prompt"], prompt), "completion": (answer, completion)}
    for name, (value, turns) in sides.items():
        if turns is None and not isinstance(value, str):
            report(RowProblem(name, value, "text, or a list of objects with role and content"))
            return [("messages[0]", {"role": "user", "content": ""})]
    more = raw.get("input")
    if not isinstance(more, str | None):
        report(RowProblem("input", more, "text"))
    elif prompt is not None and more and more.strip():
        report(RowProblem("input", more, 'it in a turn of "prompt", which is a list of turns'))
    if prompt is None:
        turns = [("messages[0]", {"role": "user", "content": with_input(raw)})]
    else:
        turns = [(name, _unlearnt(turn)) for name, turn in _with_names("prompt", prompt)]
    if completion is None:
        message = {"role": ASSISTANT, "content": answer}
        return [*turns, (f"messages[{len(turns)}]", message)]
    return turns + _with_names("completion", completion)


def _with_names(name: str, turns: list[Any]) -> list[tuple[str, Any]]:
    return [(f"{name}[{number}]", turn) for number, turn in enumerate(turns)]


def _unlearnt(turn: Row) -> Row:
    """A turn of a prompt, which is not learnt unless it says so."""
    is_of_assistant = role_of(turn.get("role") or turn.get("from")) in (ASSISTANT, CALL)
    is_open = all(turn.get(key) is None for key in LEARNS)
    return {**turn, "weight": 0} if is_of_assistant and is_open else turn


def _as_list(values: Any) -> Any:
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
    nor are said by it; None where one of them is no text. Any other value unchanged.
    """
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):  # pyright: ignore[reportUnknownVariableType]
        return cast("Any", value)
    turns = [
        (role_of(turn.get("role") or turn.get("from")), turn) for turn in cast("list[Row]", value)
    ]
    turns = list(itertools.dropwhile(lambda turn: turn[0] not in (None, "user"), turns))
    opening = itertools.takewhile(lambda turn: turn[0] == turns[0][0], turns)
    problems: list[RowProblem] = []
    texts: list[Any] = []
    for _, turn in opening:
        is_open = turn.get("content") is None and turn.get("value") is None
        content = _text(turn.get("content") or turn.get("value"), "", problems.append)
        if is_open or problems or not isinstance(content, str | None):
            return None
        texts.append(content)
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
    fields = {key: one for key, one in cast("Row", value).items() if one is not None}
    for ours, theirs in (("role", "from"), ("content", "value")):
        if ours in fields and theirs in fields and fields[ours] != fields[theirs]:
            report(RowProblem(f"{name}.{theirs}", fields[theirs], f"no other one than its {ours}"))
    role_at = f"{name}.{'from' if 'from' in fields and 'role' not in fields else 'role'}"
    said_at = f"{name}.{'value' if 'value' in fields and 'content' not in fields else 'content'}"
    message: Row = {
        "role": fields.pop("role", fields.pop("from", None)),
        "content": fields.pop("content", fields.pop("value", None)),
    }
    fields.pop("from", None)
    fields.pop("value", None)
    role = _role(message["role"], role_at, report, keys=[*cast("Row", value)])
    for key, want in _UNREAD.items():
        if fields.get(key) not in (None, "", [], {}):
            report(RowProblem(f"{name}.{key}", fields[key], want))
    if role == CALL:
        role = ASSISTANT
        message |= {"content": "", "tool_calls": calls_of(message["content"], said_at, report)}
    if fields.get("tool_calls"):
        message["tool_calls"] = tool_calls(fields["tool_calls"], name, report)
    if message.get("tool_calls") and message["content"] is None:
        message["content"] = ""
    message["role"] = role
    is_thought = any(fields.get(key) for key in _THOUGHTS)
    if message["content"] is None and not is_thought:
        other = next((key for key in fields if key not in _BESIDE and key not in _UNREAD), None)
        if other is not None:
            report(RowProblem(f"{name}.{other}", fields[other], 'what is said as "content"'))
            return None
    if message["content"] is None and is_thought and role == ASSISTANT:
        message["content"] = ""
    message["content"] = _text(message["content"], said_at, report)
    if not isinstance(message["content"], str):
        report(RowProblem(said_at, message["content"], "text"))
    weight = _weight(fields, role, name, report)
    rest = {key: one for key, one in fields.items() if key not in (*LEARNS, "tool_calls")}
    message = {**message, **rest} if weight is None else {**message, **rest, "weight": weight}
    content = message["content"]
    is_said = not isinstance(content, str) or not is_blank(content)
    acts = is_said or bool(message.get("tool_calls")) or is_thought
    if is_learnt and counts(message) and not acts:
        want = 'what the assistant says, or "weight": 0'
        report(RowProblem(said_at, message["content"], want))
    return message


def _role(given: Any, place: str, report: Report, *, keys: list[str]) -> str:
    role = role_of(given)
    if role is None:
        near = f". The keys of the turn: {', '.join(keys) or 'none'}" if given is None else ""
        if isinstance(given, str) and given.strip():
            near = f". {nearest(given, list(ROLES))}"
        report(RowProblem(place, given, f"{_WANTED_ROLES}{near.rstrip('.')}"))
        return str(given)
    return role


def _text(content: Any, name: str, report: Report) -> Any:
    """The text of OpenAI's parts, {"type": "text", "text"}, together; any other content unchanged.
    Parts of another type are reported.
    """
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    if not any(isinstance(part, dict) for part in parts):
        return content
    texts: list[str] = []
    for number, part in enumerate(parts):
        if not isinstance(part, dict):
            report(RowProblem(f"{name}[{number}]", part, 'a part, {"type": "text", "text": ...}'))
        elif part.get("type") not in _TEXT_PARTS:
            report(RowProblem(f"{name}[{number}].type", part.get("type"), "'text' alone"))
        elif not isinstance(part.get("text"), str):
            report(RowProblem(f"{name}[{number}].text", part.get("text"), "text"))
        else:
            texts.append(part["text"])
    return "".join(texts)


def _weight(given: Row, role: str, name: str, report: Report) -> int | None:
    """1 if a turn is learnt, 0 if it is not, None if it does not say."""
    weights: dict[str, int] = {}
    for key, value in given.items():
        if key in LEARNS:
            is_wrong = value not in (0, 1) or not isinstance(value, int | float)
            if is_wrong or (value and role != ASSISTANT):
                want = f"0 or 1, and 1 on turns of the assistant alone (this one is of {role!r})"
                report(RowProblem(f"{name}.{key}", value, want))
                continue
            weights[key] = int(value)
        elif _ON_LEARNING.search(_HUMP.sub("_", key).lower()):
            want = f'"weight": 0 or 1 on turns of the assistant; {key!r} is not known'
            report(RowProblem(f"{name}.{key}", value, want))
    if len({*weights.values()}) > 1:
        report(
            RowProblem(
                f"{name}.{min(weights)}", weights[min(weights)], f"the same as in {max(weights)!r}"
            )
        )
    if role != ASSISTANT or not weights:
        return None
    return min(weights.values())
