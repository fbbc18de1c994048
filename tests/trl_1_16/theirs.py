"""Runs where TRL is: what its SFTTrainer with assistant_only_loss makes of rows.

    python theirs.py FOLDER < asked.json > told.json

FOLDER has a folder of tokenizers for each base. Asked: {"date": [year, month, day], "rows": {name:
row}}. Told, by base and tokenizer: {"training": TRL's form of its template, "rows": {name: [ids,
mask], or why it is refused}}.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.utils import chat_template_utils
from trl.chat_template_utils import get_training_chat_template  # pyright: ignore[reportMissingImports]
from trl.data_utils import _tokenize  # pyright: ignore[reportMissingImports]


def made_of(tokenizer: Any, template: str, row: dict[str, Any]) -> Any:
    """Ids and mask of a row, by the lines of SFTTrainer that prepare a data set."""
    try:
        made = _tokenize(
            tokenizer,
            row["messages"],
            return_assistant_tokens_mask=True,
            chat_template=template,
            tools=row.get("tools"),
        )
    except Exception as error:  # templates refuse by any
        return f"{type(error).__name__}: {error}"
    return [made["input_ids"], made["assistant_masks"]]


def main() -> None:
    asked = json.load(sys.stdin)

    class Day(datetime):
        """Some templates write today's date."""

        @classmethod
        def now(cls, tz: Any = None) -> Day:
            return cls(*asked["date"])

    chat_template_utils.datetime = Day  # pyright: ignore[reportPrivateImportUsage]
    found: dict[str, dict[str, Any]] = {}
    for place in sorted(Path(sys.argv[1]).glob("*/*")):
        tokenizer = AutoTokenizer.from_pretrained(place)
        training = get_training_chat_template(tokenizer)
        rows = {name: made_of(tokenizer, training, row) for name, row in asked["rows"].items()}
        of_base = found.setdefault(place.parent.name, {})
        of_base[place.name] = {"training": training, "rows": rows}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
