"""Jobs for the tests of the Toolkit backend: what the launcher would send."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jobs.config import JobConfig
from jobs.protocol import JobSpec

TOKEN = "ft_0123456789ab_c0ffee_1"
UNKNOWN_ID = "00000000-0000-4000-8000-000000000000"


def job(tmp_path: Path, **keys: Any) -> JobConfig:
    """A job dictionary whose mount is the folder of the test."""
    return JobConfig(
        **{"image": "registry/image:1", "data": [f"org.acct.home:{tmp_path}:rw"], **keys}
    )


def spec(
    tmp_path: Path, *command: str, token: str = TOKEN, group: str = "tiny", **keys: Any
) -> JobSpec:
    """A job that runs `command` in the folder of the test; keys: environment, after, or keys of the
    job dictionary.
    """
    environment = keys.pop("environment", {})
    return JobSpec(
        token=token,
        exp_id="0123456789abcdef0123456789abcdef",
        digest="0" * 64,
        group=group,
        attempt=1,
        backend="toolkit",
        folder=str(tmp_path / "run"),
        workdir=str(tmp_path),
        wrapper=list(command),
        launcher=[sys.executable],
        program=["trainval.py"],
        environment=environment,
        after=keys.pop("after", []),
        job=job(tmp_path, **keys),
    )
