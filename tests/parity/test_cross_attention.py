"""The rebuilt model gives the recorded numbers of the published one: every logit, hidden state,
gradient and token.

The recorded loss is a mean over labelled tokens; ours is their sum, so it is divided here.

fp32: tests/tolerance.py says what rounding may do. The depth of a state is that of the matrix
products before it: a sum over a block's width for each of its products, block after block. A
gradient has passed twice as many.

bf16: one rounding is off by at most 2^-9 of a number. Along the residual stream of n blocks and k
added layers about m = 2 (n + k) + 2 roundings pile up like a random walk, and each of the two
implementations has its own, so their relative distance (Frobenius norm) is about sqrt(2 m) 2^-9;
BF16_MARGIN times that is allowed. Gradients pass the stream twice and end in a sum over tokens,
hence twice as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from tests import tolerance
from tests.parity.cross_attention_recordings import Batch, Case, batches, load_base
from tests.parity.recordings import known
from trainer.tasks.cross_attention.config import Layers
from trainer.tasks.cross_attention.decoder.attention import positions
from trainer.tasks.cross_attention.decoder.generation import greedy
from trainer.tasks.cross_attention.decoder.model import CrossAttentionModel

# matrix products of a block: three around attention's two, and two of the feed-forward network
PRODUCTS = 6
STATE, LOSS, GRADIENT, NORM = 0.5, 0.06, 1.5, 0.1  # margins, as tests/tolerance.py means them
# Of the six steps, where AdamW passes rounding on: it divides by |gradient| + 1e-6, so that the
# rounding of a gradient near 0, 1e-8, moves a weight by up to a
# hundredth of the rate (1.9e-6 in all was seen).
STEP_LOSS, STEP_NORM, WEIGHT = 0.5, 2.0, 0.005
FIRST_LOSS = 1e-5  # of the first window, by which a reading of the stored batches is known
BF16_MARGIN = 2.0
BF16_STEP = 2.0**-9


@dataclass(frozen=True)
class Replay:
    """One recorded forward and backward, run again."""

    model: CrossAttentionModel
    loss: float
    logits: Tensor
    states: dict[str, Tensor]
    gradients: dict[str, Tensor]
    rows: Tensor  # (B, T) bool: the recorded rows that mean something


@lru_cache(maxsize=1)  # the tests of one case run one after the other
def replay(case: Case) -> Replay:
    model = case.model()
    call = case.call(batches(case.inputs)[0])
    labels = call.pop("labels")
    loss = (
        model(**call, labels=labels, key_masks=case.key_masks).loss / (labels[:, 1:] != -100).sum()
    )
    loss.backward()
    states: dict[str, Tensor] = {}
    with torch.no_grad():
        logits = model(**call, key_masks=case.key_masks, record=states).logits
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Replay(model, loss.item(), logits, states, gradients, call["attention_mask"].bool())


def depth(case: Case, *, passes: int = 1) -> int:
    """Operations on the way through the base and the added layers."""
    return passes * PRODUCTS * sum(_widths(case.base_folder, case.layers))


def _widths(base: Path, layers: Layers | None = None) -> list[int]:
    """The width of every block and added layer."""
    config = AutoConfig.from_pretrained(base)
    added = layers.count if layers else 0
    return [config.hidden_size] * (config.num_hidden_layers + added)


def assert_close(
    got: Tensor,
    want: Tensor,
    margin: float,
    case: Case,
    *,
    what: str,
    of: str = "",
    passes: int = 1,
    scale: float = 0.0,
) -> None:
    """As rounding allows in fp32, or the whole within the bf16 distance of the module's
    docstring.
    """
    got, want = known(got, want)
    if case.dtype == torch.float32:
        scale = scale or want.abs().max().item()
        inputs = {"depth": depth(case, passes=passes), "margin": margin, "scale": scale}
        tolerance.assert_close(got, want, what=what, of=of, **inputs)
        return
    got, want = got.float(), want.float()
    distance, bound = ((got - want).norm() / want.norm()).item(), passes * bf16_distance(case)
    tolerance.note(f"{what} in bf16", of, distance, bound)
    assert distance <= bound, of


def assert_near(
    got: float, want: float, margin: float, case: Case, *, what: str, passes: int = 1
) -> None:
    """The same of a number."""
    assert_close(torch.tensor(got), torch.tensor(want), margin, case, what=what, passes=passes)


def bf16_distance(case: Case) -> float:
    num_roundings = 2 * (len(case.model().backbone.blocks) + case.layers.count) + 2
    return BF16_MARGIN * math.sqrt(2 * num_roundings) * BF16_STEP


def is_dead(name: str) -> bool:
    """The key bias: softmax does not see it, so its gradient is rounding noise around 0."""
    return name.endswith("crossattention.k_attn.bias")


def test_logits_equal_the_recorded_ones(forward_case: Case) -> None:
    ours = replay(forward_case)
    assert_close(
        ours.logits[ours.rows],
        forward_case.outputs["logits"][ours.rows],
        STATE,
        forward_case,
        what="logits",
    )


def test_loss_equals_the_recorded_one(forward_case: Case) -> None:
    assert_near(
        replay(forward_case).loss, forward_case.meta["loss"], LOSS, forward_case, what="loss"
    )


def test_hidden_states_equal_the_recorded_ones(forward_case: Case) -> None:
    ours = replay(forward_case)
    recorded = {name: t for name, t in forward_case.outputs.items() if "_out." in name}
    if (
        forward_case.layers.shared_weights
    ):  # hooks on one shared module: its last use stands under every index
        last = str(ours.model.indices[-1])
        recorded = {
            name: t
            for name, t in recorded.items()
            if "cross_" not in name or name.endswith(f".{last}")
        }
    assert recorded.keys() <= ours.states.keys()
    for name, want in recorded.items():
        assert_close(
            ours.states[name][ours.rows],
            want[ours.rows],
            STATE,
            forward_case,
            what="states",
            of=name,
        )


def test_gradients_equal_the_recorded_ones(forward_case: Case) -> None:
    ours = replay(forward_case)
    recorded = {
        name.removeprefix("grad."): t
        for name, t in forward_case.outputs.items()
        if name.startswith("grad.")
    }
    assert recorded.keys() == ours.gradients.keys()
    for name, want in recorded.items():
        if not is_dead(name):
            inputs = {"what": "gradients", "of": name, "passes": 2}
            assert_close(ours.gradients[name], want, GRADIENT, forward_case, **inputs)


def test_global_gradient_norm_equals_the_recorded_one(forward_case: Case) -> None:
    norms = [gradient.float().norm() for gradient in replay(forward_case).gradients.values()]
    norm, want = torch.stack(norms).norm().item(), forward_case.meta["global_grad_norm"]
    assert_near(norm, want, NORM, forward_case, what="norm", passes=2)


def test_no_frozen_parameter_has_a_gradient(forward_case: Case) -> None:
    model = replay(forward_case).model
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {
        name for name, _ in model.named_parameters() if name.startswith("cross_attn_layers.")
    }


def test_parameter_counts_and_layer_indices_equal_the_recorded_ones(forward_case: Case) -> None:
    model, meta = replay(forward_case).model, forward_case.meta
    assert model.indices == meta["cross_layer_indices"]
    assert sum(p.numel() for p in model.parameters()) == meta["n_total"]
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == meta["n_trainable"]


def test_encoded_contexts_equal_the_recorded_ones(forward_case: Case) -> None:
    file = forward_case.folder / "encoded.safetensors"
    if not file.is_file():
        pytest.skip("the case records no encoded context")
    call = forward_case.call(batches(forward_case.inputs)[0])
    states, mask = forward_case.model().encode(
        call["context_input_ids"], call["context_attention_mask"]
    )
    recorded = load_file(file)
    assert torch.equal(mask, recorded["encoder_attention_mask"].bool())
    assert_close(
        states[mask], recorded["encoder_hidden_states"][mask], STATE, forward_case, what="encoded"
    )


def test_greedy_generation_gives_the_recorded_tokens_and_logits(generation_case: Case) -> None:
    call = generation_case.call(generation_case.inputs)
    sequences, want = generation_case.outputs["sequences"], generation_case.outputs["step_logits"]
    model = generation_case.model().eval()
    made = greedy(model, **call, max_new_tokens=want.shape[1], pad_token_id=0, return_logits=True)
    assert torch.equal(made.tokens_BG, sequences[:, -want.shape[1] :])
    assert made.logits_BGV is not None
    assert_close(made.logits_BGV, want, STATE, generation_case, what="logits")


def test_the_stock_base_gives_the_recorded_numbers_when_positions_are_passed(
    base_folder: Path,
) -> None:
    recorded = load_file(base_folder / "base_io.safetensors")
    mask = recorded["attention_mask"]
    base = load_base(base_folder).eval()
    with torch.no_grad():
        out: Any = base(
            recorded["input_ids"],
            attention_mask=mask,
            position_ids=positions(mask),
            labels=recorded["labels"],
            output_hidden_states=True,
        )
    rows = mask.bool()
    inputs = {"depth": PRODUCTS * sum(_widths(base_folder)), "margin": STATE}
    logits = known(out.logits[rows], recorded["logits"][rows])
    tolerance.assert_close(*logits, what="logits", **inputs)
    last = known(out.hidden_states[-1][rows], recorded["last_hidden_state"][rows])
    tolerance.assert_close(*last, what="states", **inputs)
    tolerance.assert_close(out.loss, recorded["loss"].squeeze(), what="loss", **inputs)


# Six optimizer steps
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What one optimizer step logs."""

    lr: float
    loss: float
    grad_norm: float


