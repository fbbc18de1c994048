"""Jobs as text for others: safe, whole, and honest about how far it was tried."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

if find_spec("kubernetes") is None:  # importing it takes seconds, which few tests need
    pytest.skip("the extra `k8s` is not installed", allow_module_level=True)

from jobs.protocol import JobSpec
from jobs.submit.export import Kind, export
from tests.jobs import hostile
from tests.jobs.hostile import CORPUS, TOKEN, make
from tests.wording import refused
from trainer.errors import ConfigError

POD: dict[str, Any] = {
    "image": "registry.example/lathe:1",
    "volumes": ["data:/shared"],
    "resources": {"gpu": 2},
}
SKY: dict[str, Any] = {"resources": {"cpu": 8, "mem": 64, "gpu": 2, "gpu_model": "A100"}}
JOBS: dict[Kind, dict[str, Any]] = {
    "sbatch": {"partition": "gpu"},
    "eai": {"image": "registry.example/lathe:1", "data": ["org.data:/shared"]},
    "trainjob": POD,
    "sky": SKY,
}


def trainjob(spec: JobSpec) -> dict[str, Any]:
    return yaml.safe_load(export(spec, "trainjob"))


def sky(spec: JobSpec) -> dict[str, Any]:
    return yaml.safe_load(export(spec, "sky"))


@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.long
def test_an_export_begins_with_how_far_it_was_validated(kind: Kind) -> None:
    lines = export(make(JOBS[kind]), kind).splitlines()
    assert any(line.startswith("# Validated: ") for line in lines[:2])


@pytest.mark.parametrize("kind", JOBS)
def test_an_export_holds_the_wrapper_of_the_experiment(kind: Kind) -> None:
    spec = make(JOBS[kind])
    text = export(spec, kind)
    assert spec.folder in text
    assert "jobs.node.wrapper" in text


def test_a_kind_that_does_not_exist_is_refused_with_the_legal_ones() -> None:
    with refused("export_kind", legal="sbatch, eai, trainjob, sky"):
        export(make(), "lsf")  # pyright: ignore[reportArgumentType]


def test_a_trainjob_survives_a_round_trip_through_kubeflows_models() -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="the extra `dev` is not installed"
    )
    for job in (
        POD,
        {
            **POD,
            "nodes": 2,
            "queue": "gold",
            "service_account": "s",
            "wandb_key_secret": "wandb/key",
        },
    ):
        body = trainjob(make(job))
        assert models.TrainerV1alpha1TrainJob.from_dict(body).to_dict() == body


def test_a_trainjob_runs_the_wrapper_in_the_snapshot_as_argv() -> None:
    spec = make({**POD, "nodes": 2})
    trainer = trainjob(spec)["spec"]["trainer"]
    assert trainer["command"] == ["env", "-C", spec.workdir, *spec.wrapper]
    assert trainer["numNodes"] == 2
    assert {"LATHE_JOB_ID", "LATHE_NODE_RANK", "LATHE_HEAD_NODE"} == {
        item["name"] for item in trainer["env"]
    }


def test_a_sky_task_asks_for_the_gpu_by_name() -> None:
    body = sky(make({**SKY, "nodes": 2}))
    assert body["num_nodes"] == 2
    assert body["resources"] == {"cpus": "8+", "memory": "64+", "accelerators": {"A100": 2}}


@pytest.mark.parametrize("model", [None, "!A100"])
def test_a_sky_task_without_the_name_of_its_gpu_is_refused(model: str | None) -> None:
    resources = {"gpu": 1, **({"gpu_model": model} if model else {})}
    with refused("sky_gpu_model", key="resources.gpu_model"):
        export(make({"resources": resources}), "sky")


@pytest.mark.parametrize(
    ("key", "value"), [("image", "i"), ("partition", "p"), ("address", "http://h"), ("bid", 1)]
)
def test_a_key_that_sky_does_not_know_is_refused_by_name(key: str, value: Any) -> None:
    with refused("job_key_unknown_to", key=key):
        export(make({**SKY, key: value}), "sky")


@pytest.mark.parametrize("field", ["token", "exp_id", "group", "folder", "workdir", "wrapper"])
@pytest.mark.parametrize("kind", ["trainjob", "sky"])
def test_a_hostile_text_is_refused_by_name_or_is_only_data(kind: Kind, field: str) -> None:
    for text in CORPUS:
        try:
            spec = hostile.with_text(field, text, JOBS[kind])
            body = yaml.safe_load(export(spec, kind))
        except (ConfigError, ValidationError) as error:
            message = str(error)
        else:
            assert argv_in(body, kind) == ["env", "-C", spec.workdir, *spec.wrapper]
            continue
        assert field in message


@pytest.mark.parametrize("field", ["exp_id", "group", "folder", "workdir", "wrapper"])
def test_a_line_break_in_a_word_does_not_end_a_comment(field: str) -> None:
    for text in ("a\nrm: 1", "a\rb", "a\x0bb", "a\u2028b"):
        try:
            found = export(hostile.with_text(field, text, JOBS["eai"]), "eai")
        except (ConfigError, ValidationError):
            continue
        body = json.loads("\n".join(line for line in found.split("\n") if not line.startswith("#")))
        assert body["name"] == TOKEN


def argv_in(body: dict[str, Any], kind: Kind) -> list[str]:
    """What the container, or bash, would start."""
    if kind == "trainjob":
        return [re.sub(r"\$\$", "$", part) for part in body["spec"]["trainer"]["command"]]
    return shlex.split(body["run"].split("\n", 2)[2])


def test_bash_runs_a_sky_task_as_the_wrapper_and_nothing_else(tmp_path: Path) -> None:
    words = [text for text in CORPUS if text.isprintable()]
    program = (
        "import json, os, sys; e = os.environ; "
        "print(json.dumps([os.getcwd(), e['LATHE_NODE_RANK'], e['LATHE_HEAD_NODE'], "
        "*sys.argv[1:]]))"
    )
    spec = make(SKY, workdir=str(tmp_path), wrapper=[sys.executable, "-c", program, *words])
    env = {**os.environ, "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    argv = ["bash", "-c", sky(spec)["run"]]
    done = subprocess.run(
        argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout) == [str(tmp_path), "1", "10.0.0.1", *words]
    assert not [*tmp_path.iterdir()]


def test_a_sky_task_is_named_by_the_token() -> None:
    body = sky(make(SKY))
    assert body["name"] == TOKEN.replace("_", "-")
    assert body["envs"] == {"LATHE_JOB_ID": TOKEN}
