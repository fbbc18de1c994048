"""The bases of today: a base that layers were added to is still the stock model, packed is padded,
and generation with kept states is recomputation; of every family, through one table.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bases import DECODERS, ENCODERS, SCALED, VOCABULARY, config_of, decoder
from tests.facts import write_facts
from tests.numerics.test_packed_decoder import packed_of, padded_of, stepped
from tests.tolerance import assert_close, assert_same_step
from tests.unit.test_retriever_task import loaded
from trainer.errors import ConfigError
from trainer.models import base_model
from trainer.tasks.causal_lm.task import CausalLM
from trainer.tasks.cross_attention.config import Layers
from trainer.tasks.cross_attention.decoder.backbone import ROTARY
from trainer.tasks.cross_attention.decoder.generation import greedy
from trainer.tasks.cross_attention.decoder.model import CrossAttentionModel
from trainer.tasks.protocol import Places

every_family = pytest.mark.parametrize("name", DECODERS)
# Six products a block, four blocks, sums over the inner width; a gradient passes them twice.
DEPTH = 6 * 4 * 48
LOSS = {"what": "loss", "depth": DEPTH, "margin": 0.1}
GRADIENTS = {"what": "gradients", "depth": 2 * DEPTH, "margin": 0.2}
LENGTHS, CONTEXTS = [9, 3, 12], [[7, 4], [1], [11]]


def operated(name: str, layers: Layers) -> CrossAttentionModel:
    return CrossAttentionModel(decoder(name), layers).eval()


def ids_of(lengths: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def rows() -> tuple[list[list[int]], list[list[list[int]]]]:
    return ids_of(LENGTHS, 3), [ids_of(chunks, 4 + at) for at, chunks in enumerate(CONTEXTS)]


def batch() -> dict[str, Tensor]:
    return padded_of(*rows(), labels_from=[0, 0, 0])


def tensors(names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch().items() if name in names}


@every_family
def test_new_layers_change_neither_the_loss_nor_the_gradients_of_the_base(name: str) -> None:
    model = operated(name, Layers(count=4, stride=1, width=16, heads=2, after=False))
    stock = decoder(name)
    for base in (model.base, stock):
        base.requires_grad_(True)
    given = batch()
    loss = model(**given).loss
    want = CausalLM(stock)(**tensors(("input_ids", "attention_mask", "labels")))["loss"]
    assert_close(loss, want, **LOSS)
    loss.backward()
    want.backward()
    weights = dict(model.base.named_parameters())
    for of, weight in stock.named_parameters():
        if "embed" in of or "wte" in of or "wpe" in of:
            continue  # below the first added layer nothing needs a gradient
        assert_close(weights[of].grad, weight.grad, **GRADIENTS, of=of)


@pytest.mark.parametrize("name", DECODERS | SCALED)
def test_the_loss_of_a_causal_lm_is_the_stock_models_own(name: str) -> None:
    given = tensors(("input_ids", "attention_mask", "labels"))
    stock = decoder(name)
    places = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        want = stock(**given, position_ids=places, num_items_in_batch=torch.tensor(1)).loss
        got = CausalLM(stock)(**given)["loss"]
    assert_close(got, want, **LOSS)


@every_family
def test_a_packed_step_is_the_padded_one(name: str) -> None:
    model = operated(name, Layers(count=2, stride=2, heads=4, initialisation="published"))
    padded = stepped(model, **batch())
    packed = stepped(model, packed=packed_of(*rows(), labels_from=[0, 0, 0]))
    assert_same_step(packed, padded, depth=DEPTH, loss=0.1, gradients=1.5)


@every_family
def test_generation_with_kept_states_is_recomputation(name: str) -> None:
    model = operated(name, Layers(count=2, stride=2, heads=4, initialisation="published"))
    prompts = {name: tensor for name, tensor in batch().items() if name != "labels"}
    for row in range(3):
        given = {name: tensor[row : row + 1] for name, tensor in prompts.items()}
        length = LENGTHS[row]
        ids, mask = given["input_ids"][:, :length], given["attention_mask"][:, :length]
        given |= {"input_ids": ids, "attention_mask": mask}
        made = greedy(model, **given, max_new_tokens=7, pad_token_id=1).tokens_BG
        for _ in range(made.shape[1]):
            logits = model(**(given | {"input_ids": ids, "attention_mask": mask})).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
            mask = torch.ones_like(ids)
        assert torch.equal(made, ids[:, length:]), "beyond a window of 4, too"


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3"])
def test_a_layer_with_the_bases_attention_has_its_shape(name: str) -> None:
    model = operated(name, Layers(count=1, stride=1, base_attention=True))
    ours, theirs = model.added_layer(3).crossattention, model.base.model.layers[3].self_attn
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
        got, want = getattr(ours, projection), getattr(theirs, projection)
        assert got.weight.shape == want.weight.shape, projection


@every_family
def test_a_folder_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    stock = decoder(name)
    stock.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    places = Places(None, tmp_path / "cache", tmp_path)
    again = base_model.load(str(tmp_path / "base"), places, precision="fp32")
    assert type(again) is type(stock)
    for of, weight in stock.named_parameters():
        assert torch.equal(again.get_parameter(of), weight), of


def test_the_table_holds_every_family_that_is_supported() -> None:
    in_table = {config_of(name).model_type for name in DECODERS}
    assert in_table == {"gpt_bigcode", *ROTARY}


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("opt", "got model_type 'opt', want one of 'gpt_bigcode', 'llama'"),
        ("granite", "got model_type 'granite'"),
        ("mamba", "got model_type 'mamba'"),
    ],
)
def test_another_family_is_refused_by_name(family: str, said: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **small)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=re.escape(said)):
        CrossAttentionModel(base, Layers(count=1, stride=1))


# Encoders
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


@pytest.mark.parametrize("name", ENCODERS)
def test_a_retriever_embeds_as_the_stock_encoder_does(name: str, facts: Path) -> None:
    """Stock: each text alone, without a pad, its states pooled by hand."""
    family, values = ENCODERS[name]
    is_decoder = name in DECODERS
    pooling = "eos" if is_decoder else "mean"
    changes: dict[str, Any] = {
        "base": {"config": {**values, "model_type": family, "vocab_size": 384}, "seed": 1},
        "encoder": {"pooling": pooling, "projection": None, "normalize": True},
        "data": {"append_eos": is_decoder, "query_prefix": "find: " if is_decoder else ""},
    }
    task = loaded(facts, **changes)
    model = task.model().eval()
    texts = task.ids([{"text": "where is the key"}, {"text": "map"}], side="query")
    assert len(texts[0]) != len(texts[1])
    with torch.no_grad():
        got = task.embed(model, texts, side="query")
        for vector, ids in zip(got, texts, strict=True):
            batch = torch.tensor([ids])
            states = model.query_model(input_ids=batch, attention_mask=torch.ones_like(batch))
            states_LD = states.last_hidden_state[0]
            pooled = states_LD[-1] if is_decoder else states_LD.mean(0)
            want = torch.nn.functional.normalize(pooled, dim=0)
            assert_close(vector, want, what="vectors", depth=DEPTH, margin=0.4)
