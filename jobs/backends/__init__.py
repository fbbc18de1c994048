"""The file is the registration: jobs/backends/<name>.py exists if and only if `-j <name>` is legal."""

from __future__ import annotations

import importlib
from pathlib import Path

from jobs.spec import Backend
from trainer.config import nearest
from trainer.errors import ConfigError


def names() -> list[str]:
    """All backends, sorted."""
    return sorted(file.stem for file in Path(__file__).parent.glob("*.py") if file.stem != "__init__")


def load(name: str) -> Backend:
    """The backend of that name: the one class of its file, named alike. ConfigError for any other name."""
    if name not in names():
        raise ConfigError(f"-j {name}: there is no such backend. {nearest(name, names())}")
    module = importlib.import_module(f"jobs.backends.{name}")
    return next(kind for kind in vars(module).values() if getattr(kind, "name", None) == name)()
