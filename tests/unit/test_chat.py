"""Conversations: which tokens the assistant says, by hand, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from tests.wording import Fault, fault, refused
from trainer.config.own_rows import OwnRows
from trainer.data import encoding
from trainer.data.chat import chat_template as chat_module
from trainer.data.chat.chat_template import ChatTemplate, flags
from trainer.data.chat.rows import chats, opened
from trainer.data.chat.templates.built_in import BUILT_IN
from trainer.data.chat.templates.marks import MarkedTemplate
from trainer.data.formats import conversation
from trainer.data.readers.questions import completions
from trainer.tasks.causal_lm.trained import usage

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Eins."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": " Zwei \n"},
]
LLAMA_3 = (
    "{% for message in messages %}"
    "{{ '<|begin_of_text|>' if loop.first else '' }}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{{ message.content | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MARKED = (  # as authors write who says what
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A reason is written in the last answer alone, as Qwen 3 does.
FORGETFUL = MARKED.replace(
    "{% generation %}", "{% generation %}{{ '<think></think>' if loop.last else '' }}"
)
SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
]


# Roles in words; what stands behind a turn is to be filled in.
SPELT = (
    "{{% for m in messages %}}{{{{ m.role ~ ':' ~ m.content }}}}{}{{% endfor %}}"
    "{{% if add_generation_prompt %}}assistant:{{% endif %}}"
)


def tokenizer(template: str | None, special: list[str] = SPECIAL) -> Any:
    """A token for every byte, and one for each special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    found.add_special_tokens({"additional_special_tokens": special})
    found.chat_template = template
    return found


def learnt(template: str | None, turns: list[dict[str, Any]], **row: Any) -> list[str]:
    """The texts that are learnt, one after the other."""
    made = tokenizer(template)
    chat = ChatTemplate.of(made, row.pop("given", None), None)
    tokens = chat.tokens([{"messages": turns, **row}], made.eos_token_id)[0]
    pairs = zip(tokens["ids"], tokens["scored"], strict=True)
    runs = [list(run) for is_scored, run in groupby(pairs, key=itemgetter(1)) if is_scored]
    return [made.decode([number for number, _ in run]) for run in runs]


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (BUILT_IN["chatml"], ["Eins.<|im_end|>", " Zwei \n<|im_end|>"]),
        (LLAMA_3, ["Eins.<|eot_id|>", "Zwei<|eot_id|>"]),
        (BUILT_IN["plain"], [" Eins.<|endoftext|>", " Zwei<|endoftext|>"]),
    ],
    ids=["chatml", "llama 3", "plain"],
)
def test_what_the_assistant_says_is_learnt_with_the_token_that_ends_it(
    template: str, wanted: list[str]
) -> None:
    assert learnt(template, TURNS) == wanted


@pytest.mark.parametrize(
    ("template", "special", "closing"),
    [
        (BUILT_IN["chatml"], SPECIAL, ""),
        (BUILT_IN["chatml"], [], "<|im_end|>\n"),
        (BUILT_IN["plain"], SPECIAL, ""),
        (SPELT.format("\n\n"), [], "\n\n"),
        (SPELT.format("{{ eos_token }}"), SPECIAL, ""),
        ("{{ raise_exception('no') }}", [], ""),
    ],
)
def test_what_a_template_writes_behind_an_answer_without_a_token_is_its_closing(
    template: str, special: list[str], closing: str
) -> None:
    assert ChatTemplate(tokenizer(template, special), "here").closing == closing


def test_the_ids_are_those_that_the_template_gives() -> None:
    made = tokenizer(LLAMA_3)
    tokens = ChatTemplate.of(made, None, None).tokens([{"messages": TURNS}], made.eos_token_id)[0]
    said = made.apply_chat_template(TURNS, return_dict=True)
    assert tokens["ids"] == said["input_ids"]


@pytest.mark.parametrize("template", [MARKED, FORGETFUL], ids=["by prefixes", "by marks alone"])
def test_the_mask_is_that_of_transformers_where_the_template_marks_it(template: str) -> None:
    made = tokenizer(template)
    tokens = ChatTemplate.of(made, None, None).tokens([{"messages": TURNS}], made.eos_token_id)[0]
    said = made.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    assert tokens["ids"] == said["input_ids"]
    assert tokens["scored"] == said["assistant_masks"]
    assert sum(tokens["scored"]) > 10


@pytest.mark.parametrize("template", [BUILT_IN["chatml"], FORGETFUL])
def test_a_turn_of_weight_0_is_read_and_not_learnt(template: str) -> None:
    turns = [{**turn, "weight": 0} if turn["content"] == "Eins." else turn for turn in TURNS]
    (text,) = learnt(template, turns)
    assert text.endswith(" Zwei \n<|im_end|>")


