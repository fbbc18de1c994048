"""A JobSpec to render, and texts that must stay data wherever they get into one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jobs.config import JobConfig
from jobs.protocol import JobSpec

EXP_ID = "9f2c" * 8
TOKEN = "ft_9f2c9f2c9f2c_a1b2c3_1"
CORPUS = (
    *(
        "it's",
        'a"b',
        "a;touch pwned",
        "$(touch pwned)",
        "`touch pwned`",
        "$HOME",
        "$$(HOME)",
        "a\nb: c",
        "a\0b",
        "a b",
    ),
    *(
        "é中‮",
        "../../etc",
        "/a/../../etc",
        "-rf",
        "--help",
        "a&&b",
        "a|b",
        ">x",
        "*",
        "~",
        "#x",
        "!tag",
        "&a",
        "{a: b}",
    ),
    *(
        "yes",
        "null",
        "1e3",
        "",
        "x" * 300,
        "\ud800",
        "\x1b[31m",
        "a\rb",
        "a\tb",
        "%s",
        "${X}",
        "A=b",
    ),
)
FIELDS = (
    "token",
    "exp_id",
    "digest",
    "group",
    "folder",
    "workdir",
    "wrapper",
    "launcher",
    "program",
    "activate",
    "environment",
)


def make(job: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    """A JobSpec as the submitter makes them; `job` are keys of its job dictionary."""
    folder = f"/shared/results/{EXP_ID}"
    values: dict[str, Any] = {
        "token": TOKEN,
        "exp_id": EXP_ID,
        "digest": "0" * 64,
        "group": "fid_nq_base",
        "attempt": 1,
        "backend": "k8s",
        "folder": folder,
        "workdir": "/shared/code/tree",
        "wrapper": ["python", "-m", "jobs.node.wrapper", folder, "1"],
        "launcher": ["python"],
        "program": ["trainval.py", "--exp_id", EXP_ID],
        "job": JobConfig.model_validate(job or {}),
    }
    return JobSpec.model_validate({**values, **changes})


def with_text(field: str, text: str, job: dict[str, Any] | None = None) -> JobSpec:
    """The same spec with a hostile text in one of its fields."""
    values: dict[str, Any] = {
        "wrapper": ["python", text],
        "launcher": [text],
        "program": [text],
        "environment": {"X": text},
    }
    return make(job, **{field: values.get(field, text)})


def strings(value: Any) -> Iterator[str]:
    """Every string in a nested value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
