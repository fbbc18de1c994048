"""The shape of the house: rooms do not import each other, imports point down, submission is
torch-free, and each wrapped package has one importer.

A room is a folder of trainer/ or jobs/, or a module beside them. Floors of trainer/, from above
(what is named stands higher or lower than its room):
8  lathe.py, api/ and demo/, which are also above jobs/
7  trainval.py, trainer/__main__.py, commands/
6  proof/, recipes/, rounds/
5  launch/, survival/, evaluation/, judging/, averages/, harness/
4  driven/, training/, plan/, retrieval/, statistics/, exports/
3  tasks/<name>/
2  models/, data/, telemetry/,
   tasks/{token_task,distilled,generated,continuation,continuation_program}.py
1  runtime/, files/, metrics/, protocol/
0  config/, errors.py, program.py, switches.py, version.py, data/formats/,
   files/{atomic,survive,survival_events}.py, runtime/process.py,
   metrics/{judge_record,own,test_record,win_rate}.py, judging/votes.py,
   operations/, tasks/, recipes/lookup_groups.py, every config.py and published.py of a task,
   exp_configs.py, job_configs.py, service.py
jobs/ stands on floor 0 alone.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*ROOT.glob("*.py"), *ROOT.glob("trainer/**/*.py"), *ROOT.glob("jobs/**/*.py")])

# The longest name that a module starts with decides.
FLOORS = {
    "exp_configs": 0,
    "job_configs": 0,
    "service": 0,
    "trainer": 0,
    "trainer.config": 0,
    "trainer.data.formats": 0,
    "trainer.errors": 0,
    "trainer.files.atomic": 0,
    "trainer.files.survive": 0,
    "trainer.files.survival_events": 0,
    "trainer.metrics.judge_record": 0,
    "trainer.operations": 0,
    "trainer.metrics.own": 0,
    "trainer.metrics.test_record": 0,
    "trainer.judging": 5,
    "trainer.judging.votes": 0,
    "trainer.metrics.win_rate": 0,
    "trainer.plan.time.rates": 0,
    "trainer.recipes.lookup_groups": 0,
    "trainer.runtime.process": 0,
    "trainer.switches": 0,
    "trainer.tasks": 0,
    "trainer.files": 1,
    "trainer.metrics": 1,
    "trainer.protocol": 1,
    "trainer.runtime": 1,
    "trainer.verdict": 2,
    "trainer.data": 2,
    "trainer.models": 2,
    "trainer.telemetry": 2,
    "trainer.tasks.distilled": 2,
    "trainer.tasks.continuation": 2,
    "trainer.tasks.continuation_program": 2,
    "trainer.tasks.generated": 2,
    "trainer.tasks.merged_base": 3,
    "trainer.tasks.token_task": 2,
    "trainer.exports": 4,
    "trainer.plan": 4,
    "trainer.retrieval": 4,
    "trainer.statistics": 4,
    "trainer.training": 4,
    "trainer.averages": 5,
    "trainer.driven": 4,
    "trainer.evaluation": 5,
    "trainer.harness": 5,
    "trainer.launch": 5,
    "trainer.survival": 5,
    "trainer.proof": 6,
    "trainer.recipes": 6,
    "trainer.rounds": 6,
    "jobs": 4,
    "trainer.__main__": 7,
    "trainer.commands": 7,
    "trainval": 7,
    "trainer.api": 8,
    "trainer.demo": 8,
    "trainer.lathe": 8,
}
NOT_FOR_TASKS = ("trainer.training", "trainer.telemetry.run_record", "trainer.evaluation")
NOT_FOR_TRAINING = ("trainer.survival", "trainer.proof", "trainer.plan", "trainer.launch")
MAX_ROOM = 12
ONLY_IMPORTERS = {
    "deepspeed": {
        ROOT / "trainer/training/engine.py",
        ROOT / "trainer/training/optimizer_state.py",
        ROOT / "trainer/survival/groups.py",
    },
    "wandb": {ROOT / "trainer/telemetry/wandb_run.py"},
    "haven": {ROOT / "jobs/haven/library.py"},
}
HEAVY = ("torch", "deepspeed", "transformers", "wandb")
# A file above 450 lines is looked at again: is it one subject? Above 700 it is refused.
MAX_FILE, P90_FUNCTION = 700, 35


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(file) for file in FILES}


def layer(module: str) -> int:
    parts = module.split(".")
    if parts[:2] == ["trainer", "tasks"] and len(parts) > 2 and module not in FLOORS:
        is_torch_free = len(parts) == 3 or parts[-1] in (
            "config",
            "published",
        )  # the folder itself too
        return 0 if is_torch_free else 3
    starts = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next(FLOORS[start] for start in starts if start in FLOORS)


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def imports(file: Path) -> list[str]:
    """Absolute names of everything that a file imports anywhere, but for `if TYPE_CHECKING:`
    blocks.
    """
    names: list[str] = []
    for node in _running(tree(file)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = module_name(file).split(".")
            parent = parent if file.name == "__init__.py" else parent[:-1]
            start = parent[: len(parent) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def _running(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    children: list[ast.AST] = [*ast.iter_child_nodes(node)]
    if (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    ):
        children = [*node.orelse]
    for child in children:
        yield from _running(child)


def own(name: str) -> str | None:
    """The project's module that an imported name lies in: `trainer.config.Strict` is in
    `trainer.config`.
    """
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def own_imports(file: Path) -> set[str]:
    return {
        module for name in imports(file) if (module := own(name)) and module != module_name(file)
    }


def test_imports_only_point_down() -> None:
    upward = [
        f"{module_name(file)} imports {module}, which stands on floor {layer(module)}"
        for file in FILES
        for module in sorted(own_imports(file))
        if layer(module) > layer(module_name(file))
    ]
    assert not upward, "\n".join(upward)


def test_jobs_import_layer_0_and_jobs_only() -> None:
    files = [file for file in FILES if module_name(file).split(".")[0] == "jobs"]
    foreign = [
        f"{module_name(file)} imports {module}"
        for file in files
        for module in sorted(own_imports(file))
        if layer(module) > 0 and not module.startswith("jobs")
    ]
    assert files
    assert not foreign, "\n".join(foreign)


def test_a_task_imports_neither_the_loop_nor_another_task() -> None:
    files = sorted(ROOT.glob("trainer/tasks/*/*.py"))
    forbidden = [
        f"{module_name(file)} imports {module}"
        for file in files
        for module in sorted(own_imports(file))
        if module.startswith(NOT_FOR_TASKS)
        or (layer(module) == 3 and not module.startswith(f"trainer.tasks.{file.parent.name}"))
    ]
    assert files
    assert not forbidden, "\n".join(forbidden)


@pytest.mark.parametrize("package", ONLY_IMPORTERS)
def test_a_wrapped_package_has_one_importer(package: str) -> None:
    importers = {
        file for file in FILES if any(name.split(".")[0] == package for name in imports(file))
    }
    assert importers <= ONLY_IMPORTERS[package], sorted(str(file) for file in importers)


def heavy_after(code: str) -> dict[str, list[str]]:
    """Runs Python code that fills `found`; says which heavy packages had been imported after which
    step.
    """
    header = (
        f"import sys, json\nfound = {{}}\nheavy = lambda: [m for m in {HEAVY!r} if m in "
        "sys.modules]\n"
    )
    footer = "\nsys.stdout = sys.__stdout__\nprint()\nprint(json.dumps(found))"
    done = subprocess.run(
        [sys.executable, "-c", header + code + footer], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_submission_never_imports_torch() -> None:
    modules = [
        module for module in sorted(MODULES) if layer(module) == 0 or module.split(".")[0] == "jobs"
    ]
    code = f"""
