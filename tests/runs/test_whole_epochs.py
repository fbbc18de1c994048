"""A run in epochs counts its rows, trains on each of them once an epoch on any number of ranks, and is
resumed at the row where it was stopped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.contract.runs import train, untimed
from tests.facts import LLAMA, experiment, write_facts
from tests.ranks import run_on_ranks
from tests.wording import says
from trainer.config.groups import with_steps
from trainer.errors import ConfigError

NUM_ROWS, EPOCHS = 13, 3
STEPS, FILLED = 7, 3  # 39 rows in steps of 6
TRAIN = {"epochs": EPOCHS, "global_batch": 6, "micro_batch": 1, "eval_every": "1 epoch"}
TRAIN |= {"save_every": 2, "log_every": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=NUM_ROWS, valid=4)


def values_of(folder: Path, **changes: Any) -> dict[str, Any]:
    values = experiment("causal_lm", folder, base=LLAMA)
    of_run = {name: value for name, value in values["train"].items() if name != "steps"}  # type: ignore[union-attr]
    return {**values, "train": {**of_run, **TRAIN, **changes}}


def counted_run(values: dict[str, Any], folder: Path, savedir: Path) -> tuple[str, list[list[int]]]:
    """The run's folder, and the rows of this rank at every step."""
    from trainer.training import loop

    steps: list[list[int]] = []
    windows = loop.windows

    def counted(*args: Any, **how: Any) -> Iterator[Any]:
        for window in windows(*args, **how):
            steps.append([int(row) for rows in window.rows for row in rows])
            yield window

    loop.windows = counted  # type: ignore[assignment]
    run, _ = train(values, folder, savedir)
    return str(run), steps


def test_every_row_is_trained_on_once_an_epoch_on_any_number_of_ranks(
    folder: Path, tmp_path: Path
) -> None:
    found: dict[int, list[list[int]]] = {}
    lines: dict[int, list[dict[str, Any]]] = {}
    for world in (1, 2, 3):
        ranks = run_on_ranks(world, counted_run, values_of(folder), folder, tmp_path / str(world))
        of_ranks = [steps for _, steps in ranks]
        found[world] = [sorted(chain(*rows)) for rows in zip(*of_ranks, strict=True)]
        lines[world] = untimed(Path(ranks[0][0]) / "metrics.jsonl")
    assert found[1] == found[2] == found[3]
    assert len(found[1]) == STEPS
    times = Counter(Counter(row for rows in found[1] for row in rows).values())
    assert times == {EPOCHS: NUM_ROWS - FILLED, EPOCHS + 1: FILLED}
    losses = {world: [line["loss"] for line in lines[world] if "loss" in line] for world in lines}
    assert losses[2] == pytest.approx(losses[1], abs=1e-5)
    assert losses[3] == pytest.approx(losses[1], abs=1e-5)
    evaluated = [line["step"] for line in lines[1] if "valid/loss" in line]
    assert evaluated == [3, 5, 7]  # 13 rows are over with step 3, 26 with step 5


def command(folder: Path, savedir: Path, values: dict[str, Any], *flags: str) -> Any:
    groups = savedir.with_suffix(".json")
    groups.write_text(json.dumps({"one": [values]}))
    where = ["--data_path", str(folder), "--cache_dir", str(folder / "cache")]
    given = ["-e", "one", "--exp_configs", str(groups), "-sb", str(savedir), *where, *flags]
    return forked.run(*forked.TRAINVAL, *given)


def test_the_command_says_what_epochs_are_and_refuses_steps_that_disagree(
    folder: Path, tmp_path: Path
) -> None:
    done = command(folder, tmp_path / "runs", values_of(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    told = " ".join(done.stdout.split())
    assert "3 epochs of 13 rows in steps of 6 are 7 steps; 3 rows of one more epoch" in told
    (run,) = (path.parent for path in (tmp_path / "runs").glob("*/status.json"))
    assert json.loads((run / "status.json").read_text())["total"] == STEPS
    resolved = json.loads((run / "resolved.json").read_text())["train"]
    assert (resolved["steps"], resolved["epochs"]) == (STEPS, EPOCHS)

    wrong = command(folder, tmp_path / "wrong", values_of(folder, steps=8))
    assert wrong.returncode == ConfigError.exit_code
    said = f"{EPOCHS} epochs of {NUM_ROWS} rows in steps of 6"
    says("epochs_disagree", wrong.stderr, steps=8, said=said, count=STEPS)
    assert not list((tmp_path / "wrong").glob("*/status.json"))

    late = values_of(folder)
    late["schedule"] = {"shape": "linear", "warmup_steps": STEPS + 1}
    refused_run = command(folder, tmp_path / "late", late)
    assert refused_run.returncode == ConfigError.exit_code
    says("warmup_too_long", refused_run.stderr, warmup=STEPS + 1, steps=STEPS)

    unjudged = values_of(folder, spike_z=10, spike_window=8)
    refused_run = command(folder, tmp_path / "unjudged", unjudged)
    assert refused_run.returncode == ConfigError.exit_code
    says("spikes_unjudged", refused_run.stderr, window=8, steps=STEPS)

    preview = command(folder, tmp_path / "dry", values_of(folder), "--dry_run")
    assert preview.returncode == 0, preview.stderr
    assert "those of 3 epochs, once the rows are counted" in preview.stdout


def test_steps_that_are_given_replace_epochs() -> None:
    [changed] = with_steps([{"train": {"epochs": 3, "global_batch": 2}}], 5)
    assert changed == {"train": {"steps": 5, "global_batch": 2}}