def logged_steps(meta: dict[str, Any]) -> list[Step]:
    """meta.json's log, a list of entries or a dictionary of lists, whatever its keys are called
    exactly.
    """
    log = meta["log"]
    if isinstance(log, dict):
        log = [dict(zip(log, values, strict=True)) for values in zip(*log.values(), strict=True)]
    entries = [{_quantity(key): value for key, value in entry.items()} for entry in log]
    return [Step(entry["lr"], entry["loss"], entry["norm"]) for entry in entries]


def _quantity(key: str) -> str:
    return "lr" if key in ("lr", "learning_rate") else "norm" if "norm" in key else key


def windows(case: Case, num_steps: int, accumulation: int = 2) -> list[list[list[Batch]]]:
    """The ways in which the stored batches can make up windows; the recorded first loss tells which
    one it was.
    """
    stored = [case.call(batch) for batch in batches(case.inputs)]
    ways = [
        [
            [stored[(k * accumulation + a) % len(stored)] for a in range(accumulation)]
            for k in range(num_steps)
        ]
    ]
    ways += [[[stored[k % len(stored)]] * accumulation for k in range(num_steps)]]
    for parts in (accumulation, accumulation * num_steps):
        if len(stored) == 1 and len(stored[0]["input_ids"]) % parts == 0:
            pieces = [
                {name: value.chunk(parts)[k] for name, value in stored[0].items()}
                for k in range(parts)
            ]
            ways += [
                [
                    [pieces[(k * accumulation + a) % parts] for a in range(accumulation)]
                    for k in range(num_steps)
                ]
            ]
    if len(stored) == num_steps and len(stored[0]["input_ids"]) % accumulation == 0:
        halves = [
            [{n: v.chunk(accumulation)[a] for n, v in b.items()} for a in range(accumulation)]
            for b in stored
        ]
        ways += [halves]
    return ways


