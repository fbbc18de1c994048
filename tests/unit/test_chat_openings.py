"""What opens an answer, where the talk before may change it: exact, and without writing all turns
before each answer.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from tests.unit.test_chat import BY_CONTENT, TURNS, learnt, tokenizer
from trainer.data.chat.chat_template import ChatTemplate
from trainer.data.chat.templates.built_in import BUILT_IN
from trainer.data.chat.templates.marks import MarkedTemplate

# As of Gemma 4: what opens an answer depends on the kind of the last thing that was written, which
# a turn may learn from the turns behind it. All turns are looked at before the first is written.
AHEAD = (
    "{% set ns = namespace(kind=none, before=none) %}"
    "{% set turns = namespace(user=-1) %}{% set rest = messages %}"
    "{% if messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content }}"
    "{% set ns.kind = 'system' %}{% set rest = messages[1:] %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for i in range(rest | length) %}{% if rest[i].role == 'user' %}"
    "{% set turns.user = i %}{% endif %}{% endfor %}"
    "{% for m in rest %}{% if m.role != 'tool' %}{% set ns.kind = none %}"
    "{% if not (m.role == 'assistant' and ns.before == 'assistant') %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% endif %}"
    "{% if m.role == 'assistant' and loop.index0 > turns.user %}{{ '<think></think>' }}{% endif %}"
    "{% if m.tool_calls %}{{ '<|calls|>' }}{% set ns.kind = 'call' %}"
    "{% set scan = namespace(is_over=false) %}"
    "{% for k in range(loop.index0 + 1, rest | length) %}"
    "{% if scan.is_over %}{% elif rest[k].role != 'tool' %}{% set scan.is_over = true %}"
    "{% else %}{{ '<|result|>' + rest[k].content }}{% set ns.kind = 'result' %}"
    "{% endif %}{% endfor %}{% endif %}"
    "{{ m.content }}{% if ns.kind != 'call' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% set ns.before = m.role %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and ns.kind not in ('call', 'result') %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def counting(in_turn: str, at_end: str, *, before: str = "") -> str:
    """A template with a part of each turn, and of its end."""
    start = "{% set ns = namespace(n=0, first=none) %}" + before + "{% for m in messages %}"
    return f"{start}{in_turn}{TURN}{{% endfor %}}{OPEN}{{% if add_generation_prompt %}}{at_end}{{% endif %}}"


EXACT = {
    "ahead": AHEAD,
    "by content": re.sub(r"{%- if message.tool_calls %}.*?{% endif %}", "", BY_CONTENT),
    "number of turns": counting("{% set ns.n = ns.n + 1 %}", "{{ ns.n }}"),
    "by a macro": counting(
        "{{ more(ns) }}",
        "{{ ns.n }}",
        before="{% macro more(of) %}{% set of.n = of.n + 1 %}{% endmacro %}",
    ),
    "first turn": counting(
        "{% if loop.first %}{% set ns.first = m.content %}{% endif %}", "{{ ns }}"
    ),
    "last turn": counting(
        "{% if loop.last %}{% set ns.n = (loop.length, loop.index, loop.revindex) %}{% endif %}",
        "{{ ns.n }}",
    ),
    "turn before": counting("{% set ns.first = (loop.previtem or m).content %}", "{{ ns.first }}"),
    "is defined": counting("{% set ns.more = m.content %}", "{{ ns.more is defined }}"),
    "is never defined": counting(
        "{% if loop.first %}{% set ns.more = 1 %}{% endif %}", "{{ ns.more is defined }}"
    ),
    "parts of a turn": counting("{% set ns.n = loop.cycle('a', 'b') %}", "{{ ns.n }}"),
    "turns of users": counting(
        "{% if m.role == 'user' %}{% set ns.first = m.content %}{% endif %}", "{{ ns.first }}"
    ),
    "a list": counting(
        "{% set ns.n = roles[loop.index0] %}",
        "{{ ns.n }}",
        before="{% set roles = messages | map(attribute='role') | list %}",
    ),
    "another alias": counting(
        "{% set other = ns %}{% set other.n = m.content %}", "{{ ns.n }}{{ ns | string | length }}"
    ),
}
# The turns stand before the loop that is taken for theirs, which writes one of them again.
EXACT["the turns stand before"] = (
    "{% set box = namespace(all=messages) %}{% for m in box.all %}"
    + TURN
    + "{% endfor %}{% for m in messages %}{% if loop.first %}{{ m.content }}{% endif %}{% endfor %}"
    + OPEN
    + "{{ messages | length }}"
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "/no_think"},
    *({"role": "user", "content": "1?"}, {"role": "assistant", "content": "One."}),
    *({"role": "user", "content": "2?"}, {"role": "user", "content": "3?"}),
    {"role": "assistant", "content": "Two.", "tool_calls": [CALL]},
    *({"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}),
    *({"role": "assistant", "content": "Three."}, {"role": "assistant", "content": "Four."}),
    *({"role": "user", "content": "6?"}, {"role": "assistant", "content": "Five."}),
]
GIVEN = {"add_generation_prompt": True, "eos_token": "<|endoftext|>"}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("begins_at", [0, 1])
def test_what_opens_an_answer_is_what_all_turns_before_it_say(name: str, begins_at: int) -> None:
    resumed, whole = MarkedTemplate(EXACT[name]), MarkedTemplate(EXACT[name])
    assert resumed.is_resumable
    whole._names = None  # it writes every turn
    talk = TALK[begins_at:]
    text = resumed.text(talk, {**GIVEN, "add_generation_prompt": False})
    assert text is not None
    made = tokenizer(EXACT[name])
    for number in range(1, len(talk) + 1):
        opening = resumed.opening(text.chat[:number], GIVEN)
        assert opening == whole.opening(text.chat[:number], GIVEN)
        if opening is not None:
            opened = made.apply_chat_template(
                talk[:number], tokenize=False, add_generation_prompt=True
            )
            assert opened.endswith(opening)


@pytest.mark.parametrize(
    "template",
    [
        counting("{{ c.next() }}", "{{ c.current }}", before="{% set c = cycler('a', 'b') %}"),
        counting("{{ sep() }}", "{{ sep() }}", before="{% set sep = joiner(',') %}"),
        counting(
            "{% set ns.n = roles | first %}",
            "{{ ns.n }}{{ roles | first }}",
            before="{% set roles = messages | map(attribute='role') %}",
        ),
        counting("{% set ns.n = loop.changed(m.role) %}", "{{ ns.n }}"),
        counting(
            "{% set ns.n = m.role %}{% if m.role == 'tool' %}{% break %}{% endif %}", "{{ ns.n }}"
        ),
        counting("{% set ns.n = ns.n + 1 %}", "{{ ns.n }}").replace(
            "in messages", "in messages if m.role != 'tool'"
        ),
        counting("{% set ns.n = ns.n + 1 %}", "{{ ns.n }}").replace("in messages", "in ns.all"),
        counting("{% set ns.n = [1, 2] | random %}", "{{ ns.n }}"),
        counting("{% for one in loop %}{{ one }}{% endfor %}", "{{ ns.n }}"),
        counting("{% block turn %}{% endblock %}", "{{ ns.n }}"),
        BUILT_IN["chatml"].replace(
            "for message in messages %}",
            "for i in range(messages | length) %}{%- set message = messages[i] %}",
        ),
    ],
)
def test_a_template_that_keeps_a_state_elsewhere_is_written_whole(template: str) -> None:
    assert not MarkedTemplate(template).is_resumable


class CountedTurn(dict[str, Any]):
    """A turn that counts how often turns are written."""

    written = 0

    def __getitem__(self, key: str) -> Any:
        CountedTurn.written += key == "content"
        return super().__getitem__(key)


def turns_written(template: str, talk: list[Any]) -> int:
    """How many turns are written to encode a conversation."""
    chat = ChatTemplate.of(tokenizer(template), None, None)
    CountedTurn.written = 0
    chat.tokens([{"messages": talk}], 0)
    return CountedTurn.written


@pytest.mark.parametrize("template", [AHEAD, BY_CONTENT])
def test_the_turns_that_are_written_grow_as_the_conversation_does(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        chat_template_utils,
        "_alias_reasoning_fields",
        lambda turns: [CountedTurn(turn) for turn in turns],
    )
    short, long = (
        turns_written(template, [*TURNS[:1], *TURNS[1:3] * number]) for number in (10, 100)
    )
    assert 200 < long < 11 * short
    assert long < 6 * 200


def test_a_turn_is_learnt_behind_what_its_own_talk_opens() -> None:
    assert learnt(AHEAD, TURNS) == [
        "<think></think>Eins.<|im_end|>",
        "<think></think> Zwei \n<|im_end|>",
    ]
