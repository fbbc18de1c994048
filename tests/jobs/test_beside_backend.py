"""The backend beside: a job goes to the worker of another run, which the service names."""

from __future__ import annotations

import json
from pathlib import Path

from jobs.backends.beside import HOST, BesideHost
from tests.jobs.hostile import make
from tests.wording import refused


def test_the_service_names_the_host_and_nobody_else_sends_jobs_there() -> None:
    spec = make({"resources": {"cpu": 1, "mem": 1}}, environment={HOST: "f" * 32})
    values = json.loads(BesideHost().render(spec).text)
    assert values == {"host": str(Path(spec.folder).with_name("f" * 32)), "id": spec.exp_id}
    with refused("shared_without_host"):
        BesideHost().render(make({"resources": {"cpu": 1, "mem": 1}}))
