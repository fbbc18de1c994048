"""Runs that learn from a teacher: at every stage and number of ranks they have the same losses, and
killed while the teacher reads or while the student trains they leave the same bits.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from exp_configs import vary
from tests.contract.runs import EVERY_ENTRY, SHORT, lines_of, losses, train, untimed
from tests.facts import LLAMA, TINY_T5, experiment, with_dropout
from tests.ranks import run_on_ranks

BASES: dict[str, dict[str, Any]] = {"causal_lm": LLAMA, "summariser": TINY_T5, "fid": TINY_T5}


def distilled(task: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """Four steps, with a teacher of the same family whose vocabulary is padded to another size."""
    base = BASES[task]
    teacher = {"config": {**base["config"], "vocab_size": 400}, "seed": 9}
    how: dict[str, Any] = {"base": teacher, "top_k": 6, "divergence": "mixed", "temperature": 2.0}
    values = experiment(task, folder, base=base, train=SHORT | {"best": None}, teacher=how)
    return vary(values, **changes)


def _train(values: dict[str, Any], folder: Path, savedir: Path, stage: int) -> Any:
    from trainer.data.readings import likely_tokens

    likely_tokens.MIN_SHARD_ROWS = 8
    return train(values, folder, savedir, stage)


def test_a_run_learns_from_its_teacher_and_logs_how_far_it_is(folder: Path, tmp_path: Path) -> None:
    """From the teacher alone: it comes closer to it, and its validation loss is the task's own."""
    values = vary(distilled("causal_lm", folder), teacher={"weight": 1.0, "temperature": 1.0})
    ((_, lines),) = run_on_ranks(1, _train, values, folder, tmp_path, 1)
    scores = [line for line in lines if "valid/loss" in line]
    assert [line["step"] for line in scores] == [2, 4]
    assert scores[1]["valid/divergence"] < scores[0]["valid/divergence"]
    assert losses(lines)[-1] < losses(lines)[0]
    assert scores[0]["valid/loss"] == pytest.approx(5.95, abs=0.3), "that of random weights: ln 384"


@pytest.mark.long
@pytest.mark.parametrize("name", BASES)
def test_stages_ranks_and_accumulation_agree(name: str, folder: Path, tmp_path: Path) -> None:
    values = distilled(name, folder)
    at_once = vary(values, train={"micro_batch": 8})
    ((_, lines),) = run_on_ranks(1, _train, at_once, folder, tmp_path / "at once", 0)
    wanted, divergence = losses(lines), lines[-1]["valid/divergence"]
    assert len(wanted) == SHORT["steps"]
    for world, stage in EVERY_ENTRY:
        shutil.rmtree(folder / "cache" / "teacher")  # each reads for itself, on its ranks
        savedir = tmp_path / f"{world}-{stage}"
        _, lines = run_on_ranks(world, _train, values, folder, savedir, stage)[0]
        assert losses(lines) == pytest.approx(wanted, abs=1e-5), f"ZeRO {stage} on {world} rank(s)"
        assert lines[-1]["valid/divergence"] == pytest.approx(divergence, rel=1e-4)


def _die_while_the_teacher_reads(
    values: dict[str, Any], folder: Path, savedir: Path, stage: int
) -> None:
    from trainer.data.readings import likely_tokens
    from trainer.runtime import distributed

    likely_tokens.MIN_SHARD_ROWS = 8
    usual, parts = likely_tokens.TeacherStore._computed, []

    def dying(*args: Any) -> Any:
        parts.append(args)
        if len(parts) == 4 and distributed.is_main():
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(*args)

    likely_tokens.TeacherStore._computed = dying
    train(values, folder, savedir, stage)


def _go_on_and_die_in_step_4(
    values: dict[str, Any], folder: Path, savedir: Path, stage: int
) -> tuple[int, Path]:
    """The number of parts that were still missing, and the run, which dies once more and is then
    trained to its end without its teacher.
    """
    from trainer.data.readings import likely_tokens
    from trainer.tasks.distilled import DistilledTask
    from trainer.training import loop

    usual, parts = likely_tokens.TeacherStore._computed, []
    likely_tokens.TeacherStore._computed = lambda *args: parts.append(1) or usual(*args)
    original, steps = loop.train_step, []

    def dying(*args: Any, **kwargs: Any) -> Any:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    loop.train_step = dying
    with pytest.raises(KeyboardInterrupt):
        train(values, folder, savedir, stage)
    loop.train_step = original
    DistilledTask._teacher_model = lambda self: pytest.fail("all is there")
    return len(parts), train(values, folder, savedir, stage)[0]


@pytest.mark.long
@pytest.mark.parametrize(("world", "stage"), [(2, 1), (2, 3), (1, 2)])
@pytest.mark.parametrize("name", ["causal_lm", "fid"])
def test_kills_change_no_bit(
    name: str, world: int, stage: int, folder: Path, tmp_path: Path
) -> None:
    values = with_dropout(distilled(name, folder))
    shutil.rmtree(folder / "cache" / "teacher", ignore_errors=True)
    straight, _ = run_on_ranks(world, _train, values, folder, tmp_path / "straight", stage)[0]
    shutil.rmtree(folder / "cache" / "teacher")
    how = (values, folder, tmp_path / "killed", stage)
    with pytest.raises(AssertionError):
        run_on_ranks(world, _die_while_the_teacher_reads, *how)
    written = [*(folder / "cache" / "teacher").glob("*/teacher-*.json")]
    assert written
    results = run_on_ranks(world, _go_on_and_die_in_step_4, *how)
    whole = len([*(folder / "cache" / "teacher").glob("*/teacher-*.json")])
    assert sum(parts for parts, _ in results) == whole - len(written)
    resumed = results[0][1]
    one, two = (untimed(path / "metrics.jsonl") for path in (straight, resumed))
    assert two == one
    weights = [path / "final" / "model.safetensors" for path in (straight, resumed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert "valid/divergence" in lines_of(resumed)[-1]
