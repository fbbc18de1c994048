"""Calls of tools in a conversation, and the tools that it may call."""

from __future__ import annotations

from typing import Any, cast

from trainer.data.formats.json_text import json_value
from trainer.data.formats.problems import Report, RowProblem

Row = dict[str, Any]


def calls_of(content: Any, name: str, report: Report) -> list[Any]:
    """The calls in the text of a turn of the role function_call: LLaMA-Factory's {"name",
    "arguments"}, or a list of such objects.
    """
    want = 'JSON of {"name", "arguments"}, or a list of such objects, in a turn of function_call'
    turn = name.rpartition(".")[0]
    try:
        value = json_value(content) if isinstance(content, str) else content
    except ValueError:
        value = None
    calls = cast("list[Any]", value if isinstance(value, list) else [value])
    is_right = bool(calls) and all(
        isinstance(one, dict) and isinstance(one.get("name"), str) and "arguments" in one
        for one in calls
    )
    if not is_right:
        report(RowProblem(name, content, want))
        return []
    return tool_calls([{"type": "function", "function": one} for one in calls], turn, report)


def tool_calls(calls: Any, name: str, report: Report) -> list[Any]:
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


def tools_of(tools: Any, report: Report) -> list[Any] | None:
    """The tools of a row, a list of JSON schemas or the text of one; None where there are none."""
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
