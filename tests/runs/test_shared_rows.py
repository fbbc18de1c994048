"""Runs in which neighbouring ranks share the tokens of each row: the losses are those of one rank, at
every ZeRO stage, and a run goes on with any way of sharing.
"""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from exp_configs import vary
from tests.contract.runs import untimed
from tests.facts import LLAMA, experiment, facts, write_facts
from tests.forked import TRAINVAL, run_ranks
from tests.ranks import run_on_ranks
from tests.runs.test_commands import at_step
from trainer.config.deepspeed_config import read
from trainer.errors import EXIT_PAUSED

STEPS, TOLERANCE = 5, 1e-6
_TRAIN = {
    **{"steps": STEPS, "global_batch": 8, "micro_batch": 4, "log_every": 1, "save_every": 2},
    **{"eval_every": 5, "eval_batch": 11, "precision": "fp32"},
}
LORA = {"r": 4, "alpha": 8, "targets": "all-linear", "dropout": 0.0}
_OF_KIND: dict[str, dict[str, Any]] = {
    "grouped": {},
    "alike": {"base": {"config": LLAMA["config"] | {"num_key_value_heads": 4}, "seed": 1}},
    "answers": {
        "data": {"source": "files", "loss_on": "answer", "columns": {"completion": "answer"}}
    },
    "noise": {
        "train": {"neftune_alpha": 5.0, "label_smoothing": 0.1, "gradient_checkpointing": True}
    },
    "mix": {
        "data": {
            "source": "files",
            "max_tokens": 64,
            "mix": {"train.jsonl": 0.5, "asked.jsonl": {"weight": 0.5, "loss_on": "answer"}},
        }
    },
    "by tokens": {"train": {"micro_batch": 4, "micro_tokens": 150, "bucket_steps": 2}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_facts(tmp_path_factory.mktemp("facts"), train=24, valid=13)
    pairs = [{"prompt": row["question"], "completion": row["answer"]} for row in facts(50, 70)]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return folder


def values_of(folder: Path, kind: str, *, has_adapters: bool) -> dict[str, Any]:
    adapters = {"lora": LORA} if has_adapters else {}
    values = experiment("causal_lm", folder, base=LLAMA, train=_TRAIN, optim={"clip": 0.5})
    return vary({**values, **adapters}, **_OF_KIND[kind])


def sharing_file(folder: Path, stage: int, ranks: int) -> str:
    """A DeepSpeed file with which so many ranks share rows; without the key for one."""
    file = folder / f"zero{stage}_{ranks}.json"
    own = {"sequence_parallel_size": ranks} if ranks > 1 else {}
    file.write_text(json.dumps({**read(f"zero{stage}"), **own}))
    return str(file)


Entry = tuple[str, bool, int]  # kind, whether it trains adapters, stage


def train_one(
    values: dict[str, Any],
    folder: Path,
    out: Path,
    *,
    stage: int,
    ranks: int,
    until: int | None = None,
) -> Path:
    """The folder of a run on the ranks of this process group, `ranks` of which share rows. until: the
    step at which it pauses.
    """
    from trainer.launch.run import run
    from trainer.runtime import distributed
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    file = sharing_file(folder, stage, ranks) if distributed.is_main() else ""
    file = distributed.broadcast(file)
    how: dict[str, Any] = {"data_path": folder, "cache_dir": folder / "cache", "until": until}
    options = Options(out, deepspeed=file, **how)
    planned = plan(values, options, world=distributed.world(), rank=distributed.rank())
    assert run(planned, options, Preemption()) in (0, EXIT_PAUSED)
    return planned.folder


def train_each(
    entries: list[Entry], folder: Path, out: Path, ranks: int
) -> list[list[dict[str, Any]]]:
    """The lines of metrics.jsonl of these runs."""
    found: list[list[dict[str, Any]]] = []
    for kind, has_adapters, stage in entries:
        values = values_of(folder, kind, has_adapters=has_adapters)
        place = out / f"{ranks}, {stage}"
        trained = train_one(values, folder, place, stage=stage, ranks=ranks)
        found.append(untimed(trained / "metrics.jsonl"))
    return found


def assert_alike(one: list[dict[str, Any]], other: list[dict[str, Any]], what: Any) -> None:
    """Two runs have logged the same numbers, but for rounding."""
    assert len([line for line in one if "loss" in line]) == STEPS
    assert len(one) == len(other), what
    for want, got in zip(one, other, strict=True):
        assert want.keys() == got.keys(), what
        for name in want.keys() - {"proof"}:
            assert got[name] == pytest.approx(want[name], rel=TOLERANCE), (what, name, want)


STAGES = list(itertools.product(["grouped"], [False, True], [0, 1, 2, 3]))
KINDS = [(kind, kind == "by tokens", 2) for kind in _OF_KIND]


@pytest.mark.parametrize(
    ("entries", "world", "ranks"),
    [
        ([("grouped", False, 0), ("grouped", True, 3)], 2, 2),
        pytest.param(STAGES, 2, 2, marks=pytest.mark.long),
        pytest.param(KINDS, 2, 2, marks=pytest.mark.long),
        pytest.param([*STAGES[2:6], *KINDS[2:]], 4, 2, marks=pytest.mark.long),
        pytest.param([STAGES[3], STAGES[6], *KINDS[1:]], 4, 4, marks=pytest.mark.long),
    ],
    ids=["short", "stages", "kinds", "2 x 2", "4"],
)
def test_losses_and_gradient_norms_of_shared_rows_are_those_of_one_rank(
    entries: list[Entry], world: int, ranks: int, folder: Path, tmp_path: Path
) -> None:
    alone = run_on_ranks(1, train_each, entries, folder, tmp_path / "alone", 1)[0]
    shared = run_on_ranks(world, train_each, entries, folder, tmp_path / "shared", ranks)[0]
    for entry, one, other in zip(entries, alone, shared, strict=True):
        assert_alike(one, other, entry)


def _in_parts(
    values: dict[str, Any], folder: Path, out: Path, stage: int, ranks: int, until: int | None
) -> Path:
    return train_one(values, folder, out, stage=stage, ranks=ranks, until=until)


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_goes_on_with_any_number_of_ranks_that_share_its_rows(
    stage: int, folder: Path, tmp_path: Path
) -> None:
    values = values_of(folder, "noise", has_adapters=False)
    given = (values, folder)
    straight = run_on_ranks(1, _in_parts, *given, tmp_path / "straight", stage, 1, None)[0]
    for world, ranks, until in ((1, 1, 2), (2, 2, 4), (2, 1, None)):
        ended = run_on_ranks(world, _in_parts, *given, tmp_path / "parts", stage, ranks, until)[0]
    # a pause evaluates, too, which is a line more
    one, other = (
        [line for line in untimed(run / "metrics.jsonl") if "loss" in line or line["step"] == STEPS]
        for run in (straight, ended)
    )
    assert_alike(one, other, stage)


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 3])
def test_a_killed_run_of_shared_rows_goes_on_to_the_same_bits(
    stage: int, folder: Path, tmp_path: Path
) -> None:
    """With dropout, which every rank draws for itself."""
    values = vary(values_of(folder, "grouped", has_adapters=True), lora={"dropout": 0.2})
    groups = tmp_path / "groups.py"
    groups.write_text(f"EXP_GROUPS = {{'one': [{values!r}]}}\n")

    def argv(name: str) -> list[str]:
        where = ["-e", "one", "--exp_configs", str(groups), "-sb", str(tmp_path / name)]
        where += ["--data_path", str(folder), "--cache_dir", str(folder / "cache")]
        return [*TRAINVAL, *where, "--deepspeed", sharing_file(folder, stage, 2)]

    straight = run_ranks(2, *argv("straight"))
    assert [done.returncode for done in straight] == [0, 0], straight[0].stdout + straight[0].stderr
    # step 2 is complete when step 4 begins to be saved, which is before step 5
    killed = run_ranks(2, *argv("killed"), first=at_step(5, signal.SIGKILL, rank=1))
    assert killed[1].returncode == -signal.SIGKILL
    resumed = run_ranks(2, *argv("killed"))
    assert "resumed from" in resumed[0].stdout, resumed[0].stdout + resumed[0].stderr
    one, two = (next((tmp_path / name).glob("[0-9a-f]*")) for name in ("straight", "killed"))
    assert untimed(one / "metrics.jsonl") == untimed(two / "metrics.jsonl")
    first, second = (path / "final" / "adapter_model.safetensors" for path in (one, two))
    assert first.read_bytes() == second.read_bytes()
