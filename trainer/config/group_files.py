"""Groups of experiments in a YAML or JSON file. Imports no torch.

A file holds what EXP_GROUPS holds: group -> experiments. It may also hold one experiment, or a list
of experiments; the group is then named after the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

from trainer.config import userfile
from trainer.config.json_file import finite, without_twins
from trainer.errors import ConfigError


def read_file(path: Path) -> dict[str, Any]:
    """The groups of a .yaml, .yml or .json file, as EXP_GROUPS of a Python file would state them.

    A value has the type that the same text has in JSON (YAML 1.2's core schema): 1e-4 is a number,
    `no` and 2024-05-01 are texts, so the ids equal those of the same dictionary in Python. Raises
    ConfigError with file and line for what is neither, and for a key that is stated twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
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
        raise ConfigError(
            f"{path}: it holds {userfile.kind(content)}. Want a dictionary: group -> list of "
            "experiments; or one experiment, or a list of them."
        )
    groups = cast(dict[Any, Any], content)
    return {path.stem: [groups]} if isinstance(groups.get("task"), str) else groups


def _read_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text, object_pairs_hook=without_twins, parse_constant=finite)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}:{error.lineno}: it is not JSON ({error.msg}, column {error.colno}). Correct "
            "the line."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}. Correct the file.") from None


def _read_yaml(text: str, path: Path) -> Any:
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise ConfigError(
            f"{path}:{line}: it is not YAML that is read here ({error.problem}). Correct the line."
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: it is not YAML that is read here ({error}). Correct the file."
        ) from None


READERS: dict[str, Callable[[str, Path], Any]] = {
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".json": _read_json,
}

# The plain scalars of YAML 1.2's core schema (yaml.org/spec/1.2.2, 10.3.2). PyYAML reads YAML 1.1,
# in which 1e-4 is a text, `no` is false and 0123 is octal.
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("merge", "<<", ["<"]),
)


def _loader() -> Any:
    """A PyYAML loader of plain values under YAML 1.2's core schema. It refuses tags."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # pyright: ignore

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = [key.value for key, _ in node.value if key.tag.endswith(":str")]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise yaml.MarkedYAMLError(
                    problem=f"{', '.join(twice)}: stated twice in one block",
                    problem_mark=node.start_mark,
                )
            return super().construct_mapping(node, deep=deep)

    def integer(loader: Any, node: Any) -> int:
        text = loader.construct_scalar(node)
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)

    prefix = "tag:yaml.org,2002:"
    for name, pattern, first in _SCALARS:
        Loader.add_implicit_resolver(prefix + name, re.compile(f"^(?:{pattern})$"), first)
    Loader.add_constructor(f"{prefix}int", integer)
    for name in ("binary", "timestamp", "omap", "pairs", "set"):  # JSON knows none of them
        Loader.add_constructor(prefix + name, yaml.SafeLoader.construct_undefined)
    return Loader
