"""Operations of a driven run against plain torch: stock forwards of one row at a time, the formulas
of the losses, and torch.optim.AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.driven_runs import (
    VOCABULARY,
    Step,
    create,
    drive,
    driven_values,
    folder_of,
    passed,
    results_of,
    rows_of_seed,
    step,
    write_log,
)
from tests.facts import write_facts
from tests.ranks import run_on_ranks
from trainer import tasks
from trainer.models.adapters.names import in_file
from trainer.operations.rows import DrivenRow, outputs_of, rows_of
from trainer.protocol.task import Places

CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
# the parameters of each step: eps above the noise of small gradients, which Adam would magnify
EVERY_ADAM: list[dict[str, Any]] = [
    {"eps": 1e-3},
    {"eps": 1e-3, "weight_decay": 0.1, "learning_rate": 0.01},
    {"eps": 1e-2, "grad_clip_norm": 0.5},
    {"eps": 1e-3, "beta1": 0.8, "beta2": 0.99},
    {"eps": 1e-3, "beta1": 0.5, "grad_clip_norm": 0.1, "weight_decay": 0.2},
]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"), train=13, valid=4)


def plain_loss(
    name: str, logp: Tensor, row: Mapping[str, Tensor], config: Mapping[str, Any]
) -> Tensor:
    """() the loss of the targets of a row; logp: their log-probabilities."""
    if name == "cross_entropy":
        return -(logp * row["weights"]).sum()
    old, a = row["logprobs"], row["advantages"]
    ratio, beta = torch.exp(logp - old), config.get("beta", 0.05)
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    clipped = ratio.clamp(low, high)
    return {
        "importance_sampling": -(ratio * a).sum(),
        "ppo": -torch.min(ratio * a, clipped * a).sum(),
        "cispo": -(clipped.detach() * logp * a).sum(),
        "dro": -(logp * a - beta / 2 * (logp - old) ** 2).sum(),
    }[name]


def plain_logps(base: Any, row: DrivenRow) -> Tensor:
    """(T,) or (T, K) the log-probabilities of a row's targets, by the stock forward."""
    logits = base(input_ids=torch.from_numpy(row.tokens).long()[None]).logits[0]
    targets = torch.from_numpy(row.inputs["target_tokens"])
    logps = logits.log_softmax(-1).gather(1, targets.reshape(len(targets), -1))
    return logps.reshape(targets.shape)


def plain_run(values: dict[str, Any], steps: list[Step]) -> tuple[list[Any], dict[str, Tensor]]:
    """What each operation gives, (loss, log-probabilities by row), and the adapters at the end."""
    torch.manual_seed(0)
    base: Any = (
        tasks.load(tasks.parse(values), Places(None, Path("unread"), Path("unread"))).model().base
    )
    weights = {name: p for name, p in base.named_parameters() if p.requires_grad}
    optimizer, results = torch.optim.AdamW(weights.values()), []
    for kind, fields, payload in steps:
        if kind == "optim_step":
            clip = fields["grad_clip_norm"]
            torch.nn.utils.clip_grad_norm_(weights.values(), clip or float("inf"))
            betas = (fields["beta1"], fields["beta2"])
            rates = {"lr": fields["learning_rate"], "weight_decay": fields["weight_decay"]}
            optimizer.param_groups[0].update(betas=betas, eps=fields["eps"], **rates)
            optimizer.step()
            optimizer.zero_grad()
        if kind != "forward_backward":
            results.append(None)
            continue
        rows = rows_of(payload, fields["inputs"])
        logps = [plain_logps(base, row) for row in rows]
        inputs = [{k: torch.from_numpy(v) for k, v in row.inputs.items()} for row in rows]
        config = fields.get("loss_fn_config", {})
        pairs = zip(logps, inputs, strict=True)
        losses = [plain_loss(fields["loss_fn"], logp, one, config) for logp, one in pairs]
        loss = torch.stack(losses).sum()
        loss.backward()
        results.append((float(loss), [one.detach().numpy() for one in logps]))
    return results, {in_file(name): weight.detach() for name, weight in weights.items()}


