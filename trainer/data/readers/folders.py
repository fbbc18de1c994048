"""Finds the file of --data_path that a split is read from. The splits are "train" and "valid", and
"test" if a source has one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from trainer.data.formats.subset import split_name
from trainer.data.left_out import note
from trainer.errors import DataError

CORPUS, QUERIES = "corpus.tsv", "queries.jsonl"  # of NaturalQuestions
OTHERS = "files of a split beside the one that is read (left out; data.files names another)"
_MAX_LISTED = 5  # names of what is there instead
_ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_PACKING = re.compile(r"\.(?:gz|bz2|xz|zst|zip)$")  # of which gz alone is read, none is overlooked
# Behind the name of a split: the number of a part, or what file managers call a copy.
_PART = re.compile(
    r"[-_. (]*(?:part|shard|chunk|copy)?[-_. (]*(?:\d+\)?(?:[-_ ]*of[-_ ]*\d+)?|copy)?"
)
_SPLIT_NAMES = {
    "train": ("train",),
    "valid": ("valid", "val", "dev", "validation"),
    "test": ("test",),
}


def required_folder(folder: Path | None, contents: str) -> Path:
    """--data_path. DataError for None (it was not given) that names the files it should hold."""
    if folder is None:
        raise DataError(
            "the data is read from --data_path, and none was given. Point it at a folder that "
            f"holds {contents}, or use data.source='stdlib_docs', which needs no files."
        )
    if folder.is_file():
        raise DataError(
            f"--data_path {folder} is a file, want the folder that holds it: {folder.parent}. A "
            "file is named in data.files."
        )
    return folder


def split_names(split: str) -> Sequence[str]:
    """The names that files and rows may use for a split."""
    if split not in _SPLIT_NAMES:
        raise DataError(f"split={split!r} does not exist. Use {', '.join(_SPLIT_NAMES)}.")
    return _SPLIT_NAMES[split]


def nq_folder(folder: Path | None) -> Path:
    """The folder of NaturalQuestions: --data_path, or its subfolder nq if only that has the
    corpus.
    """
    folder = required_folder(
        folder, f"{CORPUS} (id, text, title) and {QUERIES} (split, question, answers, gold)"
    )
    below = folder / "nq"
    is_below = not (folder / CORPUS).is_file() and (below / CORPUS).is_file()
    return below if is_below else folder


def corpus_file(folder: Path | None, name: str) -> Path:
    """A file of passages in --data_path or its subfolder nq. It may be compressed, with or without
    .gz in `name`.
    """
    folder = required_folder(folder, f"{name} (passages: id, text, title)")
    return _present(folder / name) or _present(folder / "nq" / name) or folder / name


def split_file(
    folder: Path | None,
    split: str,
    suffixes: Sequence[str],
    *,
    name: str | None,
    key: str,
    first: str | None = None,
) -> Path:
    """The file (or folder of files) `name` below --data_path; without a name, the only file that is
    named after the split.

    A compressed file (.gz) is used if the plain one is missing. key: the key of the experiment that
    can name a file, for messages. first: the suffix that is read where files of several kinds have
    the name; one file must have it. What is not read is noted. A part of the rows may stand behind
    the name (formats/subset.py); "[:100]" alone is a part of the file named after the split.
    """
    stems = split_names(split)
    folder = required_folder(folder, name or f"{stems[0]}{suffixes[0]}")
    if name is not None:
        stem, subset = split_name(name)
        if stem or subset is None:
            return folder / name
        usual = split_file(folder, split, suffixes, name=None, key=key, first=first)
        return usual.with_name(f"{usual.name}{subset.text}")
    present = _present_of(folder, stems, suffixes)
    paths = present
    if len(present) > 1 and first is not None:
        paths = [path for path in present if _PACKING.sub("", _kind(path)).endswith(first)]
    if len(paths) == 1:
        _note_others(folder, stems, suffixes, read=paths[0])
        return paths[0]
    if present:
        raise DataError(
            f"{folder} holds {' and '.join(path.name for path in present)}. Say in {key}.{split} "
            f"which one is the {split} split."
        )
    names = ", ".join(f"{stem}{suffixes[0]}" for stem in stems)
    others = f", nor any with {', '.join(suffixes[1:])}" if suffixes[1:] else ""
    raise DataError(
        f"{folder} holds no {split} split: none of {names}{others}. Put it there, name another in "
        f"{key}.{split}, or point --data_path at its folder."
    )


def first_split_file(folder: Path | None, split: str, suffix: str) -> Path | None:
    """The first file of a split with this suffix, in the order of the names valid, val, dev; None
    if there is none. Whoever reads rows asks split_file(), which refuses a second one.
    """
    stems = split_names(split)
    folder = required_folder(folder, f"train{suffix} and valid{suffix}")
    return next(iter(_present_of(folder, stems, [suffix])), None)


def only_row_file(folder: Path, suffixes: Sequence[str]) -> Path:
    """The file whose rows are split into training and validation: train.*, or the only file of the
    folder.

    DataError if there are several files, or one that is named after another split.
    """
    files = _present_of(folder, split_names("train"), suffixes)
    files += _present_of(folder, split_names("valid"), suffixes)
    if not files:
        names = sorted(path for path in folder.iterdir() if path.is_file())
        files = [path for path in names if _PACKING.sub("", path.name.lower()).endswith(_ROWS)]
    others = "|".join([*split_names("valid"), *split_names("test")])
    if len(files) == 1 and not re.match(rf"(?:{others})(?![a-z])", files[0].name.lower()):
        _note_others(folder, split_names("train"), suffixes, read=files[0])
        return files[0]
    if not files:
        others_there = sorted(path.name for path in folder.iterdir())[:_MAX_LISTED]
        raise DataError(
            f"{folder} holds no file of rows, but {', '.join(others_there) or 'nothing'}. Put "
            f"train.jsonl there, or another file that ends in {', '.join(_ROWS)}."
        )
    there = " and ".join(path.name for path in files)
    raise DataError(
        f"{folder} holds {there}. data.valid_share takes the validation rows from the file of "
        "training: name that in data.files.train, or leave valid_share out."
    )


def _present_of(folder: Path, stems: Sequence[str], suffixes: Sequence[str]) -> list[Path]:
    """The existing files, ordered by name and then by suffix; if there are none, the existing
    folders.
    """
    by_name: dict[str, list[Path]] = {}  # "Train.JSONL" is train.jsonl, and so is train.ndjson
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_file():
            by_name.setdefault(_kind(path), []).append(path)
    present: list[Path] = []
    for name in (f"{stem}{suffix}" for stem in stems for suffix in suffixes):
        present += by_name.get(name, []) or by_name.get(f"{name}.gz", [])
    return present or [folder / stem for stem in stems if (folder / stem).is_dir()]


def _kind(path: Path) -> str:
    """The name in lower case, with .jsonl for .ndjson."""
    return path.name.lower().replace(".ndjson", ".jsonl")


def _note_others(
    folder: Path, stems: Sequence[str], suffixes: Sequence[str], *, read: Path
) -> None:
    """Note what else in the folder is named as the split is: files of other kinds, packed ones,
    numbered parts, copies, a folder.
    """
    for path in sorted(folder.iterdir()):
        name = path.name if path.is_dir() else _PACKING.sub("", _kind(path))
        kinds = [""] if path.is_dir() else [kind for kind in suffixes if name.endswith(kind)]
        is_named = any(
            name.startswith(stem) and _PART.fullmatch(name.removesuffix(kind).removeprefix(stem))
            for kind in kinds
            for stem in stems
        )
        if is_named and path != read:
            note(str(path), OTHERS)


def _present(path: Path) -> Path | None:
    """The file, or its compressed version (.gz); None if there is neither."""
    packed = path.with_name(f"{path.name}.gz")
    if path.is_file():
        return path
    return packed if packed.is_file() else None
