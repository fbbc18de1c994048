"""OpenAI's rows of preferences, as a preference task reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.data.formats.json_text import preview
from trainer.data.usual.placed import Around, Placed
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row


def openai(placed: Placed, around: Around) -> Placed:
    """{"prompt", "chosen", "rejected", "tools"?}: the messages of the input, and the two outputs,
    all of them lists of turns.
    """
    for place, raw in placed:
        asked = raw["input"]
        if not isinstance(asked, dict) or not isinstance(asked.get("messages"), list):
            raise DataError(
                f"{place}: 'input' is {preview(asked)}, want an object with a list of messages.",
                place=place,
                field="input",
            )
        row: Row = {
            "prompt": asked["messages"],
            "chosen": raw["preferred_output"],
            "rejected": raw["non_preferred_output"],
        }
        yield place, row | ({"tools": asked["tools"]} if asked.get("tools") else {})
