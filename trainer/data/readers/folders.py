"""Which file of --data_path a split is read from. The splits are "train" and "valid", plus "test"
where a source has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.errors import DataError

CORPUS, QUERIES = "corpus.tsv", "queries.jsonl"  # of NaturalQuestions
_SPLIT_NAMES = {"train": ("train",), "valid": ("valid", "val", "dev"), "test": ("test",)}


def given_folder(folder: Path | None, contents: str) -> Path:
    """--data_path; None, when it was not given, is refused with the files that it should hold."""
    if folder is None:
        raise DataError(
            "the data is read from --data_path, and none was given. Point it at a folder that "
            f"holds {contents}, or use data.source='stdlib_docs', which needs no files."
        )
    return folder


def split_names(split: str) -> Sequence[str]:
    """What files and rows may call a split."""
    if split not in _SPLIT_NAMES:
        raise DataError(f"split={split!r} does not exist. Use {', '.join(_SPLIT_NAMES)}.")
    return _SPLIT_NAMES[split]


def nq_folder(folder: Path | None) -> Path:
    """The folder of NaturalQuestions: --data_path or its subfolder nq, whichever has the corpus."""
    folder = given_folder(
        folder, f"{CORPUS} (id, text, title) and {QUERIES} (split, question, answers, gold)"
    )
    return folder / "nq" if _is_below_nq(folder, CORPUS) else folder


def corpus_file(folder: Path | None, name: str) -> Path:
    """A file of passages in --data_path or its subfolder nq.

    It may be packed, with or without .gz in its name.
    """
    folder = given_folder(folder, f"{name} (passages: id, text, title)")
    return _present(folder / name) or _present(folder / "nq" / name) or folder / name


def split_file(
    folder: Path | None, split: str, suffixes: Sequence[str], *, name: str | None, key: str
) -> Path:
    """The named file below --data_path, else the only one that is called like the split.

    Packed files (.gz) are taken where the plain one is missing. key: of the experiment, where a
    file can be named.
    """
    names = [f"{stem}{suffix}" for stem in split_names(split) for suffix in suffixes]
    folder = given_folder(folder, name or f"{names[0]} (or another of {', '.join(names)})")
    if name is not None:
        return folder / name
    present = [path for path in (_present(folder / each) for each in names) if path is not None]
    if len(present) == 1:
        return present[0]
    if present:
        raise DataError(
            f"{folder} holds {' and '.join(path.name for path in present)}. Say in {key}.{split} "
            f"which one is the {split} split."
        )
    raise DataError(
        f"{folder} holds none of {', '.join(names)}, which the {split} split is read from. Put it "
        f"there, name another in {key}.{split}, or point --data_path at its folder."
    )


def first_split_file(folder: Path | None, split: str) -> Path:
    """The first of a split's files that is there, in the order of the names below.

    For train: train.jsonl; for valid: valid.jsonl, val.jsonl, dev.jsonl; for test: test.jsonl.
    DataError when none is there.
    """
    folder = given_folder(folder, "train.jsonl and valid.jsonl")
    names = [f"{stem}.jsonl" for stem in split_names(split)]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(
        f"{folder} holds none of {', '.join(names)}, which the {split} split is read from. "
        "Write one JSON object a line, or point --data_path at the folder that holds the file."
    )


def _is_below_nq(folder: Path, name: str) -> bool:
    return not (folder / name).is_file() and (folder / "nq" / name).is_file()


def _present(path: Path) -> Path | None:
    """The file, or the packed one; None when there is neither."""
    packed = path.with_name(f"{path.name}.gz")
    if path.is_file():
        return path
    return packed if packed.is_file() else None
