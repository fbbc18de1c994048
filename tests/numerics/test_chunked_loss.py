"""A loss in chunks is the loss of all logits at once, whatever the output layer is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from tests.families import base, streaming
from tests.ranks import run_on_ranks
from tests.tolerance import assert_all_close, assert_close
from trainer.config import deepspeed_config
from trainer.config.optimizer.lora import Lora
from trainer.config.schema import Optim, Train
from trainer.models import adapters, head, losses
from trainer.models.head import OutputLayer
from trainer.models.losses import IGNORED, PLAIN, Terms
from trainer.models.packed.layout import pack_labelled
from trainer.runtime import distributed
from trainer.training.engine import Engine


@pytest.fixture(autouse=True)
def _chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows one by one, and losses in the tensor of their logits."""
    monkeypatch.setenv("LATHE_CPU_KERNELS", "1")


WIDTH, VOCABULARY, POSITIONS, CHUNK = 16, 50, 45, 7
KINDS = ["plain", "frozen", "capped", "adapters", "dora"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def chunks_of_7(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk holds 7 positions."""
    monkeypatch.setattr(losses, "CHUNK_BYTES", 0)
    monkeypatch.setattr(losses, "CHUNK_POSITIONS", CHUNK)


def _layer(kind: str, dtype: torch.dtype) -> Any:
    layer: Any = nn.Linear(WIDTH, VOCABULARY).requires_grad_(kind != "frozen")
    if kind in ("adapters", "dora"):
        config = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["head"], use_dora=kind == "dora"
        )
        layer = peft.inject_adapter_in_model(config, nn.ModuleDict({"head": layer}))["head"]  # pyright: ignore
        nn.init.normal_(layer.lora_B["default"].weight)
    return layer.to(dtype)


SMOOTHED = Terms(smoothing=0.1)


def _step(
    kind: str, dtype: torch.dtype, *, positions: int = POSITIONS, terms: Terms = SMOOTHED
) -> dict[str, Tensor]:
    """The loss of a layer with equal weights at every call, and its gradients by name."""
    torch.manual_seed(5)
    layer = _layer(kind, dtype)
    hidden = torch.randn(positions, WIDTH).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (positions,))
    targets[3] = IGNORED
    config = SimpleNamespace(
        model_type="any", final_logit_softcapping=2.0 if kind == "capped" else None
    )
    model = SimpleNamespace(config=config, get_output_embeddings=lambda: layer)
    loss = OutputLayer(model).loss(hidden, targets, terms)
    (loss * 0.37).backward()
    weights = {
        name: weight.grad for name, weight in layer.named_parameters() if weight.grad is not None
    }
    assert hidden.grad is not None
    return {"loss": loss.detach(), "states": hidden.grad, **weights}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_in_chunks_is_that_of_all_logits_at_once(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(head, "_has_adapters", lambda layer: False)
        want = _step(kind, dtype)
    monkeypatch.setattr(losses, "CHUNK_BYTES", 0)
    monkeypatch.setattr(losses, "CHUNK_POSITIONS", CHUNK)
    got = _step(kind, dtype)
    assert float(got["loss"]) == pytest.approx(float(want["loss"]), rel=1e-6)
    del got["loss"], want["loss"]
    assert_all_close(got, want, what="gradients", depth=VOCABULARY, margin=0.6, cancels=0.03)
    assert ("weight" in got) == (kind in ("plain", "capped"))


@pytest.mark.parametrize("kind", KINDS)
def test_z_loss_in_chunks_is_that_of_all_logits_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = Terms(smoothing=0.1, z_loss=0.01)
    with monkeypatch.context() as patched:
        patched.setattr(head, "_has_adapters", lambda layer: False)
        want = _step(kind, torch.float32, terms=terms)
    monkeypatch.setattr(losses, "CHUNK_BYTES", 0)
    monkeypatch.setattr(losses, "CHUNK_POSITIONS", CHUNK)
    got = _step(kind, torch.float32, terms=terms)
    assert float(got["loss"]) == pytest.approx(float(want["loss"]), rel=1e-6)
    assert float(got.pop("loss") - _step(kind, torch.float32)["loss"]) > 1.0, "it is in the loss"
    del want["loss"]
    # log Z is a sum over the vocabulary of its own
    assert_all_close(got, want, what="gradients", depth=2 * VOCABULARY, margin=0.6, cancels=0.03)


@pytest.mark.usefixtures("chunks_of_7")
def test_a_weights_gradient_is_summed_over_chunks_in_fp32() -> None:
    """With more positions than four times the width its sum is made as the chunks come."""
    few, many = 4 * WIDTH, 40 * WIDTH
    for positions in (few, many):
        exact = _step("plain", torch.float32, positions=positions)["weight"]
        got = _step("plain", torch.bfloat16, positions=positions)["weight"]
        assert_close(
            got,
            exact,
            what="gradient",
            depth=9,
            margin=1.0,
            dtype=torch.bfloat16,
            of=str(positions),
        )


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, WIDTH), (torch.bfloat16, 4 * WIDTH)])
def test_few_positions_make_a_weights_gradient_one_product(dtype: torch.dtype, most: int) -> None:
    """In 16 bits also where the gradient that is kept for it takes twice the bytes of a sum."""
    for positions, keeps in ((most, True), (most + 1, False)):
        hidden = torch.zeros(positions, WIDTH, dtype=dtype)
        inputs = (hidden, torch.zeros(VOCABULARY, WIDTH, dtype=dtype), None, None, None)
        gradients = losses._Gradients(inputs, (True, True, False, False, False))
        assert (gradients._kept_NV is not None) == keeps


@pytest.mark.usefixtures("chunks_of_7")
def test_what_fits_into_one_chunk_is_computed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits; in 32, a processor computes a plain loss in the tensor of the logits."""
    monkeypatch.setattr(losses, "_Chunked", None)
    _step("plain", torch.bfloat16, positions=CHUNK)
    with pytest.raises(AttributeError):
        _step("plain", torch.bfloat16, positions=CHUNK + 1)
    with pytest.raises(AttributeError):
        _step("plain", torch.float32, positions=CHUNK, terms=PLAIN)


@pytest.mark.usefixtures("chunks_of_7")
@pytest.mark.parametrize("positions", [5, WIDTH, POSITIONS])
@pytest.mark.parametrize("kind", ["plain", "frozen", "adapters"])
def test_a_loss_in_the_tensor_of_its_logits_is_that_of_autograd(
    kind: str, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few positions the weight's gradient is one product, made in the backward pass."""
    got = _step(kind, torch.float32, positions=positions, terms=PLAIN)
    monkeypatch.setattr(losses, "is_narrow", lambda hidden: False)
    monkeypatch.setattr(losses, "CHUNK_POSITIONS", positions)
    want = _step(kind, torch.float32, positions=positions, terms=PLAIN)
    assert float(got["loss"]) == pytest.approx(float(want["loss"]), rel=1e-6)
    del got["loss"], want["loss"]
    assert_all_close(got, want, what="gradients", depth=VOCABULARY, margin=0.6, cancels=0.03)


@pytest.mark.usefixtures("chunks_of_7")
def test_gradients_computed_in_the_forward_are_given_away_once() -> None:
    hidden = torch.randn(POSITIONS, WIDTH, requires_grad=True)
    scorer = losses.Scorer(torch.randn(VOCABULARY, WIDTH))
    scoring = losses.Scoring(torch.zeros(POSITIONS, dtype=torch.int64), CHUNK, lambda x: x)
    loss = losses.chunked_cross_entropy(hidden, scorer, scoring)
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="first backward"):
        loss.backward()


# Under ZeRO-3
# --------------------------------------------------------------------------------------------------


def _batch(rows: slice) -> dict[str, Tensor]:
    """Two rows, of which the first has few labels and the second many."""
    ids = torch.randint(2, 96, (2, 21), generator=torch.Generator().manual_seed(4)).tolist()
    is_label = [[1] * 5 + [0] * 16, [1] * 21]
    return pack_labelled(ids[rows], is_label[rows])


def _run(stage: int, adapts_head: bool) -> tuple[list[float], int]:
    """The loss of each of three steps over all ranks, and how often this rank called the layer.

    Of two ranks the first's labels fit into a chunk, the second's do not.
    """
    losses.CHUNK_BYTES, losses.CHUNK_POSITIONS = 0, CHUNK
    world = distributed.world()
    stock = base("causal_lm", "llama")
    if adapts_head:
        how = Lora(r=2, alpha=4, dropout=0.0, targets=["lm_head", "q_proj"])
        stock = adapters.adapted(stock, how, seed=1)
    train = Train(steps=3, global_batch=2, micro_batch=2 // world, precision="fp32")
    optim = Optim(lr=0.05)
    preset = deepspeed_config.read(f"zero{stage}")
    ds = deepspeed_config.build(preset, train=train, optim=optim, world=world, source="test")
    engine = Engine(streaming(stock), deepspeed_config.for_engine(ds), optim)
    calls: list[int] = []
    layer: Any = stock.get_output_embeddings()
    getattr(layer, "base_layer", layer).register_forward_pre_hook(lambda *_: calls.append(1))
    rank = distributed.rank()
    batch = _batch(slice(rank, rank + 1) if world > 1 else slice(None))
    found: list[float] = []
    for _ in range(3):
        loss = engine.model(**batch)["loss"] / 24
        engine.backward(loss)
        found.append(float(distributed.total(loss.detach().double())))
        engine.step(0.05)
    return found, len(calls)


@pytest.mark.parametrize("adapts_head", [False, True])
def test_ranks_with_few_and_many_labels_call_the_layer_once_a_step_under_zero3(
    adapts_head: bool,
) -> None:
    (want, _), *_ = run_on_ranks(1, _run, 0, adapts_head)
    assert want[0] > want[1] > want[2]
    for got, calls in run_on_ranks(2, _run, 3, adapts_head):
        assert got == pytest.approx(want, rel=1e-5)
        assert calls == 3


@pytest.mark.parametrize("kernels", ["1", "0"])
@pytest.mark.parametrize("positions", [WIDTH - 4, POSITIONS])  # fewer than numbers of a state, more
@pytest.mark.parametrize("kind", KINDS)
def test_losses_by_target_have_the_gradients_of_all_logits_at_once(
    kind: str, positions: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATHE_CPU_KERNELS", kernels)
    wanted = _step_by_target(kind, positions)
    monkeypatch.setattr(losses, "CHUNK_BYTES", 0)
    monkeypatch.setattr(losses, "CHUNK_POSITIONS", CHUNK)
    found = _step_by_target(kind, positions)
    assert found.keys() == wanted.keys()
    how: dict[str, Any] = {"depth": 2 * (WIDTH + VOCABULARY), "margin": 3.0}
    assert_all_close(found, wanted, what="of a loss by target", of=kind, **how)


def _step_by_target(kind: str, positions: int) -> dict[str, Tensor]:
    torch.manual_seed(5)
    layer = _layer(kind, torch.float32)
    hidden = torch.randn(positions, WIDTH).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (positions,))
    config = SimpleNamespace(
        model_type="any", final_logit_softcapping=2.0 if kind == "capped" else None
    )
    model = SimpleNamespace(config=config, get_output_embeddings=lambda: layer)
    of_targets = OutputLayer(model).losses(hidden, targets)
    (of_targets * torch.linspace(-1, 2, positions)).sum().backward()
    weights = {n: w.grad for n, w in layer.named_parameters() if w.grad is not None}
    assert hidden.grad is not None
    return {"losses": of_targets.detach(), "states": hidden.grad, **weights}
