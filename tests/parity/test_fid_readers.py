"""Readers that facebookresearch/FiD and minFiD really wrote: read, run by stock transformers, and
given back.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from tests.parity.fid_recordings import SYSTEM
from tests.parity.recordings import Entry, digest, folders, once, params
from trainer.tasks.fid.interchange import CROSS_BIAS, export_model, import_model

WEIGHTS = ("model.safetensors", "pytorch_model.bin")

# B questions, P passages of each, L tokens of a passage, D width


def is_reader(path: Path) -> bool:
    """Whether a config.json is that of a reader of facebookresearch/FiD."""
    config = json.loads(path.read_text())
    return isinstance(config, dict) and config.get("architectures") == ["FiDT5"]


def is_minfid(path: Path) -> bool:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError):
        return False
    return isinstance(content, dict) and {"sd", "args"} <= content.keys()


def expects_answers(path: Path) -> bool:
    content = json.loads(path.read_text())
    return isinstance(content, dict) and "generated_text" in content.get(
        "load_public_checkpoint", {}
    )


def entries(pattern: str, *beside: str) -> list[Entry[Path]]:
    """The files of this pattern by their paths below the recordings, each with its neighbours."""
    return [
        Entry(
            path,
            str(path.relative_to(folder)),
            folder,
            digest(path, *(path.parent / name for name in beside)),
        )
        for folder in folders(SYSTEM)
        for path in sorted(folder.rglob(pattern))
    ]


def readers() -> list[Entry[Path]]:
    found = [
        replace(entry, case=entry.case.parent, name=entry.name.removesuffix("/config.json"))
        for entry in entries("config.json", *WEIGHTS)
        if is_reader(entry.case)
    ]
    return once(found)


def pickles() -> list[Entry[Path]]:
    """Files of minFiD, which has no config.json."""
    found = [entry for kind in ("*.pt", "*.pth", "*.bin") for entry in entries(kind)]
    return once(
        entry
        for entry in found
        if not (entry.case.parent / "config.json").is_file() and is_minfid(entry.case)
    )


def weights_of(reader: Path) -> Path | None:
    """The reader's own weights: tests/parity/recorded has a reader without them."""
    return next((reader / name for name in WEIGHTS if (reader / name).is_file()), None)


def public_reader(meta: Path) -> Path | None:
    """The reader whose answers a meta.json of minFiD tells, where it has its weights."""
    places = meta.parents[1].glob("*/public_style_checkpoint")
    return next((place for place in sorted(places) if weights_of(place)), None)


def answered() -> list[Entry[Path]]:
    found = [entry for entry in entries("meta.json") if entry.name.count("/") == 1]
    return once(
        entry for entry in found if expects_answers(entry.case) and public_reader(entry.case)
    )


each_reader = pytest.mark.parametrize(
    "place", params(readers(), "reader of facebookresearch/FiD", SYSTEM)
)
each_pickle = pytest.mark.parametrize("pickle", params(pickles(), "file of minFiD", SYSTEM))
each_answered = pytest.mark.parametrize(
    "meta", params(answered(), "weights of a public reader with its answers", SYSTEM)
)


@pytest.fixture
def reader(place: Path, tmp_path: Path) -> Path:
    """The recorded reader. Where its weights are left out, those of the common start stand in for
    them, under the recorded names and with the recorded config.
    """
    if weights_of(place):
        return place
    folder = tmp_path / place.parent.name / place.name
    folder.mkdir(parents=True)
    shutil.copyfile(place / "config.json", folder / "config.json")
    shutil.copyfile(place.parent / "meta.json", folder.parent / "meta.json")
    start = load_file(place.parents[1] / "init" / "model.safetensors")
    names = json.loads((place.parent / "meta.json").read_text())["wrapped_state_dict_keys"]
    torch.save({name: start[plain_name(name)] for name in names}, folder / "pytorch_model.bin")
    return folder


def plain_name(wrapped: str) -> str:
    """T5's name of a tensor of facebookresearch/FiD, whose encoder wraps a stack and each of its
    blocks. What is tied to the embeddings has theirs.
    """
    name = wrapped.replace("encoder.encoder.", "encoder.").replace(".module.", ".")
    is_tied = name.endswith("embed_tokens.weight") or name == "lm_head.weight"
    return "shared.weight" if is_tied else name


def original(reader: Path) -> dict[str, Tensor]:
    """The tensors of a reader's own file, by its own names."""
    if (reader / "model.safetensors").is_file():
        return load_file(reader / "model.safetensors")
    return torch.load(reader / "pytorch_model.bin", map_location="cpu", weights_only=True)


def loaded(folder: Path) -> Any:
    """The stock model of a folder, into which every tensor went and no other."""
    model, report = T5ForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


