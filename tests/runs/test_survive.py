"""Runs whose ranks die or hang, and which go on without a person."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contract.runs import untimed
from tests.facts import experiment, with_dropout, write_facts
from tests.forked import TRAINVAL, run_ranks
from tests.survivors import Fault, survived, trained_rows
from trainer.config.identity import exp_id
from trainer.files.survival_events import read as events
from trainer.runtime import process

TRAIN = {
    "steps": 8,
    "log_every": 1,
    "eval_every": 4,
    "save_every": 4,
    "global_batch": 12,
    "micro_batch": 2,
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


@pytest.fixture(scope="session")
def undisturbed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a run of three ranks to which nothing happens, by stage; trained once each."""
    made: dict[int, Path] = {}

    def of(stage: int) -> Path:
        if stage not in made:
            root = tmp_path_factory.mktemp(f"zero{stage}")
            groups = root / "groups.py"
            values = made_up(folder, stage)
            groups.write_text(f"EXP_GROUPS = {{'mine': [{values!r}]}}\n")
            flags = ["--exp_configs", str(groups), "-e", "mine", "-sb", str(root / "out")]
            flags += ["--data_path", str(folder), "--cache_dir", str(folder / "cache")]
            for done in run_ranks(3, *TRAINVAL, *flags):
                assert done.returncode == 0, done.stderr
            made[stage] = root / "out" / exp_id(values)
        return made[stage]

    return of


def made_up(folder: Path, stage: int, *, has_dropout: bool = True, **train: Any) -> dict[str, Any]:
    values = experiment("causal_lm", folder, train={**TRAIN, **train}, deepspeed=f"zero{stage}")
    return with_dropout(values) if has_dropout else values


@dataclass(frozen=True)
class Ended:
    """A run that has ended: the agent's exit code, the run's folder, and what was printed."""

    code: int
    run: Path
    text: str


def ended(folder: Path, base: Path, stage: int, spec: str, *faults: Fault, **how: Any) -> Ended:
    """A run that meets `faults`; it ends well unless its test says otherwise."""
    values = made_up(folder, stage, **how)
    options = {"savedir_base": base, "data_path": folder, "cache_dir": folder / "cache"}
    code, text = survived([values], options, spec, *faults)
    return Ended(code, base / exp_id(values), text)


def is_same(one: Path, other: Path) -> bool:
    weights = "final/model.safetensors"
    assert (one / weights).read_bytes() == (other / weights).read_bytes()
    return untimed(one / "metrics.jsonl") == untimed(other / "metrics.jsonl")


def test_a_killed_rank_is_replaced_by_a_spare_and_the_run_has_the_bits_of_an_undisturbed_one(
    folder: Path, undisturbed: Any, tmp_path: Path
) -> None:
    done = ended(folder, tmp_path, 3, "3+1", Fault("kill", 1, 6))
    assert done.code == 0, done.text
    assert is_same(done.run, undisturbed(3))
    (event,) = events(done.run)
    assert [one["rank"] for one in event["lost"]] == [1]
    assert (event["world"], event["source"]) == (3, "memory")
    assert (event["from"], event["steps_lost"]) == (5, 0)
    status = json.loads((done.run / "status.json").read_text())
    assert (status["recoveries"]["count"], status["recoveries"]["ranks"]) == (1, 3)
    assert "rank 1 ended by SIGKILL, at step 5" in status["recoveries"]["last"]
    pids = re.findall(r"\d+", " ".join(re.findall("ranks: processes (.*)", done.text)))
    assert str(status["process"]["pid"]) not in pids, "the agent's, which outlives ranks"


def test_without_a_spare_fewer_ranks_go_on_with_the_same_batches_and_every_row_once(
    folder: Path, tmp_path: Path
) -> None:
    done = ended(folder, tmp_path, 1, "3", Fault("kill", 0, 6), has_dropout=False)
    assert done.code == 0, done.text
    assert [one["world"] for one in events(done.run)] == [2]
    straight = ended(folder, tmp_path / "straight", 1, "3", has_dropout=False)
    wanted, got = losses(straight.run), losses(done.run)
    assert wanted.keys() == got.keys()
    assert max(abs(got[step] / wanted[step] - 1) for step in wanted) < 1e-5
    dealt, plan = trained_rows(tmp_path), trained_rows(tmp_path / "straight")
    for step in range(1, TRAIN["steps"] + 1):
        _, rows = plan[step]
        assert len(set(rows)) == TRAIN["global_batch"]
        assert dealt[step] == (3 if step < 6 else 2, rows)


