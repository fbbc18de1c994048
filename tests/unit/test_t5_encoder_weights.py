"""The encoder's half of a T5 checkpoint: every kind of file, read without the decoder, made
once.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5EncoderModel, T5ForConditionalGeneration

from tests.wording import refused
from trainer.models.weights.t5_encoder_weights import encoder_source


@pytest.fixture
def whole() -> T5ForConditionalGeneration:
    torch.manual_seed(1)
    config = T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def pickled(model: Any, folder: Path, kind: str) -> Path:
    folder.mkdir()
    model.config.save_pretrained(folder)
    tensors = model.state_dict()
    if kind == "shards":
        names = sorted(tensors)
        parts = {"a.bin": names[::2], "b.bin": names[1::2]}
        for file, held in parts.items():
            torch.save({name: tensors[name].clone() for name in held}, folder / file)
        index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        torch.save(
            tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "zip"
        )
    return folder


@pytest.mark.parametrize("kind", ["zip", "before torch 1.6", "shards"])
def test_a_pickled_checkpoint_becomes_a_folder_of_its_encoder(
    kind: str, whole: T5ForConditionalGeneration, tmp_path: Path
) -> None:
    folder = pickled(whole, tmp_path / "t5", kind)
    made = encoder_source(str(folder), tmp_path / "cache")
    assert made != str(folder)
    encoder, info = T5EncoderModel.from_pretrained(made, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    wanted = whole.encoder.state_dict()
    assert all(
        torch.equal(tensor, wanted[name]) for name, tensor in encoder.encoder.state_dict().items()
    )
    full = sum(tensor.nbytes for tensor in whole.state_dict().values())
    assert (Path(made) / "model.safetensors").stat().st_size < full / 2


def test_it_is_made_once_and_anew_when_the_file_changes(
    whole: T5ForConditionalGeneration, tmp_path: Path
) -> None:
    folder = pickled(whole, tmp_path / "t5", "zip")
    first = encoder_source(str(folder), tmp_path / "cache")
    stamp = (Path(first) / "model.safetensors").stat().st_mtime_ns
    assert encoder_source(str(folder), tmp_path / "cache") == first
    assert (Path(first) / "model.safetensors").stat().st_mtime_ns == stamp
    torch.save(
        {name: tensor + 1 for name, tensor in whole.state_dict().items()},
        folder / "pytorch_model.bin",
    )
    assert encoder_source(str(folder), tmp_path / "cache") != first


def test_safetensors_are_read_where_they_are(
    whole: T5ForConditionalGeneration, tmp_path: Path
) -> None:
    whole.save_pretrained(tmp_path / "t5")
    assert encoder_source(str(tmp_path / "t5"), tmp_path / "cache") == str(tmp_path / "t5")
    assert not (tmp_path / "cache").exists()


class _Runs:
    def __reduce__(self) -> Any:
        return (print, ("ran",))


def test_a_pickle_that_could_run_code_is_refused(
    whole: T5ForConditionalGeneration, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pickled(whole, tmp_path / "t5", "zip")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"shared.weight": _Runs()}))
    with refused("pickle_refused"):
        encoder_source(str(folder), tmp_path / "cache")
    assert "ran" not in capsys.readouterr().out


def test_a_checkpoint_without_an_encoder_is_refused(
    whole: T5ForConditionalGeneration, tmp_path: Path
) -> None:
    folder = pickled(whole, tmp_path / "t5", "zip")
    torch.save({"transformer.weight": torch.ones(2)}, folder / "pytorch_model.bin")
    with refused("t5_encoder_absent"):
        encoder_source(str(folder), tmp_path / "cache")
