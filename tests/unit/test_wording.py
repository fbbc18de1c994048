"""The table of wordings: every code is used, no two say the same, and no other test holds a wording
of ours.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from jobs.errors import Unreachable
from tests.wording import ROOMS, WORDINGS, Wording, fault, is_said, refused, says
from trainer.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for path in ROOT.glob("tests/**/*.py") if path.name != "wording.py")
# Errors whose words are not ours: of Python, of libraries, of the tests' own helpers.
FOREIGN = {
    "AssertionError",
    "BadFault",
    "IndexError",
    "OSError",
    "RuntimeError",
    "ValueError",
    "urllib.error.URLError",
}
# Patterns that fit what other codes say too: these hand on the words of somebody else,
QUOTES = {"scheduler_says", "python_file_fails", "tree_unreadable"}
# and these are the start of a sentence that others end in their own way.
GENERAL = {"deepspeed_value", "flag_choice", "key_unknown", "list_of_wanted"}
_WORDS = re.compile(r"[A-Za-z]{2,} [A-Za-z]{2,}")
# Words of the system, and of what the tests themselves start.
OF_PROGRAMS = {"SystemError: on purpose", "metrics.jsonl: No such file", "training with"}


@cache
def calls(file: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]


def codes_of(file: Path) -> Iterator[str]:
    if "from tests.wording import" not in file.read_text():
        return
    for call in calls(file):
        is_ours = isinstance(call.func, ast.Name) and call.func.id in (
            "fault",
            "is_said",
            "refused",
            "says",
        )
        if is_ours and isinstance(call.args[0], ast.Constant):
            yield str(call.args[0].value)


def test_every_code_is_used_and_every_code_in_use_is_known() -> None:
    used = {code for file in FILES for code in codes_of(file) if file.name != Path(__file__).name}
    assert used == WORDINGS.keys()


def test_no_code_and_no_pattern_stands_twice() -> None:
    assert len(WORDINGS) == sum(len(room) for room in ROOMS.values())
    patterns = [wording.pattern for wording in WORDINGS.values()]
    assert len({*patterns}) == len(patterns)


def example(wording: Wording) -> str:
    """A text that the pattern fits: the names of its fields stand for their values."""
    text = re.sub(r"\{(\w+)(?:!r)?\}", r"\1", wording.pattern)
    return text.replace("...", " ")


def test_no_code_is_said_by_the_text_of_another_one() -> None:
    said = [
        (one, other)
        for one, wording in WORDINGS.items()
        for other, second in WORDINGS.items()
        if one != other and one not in QUOTES | GENERAL
        if wording.errors == second.errors and is_said(one, example(second))
    ]
    assert said == []


def test_no_test_but_the_table_holds_the_words_of_an_error_of_ours() -> None:
    held = {
        str(file.relative_to(ROOT))
        for file in FILES
        for call in calls(file)
        if ast.unparse(call.func) == "pytest.raises"
        if any(keyword.arg == "match" for keyword in call.keywords)
        if ast.unparse(call.args[0]) not in FOREIGN
    }
    assert held == set()


def words_of_its_own(file: Path) -> list[int]:
    """The lines that compare the text of an error that was caught, or standard error, with words.

    Words are two of them side by side: a path, a key, a flag or a number alone is a field. An
    equation is no matter here: it compares with what the test raised itself.
    """
    lines: list[int] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Assert):
            continue
        compared = re.search(r"str\(\w+\.value\)|\.stderr\b|\.err\b", ast.unparse(node.test))
        texts = [part.value for part in ast.walk(node.test) if isinstance(part, ast.Constant)]
        words = {text for text in texts if isinstance(text, str) and _WORDS.search(text)}
        is_equation = any(isinstance(part, ast.Eq) for part in ast.walk(node.test))
        if compared and words - OF_PROGRAMS and not is_equation:
            lines.append(node.lineno)
    return lines


def test_no_other_file_compares_the_words_of_an_error() -> None:
    held = {str(file.relative_to(ROOT)): words_of_its_own(file) for file in FILES}
    assert {file for file, lines in held.items() if lines} == set()


def test_a_refusal_has_its_type_its_exit_code_and_its_fields() -> None:
    with refused("id_twice", at="train.jsonl, line 3", id="a"):
        raise DataError("/data/train.jsonl, line 3: the id 'a' stands twice; give it another.")
    with refused(fault("key_unknown", key="lr"), nearest="lrs"):
        raise ConfigError("lr: no such key. Did you mean 'lrs'?")
    with pytest.raises(DataError), refused("key_unknown"):
        raise DataError("lr: no such key.")


@pytest.mark.parametrize(
    "text",
    [
        "/data/train.jsonl, line 3: the id 'b' stands twice",
        "/data/train.jsonl, line 2: the id 'a' stands twice",
        "/data/train.jsonl, line 3, the id 'a' stands twice",
        "/data/train.jsonl, line 3: the id 'a' is there twice",
    ],
)
def test_a_message_without_a_field_or_its_place_is_not_taken(text: str) -> None:
    with pytest.raises(AssertionError), refused("id_twice", at="train.jsonl, line 3", id="a"):
        raise DataError(text)


def test_a_block_that_raises_nothing_is_not_taken() -> None:
    with pytest.raises(pytest.fail.Exception), refused("key_unknown"):
        pass


def test_a_number_is_not_a_part_of_another_one() -> None:
    assert is_said("rank_state_missing", "there is none of rank 1.", rank=1)
    assert not is_said("rank_state_missing", "there is none of rank 11.", rank=1)
    assert not is_said(
        "head_width_odd", "is 13 numbers a head: rotary positions turn pairs", width=3
    )


def test_another_exit_code_and_another_proposal_are_not_taken() -> None:
    class Wrong(Unreachable):
        exit_code = 2

    with pytest.raises(AssertionError), refused("backend_silent"):
        raise Wrong("slurm has not answered for 3 s")
    with pytest.raises(AssertionError):
        says("key_unknown", "lr: no such key. Did you mean 'lrs'?", nearest="ls")


def test_a_field_that_a_code_does_not_have_is_an_error_of_the_test() -> None:
    with pytest.raises(AssertionError, match="has no field"), refused("id_twice", name="a"):
        raise DataError("the id 'a' stands twice")


def test_what_a_test_does_not_state_is_told_to_it() -> None:
    found = says(
        "batch_above_rows",
        DataError(
            "the train split has 3 rows, fewer than "
            "train.global_batch=4. Use a global_batch of at most 3, or more data."
        ),
        rows=3,
    )
    assert (found["global_batch"], found["most"]) == ("4", "3")
