"""The statistics as text for a terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from trainer.data.arranged import told

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 132
_IN_LOSS = "bold green"


def text(report: Mapping[str, Any], *, is_coloured: bool) -> str:
    """Tables of every split.

    Lengths, the truncation ledger, padding, duplicates, empty fields, three examples.
    """
    out = io.StringIO()
    console = Console(
        file=out,
        width=_WIDTH,
        force_terminal=is_coloured,
        color_system="standard" if is_coloured else None,
        highlight=False,
        markup=False,
    )
    for split, of_split in report["splits"].items():
        console.print(f"\n{split}: {of_split['rows']:,} rows", style="bold")
        for name, source in of_split.get("sources", {}).items():
            line = f"source {name}: {source['rows']:,} rows"
            if "taken" in source:
                line += (
                    f"; a run takes {source['taken']:,} of them ({source['share']:.1%} of what it "
                    f"trains on), {source['epochs']:.2f} epochs"
                )
            console.print(line)
        console.print(_lengths(of_split["fields"]))
        _print_ledger(console, of_split)
        for name, entry in of_split["frequencies"].items():
            frequent = [f"{text!r} {share:.1%}" for text, _, share in entry["frequent"][:8]]
            console.print(
                f"{name}: {entry['different']:,} different tokens, {entry['occur_once']:.0%} of "
                f"them once; most frequent: {', '.join(frequent)}"
            )
        _print_padding(console, of_split["padding"])
        if "batches" in of_split:
            console.print(told.line(of_split["batches"]))
        duplicates = of_split["duplicates"]
        repeated = {key: count for key, count in duplicates.items() if key != "pairs"}
        console.print(f"repeated: {_pairs(repeated) or 'nothing'}")
        if duplicates["pairs"]:
            equal_rows = [" = ".join(pair) for pair in duplicates["pairs"]]
            console.print(f"equal rows: {', '.join(equal_rows)}")
        console.print(f"empty: {_pairs(of_split['empty']) or 'nothing'}")
        _print_examples(console, of_split["examples"])
    for pair, shared in report["shared_rows"].items():
        console.print(f"\n{pair}: {_pairs(shared) or 'nothing'}")
    return out.getvalue()


def _lengths(fields: Mapping[str, Any]) -> Table:
    numbers = [Column(name, justify="right") for name in _COLUMNS]
    table = Table("tokens", *numbers, "histogram, 0 to max")
    for name, of_field in fields.items():
        if not of_field["texts"]:
            continue
        label = name if of_field["is_whole"] or name == "length" else f"{name} (as cut)"
        limit = "" if of_field["limit"] is None else f"{of_field['limit']:,}"
        table.add_row(
            label,
            *(f"{of_field[key]:,}" for key in _COLUMNS[:-1]),
            limit,
            bars(of_field["histogram"]["counts"]),
        )
    return table


_COLUMNS = ("texts", "p50", "p90", "p95", "p99", "max", "limit")


def bars(counts: list[int]) -> str:
    """A histogram as one character a bin; a bin that is not empty is never blank."""
    most = max(counts, default=0) or 1
    return "".join(_BARS[0 if not count else max(1, round(count / most * 8))] for count in counts)


def _print_ledger(console: Console, of_split: Mapping[str, Any]) -> None:
    console.print(f"rows that the encoding cut: {of_split['truncated_rows']:,}")
    if not of_split["ledger"]:
        console.print(
            "what they lost: unknown, this task does not show its rows before they are cut"
        )
        return
    table = Table(
        "cut off",
        Column("limit", no_wrap=True),
        "rows",
        "tokens lost",
        "labels lost",
        "answers lost",
        "limit that loses < 1 %",
    )
    for name, entry in of_split["ledger"].items():
        kinds = ("tokens", "labels", "answers")
        enough = ", ".join(
            f"{entry[kind]['limit_below_1_percent']:,} ({kind})" for kind in kinds if entry[kind]
        )
        limit = "none" if entry["limit"] is None else f"{entry['setting']}={entry['limit']}"
        table.add_row(
            name, limit, f"{entry['rows_cut']:,}", *(_share(entry[kind]) for kind in kinds), enough
        )
    console.print(table)
    for name, entry in of_split["ledger"].items():
        if entry["worst_rows"]:
            rows = ", ".join(f"{row['id']} ({row['tokens_lost']:,})" for row in entry["worst_rows"])
            console.print(f"{name}, rows that lose most tokens: {rows}")


def _share(entry: Mapping[str, Any] | None) -> str:
    return "-" if entry is None else f"{entry['lost']:,} of {entry['of']:,} ({entry['share']:.2%})"


def _print_padding(console: Console, padding: Mapping[str, Any]) -> None:
    if not padding["steps"]:
        console.print("padding: fewer rows than train.global_batch")
        return
    collated = padding["collated"]
    console.print(
        f"padding: {padding['by_length']:.1%} of micro-batches of {padding['micro_batch']} as long "
        f"as their longest row (first {padding['steps']} steps, one device); "
        f"{padding['without_budget_and_buckets']:.1%} without train.micro_tokens and bucket_steps; "
        + (
            "packed or without attention masks"
            if collated is None
            else f"{collated:.1%} in their tensors"
        )
    )


def _pairs(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{key} {count:,}" for key, count in counts.items() if count)


def _print_examples(console: Console, examples: list[dict[str, Any]]) -> None:
    for example in examples:
        console.print(
            f"\nrow {example['id']}, length {example['length']:,}; «in the loss»", style="bold"
        )
        for name, segments in example["texts"].items():
            line = Text(f"{name}: ")
            for segment in segments:
                line.append(*_mark(segment))
            console.print(line)


def _mark(segment: Mapping[str, Any]) -> tuple[str, str]:
    return (f"«{segment['text']}»", _IN_LOSS) if segment["in_loss"] else (segment["text"], "")
