"""Groups of experiments in a YAML or JSON file. Imports no torch.

A file holds what EXP_GROUPS holds: group -> experiments. It may also hold one experiment, or a list
of experiments; the group is then named after the file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from trainer.config import userfile
from trainer.config.readers import json_text, yaml_text
from trainer.errors import ConfigError


def read(path: Path) -> dict[str, Any]:
    """The groups of a .yaml, .yml or .json file, as EXP_GROUPS of a Python file would state them.

    A value has the type that the same text has in JSON (YAML 1.2's core schema): 1e-4 is a number,
    `no` and 2024-05-01 are texts, so the ids equal those of the same dictionary in Python. Raises
    ConfigError with file and line for what is neither, and for a key that is stated twice.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows begins it with a mark
    except OSError as error:
        raise ConfigError(
            f"{path}: it cannot be read ({error.strerror}). Give the path of a file of groups."
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte {error.start} is not UTF-8. Save the file as UTF-8."
        ) from None
    content = READERS[path.suffix.lower()](text, path)
    if isinstance(content, list):
        return {path.stem: content}
    if not isinstance(content, dict):
        what = "nothing" if content is None else userfile.kind(content)
        raise ConfigError(
            f"{path}: it holds {what}. Want a dictionary: group -> list of "
            "experiments; or one experiment, or a list of them."
        )
    groups = cast(dict[Any, Any], content)
    return {path.stem: [groups]} if isinstance(groups.get("task"), str) else groups


READERS: dict[str, Callable[[str, Path], Any]] = {
    ".yaml": yaml_text.read,
    ".yml": yaml_text.read,
    ".json": json_text.read,
}
