"""Whole runs that are compared with what they began with, or with another run, and their gates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.facts import OF_TASK, experiment, facts, write_facts
from tests.ranks import run_alone, run_on_ranks
from tests.wording import fault, is_said, refused, says
from trainer.config.identity import exp_id

COLUMNS = {"prompt": "question", "completion": "answer"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = write_facts(tmp_path / "data", train=24, valid=6)
    rows = facts(30, 52)
    for number, row in enumerate(rows):
        row["kind"] = "odd" if number % 2 else "even"
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def values_of(data: Path, judge: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    values = dict(experiment("causal_lm", data, **changes))
    values["data"] = {
        "source": "files",
        "loss_on": "answer",
        "columns": COLUMNS,
        "max_tokens": 96,
    }
    values["train"] = {**values["train"], "steps": 4, "eval_every": 2}  # type: ignore[dict-item]
    return values if judge is None else {**values, "judge": {"keep": None, "answers": 4, **judge}}


def train_run(values: dict[str, Any], data: Path, savedir: Path) -> int:
    from trainer.launch.group import run_group
    from trainer.runtime import distributed
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    options = Options(savedir, data_path=data, cache_dir=data / "cache")
    planned = plan(values, options, world=distributed.world(), rank=distributed.rank())
    return run_group([planned], options)


def _killed_in_the_comparison(values: dict[str, Any], data: Path, savedir: Path) -> int:
    """A run that dies in its comparison, and is started again."""
    from trainer.judging import end_of_run

    good = end_of_run.run_judge
    end_of_run.run_judge = lambda *args, **how: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        train_run(values, data, savedir)
    assert not (savedir / exp_id(values) / "final").exists(), "nothing was judged yet"
    end_of_run.run_judge = good
    return train_run(values, data, savedir)


def _refusal(values: dict[str, Any], data: Path, savedir: Path) -> str:
    """The exit code and the message of the error that ends a run; "" where none does."""
    from trainer.errors import LatheError

    try:
        train_run(values, data, savedir)
    except LatheError as error:
        return f"{error.exit_code}: {error}"
    return ""


def judgement_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "judge.json").read_text())


def judge(*arguments: str) -> tuple[int, str]:
    """The exit code of the command, and what it says."""
    ended = forked.run(*forked.TRAINER, "judge", *arguments)
    return ended.returncode, ended.stdout + ended.stderr


def test_a_run_is_compared_with_its_start_the_same_on_two_ranks(data: Path, tmp_path: Path) -> None:
    values = values_of(data, {})
    folders = {world: tmp_path / str(world) / exp_id(values) for world in (1, 2)}
    for world, folder in folders.items():
        assert set(run_on_ranks(world, train_run, values, data, folder.parent)) == {0}
    one, two = (judgement_of(folder) for folder in folders.values())
    assert one["rows"] == 22
    assert one["model"] == "best"
    assert one["scores"]["loss"]["result"] == "better"
    assert {"em", "f1"} <= one["scores"].keys()
    for key in ("before", "after", "low", "high"):
        assert one["scores"]["loss"][key] == pytest.approx(two["scores"]["loss"][key], abs=1e-4)
    answers = [
        [json.loads(line) for line in (folder / "judge_answers.jsonl").read_text().splitlines()]
        for folder in folders.values()
    ]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 4
    assert answers[0][0]["references"] == [facts(30, 31)[0]["answer"]]
    assert answers[0][0]["prompt"] == facts(30, 31)[0]["question"]
    assert (folders[1] / "final").is_dir()
    lines = (folders[1] / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["judge/loss"] == one["scores"]["loss"]["after"]
    assert "kind" not in (folders[1] / "judge.md").read_text().partition("## Slices")[0]


def test_a_gate_that_holds_makes_final_of_best_also_after_a_kill(
    data: Path, tmp_path: Path
) -> None:
    values = values_of(data, {"gate": {"loss": {"gain": 0.0}}})
    assert run_on_ranks(1, _killed_in_the_comparison, values, data, tmp_path) == [0]
    folder = tmp_path / exp_id(values)
    exported = [(folder / name / "lathe.json").read_text() for name in ("best", "final")]
    assert exported[0] == exported[1]
    assert judgement_of(folder)["gate"] == {"holds": True, "refusals": []}


def test_a_gate_that_does_not_hold_leaves_no_final_and_says_why(data: Path, tmp_path: Path) -> None:
    values = values_of(data, {"gate": {"loss": {"gain": 99.0}}}, train={"best": None})
    folder = tmp_path / exp_id(values)
    statuses: list[str] = []
    for _ in range(2):
        assert run_on_ranks(1, train_run, values, data, tmp_path) == [0]
        assert not (folder / "final").exists()
        assert (folder / "candidate" / "lathe.json").is_file()
        statuses.append((folder / "status.json").read_text())
    assert statuses[0] == statuses[1], "the second start finds it finished"
    assert json.loads(statuses[0])["state"] == "succeeded"
    (reason,) = json.loads((folder / "gate.json").read_text())["refusals"]
    assert "loss" in reason
    later = {**values_of(data), "base": {"experiment": values}}
    says("gate_kept_base", run_on_ranks(1, _refusal, later, data, tmp_path)[0], run=folder.name)


def _refusals(every: list[dict[str, Any]], data: Path, savedir: Path) -> list[str]:
    return [_refusal(values, data, savedir) for values in every]


def test_what_the_comparison_would_refuse_is_refused_before_the_first_step(
    data: Path, tmp_path: Path
) -> None:
    gates: list[Any] = [{"emm": {"gain": 0}}, {"loss": {"gain": 0}, "f1": {"at_least": 0.1}}]
    every = [
        values_of(data, {"gate": gates[0]}),
        values_of(data, {"against": "0123"}),
        values_of(data, {"gate": {"keep/loss": {"gain": 0}}, "keep": "absent.jsonl"}),
        values_of(data, {"gate": {"f1": {"gain": 0.0}}}),
        values_of(data, {"gate": {"em_zz": {"at_least": 0.0}}}),
        values_of(data, {"gate": {"em": {"at_least": 0.0}}, "answers": 0}),
    ]
    texts = run_on_ranks(1, _refusals, every, data, tmp_path)[0]
    says("gate_score_unknown", texts[0], name="emm", nearest="em")
    says("judged_run_absent", texts[1], run="0123")
    assert "absent.jsonl" in texts[2]
    says("gate_rows_few", texts[3], name="f1", count=4)
    says("gate_score_unknown", texts[4], name="em_zz")
    says("gate_score_unknown", texts[5], name="em")
    rows = (data / "train.jsonl").read_text().splitlines(keepends=True)
    with (data / "test.jsonl").open("a") as file:
        file.writelines(rows[:2])
    text = run_on_ranks(1, _refusal, values_of(data, {}), data, tmp_path)[0]
    says("judged_rows_trained", text, count=2, rows=24, split="test")
    assert "row 23 is training row 1" in text
    assert not is_said("gate_score_unknown", text)


def _problems(
    values: dict[str, Any], data: Path, savedir: Path, earlier: tuple[str, ...] = ()
) -> list[str]:
    """What a dry run says that a run would refuse."""
    from trainer.launch.preflight import look
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    options = Options(savedir, data_path=data, cache_dir=data / "cache")
    return look(plan(values, options, world=1, rank=0), options, earlier=earlier).problems


def test_a_dry_run_looks_at_the_other_run_and_at_the_rows_that_are_judged(
    data: Path, tmp_path: Path
) -> None:
    assert run_on_ranks(1, _problems, values_of(data, {}), data, tmp_path)[0] == []
    with (data / "test.jsonl").open("a") as file:
        file.writelines((data / "train.jsonl").read_text().splitlines(keepends=True)[:2])
    (trained,) = run_on_ranks(1, _problems, values_of(data, {}), data, tmp_path)[0]
    says("judged_rows_trained", trained, count=2, rows=24, split="test")
    other = values_of(data, {"against": "0123", "overlap": "leave_out"})
    (absent,) = run_on_ranks(1, _problems, other, data, tmp_path)[0]
    says("judged_run_absent", absent, run="0123")
    awaited = run_on_ranks(1, _problems, other, data, tmp_path, ("0123abc",))[0]
    assert awaited == [], "the same group trains that run before"
    two = values_of(data, {"against": "0123,45", "overlap": "leave_out"})
    (absent,) = run_on_ranks(1, _problems, two, data, tmp_path, ("0123abc",))[0]
    says("judged_run_absent", absent, run="45")


@pytest.mark.long
def test_rows_that_the_other_run_was_trained_on_are_refused(data: Path, tmp_path: Path) -> None:
    other = values_of(data)
    other["data"] = {**other["data"], "files": {"train": "more.jsonl", "valid": "valid.jsonl"}}
    other["data"]["files"]["test"] = "test.jsonl"
    rows = [(data / f"{name}.jsonl").read_text() for name in ("train", "test")]
    (data / "more.jsonl").write_text("".join(rows))
    for values in (other, values_of(data)):
        assert run_on_ranks(1, train_run, values, data, tmp_path) == [0]
    where = ["-sb", str(tmp_path), "--data_path", str(data), "--cache_dir", str(data / "cache")]
    where += ["--keep", "nothing", "--answers", "0"]
    code, text = judge(exp_id(values_of(data)), "--against", exp_id(other), *where)
    assert code == 2, text
    says("judged_rows_trained", text, count=22, rows=22, split="test")
    assert f"of run {exp_id(other)}" in text


@pytest.mark.long
def test_runs_are_judged_by_the_command(data: Path, tmp_path: Path) -> None:
    runs = [values_of(data), values_of(data, train={"seed": 7})]
    for values in runs:
        assert run_on_ranks(1, train_run, values, data, tmp_path / "runs") == [0]
    where = ["-sb", str(tmp_path / "runs"), "--data_path", str(data)]
    where += ["--cache_dir", str(data / "cache"), "--keep", "nothing", "--answers", "2"]
    ids = [exp_id(values) for values in runs]
    code, text = judge(ids[0][:8], *where)
    assert code == 0, text
    assert "verdict: better on" in text
    first = (tmp_path / "runs" / ids[0] / "judge.json").read_text()
    code, text = judge(ids[0], *where, "--against", ids[1][:9])
    assert code == 0, text
    assert "not measured: what was forgotten" in text
    assert judgement_of(tmp_path / "runs" / ids[0])["against_runs"] == [ids[1]]
    (earlier,) = (tmp_path / "runs" / ids[0] / "judge_earlier").iterdir()
    assert (earlier / "judge.json").read_text() == first
    code, text = judge(*ids, *where, "--out", str(tmp_path / "of" / "seeds"))
    assert code == 0, text
    assert judgement_of(tmp_path / "of" / "seeds")["runs"] == ids
    code, text = judge(ids[0], *where, "--gate", '{"loss": {"gain": 99}}')
    assert code == 11, text
    assert "refused: loss" in text
    for words, refusal in (
        (["zz"], fault("judged_run_absent", run="zz")),
        ([ids[0], "--gate", "{"], fault("gate_no_json")),
        ([ids[0], "--run", "x"], fault("judge_of_two_kinds")),
        (["--against", "base"], fault("judge_of_two_kinds")),
        ([ids[0], "--gate", '{"auroc": {"gain": 0}}'], fault("gate_score_untested", name="auroc")),
    ):
        flags = words if words[0].startswith("--") else [*words, *where]
        code, text = judge(*flags)
        assert code == 2, text
        says(refusal, text)


def test_a_gate_asks_for_something() -> None:
    from trainer.config.block import validate
    from trainer.config.scores.judged import Judging

    with refused("gate_without_bound"):
        validate(Judging, {"gate": {"em": {}}}, source="judge")
    with refused("gate_of_slices"):
        validate(Judging, {"gate": {"slices": {"gain": 1.0}}}, source="judge")
    with refused("gate_of_no_text"):
        validate(Judging, {"gate": {"keep/loss": {"gain": 0}}, "keep": None}, source="judge")


@pytest.mark.long
@pytest.mark.parametrize("task", [*OF_TASK])
def test_every_task_is_judged_against_its_start(task: str, data: Path, tmp_path: Path) -> None:
    how = {"split": "valid", "overlap": "leave_out", "answers": 3}
    values = {**experiment(task, data), "judge": how}
    assert run_on_ranks(1, train_run, values, data, tmp_path) == [0]
    judgement = judgement_of(tmp_path / exp_id(values))
    judged = {**judgement["scores"], **judgement["untested"]}
    assert "loss" in judged
    for name, one in judgement["scores"].items():
        assert one["low"] <= one["effect"] <= one["high"] or one["low"] == one["high"], name
    assert (judgement["keep"] is not None) == (task in ("causal_lm", "preference"))


def _judged_from_python(values: dict[str, Any], data: Path, savedir: Path) -> dict[str, Any]:
    from trainer import fine_tune

    run = fine_tune(values, data, savedir_base=savedir, cache_dir=data / "cache")
    return run.judge(data=data, keep=None, answers=2)


@pytest.mark.long
def test_a_run_is_judged_from_python(data: Path, tmp_path: Path) -> None:
    values = values_of(data)
    record = run_alone(_judged_from_python, values, data, tmp_path)
    assert record == judgement_of(tmp_path / exp_id(values))
    assert record["verdict"].startswith("better on ")