import importlib
for module in {modules!r}:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "haven":  # an optional package
            raise
    found[module] = heavy()
"""
    found = heavy_after(code)
    assert len(found) == len(modules)
    guilty = [module for module, packages in found.items() if packages]
    assert not guilty, f"{guilty[0]} imports {found[guilty[0]]}"


def test_parsing_every_experiment_never_imports_torch() -> None:
    code = """
import exp_configs
from trainer import tasks
from trainer.config import deepspeed_config
for group, experiments in exp_configs.EXP_GROUPS.items():
    for values in experiments:
        cfg = tasks.parse(values)
        deepspeed_config.build(
            deepspeed_config.read(cfg.deepspeed), train=cfg.train, optim=cfg.optim, world=1, source=group
        )
found["parse and build"] = heavy()
"""
    assert heavy_after(code) == {"parse and build": []}


@pytest.mark.skipif(not (ROOT / "trainval.py").is_file(), reason="there is no trainval.py yet")
def test_trainval_help_never_imports_torch() -> None:
    code = """
import contextlib, io, runpy
sys.argv = ["trainval.py", "--help"]
sys.path.insert(0, ".")
try:
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path("trainval.py", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
found["help"] = heavy()
"""
    assert heavy_after(code) == {"help": []}


def functions(file: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (
                f"{file.relative_to(ROOT)}:{node.lineno} {node.name}",
                (node.end_lineno or 0) - node.lineno + 1,
            )


def test_no_file_is_longer_than_its_budget() -> None:
    long = {
        str(file.relative_to(ROOT)): n
        for file in FILES
        if (n := len(file.read_text().splitlines())) > MAX_FILE
    }
    assert not long, f"over {MAX_FILE} lines: {long}"


def test_nine_functions_in_ten_fit_one_screen() -> None:
    lengths = sorted(lines for file in FILES for _, lines in functions(file))
    assert lengths[int(0.9 * len(lengths))] <= P90_FUNCTION


def test_no_room_holds_more_files_than_a_person_overlooks() -> None:
    rooms: dict[str, int] = {}
    for file in FILES:
        if file.parent != ROOT and file.name != "__init__.py":
            room = str(file.parent.relative_to(ROOT))
            rooms[room] = rooms.get(room, 0) + 1
    crowded = {room: count for room, count in rooms.items() if count > MAX_ROOM}
    assert not crowded, f"over {MAX_ROOM} files: {crowded}"


def room_of(file: Path) -> str:
    """The folder below trainer/ or jobs/; a task, and a backend, is a room of its own."""
    parts = file.relative_to(ROOT).parts
    is_nested = parts[1:2] in (("tasks",), ("backends",)) and len(parts) > 3
    return "/".join(parts[: 3 if is_nested else 2])


def test_a_public_class_name_stands_in_one_room() -> None:
    """A task's own names may be those of another task: Task, Config, Data are asked for by name."""
    rooms: dict[str, set[str]] = {}
    for file in FILES:
        for node in tree(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                rooms.setdefault(node.name, set()).add(room_of(file))
    del rooms["Task"]  # the protocol, and the class of each task
    shared = {name: sorted(where) for name, where in rooms.items() if len(where) > 1}
    clashes = {
        name: where
        for name, where in shared.items()
        if not all(room.startswith("trainer/tasks/") for room in where)
    }
    assert not clashes, clashes


def every_import(file: Path) -> Iterator[str]:
    """Absolute names of everything that a file imports, those for type checkers and those of
    importlib.import_module("...") as well.
    """
    parent = module_name(file).split(".")
    parent = parent if file.name == "__init__.py" else parent[:-1]
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = parent[: len(parent) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (
                part.value
                for part in node.args
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )


def rings(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of nodes that reach each other, largest first."""

    def reach(start: str) -> set[str]:
        reachable, todo = set[str](), [start]
        while todo:
            new = graph.get(todo.pop(), set()) - reachable
            reachable |= new
            todo += new
        return reachable

    reachable = {node: reach(node) for node in graph}
    groups = {
        tuple(sorted(other for other in graph if other in below and node in reachable[other]))
        for node, below in reachable.items()
        if node in below
    }
    return sorted(map(list, groups), key=len, reverse=True)


def test_rings_of_a_graph_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set[str]()}
    assert rings(graph) == [["a", "b", "c"]]


def test_no_rooms_import_each_other() -> None:
    """Not over any number of rooms between them; imports for type checkers and by name count."""
    graph: dict[str, set[str]] = {}
    for file in FILES:
        if file.parent == ROOT:
            continue
        room = ".".join(module_name(file).split(".")[:2])
        others = {
            ".".join(module.split(".")[:2]) for module in map(own, every_import(file)) if module
        }
        graph.setdefault(room, set()).update(
            other for other in others if other != room and "." in other
        )
    assert len(graph) > 20
    assert rings(graph) == []


def test_no_modules_import_each_other() -> None:
    graph = {module_name(file): own_imports(file) for file in FILES}
    assert rings(graph) == []


def test_training_knows_neither_planner_nor_survival_nor_doctor() -> None:
    files = sorted(ROOT.glob("trainer/training/**/*.py"))
    guilty = [
        f"{module_name(file)} imports {name}"
        for file in files
        for name in every_import(file)
        if name.startswith(NOT_FOR_TRAINING)
    ]
    assert files
    assert not guilty, "\n".join(guilty)


@pytest.mark.parametrize("name", ["utils", "helpers", "common", "misc"])
def test_no_file_is_named_after_nothing(name: str) -> None:
    assert not [file for file in FILES if file.stem == name]
