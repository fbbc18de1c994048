"""The table of clients and calls in docs/clients.md: each test writes or compares its own column."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
START, END = "<!-- made by tests/clients -->\n", "<!-- end of clients -->\n"
ABSENT = "-"
_REASON = re.compile(r"^- (.+):\n\n```\n(.*)\n```$", re.M)


def read() -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """(by client and call how it ends, by call why it is refused)"""
    text = PAGE.read_text().partition(START)[2].partition(END)[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    columns: dict[str, dict[str, str]] = {}
    for number, client in enumerate(rows[0][1:] if rows else [], 1):
        columns[client] = {row[0]: row[number] for row in rows[2:] if row[number] != ABSENT}
    return columns, dict(_REASON.findall(text))


def write(client: str, results: dict[str, str], reasons: dict[str, str], order: list[str]) -> None:
    """Put a client's column into the page. order: the names of all clients."""
    columns, earlier = read()
    columns[client] = results
    names = [one for one in order if one in columns]
    calls = list(dict.fromkeys(call for one in names for call in columns[one]))
    lines = [["call", *names], ["---"] * (len(names) + 1)]
    lines += [[call, *(columns[one].get(call, ABSENT) for one in names)] for call in calls]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    refused = {call for one in names for call, end in columns[one].items() if end == "refused"}
    why = {call: reason for call, reason in {**earlier, **reasons}.items() if call in refused}
    words = "".join(f"- {call}:\n\n```\n{why[call]}\n```\n\n" for call in sorted(why))
    before, _, rest = PAGE.read_text().partition(START)
    after = rest.partition(END)[2]
    PAGE.write_text(
        f"{before}{START}\n{table}\nWhat is refused, and in which words:\n\n{words}{END}{after}"
    )
