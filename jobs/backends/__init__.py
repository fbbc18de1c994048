"""The name is the registration: `-j <name>` is legal if and only if jobs/backends/ holds <name>.py
or <name>/.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import ConfigError, nearest

if TYPE_CHECKING:
    from jobs.protocol import Backend

_HERE = Path(__file__).parent


def names() -> list[str]:
    """All backends, sorted."""
    files = [file.stem for file in _HERE.glob("*.py") if file.stem != "__init__"]
    return sorted(files + [file.parent.name for file in _HERE.glob("*/backend.py")])


def load(name: str) -> Backend:
    """The backend of a name: the one class of the file named alike. ConfigError for other names."""
    if name not in names():
        raise ConfigError(f"-j {name}: there is no such backend. {nearest(name, names())}")
    file = f"{name}.backend" if (_HERE / name).is_dir() else name
    module = importlib.import_module(f"jobs.backends.{file}")
    return next(kind for kind in vars(module).values() if getattr(kind, "name", None) == name)()


class BackendCache:
    """`load`, but each backend is made only once."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}

    def __call__(self, name: str) -> Backend:
        if name not in self._backends:
            self._backends[name] = load(name)
        return self._backends[name]
