"""Adapters at their edges: which layers they go into, what they do beside added layers, and which
bases and folders do not go with them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from exp_configs import vary
from tests.bases import decoder
from tests.facts import experiment, write_facts
from tests.tolerance import assert_close
from trainer import tasks
from trainer.__main__ import app
from trainer.config.identity import exp_id
from trainer.config.optimizer.lora import Lora
from trainer.exports import record
from trainer.files.atomic import sha256_of
from trainer.models import adapters, base_model, base_source
from trainer.protocol.task import Places
from trainer.tasks.cross_attention import interchange
from trainer.tasks.cross_attention.decoder import export
from trainer.tasks.fid.weights import CROSS_BIAS

pytest.importorskip("peft", reason="the optional package peft is not installed")

import re

from tests.numerics.test_adapters import (
    drawn_rows,
    loaded,
    loss_of,
    randomise,
)
from tests.wording import Fault, fault, refused, says

TASKS = tasks.names()
# Of encoded contexts, as tests/tolerance.py means it: twelve products of at most 64 terms.
STATES: dict[str, Any] = {"what": "states", "depth": 12 * 64, "margin": 0.3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


# Targets
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "targets", "said"),
    [
        (
            "fid",
            ["q", "querry"],
            fault("targets_unknown", target="querry", family="t5", layers=re.compile("k, o.*")),
        ),
        (
            "causal_lm",
            ["transformer.h.9.attn.c_attn"],
            fault("targets_unknown", target="transformer.h.9.attn.c_attn"),
        ),
        ("causal_lm", ["c_attn", "lm_head"], fault("targets_shared", target="lm_head")),
        ("causal_lm", ["wte"], fault("targets_not_linear", target="wte", kind="Embedding")),
        (
            "retriever",
            ["q_proj"],
            fault("targets_unknown", target="q_proj", layers=re.compile(".*query.*")),
        ),
    ],
)
def test_targets_that_are_not_there_are_named_with_those_that_are(
    name: str, targets: list[str], said: Fault, folder: Path
) -> None:
    task = loaded(experiment(name, folder, lora={"targets": targets}), folder)
    for build in (task.model, task.skeleton):
        with refused(said):
            build()


@pytest.mark.parametrize("targets", ["q", [], ["q", 1], "all_linear"])
def test_targets_of_another_form_are_one_mistake(targets: Any, folder: Path) -> None:
    values = experiment("fid", folder, lora={"targets": targets})
    with refused("targets_kind", at="1 mistake(s)\n "):
        tasks.parse(values)


@pytest.mark.parametrize(
    ("family", "want"),
    [
        ("llama", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("gpt_bigcode", {"c_attn"}),
        ("phi3", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
    ],
)
def test_without_targets_a_family_has_its_own(family: str, want: set[str]) -> None:
    base = adapters.adapted(decoder(family), Lora(), seed=1)
    names = {name for name, module in base.named_modules() if hasattr(module, "lora_A")}
    assert {name.rpartition(".")[2] for name in names} == want


def test_a_target_may_be_one_layer_by_its_whole_name() -> None:
    base = adapters.adapted(decoder("llama"), Lora(targets=["layers.2.mlp.up_proj"]), seed=1)
    names = [name for name, module in base.named_modules() if hasattr(module, "lora_A")]
    assert names == ["model.layers.2.mlp.up_proj"]


def test_adapters_of_gpt_2s_transposed_layers_are_merged_into_them() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=16, n_layer=2, n_head=2, vocab_size=40)
    for how in (Lora(r=2), Lora(r=2, dora=True, targets="all-linear")):
        base: Any = adapters.adapted(AutoModelForCausalLM.from_config(config), how, seed=1).eval()
        randomise(base)
        ids = torch.tensor([[5, 6, 7]])
        want, names = base(ids).logits, {name for name, _ in base.named_parameters()}
        assert any(map(adapters.is_adapter, names))
        adapters.merge(base)
        assert not any(hasattr(module, "base_layer") for module in base.modules())
        assert_close(base(ids).logits, want, what="logits", depth=2 * 5 * 64, margin=0.3)


# Training mode
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_dropout_of_adapters_is_theirs_in_training_and_off_in_evaluation(
    name: str, folder: Path
) -> None:
    values: Any = experiment(name, folder, lora={"dropout": 0.5})
    if name in ("vera", "retriever"):
        values = vary(values, dropout=0.0)  # of the base, not of adapters
    if name == "preference":  # without what the start says of a row, DPO's loss is always log 2
        values = vary(values, preference={"loss": "simpo"})
    task = loaded(values, folder)
    model = task.model()
    randomise(model)
    _, batch = drawn_rows(task)

    def loss_under(seed: int) -> float:
        torch.manual_seed(seed)
        return float(loss_of(task, model, batch).detach())

    model.train()
    assert loss_under(1) != loss_under(2)
    model.eval()
    assert loss_under(1) == loss_under(2)


# Added layers above adapters
# --------------------------------------------------------------------------------------------------


def crossed(folder: Path, **lora: Any) -> Any:
    """A cross_attention model with adapters that do something."""
    model: Any = loaded(experiment("cross_attention", folder, lora=lora), folder).model()
    randomise(model)
    return model


def test_contexts_are_encoded_as_if_there_were_no_adapters(folder: Path) -> None:
    lora = {"targets": "all-linear", "dropout": 0.0}
    task = loaded(experiment("cross_attention", folder, lora=lora), folder)
    model = task.model()
    ids = torch.tensor([[5, 6, 7, 8]])
    want, _ = model.encode(ids)
    decoded = model(ids, torch.ones_like(ids), encoder_hidden_states=want).logits
    randomise(model)
    states, _ = model.encode(ids)
    assert torch.equal(states, want)
    prepared = model(ids, torch.ones_like(ids), encoder_hidden_states=want).logits
    assert not torch.equal(prepared, decoded), "the decoder has its adapters"
    online = model(ids, torch.ones_like(ids), context_input_ids=ids).logits
    assert torch.equal(online, prepared)
    rows, batch = drawn_rows(task)
    assert "scored" in batch, "packed"
    apart = [model.encode(torch.tensor([row["context"]]))[0][0] for row in rows]
    assert_close(model._encode_packed(batch)[0], torch.cat(apart), **STATES)


@pytest.mark.parametrize(
    ("targets", "below"),
    [
        (["c_attn"], 0),
        (["transformer.h.1.mlp.c_fc"], 1),  # the first added layer stands behind block 1
        (["transformer.h.3.mlp.c_fc"], 2),
    ],
)
def test_no_graph_is_kept_below_the_first_thing_that_trains(
    targets: list[str], below: int, folder: Path
) -> None:
    model = crossed(folder, targets=targets, dropout=0.0)
    assert model.num_blocks_below == below
    ids = torch.tensor([[5, 6, 7, 8]])
    record: dict[str, Tensor] = {}
    given = {"context_input_ids": ids, "labels": ids, "record": record}
    model(ids, torch.ones_like(ids), **given).loss.backward()
    for index in range(4):
        assert record[f"block_out.{index}"].requires_grad == (index >= below)
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert {name for name in trained if "lora" in name}
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_merged_export_of_added_layers_is_refused(folder: Path) -> None:
    values = experiment("cross_attention", folder, lora={"export": "merged"})
    with refused("adapters_merged_before_encoding"):
        tasks.parse(values)


def test_layers_trained_with_adapters_start_with_them_or_not_at_all(
    folder: Path, tmp_path: Path
) -> None:
    lora = {"targets": ["c_fc"], "dropout": 0.0}
    task = loaded(experiment("cross_attention", folder, lora=lora), folder)
    model = task.model()
    task.export(
        {key: p.detach().clone() for key, p in randomise(model).items()}, tmp_path / "final"
    )
    start = {"init_from": str(tmp_path / "final")}
    again = loaded(experiment("cross_attention", folder, lora=lora, **start), folder).model()
    for (name, one), two in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two), name
    without = loaded(experiment("cross_attention", folder, **start), folder)
    with refused("layers_with_adapters"):
        without.model()


def test_an_export_holds_its_base_and_its_adapters_apart(folder: Path, tmp_path: Path) -> None:
    task = loaded(experiment("cross_attention", folder, lora={"dora": True}), folder)
    model = task.model()
    task.export(
        {key: p.detach().clone() for key, p in randomise(model).items()}, tmp_path / "final"
    )
    interchange.export_model(tmp_path / "final", out=tmp_path / "whole", merge=True)
    again = export.load(tmp_path / "whole", export.places_of(tmp_path / "whole", tmp_path))
    _, batch = drawn_rows(task)
    want = loss_of(task, model.eval(), batch)
    assert torch.equal(loss_of(task, again, batch), want)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "base")
    first = base_model.load(task.cfg.base, task.places, precision="fp32")
    for (name, one), two in zip(stock.named_parameters(), first.parameters(), strict=True):
        assert torch.equal(one, two), f"{name}: the base is what it was"


# Another base, and no base
# --------------------------------------------------------------------------------------------------


def final_of(values: dict[str, Any], savedir: Path, folder: Path) -> Path:
    """The final/ folder of a run of `values`."""
    task, final = loaded(values, folder), savedir / exp_id(values) / "final"
    trained = randomise(task.model())
    task.export({key: p.detach().clone() for key, p in trained.items()}, final)
    return final


def with_record(values: dict[str, Any], final: Path, folder: Path) -> None:
    """Write lathe.json beside what final_of has written, as a run does."""
    task = loaded(values, folder)
    record.write(final, record.of_run(final, values=values, task=task, run_folder=final.parent))


def test_adapters_are_a_base_once_they_are_merged_into_their_own(
    folder: Path, tmp_path: Path
) -> None:
    places = Places(folder, tmp_path / "cache", tmp_path)
    adapted: Any = experiment("fid", folder, lora={"export": "adapter"})
    final = final_of(adapted, tmp_path, folder)
    then: Any = {**experiment("fid", folder), "base": {"experiment": adapted}}
    with refused("adapters_without_record", folder=final):
        tasks.load(tasks.parse(then), places)
    with_record(adapted, final, folder)
    merged = final_of(vary(adapted, lora={"export": "merged"}), tmp_path, folder)
    want = load_file(merged / "model.safetensors")
    torch.manual_seed(3)
    drawn = torch.get_rng_state()
    for base in ({"experiment": adapted}, str(final)):
        task: Any = tasks.load(tasks.parse({**then, "base": base}), places)
        assert torch.equal(torch.get_rng_state(), drawn), "random state stays"
        source = Path(base_source.resolve(task.cfg.base, places))
        got = load_file(source / "model.safetensors")
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
        assert all(p.requires_grad for p in task.model().parameters())
    assert len(list((tmp_path / "cache" / "merged").glob("*/config.json"))) == 1

    again = loaded_at({**then, "lora": {"r": 2}}, places)
    trained = {n: p for n, p in again.model().named_parameters() if p.requires_grad}
    assert all(map(adapters.is_adapter, trained))


def loaded_at(values: dict[str, Any], places: Places) -> Any:
    return tasks.load(tasks.parse(values), places)


def test_a_run_of_another_digest_is_refused_as_a_base(folder: Path, tmp_path: Path) -> None:
    places = Places(folder, tmp_path / "cache", tmp_path)
    for first, file, said in (
        (experiment("fid", folder), "model.safetensors", fault("digest_of_file_differs")),
        (experiment("fid", folder, lora={}), adapters.WEIGHTS, fault("base_digest")),
    ):
        final = final_of(first, tmp_path, folder)
        with_record(first, final, folder)
        right = sha256_of(final / file)
        base: Any = {"experiment": first, "sha256": right}
        unnamed = tasks.parse({**experiment("fid", folder), "base": {"experiment": first}}).base
        before = base_source.begun_with(unnamed, places)
        loaded_at({**experiment("fid", folder), "base": base}, places)
        with refused(said) as error:
            loaded_at({**experiment("fid", folder), "base": base | {"sha256": "0" * 64}}, places)
        assert right in str(error.value)
        tensors = load_file(final / file)
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, final / file)
        after = base_source.begun_with(unnamed, places)
        assert before is not None
        assert before != after, "what a run began with is told by its digest"


def test_a_retriever_takes_the_encoder_that_a_reader_trained(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader: Any = experiment("fid", folder)
    final = final_of(reader, tmp_path, folder)
    trained = load_file(final / "model.safetensors")
    values: Any = {**experiment("retriever", folder), "base": reader["base"] | {"seed": 9}}
    values["encoder"] = {"pooling": "mean"}
    caplog.set_level("INFO")
    model = loaded({**values, "init_from": str(final)}, folder).model()
    of_encoder = {n: t for n, t in trained.items() if n.startswith(("encoder.", "shared."))}
    own = dict(model.query_model.named_parameters())
    for name, tensor in own.items():
        assert torch.equal(tensor, of_encoder[name]), name
    assert "init_from: not taken of it: decoder.block.*" in caplog.text
    assert "are taken: " in caplog.text
    plain = dict(loaded(values, folder).model().query_model.named_parameters())
    assert not torch.equal(plain["shared.weight"], own["shared.weight"])

    bert: Any = experiment("retriever", folder)
    with refused("init_from_unfit", folder=str(final)):
        loaded({**bert, "init_from": str(final)}, folder).model()
    with refused("init_from_no_weights"):
        loaded({**bert, "init_from": str(tmp_path / "none")}, folder).model()
    with refused("init_from_adapters"):
        tasks.parse({**values, "init_from": str(final), "lora": {}})


@pytest.mark.parametrize(
    ("key", "value"),
    [("lora_bias", True), ("use_qalora", True), ("init_lora_weights", "pissa")],
)
def test_adapters_whose_scale_or_base_is_another_are_refused(
    key: str, value: Any, tmp_path: Path
) -> None:
    path = tmp_path / adapters.ADAPTER
    said = {"r": 8, "lora_alpha": 16, "alpha_pattern": {}, "init_lora_weights": True}
    path.write_text(json.dumps(said))
    found = adapters.read(tmp_path)
    assert found is not None
    assert (found.r, found.alpha) == (8, 16)
    more = {"rank_pattern": {"^a.q_proj": 2}, "alpha_pattern": {"a.q_proj": 3}, "bias": "all"}
    more |= {"layers_to_transform": 4, "modules_to_save": ["lm_head"]}
    path.write_text(json.dumps({**said, **more}))
    found = adapters.read(tmp_path)
    assert found is not None
    assert [one.model_dump() for one in found.patterns] == [
        {"match": "a.q_proj", "r": 2, "alpha": 3}
    ]
    assert (found.layers, found.bias, found.modules_to_save) == ([4], "all", ["lm_head"])
    path.write_text(json.dumps({**said, "rank_pattern": {r"h\\.[01]": 2}}))
    with refused("adapters_of_expressions"):
        adapters.read(tmp_path)
    path.write_text(json.dumps({**said, key: value}))
    with refused("adapters_of_another_kind", at="adapter_config.json", says=f"{key}={value!r}"):
        adapters.read(tmp_path)


def test_adapters_on_another_base_than_theirs_are_refused(folder: Path, tmp_path: Path) -> None:
    values: Any = experiment("vera", folder, lora={})
    final = final_of(values, tmp_path, folder)
    other = loaded({**values, "base": values["base"] | {"seed": 2}}, folder)
    with refused("adapters_of_other_base", base=re.compile("random:.*")):
        other.load_export(final)
    line = ["export", "vera", str(final), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 2
    says("adapters_as_base", done.stderr, fix=re.compile('.*"export": "merged"'))


def test_the_table_of_a_compatible_reader_stays_frozen_and_is_merged(
    folder: Path, tmp_path: Path
) -> None:
    whole = experiment("fid", folder)
    final = final_of(whole, tmp_path, folder)
    tensors = load_file(final / "model.safetensors")
    table = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    save_file(tensors | {CROSS_BIAS: table}, final / "model.safetensors")
    values = experiment(
        "fid",
        folder,
        base=str(final),
        reader={"compat_cross_bias": True},
        lora={"export": "merged"},
    )
    model = loaded(values, folder).model()
    assert all(adapters.is_adapter(n) for n, p in model.named_parameters() if p.requires_grad)
    merged = load_file(final_of(values, tmp_path, folder) / "model.safetensors")
    assert torch.equal(merged[CROSS_BIAS], table)
    assert merged.keys() == tensors.keys() | {CROSS_BIAS}
