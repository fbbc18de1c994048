"""What a chat template leaves out of a conversation."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence

from trainer.data.chat.templates.built_in import legal
from trainer.data.chat.writer import Message, Writer, naming
from trainer.data.formats.json_text import preview
from trainer.errors import DataError

log = logging.getLogger(__name__)

# The keys of a turn's thoughts, as formats/conversation.py reads them.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_BEGIN, _END = "<think>", "</think>"  # around thoughts in a content, as of DeepSeek and Qwen
_NO_LETTERS = re.compile(r"[\W_]+")
TOOLS = "conversations whose tools the chat template does not write (the model never sees them)"


class Unwritten:
    """Refuses conversations of which a template leaves out what is to be learnt, and tells once of
    which other turns it writes nothing.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._is_told = False  # that thoughts of earlier turns are left out
        self._told_roles: set[str] = set()

    def check(
        self, messages: Sequence[Message], counted: Sequence[int], learnt: Sequence[str]
    ) -> None:
        """DataError for a turn of which the template writes nothing, or not all of its content, its
        calls or its thoughts. Thoughts of earlier turns may be missing where it writes those of the
        last one: that is said once.

        learnt: the text that is learnt of each turn in `counted`.
        """
        last = messages[counted[-1]] if counted else {}
        thinks = any(last.get(key) for key in _THOUGHTS) or _END in str(last.get("content"))
        writes_last = thinks and _lost_thoughts(last, learnt[-1]) is None
        for number, text in zip(counted, learnt, strict=True):
            lost = self._lost(messages[number], text)
            thoughts = _lost_thoughts(messages[number], text)
            is_earlier = number < counted[-1] and writes_last
            if lost is None and thoughts is not None and is_earlier:
                self._tell()
            elif lost is not None or thoughts is not None:
                raise DataError(
                    f"{naming(messages)}: the chat template {self._writer.name} does not write "
                    f"{thoughts or lost} of turn {number + 1} of {len(messages)}. Give that turn "
                    f'"weight": 0, or name a template in data.chat_template: {legal()}.'
                )

    def tell_of_others(self, messages: Sequence[Message], whole: str) -> None:
        """Say once of each role that a template writes nothing of one of its turns."""
        for number in self.lost_turns(messages, whole):
            role, content = str(messages[number]["role"]), str(messages[number]["content"]).strip()
            if role in self._told_roles:
                continue
            self._told_roles.add(role)
            log.warning(
                "the chat template %s writes nothing of a turn of %r, such as %s: the model "
                "never sees such turns. Name another template in data.chat_template: %s",
                *(self._writer.name, role, preview(content), legal()),
            )

    def lost_turns(self, messages: Sequence[Message], whole: str) -> list[int]:
        """The numbers of the messages of which nothing stands in a text that the template wrote."""
        lost: list[int] = []
        place = 0
        for number, message in enumerate(messages):
            content = str(message["content"]).rpartition(_END)[2].strip()  # without thoughts
            start = whole.find(content, place)
            place = max(place, start)
            words = re.findall(r"\w+", content) if start < 0 else []
            if words and max(words, key=len) not in whole:
                lost.append(number)
        return lost

    def _lost(self, message: Message, text: str) -> str | None:
        """The words for a call or a content that is not in a text."""
        calls = message.get("tool_calls") or ()
        functions = [call.get("function", call) for call in calls]
        parts = (
            (one.get("name"), json.dumps(one.get("arguments"), ensure_ascii=False))
            for one in functions
        )
        lost = (
            f"the call of {name!r}"
            for name, arguments in parts
            if str(name) not in text and arguments not in text
        )
        is_empty = not self._writer.without_ends(text)
        answer = str(message["content"]).rpartition(_END)[2].strip().removeprefix(_BEGIN)
        is_lost = is_empty or not _is_in(answer, text)
        return next(lost, None) or ("the content" if is_lost else None)

    def _tell(self) -> None:
        if not self._is_told:
            log.warning(
                "the chat template %s leaves out the thoughts of earlier turns: only those of the "
                "last turn are learnt. Part such conversations into rows of one answer to learn "
                "them all",
                self._writer.name,
            )
        self._is_told = True


def _lost_thoughts(message: Message, text: str) -> str | None:
    """The words for thoughts that are not in a text."""
    fields = {key: message[key] for key in _THOUGHTS if message.get(key)}
    lost = [
        key
        for key, thoughts in fields.items()
        if not isinstance(thoughts, str) or thoughts.strip() not in text
    ]
    if lost:
        return f"the {lost[0]!r}"
    thoughts, end, _ = str(message.get("content")).rpartition(_END)
    is_lost = bool(end) and not _is_in(thoughts.rpartition(_BEGIN)[2], text)
    return f"the thoughts before {_END!r}" if is_lost else None


def _is_in(part: str, text: str) -> bool:
    """Whether a template has written a part of a content, trimmed or escaped, in whatever case."""
    part = part.strip()
    if part in text:
        return True
    letters = _letters(text)
    forms = (part, json.dumps(part), json.dumps(part, ensure_ascii=False))
    return any(_letters(form) in letters for form in forms)


def _letters(text: str) -> str:
    return _NO_LETTERS.sub("", text).casefold()
