"""Cross-attention without keys and values is cross-attention: of FiD's decoder, where answers are
short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.numerics.test_fid_model import (
    LABELS,
    STEP,
    fused,
    gradients_of,
    packed,
    padded_loss,
    questions,
    reader,
    t5,
)
from tests.numerics.test_fid_model import labels as labels_of
from tests.ranks import run_on_ranks
from tests.tolerance import assert_same_step
from trainer.config import deepspeed_config
from trainer.config.optimizer.lora import Lora
from trainer.config.schema import Optim, Train
from trainer.models import adapters
from trainer.models.head import OutputLayer
from trainer.models.packed import absorbed, t5_decoder
from trainer.models.packed.stream_attention import RowStarts
from trainer.runtime import distributed
from trainer.training.engine import Engine

# Both ways sum the same products in another order, over twice the terms: up to 1.33 walks apart
# with the instructions of older processors.
TWO_WAYS = STEP | {"loss": 0.3, "gradients": 3.0}
CASES: dict[str, Any] = {
    "three questions": (None, LABELS),
    "one of them without an answer": (None, [[7, 20, 1], [], [9, 8, 7, 1]]),
    "one question": (questions([[5, 1, 40, 17]]), [[7, 20, 1]]),
}


def _step(targets: Sequence[Sequence[int]], asked: Any, *, dropout: float, few: float) -> Any:
    """Loss and gradients, absorbed where that takes `few` of the ordinary form's products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(absorbed, "_FEW", few)
        model = reader(dropout=dropout).train()
        torch.manual_seed(11)
        loss = model(**packed(asked, targets))["loss"]
    loss.backward()
    return loss.detach(), gradients_of(model)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("case", CASES)
def test_it_equals_the_ordinary_form_dropout_included(case: str, dropout: float) -> None:
    asked, targets = CASES[case]
    got, want = (_step(targets, asked, dropout=dropout, few=few) for few in (100.0, 0.0))
    assert_same_step(got, want, **TWO_WAYS)
    assert any(not torch.equal(got[1][name], want[1][name]) for name in want[1])  # two ways indeed


@pytest.mark.parametrize(("length", "is_few"), [(4, True), (5, False)])
def test_long_answers_are_read_with_keys_and_values(
    length: int, is_few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    ours = absorbed.attend
    monkeypatch.setattr(absorbed, "attend", lambda *given: called.append(1) or ours(*given))
    targets = [[3] * (length - 1), [3] * (length + 1), [3] * length]  # so many on average
    twin, model = t5(), reader()
    want = padded_loss(twin, questions(), labels_of(targets))
    got = model(**packed(None, targets))["loss"]
    assert len(called) == (3 if is_few else 0)  # of blocks
    want.backward()
    got.backward()
    assert_same_step((got, gradients_of(model)), (want, gradients_of(twin)), **STEP)


def test_weights_that_are_not_one_plain_matrix_are_not_absorbed() -> None:
    heads = t5().decoder.block[0].layer[1].EncDecAttention
    assert absorbed.is_absorbable(heads)
    how = Lora(r=2, alpha=4, dropout=0.0, targets=["v"])
    adapted = adapters.adapted(t5(), how, seed=1)
    found = [each for name, each in adapted.named_modules() if name.endswith("EncDecAttention")]
    assert found
    assert not any(absorbed.is_absorbable(each) for each in found)
    (shared,) = {
        absorbed.is_absorbable(block.layer[1].EncDecAttention)
        for block in reader(cross_attention_multi_query=True).t5.decoder.block
    }
    assert not shared


def test_in_bf16_it_is_as_near_to_fp32_as_a_stock_t5() -> None:
    def states(model: Any, *, is_stock: bool) -> Tensor:
        asked, targets = questions(), labels_of()
        if is_stock:
            read, mask = fused(model.t5, asked)
            found = model.decode(read, mask, targets)
            return found[targets >= 0].detach().float()
        batch = packed(asked)
        encoded = model.encode(batch)
        few = model._few(encoded, batch)
        assert few is not None
        written = model.t5.prepare_decoder_input_ids_from_labels(targets).flatten()
        rows = RowStarts(batch["target_starts"], batch["question_starts"], 97)
        tokens = written[batch["scored"]]
        return t5_decoder.decode(model.t5.decoder, tokens, encoded, rows, few=few).detach().float()

    want = states(reader().eval(), is_stock=True)
    coarse = reader().eval().bfloat16()
    ours, stock = (states(coarse, is_stock=is_stock) - want for is_stock in (False, True))
    assert 0 < ours.square().mean() <= 1.3 * stock.square().mean()


def test_nothing_as_long_as_the_passages_is_kept_but_their_states() -> None:
    asked, targets = [[[5] * 90] * 9], [[7, 20, 1]]
    model, batch = reader(dropout=0.1).train(), packed(asked, targets)
    encoded = model.encode(batch).detach().requires_grad_()
    kept: dict[int, int] = {}
    weights: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if len(encoded) in tensor.shape:
            kept[place] = tensor.numel()
        if tensor.shape == (32, 32):  # no copy of a weight either: ZeRO-3 could not take it away
            weights.add(place)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_ND = model._decode_stream(encoded, batch)
        targets_N = batch["labels"].flatten().index_select(0, batch["scored"])
        loss = OutputLayer(model.t5).loss(hidden_ND, targets_N)
    assert list(kept.values()) == [encoded.numel()]
    assert weights
    assert weights <= {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    loss.backward()
    assert encoded.grad is not None


# Partitioned weights
# --------------------------------------------------------------------------------------------------

FEW, MANY = [7, 20, 1], [9, *range(10, 40), 1]  # each alone, one is absorbed and one is not


def _losses(stage: int) -> list[float]:
    """The loss of each of three steps over all ranks, of which each has one question."""
    world = distributed.world()
    train = Train(steps=3, global_batch=2, micro_batch=2 // world, precision="fp32")
    optim = Optim(lr=0.05)
    preset = deepspeed_config.read(f"zero{stage}")
    ds = deepspeed_config.build(preset, train=train, optim=optim, world=world, source="test")
    engine = Engine(reader(), deepspeed_config.for_engine(ds), optim)
    asked, targets = questions()[:2], [FEW, MANY]
    if world > 1:
        own = slice(distributed.rank(), distributed.rank() + 1)
        asked, targets = asked[own], targets[own]
    found: list[float] = []
    for _ in range(3):
        loss = engine.model(**packed(asked, targets))["loss"] / 35
        engine.backward(loss)
        found.append(float(distributed.total(loss.detach().double())))
        engine.step(0.05)
    return found


@pytest.mark.long
def test_ranks_with_short_and_long_answers_fetch_the_same_weights_under_zero3() -> None:
    (want,) = run_on_ranks(1, _losses, 0)
    assert want[0] > want[1] > want[2]
    for got in run_on_ranks(2, _losses, 3):
        assert got == pytest.approx(want, rel=1e-5)
