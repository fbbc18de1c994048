"""The bases of today: a base that layers were added to is still the stock model, packed is padded,
and generation with kept states is recomputation; of every family, through one table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests import families
from tests.bases import (
    DECODERS,
    ENCODERS,
    SEQ2SEQ,
    VERIFIERS,
    VOCABULARY,
    base_of,
    config_of,
    decoder,
)
from tests.facts import experiment, write_facts
from tests.families import DEPTH, END, LENGTHS, ids_of, rows
from tests.numerics.test_packed_decoder import packed_of, padded_of, stepped
from tests.tolerance import assert_close, assert_equal_step, assert_same_step
from tests.unit.test_retriever_task import loaded
from tests.wording import refused
from trainer import tasks
from trainer.config.schema import RandomBase
from trainer.data.padding import pad_right
from trainer.models import base_model
from trainer.models.families import DECODERS as DECODER_TYPES
from trainer.models.families import T5 as T5_TYPES
from trainer.protocol.task import Places
from trainer.tasks.causal_lm.task import CausalLM
from trainer.tasks.cross_attention.config import Layers
from trainer.tasks.cross_attention.decoder.generation import greedy
from trainer.tasks.cross_attention.decoder.model import CrossAttentionModel
from trainer.tasks.vera.model import Verifier, read_by

every_family = pytest.mark.parametrize("name", DECODERS)
LOSS = {"what": "loss", "depth": DEPTH, "margin": 0.1}
COMPARED = {"what": "compared", "depth": DEPTH, "margin": 1.0}
GRADIENTS = {"what": "gradients", "depth": 2 * DEPTH, "margin": 0.2}


def operated(name: str, layers: Layers) -> CrossAttentionModel:
    return CrossAttentionModel(decoder(name), layers).eval()


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
    want = CausalLM(stock)(**families.padded_for_causal_lm())["loss"]
    assert_close(loss, want, **LOSS)
    loss.backward()
    want.backward()
    weights = dict(model.base.named_parameters())
    for of, weight in stock.named_parameters():
        if "embed" in of or "wte" in of or "wpe" in of:
            continue  # below the first added layer nothing needs a gradient
        assert_close(weights[of].grad, weight.grad, **GRADIENTS, of=of)


def every_task() -> Iterator[tuple[str, str]]:
    for task, names in families.supported().items():
        yield from ((task, name) for name in names)


@pytest.mark.parametrize(("task", "name"), every_task())
def test_a_tasks_model_is_the_stock_one(task: str, name: str) -> None:
    assert_close(*families.with_stock(task, name), **COMPARED)


@pytest.mark.parametrize(("task", "name"), every_task())
def test_packed_rows_are_padded_ones_and_pads_change_nothing(task: str, name: str) -> None:
    assert_close(*families.with_padded(task, name), **COMPARED)


@every_family
def test_a_packed_step_is_the_padded_one(name: str) -> None:
    model = operated(name, Layers(count=2, stride=2, heads=4, initialisation="published"))
    padded = stepped(model, **batch())
    packed = stepped(model, packed=packed_of(*rows(), labels_from=[0, 0, 0]))
    assert_same_step(packed, padded, depth=DEPTH, loss=0.1, gradients=1.5)


@pytest.mark.parametrize("name", families.supported()["causal_lm"])
def test_a_language_models_step_on_a_stream_is_the_padded_one(name: str) -> None:
    model = families.streaming(families.base("causal_lm", name))
    steps = []
    for given in (families.streams_for_causal_lm(), families.padded_for_causal_lm()):
        model.zero_grad()
        loss = model(**given)["loss"] / len(given["scored"])
        loss.backward()
        gradients = {of: x.grad.clone() for of, x in model.named_parameters() if x.grad is not None}
        steps.append((float(loss.detach()), gradients))
    assert_same_step(*steps, depth=DEPTH, loss=0.1, gradients=3.0)


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
    assert {config_of(name).model_type for name in DECODERS} == set(DECODER_TYPES)
    assert {family for family, _ in VERIFIERS.values()} == {*T5_TYPES, *DECODER_TYPES}


@pytest.mark.parametrize("family", ["opt", "granite", "mamba"])
def test_another_family_is_refused_by_name(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **small)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config)
    with refused("family_unknown", family=family, families=re.compile("'gpt_bigcode', 'llama'.*")):
        CrossAttentionModel(base, Layers(count=1, stride=1))


# Readers of many passages
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["longt5", "t5gemma"])
def test_a_reader_on_another_encoder_is_refused_by_name(name: str, facts: Path) -> None:
    values = experiment("fid", facts, base=base_of("summariser", name, vocab_size=384))
    task = tasks.load(tasks.parse(values), Places(facts, facts / "cache", facts))
    with refused(
        "family_unknown", family=SEQ2SEQ[name][0], families=re.compile("'t5', 'mt5', 'umt5'.*")
    ):
        task.skeleton()


# Verifiers
# --------------------------------------------------------------------------------------------------


def verifier(name: str, tmp_path: Path, **how: Any) -> Verifier:
    places = Places(None, tmp_path / "cache", tmp_path)
    base = RandomBase(**base_of("vera", name))
    return Verifier(base_model.load(base, places, precision="fp32", kind="encoder"), seed=3, **how)


def judged(model: Verifier, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """What is made of the states and logits of a batch, and its gradients."""
    model.zero_grad()
    found = model(**batch)
    # not their own squares, whose sum a norm keeps at one value
    along_S = found["hidden"] @ torch.linspace(-1, 1, found["hidden"].shape[-1])
    total = found["logits"].square().sum() + along_S.square().sum()
    total.backward()
    return total.detach(), {
        of: weight.grad for of, weight in model.named_parameters() if weight.grad is not None
    }


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_verifier_reads_the_last_state_of_the_stock_model(name: str, tmp_path: Path) -> None:
    """Packed, padded, and each statement alone."""
    model = verifier(name, tmp_path).eval()
    statements = ids_of(LENGTHS, 3)
    ids, mask = pad_right(statements, 1)
    packed = judged(model, read_by(statements))
    assert_same_step(
        packed,
        judged(model, {"input_ids": ids, "attention_mask": mask}),
        depth=DEPTH,
        loss=1.0,
        gradients=1.5,
    )
    found = model(**read_by([*statements, statements[0]], once=True))
    for hidden, logit, tokens in zip(found["hidden"], found["logits"], statements, strict=False):
        want = model.encoder(input_ids=torch.tensor([tokens])).last_hidden_state[0, -1]
        assert_close(hidden, want, what="states", depth=DEPTH, margin=1.0)
        wanted, scale = model.head(want)[0], float((want * model.head.weight).detach().abs().sum())
        assert_close(logit, wanted, what="logits", depth=DEPTH, margin=0.4, scale=scale)
    assert found["logits"][0] == found["logits"][-1], "equal statements tie"


@pytest.mark.parametrize("name", ["llama", "umt5"])
def test_a_verifier_that_recomputes_its_blocks_has_the_same_gradients(
    name: str, tmp_path: Path
) -> None:
    batch = read_by(ids_of(LENGTHS, 3))
    once = judged(verifier(name, tmp_path).train(), batch)
    again = judged(verifier(name, tmp_path, recompute_every=1).train(), batch)
    assert_equal_step(again, once)


@pytest.mark.parametrize("family", ["bert", "opt", "longt5"])
def test_a_verifier_of_another_family_is_refused_by_name(family: str, tmp_path: Path) -> None:
    places = Places(None, tmp_path, tmp_path)
    base = RandomBase(config={"model_type": family, "vocab_size": VOCABULARY})
    with refused(
        "family_unknown",
        family=family,
        families=re.compile("'t5', 'mt5', 'umt5', 'gpt_bigcode', 'llama'.*"),
    ):
        Verifier(base_model.skeleton(base, places, kind="encoder"), seed=3)


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


INSTRUCTION = "Instruct: Given a question, retrieve what answers it\nQuery:"


def of_qwen3_embedding(facts: Path, folder: Path, side: str) -> PreTrainedTokenizerFast:
    """A tokenizer that ends every text with its pad, which is not its eos, and pads on this side."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(facts / "tokenizer")
    backend = tokenizer.backend_tokenizer
    backend.add_special_tokens(["<|im_end|>"])
    backend.post_processor = TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", END)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side=side,
    )
    made.save_pretrained(folder)
    return made


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_retriever_embeds_as_the_card_of_qwen3_embedding_says(
    side: Any, facts: Path, tmp_path: Path
) -> None:
    """Source: the model card of Qwen/Qwen3-Embedding-0.6B."""
    tokenizer = of_qwen3_embedding(facts, tmp_path, side)
    assert tokenizer.pad_token_id == END != tokenizer.eos_token_id
    task = loaded(
        facts,
        base=base_of("retriever", "qwen3", vocab_size=448),
        tokenizer=str(tmp_path),
        encoder={"pooling": "eos", "projection": None, "normalize": True},
        data={"query_prefix": INSTRUCTION, "query_tokens": 80, "append_eos": False},
    )
    model = task.model().eval()
    queries = ["map", "where is the key", "where is the lamp and the coin " * 9]
    rows = task.ids([{"text": query} for query in queries], side="query")
    got = task.embed(model, rows, side="query")

    texts = [INSTRUCTION + query for query in queries]
    batch = tokenizer(texts, padding=True, truncation=True, max_length=80, return_tensors="pt")
    mask = batch["attention_mask"]
    assert mask[0, 0 if side == "left" else -1] == 0, "padded on this side"
    kept = [ids[on.bool()].tolist() for ids, on in zip(batch["input_ids"], mask, strict=True)]
    assert rows == kept
    assert {ids[-1] for ids in rows} == {END}
    assert len(rows[-1]) == 80
    states = model.query_model(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
    last = torch.full((3,), 79) if side == "left" else mask.sum(1) - 1
    want = torch.nn.functional.normalize(states[torch.arange(3), last], dim=1)
    assert_close(got, want, what="vectors", depth=DEPTH, margin=1.0)
