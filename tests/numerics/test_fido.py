"""FiDO's two switches against a stock T5 that has the same numbers in it: its slow, obvious twin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from exp_configs import vary
from tests.contract.runs import SHORT, from_folder, losses, train, untimed
from tests.contract.test_task_contract import _die_then_resume
from tests.facts import TINY_T5, experiment, with_dropout, write_facts
from tests.numerics import test_fid_model as whole
from tests.numerics.test_fid_model import eager_to_end, fused, packed, questions
from tests.ranks import run_on_ranks
from tests.tolerance import assert_all_close, assert_close, assert_same_step
from tests.wording import refused
from trainer import tasks
from trainer.config.schema import RandomBase
from trainer.models import base_model
from trainer.models.weights import model_folder
from trainer.plan.memory.measure import MeasureRequest, measure
from trainer.protocol.abilities import question_of
from trainer.protocol.task import Places
from trainer.tasks.fid import fido
from trainer.tasks.fid.config import Reader
from trainer.tasks.fid.interchange import export_model
from trainer.tasks.fid.model import FiD, Generation

HEADS: int = whole.SIZES["num_heads"]
# The T5 has three blocks in its decoder, the T5 v1.1 two.
CASES = [("t5", 2, False), ("t5", 1, True), ("t5", 3, True), ("t5_v1_1", 2, True)]
every_case = pytest.mark.parametrize(("family", "every", "multi_query"), CASES)
ON = {"cross_attention_every": 2, "cross_attention_multi_query": True}


def reader(family: str, every: int, multi_query: bool) -> FiD:
    how = {"cross_attention_every": every, "cross_attention_multi_query": multi_query}
    return whole.reader(family, **how)


@torch.no_grad()
def twin_of(family: str, every: int, multi_query: bool) -> Any:
    """A stock T5 that computes the same: what a block without cross-attention adds is 0, and all
    heads have equal keys and values.
    """
    model = whole.t5(family)
    for number, block in enumerate(model.decoder.block, start=1):
        heads = block.layer[1].EncDecAttention
        if number % every:
            heads.o.weight.zero_()
        elif multi_query:
            for part in (heads.k, heads.v):
                mean = sum(part.weight.split(8)) / HEADS
                part.weight.copy_(torch.cat([mean] * HEADS))
    return model


def as_switched(gradients: dict[str, Tensor], every: int, multi_query: bool) -> dict[str, Tensor]:
    """The gradients of the twin for the weights that a FiDO reader has."""
    kept: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        parts = name.split(".")
        is_cross = parts[0] == "decoder" and parts[3:5] == ["layer", "1"]
        if is_cross and (int(parts[2]) + 1) % every:
            continue
        if multi_query and "EncDecAttention" in parts and parts[-2] in ("k", "v"):
            gradient = sum(gradient.split(8))  # type: ignore[assignment]
        kept[name] = gradient
    return kept


# The model
# --------------------------------------------------------------------------------------------------


@every_case
def test_loss_and_gradients_equal_those_of_the_twin(
    family: str, every: int, multi_query: bool
) -> None:
    model, twin = reader(family, every, multi_query), twin_of(family, every, multi_query)
    loss = model(**packed())["loss"]
    want = whole.padded_loss(twin, questions(), whole.labels())
    loss.backward()
    want.backward()
    wanted = as_switched(whole.gradients_of(twin), every, multi_query)
    got = whole.gradients_of(model)
    assert list(got) == list(wanted)
    assert_same_step((loss, got), (want, wanted), **whole.STEP)


@pytest.mark.parametrize("beams", [1, 3])
@every_case
@torch.no_grad()
def test_answers_equal_those_of_the_twin(
    family: str, every: int, multi_query: bool, beams: int
) -> None:
    model = eager_to_end(reader(family, every, multi_query))
    twin = twin_of(family, every, multi_query).eval()
    twin.lm_head.weight[1] *= 3
    several = [question for seed in range(6) for question in questions([[5, 9]], seed=seed)]
    asked = several + questions()
    states, mask = fused(twin, asked)
    want = twin.generate(
        encoder_outputs=BaseModelOutput(states),
        attention_mask=mask,
        max_length=12,
        num_beams=beams,
        do_sample=False,
    )
    got = model(generation=Generation(12, num_beams=beams), **packed(asked, [[1]] * len(asked)))
    assert torch.equal(got["tokens"], want)
    assert len({tuple(ids) for ids in want.tolist()}) > 2, "equal answers would hide a mistake"


@every_case
@torch.no_grad()
def test_passage_scores_are_means_over_the_layers_that_look_at_passages(
    family: str, every: int, multi_query: bool
) -> None:
    model, twin = reader(family, every, multi_query).eval(), twin_of(family, every, multi_query)
    asked = questions()
    states, mask = fused(twin, asked)
    inputs: list[tuple[Any, Tensor]] = []
    for block in list(twin.decoder.block)[every - 1 :: every]:
        block.layer[1].EncDecAttention.register_forward_pre_hook(
            lambda module, args: inputs.append((module, args[0]))
        )
    start = torch.zeros(len(asked), 1, dtype=torch.int64)
    twin.eval().decoder(input_ids=start, encoder_hidden_states=states, encoder_attention_mask=mask)
    raw: list[Tensor] = []  # (B, H, S) of each layer
    for module, hidden in inputs:
        q, k = (part.unflatten(-1, (HEADS, -1)) for part in (module.q(hidden), module.k(states)))
        raw.append(torch.einsum("bqhc,bshc->bhs", q, k))
    score = torch.stack(raw).mean((0, 2))
    longest = max(len(passage) for question in asked for passage in question)
    want = [
        score[row, place * longest : place * longest + len(passage)].mean().item()
        for row, question in enumerate(asked)
        for place, passage in enumerate(question)
    ]
    got = model(score_passages=True, **packed(asked))["passage_scores"]
    assert_close(got.tolist(), want, **whole.SCORES)


@torch.no_grad()
def test_the_cache_holds_one_head_of_the_blocks_that_look_at_passages() -> None:
    model = reader("t5", 2, True).eval()
    batch = packed()
    cache = model.t5.decoder(
        input_ids=torch.zeros(3, 1, dtype=torch.int64),
        encoder_hidden_states=model.fuse(model.encode(batch), batch),
        encoder_attention_mask=batch["fused_mask"],
        use_cache=True,
    ).past_key_values.cross_attention_cache
    held = {
        number: [tuple(layer.keys.shape), tuple(layer.values.shape)]
        for number, layer in enumerate(cache.layers)
        if layer.is_initialized
    }
    num_keys = batch["fused_mask"].shape[1]
    assert held == {1: [(3, 1, num_keys, 8), (3, 1, num_keys, 8)]}


@torch.no_grad()
def test_dropout_falls_on_the_probabilities_of_the_shared_head() -> None:
    model = FiD(whole.t5(), Reader(cross_attention_multi_query=True, dropout=0.3)).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    (layer, *_) = fido.cross_layers(model.t5)
    hidden, states = torch.randn(2, 3, 32), torch.randn(2, 5000, 32)
    attention = layer.EncDecAttention
    exact = attention(hidden, key_value_states=states)[0]
    assert torch.equal(attention(hidden, key_value_states=states)[0], exact)
    attention.dropout.p = 0.3
    one, other = (attention(hidden, key_value_states=states)[0] for _ in range(2))
    assert not torch.equal(one, other)
    assert torch.equal(attention.eval()(hidden, key_value_states=states)[0], exact)


@torch.no_grad()
def test_switched_off_every_weight_and_every_number_is_that_of_a_stock_t5() -> None:
    stock = whole.t5().eval()
    model = FiD(whole.t5(), Reader()).eval()
    assert [name.removeprefix("t5.") for name in model.state_dict()] == list(stock.state_dict())
    batch = packed()
    fused_BSD = model.fuse(model.encode(batch), batch)
    logits = model.head(model.decode(fused_BSD, batch["fused_mask"], batch["labels"]))
    out = stock(
        encoder_outputs=BaseModelOutput(fused_BSD),
        attention_mask=batch["fused_mask"],
        labels=batch["labels"],
    )
    assert torch.equal(logits, out.logits)


# Bases and exports
# --------------------------------------------------------------------------------------------------


def places(folder: Path, savedir: Path) -> Places:
    return Places(folder, folder / "cache", savedir)


def load(values: dict[str, Any], folder: Path, savedir: Path) -> Any:
    return tasks.load(tasks.parse(values), places(folder, savedir))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def switched(folder: Path, **reader: Any) -> dict[str, Any]:
    return experiment("fid", folder, train=SHORT | {"best": None}, reader=ON | reader)


def _twice(
    values: dict[str, Any], folder: Path, savedir: Path, stage: int
) -> tuple[Path, list[float], list[float]]:
    """A run, and another one that goes on from its export."""
    first, lines = train(values, folder, savedir / "first", stage)
    further = vary(values, base=str(first / "final"))
    return first / "final", losses(lines), losses(train(further, folder, savedir / "on", stage)[1])


@pytest.mark.long
@pytest.mark.parametrize("stages", [(3,), (0, 1, 2)], ids=["usual", "every"])
def test_it_trains_from_a_folder_and_goes_on_from_its_export_on_two_ranks_as_on_one(
    stages: tuple[int, ...], folder: Path, tmp_path: Path
) -> None:
    values = from_folder(switched(folder), tmp_path / "bases")
    final, *wanted = run_on_ranks(1, _twice, values, folder, tmp_path / "one", 0)[0]
    assert len({*wanted[0], *wanted[1]}) == 2 * SHORT["steps"], "something trains"
    check_export(final, values, folder, tmp_path)
    for stage in stages:
        savedir = tmp_path / f"zero{stage}"
        partitioned, *got = run_on_ranks(2, _twice, values, folder, savedir, stage)[0]
        assert got[0] == pytest.approx(wanted[0], abs=1e-5)
        assert got[1] == pytest.approx(wanted[1], abs=1e-4)
        check_export(partitioned, values, folder, tmp_path)


def _killed_and_not(values: dict[str, Any], folder: Path, savedir: Path) -> tuple[str, list[Path]]:
    straight, _ = train(values, folder, savedir / "straight", 3)
    outcome, resumed = _die_then_resume(values, folder, savedir / "killed", 3)
    return outcome, [straight, resumed]


@pytest.mark.long
def test_a_killed_run_resumes_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    values = from_folder(with_dropout(switched(folder)), tmp_path / "bases")
    outcome, runs = run_on_ranks(2, _killed_and_not, values, folder, tmp_path / "runs")[0]
    assert outcome == "killed"
    one, two = (untimed(path / "metrics.jsonl") for path in runs)
    assert one == two
    whole_run, resumed = (path / "final" / "model.safetensors" for path in runs)
    assert whole_run.read_bytes() == resumed.read_bytes()


def check_export(final: Path, values: dict[str, Any], folder: Path, savedir: Path) -> None:
    """The folder says what it is, loads as it is, and by nobody who would fill its holes."""
    config, tensors = (
        json.loads((final / "config.json").read_text()),
        load_file(final / "model.safetensors"),
    )
    assert {key: config[key] for key in ON} == ON
    assert (config["model_type"], config["architectures"]) == ("fido_t5", ["FiDOT5"])
    assert config["model_type"] not in CONFIG_MAPPING_NAMES
    model = load(values, folder, savedir).load_export(final)
    assert {name.removeprefix("t5.") for name, _ in model.named_parameters()} == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(model.t5.get_parameter(name), tensor), name
    for off in (Reader(cross_attention_every=2), Reader(cross_attention_multi_query=True)):
        other = load(vary(values, reader=off.model_dump()), folder, savedir)
        with refused("fido_trained_otherwise", multi_query=True):
            other.load_export(final)
        with refused("fido_weights_missing"):
            other.loaded(str(final), None)
    with refused("fido_reader"):
        export_model(final, out=savedir / "plain")


def test_a_plain_t5_is_taken_as_a_base_and_not_for_a_trained_fido_reader(
    folder: Path, tmp_path: Path
) -> None:
    values = from_folder(switched(folder), tmp_path / "bases")
    task, base = load(values, folder, tmp_path), Path(str(values["base"]))
    assert len(fido.cross_layers(task.load_export(base).t5)) == 1
    other = from_folder(vary(switched(folder), base=TINY_T5 | {"seed": 2}), tmp_path / "bases")
    with refused("fido_trained_otherwise", every=1, multi_query=False):
        task.load_export(Path(str(other["base"])))


@torch.no_grad()
def test_a_random_base_may_be_a_fido_reader_itself(folder: Path, tmp_path: Path) -> None:
    config = TINY_T5["config"] | ON | {"model_type": "fido_t5", "d_model": 256}
    values = vary(switched(folder), base={"config": config, "seed": 1})
    t5: Any = load(values, folder, tmp_path).model().t5
    assert isinstance(t5, fido.FiDOT5)
    (layer,) = fido.cross_layers(t5)
    for part in (layer.EncDecAttention.k, layer.EncDecAttention.v):
        assert part.weight.shape == (8, 256)
        assert part.weight.std().item() == pytest.approx(256**-0.5, rel=0.05)
    places_of = places(folder, tmp_path)
    again = base_model.load(
        RandomBase(config=config, seed=1), places_of, precision="fp32", kind="seq2seq_lm"
    )
    assert_all_close(
        dict(again.named_parameters()), dict(t5.named_parameters()), depth=1, margin=0, what="w"
    )


def answering(values: dict[str, Any], folder: Path, savedir: Path) -> MeasureRequest:
    """A made-up question, answered with four tokens."""
    task = load(values, folder, savedir)
    row = task.specimen()
    return MeasureRequest(
        values,
        "answer",
        rows=[dict(task.encode(row))],
        raw=[question_of(task, row)],
        answer_tokens=4,
    )


@pytest.mark.long
def test_the_memory_plan_knows_what_is_gone(folder: Path, tmp_path: Path) -> None:
    config = TINY_T5["config"] | {"num_decoder_layers": 8, "d_ff": 32}
    on = vary(
        switched(folder),
        base={"config": config, "seed": 1},
        data={"contexts": 240, "passage_tokens": 8},
    )
    off = {**on, "reader": {}}
    requests = [answering(values, folder, tmp_path) for values in (off, on)]
    full, reduced = measure(requests, places(folder, tmp_path))
    model = load(on, folder, tmp_path).model()
    assert reduced.trainable == sum(weight.numel() for weight in model.parameters())
    # keys and values, 32 numbers each, of 1,920 tokens in all 8 blocks: the switched reader needs
    # less than those alone
    of_all = 4 * 8 * 2 * 1920 * 32
    assert full.peak.total > of_all > reduced.peak.total


def test_a_decoder_that_would_never_look_at_passages_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    values = switched(folder, cross_attention_every=4)
    with refused("fido_every_above_blocks", blocks=3):
        load(values, folder, tmp_path).skeleton()


def test_the_switches_are_of_t5s_own_decoder_and_no_weights_under_adapters(
    folder: Path, tmp_path: Path
) -> None:
    values = switched(folder)
    adapted = values | {"lora": {"r": 2}}
    with refused("fido_under_adapters"):
        load(adapted, folder, tmp_path).skeleton()
    other = vary(values, base={"config": {**TINY_T5["config"], "model_type": "mt5"}})
    with refused("fido_family", family="mt5", wanted="t5"):
        load(other, folder, tmp_path).skeleton()


def test_the_old_position_bias_and_the_switches_exclude_each_other(folder: Path) -> None:
    with refused("fido_cross_bias"):
        tasks.parse(switched(folder, compat_cross_bias=True))


def test_stock_transformers_can_load_no_head_of_another_width(tmp_path: Path) -> None:
    model = reader("t5", 1, True)
    config = fido.reader_config(model.t5.config, model.reader)
    config.save_pretrained(tmp_path)
    model_folder.write(tmp_path, config, _NoTokenizer(), dict(model.t5.named_parameters()))
    with pytest.raises(RuntimeError, match="mismatch"):
        T5ForConditionalGeneration.from_pretrained(tmp_path)


class _NoTokenizer:
    model_input_names = ("input_ids", "attention_mask")

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer_config.json").write_text("{}")