def sampled_rows(seed: int) -> list[DrivenRow]:
    random = np.random.default_rng(seed)
    rows: list[DrivenRow] = []
    for row in rows_of_seed(seed, 4):
        count = len(row.tokens)
        old = (-6.0 + 0.4 * random.standard_normal(count)).astype(np.float32)
        advantages = random.standard_normal(count).astype(np.float32)
        inputs = {"target_tokens": row.inputs["target_tokens"], "logprobs": old}
        rows.append(DrivenRow(row.tokens, {**inputs, "advantages": advantages}))
    return rows


def rows_with_many_targets(seed: int, k: int = 3) -> list[DrivenRow]:
    random = np.random.default_rng(seed)
    rows: list[DrivenRow] = []
    for row in rows_of_seed(seed, 2):
        shape = (len(row.tokens), k)
        targets = random.integers(2, VOCABULARY, shape)
        weights = random.random(shape, np.float32)
        rows.append(DrivenRow(row.tokens, {"target_tokens": targets, "weights": weights}))
    return rows


def cross_entropy_steps(values: dict[str, Any]) -> list[Step]:
    steps = [create(values)]
    for number, adam in enumerate(EVERY_ADAM):
        steps += [passed(rows_of_seed(2 * number, 5)), passed(rows_of_seed(2 * number + 1, 1))]
        steps.append(step(**adam))
    return steps


def policy_steps(values: dict[str, Any]) -> list[Step]:
    clip = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}
    return [
        create(values),
        passed(sampled_rows(1), loss_fn="importance_sampling"),
        step(eps=1e-3),
        passed(sampled_rows(2), loss_fn="ppo"),
        passed(sampled_rows(3), loss_fn="ppo", loss_fn_config=clip),
        step(eps=1e-3),
        passed(sampled_rows(4), loss_fn="cispo", loss_fn_config=clip),
        step(eps=1e-3),
        passed(sampled_rows(5), loss_fn="dro", loss_fn_config={"beta": 0.3}),
        step(eps=1e-3),
        passed(rows_with_many_targets(6)),
        step(eps=1e-3),
    ]


@pytest.mark.parametrize(
    ("kind", "world", "stage"),
    [
        ("cross_entropy", 2, 2),
        *(
            pytest.param("cross_entropy", world, stage, marks=pytest.mark.long)
            for world, stage in ((1, 0), (1, 2), (2, 0), (2, 1), (2, 3), (3, 3))
        ),
        *(pytest.param("policy", 2, stage, marks=pytest.mark.long) for stage in (0, 2, 3)),
    ],
)
def test_operations_compute_what_plain_torch_computes(
    kind: str, world: int, stage: int, facts: Path, tmp_path: Path
) -> None:
    values = driven_values(facts, world=world)
    steps = {"cross_entropy": cross_entropy_steps, "policy": policy_steps}[kind](values)
    run = folder_of(values, tmp_path)
    write_log(run, [*steps, ("end", {}, b"")])
    run_on_ranks(world, drive, values, facts, tmp_path, stage)
    wanted, weights = plain_run(values, steps)
    for result, want in zip(results_of(run), wanted, strict=False):
        assert result.error is None
        if want is None:
            continue
        loss, logps = want
        assert result.fields["metrics"]["loss:sum"] == pytest.approx(loss, rel=1e-6, abs=1e-5)
        for got, one in zip(outputs_of(result.payload)["logprobs"], logps, strict=True):
            np.testing.assert_allclose(got, one.reshape(-1), rtol=1e-6, atol=3e-6)
    trained = load_file(run / "final" / "adapter_model.safetensors")
    assert trained.keys() == weights.keys()
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, weights[name], **CLOSE)
