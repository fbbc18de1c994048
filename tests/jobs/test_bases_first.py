"""Groups in which an experiment begins with the model of another: a base is trained first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.backends.local.queue import Queue
from jobs.record.bases import why_it_waits
from jobs.record.paths import RunFolder
from tests.jobs.conftest import Make, Place, wait_until
from tests.jobs.real_slurm import RealSlurm, need_slurm, real_slurm
from trainer.config.identity import exp_id
from trainer.errors import ConfigError
from trainer.files.atomic import read_json

CHAIN = """
from exp_configs import EXP_GROUPS as BUILT_IN, vary

first = vary(BUILT_IN["causal_lm_tiny"][0], train={"seed": 1})
second = vary(first, base={"experiment": first}, tokenizer=first["tokenizer"])
third = vary(second, base={"experiment": second})
EXP_GROUPS = {"sweep": [third, first, second], "child": [second]}
"""


@pytest.fixture
def chain(place: Make) -> Place:
    """A Place with a group of three: each begins with the model of the one before it."""
    made = place(0)
    made.groups.write_text(CHAIN)
    return made


def ids_of(place: Place) -> list[str]:
    """The ids of the first, the second and the third."""
    scope: dict[str, Any] = {}
    exec(place.groups.read_text(), scope)
    return [exp_id(scope[name]) for name in ("first", "second", "third")]


def by_id(place: Place) -> dict[str, dict[str, Any]]:
    return {row["exp_id"]: row for row in place.status()}


def has_runner(queue: Path) -> bool:
    return Queue(queue).has_runner()


def test_the_local_queue_trains_a_chain_in_order_without_a_person(chain: Place) -> None:
    assert chain.submit().code == 0
    chain.until_all("succeeded")
    assert chain.starts() == ids_of(chain)


def test_the_local_queue_holds_the_children_of_a_failed_base_until_its_retry_has_succeeded(
    chain: Place, queue: Path
) -> None:
    first, second, third = ids_of(chain)
    chain.says("1")
    assert chain.submit().code == 0
    wait_until(
        lambda: {name: row["state"] for name, row in by_id(chain).items()},
        lambda states: states == {first: "failed", second: "held", third: "queued"},
    )
    rows = by_id(chain)
    assert (
        rows[second]["reason"] == f"its base {first} is failed: exit code 1. `retry {first}` first"
    )
    assert f"it waits until its base {second}, now" in rows[third]["reason"]
    wait_until(lambda: has_runner(queue), lambda runs: not runs)
    chain.says("ok")
    assert chain.lathe("retry", first, "-sb", str(chain.base)).code == 0
    chain.until_all("succeeded")
    assert chain.starts() == [first, first, second, third]


def test_in_process_the_children_of_a_failed_base_wait(chain: Place) -> None:
    first, second, third = ids_of(chain)
    chain.says("1")
    results = {result["exp_id"]: result for result in chain.submit("--json", backend="inline").json}
    assert [results[name]["action"] for name in (first, second, third)] == ["send", "wait", "wait"]
    assert f"its base {first} is failed" in results[second]["text"]
    chain.says("ok")
    assert chain.submit("--retry", "failed", backend="inline").code == 0
    assert chain.starts() == [first, first, second, third]


def test_a_base_that_was_never_run_is_named_before_anything_is_sent(chain: Place) -> None:
    first, second, _ = ids_of(chain)
    words = ("-e", "child", "-sb", str(chain.base), "--exp_configs", str(chain.groups))
    for command in (["plan", *words], ["submit", *words, "-j", "local", "--allow-dirty"]):
        said = chain.lathe(*command)
        assert said.code == 2
        assert f"experiment {second}: its base, experiment {first} (task causal_lm)" in said.out
    assert not list(chain.base.glob("*/job.jsonl"))


def test_what_waits_for_its_base_is_told_by_the_state_of_that_one(tmp_path: Path) -> None:
    first = {"task": "fid"}
    values = {"task": "fid", "base": {"experiment": first}}
    folder, base = RunFolder(tmp_path / exp_id(values)), tmp_path / exp_id(first)
    assert why_it_waits(folder, {"task": "fid", "base": "google-t5/t5-small"}) is None
    assert "was never run" in str(why_it_waits(folder, values))
    base.mkdir()
    (base / "status.json").write_text('{"state": "running"}')
    assert "now running, has succeeded" in str(why_it_waits(folder, values))
    (base / "status.json").write_text('{"state": "failed", "error": "DataError: line 3"}')
    assert "is failed: DataError: line 3. `retry" in str(why_it_waits(folder, values))
    (base / "status.json").write_text('{"state": "succeeded"}')
    assert "left no model" in str(why_it_waits(folder, values))
    (base / "final").mkdir()
    (base / "final" / "config.json").write_text("{}")
    assert why_it_waits(folder, values) is None


def test_a_dictionary_that_has_no_id_waits_for_nothing(tmp_path: Path) -> None:
    values = {"base": {"experiment": {"a.b": 1}}}
    with pytest.raises(ConfigError):
        exp_id(values)
    assert why_it_waits(RunFolder(tmp_path / "x"), values) is None


@pytest.fixture(scope="module")
def cluster() -> Iterator[RealSlurm]:
    need_slurm()
    with real_slurm() as running:
        yield running


@pytest.mark.long
def test_a_chain_on_a_real_slurm_runs_in_order_and_survives_a_failed_and_retried_parent(
    chain: Place, tmp_path: Path, cluster: RealSlurm
) -> None:
    first, second, third = ids_of(chain)
    jobs = tmp_path / "jobs.py"
    values = {"resources": {"cpu": 1, "mem": 1}, "partition": "low"}
    jobs.write_text(f"JOB_CONFIGS = {{'default': {values!r}}}")
    chain.says("1")
    words = ("--job_configs", str(jobs), "--json")
    results = {result["exp_id"]: result for result in chain.submit(*words, backend="slurm").json}
    assert [results[name]["action"] for name in (first, second, third)] == ["send", "wait", "wait"]
    chain.until(lambda _: by_id(chain)[first]["state"] == "failed")

    def reconcile() -> dict[str, str]:
        said = chain.lathe("reconcile", "-sb", str(chain.base), "--json").json
        return {result["exp_id"]: result["action"] for result in said}

    assert reconcile() == {second: "wait", third: "wait"}
    assert f"its base {first} is failed: exit code 1" in by_id(chain)[second]["reason"]
    chain.says("ok")
    assert chain.lathe("retry", first, "-sb", str(chain.base)).code == 0
    for parent, child in ((first, second), (second, third)):
        chain.until(lambda _, parent=parent: by_id(chain)[parent]["state"] == "succeeded")
        assert reconcile()[child] == "send"
    chain.until_all("succeeded")
    assert chain.starts() == [first, first, second, third]
    spec = read_json(chain.base / third / "attempts" / "1" / "spec.json") or {}
    assert spec["base"] == str(chain.base / second)
    print("SHOW a chain of three: its parent failed, was retried; order of trainings 1 1 2 3")