def losses(run: Path) -> dict[int, float]:
    lines = untimed(run / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("where", ["mirror", "save"])
def test_a_rank_may_die_between_two_steps_or_in_a_save(
    folder: Path, undisturbed: Any, tmp_path: Path, stage: int, where: str
) -> None:
    done = ended(folder, tmp_path, stage, "3+1", Fault("kill", 0, 4, where))
    assert done.code == 0, done.text
    assert is_same(done.run, undisturbed(stage))
    assert [one["steps_lost"] <= 1 for one in events(done.run)] == [True]


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2])
def test_all_ranks_may_die_for_the_agent_holds_what_they_go_on_from(
    folder: Path, undisturbed: Any, tmp_path: Path, stage: int
) -> None:
    faults = [Fault("kill", rank, 6) for rank in range(3)]
    done = ended(folder, tmp_path, stage, "3+1", *faults)
    assert done.code == 0, done.text
    assert is_same(done.run, undisturbed(stage))
    assert {one["source"] for one in events(done.run)} == {"memory"}


@pytest.mark.long
@pytest.mark.parametrize("what", ["stop", "spin"])
def test_a_rank_that_hangs_is_named_shown_and_replaced(
    folder: Path, undisturbed: Any, tmp_path: Path, what: str
) -> None:
    done = ended(folder, tmp_path, 2, "3+1,hang_s=4", Fault(what, 1, 6))
    assert done.code == 0, done.text
    assert is_same(done.run, undisturbed(2))
    (event,) = events(done.run)
    assert [one["rank"] for one in event["lost"]] == [1]
    assert all(f"rank {rank} (process" in done.text for rank in range(3))
    assert "in train_step" in done.text


@pytest.mark.long
def test_a_rollback_of_a_run_that_lost_a_rank_is_that_of_an_undisturbed_one(
    folder: Path, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"on_bad_step": "rollback"}
    bad = Fault("nan", 0, 3)
    straight = ended(folder, tmp_path / "straight", 1, "3", bad, **how)
    done = ended(folder, tmp_path / "killed", 1, "3+1", bad, Fault("kill", 2, 6), **how)
    assert (straight.code, done.code) == (0, 0), done.text
    assert is_same(done.run, straight.run)
    assert len(events(done.run)) == 1


@pytest.mark.long
def test_a_rank_that_dies_again_and_again_at_one_step_ends_the_run(
    folder: Path, tmp_path: Path
) -> None:
    faults = [Fault("kill", 1, 3) for _ in range(9)]
    with pytest.raises(AssertionError, match="4 times in a row a rank was lost"):
        ended(folder, tmp_path, 0, "2+1", *faults)


@pytest.mark.long
def test_an_error_of_a_rank_itself_ends_the_run_as_it_would_under_torchrun(
    folder: Path, tmp_path: Path
) -> None:
    done = ended(folder, tmp_path, 0, "3+1", Fault("raise", 1, 3))
    assert done.code == 1
    assert "a fault of this rank's own" in done.text


@pytest.mark.long
def test_bad_input_that_ranks_find_is_said_and_ends_with_2(folder: Path, tmp_path: Path) -> None:
    done = ended(folder / "nowhere", tmp_path, 0, "2+1")
    assert done.code == 2
    assert "there is no such folder" in done.text


@pytest.mark.long
def test_a_signal_to_the_agent_saves_on_all_ranks_and_the_same_command_goes_on(
    folder: Path, undisturbed: Any, tmp_path: Path
) -> None:
    assert ended(folder, tmp_path, 1, "3+1", Fault("term", 2, 3)).code == 75
    done = ended(folder, tmp_path, 1, "3+1")
    assert done.code == 0, done.text
    assert is_same(done.run, undisturbed(1))


@pytest.mark.long
def test_ranks_end_with_their_agent_and_the_same_command_goes_on(
    folder: Path, undisturbed: Any, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=r"SIGKILL|-9"):
        ended(folder, tmp_path, 1, "3+1", Fault("orphan", 2, 6))
    text = (tmp_path / "output.txt").read_text()
    (pids,) = re.findall("ranks: processes (.*)", text)
    given_up = time.monotonic() + 30
    while any(process.birth(int(pid)) for pid in pids.split(", ")):
        assert time.monotonic() < given_up, "a rank goes on without its agent"
        time.sleep(0.05)
    done = ended(folder, tmp_path, 1, "3+1")
    assert done.code == 0, done.text
    assert is_same(done.run, undisturbed(1))


@pytest.mark.long
def test_a_signal_while_a_rank_is_replaced_saves_what_the_ranks_had_kept(
    folder: Path, undisturbed: Any, tmp_path: Path
) -> None:
    faults = [Fault("term", 0, 6), Fault("kill", 1, 6)]
    stopped = ended(folder, tmp_path, 1, "3+1", *faults)
    assert stopped.code == 75, stopped.text
    assert (stopped.run / "checkpoints" / "step-6").is_dir()  # the one before is of step 4
    done = ended(folder, tmp_path, 1, "3+1")
    assert done.code == 0, done.text
    assert is_same(done.run, undisturbed(1))