def mean_loss(model: CrossAttentionModel, batch: Batch) -> Tensor:
    return model(**batch).loss / (batch["labels"][:, 1:] != -100).sum()


def first_loss(model: CrossAttentionModel, window: list[Batch]) -> float:
    with torch.no_grad():
        return sum(mean_loss(model, batch).item() for batch in window) / len(window)


def learning_rate(step: int) -> float:
    """Cosine over 10 steps after 1 step of warm-up from 0, peak 5e-4."""
    return 5e-4 * (step if step < 1 else 0.5 * (1 + math.cos(math.pi * (step - 1) / 9)))


def train(model: CrossAttentionModel, recipe: list[list[Batch]]) -> list[Step]:
    """AdamW as recorded: betas 0.9/0.95, eps 1e-6, decay 1e-3 on matrices only, clip 1.0, mean of
    micro-batch means.
    """
    moving = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in moving if p.ndim >= 2], "weight_decay": 1e-3},
        {"params": [p for p in moving if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-6)
    steps: list[Step] = []
    for k, window in enumerate(recipe):
        losses = [mean_loss(model, batch) / len(window) for batch in window]
        torch.stack(losses).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(moving, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(k)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(Step(learning_rate(k), sum(loss.item() for loss in losses), norm.item()))
    return steps


def test_six_optimizer_steps_end_at_the_recorded_weights(training_case: Case) -> None:
    want = logged_steps(training_case.meta)
    model = training_case.model()
    fitting = [
        way
        for way in windows(training_case, len(want))
        if abs(first_loss(model, way[0]) - want[0].loss) <= FIRST_LOSS
    ]
    assert fitting, "no reading of the stored batches gives the first recorded loss"
    got = train(model, fitting[0])
    shifted = [
        learning_rate(k + 1) for k in range(len(want))
    ]  # logged after the scheduler moved on
    assert [step.lr for step in want] in (
        [pytest.approx(s.lr) for s in got],
        [pytest.approx(lr) for lr in shifted],
    )
    for ours, theirs in zip(got, want, strict=True):
        assert_near(ours.loss, theirs.loss, STEP_LOSS, training_case, what="loss")
        assert_near(
            ours.grad_norm, theirs.grad_norm, STEP_NORM, training_case, what="norm", passes=2
        )
    parameters = dict(model.named_parameters())
    finals = {
        n.removeprefix("final."): t
        for n, t in training_case.outputs.items()
        if n.startswith("final.")
    }
    moving = [name for name, p in parameters.items() if p.requires_grad and not is_dead(name)]
    assert finals.keys() >= set(moving)
    way = sum(step.lr for step in got)  # as far as AdamW moves a weight at most
    for name in moving:
        distance = float((parameters[name] - finals[name]).abs().max())
        tolerance.note("weights", name, distance, WEIGHT * way)
        assert distance <= WEIGHT * way, name
