"""Which weights belong to which group of rates, and what is refused of patterns and keys."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.wording import Fault, fault, refused
from trainer.config import deepspeed_config
from trainer.config.block import validate
from trainer.config.optimizer.freeze import Freeze
from trainer.config.schema import Lora, Optim, Train
from trainer.models.optimizers import rates, state_nbytes, state_shapes
from trainer.models.optimizers.standstill import Standstill


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})


def optim(**keys: Any) -> Optim:
    return validate(Optim, {"lr": 0.1, **keys})


def found(model: nn.Module, block: Optim, **keys: Any) -> dict[str, rates.TrainedAs]:
    return rates.places(model, block, **{"plus": 1.0, "freeze": (), **keys})


def test_without_new_keys_there_are_the_groups_of_before() -> None:
    model, block = Tower(), optim(weight_decay=0.1)
    groups = rates.param_groups(model, found(model, block), block)
    assert [len(group["params"]) for group in groups] == [5, 4]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert {group["share"] for group in groups} == {1.0}


def test_a_weight_belongs_to_the_first_entry_that_names_it() -> None:
    groups = [{"match": "head.*", "lr": 0.2}, {"match": "*.bias", "weight_decay": 0.5}]
    places = found(Tower(), optim(groups=groups, weight_decay=0.1))
    assert (places["head.bias"].share, places["head.bias"].weight_decay) == (2.0, 0.0)
    assert (places["head.weight"].share, places["head.weight"].weight_decay) == (2.0, 0.1)
    assert (places["layers.0.bias"].share, places["layers.0.bias"].weight_decay) == (1.0, 0.5)


def test_layer_decay_falls_from_block_to_block_and_embeddings_lie_lowest() -> None:
    places = found(Tower(), optim(layer_decay=0.5))
    shares = [places[f"layers.{number}.weight"].share for number in range(3)]
    assert shares == [0.125, 0.25, 0.5]
    assert (places["embed.weight"].share, places["head.bias"].share) == (0.0625, 1.0)


def test_layer_decay_of_a_model_without_blocks_is_refused() -> None:
    with refused("no_blocks_to_decay"):
        found(nn.Linear(2, 2), optim(layer_decay=0.5))


def test_lora_plus_is_of_the_second_matrix() -> None:
    places = found(Adapted(), optim(), plus=16.0)
    assert places["lora_A.default.weight"].share == 1.0
    assert places["lora_B.default.weight"].share == 16.0
    assert validate(Lora, {"plus": 16.0}).plus == 16.0


def test_a_pattern_that_names_nothing_names_what_is_near() -> None:
    groups = [{"match": "*.heads.*", "lr": 0.2}, {"match": "layers.*", "lr": 0.2}]
    with refused("pattern_idle", key="optim.groups", pattern="*.heads.*", near="head."):
        found(Tower(), optim(groups=groups))
    with refused("pattern_idle", key="train.freeze", pattern="embeds.*", near="embed.weight"):
        rates.freeze_whole(Tower(), (Freeze(match="embeds.*"),))


def test_what_never_trains_is_frozen_and_what_thaws_is_not() -> None:
    model = Tower()
    freeze = (Freeze(match="embed.*"), Freeze(match="head.*", until=3))
    assert rates.freeze_whole(model, freeze) == ["embed.weight"]
    assert not model.embed.weight.requires_grad
    assert model.head.weight.requires_grad
    assert list(rates.frozen_by_name(model)) == ["embed.weight"]
    assert "embed.weight" not in found(model, optim())


def test_a_step_in_which_nothing_trains_is_refused() -> None:
    model, block = Tower(), optim()
    named = dict(model.named_parameters())
    freeze = (Freeze(match="head.*", since=2), Freeze(match="*", until=4))
    with refused("freeze_of_everything", step=3):
        Standstill(named, found(model, block, freeze=freeze))
    later = (Freeze(match="head.*", since=4), Freeze(match="*", until=4))
    assert Standstill(named, found(model, block, freeze=later))
    assert not Standstill(named, found(model, block))


@pytest.mark.parametrize(
    ("since", "until", "held"), [(0, 2, [1, 2]), (2, None, [3, 4, 5]), (1, 3, [2, 3])]
)
def test_steps_in_which_weights_stand_still(since: int, until: int | None, held: list[int]) -> None:
    freeze = Freeze(match="*", since=since, until=until)
    assert [step for step in range(1, 6) if freeze.holds(step)] == held


@pytest.mark.parametrize(
    ("wanted", "keys"),
    [
        (fault("optimizer_keys"), {"name": "sgd", "betas": [0.9, 0.99]}),
        (fault("optimizer_keys"), {"name": "lion", "momentum": 0.9}),
        (fault("optimizer_keys"), {"name": "adamw", "nesterov": True}),
        (fault("optimizer_keys"), {"name": "adafactor", "eps": 1e-8}),
        (fault("nesterov_alone"), {"name": "sgd", "nesterov": True}),
        (fault("rate_group_idle"), {"groups": [{"match": "*"}]}),
    ],
)
def test_keys_that_an_optimizer_does_not_read_are_refused(
    wanted: Fault, keys: dict[str, Any]
) -> None:
    with refused(wanted):
        optim(**keys)


def test_a_freeze_without_a_step_is_refused() -> None:
    with refused("freeze_of_no_step"):
        validate(Freeze, {"match": "*", "since": 4, "until": 3})
    with refused("freeze_too_late"):
        freeze = [{"match": "*", "since": 4}]
        validate(Train, {"steps": 4, "global_batch": 1, "micro_batch": 1, "freeze": freeze})


def test_defaults_are_those_of_the_optimizers_papers() -> None:
    assert optim(name="lion").betas == (0.9, 0.99)
    assert (optim(name="sgd").momentum, optim(name="muon").momentum) == (0.0, 0.95)
    assert (optim(name="sgd").nesterov, optim(name="muon").nesterov) == (False, True)
    assert (optim().momentum, optim().betas) == (None, (0.9, 0.999))


@pytest.mark.parametrize(
    ("keys", "nbytes"),
    [
        ({}, 8 * 5000),
        ({"name": "sgd"}, 0),
        ({"name": "sgd", "momentum": 0.9}, 4 * 5000),
        ({"name": "lion"}, 4 * 5000),
        ({"name": "muon"}, 4 * 5000),
        ({"name": "adamw8bit"}, 2 * 5000 + 2 * 4 * 20),
    ],
)
def test_bytes_of_the_state_of_a_matrix(keys: dict[str, Any], nbytes: int) -> None:
    weight = nn.Linear(100, 50, bias=False)
    block = optim(**keys)
    (rule,) = rates.rules(weight, block).values()
    assert state_nbytes(block, weight.weight.shape, rule=rule) == nbytes
    assert all(
        s == weight.weight.shape
        for s in state_shapes(block, weight.weight.shape, rule=rule).values()
    )


def offloaded(block: Optim, **keys: Any) -> dict[str, Any]:
    train = validate(Train, {"steps": 9, "global_batch": 2, "micro_batch": 2, **keys})
    preset = deepspeed_config.read("zero2_offload")
    return deepspeed_config.build(
        preset, train=train, optim=block, world=1, source="test", hidden_size=8
    )


@pytest.mark.parametrize("name", ["muon", "lion", "sgd", "adamw8bit"])
def test_only_adamw_is_stepped_on_the_host(name: str) -> None:
    with refused("optimizer_on_host", name=name):
        offloaded(optim(name=name))


def test_what_stands_still_later_is_refused_beside_an_offloaded_optimizer() -> None:
    with refused("freeze_on_host"):
        offloaded(optim(), freeze=[{"match": "*", "since": 2}])
    assert offloaded(optim(), freeze=[{"match": "*", "until": 2}])