@each_reader
@pytest.mark.parametrize("keeps_bias", [False, True])
def test_a_reader_loads_into_stock_transformers(
    reader: Path, keeps_bias: bool, tmp_path: Path
) -> None:
    if keeps_bias and CROSS_BIAS not in original(reader):
        pytest.skip(f"{reader.name} has no position bias of cross-attention")
    import_model(reader, out=tmp_path / "t5", compat_cross_bias=keeps_bias)
    model = loaded(tmp_path / "t5")
    assert torch.equal(model.shared.weight, original(reader)["shared.weight"])
    assert (CROSS_BIAS in load_file(tmp_path / "t5" / "model.safetensors")) is keeps_bias


@each_reader
def test_an_imported_reader_is_exported_with_the_names_and_values_it_came_with(
    reader: Path, tmp_path: Path
) -> None:
    want = original(reader)
    import_model(reader, out=tmp_path / "t5", compat_cross_bias=CROSS_BIAS in want)
    export_model(tmp_path / "t5", out=tmp_path / "fid", layout="fid")
    got = torch.load(tmp_path / "fid" / "pytorch_model.bin", map_location="cpu", weights_only=True)
    want.setdefault(CROSS_BIAS, torch.zeros_like(got[CROSS_BIAS]))
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@each_reader
def test_an_exported_reader_has_the_config_it_came_with(reader: Path, tmp_path: Path) -> None:
    import_model(reader, out=tmp_path / "t5")
    export_model(tmp_path / "t5", out=tmp_path / "fid", layout="fid")
    want = json.loads((reader / "config.json").read_text())
    got = json.loads((tmp_path / "fid" / "config.json").read_text())
    assert {name: got[name] for name in got if name in want} == {
        name: want[name] for name in got if name in want
    }
    assert got["architectures"] == want["architectures"]


@each_reader
def test_the_names_of_an_export_come_in_the_order_of_the_reference(
    reader: Path, tmp_path: Path
) -> None:
    meta = (
        json.loads((reader.parent / "meta.json").read_text())
        if (reader.parent / "meta.json").is_file()
        else {}
    )
    if "wrapped_state_dict_keys" not in meta:
        pytest.skip(f"no wrapped_state_dict_keys recorded beside {reader.name}")
    import_model(reader, out=tmp_path / "t5")
    export_model(tmp_path / "t5", out=tmp_path / "fid", layout="fid")
    got = torch.load(tmp_path / "fid" / "pytorch_model.bin", map_location="cpu", weights_only=True)
    assert list(got) == meta["wrapped_state_dict_keys"]


@each_pickle
def test_a_minfid_file_loads_into_stock_transformers(pickle: Path, tmp_path: Path) -> None:
    import_model(pickle, out=tmp_path / "t5")
    model = loaded(tmp_path / "t5")
    with torch.serialization.safe_globals([argparse.Namespace]):
        sd = torch.load(pickle, map_location="cpu", weights_only=True)["sd"]
    stored = {name.split(".", 1)[1]: tensor for name, tensor in sd.items()}
    assert torch.equal(model.shared.weight, stored["shared.weight"])
    norm = stored["encoder.encoder.final_layer_norm.weight"]
    assert torch.equal(model.encoder.final_layer_norm.weight, norm)


@each_answered
def test_an_imported_reader_answers_as_in_the_reference(meta: Path, tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="spiece.model is read by sentencepiece")
    reader = public_reader(meta)
    assert reader, "only such files are parameters"
    recorded = json.loads(meta.read_text())
    batch = load_file(
        meta.parent / f"forward_L{recorded['train_toy']['args']['max_length']}.safetensors"
    )
    tokenizer_folder = meta.parents[1] / "tokenizer"
    import_model(reader, out=tmp_path / "t5", tokenizer=str(tokenizer_folder))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "t5")
    answers = tokenizer.batch_decode(
        generated(loaded(tmp_path / "t5"), batch), skip_special_tokens=True
    )
    assert answers == recorded["load_public_checkpoint"]["generated_text"]


def generated(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Greedy tokens (B, at most 50) of a stock T5: passages encoded one by one, decoded over all
    together.
    """
    ids_BPL, mask_BPL = batch["input_ids"].long(), batch["attention_mask"].long()
    with torch.no_grad():
        states = model.encoder(ids_BPL.flatten(0, 1), mask_BPL.flatten(0, 1)).last_hidden_state
        fused_BSD = states.view(len(ids_BPL), -1, states.shape[-1])
        return model.generate(
            encoder_outputs=BaseModelOutput(last_hidden_state=fused_BSD),
            attention_mask=mask_BPL.flatten(1),
            max_length=50,
            num_beams=1,
            do_sample=False,
        )