def test_a_last_turn_that_no_token_ends_gets_the_end_of_the_text() -> None:
    made = tokenizer(None, special=[])
    tokens = ChatTemplate.of(made, "chatml", None).tokens([{"messages": TURNS}], made.eos_token_id)[
        0
    ]
    assert tokens["ids"][-1] == made.eos_token_id
    assert tokens["scored"][-1] == 1
    assert tokens["ids"].count(made.eos_token_id) == 1


def test_a_learnt_turn_keeps_the_thoughts_that_the_template_drops_once_more_turns_follow() -> None:
    template = FORGETFUL.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    wanted = ["<think></think>Eins.<|im_end|>", "<think></think> Zwei \n<|im_end|>"]
    assert learnt(template, TURNS) == wanted
    turns = [{**TURNS[2], "weight": 0} if turn == TURNS[2] else turn for turn in TURNS]
    assert learnt(template, turns) == wanted[1:]
    made = tokenizer(template)
    tokens = ChatTemplate.of(made, None, None).tokens([{"messages": turns}], made.eos_token_id)[0]
    assert tokens["ids"] == made.apply_chat_template(TURNS, return_dict=True)["input_ids"]


def test_what_the_template_opens_is_not_learnt_and_stands_there() -> None:
    """As of Qwen 3.5, which opens every answer with thoughts and drops them from earlier turns."""
    template = (
        "{% set last = namespace(user=-1) %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' and loop.index0 > last.user %}{{ '<think>\nSo.</think>' }}"
        "{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    assert learnt(template, TURNS) == [
        "So.</think>Eins.<|im_end|>",
        "So.</think> Zwei \n<|im_end|>",
    ]
    made = tokenizer(template)
    tokens = ChatTemplate.of(made, None, None).tokens([{"messages": TURNS}], made.eos_token_id)[0]
    assert made.decode(tokens["ids"]).count("<|im_start|>assistant\n<think>\nSo.</think>") == 2


def test_a_tail_behind_the_last_turn_is_no_obstacle() -> None:
    """As of Phi-3, which closes a conversation that is not opened with the end of the text."""
    template = BUILT_IN["chatml"] + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    wanted = ["Eins.<|im_end|>", " Zwei \n<|im_end|>\n<|endoftext|>"]
    assert learnt(template, TURNS) == wanted


