"""Ids and masks of conversations against TRL's own training templates, templates x rows.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 trl transformers==5.23.0
    python benchmarks/trl_masks.py --trl /tmp/trl/bin/python

TRL runs in an environment of its own: get_training_chat_template for each template that it knows,
then transformers' ids and assistant masks. The tokenizer has a token for each byte and the special
tokens that stand in the template.

"=": equal; "blanks": TRL also learns blanks behind a turn's end; "more": TRL also learns other
text; "ids", "mask": that differs; "ours no", "TRL no", "both no": that side refuses the row.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # runs from a checkout that is not installed

from transformers import AutoTokenizer

from tests.unit.test_chat import tokenizer
from trainer.errors import DataError
from trainer.tasks.causal_lm.chat import ChatTemplate

IS_TOLD = "--tell" in sys.argv
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
        },
    },
}
ASK, SAY = {"role": "user", "content": "One?"}, {"role": "assistant", "content": "Eins."}
THOUGHT = {**SAY, "reasoning_content": "Hm."}
CALLS = [
    ASK,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
]
ROWS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [ASK, SAY]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, ASK, SAY]},
    "turns": {"messages": [ASK, SAY, ASK, SAY, ASK, SAY]},
    "tools": {"messages": [*CALLS, SAY], "tools": [TOOL]},
    "thinking": {"messages": [ASK, THOUGHT]},
    "thoughts": {"messages": [ASK, THOUGHT, ASK, THOUGHT]},
    "unicode": {
        "messages": [ASK, {"role": "assistant", "content": "é 漢字 👩‍👩‍👧 e\u0301 \u202ex"}]
    },
}
# What TRL's side runs: each template of TRL with its training form, ids and masks of each row.
THEIRS = """
import json, sys
from datetime import datetime
from pathlib import Path
import trl.chat_template_utils as utils
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils
class Day(datetime):
    @classmethod
    def now(cls, tz=None): return cls(2024, 7, 26)
chat_template_utils.datetime = Day
rows, folder = json.loads(sys.stdin.read()), Path(sys.argv[1])
found = {}
for place in sorted(folder.iterdir()):
    tokenizer = AutoTokenizer.from_pretrained(place)
    try:
        training = utils.get_training_chat_template(tokenizer) or tokenizer.chat_template
    except Exception as error:
        found[place.name] = str(error)
        continue
    found[place.name] = of_rows = {}
    for name, row in rows.items():
        try:
            made = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"),
                chat_template=training, return_dict=True, return_assistant_tokens_mask=True,
                date_string="26 Jul 2024")
            of_rows[name] = [made["input_ids"], made["assistant_masks"]]
        except Exception as error:
            of_rows[name] = str(error)
print(json.dumps(found))
"""


def write_tokenizers(templates: Path, folder: Path) -> None:
    """A tokenizer for each of TRL's templates that has a training form."""
    for path in sorted(templates.glob("*.jinja")):
        if not path.with_name(f"{path.stem}_training.jinja").is_file():
            continue
        template = path.read_text(encoding="utf-8")
        special = set(
            re.findall(r"<[|｜][^<>'\"\s]+[|｜]>|</?think>|<(?:start|end)_of_turn>", template)
        )
        made = tokenizer(template, sorted({"<|bos|>", *special}))
        made.bos_token = "<|bos|>"
        made.save_pretrained(folder / path.stem)


def compared(chat: ChatTemplate, row: dict[str, Any], theirs: Any) -> str:
    """What the table says of one row."""
    try:
        (ours,) = chat.tokens([row], chat.tokenizer.eos_token_id)
    except DataError:
        return "both no" if isinstance(theirs, str) else "ours no"
    if isinstance(theirs, str):
        return "TRL no"
    if ours["ids"][: len(theirs[0])] != theirs[0]:
        return "ids"
    pairs = list(zip(theirs[0], ours["scored"], theirs[1], strict=False))
    decode = chat.tokenizer.decode
    more, less = (decode([one for one, a, b in pairs if (a, b) == how]) for how in ((0, 1), (1, 0)))
    if not more and not less:
        return "="
    if not less and not more.strip():
        return "blanks"
    if IS_TOLD:
        print(f"    TRL alone: {more!r}, ours alone: {less!r}")
    return "more" if not less else "mask"


def main() -> None:
    """Print the table."""
    flags = argparse.ArgumentParser(description="Ids and masks against TRL's training templates.")
    flags.add_argument("--trl", required=True, help="A Python that can import trl.")
    flags.add_argument("--tell", action="store_true", help="Print what differs.")
    given = flags.parse_args()
    find = "import trl, pathlib; print(pathlib.Path(trl.__file__).parent / 'chat_templates')"
    place = subprocess.run([given.trl, "-c", find], check=True, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizers(Path(place.stdout.strip().splitlines()[-1]), folder)
        said = subprocess.run(
            [given.trl, "-c", THEIRS, str(folder)],
            input=json.dumps(ROWS),
            check=True,
            capture_output=True,
            text=True,
        )
        theirs = json.loads(said.stdout.strip().splitlines()[-1])
        print(f"{'template':26}" + "".join(f"{row:>10}" for row in ROWS))
        for path in sorted(folder.iterdir()):
            if isinstance(theirs[path.name], str):
                print(f"{path.name:26} TRL: {theirs[path.name][:60]!r}")
                continue
            chat = ChatTemplate.of(AutoTokenizer.from_pretrained(path), None, None)
            cells = [compared(chat, row, theirs[path.name][key]) for key, row in ROWS.items()]
            print(f"{path.name:26}" + "".join(f"{cell:>10}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
