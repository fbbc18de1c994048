"""Ids and masks of conversations, ours against those of TRL's SFTTrainer.

TRL has for some templates a form of its own, *_training.jinja, that marks what the assistant says.
Ours are of the template as it was published, or of TRL's form, which says what is learnt.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.unit.test_chat import tokenizer as bytewise
from tests.wording import is_said
from trainer.data.chat.chat_template import ChatTemplate
from trainer.data.chat.templates.marks import DATE, Span
from trainer.errors import DataError

STARCODER = Path(__file__).parents[3] / "shared" / "data" / "tokenizers" / "starcoder"

ASKED = [{"role": "user", "content": text} for text in ("One?", "Two?", "Three?")]
SAID = [{"role": "assistant", "content": text} for text in ("Eins.", "Zwei.", "Drei.")]
THOUGHT = [{**one, "reasoning_content": f"Hm {n}."} for n, one in enumerate(SAID)]
FUNCTION = {
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
RESULT = {"role": "tool", "content": "2"}
ROWS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [ASKED[0], SAID[0]]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, ASKED[0], SAID[0]]},
    "turns": {"messages": [*chain(*zip(ASKED, SAID, strict=True))]},
    "call": {"messages": [ASKED[0], CALL], **TOOLS},
    "result": {"messages": [ASKED[0], CALL, RESULT, SAID[0]], **TOOLS},
    "thought": {"messages": [ASKED[0], THOUGHT[0]]},
    "thoughts": {"messages": [*chain(*zip(ASKED, THOUGHT, strict=True))]},
    "unicode": {
        "messages": [ASKED[0], {"role": "assistant", "content": "é 漢字 👩‍👩‍👧 e\u0301 \u202ex"}]
    },
}
# What tokenizers have a token for, of what templates write.
_SPECIAL = re.compile(
    r"<\|[^<>|'\"\s]+\|?>|<[a-z_]+\|>|<｜[^<>'\"\s]+｜>|</?think>|</?tool_call>|</s>|\[gMASK\]|<sop>"
    r"|<(?:start|end)_of_turn>|<end_of_utterance>"
)


def templates(interpreter: Path) -> dict[str, tuple[str, str]]:
    """By name: each template that TRL has a training form of, and that form."""
    (folder,) = interpreter.parents[1].glob("lib/python*/site-packages/trl/chat_templates")
    forms = {path.stem.removesuffix("_training"): path for path in folder.glob("*_training.jinja")}
    return {
        name: ((folder / f"{name}.jinja").read_text(), form.read_text())
        for name, form in sorted(forms.items())
    }


def write_tokenizers(base: str, pairs: Mapping[str, tuple[str, str]], folder: Path) -> None:
    """A tokenizer for each template, in folder/base/name: with a token for each byte ("bytes") or
    a real one ("starcoder"), and with the special tokens that the template writes.
    """
    for name, (template, _) in pairs.items():
        special = sorted({"<|bos|>", "<|endoftext|>", *_SPECIAL.findall(template)})
        made = bytewise(template, special) if base == "bytes" else _real(template, special)
        made.bos_token = "<|bos|>"
        made.save_pretrained(folder / base / name)


def _real(template: str, special: list[str]) -> Any:
    made = AutoTokenizer.from_pretrained(STARCODER)
    made.add_tokens(special, special_tokens=True)
    made.chat_template = template
    return made


def told(interpreter: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """What TRL makes of the rows, by base and template: {"training": its form, "rows": {name:
    [ids, mask], or why it is refused}}.
    """
    asked = {"date": [DATE.year, DATE.month, DATE.day], "rows": ROWS}
    said = subprocess.run(
        [str(interpreter), "-P", str(Path(__file__).with_name("theirs.py")), str(folder)],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(said.stdout.splitlines()[-1])


def difference(chat: ChatTemplate, row: dict[str, Any], of_trl: Any) -> tuple[str, str]:
    """A word for how our ids and mask differ from TRL's, and what there is to see of it.

    of_trl: [ids, mask], or why TRL refuses the row.

    "=": not at all. "blanks": TRL also learns blanks behind a turn's end. "opens": TRL also learns
    what the template writes to open an answer, and maybe such blanks. "ends": we also learn the
    token that ends the last answer. "text": the ids differ. "drops": we refuse the row, since the
    template leaves out a call, a thought or all of an answer. "untold": we refuse it, since it is
    not known what is said. "refuses": the template refuses it. "mask", "error": anything else.
    """
    try:
        (ours,) = chat.tokens([row], chat.tokenizer.eos_token_id)
    except DataError as error:
        return _refusal(str(error), isinstance(of_trl, str)), f"TRL {of_trl}, ours {error}"
    if isinstance(of_trl, str):
        return "error", f"TRL {of_trl}"
    decode = chat.tokenizer.decode
    ids, mask = of_trl
    if ours["ids"] != ids:
        return "text", f"TRL {decode(ids)!r}, ours {decode(ours['ids'])!r}"
    scored = ours["scored"]
    more, less = (_runs(scored, mask, how) for how in ((0, 1), (1, 0)))
    seen = [[decode(ids[start:stop]) for start, stop in runs] for runs in (more, less)]
    kinds = {_kind(chat, row, ours, run) for run in more}
    if less:
        kinds.add("ends" if less == [(len(ids) - 1, len(ids))] and mask[-2] else "mask")
    word = next((one for one in ("mask", "ends", "opens", "blanks") if one in kinds), "=")
    return word, f"TRL alone {seen[0]}, ours alone {seen[1]}"


def _refusal(error: str, refuses_too: bool) -> str:
    """The word for a row that we refuse."""
    if refuses_too:
        return "refuses" if is_said("template_refuses", error) else "error"
    if is_said("template_drops", error):
        return "drops"
    return "untold" if is_said("template_without_opening", error) else "error"


def _runs(ours: Sequence[int], of_trl: Sequence[int], how: tuple[int, int]) -> list[Span]:
    """Where each run of tokens begins and ends of which (ours, of_trl) is `how`."""
    pairs = list(zip(ours, of_trl, strict=True))
    groups = groupby(range(len(pairs)), key=lambda place: pairs[place] == how)
    runs = [list(places) for differs, places in groups if differs]
    return [(places[0], places[-1] + 1) for places in runs]


def _kind(chat: ChatTemplate, row: dict[str, Any], ours: Mapping[str, list[int]], run: Span) -> str:
    """The word for a run of tokens that TRL alone learns: "blanks", "opens" or "mask"."""
    decode, ids = chat.tokenizer.decode, ours["ids"]
    start, stop = run
    learnt = _runs(ours["scored"], ours["scored"], (1, 1))
    if not decode(ids[start:stop]).strip() and start in [behind for _, behind in learnt]:
        return "blanks"
    if stop not in [first for first, _ in learnt]:
        return "mask"
    # from the answer before it on: the user's turn, the header of the answer and the run
    turn = [first for first, _ in learnt].index(stop)
    written = decode(ids[learnt[turn - 1][1] if turn else 0 : stop])
    numbers = [n for n, one in enumerate(row["messages"]) if one["role"] == "assistant"]
    opened = chat.opened({**row, "messages": row["messages"][: numbers[turn]]})
    return "opens" if written in opened else "mask"