def test_turns_whose_content_or_calls_are_not_written_are_refused() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [TURNS[1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    with refused("template_drops", what="the call of 'add'", turn=2, turns=2):
        learnt(LLAMA_3, turns)
    parts = LLAMA_3.replace("message.content | trim", "(message.content if loop.first else '')")
    with refused("template_drops", what="the content", turn=2, turns=2):
        learnt(parts, TURNS[1:3])


def test_a_template_that_counts_its_messages_is_read_and_said_to_be_slow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    template = BUILT_IN["chatml"].replace(
        "for message in messages %}",
        "for i in range(messages | length) %}{%- set message = messages[i] %}",
    )
    assert learnt(template, TURNS) == learnt(BUILT_IN["chatml"], TURNS)
    chat = ChatTemplate.of(tokenizer(template), None, None)
    caplog.clear()
    chat.tokens([{"messages": TURNS}] * 2, 0)
    assert ["slow for conversations" in one for one in caplog.messages] == [True]


@pytest.mark.parametrize(("turns", "is_told"), [(17, True), (3, False)])
def test_a_template_of_which_all_turns_open_an_answer_is_said_to_be_slow_for_many(
    turns: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    template = BY_CONTENT.replace("{%- for m", "{% set one = cycler('a') %}{%- for m")
    chat = ChatTemplate.of(tokenizer(template), None, None)
    chat.tokens([{"messages": TURNS[1:3] * turns}], 0)
    assert ["before it tell it: slow" in one for one in caplog.messages] == [True] * is_told


WITH_THOUGHTS = MARKED.replace(
    "{{ message.content", "{{ (message.reasoning_content or '') + message.content"
)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("content", ["", "4"])
def test_a_turn_whose_thoughts_are_not_written_is_refused(key: str, content: str) -> None:
    turns = [TURNS[1], {"role": "assistant", "content": content, key: "I think 4"}]
    with refused("template_drops", what=f"the {key!r}", turn=2, turns=2):
        learnt(BUILT_IN["chatml"], turns)
    assert learnt(BUILT_IN["chatml"], [TURNS[1], TURNS[2], TURNS[3], {**TURNS[4], key: ""}])
    assert learnt(WITH_THOUGHTS, turns) == [f"I think 4{content}<|im_end|>"]


def test_a_turn_of_which_only_its_end_would_be_learnt_is_refused() -> None:
    with refused("template_drops", what="the content", turn=2, turns=2):
        learnt(BUILT_IN["chatml"], [TURNS[1], {"role": "assistant", "content": " "}])


def test_thoughts_that_a_template_drops_from_earlier_turns_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    template = WITH_THOUGHTS.replace(
        "message.reasoning_content or", "(message.thinking or '') if loop.last else"
    )
    row = {
        "messages": [
            one | ({"thinking": "So."} if "E" in one["content"] or "Z" in one["content"] else {})
            for one in TURNS
        ]
    }
    made = tokenizer(template)
    chat = ChatTemplate.of(made, None, None)
    chat.tokens([row, row], 0)
    told = [one for one in caplog.messages if "leaves out the thoughts of earlier turns" in one]
    assert len(told) == 1
    with refused("template_drops", what="the 'thinking'", turn=3, turns=5):
        chat.tokens([{"messages": [*row["messages"][:4], TURNS[4]]}], 0)


def test_a_conversation_is_rendered_as_often_whatever_its_number_of_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = tokenizer(BUILT_IN["chatml"])
    chat = ChatTemplate.of(made, None, None)
    chat.tokens([{"messages": TURNS}], made.eos_token_id)  # meets every kind of opening
    lengths: list[int] = []
    for name in ("text", "marked_text"):
        render = getattr(chat._writer, name)

        def count(messages: Any, *rest: Any, render: Any = render, **how: Any) -> Any:
            lengths.append(len(messages))
            return render(messages, *rest, **how)

        monkeypatch.setattr(chat._writer, name, count)
    turns = [TURNS[0], *(TURNS[1:3] * 100)]
    tokens = chat.tokens([{"messages": turns}], made.eos_token_id)[0]
    assert made.decode(tokens["ids"]).count("Eins.") == 100
    assert sum(lengths) <= 4 * len(turns)


# SmolLM3's: an answer opens with empty thoughts where the system text says so.
BY_CONTENT = (
    "{% set how = '/no_think' if '/no_think' in messages[0].content else '' %}"
    + BUILT_IN["chatml"].partition("{%- if add_generation_prompt")[0]
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if how == '/no_think' %}{{ '<think>\n\n</think>\n' }}{% endif %}{% endif %}"
)


def of_system(text: str) -> dict[str, Any]:
    thoughts = "<think>\n\n</think>\n" if text == "/no_think" else ""
    answer = {"role": "assistant", "content": thoughts + "Eins."}
    return {"messages": [{"role": "system", "content": text}, TURNS[1], answer]}


@pytest.mark.parametrize("num_proc", [1, 2])
def test_what_is_learnt_of_a_row_does_not_depend_on_the_rows_before_it(
    num_proc: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_CHUNK", 2)
    rows = [of_system(text) for text in ["be good"] * 3 + ["/no_think"] * 3]
    scored: list[list[int]] = []
    for ordered in (rows, rows[::-1]):
        made = tokenizer(BY_CONTENT)
        chat = ChatTemplate.of(made, None, None)
        assert made.decode([chat.turn_end(0)]) == "<|im_end|>"

        def encode(chunk: Sequence[Any], chat: Any = chat) -> list[Any]:
            return chat.tokens(chunk, 0)

        found = encoding.encoded_rows(ordered, encode, num_proc=num_proc, at_once=2)
        scored.append([sum(one["scored"]) for one in found])
    assert scored == [[len("Eins.") + 1] * 6] * 2


DEFAULT = "{% set how = how if how is defined else 'on' %}"  # as of Nemotron 3


@pytest.mark.parametrize(
    ("template", "is_known"),
    [
        (BUILT_IN["chatml"], True),
        (LLAMA_3, True),
        (FORGETFUL, True),
        (
            "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
            "{% endif %}" + LLAMA_3,
            True,
        ),
        (
            LLAMA_3.replace(
                "{% endif %}", "{% elif messages[-1].role == 'user' %}{{ eos_token }}{% endif %}"
            ),
            True,
        ),
        ("{% for one in messages[0].content %}{{ one }}{% endfor %}" + LLAMA_3, True),
        (DEFAULT + LLAMA_3 + "{{ how }}", True),
        (
            DEFAULT
            + "{% for one in tools or [] %}{% for k, v in one.a | items %}{{ k }}{% endfor %}{% endfor %}"
            + LLAMA_3,
            True,
        ),
        (DEFAULT + "{% set how = tools %}{% set b = how %}" + LLAMA_3 + "{{ b }}", False),
        (DEFAULT + "{% set how = tools %}" + LLAMA_3 + "{{ how }}", False),
        (DEFAULT + LLAMA_3 + "{% set how = how ~ messages | length %}{{ how }}", False),
        (DEFAULT.replace("'on'", "messages | length") + LLAMA_3 + "{{ how }}", False),
        (DEFAULT.replace("'on'", "cycler('a', 'b')") + LLAMA_3 + "{{ how.next() }}", False),
        ("{% set add_generation_prompt = true %}" + LLAMA_3, False),
        ("{% for k, v in messages | groupby('role') %}{{ k }}{% endfor %}" + LLAMA_3, False),
        (BY_CONTENT, False),
        (LLAMA_3.replace("{% endfor %}", "{% else %}none{% endfor %}"), False),
        (LLAMA_3 + "{{ messages[-1].role }}", False),
        (LLAMA_3 + "{% for m in messages %}{{ m.role }}{% endfor %}", False),
        ("{% macro a() %}a{% endmacro %}" + LLAMA_3 + "{{ a() }}", False),
        ("{% set add_generation_prompt = messages | length > 2 %}" + LLAMA_3, False),
        (LLAMA_3.replace("in messages", "in messages | reverse"), False),
        ("{% if messages %}" + LLAMA_3 + "{% endif %}", False),
        (LLAMA_3 + "{{ tools | length if tools else 0 }}", False),
    ],
)
def test_what_opens_every_answer_is_told_from_what_a_conversation_may_change(
    template: str, is_known: bool
) -> None:
    tail = MarkedTemplate(template).tail({"add_generation_prompt": True})
    assert (tail is not None) is is_known
    if is_known:
        opened_text = tokenizer(template).apply_chat_template(
            TURNS, tokenize=False, add_generation_prompt=True
        )
        assert tail
        assert opened_text.endswith(tail)


def test_many_rows_at_once_have_the_tokens_that_each_has_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_module, "_CHARACTERS_AT_ONCE", 1_000)
    turns = [{"role": ("user", "assistant")[n % 2], "content": f"é 漢 {n}\n"} for n in range(140)]
    rows: list[dict[str, Any]] = [
        {"messages": TURNS},
        {"messages": [TURNS[1], {**TURNS[2], "content": "🙂 ½"}]},
        {"messages": turns},
        {"messages": [{"role": "user", "content": "x" * 3_000}, TURNS[2]]},
        {"messages": TURNS[1:3]},
    ]
    for template in (BUILT_IN["chatml"], LLAMA_3, FORGETFUL, MARKED):
        made = tokenizer(template)
        chat = ChatTemplate.of(made, None, None)
        together = chat.tokens(rows, made.eos_token_id)
        assert together == [chat.tokens([row], made.eos_token_id)[0] for row in rows]
        for row, tokens in zip(rows, together, strict=True):
            spoken = chat.spoken(row)
            encoding = made(spoken.text, add_special_tokens=False, return_offsets_mapping=True)
            assert tokens["ids"] == encoding["input_ids"]
            assert tokens["scored"] == flags(encoding["offset_mapping"], spoken.spans)


def test_a_token_that_reaches_over_the_end_of_a_turn_is_learnt() -> None:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "Assistant:": 1, "Eins.\nUser:": 2}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[UNK]")
    made.chat_template = (
        "{% for m in messages %}{{ m.role | capitalize + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
    )
    turns = [TURNS[1], TURNS[2], {"role": "user", "content": "Two? 2"}]
    (tokens,) = ChatTemplate.of(made, None, None).tokens([{"messages": turns}], 0)
    assert made.convert_ids_to_tokens(tokens["ids"])[2] == "Eins.\nUser:"
    assert tokens["scored"] == [0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("template", "is_told"),
    [
        (BUILT_IN["chatml"], True),
        (BUILT_IN["plain"], True),
        (LLAMA_3, True),
        (
            "{% set rest = messages[1:] %}{% set r = rest %}{{ messages[0].content }}"
            "{% for m in r %}{{ m.content }}{% for c in m.calls %}{{ loop.last }}{% endfor %}"
            "{% endfor %}",
            True,
        ),
        ("{% for m in messages %}{{ m.content if loop.last }}{% endfor %}", False),
        ("{% for m in messages %}{{ messages | length }}{% endfor %}", False),
        ("{% for m in messages %}{{ messages[loop.index0 + 1].role }}{% endfor %}", False),
        ("{% for m in messages %}{{ messages[-1].role }}{% endfor %}", False),
        (
            "{% set a = messages %}{% set b = a %}{% for m in b %}{{ b[-1].role }}{% endfor %}",
            False,
        ),
        (
            "{% set n = namespace(u=0) %}{% for m in messages %}{% set n.u = loop.index %}{% endfor %}"
            "{% for m in messages %}{{ n.u }}{% endfor %}",
            False,
        ),
        ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages recursive %}{{ m.content }}{% endfor %}", False),
        (
            "{% macro f(all) %}{{ all[-1] }}{% endmacro %}{% for m in messages %}{{ f(messages) }}"
            "{% endfor %}",
            False,
        ),
    ],
)
def test_a_template_that_cannot_look_ahead_is_told_from_others(
    template: str, is_told: bool
) -> None:
    assert MarkedTemplate(template).is_forward is is_told


