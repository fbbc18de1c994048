"""What is true of every backend, and that only jobs/backends names one."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from jobs import backends
from jobs.protocol import Traits
from tests.jobs import hostile

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", backends.names())
def test_a_backend_says_what_is_true_of_it(name: str) -> None:
    backend = backends.load(name)
    assert backend.name == name
    assert isinstance(backend.traits, Traits)
    assert backend.validation


def test_the_traits_of_each_backend() -> None:
    traits = {name: backends.load(name).traits for name in backends.names()}
    assert {name for name in traits if traits[name].is_in_process} == {"inline"}
    assert {name for name in traits if traits[name].runs_here} == {"inline", "local"}
    assert {name for name in traits if traits[name].keeps_queue} == {"inline", "local"}
    assert {name for name in traits if traits[name].awaits_bases} == {"local"}
    shared = {name for name in traits if traits[name].shares_disk}
    assert shared == {"beside", "inline", "local", "slurm"}
    assert {name for name in traits if traits[name].needs_host} == {"beside"}


JOBS: dict[str, dict[str, Any]] = {
    "slurm": {},
    "local": {},
    "ray": {},
    "k8s": {"image": "registry.example.com/lathe", "volumes": ["claim:/shared"]},
    "toolkit": {"account_id": "a", "image": "i", "data": ["org.a.x:/shared"], "python": "python"},
}


@pytest.mark.parametrize("name", JOBS)
def test_the_wrappers_python_gets_the_library_path_of_the_training(name: str) -> None:
    pytest.importorskip({"k8s": "kubernetes"}.get(name, "jobs"))
    spec = hostile.make(
        JOBS[name], backend=name, environment={"LD_LIBRARY_PATH": "/apps/python/lib", "OTHER": "no"}
    )
    rendered = backends.load(name).render(spec)
    assert "/apps/python/lib" in " ".join((rendered.text, *rendered.argv))


def compared_with_a_backend(file: Path) -> list[str]:
    """Comparisons with a backend's name in a file, as `file:line`."""
    names = set(backends.names())
    return [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Compare)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and part.value in names
    ]


def test_no_condition_outside_of_the_backends_asks_for_the_name_of_one() -> None:
    files = [ROOT / "trainval.py", ROOT / "service.py", *(ROOT / "jobs").rglob("*.py")]
    outside = [file for file in files if "backends" not in file.relative_to(ROOT).parts]
    guilty = [line for file in outside for line in compared_with_a_backend(file)]
    assert not guilty, f"{guilty}: say it in jobs/protocol.py, Traits"
