"""The one rule for quotes in tab-separated files: plain characters, or as CSV has them."""

from __future__ import annotations

from pathlib import Path

from trainer.data.readers.jsonl import bad_line, lines


def is_quoted(path: Path) -> bool:
    """Whether the fields of a tab-separated file are quoted as CSV.

    Quotes are plain characters, unless the first field that decides it is quoted as CSV: it has
    quotes around it and doubles those inside, which prose does not. A header in quotes decides it.
    A field in quotes without quotes inside decides nothing; the next one does. A field whose quote
    is not closed in its line is CSV if its line or the next one then has not as many fields as the
    header, else plain. DataError where one column alone leaves that open.
    """
    num_columns, is_open = 0, False
    for line, text in lines(path):
        contents = text.split("\t")
        num_columns = num_columns or len(contents)
        if is_open and text.strip():
            return len(contents) != num_columns
        for content in contents if '"' in text and not is_open else ():
            if '"' not in content:
                continue
            inner = content[1:-1]
            if content.startswith('"') and '"' not in content[1:].replace('""', ""):
                if num_columns == 1:
                    raise bad_line(
                        path,
                        line,
                        "a quote opens the text and is not closed in its line; with one column "
                        "nothing tells whether the text goes on: save the file as .csv or .jsonl",
                    )
                if len(contents) != num_columns:
                    return True
                is_open = True
                break
            if content != f'"{inner}"' or '"' in inner.replace('""', ""):
                return False
            if line == 1 or '""' in inner:
                return True
    return False