def test_a_template_that_reads_what_it_has_written_gives_the_text_without_marks() -> None:
    template = (
        "{% set all %}"
        + BUILT_IN["chatml"].partition("{%- if add_generation_prompt")[0]
        + "{% endset %}"
        "{{ all.split('\ue0fe') | length }}:{{ all }}"  # the sign of our marks
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    made = tokenizer(template)
    chat = ChatTemplate.of(made, None, None)
    text = chat.spoken({"messages": TURNS}).text
    assert text == made.apply_chat_template(TURNS, tokenize=False)
    assert text.startswith("1:")
    assert learnt(template, TURNS) == ["Eins.<|im_end|>", " Zwei \n<|im_end|>"]


def call_of(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": {"a": 1, "b": ["é"]}}}


# DeepSeek-V3's: arguments are texts, and later calls of a conversation are written without a header.
DEEPSEEK = (
    "{% set ns = namespace(is_called=false) %}"
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{%- for c in m.tool_calls %}{% if not ns.is_called %}"
    "{{ '<|im_start|>assistant<|calls|>' + c.function.name + c.function.arguments }}"
    "{% set ns.is_called = true %}"
    "{% else %}{{ '\n' + c.function.name + c.function.arguments }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>' }}{% elif m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant' + m.content + '<|im_end|>' }}"
    "{% else %}{{ '<|im_start|>' + m.role + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)


@pytest.mark.parametrize("is_marked", [False, True])
def test_calls_reach_a_template_that_adds_their_arguments_to_a_text(is_marked: bool) -> None:
    template = DEEPSEEK
    if is_marked:
        template = template.replace("{%- for c", "{% generation %}{%- for c")
        template = template.replace(
            "{{ '<|im_end|>' }}{% elif", "{{ '<|im_end|>' }}{% endgeneration %}{% elif"
        ).replace(
            "{{ '<|im_start|>assistant' + m.content + '<|im_end|>' }}",
            "{% generation %}{{ '<|im_start|>assistant' + m.content + '<|im_end|>' }}"
            "{% endgeneration %}",
        )
    turns = [TURNS[1], {"role": "assistant", "content": "", "tool_calls": [call_of("add")]}]
    turns += [{"role": "tool", "content": "2"}, TURNS[2]]
    said = '<|calls|>add{"a": 1, "b": ["é"]}<|im_end|>'
    assert learnt(template, turns) == [said, "Eins.<|im_end|>"]
    more = [TURNS[3], {"role": "assistant", "content": "", "tool_calls": [call_of("sub")]}]
    with refused("template_turn_unopened", turn=6, turns=6):
        learnt(template, [*turns, *more])


def test_a_template_that_opens_no_answer_is_refused_where_it_writes_a_header() -> None:
    template = LLAMA_3.partition("{% if add_generation_prompt")[0]
    with refused("template_without_opening", turn=3, turns=5):
        learnt(template, TURNS)
    mistral = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
    )
    assert learnt(mistral, TURNS[1:3]) == [" Eins.<|endoftext|>"]


def test_tools_reach_the_template_and_what_it_refuses_is_said() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [TURNS[1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    turns += [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "Two."}]
    template = (
        "{{ tools | length }}{% for m in messages %}{{ m.role + ':' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{{ m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    found = learnt(template, turns, tools=[{"type": "function", "function": {"name": "add"}}])
    assert found == ['{"a": 1}<|im_end|>', "Two.<|im_end|>"]
    with refused("template_refuses", start="One?", reason="chatml knows no tool calls"):
        learnt(BUILT_IN["chatml"], turns)


@pytest.mark.parametrize("template", [BUILT_IN["chatml"], LLAMA_3], ids=["chatml", "llama 3"])
def test_a_conversation_begins_with_one_opening_whoever_writes_it(template: str) -> None:
    made = tokenizer(template)
    opening = made.convert_tokens_to_ids("<|begin_of_text|>")
    made.bos_token = "<|begin_of_text|>"
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", opening)]
    )
    tokens = ChatTemplate.of(made, None, None).tokens([{"messages": TURNS}], made.eos_token_id)[0]
    assert tokens["ids"][0] == opening
    assert tokens["ids"].count(opening) == 1
    assert tokens["scored"][0] == 0
    # an export holds the template, and whoever serves it gets the same ids
    assert made.apply_chat_template(TURNS, return_dict=True)["input_ids"] == tokens["ids"]


def test_a_template_with_a_clock_writes_the_same_date_on_every_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = "{{ strftime_now('%d %B %Y') }}" + BUILT_IN["chatml"]

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Later:
            return cls(2031, 1, 2)

    monkeypatch.setattr(chat_template_utils, "datetime", Later)
    made = tokenizer(clock)
    chat = ChatTemplate.of(made, None, None)
    assert chat.opened({"messages": TURNS[:2]}).startswith("26 July 2024<|im_start|>")
    tokens = chat.tokens([{"messages": TURNS}], made.eos_token_id)[0]
    assert made.decode(tokens["ids"]).startswith("26 July 2024<|im_start|>")
    assert chat.identity() == {"chat_template": clock, "date": "2024-07-26"}
    plain = ChatTemplate.of(tokenizer(LLAMA_3), None, None)
    assert plain.identity() == {"chat_template": LLAMA_3}  # as before there was a date


def test_the_program_of_a_card_has_the_tokens_of_training_on_every_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", datetime)  # the program sets another one
    made = tokenizer("{{ strftime_now('%d %B %Y at %H') }}" + BUILT_IN["chatml"])
    made.save_pretrained(tmp_path)
    cfg: Any = SimpleNamespace(data=SimpleNamespace(purpose="conversation", max_tokens=9))
    ((_, program),) = usage(cfg, tmp_path).programs
    code = program[program.index("from datetime") : program.index("most = ")]
    names: dict[str, Any] = {"tokenizer": made}
    exec(code, names)
    assert made.decode(names["ids"]).startswith("26 July 2024 at 00<|im_start|>user")
    opened_text = ChatTemplate.of(made, None, None).opened({"messages": names["messages"]})
    assert names["text"] == opened_text


def test_a_tokenizer_without_a_template_names_the_key_and_a_file_will_do(tmp_path: Path) -> None:
    with refused("template_missing"):
        ChatTemplate.of(tokenizer(None), None, None)
    with refused("template_unknown", template="chatlm", choices="chatml, plain"):
        ChatTemplate.of(tokenizer(None), "chatlm", tmp_path)
    for mark in ("", "\ufeff"):
        (tmp_path / "mine.jinja").write_text(mark + LLAMA_3)
        made = tokenizer(None)
        ChatTemplate.of(made, "mine.jinja", tmp_path)
        assert made.chat_template == LLAMA_3  # an export takes it along
    (tmp_path / "mine.jinja").write_bytes(b"\xff")
    with refused("template_unreadable", template="mine.jinja"):
        ChatTemplate.of(tokenizer(None), "mine.jinja", tmp_path)


# Rows
# --------------------------------------------------------------------------------------------------


def rows(folder: Path, *lines: Any) -> list[dict[str, Any]]:
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return list(chats(folder, "train", OwnRows()))


def test_rows_of_openai_and_of_sharegpt_are_conversations(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}, "id": "x"}
    openai = [TURNS[1], {"role": "assistant", "content": None, "tool_calls": [call]}]
    sharegpt = [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Eins."}]
    found = rows(tmp_path, {"messages": openai, "tools": "[{}]"}, {"messages": sharegpt})
    spoken = {"name": "f", "arguments": {"a": 1}}
    assert found[0]["tools"] == [{}]
    assert found[0]["messages"][1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": spoken, "id": "x"}],
    }
    assert found[1] == {"messages": TURNS[1:3]}
    assert rows(tmp_path, {"prompt": "One?", "completion": "Eins."}) == [found[1]]


def said_by(role: str) -> dict[str, Any]:
    return {"messages": [TURNS[1], {"role": role, "content": "Eins."}]}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        *((name, "assistant") for name in ("gpt", "chatgpt", "model", "bot", "Assistant", "AI")),
        *((name, "user") for name in ("human", "prompter", "User")),
        *((name, "tool") for name in ("observation", "function", "ipython", "tool-response")),
        *((name, "system") for name in ("developer", "SYSTEM")),
    ],
)
def test_roles_that_people_write_are_one_of_four(theirs: str, ours: str, tmp_path: Path) -> None:
    turns = [{"from": theirs, "value": "x"}, TURNS[1], TURNS[2]]
    (row,) = rows(tmp_path, {"messages": turns})
    assert row["messages"] == [{"role": ours, "content": "x"}, TURNS[1], TURNS[2]]


def test_calls_of_llama_factory_are_calls_of_tools(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "Area?"},
        {"from": "function_call", "value": '{"name": "area", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "15"},
        {"from": "gpt", "value": "15."},
    ]
    (row,) = rows(tmp_path, {"messages": turns, "tools": ""})
    call = {"type": "function", "function": {"name": "area", "arguments": {"a": 1}}}
    assert row["messages"][1:3] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "15"},
    ]


