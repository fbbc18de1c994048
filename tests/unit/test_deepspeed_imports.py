"""DeepSpeed is imported without what it has no use for here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from trainer.runtime import deepspeed_optimizers as mended

# 3 s and 1.6 s, at every start of every run
_HEAVY = ("torch._inductor.compile_fx", "mlflow")
_ENGINE = f"""
import sys
from trainer.training import engine
assert sys.modules.get("mlflow", 1) is not None, "it can be imported behind DeepSpeed"
from deepspeed.runtime.zero.muon import muon_optimizer
print([name for name in {_HEAVY} if name in sys.modules])
"""


def test_an_engine_comes_without_a_compiler_and_without_mlflow() -> None:
    argv = [sys.executable, "-c", _ENGINE]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_muon_is_compiled_when_it_is_first_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """What DeepSpeed decorates gives what the compiled function gives, and is compiled once."""
    compiled: list[str] = []

    def compiling(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled.append(function.__name__)
        return lambda *args, **how: ("compiled", function(*args, **how))

    monkeypatch.setattr(torch, "compile", compiling)
    name = "deepspeed.runtime.zero.muon.original_muon"
    for loaded in [one for one in sys.modules if one == name]:
        monkeypatch.delitem(sys.modules, loaded)
    with mended.compiled_when_called(import_module("deepspeed.runtime.compiler")):
        module = import_module(name)
    monkeypatch.setitem(sys.modules, name, module)
    assert compiled == []
    function = module.zeropower_via_newtonschulz5
    for _ in range(2):
        word, matrix = function(torch.eye(3), steps=1)
        assert (word, matrix.shape) == ("compiled", (3, 3))
    assert compiled == ["zeropower_via_newtonschulz5"]
    assert function.__doc__, "its name and its words stay"


def test_mlflow_is_as_before_behind_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    with mended.without_mlflow(), pytest.raises(ImportError):
        import_module("mlflow")
    assert "mlflow" not in sys.modules
    there = type(sys)("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", there)
    with mended.without_mlflow():
        assert import_module("mlflow") is there
