"""jobs/backends/toolkit/haven.py against the real haven-ai 0.7.3: its ids, its groups, its
ResultManager and its JobManager.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exp_configs import EXP_GROUPS, cartesian_exp_group
from jobs.backends.toolkit import haven
from jobs.backends.toolkit.backend import Toolkit
from jobs.backends.toolkit.eai import STATES, EaiJob
from tests.jobs.toolkit_standin import Standin, standin
from tests.wording import refused
from trainer.config.identity import exp_id
from trainer.telemetry.run_record import RunRecord

ROOT = Path(__file__).resolve().parents[2]
HAS_HAVEN = importlib.util.find_spec("haven") is not None
needs_haven = pytest.mark.skipif(
    not HAS_HAVEN, reason="haven is an extra: pip install -e '.[haven]'"
)
EXPERIMENTS = [{"lr": 0.1, "model": {"name": "a"}}, {"lr": 0.2, "model": {"name": "a"}}]


@pytest.fixture(autouse=True)
def screenless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("LATHE_EAI_RETRY_S", "2")


@pytest.fixture
def service() -> Iterator[Standin]:
    with standin(kill_after_s=0.3) as running:
        yield running


def havens(name: str) -> Any:
    """A module of haven itself, cured as ours has to."""
    haven.hash_dict({})
    return importlib.import_module(f"haven.{name}")


def written(
    base: Path, values: dict[str, Any], *, job_id: str | None = None, loss: float | None = None
) -> Path:
    """A run folder as the trainer and the launcher leave it."""
    folder = base / exp_id(values)
    folder.mkdir(parents=True)
    (folder / "exp_dict.json").write_text(json.dumps(values, indent=2, sort_keys=True))
    if job_id is not None:
        (folder / "job_dict.json").write_text(
            json.dumps({"job_id": job_id, "command": "python trainval.py"})
        )
    if loss is not None:
        run = RunRecord(folder, total=20)
        run.score(10, **{"valid/loss": 2 * loss, "valid/accuracy": 0.1})
        run.score(20, **{"valid/loss": loss, "valid/accuracy": 0.2})
        run.close()
    return folder


# The id

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
KEYS = TEXT.filter(lambda key: "." not in key)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
LISTS = st.recursive(
    st.lists(SCALARS, max_size=4), lambda inner: st.lists(inner | SCALARS, max_size=3), max_leaves=8
)
BLOCKS = st.recursive(
    st.dictionaries(KEYS, SCALARS | LISTS, max_size=4),
    lambda inner: st.dictionaries(
        KEYS, inner | st.lists(inner, max_size=3) | SCALARS | LISTS, max_size=4
    ),
    max_leaves=12,
)


@needs_haven
@settings(max_examples=100, deadline=None)
@given(BLOCKS)
def test_our_id_is_havens(values: dict[str, Any]) -> None:
    assert exp_id(values) == haven.hash_dict(values)


@needs_haven
def test_the_id_of_every_group_is_havens() -> None:
    for experiments in EXP_GROUPS.values():
        for values in experiments:
            assert exp_id(values) == haven.hash_dict(values)


# Groups


@needs_haven
@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        TEXT, SCALARS | st.lists(SCALARS | LISTS, min_size=1, max_size=3) | BLOCKS, max_size=4
    )
)
def test_our_product_is_havens(form: dict[str, Any]) -> None:
    theirs = havens("haven_utils").cartesian_exp_group
    assert [list(each.items()) for each in cartesian_exp_group(form)] == [
        list(each.items()) for each in theirs(form)
    ]
    assert cartesian_exp_group(form, remove_none=True) == theirs(form, remove_none=True)


# Import


def test_to_import_our_module_does_not_import_haven() -> None:
    code = (
        "import sys, jobs.backends.toolkit.haven; print([name for name in sys.modules if "
        "name.startswith(('haven', 'pandas'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "[]\n", done.stderr


@needs_haven
def test_haven_is_imported_under_this_setuptools_and_leaves_no_stub_behind() -> None:
    assert haven.hash_dict({}) == "d41d8cd98f00b204e9800998ecf8427e"
    assert getattr(sys.modules.get("pkg_resources"), "__file__", "none") is not None


def test_without_haven_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "haven", None)
    haven._load.cache_clear()
    with refused("extra_not_installed", name="haven", extra="haven"):
        haven.hash_dict({})


# Results


@needs_haven
def test_the_result_manager_reads_our_folders(tmp_path: Path) -> None:
    for values, loss in zip(EXPERIMENTS, (0.5, 0.25), strict=True):
        written(tmp_path, values, loss=loss)
    (tmp_path / "_jobs").mkdir()
    (tmp_path / "deleted").mkdir()
    table = haven.result_manager(tmp_path, verbose=False).get_score_df()
    assert sorted(
        zip(table["lr"].astype(float), table["valid/loss"].astype(float), strict=True)
    ) == [
        (0.1, 0.5),
        (0.2, 0.25),
    ]


@needs_haven
def test_a_table_of_results_does_not_move_the_time_zone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TZ", raising=False)
    before = time.strftime("%z")
    written(tmp_path, EXPERIMENTS[0], loss=0.5)
    table = haven.result_manager(tmp_path, verbose=False).get_score_df()
    assert "TZ" not in os.environ
    assert time.strftime("%z") == before
    assert time.strptime(table["started_at"].iloc[0], "%I:%M %p (%b %d)")


# Jobs


def code(tmp_path: Path, script: str = "import time; print('hello'); time.sleep(60)") -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text(script)
    return folder


def manager(tmp_path: Path, **job: Any) -> Any:
    keys = {
        "image": "registry/image:1",
        "data": [f"org.acct.home:{tmp_path}"],
        "name": "mine_<exp_id>",
        **job,
    }
    made = haven.job_manager(tmp_path / "base", EXPERIMENTS, workdir=tmp_path / "code", **keys)
    made.verbose = False
    return made


COMMAND = f"{sys.executable} train.py --exp_id <exp_id> --name 'two words'"


def launched(made: Any) -> list[str]:
    return list(made.launch_exp_list(COMMAND, in_parallel=False))


def states(made: Any) -> list[str]:
    return [summary["job_state"] for summary in made.get_summary_list(get_logs=False)]


def until(made: Any, wanted: str) -> None:
    end = time.monotonic() + 120
    while set(states(made)) != {wanted}:
        assert time.monotonic() < end, states(made)
        time.sleep(0.05)


@needs_haven
def test_the_job_manager_launches_lists_and_kills(service: Standin, tmp_path: Path) -> None:
    code(tmp_path)
    made = manager(tmp_path)
    assert states(made) == ["NEVER LAUNCHED"] * 2
    ids = launched(made)
    until(made, "RUNNING")
    jobs = made.get_jobs()
    assert {job.id for job in jobs} == set(ids)
    assert all("train.py --exp_id" in job.command[2] and job.alive and job["runs"] for job in jobs)
    logs = [tmp_path / "base" / exp_id(values) / "logs.txt" for values in EXPERIMENTS]
    made.kill_jobs()
    until(made, "CANCELLED")
    assert all(log.exists() for log in logs)


@needs_haven
def test_a_job_that_lives_is_not_launched_again(service: Standin, tmp_path: Path) -> None:
    code(tmp_path)
    ids = launched(manager(tmp_path))
    assert launched(manager(tmp_path)) == ids
    for path in (tmp_path / "base").glob("*/job_dict.json"):
        path.unlink()  # the launcher died before it could write down the id
    assert launched(manager(tmp_path)) == ids
    assert service.stats()["created"] == 2


@needs_haven
def test_a_lost_reply_makes_no_second_job(service: Standin, tmp_path: Path) -> None:
    code(tmp_path)
    service.lose_next_create(1)
    launched(manager(tmp_path))
    stats = service.stats()
    assert (stats["created"], stats["lost"]) == (2, 1)


@needs_haven
def test_a_failed_job_is_launched_again_as_another(service: Standin, tmp_path: Path) -> None:
    code(tmp_path, "import sys; print('out'); sys.exit('no')")
    made = manager(tmp_path)
    ids = launched(made)
    until(made, "FAILED")
    assert not set(launched(made)) & set(ids)
    until(made, "FAILED")
    folder = tmp_path / "base" / exp_id(EXPERIMENTS[0])
    assert (folder / "logs.txt").read_text() == "out\nout\n"
    assert (folder / "err.txt").read_text() == "no\nno\n"


@needs_haven
def test_the_jobs_of_our_own_launcher_are_seen(service: Standin, tmp_path: Path) -> None:
    made = manager(tmp_path)
    keys = {"image": "i", "data": [f"org.acct.home:{tmp_path}"]}
    job_id = haven.submit_job(Toolkit(), None, "true", keys, str(tmp_path))
    for values, known in zip(EXPERIMENTS, (job_id, None), strict=True):
        written(tmp_path / "base", values, job_id=known, loss=0.5)
    end = time.monotonic() + 120
    while states(made) != ["SUCCEEDED", "NEVER LAUNCHED"]:
        assert time.monotonic() < end, states(made)
    results = haven.result_manager(tmp_path / "base", verbose=False)
    assert results.get_job_status() == {"SUCCEEDED": 1, "NEVER LAUNCHED": 1}


@needs_haven
@pytest.mark.parametrize("state", [*STATES, "UNKNOWN", "SUSPENDED"])
def test_no_state_is_one_that_haven_does_not_know(state: str) -> None:
    job = haven.HavenJob.of(EaiJob("id", "name", state, "", (), (), is_restartable=True))
    known = havens("haven_jobs")
    assert job.state in known.ALIVE_STATES + known.COMPLETED_STATES + known.FAILED_STATES
    assert job.alive == (job.state in known.ALIVE_STATES)


# The seam


@pytest.mark.parametrize(
    "command", ["a ; b", "a;b", "a && b", "a | b", "a > b", "a `b`", "a $(b)", "a $HOME", ""]
)
def test_a_command_that_wants_a_shell_is_refused(command: str) -> None:
    with refused("haven_command", command=command):
        haven.submit_job(Toolkit(retry_s=0), None, command, {"image": "i"}, "/code")


def test_a_command_with_an_open_quote_is_refused() -> None:
    with refused("haven_quote", command="'"):
        haven.submit_job(Toolkit(retry_s=0), None, "'", {"image": "i"}, "/code")


def test_a_job_that_nobody_knows_is_what_haven_expects(service: Standin) -> None:
    with pytest.raises(ValueError, match=r"job id .* not found"):
        haven.get_job(haven.get_api(token=None), "00000000-0000-4000-8000-000000000000")


def test_to_kill_a_dead_job_is_fine(service: Standin, tmp_path: Path) -> None:
    api = haven.get_api()
    keys = {"image": "i", "data": [f"org.acct.home:{tmp_path}"]}
    job_id = haven.submit_job(api, "lathe.tests", "sleep 60", keys, str(tmp_path))
    haven.kill_job(api, job_id)
    haven.kill_job(api, job_id)
    assert [job.state for job in haven.get_jobs(api, "lathe.tests")] == ["CANCELLED"]


def test_a_wrong_key_of_the_job_dictionary_is_named(tmp_path: Path) -> None:
    with refused("key_unknown", key="resource", nearest="resources"):
        haven.submit_job(Toolkit(), None, "true", {"resource": {}}, str(tmp_path))
