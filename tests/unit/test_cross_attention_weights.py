"""Reading and loading added weights: our own files, published ones, and files that do not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

from tests.wording import refused, says
from trainer.tasks.cross_attention.config import Layers
from trainer.tasks.cross_attention.decoder.model import CrossAttentionModel
from trainer.tasks.cross_attention.decoder.weights import added_weights, load_added, read_added

OWN = Layers(count=2, stride=1, width=4, heads=2, initialisation="published")
SHARED = OWN.model_copy(update={"shared_weights": True})


def build(layers: Layers, seed: int = 0) -> CrossAttentionModel:
    base = GPTBigCodeForCausalLM(
        GPTBigCodeConfig(n_embd=4, n_layer=3, n_head=2, n_positions=8, vocab_size=10)
    )
    return CrossAttentionModel(base, layers, seed=seed)


def published(model: CrossAttentionModel) -> dict[str, Tensor]:
    """The tensors as a published checkpoint lists them: the base's too, and a shared layer under
    every index.
    """
    tensors = {
        name.removeprefix("base."): tensor for name, tensor in model.base.state_dict().items()
    }
    for index in model.indices:
        layer = model.added_layer(index)
        tensors |= {
            f"cross_attn_layers.{index}.{name}": t.detach() for name, t in layer.named_parameters()
        }
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_added_weights_carry_published_names_and_a_shared_layer_appears_once_under_its_lowest_index() -> (
    None
):
    own, shared = added_weights(build(OWN)), added_weights(build(SHARED))
    assert {name.split(".")[1] for name in own} == {"1", "2"}
    assert {name.split(".")[1] for name in shared} == {"1"}
    assert "cross_attn_layers.1.crossattention.q_attn.weight" in own


@pytest.mark.parametrize("layers", [OWN, SHARED])
def test_what_one_model_holds_another_loads(layers: Layers) -> None:
    source, target = build(layers, seed=1), build(layers, seed=2)
    load_added(target, added_weights(source))
    assert_equal(added_weights(target), added_weights(source))


@pytest.mark.parametrize("layers", [OWN, SHARED])
def test_published_tensors_load_with_aliases_and_without_touching_the_base(layers: Layers) -> None:
    source, target = build(layers, seed=1), build(layers, seed=2)
    before = target.base.lm_head.weight.clone()
    load_added(target, published(source))
    assert_equal(added_weights(target), added_weights(source))
    assert torch.equal(target.base.lm_head.weight, before)


def test_unshared_weights_are_refused_by_a_shared_model() -> None:
    with refused("shared_weights_differ"):
        load_added(build(SHARED), published(build(OWN)))


def test_missing_surplus_and_misshaped_names_are_all_named() -> None:
    tensors = added_weights(build(OWN))
    del tensors["cross_attn_layers.2.ln_1.bias"]
    tensors |= {
        "cross_attn_layers.0.ln_1.bias": torch.ones(4),
        "cross_attn_layers.1.ln_1.bias": torch.ones(5),
    }
    with refused("weights_of_another_shape", name="1.ln_1.bias", got=(5,), wanted=(4,)) as caught:
        load_added(build(OWN), tensors, source="final/")
    says("weights_missing", caught.value, names="2.ln_1.bias")
    says("weights_unexpected", caught.value, names="0.ln_1.bias")


def split_in_two(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    names = sorted(tensors, key=lambda name: name.endswith("bias"))
    return {n: tensors[n] for n in names[: len(names) // 2]}, {
        n: tensors[n] for n in names[len(names) // 2 :]
    }


def write(folder: Path, layout: str, tensors: dict[str, Tensor]) -> None:
    if layout == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    elif layout == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        single = "model.safetensors" if layout == "sharded safetensors" else "pytorch_model.bin"
        stem, suffix = single.split(".")
        weight_map: dict[str, str] = {}
        for k, part in enumerate(split_in_two(tensors), start=1):
            shard = f"{stem}-0000{k}-of-00002.{suffix}"
            if suffix == "bin":
                torch.save(part, folder / shard)
            else:
                save_file(part, folder / shard)
            weight_map |= dict.fromkeys(part, shard)
        (folder / f"{single}.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("layout", ["safetensors", "bin", "sharded safetensors", "sharded bin"])
def test_added_weights_are_read_from_every_published_layout_without_the_base(
    layout: str, tmp_path: Path
) -> None:
    model = build(OWN)
    tensors = published(model)
    tensors.pop("lm_head.weight")  # tied: safetensors files do not list it
    write(tmp_path, layout, tensors)
    assert_equal(read_added(tmp_path), added_weights(model))


def test_a_shard_without_added_weights_need_not_be_there(tmp_path: Path) -> None:
    save_file(added_weights(build(OWN)), tmp_path / "model-00002-of-00002.safetensors")
    weight_map = dict.fromkeys(added_weights(build(OWN)), "model-00002-of-00002.safetensors")
    weight_map["transformer.wte.weight"] = "model-00001-of-00002.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_added(tmp_path).keys() == added_weights(build(OWN)).keys()


def test_a_pickle_that_could_run_code_is_refused(tmp_path: Path) -> None:
    torch.save(
        {"cross_attn_layers.1.ln_1.bias": Path("not a tensor")}, tmp_path / "pytorch_model.bin"
    )
    with refused("pickle_refused"):
        read_added(tmp_path)


def test_a_folder_without_weights_is_refused_with_the_legal_files(tmp_path: Path) -> None:
    with refused("weights_absent", files=re.compile(r"model\.safetensors or .*pytorch_model\.bin")):
        read_added(tmp_path)


def test_weights_without_added_layers_are_refused(tmp_path: Path) -> None:
    save_file({"transformer.wte.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with refused("cross_attention_weights_absent"):
        read_added(tmp_path)
