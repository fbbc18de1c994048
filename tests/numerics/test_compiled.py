"""Compiled blocks: the numbers of those that are not, and one compilation for batches of all
lengths.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.runs import untimed
from tests.facts import EVERY_BLOCK, LLAMA, OF_TASK, experiment, with_dropout, write_facts
from tests.forked import TRAINVAL, run
from tests.ranks import run_alone
from tests.runs.test_commands import at_step
from tests.tolerance import assert_same_step, depth_of
from tests.wording import refused
from trainer import tasks
from trainer.config.deepspeed_config import build, read
from trainer.models import fused
from trainer.models.packed.dropped import Dropout
from trainer.models.packed.layout import grids_of, pack
from trainer.models.packed.stream_attention import Biases, RowStarts
from trainer.models.packed.stream_kernels import _Launch
from trainer.protocol.task import DRAW, EPOCH, Places

TASKS = tuple(OF_TASK)
MOST = 3  # compilations after that of the first micro-batch, with what a recomputation adds


def batches_of(task: Any, count: int) -> Iterator[Any]:
    """Micro-batches of one to four rows, drawn anew each time."""
    rows = list(task.rows("train"))
    draw, zero = np.random.default_rng(3), np.zeros(1, dtype=np.int64)
    for _ in range(count):
        chosen = draw.choice(len(rows), size=draw.integers(1, 5), replace=False)
        encoded = [task.encode(rows[number]) for number in chosen]
        yield task.collate(
            [
                {k: np.asarray(v) for k, v in row.items()} | {DRAW: zero, EPOCH: zero}
                for row in encoded
            ]
        )


def step(task: Any, model: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    total = 0.0
    for loss in task.losses(model, [batch]):
        loss.backward()
        total += float(loss.detach())
    return total, {
        name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None
    }


def compared(values: dict[str, Any], facts: str, count: int, backend: str) -> dict[str, Any]:
    """Of `count` steps, compiled and not: the largest deviations allowed are checked here; returned
    is how many graphs there were after the first batch and after the last.
    """
    torch.manual_seed(0)
    cfg = tasks.parse(values)
    task = tasks.load(cfg, Places(Path(facts), Path(facts), Path(facts) / "cache"))
    plain, model = task.model(), task.model()
    fused.BACKEND = backend
    assert fused.compile_blocks(model) > 0
    plain.train(), model.train()
    graphs: list[int] = []
    # a retriever's scores are divided by its temperature, and what rounding did to them with them
    loss, gradients = (1.0, 6.0) if values["task"] == "retriever" else (0.2, 3.0)
    for batch in batches_of(task, count):
        assert_same_step(
            step(task, model, batch),
            step(task, plain, batch),
            depth=depth_of(model),
            loss=loss,
            gradients=gradients,
        )
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return {"first": graphs[0], "last": graphs[-1]}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def of(task: str, facts: Path, **changes: Any) -> dict[str, Any]:
    train = {"precision": "fp32", **changes.pop("train", {})}
    return experiment(task, facts, train=train, **changes)


@pytest.mark.parametrize(
    ("task", "changes"),
    # transformers computes the encoder's blocks again, and we those of the other
    [
        pytest.param("cross_attention", {}, marks=pytest.mark.long),
        ("retriever", {"train": {"gradient_checkpointing": True}}),
    ],
)
def test_batches_of_all_lengths_are_compiled_once(
    task: str, changes: dict[str, Any], facts: Path
) -> None:
    found = run_alone(compared, of(task, facts, **changes), str(facts), 8, "eager")
    assert 0 < found["first"] <= found["last"] <= found["first"] + MOST


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("task", TASKS)
def test_two_hundred_batches_of_every_task_are_compiled_once(task: str, facts: Path) -> None:
    found = run_alone(compared, of(task, facts), str(facts), 200, "eager")
    assert 0 < found["first"] <= found["last"] <= found["first"] + MOST


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("task", "changes"),
    [(task, {}) for task in TASKS]
    + [(task, {"base": LLAMA}) for task in ("causal_lm", "vera")]
    + [("cross_attention", {"base": LLAMA, "layers": EVERY_BLOCK})]
    + [(task, {"train": {"gradient_checkpointing": True}}) for task in TASKS],
)
def test_compiled_kernels_compute_the_same_step(
    task: str, changes: dict[str, Any], facts: Path
) -> None:
    found = run_alone(compared, of(task, facts, **changes), str(facts), 6, "inductor")
    assert found["first"] > 0, "compared() holds every step to its bounds; something was compiled"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_compiled_run_that_was_stopped_goes_on_to_the_same_bits(
    stage: int, facts: Path, tmp_path: Path
) -> None:
    values = with_dropout(of("causal_lm", facts, train={"compile": True}))
    values |= {"deepspeed": f"zero{stage}"}
    (tmp_path / "groups.py").write_text(f"EXP_GROUPS = {{'one': [{values!r}]}}\n")
    how = [*TRAINVAL, "-e", "one", "--exp_configs", str(tmp_path / "groups.py")]
    how += ["--data_path", str(facts), "--cache_dir", str(tmp_path / "cache"), "-sb"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    codes = [
        run(*how, str(straight)).returncode,
        run(*how, str(stopped), first=at_step(3, signal.SIGTERM)).returncode,
        run(*how, str(stopped)).returncode,
    ]
    assert codes == [0, 75, 0]
    want, got = (untimed(next(folder.glob("*/metrics.jsonl"))) for folder in (straight, stopped))
    assert [line for line in got if "loss" in line] == [line for line in want if "loss" in line]


def test_zero_3_refuses_compiled_blocks_by_name(facts: Path) -> None:
    train = tasks.parse(of("causal_lm", facts, train={"compile": True})).train
    optim = tasks.parse(of("causal_lm", facts)).optim
    for stage in (0, 1, 2):
        build(read(f"zero{stage}"), train=train, optim=optim, world=2, source="file")
    with refused("stage_of_compile", stage=3):
        build(read("zero3"), train=train, optim=optim, world=2, source="file")


def test_streams_of_all_lengths_attend_by_the_same_compiled_kernels() -> None:
    """Grids have shapes of their own in nearly every batch; what Triton compiles for a stream
    depends on the model alone.
    """
    draw = np.random.default_rng(5)
    biases = Biases(torch.zeros(32, 2), torch.zeros(257, dtype=torch.int32))
    kernels, shapes, batches = set(), set(), 200
    for _ in range(batches):
        lengths = draw.integers(20, 250, size=draw.integers(20, 101))
        batch = pack([[0] * length for length in lengths], bucketed=True)
        grids = grids_of(batch)
        shapes |= {tuple(grid.shape) for grid in grids}
        rows = RowStarts(batch["starts"], batch["starts"], max(grid.shape[1] for grid in grids))
        q_MHC = torch.zeros(len(batch["tokens"]), 2, 16)
        launch = _Launch(q_MHC, rows, biases, Dropout.with_seed(0.1, q_MHC.device))
        dtypes = tuple(tensor.dtype for tensor in launch.tensors)
        kernels.add((tuple(launch.numbers.items()), dtypes))
    assert len(kernels) == 1
    assert len(shapes) > batches
