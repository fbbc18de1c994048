"""Freezing, counting and loading, shared and partitioned parameters included."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.wording import refused, says
from trainer.models.frozen.freezing import freeze_except, load_into, trainable_report


class Tied(nn.Module):
    """Two linears around one matrix, and a norm with saved buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)


def trainable_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, 7) for name, tensor in model.state_dict().items()}


def test_a_predicate_chooses_what_trains_and_unfreezes_it() -> None:
    model = Tied().requires_grad_(False)
    freeze_except(model, lambda name: name.endswith("bias"))
    assert trainable_names(model) == {"first.bias", "second.bias", "norm.bias"}


def test_modules_choose_what_trains() -> None:
    model = Tied()
    freeze_except(model, [model.norm])
    assert trainable_names(model) == {"norm.weight", "norm.bias"}


def test_a_shared_parameter_trains_when_any_of_its_names_is_chosen() -> None:
    model = Tied()
    freeze_except(model, lambda name: name == "second.weight")
    assert trainable_names(model) == {"first.weight"}


def test_choosing_nothing_is_refused() -> None:
    with refused("nothing_to_train", count=5, model="Tied"):
        freeze_except(Tied(), lambda name: "cross" in name)


def test_the_report_counts_a_shared_parameter_once() -> None:
    model = Tied()
    freeze_except(model, [model.first])
    report = trainable_report(model)
    assert (report.total, report.trainable) == (9 + 3 + 3 + 6, 12)
    assert report.names == ("first.weight", "first.bias")
    assert report.share == 12 / 21
    assert str(report) == "12 of 21 parameters train (57.14%), in 2 tensors"


def test_the_report_counts_partitioned_parameters_at_their_full_size() -> None:
    model = nn.Linear(4, 2)
    for parameter in model.parameters():
        parameter.ds_numel = parameter.numel()  # pyright: ignore  (what ZeRO-3 leaves behind)
        parameter.data = torch.empty(0)
    assert trainable_report(model).total == 10


def test_the_share_of_an_empty_model_is_zero() -> None:
    assert trainable_report(nn.Identity()).share == 0.0


def test_loading_copies_parameters_and_saved_buffers_in_the_models_dtype() -> None:
    model = Tied().to(torch.float64)
    load_into(
        model, {name: tensor.float() for name, tensor in tensors_of(Tied()).items()}, source="test"
    )
    assert all((tensor == 7).all() for tensor in model.state_dict().values())
    assert model.first.weight.dtype == torch.float64


def test_loading_wants_a_shared_tensor_under_one_of_its_names_only() -> None:
    model, tensors = Tied(), tensors_of(Tied())
    del tensors["first.weight"]
    load_into(model, tensors, source="test")
    assert (model.first.weight == 7).all()


def test_loading_names_every_missing_unexpected_and_misshaped_tensor_at_once_and_changes_nothing() -> (
    None
):
    model, tensors = Tied(), tensors_of(Tied())
    before = model.norm.weight.clone()
    del tensors["first.bias"]
    tensors |= {"third.weight": torch.ones(1), "second.bias": torch.ones(2)}
    with refused("weights_unfit", source="a file", model="Tied") as caught:
        load_into(model, tensors, source="a file")
    says("weights_missing", caught.value, names="first.bias")
    says("weights_unexpected", caught.value, names="third.weight")
    says("weights_of_another_shape", caught.value, name="second.bias", got=(2,), wanted=(3,))
    assert torch.equal(model.norm.weight, before)


def test_loading_refuses_different_tensors_for_one_shared_parameter() -> None:
    tensors = tensors_of(Tied()) | {"second.weight": torch.zeros(3, 3)}
    with refused("weights_of_two_values", names="first.weight and second.weight"):
        load_into(Tied(), tensors, source="test")
