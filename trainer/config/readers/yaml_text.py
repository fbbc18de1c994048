"""YAML as the values that the same text has in JSON. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

from trainer.errors import ConfigError


def read(text: str, path: Path) -> Any:
    """The values of a YAML text under YAML 1.2's core schema. ConfigError with file and line for
    what is no YAML, for a tag, and for a key that is stated twice.
    """
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        has_tab = repr("\t") in str(error.problem)
        fix = "YAML indents by blanks: write them for the tab" if has_tab else "Correct the line"
        raise ConfigError(
            f"{path}:{line}: it is not YAML that is read here ({error.problem}). {fix}."
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: it is not YAML that is read here ({error}). Correct the file."
        ) from None


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