@pytest.mark.parametrize(
    "mark", [{"train": False}, {"loss": False}, {"loss_mask": 0}, {"weight": 0.0}, {"training": 0}]
)
def test_a_turn_that_says_so_is_read_and_not_learnt(mark: dict[str, Any], tmp_path: Path) -> None:
    turns = [{**TURNS[1], **mark}, {**TURNS[2], **mark}, TURNS[3], TURNS[4]]
    (row,) = rows(tmp_path, {"messages": turns})
    assert row == {"messages": [TURNS[1], {**TURNS[2], "weight": 0}, TURNS[3], TURNS[4]]}


TEXT_PARTS = [{"type": "text", "text": "On"}, {"type": "text", "text": "e?", "image_url": None}]


def test_what_the_completion_says_is_learnt_of_two_lists_of_turns(tmp_path: Path) -> None:
    prompt, completion = TURNS[:4], TURNS[4:]
    by_lists, by_text, as_text, one_text = rows(
        tmp_path,
        {"prompt": prompt, "completion": completion},
        {"prompt": prompt, "completion": TURNS[4]["content"]},
        {"prompt": json.dumps(prompt), "completion": repr(completion)},
        {"prompt": '["a", "b"]', "completion": completion},
    )
    wanted = [*TURNS[:2], {**TURNS[2], "weight": 0}, *TURNS[3:]]
    assert [row["messages"] for row in (by_lists, by_text, as_text)] == [wanted] * 3
    assert one_text["messages"][0] == {"role": "user", "content": '["a", "b"]'}
    assert conversation.opened({"prompt": TURNS[:2]}, "here") == {"messages": TURNS[:2]}


