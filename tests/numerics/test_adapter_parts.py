"""Adapters by parts of a model: attention, mlp and the output layer, in any family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bases import decoder
from tests.wording import refused
from trainer.config.optimizer.lora import Lora, Part
from trainer.models import adapters
from trainer.models.adapters.inside import adapted, layers_of, merge
from trainer.models.adapters.names import is_adapter, layer_of

peft = pytest.importorskip("peft", reason="the optional package peft is not installed")

EVERY: dict[str, dict[Part, set[str]]] = {
    "llama": {
        "attention": {"q_proj", "k_proj", "v_proj", "o_proj"},
        "mlp": {"gate_proj", "up_proj", "down_proj"},
        "output": {"lm_head"},
    },
    "qwen2": {
        "attention": {"q_proj", "k_proj", "v_proj", "o_proj"},
        "mlp": {"gate_proj", "up_proj", "down_proj"},
        "output": {"lm_head"},
    },
    "phi3": {
        "attention": {"qkv_proj", "o_proj"},
        "mlp": {"gate_up_proj", "down_proj"},
        "output": {"lm_head"},
    },
    "gpt_bigcode": {
        "attention": {"c_attn", "attn.c_proj"},
        "mlp": {"c_fc", "mlp.c_proj"},
        "output": {"lm_head"},
    },
}


def names_of(base: Any) -> list[str]:
    return sorted({layer_of(name) for name, _ in base.named_parameters() if is_adapter(name)})


@pytest.mark.parametrize("family", EVERY)
def test_parts_are_the_layers_of_their_names(family: str) -> None:
    for part, ends in EVERY[family].items():
        base = adapted(decoder(family), Lora(r=2, parts=[part]), seed=1)
        names = names_of(base)
        assert names
        for name in names:
            assert any(f".{name}".endswith(f".{end}") for end in ends), name
        assert {
            end for end in ends if any(f".{name}".endswith(f".{end}") for name in names)
        } == ends


def test_an_output_layer_that_shares_its_matrix_gets_adapters_of_its_own(tmp_path: Path) -> None:
    how = Lora(r=2, alpha=4, dropout=0.0, parts=["attention", "output"])
    base: Any = adapted(decoder("qwen2"), how, seed=1)
    torch.manual_seed(3)
    for layer in layers_of(base):
        torch.nn.init.normal_(layer.lora_B["default"].weight)
    ids = torch.randint(2, 96, (2, 9))
    embedded = base.get_input_embeddings()(ids)
    logits = base(input_ids=ids).logits
    weights = {name: p for name, p in base.named_parameters() if is_adapter(name)}
    adapters.write(tmp_path, weights, how, kind="causal_lm", base=None, fingerprint="")

    stock = peft.PeftModel.from_pretrained(decoder("qwen2"), tmp_path)
    torch.testing.assert_close(stock(input_ids=ids).logits, logits)
    torch.testing.assert_close(stock.get_input_embeddings()(ids), embedded)

    read = adapters.read(tmp_path)
    assert read is not None
    again: Any = adapted(decoder("qwen2"), read, seed=2)
    adapters.load(again, tmp_path)
    torch.testing.assert_close(again(input_ids=ids).logits, logits)
    with refused("output_unmerged"):
        merge(again)


def test_parts_that_are_not_there_are_refused() -> None:
    with refused("parts_merged", parts=["output"]):
        adapted(decoder("qwen2"), Lora(parts=["output"], export="merged"), seed=1)
