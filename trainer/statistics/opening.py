"""The line that a run logs about a split at its start: rows, tokens, and cut texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.data.left_out import FILE, of_mix, of_split
from trainer.data.mixed.store import MixedStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.data.left_out import Notes
    from trainer.data.token_store import TokenStore

# Endings of the names of fields that hold no token ids, but numbers about texts.
_NOT_TEXT = ("lengths", "scores", "identities", "scored", "ids_of_positives", "topic")


def opening_line(store: TokenStore, notes: Notes | None = None) -> str:
    """The line about a split, for example "train: 2,000 rows, 51,204 tokens; 1,901 of 2,000
    contexts cut, 36.7% of their tokens: data.context_tokens 256; `stats` shows more".

    For a store of an older version, or of a task that does not count cuts, the line has only rows
    and tokens. notes: in which formats the rows of the split were written, what was left out of it
    or is doubted, and the keys of its rows that nothing read.
    """
    text = _rows_and_cuts(store)
    if notes is None:
        return text
    formats = [f"{called}, {count:,}" for called, count in notes.formats.items()]
    parts = [text, *formats, f"{notes.line()}: {FILE}" if notes else "", notes.keys.line()]
    return "; ".join(part for part in parts if part)


def opening_lines(split: str, store: TokenStore | MixedStore) -> Iterator[str]:
    """The line of a split, or one for each source of a mix."""
    if not isinstance(store, MixedStore):
        yield opening_line(store, of_split(split))
        return
    for name, of_source in store.stores.items():
        yield f"{name}: {opening_line(of_source, of_split(of_mix(split, name)))}"


def _rows_and_cuts(store: TokenStore) -> str:
    facts = store.summary()
    if facts.get("is_streamed"):
        return (
            f"{store.meta['split']}: {len(store):,} rows, encoded while they are trained on "
            "(data.stream): what limits cut and what is left out is told when training meets it"
        )
    fields: dict[str, int] = facts["tokens"]
    tokens = sum(
        count
        for field, count in fields.items()
        if not field.endswith(_NOT_TEXT) and count != len(store)
    )
    text = f"{store.meta['split']}: {len(store):,} rows, {tokens:,} tokens"
    cuts = store.cuts()
    if not cuts:
        return text
    lost = [cut_line(name, counts) for name, counts in cuts.items() if counts["texts_cut"]]
    if not lost:
        return f"{text}, nothing cut"
    return "; ".join([text, *lost, "`stats` shows more"])


def cut_line(name: str, counts: dict[str, Any]) -> str:
    """What limits cut off the texts of one name (TokenStore.cuts), of which some are cut."""
    share = counts["tokens_cut"] / counts["tokens"]
    return (
        f"{counts['texts_cut']:,} of {counts['texts']:,} {name} cut, {share:.1%} of their tokens: "
        f"{counts['setting']} {counts['limit']}"
    )
