"""Problems, lines, statements and files of a conversion: what comes out, what is refused, and what
is counted.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from tests.wording import Fault, fault, refused, says
from trainer.__main__ import app
from trainer.recipes.vera.convert import Conversion, convert, declarer_of, values_by_name
from trainer.recipes.vera.declare import Draft, draft, find_blanks
from trainer.recipes.vera.problem import (
    Problem,
    multiple_choice,
    read_line,
    statement,
    write_line,
    yes_no,
)

GOOD = "Ice is _ . \\n (A) hot (B) cold\tcold"
ASKED = "What is ice? \\n (A) hot (B) cold\tcold"
words = st.text("abc XYZ.?_'", min_size=1).filter(str.strip).map(str.strip)


def lines_file(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "dev.tsv"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def asked(tmp_path: Path, *lines: str, **settings: object) -> Conversion:
    values = {"task": "other"} | settings
    return Conversion("unifiedqa", lines_file(tmp_path, *lines), tmp_path / "out", **values)  # type: ignore[arg-type]


# Lines


@given(
    st.none() | words,
    st.lists(words, min_size=2, max_size=5, unique=True),
    st.none() | words,
    st.data(),
)
def test_a_line_is_read_as_the_problem_it_was_written_from(
    question: str | None, choices: list[str], context: str | None, data: st.DataObject
) -> None:
    problem = multiple_choice(
        question, choices, data.draw(st.integers(0, len(choices) - 1)), context
    )
    assert read_line(write_line(problem)) == problem


@given(words, st.booleans())
def test_a_boolean_is_read_as_it_was_written(text: str, label: bool) -> None:
    assert read_line(write_line(yes_no(text, label=label))) == yes_no(text, label=label)
    assert read_line(write_line(statement(text, label=label)), is_statement=True) == statement(
        text, label=label
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no tab", fault("problem_without_tab")),
        ("question\tmaybe", fault("problem_yes_or_no")),
        (" \tyes", fault("problem_blank")),
        ("q \\n a b\ta", fault("problem_options")),
        ("q \\n (A) a (B) b\tc", fault("problem_answer")),
        ("q \\n (A) a\ta", fault("problem_option_count")),
        ("q \\n (A) a (B) b \\n c \\n d\ta", fault("problem_parts", count=4)),
        ("q \\n (A) vitamin (B) (B) sugar\tvitamin (B)", fault("problem_answer")),
    ],
)
def test_a_line_that_holds_no_problem_says_why(line: str, said: Fault) -> None:
    with refused(said):
        read_line(line)


# Statements


def drafted(question: str | None, choice: str, context: str | None = None) -> Draft:
    return draft(Problem(question, (choice, "other"), 0, context), choice, is_joined=False)


@pytest.mark.parametrize(
    ("question", "choice", "text"),
    [
        (None, "ice is cold", "ice is cold"),  # (a): no full stop
        ("Ice is _", "cold", "Ice is cold."),
        ("_ is cold.", "Ice", "Ice is cold."),
        ("_ce is cold.", "I", "Ice is cold."),
        ("Ice _?", "melts", "Ice melts."),
        ("Ice _?", "melts!", "Ice melts!."),
        ("Ice is _!", "cold", "Ice is cold!"),
        ("Is ice _____ or hot??", "cold", "Is ice cold or hot."),
    ],
)
def test_a_choice_fills_the_blank(question: str | None, choice: str, text: str) -> None:
    assert drafted(question, choice).text == text


@pytest.mark.parametrize(
    ("question", "count"),
    [
        ("a _ b", 1),
        ("a_b", 0),
        ("_a b", 1),
        ("__a b", 0),
        (f"a {'_' * 20} b", 1),
        (f"a {'_' * 21} b", 0),
        ("_ a _", 2),
    ],
)
def test_a_blank_has_a_space_beside_it_and_at_most_20_underscores(
    question: str, count: int
) -> None:
    assert len(find_blanks(question)) == count


def test_only_the_last_sentence_goes_to_the_converter() -> None:
    found = drafted("Ice is cold. It melts. Why?", "heat", "Context.")
    assert found == Draft("converter", "Why? </s> heat", "Context. Ice is cold. It melts. ")


def test_several_blanks_go_to_the_converter() -> None:
    assert drafted("_ is _", "ice").rule == "converter"


# Files and reports


def test_a_split_is_groups_of_statements_as_json(tmp_path: Path) -> None:
    convert(
        asked(tmp_path, GOOD, "Can it?\tno", "It can.\tyes"),
        lambda texts: [f"so {text}" for text in texts],
    )
    assert json.loads((tmp_path / "out/other/dev.json").read_text()) == [
        {"golds": ["Ice is cold ."], "distractors": ["Ice is hot ."]},
        {"golds": [], "distractors": ["so Can it? </s> yes."]},
        {"golds": ["so It can. </s> yes."], "distractors": []},
    ]
    assert (tmp_path / "out/other/dev.tsv").read_text() == f"{GOOD}\nCan it?\tno\nIt can.\tyes\n"


def test_rows_that_are_no_problem_are_counted_and_listed(tmp_path: Path) -> None:
    (report,) = convert(asked(tmp_path, GOOD, "odd", GOOD))
    assert (report.rows, report.groups, report.statements, report.duplicates) == (3, 2, 4, 1)
    assert report.failures == [f"{tmp_path}/dev.tsv, line 2: no tab, want question, tab, answer"]
    assert any("parse failures           1" in line for line in report.lines())
    written = json.loads((tmp_path / "out/other/report.json").read_text())["dev"]
    assert (written["rows"], written["failures"], written["by_rule"]) == (
        3,
        report.failures,
        {"blank": 4},
    )


def test_strict_fails_on_every_row_that_would_be_left_out_and_writes_nothing(
    tmp_path: Path,
) -> None:
    with refused("rows_give_no_group", bad=2, count=3) as caught:
        convert(asked(tmp_path, GOOD, "odd", ASKED, is_strict=True))
    says("problem_without_tab", caught.value, at=f"{tmp_path}/dev.tsv, line 2")
    says("converter_needed", caught.value, at=f"{tmp_path}/dev.tsv, line 3")
    assert not (tmp_path / "out").exists()


def test_without_a_converter_what_needs_one_is_left_out_and_counted(tmp_path: Path) -> None:
    (report,) = convert(asked(tmp_path, GOOD, ASKED))
    assert report.unconverted == [f"{tmp_path}/dev.tsv, line 2"]
    assert (report.groups, report.converter_share) == (1, 0.5)
    assert len(json.loads((tmp_path / "out/other/dev.json").read_text())) == 1


def test_a_split_without_a_group_is_refused(tmp_path: Path) -> None:
    with refused("rows_give_no_group", bad=2, count=2):
        convert(asked(tmp_path, ASKED, "odd"))
    assert not (tmp_path / "out").exists()


def test_an_option_with_the_text_of_the_gold_is_no_distractor(tmp_path: Path) -> None:
    (report,) = convert(asked(tmp_path, "It is _ . \\n (A) hot (B) hot\thot"))
    assert (report.statements, report.identical_options, report.lost_distractors) == (1, 1, 1)
    assert json.loads((tmp_path / "out/other/dev.json").read_text()) == [
        {"golds": ["It is hot ."], "distractors": []}
    ]


def test_a_blank_too_many_and_a_marker_in_an_option_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    folder.mkdir()
    row = {"sentence": "Give _ to _", "option1": "vitamin (B)", "option2": "sugar", "answer": "1"}
    (folder / "dev.jsonl").write_text(json.dumps(row))
    (report,) = convert(
        Conversion("winogrande_xl", folder, tmp_path / "out"), lambda texts: list(texts)
    )
    assert (report.blanks_not_one, report.ambiguous_lines, report.groups) == (1, 1, 1)


def test_lines_of_a_known_set_are_declared_as_that_set(tmp_path: Path) -> None:
    convert(asked(tmp_path, "He sat. He \\n (A) rose. (B) fell.\trose.", task="swag"))
    assert json.loads((tmp_path / "out/swag/dev.json").read_text())[0]["golds"] == [
        "He sat. He rose."
    ]
    convert(asked(tmp_path, "Ice is cold\tyes", task="creak"))
    assert json.loads((tmp_path / "out/creak/dev.json").read_text())[0]["golds"] == ["Ice is cold"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    convert(asked(tmp_path, GOOD))
    before = (tmp_path / "out/other/dev.json").read_bytes()
    with refused("path_exists"):
        convert(asked(tmp_path, GOOD, GOOD))
    assert (tmp_path / "out/other/dev.json").read_bytes() == before


def test_the_reports_of_other_splits_stay(tmp_path: Path) -> None:
    convert(asked(tmp_path, GOOD))
    convert(asked(tmp_path, GOOD, split="train"))
    assert sorted(json.loads((tmp_path / "out/other/report.json").read_text())) == ["dev", "train"]


def test_a_converter_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def broken(_: object) -> list[str]:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        convert(asked(tmp_path, ASKED), broken)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dataset": "creek"}, fault("conversion_unknown", dataset="creek", nearest="creak")),
        ({"task": None}, fault("conversion_task_required")),
        ({"dataset": "comve_a"}, fault("conversion_split_of_one_file")),
        ({"dataset": "copa"}, fault("conversion_split_required")),
    ],
)
def test_a_wrong_request_says_what_was_wanted(
    change: dict[str, str], said: Fault, tmp_path: Path
) -> None:
    values = {"dataset": "unifiedqa", "task": "other"} | change
    split = "dev" if values["dataset"] == "comve_a" else None
    with refused(said):
        convert(
            Conversion(
                values["dataset"],
                lines_file(tmp_path, GOOD),
                tmp_path / "out",
                split=split,
                task=values["task"],
            )
        )


def test_a_folder_without_the_files_is_told_which(tmp_path: Path) -> None:
    with refused("task_files_absent", task="qasc", files="train: train.jsonl; dev: dev.jsonl"):
        convert(Conversion("qasc", tmp_path, tmp_path / "out"))
    (tmp_path / "train.jsonl").write_text("{}")
    with refused("task_file_absent", file="train-labels.lst", split="train"):
        convert(Conversion("social_iqa", tmp_path, tmp_path / "out"))


def test_options_of_the_command_are_checked() -> None:
    assert values_by_name(["case=fit", "a=b=c"]) == {"case": "fit", "a": "b=c"}
    with refused("variant_form"):
        values_by_name(["fit"])
    assert declarer_of("rules") == "rules"
    with refused("declarer_unknown"):
        declarer_of("neural")


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_prints_the_report(tmp_path: Path) -> None:
    path = lines_file(tmp_path, GOOD, "odd")
    done = command(
        "convert", "unifiedqa", "--in", path, "--out", tmp_path / "out", "--task", "other"
    )
    assert (done.exit_code, done.stderr) == (0, "")
    assert "other/dev: 2 rows -> 1 groups, 2 statements" in done.stdout


def test_the_command_with_strict_ends_in_one_message_and_code_2(tmp_path: Path) -> None:
    path = lines_file(tmp_path, GOOD, "odd")
    done = command(
        "convert",
        "unifiedqa",
        "--in",
        path,
        "--out",
        tmp_path / "out",
        "--task",
        "other",
        "--strict",
    )
    assert done.exit_code == 2
    assert done.stderr.startswith("DataError: other/dev: ")
    says("rows_give_no_group", done.stderr, at="other/dev", bad=1, count=2)


def test_the_command_makes_more_by_rule_when_asked(tmp_path: Path) -> None:
    path = lines_file(tmp_path, "Can you see it?\tyes")
    options = ["--out", tmp_path / "out", "--task", "other", "--declarer", "rules", "--strict"]
    assert command("convert", "unifiedqa", "--in", path, *options).exit_code == 0
    assert json.loads((tmp_path / "out/other/dev.json").read_text())[0]["golds"] == [
        "You can see it."
    ]
