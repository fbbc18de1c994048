"""A deep model is counted by a few of its blocks, and the count is that of the whole."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu_shapes import Shape
from tests.wording import says
from trainer import tasks
from trainer.models.losses import Scorer, Scoring, chunked_cross_entropy
from trainer.plan.memory import fake_step
from trainer.plan.memory.fake_device import equal_chunks_once, fake_device
from trainer.plan.memory.measure import Measured, MeasureRequest
from trainer.plan.memory.planned_rows import Specimens
from trainer.plan.memory.tracker import PLAIN, TRACKED, forwards_in
from trainer.plan.time.blocks import Stacks, UnequalBlocksError, shorten, whole
from trainer.plan.time.calibration import Listing
from trainer.protocol.task import Places

DEPTH = 9


class Block(nn.Module):
    """A layer, and what only some blocks do."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer_idx, self.inner = index, nn.Linear(8, 8)
        self.does_more_at: int | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        out = hidden + torch.relu(self.inner(hidden))
        return out.exp() if self.layer_idx == self.does_more_at else out


class Deep(nn.Module):
    """Blocks between two layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(Block(index) for index in range(DEPTH))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


def counted(model: nn.Module, stacks: Stacks | None = None) -> tuple[Any, dict[Any, int]]:
    """Moments, and how often every operator runs, of a step."""
    with fake_device("cpu") as device:
        device.place(model)
        stacks = shorten(model, 4) if stacks is None else stacks
        device.tracker.watch(model, stacks)
        device.tracker.restart()
        model(torch.empty(3, 4)).sum().backward()
        runs = dict(forwards_in(device.tracker.parts())[0].operators)
        return device.tracker.moments, runs


class Sine(nn.Module):
    """A layer that keeps what it is given."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.sin()


