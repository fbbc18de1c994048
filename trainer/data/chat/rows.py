"""Rows of conversations: {"messages", "tools"?}, out of a user's own files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.formats.layouts import CHATS
from trainer.config.own_rows import OwnRows
from trainer.data.formats.conversation import learnable
from trainer.data.formats.conversation import opened as opened
from trainer.data.readers.own_rows import own_rows

if TYPE_CHECKING:
    from trainer.protocol.task import Row


def chats(
    folder: Path | None, split: str, own: OwnRows, *, cache_dir: Path | None = None
) -> Iterator[Row]:
    """Rows of "messages", a list of {"role", "content"}, and of "tools" if the file has some.

    A turn of the assistant may have a "weight", 0 or 1: a turn with 0 is read but not learnt. It
    may have "tool_calls" instead of a content. Other names of roles and keys are understood as
    formats/conversation.py says, and so are "prompt" and "completion". DataError names the place
    of a wrong row.
    """
    placed = own_rows(own, split, folder, layout=CHATS, first=".jsonl", cache_dir=cache_dir)
    return (learnable(raw, place) for place, raw in placed)
