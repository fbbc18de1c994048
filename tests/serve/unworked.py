"""A service of driven runs without keeper and worker: whatever is needed of a run is written by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.serve.conftest import Service, serving
from tests.serve.driving import Driver
from tests.serve.test_steps_dialect import offers
from trainer.operations.operation_log import FOLDER, OperationReader
from trainer.operations.results import ResultWriter, work_of


@contextmanager
def unworked(base: Path, **changes: Any) -> Iterator[Service]:
    """A service that begins no worker."""
    with serving(base, has_keeper=False, **{"models": offers(), **changes}) as running:
        yield running


def new_run(client: Driver, session: str, number: int = 0) -> str:
    """A training run that nobody works on."""
    answer = client.post("create_model", client.create(session, number))
    assert answer.status_code == 200, answer.text
    return answer.json()["model_id"]


def folder_of(service: Service, model: str) -> Path:
    """The folder of a run."""
    session, _, number = model.split(":")
    facts = service.base / "_service/steps" / session / f"train-{number}.json"
    return service.base / json.loads(facts.read_text())["exp_id"]


def work(service: Service, model: str) -> None:
    """Write a result for every operation of a run that has none, and the files of what it saves."""
    run = folder_of(service, model)
    source, results = OperationReader(run / FOLDER), ResultWriter(run / FOLDER)
    while (one := source.next()) is not None:
        if one.seq <= results.last_seq:
            continue
        fields: dict[str, Any] = {}
        if one.kind == "refused":
            fields = {"error": one.fields["error"], "category": "user"}
        if one.kind in ("save_state", "save_for_sampler"):
            part = "saved" if one.kind == "save_state" else "sampler"
            sha256 = f"{one.seq:064x}"
            fields = {"folder": f"{part}/{one.fields['name']}", "sha256": sha256, "bytes": 4}
            (run / fields["folder"]).mkdir(parents=True, exist_ok=True)
            (run / fields["folder"] / "weights.bin").write_bytes(b"1234")
        results.append(one.seq, fields, work=work_of(one, one.time))
    results.close()
