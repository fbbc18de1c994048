"""The published line, `trainval.py ... -j toolkit`, against the stand-in: real trainings, read by
haven itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from jobs.backends import BackendCache
from jobs.haven import library as haven
from jobs.record.paths import BaseFolder
from jobs.record.status import survey
from tests.jobs.conftest import wait_until
from tests.jobs.toolkit_standin import standin
from trainer.config.identity import exp_id

ROOT = Path(__file__).resolve().parents[2]
GROUPS = """
from exp_configs import EXP_GROUPS as BUILT_IN, vary

SMALL = vary(
    BUILT_IN["causal_lm_tiny"][0],
    train={"steps": 4, "eval_every": 4, "log_every": 4},
    schedule={"warmup_steps": 2},
)
EXP_GROUPS = {"published": [vary(SMALL, optim={"lr": lr}) for lr in (1e-3, 1e-5)]}
"""
CONFIGS = """
import os

EAI_ACCOUNT_ID_TO_USER = {{"123": "lovelace"}}
JOB_CONFIG = {{
    "base": {{
        "account_id": os.environ["EAI_ACCOUNT_ID"],
        "image": "registry.example.com/org.public/ssh",
        "data": ["org.{{user}}.home:{mount}"],
        "restartable": True,
        "resources": {{"cpu": 1, "mem": 4, "gpu": 1, "gpu_mem": 16}},
        "interactive": False,
        "bid": 0,
        "python": "{python}",
        "environment_vars": ["OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES="],
    }},
}}
"""


@pytest.mark.long
@pytest.mark.skipif(
    find_spec("haven") is None, reason="haven is an extra: pip install -e '.[haven]'"
)
def test_two_dictionaries_of_one_group_train_two_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, groups, configs = tmp_path / "runs", tmp_path / "groups.py", tmp_path / "job_configs.py"
    groups.write_text(GROUPS)
    configs.write_text(CONFIGS.format(mount=tmp_path, python=sys.executable))
    monkeypatch.setenv("EAI_ACCOUNT_ID", "123")
    line = [
        "--exp_group",
        "published",
        "--savedir_base",
        str(base),
        "-r",
        "1",
        "--data_path",
        str(tmp_path),
    ]
    line += [
        "--python_binary",
        f"source activate {sys.prefix} ; {sys.prefix}/bin/torchrun --nproc-per-node NGPUS ",
    ]
    line += [
        "--exp_configs",
        str(groups),
        "--job_configs",
        str(configs),
        "--cache_dir",
        str(tmp_path / "cache"),
    ]
    line += [
        "--wandb_entity_name",
        "None",
        "--wandb_project_name",
        "None",
        "--wandb_log_gradients",
        "false",
    ]
    with standin(own_process=True, slots=1) as toolkit:
        done = subprocess.run(
            [sys.executable, "trainval.py", *line, "--j", "toolkit", "--allow_dirty"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        rows = wait_until(
            lambda: survey(BaseFolder(base), backend_of=BackendCache()),
            lambda rows: all(row.state in ("succeeded", "failed") for row in rows),
            within_s=180,
        )
        assert set(toolkit.stats()["starts"].values()) == {1}
    for row in rows:
        assert row.state == "succeeded", (Path(row.folder) / "attempts/1/err.txt").read_text()[
            -3000:
        ]
        spec = json.loads((Path(row.folder) / "attempts/1/spec.json").read_text())
        assert spec["launcher"] == [f"{sys.prefix}/bin/torchrun", "--nproc-per-node", "1"]
    trained = {
        row.exp_id: json.loads((Path(row.folder) / "resolved.json").read_text())["optim"]["lr"]
        for row in rows
    }
    assert sorted(trained.values()) == [1e-5, 1e-3]
    assert len({row.metrics["loss"] for row in rows}) == 2
    dictionaries = [json.loads((Path(row.folder) / "exp_dict.json").read_text()) for row in rows]
    assert (
        {haven.hash_dict(values) for values in dictionaries}
        == {exp_id(values) for values in dictionaries}
        == set(trained)
    )
    scores = haven.result_manager(base).get_score_df()
    expected = {row.metrics["valid/loss"]: trained[row.exp_id] for row in rows}
    assert dict(zip(scores["valid/loss"], scores["optim.lr"], strict=True)) == pytest.approx(
        expected
    )
