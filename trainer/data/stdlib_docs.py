"""The embedded default corpus: the docstrings of Python's own standard library, read from this
machine's sources.

It needs no download and no licence question, and it is large enough (about 7,000 docstrings, 1.5
MB) to show that a small model learns. It differs between Python versions, so `content_hash` belongs
into whatever is derived from it.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import inspect
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data.formats.held_out import is_held_out
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.protocol.task import Row

_SKIPPED = {
    *("site-packages", "dist-packages", "lib-dynload", "__pycache__", "ensurepip"),
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"),
    *("encodings", "pydoc_data"),  # generated tables: slow to parse, next to no prose
}
_VALID_OF_1000 = 50  # about 5 % is held out
_MAX_SUMMARY_WORDS = 16
_MIN_WORDS = 3  # of a summary, and of the body behind it
_MAX_CONTEXT_WORDS = 100
_SENTENCE = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\betc)(?<!\bvs)[.!?](?=\s|$)")


@dataclass(frozen=True)
class Docstring:
    """One docstring: the dotted name of what it documents, and its dedented text."""

    name: str  # "posixpath.join"
    text: str


@lru_cache(maxsize=1)
def docstrings() -> tuple[Docstring, ...]:
    """Every distinct docstring of the standard library's modules, classes, functions and methods,
    sorted by name.

    The sources are parsed and never imported. A text that occurs twice is kept under its first
    name. The same Python version gives the same tuple on every machine. Raises DataError when the
    library is installed without sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    pairs: list[tuple[str, str]] = []
    # Syntax trees are millions of objects without cycles. With torch loaded, collecting garbage
    # takes half of the time.
    collects_garbage = gc.isenabled()
    gc.disable()
    try:
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root)
            if _SKIPPED & set(inside.parts):
                continue
            parts = inside.with_suffix("").parts
            module = ".".join(part for part in parts if part != "__init__")
            tree = ast.parse(path.read_bytes())
            pairs += [(doc.name, doc.text) for doc in _walk(tree, module)]
    finally:
        if collects_garbage:
            gc.enable()
    pairs.sort()
    first_names: dict[str, str] = {}
    for name, text in pairs:
        first_names.setdefault(text, name)
    if not first_names:
        raise DataError(
            f"Python's standard library at {root} holds no source files (a zipped or stripped "
            "installation?). Use a full Python installation, or another data.source."
        )
    return tuple(Docstring(name, text) for text, name in first_names.items())


@lru_cache(maxsize=1)
def content_hash() -> str:
    """sha256 over all names and texts, 64 hex characters: changes with the Python version."""
    digest = hashlib.sha256()
    for doc in docstrings():
        digest.update(f"{doc.name}\0{doc.text}\0".encode())
    return digest.hexdigest()


def qa_rows(split: str) -> list[Row]:
    """Rows of "train" or "valid" whose answer must be read off the context: {question, answers,
    context, title}.

    The question asks what a name does, the answer is the first sentence of its docstring, the
    context the docstring with its line breaks removed, cut to 100 words; the answer is always a
    literal part of the context.
    """
    rows = (_question(doc) for doc in _split(split))
    return [row for row in rows if row is not None]


def texts(split: str) -> list[Row]:
    """Rows {"text": name, newline, docstring} of "train" or "valid", for language modelling."""
    return [{"text": f"{doc.name}\n{doc.text}"} for doc in _split(split)]


def _walk(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[Docstring]:
    text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").strip()
    if text:
        # a lone surrogate is no text to a tokenizer
        yield Docstring(name, text.encode(errors="replace").decode())
    # functions inside functions are nobody's documentation
    if isinstance(node, (ast.Module, ast.ClassDef)):
        for child in node.body:
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _walk(child, f"{name}.{child.name}")


def _split(split: str) -> list[Docstring]:
    if split not in ("train", "valid"):
        raise DataError(
            f"split={split!r} does not exist in the embedded corpus. Use train or valid."
        )
    return [
        doc
        for doc in docstrings()
        if is_held_out(doc.name, per_mille=_VALID_OF_1000) == (split == "valid")
    ]


def _question(doc: Docstring) -> Row | None:
    """The row of a docstring with a short first sentence and something behind it, else None."""
    paragraph = " ".join(doc.text.split("\n\n", 1)[0].split())
    words = doc.text.split()
    end = _SENTENCE.search(paragraph)
    summary = paragraph[: end.end()] if end else paragraph
    num_words = len(summary.split())
    if not _MIN_WORDS <= num_words <= _MAX_SUMMARY_WORDS or len(words) - num_words < _MIN_WORDS:
        return None
    return {
        "question": f"What does {doc.name} do?",
        "answers": [summary],
        "context": " ".join(words[:_MAX_CONTEXT_WORDS]),
        "title": doc.name.split(".", 1)[0],
    }
