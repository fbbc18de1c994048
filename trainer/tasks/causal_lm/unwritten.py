"""What a chat template leaves out of the turns that are learnt."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from trainer.errors import DataError
from trainer.tasks.causal_lm.chat_writer import Message, Writer, naming
from trainer.tasks.causal_lm.templates.built_in import legal

log = logging.getLogger(__name__)

# The keys of a turn's thoughts, as formats/conversation.py reads them.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class Unwritten:
    """Refuses conversations of which a template leaves out what is to be learnt."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._is_told = False  # that thoughts of earlier turns are left out

    def check(
        self, messages: Sequence[Message], counted: Sequence[int], learnt: Sequence[str]
    ) -> None:
        """DataError for a turn of which the template writes nothing, or not the calls, or not the
        thoughts. Thoughts of earlier turns may be missing where it writes those of the last one:
        that is said once.

        learnt: the text that is learnt of each turn in `counted`.
        """
        last = messages[counted[-1]] if counted else {}
        writes_last = any(last.get(key) for key in _THOUGHTS) and (
            _lost_thoughts(last, learnt[-1]) is None
        )
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
        return next(lost, None) or ("the content" if is_empty else None)

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
    given = {key: message[key] for key in _THOUGHTS if message.get(key)}
    lost = [
        key
        for key, thoughts in given.items()
        if not isinstance(thoughts, str) or thoughts.strip() not in text
    ]
    return f"the {lost[0]!r}" if lost else None
