"""A tiny cross-attention model with random weights, a batch for it, and what the tests ask
of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    LlamaConfig,
    MistralConfig,
)

from trainer.tasks.cross_attention.config import Layers
from trainer.tasks.cross_attention.decoder.model import CrossAttentionModel

Batch = dict[str, Any]
NUM_BLOCKS, WIDTH, VOCABULARY = 5, 24, 40
# Margins, as tests/tolerance.py means them, for these models as deep as depth_of(model) says.
STEP: dict[str, Any] = {"loss": 0.2, "gradients": 5.0}
LOGITS = {"what": "logits", "margin": 0.6}
LAYOUTS = {
    "after": Layers(count=2, stride=2, width=16, heads=2),
    "before": Layers(count=2, stride=2, width=16, heads=2, after=False),
    "shared": Layers(count=3, stride=1, shared_weights=True, shared_projections=True, after=False),
    "skip": Layers(count=2, stride=1, skip=True),
}
every_layout = pytest.mark.parametrize("layers", LAYOUTS.values(), ids=LAYOUTS.keys())


def build(
    layers: Layers, *, dropout: float = 0.0, randomise: bool = True, **base: Any
) -> CrossAttentionModel:
    """A tiny model in evaluation mode; every weight, biases and norms too, is random unless
    `randomise` is False.
    """
    sizes: dict[str, Any] = {"n_embd": WIDTH, "n_layer": NUM_BLOCKS, "n_head": 4, "n_positions": 48}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    dropouts: dict[str, Any] = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = GPTBigCodeConfig(vocab_size=VOCABULARY, **(sizes | dropouts | base))
        model = CrossAttentionModel(GPTBigCodeForCausalLM(config), layers).eval()
        if randomise:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.normal_(
                        mean=float("ln_" in name and name.endswith("weight")), std=0.3
                    )
    return model


ROTARY: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 4, "rope_theta": 500.0},
}
ROTARY_LAYOUTS = {
    "after": Layers(count=2, stride=2, width=16, heads=2),
    "grouped": Layers(count=2, stride=2, heads=6, kv_heads=3, attention_bias=True, skip=True),
    "before_shared": Layers(
        count=3, stride=1, shared_weights=True, after=False, width=16, heads=4, kv_heads=2
    ),
    "as_base": Layers(count=2, stride=1, width=8, base_attention=True),
}
every_rotary_layout = pytest.mark.parametrize(
    "layers", ROTARY_LAYOUTS.values(), ids=ROTARY_LAYOUTS.keys()
)
every_rotary_family = pytest.mark.parametrize("family", ROTARY)


def build_rotary(
    layers: Layers, family: str = "llama", *, randomise: bool = True
) -> CrossAttentionModel:
    """The same with a Llama or Mistral base."""
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "num_hidden_layers": NUM_BLOCKS,
        "num_attention_heads": 4,
    }
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 48, "vocab_size": VOCABULARY}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = {"llama": LlamaConfig, "mistral": MistralConfig}[family](
            **(sizes | ROTARY[family])
        )
        model = CrossAttentionModel(AutoModelForCausalLM.from_config(config), layers).eval()
        if randomise:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    is_norm = name.endswith("weight") and ("ln_" in name or "norm" in name)
                    parameter.normal_(mean=float(is_norm), std=0.3)
    return model


def inputs(*, rows: int = 3, seed: int = 2) -> Batch:
    """Rows of unequal length, padded on the right, every token but the first labelled, with a
    context each.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, 8), generator=generator)
    context = torch.randint(1, VOCABULARY, (rows, 11), generator=generator)
    mask = (torch.arange(8) < torch.tensor([8, 5, 6])[:rows, None]).long()
    context_mask = (torch.arange(11) < torch.tensor([7, 11, 9])[:rows, None]).long()
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "labels": (ids * mask).masked_fill(mask == 0, -100),
        "context_input_ids": context * context_mask,
        "context_attention_mask": context_mask,
    }


def without(batch: Batch, *names: str) -> Batch:
    return {name: tensor for name, tensor in batch.items() if name not in names}


def gradients(model: CrossAttentionModel, **batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@contextmanager
def counted_calls(model: CrossAttentionModel) -> Iterator[Counter[str]]:
    """How often each submodule's forward runs inside, recomputation included."""
    calls: Counter[str] = Counter()
    handles = [
        m.register_forward_pre_hook(lambda *_, n=name: calls.update([n]))
        for name, m in model.named_modules()
    ]
    yield calls
    for handle in handles:
        handle.remove()


def padded_left(batch: Batch) -> Batch:
    """The same rows with their pads in front."""
    moved: dict[str, Tensor] = {}
    for name, tensor in batch.items():
        mask = batch["context_attention_mask" if name.startswith("context") else "attention_mask"]
        order = mask.argsort(dim=1, stable=True)
        moved[name] = tensor.gather(1, order)
    moved["labels"] = moved["labels"].clone()
    moved["labels"][
        torch.arange(len(moved["labels"])), moved["attention_mask"].argmax(dim=1)
    ] = -100  # after a pad: no question
    return moved


def recomputed(model: CrossAttentionModel, batch: Batch, max_new_tokens: int) -> Tensor:
    """Greedy decoding that runs everything again for every token, and never stops."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    for _ in range(max_new_tokens):
        logits = model(**(batch | {"input_ids": ids, "attention_mask": mask})).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return ids[:, -max_new_tokens:]
