"""Calls of tools: their syntax is read off the chat template, and what is said is read by it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.test_chat import tokenizer
from trainer.data.chat.calls import Call, CallSyntax, Said, syntax_of
from trainer.data.chat.chat_template import ChatTemplate

HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
TAIL = (
    "{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
HERMES = (
    f'{HEAD}{CALLS}{{{{ \'<tool_call>\n{{"name": "\' + f.name + \'", "arguments": \' }}}}'
    f"{{{{ f.arguments | tojson + '}}\n</tool_call>' }}}}{{% endfor %}}{TAIL}"
)
LLAMA = (
    f'{HEAD}{CALLS}{{{{ \'{{"name": "\' + f.name + \'", "parameters": \' }}}}'
    f"{{{{ f.arguments | tojson + '}}' }}}}{{% endfor %}}{TAIL}"
)
MISTRAL = (  # its ids have nine letters and digits
    f"{HEAD}{{% if m.tool_calls %}}{{{{ '[TOOL_CALLS] [' }}}}{CALLS}{{% set out = f | tojson %}}"
    "{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
    "{{ out[:-1] + ', \"id\": \"' + c.id + '\"}' }}{% endfor %}{{ ']' }}{% endif %}" + TAIL
)
THINKING = HERMES.replace(
    CALLS, "{% if m.tool_calls %}{{ '<think>\n\n</think>\n\n' }}{% endif %}" + CALLS
)
IN_TAGS = f"{HEAD}{CALLS}{{{{ '<tool_call>' + f.name + '</tool_call>' }}}}{{% endfor %}}{TAIL}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
OF_HERMES = CallSyntax("<tool_call>\n", "\n</tool_call>", "arguments", is_list=False)
OF_LLAMA = CallSyntax("", "", "parameters", is_list=False)
OF_MISTRAL = CallSyntax("[TOOL_CALLS] ", "", "arguments", is_list=True)
RED = Call("look_up", '{"name": "red"}')


def of(template: str) -> CallSyntax | None:
    return syntax_of(ChatTemplate(tokenizer(template, SPECIAL), "of the test"))


@pytest.mark.parametrize(
    ("template", "want"),
    [
        (HERMES, OF_HERMES),
        (LLAMA, OF_LLAMA),
        (MISTRAL, OF_MISTRAL),
        (
            THINKING,
            CallSyntax(
                "<think>\n\n</think>\n\n<tool_call>\n",
                *("\n</tool_call>", "arguments"),
                is_list=False,
            ),
        ),
        (IN_TAGS, None),
        (HEAD + TAIL, None),
    ],
    ids=["hermes", "llama", "mistral", "thinking", "in tags", "no calls"],
)
def test_the_syntax_is_what_the_template_writes(template: str, want: CallSyntax | None) -> None:
    assert of(template) == want


def said(name: str, key: str = "arguments") -> str:
    return json.dumps({"name": "look_up", key: {"name": name}})


@pytest.mark.parametrize(
    ("syntax", "text", "want"),
    [
        (OF_HERMES, f"I look.\n<tool_call>\n{said('red')}\n</tool_call>", Said("I look.", [RED])),
        (
            OF_HERMES,
            f"<tool_call>{said('red')}</tool_call>\n<tool_call>{said('red')}",
            Said("", [RED, RED]),
        ),
        (OF_HERMES, "It is red.", None),
        (OF_HERMES, '<tool_call>{"name": "look_up", "argum', None),
        (OF_HERMES, f"<tool_call>{said('red')}</tool_call> and <b>", None),
        (OF_LLAMA, said("red", "parameters"), Said("", [RED])),
        (
            OF_LLAMA,
            f"<|python_tag|>{said('red', 'parameters')}; {said('red', 'parameters')}",
            Said("", [RED, RED]),
        ),
        (OF_LLAMA, "It is red.", None),
        (OF_LLAMA, '{"colour": "red"}', None),
        (OF_MISTRAL, f"[TOOL_CALLS] [{said('red')}, {said('red')}]", Said("", [RED, RED])),
        (OF_MISTRAL, "[TOOL_CALLS] []", None),
        (OF_MISTRAL, "[TOOL_CALLS] look_up", None),
    ],
)
def test_calls_are_read_by_the_syntax_and_a_torn_one_is_text(
    syntax: CallSyntax, text: str, want: Said | None
) -> None:
    assert syntax.said(text) == want


def test_thoughts_before_a_call_are_the_text_before_it() -> None:
    syntax = of(THINKING)
    assert syntax is not None
    text = f"<think>\nHm.\n</think>\n\n<tool_call>\n{said('red')}\n</tool_call>"
    assert syntax.said(text) == Said("<think>\nHm.\n</think>", [RED])


def test_the_schema_of_a_forced_call_names_the_tools_and_their_arguments() -> None:
    arguments = {"type": "object", "properties": {"name": {"enum": ["red"]}}}
    one = OF_LLAMA.schema({"look_up": arguments})
    assert one["properties"] == {"name": {"const": "look_up"}, "parameters": arguments}
    assert len(OF_HERMES.schema({"look_up": arguments, "other": arguments})["anyOf"]) == 2
    assert OF_MISTRAL.schema({"look_up": arguments})["maxItems"] == 1


def test_references_of_a_tool_lead_to_its_own_parts_inside_the_schema_of_a_call() -> None:
    def at(place: str) -> Any:
        return {
            "type": "object",
            "properties": {"enum": {"$ref": f"{place}/$defs/x"}, "again": {"$ref": place}},
            "$defs": {"x": {"enum": ["red", {"$ref": "#"}]}},
        }

    def arguments(schema: Any) -> Any:
        return schema["properties"]["arguments"]

    tools = {"look_up": at("#"), "other": at("#")}
    one = OF_HERMES.schema({"look_up": at("#")})
    assert arguments(one) == at("#/properties/arguments")
    of_both = OF_HERMES.schema(tools)["anyOf"]
    assert arguments(of_both[1]) == at("#/anyOf/1/properties/arguments")
    in_list = OF_MISTRAL.schema(tools)["items"]["anyOf"]
    assert arguments(in_list[0]) == at("#/items/anyOf/0/properties/arguments")
