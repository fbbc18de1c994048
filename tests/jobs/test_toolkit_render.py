"""What jobs/backends/toolkit/backend.py sends, and what it refuses to send; nothing is started."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jobs import backends
from jobs.backends.toolkit.backend import Toolkit
from tests.jobs.toolkit_standin.specs import TOKEN, UNKNOWN_ID, spec
from tests.wording import Fault, fault, refused


def test_a_job_is_rendered_as_one_argument_list(tmp_path: Path) -> None:
    wanted = spec(
        tmp_path,
        *("python", "-m", "jobs.node.wrapper", "folder", "1"),
        resources={"cpu": 4, "mem": 64, "gpu": 2, "gpu_mem": 32, "gpu_model": "!A100"},
        account_id="org.acct",
        restartable=True,
        bid=5,
        max_run_time=3600,
        environment_vars={"A": "1", "B": "x"},
        environment={"B": "two words"},
    )
    rendered = Toolkit().render(wanted)
    assert rendered.argv == (
        *(
            "eai",
            "job",
            "new",
            "--account",
            "org.acct",
            "--name",
            TOKEN,
            "--image",
            "registry/image:1",
        ),
        *(
            "--cpu",
            "4",
            "--mem",
            "64",
            "--gpu",
            "2",
            "--gpu-mem",
            "32",
            "--gpu-model-filter",
            "!A100",
        ),
        *("--data", f"org.acct.home:{tmp_path}:rw", "--env", "A=1", "--env", "B=two words"),
        *("--tag", f"exp_id={wanted.exp_id}", "--tag", "group=tiny", "--tag", "restartable=yes"),
        *("--workdir", str(tmp_path), "--max-run-time", "3600", "--bid", "5", "--restartable"),
        *("--field", "id", "--no-header", "--", "python", "-m", "jobs.node.wrapper", "folder", "1"),
    )
    assert (rendered.token, rendered.file) == (TOKEN, "rendered.eai.json")
    text = json.loads(rendered.text)
    assert (text["name"], text["gpu"], text["command"]) == (TOKEN, 2, wanted.wrapper)


def test_rendering_is_pure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    first, second = (Toolkit().render(spec(tmp_path, "true")) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ({}, "--non-preemptable"),
        ({"preemptable": True}, "--preemptable"),
        ({"restartable": True}, "--restartable"),
    ],
)
def test_a_job_is_of_one_kind(tmp_path: Path, kind: dict[str, bool], option: str) -> None:
    argv = Toolkit().render(spec(tmp_path, "true", **kind)).argv
    assert [word for word in argv if word.endswith("able") and word.startswith("--")] == [option]


def test_every_launch_needs_the_literal_name(tmp_path: Path) -> None:
    """--enforce-name gives a name that is taken a suffix: two jobs for one attempt."""
    assert "--enforce-name" not in Toolkit().render(spec(tmp_path, "true")).argv


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        (
            {"partition": "gpu", "qos": "high"},
            fault("job_keys_unknown_to", backend="toolkit", keys="partition, qos"),
        ),
        ({"gres": "gpu:4"}, fault("job_keys_unknown_to", keys="gres")),
        ({"requeue": False}, fault("job_keys_unknown_to", keys="requeue")),
        ({"namespace": "mine"}, fault("job_keys_unknown_to", keys="namespace")),
        ({"nodes": 2}, fault("toolkit_nodes", nodes=2)),
        ({"image": None}, fault("toolkit_image")),
        (
            {"max_run_time": 48 * 3600 + 1},
            fault("toolkit_max_run_time", most=172800),
        ),
        ({"data": ["nowhere"]}, fault("toolkit_mount_form", value="nowhere")),
        ({"data": []}, fault("toolkit_no_writable_mount", folder=re.compile(".*run"))),
        ({"after": [UNKNOWN_ID]}, fault("toolkit_after")),
        ({"environment": {"HF_TOKEN": "x"}}, fault("toolkit_secret", name="HF_TOKEN")),
        ({"wandb_key_file": "/home/me/key"}, fault("toolkit_file_unseen", file="/home/me/key")),
        (
            {"wandb_key_secret": "org.me.key:/keys:ro"},
            fault("toolkit_secret_mount", got=None),
        ),
    ],
)
def test_what_toolkit_cannot_do_is_refused(
    tmp_path: Path, keys: dict[str, Any], complaint: Fault
) -> None:
    with refused(complaint):
        Toolkit().render(spec(tmp_path, "true", **keys))


def test_a_run_folder_in_a_read_only_mount_is_refused(tmp_path: Path) -> None:
    with refused("toolkit_no_writable_mount"):
        Toolkit().render(spec(tmp_path, "true", data=[f"org.acct.home:{tmp_path}:ro"]))


def test_a_key_file_may_come_by_a_mount_of_its_own(tmp_path: Path) -> None:
    keys = {"wandb_key_secret": "org.me.key:/keys:ro", "wandb_key_file": "/keys/wandb"}
    argv = Toolkit().render(spec(tmp_path, "true", **keys)).argv
    assert argv[argv.index("org.me.key:/keys:ro") - 1] == "--data"
    assert "/keys/wandb" not in argv


def test_a_dry_run_does_not_exist(tmp_path: Path) -> None:
    assert Toolkit().rehearse(Toolkit().render(spec(tmp_path, "true"))) is None


def test_the_backend_is_registered_and_says_how_far_it_was_tried() -> None:
    assert isinstance(backends.load("toolkit"), Toolkit)
    assert "never reached the real service" in Toolkit.validation
