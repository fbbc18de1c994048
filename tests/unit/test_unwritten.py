"""What a chat template leaves out of a conversation is refused where it would be learnt, and told
everywhere else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_chat import TURNS, call_of, learnt, tokenizer
from tests.unit.test_formats import CHAT, facts, one_tokenizer, task_of
from tests.wording import refused
from trainer.data import left_out
from trainer.data.chat.chat_template import ChatTemplate
from trainer.data.chat.templates.built_in import BUILT_IN
from trainer.data.chat.unwritten import TOOLS

__all__ = ["facts", "one_tokenizer"]  # fixtures

CHATML = BUILT_IN["chatml"]
# As DeepSeek-R1's: what was thought before an answer is left out of every turn.
WITHOUT_THOUGHTS = CHATML.replace(" + message.content", " + message.content.split('</think>')[-1]")
# As Qwen 3's: it is left out of earlier turns, and written anew before the last one.
WITH_LAST_THOUGHTS = CHATML.replace(
    " + message.content",
    " + (message.content.split('</think>')[-1] if not loop.last else message.content"
    " | replace('<think>', '<think>\\n') | replace('</think>', '\\n</think>\\n\\n'))",
)
# As Llama 3.1's: a turn that calls says nothing else.
CALLS_ALONE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Many templates know two roles.
TWO_ROLES = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<|im_end|>' + m.content + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_end|>' }}{% endif %}"
)


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def test_thoughts_in_a_content_are_learnt_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    thought = answer("<think>Hm.</think>Eins.")
    wanted = "the thoughts before '</think>'"
    with refused("template_drops", what=wanted, turn=2, turns=2):
        learnt(WITHOUT_THOUGHTS, [TURNS[1], thought])
    written = "<think>\nHm.\n</think>\n\nEins.<|im_end|>"
    assert learnt(WITH_LAST_THOUGHTS, [TURNS[1], thought]) == [written]
    assert learnt(WITHOUT_THOUGHTS, TURNS[1:3]) == ["Eins.<|im_end|>"]
    # a turn may say the word and think nothing
    assert learnt(CHATML, [TURNS[1], answer("<think> opens, </think> closes.")])
    assert caplog.messages == []


def test_what_a_turn_says_beside_its_call_is_learnt_or_refused() -> None:
    turns = [TURNS[1], answer("I look.", tool_calls=[call_of("add")])]
    with refused("template_drops", what="the content", turn=2, turns=2):
        learnt(CALLS_ALONE, turns)
    both = CALLS_ALONE.replace("{% if m.tool", "{{ m.content if m.tool_calls }}{% if m.tool")
    (said,) = learnt(both, turns)
    assert said.startswith('I look.{"name": "add"')


@pytest.mark.parametrize("how", ["trim", "tojson", "upper", "replace('\\n', ' ')"])
def test_a_content_that_is_trimmed_or_escaped_is_written(how: str) -> None:
    template = CHATML.replace("message.content", f"(message.content | {how})")
    assert learnt(template, [TURNS[1], answer(' "Über"\nalles? ')])


def test_a_turn_of_which_nothing_is_written_is_told_once_for_its_role(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chat = ChatTemplate.of(tokenizer(TWO_ROLES), None, None)
    chat.tokens([{"messages": TURNS}] * 2, 0)
    (message,) = caplog.messages
    assert "writes nothing of a turn of 'system', such as 'Be brief.'" in message
    chat.opened({"messages": [{"role": "tool", "content": "4711"}, TURNS[1]]})
    assert "of a turn of 'tool', such as '4711'" in caplog.messages[1]


def test_tools_that_a_template_does_not_write_are_named(facts: Path, tmp_path: Path) -> None:
    row = {"messages": TURNS[1:3], "tools": [{"type": "function", "function": {"name": "f"}}]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    for more, wanted in (("", {TOOLS: 1}), ("{{ tools }}", {})):
        (tmp_path / "own.jinja").write_text(TWO_ROLES + more)
        task = task_of("causal_lm", facts, tmp_path, {**CHAT, "chat_template": "own.jinja"})
        with left_out.reading() as notes:
            assert len(list(task.rows("train"))) == 1
        assert notes.counts == wanted
        with left_out.reading() as notes:
            task.prompt_ids({**row, "messages": TURNS[1:2]}, "here")
        assert notes.counts == wanted
