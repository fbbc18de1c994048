"""docs/formats.md is what the table of formats says, and each format's example is a row of its
files.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from tests.unit.pages import assert_made
from trainer import tasks
from trainer.config.formats.table import FORMATS, Format, FormatName
from trainer.data.usual.rows import READERS
from trainer.data.usual.signs import OURS

FIXTURES = Path(__file__).parent.parent / "fixtures" / "formats"
HEAD = """# Data by its usual name

Made from `trainer/config/formats/table.py` by `tests/unit/test_formats_page.py`, which also says how to
make it anew. `data.source` says where rows come from, `data.format` what they look like:

```python
"data": {"source": "files", "format": "alpaca"}
```

Without `format` the first ten rows tell, where they can be of one format only, and the run says in
its opening line what it found: `train.json: Alpaca rows, 52,002`. So `{"source": "chat"}` reads the
conversations of any of these formats, and `{"source": "files"}` of a retriever a CSV of triples, DPR's
training files or a folder of BEIR.

- Rows under the names of [own-data.md](own-data.md) are read as ever, and go first. `data.columns` without
  `format` says that the names are yours: nothing is guessed then. With `format`, `data.columns` maps the
  names of the format: `{"format": "alpaca", "columns": {"output": "answer"}}`.
- Rows of two formats in one file, and a row without a field that its format needs, are refused with
  their place. So is a format that the task does not read, by name.
- A language model does not guess whether rows are texts or conversations: `"source": "chat"`, or one of the
  formats that only conversations have, says so. `alpaca` and `prompt_completion` from `"files"` are texts
  with the loss on the completion; `"loss_on": "all"` counts the prompt as well.
- FiD's rows are a retriever's with the highest score as the positive only where `"format": "fid"` says so;
  else the positives are the contexts that hold an answer.
- Left out and counted are instructions whose output is blank (Alpaca's own file has some), questions that
  their paragraph does not answer (SQuAD 2), and queries without a positive.
- KILT's pages are looked for in `--data_path` as `kilt_knowledgesource.json`, the published file or a link to it (or
  `.jsonl`, each also `.gz`); of its 35 GB only the pages that the rows name are kept in memory.
- MS MARCO, BEIR and Natural Questions have files of their own, so `data.columns`, `data.dataset` and
  `data.valid_share` do not go with them.
- DPR's `.qa.csv` (a question, a tab, the list of its answers) is read wherever questions are: with a
  ranking (`"source": "ranked"` of `fid`), and by the commands of [retrieval.md](retrieval.md), which also read
  MS MARCO's `queries.*.tsv` and `collection.tsv`.
- `predict` takes rows of the format too, without what was learnt, or rows under our own names.

What stands in a cell is what a task makes of a row: `-` is refused by name.
"""


def purposes_of(task: str) -> tuple[str, ...]:
    data: Any = tasks.config_of(task).model_fields["data"].annotation
    return data.purposes


def cell(one: Format, task: str) -> str:
    return ", ".join(purpose for purpose in purposes_of(task) if purpose in one.serves) or "-"


def matrix() -> list[str]:
    names = tasks.names()
    lines = [f"| format | {' | '.join(f'`{name}`' for name in names)} |", "|---" * 7 + "|"]
    for name, one in FORMATS.items():
        cells = " | ".join(cell(one, task) for task in names)
        lines.append(f"| [`{name}`](#{name}) | {cells} |")
    return lines


def example(name: FormatName) -> list[str]:
    """The first row of the format's file, or the names of the files of a folder."""
    folder = FIXTURES / name
    if FORMATS[name].names is None and name != "pretokenised":
        files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        return [f"{file}" for file in files if file.suffix != ".txt"]
    path = next(path for path in sorted(folder.glob("train.*")))
    text = path.read_text()
    if path.suffix == ".csv":
        return text.splitlines()[:2]
    value = json.loads(text) if path.suffix == ".json" else json.loads(text.splitlines()[0])
    row = value[0] if isinstance(value, list) else value
    return textwrap.wrap(json.dumps(row), 100, subsequent_indent="  ", break_on_hyphens=False)


def section(name: FormatName, one: Format) -> list[str]:
    where = f"[documentation]({one.documentation})"
    lines = [f"## {name}", "", *textwrap.wrap(f"It holds {one.holds}: {where}.", 110), ""]
    lines += [f"- {purpose}: {what}" for purpose, what in one.serves.items()]
    return [*lines, "", "```", *example(name), "```", ""]


def page() -> str:
    """The whole page, as text."""
    lines = [HEAD, *matrix(), ""]
    for name, one in FORMATS.items():
        lines += section(name, one)
    return "\n".join(lines).rstrip() + "\n"


def test_the_page_of_formats_is_up_to_date() -> None:
    assert_made("formats.md", page(), __file__)


def test_each_format_of_rows_has_a_reader_for_each_purpose() -> None:
    by_files = {("fid", "query"), ("pretokenised", "query")}
    wanted = {
        (name, purpose)
        for name, one in FORMATS.items()
        for purpose in one.serves
        if one.names is not None
    }
    assert {*READERS} == wanted - by_files
    assert {(name, purpose) for purpose, names in OURS.items() for name in names} <= {*READERS}
