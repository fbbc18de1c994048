"""docs/python.md says of every name of `from trainer import ...` what its docstring says."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

import trainer
from tests.unit.pages import assert_made, wrapped
from trainer.api.chart import Chart
from trainer.api.run import Run
from trainer.api.table import Table
from trainer.plan.forecast import Forecast

HEAD = """# From Python

```python
from trainer import fine_tune, load, plan, submit

CHAT = {"task": "causal_lm", "base": "Qwen/Qwen2.5-0.5B-Instruct", ...}  # the dictionary of an experiment
print(plan(CHAT, data="data", device="24GiB"))        # will it fit, and how long will it take?
run = fine_tune(CHAT, data="data")                    # results/<id>, as `lathe train` makes it
run.metrics(), run.plot()                             # a table, a picture
run.answer("Where is the red key?")
run.judge(data="data")["verdict"]                     # is it better than its base, and what broke?
load("results/3f1c...").predict([{"messages": [...]}])
submit([CHAT, {**CHAT, "optim": {"lr": 1e-5}}], data="data", backend="slurm")
```

These functions do what the commands do, by the same code: ids, folders, losses and predictions are equal. A run that
`fine_tune` has begun goes on by `lathe train`, and the other way round; `lathe results` lists both. Two notebooks show it all, with
their pictures: [a chat model of one's own](notebooks/chat.ipynb) and [a retriever on a CSV](notebooks/retriever.ipynb).

Errors are those of the commands (`trainer.errors`), as exceptions; a message may name the flag of a command: `--data_path` is `data`,
`-r 1` is `reset=True`. Importing the names takes no time and no torch.

Made from the docstrings by `tests/unit/test_python_page.py`, which also says how to make it anew.
"""
CLASSES = (Run, Table, Chart, Forecast)
ARGUMENT = re.compile(r"([a-z_]+): ")


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public properties and methods that a class defines itself, as they stand in it."""
    for name, member in vars(kind).items():
        is_own = inspect.isfunction(member) and member.__module__ == kind.__module__
        if not name.startswith("_") and (is_own or isinstance(member, property)):
            yield name, member


def signature(name: str, function: Any) -> list[str]:
    """A code block; arguments below each other if one line is too short for them."""
    found = inspect.signature(function)
    parts: list[str] = []
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        shown = str(parameter.replace(annotation=parameter.empty))
        has_default = parameter.default is not parameter.empty
        start, _, default = shown.partition("=")
        kind = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
        default = default.replace("'", '"')
        parts.append(start + kind + (f" = {default}" if has_default else ""))
    result = f" -> {found.return_annotation}"
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= 100:
        return ["```python", line, "```", ""]
    rows = [f"    {part}," for part in parts]
    return ["```python", f"{name}(", *rows, f"){result}", "```", ""]


def escaped(text: str) -> str:
    """Markdown of a docstring's text: <id> is no tag, and a page of docs/ is a link."""
    parts = text.split("`")
    parts[::2] = [
        re.sub(r"docs/(\w+\.md)", r"[\1](\1)", part.replace("<", "&lt;")) for part in parts[::2]
    ]
    return "`".join(parts)


def described(owner: Any) -> list[str]:
    """The docstring as paragraphs, its arguments as a list."""
    lines: list[str] = []
    for paragraph in inspect.cleandoc(owner.__doc__).split("\n\n"):
        if not ARGUMENT.match(paragraph):
            lines += [*textwrap.wrap(escaped(paragraph), 110, break_on_hyphens=False), ""]
            continue
        for argument in re.split(r"\n(?=\S)", paragraph):
            name, text = ARGUMENT.split(" ".join(argument.split()), maxsplit=1)[1:]
            lines += wrapped(f"- `{name}`: {escaped(text)}")
        lines.append("")
    return lines


def page() -> str:
    """The whole page, as text."""
    lines = [HEAD]
    for name in trainer.__all__:
        function = getattr(trainer, name)
        lines += [f"## {name}", "", *signature(name, function), *described(function)]
    for kind in CLASSES:
        lines += [f"## {kind.__name__}", "", *described(kind)]
        for name, member in members(kind):
            full = f"{kind.__name__}.{name}"
            is_property = isinstance(member, property)
            shown = [] if is_property else signature(full, member)
            lines += [f"### {full}", "", *shown, *described(member)]
    return "\n".join(lines).rstrip() + "\n"


def test_the_page_of_python_is_up_to_date() -> None:
    assert_made("python.md", page(), __file__)


FUNCTIONS: dict[str, Any] = {name: getattr(trainer, name) for name in trainer.__all__} | {
    f"{kind.__name__}.{name}": member
    for kind in CLASSES
    for name, member in members(kind)
    if callable(member)
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_described_and_typed(name: str) -> None:
    text = inspect.cleandoc(FUNCTIONS[name].__doc__)
    for parameter in inspect.signature(FUNCTIONS[name]).parameters.values():
        if parameter.name != "self":
            assert parameter.annotation is not parameter.empty, parameter
            assert re.search(rf"^{parameter.name}: ", text, re.M), parameter
