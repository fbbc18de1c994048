"""The embedded corpus is there, stable, and asks what its contexts answer."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wording import refused
from trainer.data import stdlib_docs


def test_the_corpus_is_large_and_holds_no_text_twice() -> None:
    docs = stdlib_docs.docstrings()
    assert len(docs) > 5000
    assert sum(len(doc.text) for doc in docs) > 1_000_000
    assert len({doc.text for doc in docs}) == len(docs)


def test_a_well_known_docstring_is_found_under_its_dotted_name() -> None:
    found = {doc.name: doc.text for doc in stdlib_docs.docstrings()}
    assert found["textwrap.dedent"].startswith("Remove any common leading whitespace")
    assert "\n    " not in found["textwrap.dedent"].split("\n\n")[1]  # cleaned of its indentation


def test_tests_and_vendored_packages_are_left_out() -> None:
    modules = {doc.name.split(".")[0] for doc in stdlib_docs.docstrings()}
    assert not modules & {"test", "idlelib", "lib2to3", "turtledemo", "site-packages", "ensurepip"}
    assert not any(
        ".test." in doc.name or ".tests." in doc.name for doc in stdlib_docs.docstrings()
    )


@pytest.mark.long
def test_another_process_reads_the_same_corpus() -> None:
    script = "from trainer.data import stdlib_docs; print(stdlib_docs.content_hash())"
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        env={"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == stdlib_docs.content_hash()


@pytest.mark.long
def test_reading_the_corpus_imports_neither_torch_nor_the_modules_it_reads() -> None:
    script = (
        "import sys; from trainer.data import stdlib_docs; stdlib_docs.docstrings(); "
        "print(sorted({'torch', 'turtle', 'antigravity'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_every_answer_is_a_short_literal_part_of_its_context() -> None:
    rows = stdlib_docs.qa_rows("train") + stdlib_docs.qa_rows("valid")
    assert len(rows) > 2000
    for row in rows:
        (answer,) = row["answers"]
        assert answer in row["context"]
        assert 3 <= len(answer.split()) <= 16
        assert len(answer.split()) < len(row["context"].split()) <= 100
        assert all(row[key].strip() for key in ("question", "title"))


def test_a_question_reads_its_docstring() -> None:
    rows = {
        row["question"]: row for row in stdlib_docs.qa_rows("train") + stdlib_docs.qa_rows("valid")
    }
    row = rows["What does posixpath.join do?"]
    assert row["answers"][0] == "Join two or more pathname components, inserting '/' as needed."
    assert row["title"] == "posixpath"


@pytest.mark.parametrize("rows", [stdlib_docs.qa_rows, stdlib_docs.texts])
def test_valid_is_about_five_percent_and_shares_nothing_with_train(rows) -> None:
    train, valid = ({str(row) for row in rows(split)} for split in ("train", "valid"))
    assert not train & valid
    assert 0.03 < len(valid) / (len(train) + len(valid)) < 0.07


def test_a_summary_ends_at_its_first_sentence_and_not_at_an_abbreviation() -> None:
    doc = stdlib_docs.Docstring(
        "m.f", "Read a thing, e.g. a file, at once. Then close it.\n\nMore about it."
    )
    row = stdlib_docs._question(doc)
    assert row is not None
    assert row["answers"] == ["Read a thing, e.g. a file, at once."]


@pytest.mark.parametrize(
    "text", ["Only a summary here.", "Too short.\n\nBut it has a body.", "word " * 40]
)
def test_a_docstring_without_a_short_summary_and_a_body_asks_nothing(text: str) -> None:
    assert stdlib_docs._question(stdlib_docs.Docstring("m.f", text.strip())) is None


def test_functions_inside_functions_are_not_documentation() -> None:
    tree = ast.parse('def outer():\n    """Outer."""\n    def inner():\n        """Inner."""\n')
    assert [doc.name for doc in stdlib_docs._walk(tree, "m")] == ["m.outer"]


def test_a_library_without_sources_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with refused("sources_absent"):
        stdlib_docs.docstrings.__wrapped__()


def test_an_unknown_split_is_refused() -> None:
    with refused("split_unknown", choices="train or valid"):
        stdlib_docs.texts("test")