def test_texts_in_parts_are_one_text(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, {"messages": [{**TURNS[1], "content": TEXT_PARTS}, TURNS[2]]})
    assert row == {"messages": TURNS[1:3]}


def test_system_and_input_of_a_row_are_read(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, {"messages": TURNS[1:], "system": "Be brief."})
    assert row["messages"] == TURNS
    (same,) = rows(tmp_path, {"messages": TURNS, "system": "Be brief."})
    assert same["messages"] == TURNS
    alpaca = {"instruction": "Translate.", "input": "One", "output": "Eins", "system": ""}
    (tmp_path / "train.jsonl").write_text(json.dumps(alpaca))
    own = OwnRows(columns={"prompt": "instruction", "completion": "output"})
    (row,) = chats(tmp_path, "train", own)
    assert [turn["content"] for turn in row["messages"]] == ["Translate.\nOne", "Eins"]
    (text,) = completions(tmp_path, "train", own)
    assert text == {"text": "Translate.\nOneEins", "answer_spans": [(14, 18)]}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"turns": []}, fault("messages_missing", keys="turns")),
        ({"messages": []}, fault("messages_wanted", value=[])),
        ({"messages": ["a"]}, fault("turn_wanted", turn=0, value="a")),
        ({"messages": [{"content": "a"}]}, fault("role_wanted", turn=0, value=None)),
        ({"messages": [{"role": "user"}]}, fault("content_wanted", turn=0, value=None)),
        (
            {"messages": [{**TURNS[1], "weight": 1}]},
            fault("weight_wanted", turn=0, key="weight", value=1, role="user"),
        ),
        (
            {"messages": [{**TURNS[2], "weight": 2}]},
            fault("weight_wanted", turn=0, key="weight", value=2, role="assistant"),
        ),
        ({"messages": TURNS[:2]}, fault("nothing_to_learn")),
        ({"messages": [TURNS[1], {**TURNS[2], "weight": 0}]}, fault("nothing_to_learn")),
        (said_by("assistent"), fault("role_wanted", turn=1, value="assistent")),
        (said_by("Narrator"), fault("role_wanted", turn=1, value="Narrator")),
        (said_by("function_call"), fault("calls_wanted", turn=1, value="Eins.")),
        (
            {"messages": [TURNS[1], {**TURNS[2], "mask": True}]},
            fault("learning_key_unknown", turn=1, key="mask", value=True),
        ),
        *(
            (
                {"messages": [TURNS[1], {**TURNS[2], key: True}]},
                fault("learning_key_unknown", turn=1, key=key, value=True),
            )
            for key in ("ignore", "skip", "unmask", "supervised")
        ),
        *(
            (
                {"messages": [TURNS[1], {**TURNS[2], key: 0}]},
                fault("learning_key_unknown", turn=1, key=key, value=0),
            )
            for key in ("lossMask", "loss-mask", "isTrained", "trainOnTurn", "noLoss", "trainable ")
        ),
        ({"messages": TURNS, "functions": [{}]}, fault("functions_of_row", value="[{}]")),
        (
            {"messages": [TURNS[1], {**TURNS[2], "loss_mask": [0, 1]}]},
            fault("weight_wanted", turn=1, key="loss_mask", value=[0, 1], role="assistant"),
        ),
        (
            {"messages": [TURNS[1], {**TURNS[2], "weight": 0.5}]},
            fault("weight_wanted", turn=1, key="weight", value=0.5, role="assistant"),
        ),
        (
            {"messages": [TURNS[1], {**TURNS[2], "train": True, "weight": 0}]},
            fault("learning_keys_differ", turn=1, key="train", value=1, other="weight"),
        ),
        ({"messages": TURNS, "train": False}, fault("learning_of_row", key="train", value=False)),
        (
            {"messages": [TURNS[1], {**TURNS[2], "content": "", "function_call": {"name": "f"}}]},
            fault("old_call_unread", turn=1, value={"name": "f"}),
        ),
        (
            {"messages": [TURNS[1], {**TURNS[2], "content": " "}]},
            fault("turn_empty", turn=1, value=" "),
        ),
        (
            {"messages": TURNS, "system": "Be long."},
            fault("system_differs", value="Be long.", first="Be brief."),
        ),
        (
            {"messages": [{**TURNS[1], "content": [{"type": "image_url"}]}, TURNS[2]]},
            fault("part_unread", name="messages[0].content[0].type", value="image_url"),
        ),
        (
            {"prompt": [{**TURNS[1], "content": 5}], "completion": TURNS[2:3]},
            fault("content_wanted", turns="prompt", turn=0, value=5),
        ),
        (
            {"prompt": TURNS[1:2], "completion": [{"role": "boss", "content": "a"}]},
            fault("role_wanted", turns="completion", turn=0, value="boss"),
        ),
        ({"prompt": ["a"], "completion": "b"}, fault("prompt_wanted", key="prompt", value=["a"])),
        (
            {"prompt": TURNS[1:2], "completion": "b", "input": "c"},
            fault("input_beside_turns", value="c"),
        ),
        ({"messages": TURNS, "tools": "{"}, fault("list_of_wanted", key="tools", value=["{"])),
    ],
)
def test_a_wrong_conversation_is_refused_by_its_line(
    line: Any, said: Fault, tmp_path: Path
) -> None:
    with refused(said, at="train.jsonl, line 2"):
        rows(tmp_path, {"messages": TURNS}, line)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (BUILT_IN["chatml"], "<|im_end|>"),
        (LLAMA_3, "<|eot_id|>"),
        (MARKED, "<|im_end|>"),
        (BUILT_IN["plain"], "<|endoftext|>"),
        ("{{ raise_exception('no') }}", "<|endoftext|>"),
    ],
)
def test_generation_ends_where_a_turn_of_the_assistant_does(template: str, end: str) -> None:
    made = tokenizer(template)
    chat = ChatTemplate.of(made, None, None)
    assert made.convert_ids_to_tokens(chat.turn_end(made.eos_token_id)) == end


def test_what_is_to_be_answered_ends_before_the_assistant_speaks() -> None:
    chat = ChatTemplate.of(tokenizer(BUILT_IN["chatml"]), None, None)
    asked = {"messages": TURNS[:4]}
    assert chat.opened(opened({"messages": TURNS}, "here")) == chat.opened(asked)
    assert chat.opened(asked).endswith("Two?<|im_end|>\n<|im_start|>assistant\n")
    assert opened({"prompt": "One?"}, "here") == {"messages": [TURNS[1]]}
    with refused("assistant_alone", at="here"):
        opened({"messages": [TURNS[2]]}, "here")
