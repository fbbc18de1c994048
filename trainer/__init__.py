"""Lathe: fine-tune large models with DeepSpeed from one plain dictionary.

    from trainer import fine_tune, load, plan, submit

docs/python.md describes these four. Importing them imports no torch: a call imports what it needs.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.api.planning import plan
    from trainer.api.run import load
    from trainer.api.submission import submit
    from trainer.api.training import fine_tune

__all__ = ["fine_tune", "load", "plan", "submit"]

_MODULES = {
    "fine_tune": "trainer.api.training",
    "load": "trainer.api.run",
    "plan": "trainer.api.planning",
    "submit": "trainer.api.submission",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


class _Package(ModuleType):
    """This package. A room that is imported becomes an attribute of its package, and trainer/plan/
    would hide the function `plan`: such a room is imported by its whole name only.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