class Peeks(nn.Module):
    """A large layer behind another, whose weight the module around them may look at."""

    def __init__(self, *, peeks: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(400, 800), nn.Linear(800, 400)
        self.peeks = peeks

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.first(hidden).relu()
        return self.last(inner.to(self.last.weight.dtype) if self.peeks else inner)


@pytest.mark.parametrize(("peeks", "activations"), [(False, 2 * 64 * 800), (True, 0)])
def test_a_weight_is_asked_for_when_the_module_begins_that_asks(
    peeks: bool, activations: int
) -> None:
    model, rows = Peeks(peeks=peeks), torch.empty(64, 400)
    with fake_device("cpu") as device:
        device.place(model)
        device.tracker.watch(model)
        device.tracker.restart()
        model(rows).sum().backward()
        (moments, reading) = device.tracker.highest()
    assert reading.total == 4 * activations
    assert max(moment.activations for moment in moments) > reading.activations


def test_weights_that_a_later_run_gathers_anew_lie_beside_what_that_run_keeps() -> None:
    """GradCache runs a micro-batch without gradients first, and then holds less."""
    model = nn.Sequential(nn.Linear(400, 800), *(Sine() for _ in range(4)), nn.Linear(800, 400))
    rows, found = torch.empty(64, 400), []
    for is_run_before in (False, True):
        with fake_device("cpu") as device:
            device.place(model)
            device.tracker.watch(model)
            device.tracker.restart()
            if is_run_before:
                device.tracker.begin_forward()
                with torch.no_grad():
                    model(rows)
                without = device.tracker.highest()[1]
            device.tracker.begin_forward()
            model(rows).sum().backward()
            found.append(device.tracker.highest()[1])
    assert without.total == 4 * 2 * 64 * 800
    assert found[0].total == found[1].total == 4 * 5 * 64 * 800


def test_four_blocks_tell_the_bytes_and_the_operators_of_all() -> None:
    short, full = counted(Deep()), counted(Deep(), whole())
    assert short == full
    assert len(full[0]) > 1
    assert sum(full[1].values()) > 8 * DEPTH


class Scored(nn.Module):
    """An output layer whose logits are never there all at once."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.head, self.chunk = nn.Linear(8, 40, bias=False), chunk

    def forward(self, hidden: Tensor) -> Tensor:
        targets = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        scoring = Scoring(targets, self.chunk, torch.clone)
        return chunked_cross_entropy(hidden, Scorer(self.head.weight), scoring)


@pytest.mark.parametrize("num_rows", [1, 4, 8, 31, 90])  # of chunks of 4: 1, 1, 2, 8, 23
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_chunks_of_an_output_layer_tell_the_bytes_and_the_operators_of_all(
    num_rows: int, dtype: torch.dtype
) -> None:
    found = []
    for is_shortened in (True, False):
        model = Scored(chunk=4).to(dtype)
        with fake_device("cpu") as device:
            device.place(model)
            device.tracker.watch(model)
            device.tracker.restart()
            hidden = torch.empty(num_rows, 8, dtype=dtype, requires_grad=True)
            with equal_chunks_once(device.tracker) if is_shortened else nullcontext():
                model(hidden).backward()
            (ran,) = forwards_in(device.tracker.parts())
            found.append((device.tracker.highest(), dict(ran.operators), dict(ran.calls)))
    assert found[0] == found[1]
    assert found[0][0][0][0].total > 0


def test_the_hosts_calls_are_those_of_a_real_step() -> None:
    model, real = Deep(), Deep()
    with fake_device("cpu") as device:
        device.place(model)
        device.tracker.watch(model)
        device.tracker.restart()
        model(torch.empty(3, 4)).sum().backward()
        counts = forwards_in(device.tracker.parts())[0].calls
    calls = counts[TRACKED] + counts[PLAIN]

    with Listing() as listing:
        real(torch.empty(3, 4)).sum().backward()
    made = 2  # torch.empty and the first gradient show no tensor of the device that they read
    assert abs(calls - listing.calls) <= made


def test_weights_of_blocks_that_are_not_shown_are_still_held() -> None:
    model = Deep()
    with fake_device("cpu") as device:
        device.place(model)
        held = device.tracker.live["weights"]
        stacks = shorten(model, 4)
        assert device.tracker.live["weights"] == held
    assert stacks.missing == {"blocks": DEPTH - 4}


def test_blocks_that_do_different_things_are_not_taken_for_equal() -> None:
    model = Deep()
    for block in model.blocks:
        block.does_more_at = 2  # all blocks look the same
    with pytest.raises(UnequalBlocksError) as caught:
        counted(model)
    says("blocks_differ", caught.value, blocks="blocks")


def test_blocks_that_look_different_are_all_run() -> None:
    model = Deep()
    model.blocks[3].inner = nn.Linear(8, 8, bias=False)
    assert shorten(model, 4).missing == {}
    assert len(model.blocks) == DEPTH


def test_blocks_entered_in_another_order_are_refused() -> None:
    class Twice(Deep):
        def forward(self, hidden: Tensor) -> Tensor:
            hidden = self.blocks[1](self.blocks[0](self.first(hidden)))
            return super().forward(hidden[:, :4])

    with pytest.raises(UnequalBlocksError) as caught:
        counted(Twice())
    says("blocks_out_of_order", caught.value, order=[0, 1])


_DECODER = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": DEPTH}
_DECODER |= {"intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 1024}
_DECODER |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
_ADDED = {"layers": {"count": 2, "stride": 4}, "data": {"decoder_tokens": 8, "context_tokens": 8}}


@pytest.mark.parametrize(
    ("task_name", "blocks"),
    [("causal_lm", {"data": {"max_tokens": 8}}), ("cross_attention", _ADDED)],
)
def test_a_deep_decoder_of_a_task_is_counted_whole(
    task_name: str, blocks: dict[str, Any], tmp_path: Path
) -> None:
    shape = Shape(task_name, task_name, _DECODER, blocks)
    values = shape.experiment(is_rehearsed=False, precision="fp32", global_batch=2, micro_batch=2)
    values["data"] |= {"source": "jsonl"}
    values["tokenizer"] |= {"corpus": "lookup"}
    places = Places(tmp_path, tmp_path, tmp_path)
    task = tasks.load(tasks.parse(values), places)
    rows = Specimens(task).encoded_rows([0, 0], is_drawn=True)
    request = MeasureRequest(values, "train", rows, device="cpu")
    short, full = (
        fake_step._run_step(request, places),
        fake_step._run_blocks(request, places, lambda _: whole()),
    )
    assert short.moments == full.moments
    assert _runs(short) == _runs(full)


def _runs(step: Measured) -> dict[str, float]:
    """How often every operator runs."""
    runs: dict[str, float] = {}
    for *operator, times in step.operators:
        runs[str(operator)] = runs.get(str(operator), 0) + times
    return runs
