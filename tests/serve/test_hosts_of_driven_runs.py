"""Which worker a driven run shares."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.serve.steps.upkeep import hosts
from tests.driven_runs import driven_values


@pytest.mark.parametrize("host_has", [None, {}, {"cpu_kernels": True}])
@pytest.mark.parametrize("run_has", [None, {}, {"cpu_kernels": True}])
def test_a_run_shares_no_worker_that_computes_by_other_kernels(
    run_has: dict[str, Any] | None,
    host_has: dict[str, Any] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker sent it away as one to be run again, and it was sent there again, for ever."""
    values = driven_values(tmp_path, data={"together": 3})
    tickets: dict[str, Any] = {}
    for name, has in (("own", run_has), ("host", host_has)):
        how: Any = {"model": "m", "created_at": "2026", "driven_by": "client", "experiment": values}
        tickets[name] = SimpleNamespace(id=name, exp_id=name, **how)
        (tmp_path / name).mkdir()
        if has is not None:
            (tmp_path / name / "data.json").write_text(json.dumps({"identity": {}, **has}))
    keeper: Any = SimpleNamespace(
        reader=SimpleNamespace(open_ids=["host"]),
        folder=SimpleNamespace(
            ticket=lambda name: SimpleNamespace(read=lambda: tickets[name]),
            base=SimpleNamespace(run=lambda name: SimpleNamespace(path=tmp_path / name)),
        ),
    )
    monkeypatch.setattr(hosts, "_computes", lambda *_: True)
    differ = None not in (run_has, host_has) and run_has != host_has
    assert hosts.host_for(keeper, tickets["own"]) == (None if differ else "host")
