"""Readers in other layouts, made up here: what is read, what is refused, and what is left
behind.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from tests.wording import Fault, fault, refused, says
from trainer.errors import ConfigError
from trainer.tasks.fid.interchange import CROSS_BIAS, export_model, import_model

BASE_LIKE: dict[str, Any] = {
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 16,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": 20,
}
# As in the large T5 the inner width is not the model's, and nothing equals BASE_LIKE's.
LARGE_LIKE: dict[str, Any] = {
    "d_model": 12,
    "d_kv": 6,
    "d_ff": 20,
    "num_layers": 3,
    "num_heads": 4,
    "vocab_size": 23,
}
V11: dict[str, Any] = BASE_LIKE | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
HEAD = "lm_head.weight"


def t5(values: dict[str, Any]) -> T5ForConditionalGeneration:
    """A T5 with random weights, and an output layer of its own where v1.1 has one."""
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**values, decoder_start_token_id=0))
    if values.get("tie_word_embeddings") is False:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    return model.eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(
            input_ids=torch.tensor([[5, 6, 7, 1]]), labels=torch.tensor([[4, 3, 1]])
        ).logits


def assert_same_model(folder: Path, model: Any) -> None:
    """`folder` holds `model`: stock transformers find every tensor, none too many, and compute the
    same.
    """
    loaded, found = T5ForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert torch.equal(logits(loaded.eval()), logits(model))


def minfid(path: Path, model: Any, *, prefix: str = "t5.", args: Any = None) -> Path:
    """A file as minFiD saves it, with its wrappers' names."""

    def wrapped(name: str) -> str:
        name = (
            name.replace("encoder.", "encoder.encoder.", 1) if name.startswith("encoder.") else name
        )
        return prefix + (
            name.replace(".layer.", ".t5block.layer.", 1) if name.startswith("encoder.") else name
        )

    sd = {wrapped(name): tensor for name, tensor in model.state_dict().items()}
    torch.save(
        {"sd": sd, "args": args or argparse.Namespace(t5_name="t5-large", lr=1e-4, gpus="")}, path
    )
    return path


def plain(folder: Path, values: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> Path:
    """A folder as transformers 4 wrote it: config.json says whether embeddings are tied."""
    folder.mkdir()
    config = values | {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "decoder_start_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = t5(values).state_dict() if tensors is None else tensors
    save_file(
        {name: t.clone() for name, t in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def biased(values: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a T5 as transformers 3.0.2 had them."""
    return dict(t5(values).state_dict()) | {CROSS_BIAS: torch.randn(32, values["num_heads"])}


def tokenizer(folder: Path, words: int) -> Path:
    vocab = {
        name: number
        for number, name in enumerate(["<pad>", "</s>", "<unk>", *map(str, range(words - 3))])
    }
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    made.save_pretrained(folder)
    return folder


# Reading
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["t5.", "seq2seq."])
@pytest.mark.parametrize(
    "values", [BASE_LIKE, LARGE_LIKE, LARGE_LIKE | {"num_decoder_layers": 1}, V11]
)
def test_a_minfid_file_of_any_size_becomes_the_t5_it_was(
    tmp_path: Path, values: dict[str, Any], prefix: str
) -> None:
    model = t5(values)
    import_model(minfid(tmp_path / "reader", model, prefix=prefix), out=tmp_path / "t5")
    assert_same_model(tmp_path / "t5", model)


def test_the_config_of_a_minfid_file_comes_from_its_shapes(tmp_path: Path) -> None:
    import_model(minfid(tmp_path / "reader", t5(LARGE_LIKE)), out=tmp_path / "t5")
    config = T5Config.from_pretrained(tmp_path / "t5")
    assert {name: getattr(config, name) for name in LARGE_LIKE} == LARGE_LIKE
    assert (config.feed_forward_proj, config.num_decoder_layers, config.scale_decoder_outputs) == (
        "relu",
        3,
        True,
    )


def test_a_stored_model_is_a_plain_t5_with_its_embedding_once(tmp_path: Path) -> None:
    import_model(minfid(tmp_path / "reader", t5(BASE_LIKE)), out=tmp_path / "t5")
    tied = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", HEAD}
    assert (
        load_file(tmp_path / "t5" / "model.safetensors").keys()
        == t5(BASE_LIKE).state_dict().keys() - tied
    )
    config = json.loads((tmp_path / "t5" / "config.json").read_text())
    assert config["architectures"] == ["T5ForConditionalGeneration"]


def test_a_folder_in_the_old_pickle_format_is_read(tmp_path: Path) -> None:
    folder, model = plain(tmp_path / "reader", BASE_LIKE), t5(BASE_LIKE)
    (folder / "model.safetensors").unlink()
    torch.save(
        model.state_dict(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )
    import_model(folder, out=tmp_path / "t5")
    assert_same_model(tmp_path / "t5", model)


def test_a_folder_in_shards_is_read(tmp_path: Path) -> None:
    folder, model = plain(tmp_path / "reader", BASE_LIKE), t5(BASE_LIKE)
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": sorted(whole)[:9], "b.safetensors": sorted(whole)[9:]}
    for file, names in parts.items():
        save_file({name: whole[name] for name in names}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, names in parts.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    import_model(folder, out=tmp_path / "t5")
    assert_same_model(tmp_path / "t5", model)


def test_an_embedding_that_is_stored_under_another_of_its_names_is_found(tmp_path: Path) -> None:
    tensors = dict(t5(BASE_LIKE).state_dict())
    for name in ("shared.weight", "encoder.embed_tokens.weight", HEAD):
        del tensors[name]
    import_model(plain(tmp_path / "reader", BASE_LIKE, tensors), out=tmp_path / "t5")
    assert_same_model(tmp_path / "t5", t5(BASE_LIKE))


def test_importing_twice_changes_nothing(tmp_path: Path) -> None:
    import_model(plain(tmp_path / "reader", V11), out=tmp_path / "once")
    import_model(tmp_path / "once", out=tmp_path / "twice")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()


# T5 v1.1: an output layer of its own, and a decoder output that is not scaled
# ---------------------------------------


def test_a_v11_model_keeps_its_output_layer_and_its_unscaled_logits(tmp_path: Path) -> None:
    import_model(plain(tmp_path / "reader", V11), out=tmp_path / "t5")
    assert_same_model(tmp_path / "t5", t5(V11))
    assert json.loads((tmp_path / "t5" / "config.json").read_text())["tie_word_embeddings"] is False


def test_transformers_5_leaves_an_output_layer_of_its_own_untied(tmp_path: Path) -> None:
    """What export and import build on: the config says tied whatever the file said, two unequal
    tensors decide.
    """
    loaded = T5ForConditionalGeneration.from_pretrained(plain(tmp_path / "reader", V11))
    assert loaded.config.tie_word_embeddings is True
    assert loaded.config.scale_decoder_outputs is False
    assert torch.equal(loaded.lm_head.weight, t5(V11).lm_head.weight)
    assert torch.equal(loaded.shared.weight, t5(V11).shared.weight)


def test_a_v11_model_that_transformers_5_saved_says_again_that_it_is_untied(tmp_path: Path) -> None:
    t5(V11).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (saved["tie_word_embeddings"], saved["scale_decoder_outputs"]) == (True, False)
    export_model(tmp_path / "saved", out=tmp_path / "t5")
    written = json.loads((tmp_path / "t5" / "config.json").read_text())
    assert written["tie_word_embeddings"] is False
    assert "scale_decoder_outputs" not in written
    assert_same_model(tmp_path / "t5", t5(V11))


def test_an_output_layer_that_differs_under_a_tied_config_is_refused(tmp_path: Path) -> None:
    tensors = dict(t5(BASE_LIKE).state_dict()) | {HEAD: torch.randn(20, 8)}
    with refused("weights_of_two_values", names=re.compile(r"shared\.weight and lm_head.*")):
        import_model(plain(tmp_path / "reader", BASE_LIKE, tensors), out=tmp_path / "t5")


# The position bias of cross-attention
# -------------------------------------------------------------------------------


def test_the_position_bias_of_cross_attention_is_left_out(tmp_path: Path) -> None:
    import_model(plain(tmp_path / "reader", BASE_LIKE, biased(BASE_LIKE)), out=tmp_path / "t5")
    assert CROSS_BIAS not in load_file(tmp_path / "t5" / "model.safetensors")
    assert "compat_cross_bias" not in json.loads((tmp_path / "t5" / "config.json").read_text())


def test_the_position_bias_of_cross_attention_is_kept_on_demand(tmp_path: Path) -> None:
    tensors = biased(BASE_LIKE)
    import_model(
        plain(tmp_path / "reader", BASE_LIKE, tensors), out=tmp_path / "t5", compat_cross_bias=True
    )
    assert torch.equal(
        load_file(tmp_path / "t5" / "model.safetensors")[CROSS_BIAS], tensors[CROSS_BIAS]
    )
    assert json.loads((tmp_path / "t5" / "config.json").read_text())["compat_cross_bias"] is True
    assert_same_model(tmp_path / "t5", t5(BASE_LIKE))


def test_a_kept_bias_survives_exporting_and_goes_with_the_next_import(tmp_path: Path) -> None:
    folder = plain(tmp_path / "reader", BASE_LIKE, biased(BASE_LIKE))
    import_model(folder, out=tmp_path / "kept", compat_cross_bias=True)
    export_model(tmp_path / "kept", out=tmp_path / "exported")
    assert CROSS_BIAS in load_file(tmp_path / "exported" / "model.safetensors")
    import_model(tmp_path / "exported", out=tmp_path / "gone")
    assert CROSS_BIAS not in load_file(tmp_path / "gone" / "model.safetensors")
    assert "compat_cross_bias" not in json.loads((tmp_path / "gone" / "config.json").read_text())


def test_a_bias_that_is_not_there_cannot_be_kept(tmp_path: Path) -> None:
    with refused("cross_bias_absent"):
        import_model(
            plain(tmp_path / "reader", BASE_LIKE), out=tmp_path / "t5", compat_cross_bias=True
        )


def test_a_bias_of_another_shape_is_refused(tmp_path: Path) -> None:
    tensors = biased(BASE_LIKE) | {CROSS_BIAS: torch.zeros(32, 3)}
    with refused(
        "weights_of_another_shape",
        name="relative_attention_bias.weight",
        got=(32, 3),
        wanted=(32, 2),
    ):
        import_model(plain(tmp_path / "reader", BASE_LIKE, tensors), out=tmp_path / "t5")


# For facebookresearch/FiD
# -------------------------------------------------------------------------------------------


def test_an_export_without_a_bias_gets_one_of_zeros_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        export_model(plain(tmp_path / "t5", BASE_LIKE), out=tmp_path / "fid", layout="fid")
    table = torch.load(tmp_path / "fid" / "pytorch_model.bin", weights_only=True)[CROSS_BIAS]
    assert torch.equal(table, torch.zeros(32, 2))
    assert "a position bias of zeros" in caplog.text


def test_an_export_for_fid_begins_answers_with_the_token_that_the_model_has(tmp_path: Path) -> None:
    values = BASE_LIKE | {"pad_token_id": 1}
    source = plain(tmp_path / "t5", values)
    said = json.loads((source / "config.json").read_text()) | {"decoder_start_token_id": 2}
    (source / "config.json").write_text(json.dumps(said))
    export_model(source, out=tmp_path / "fid", layout="fid")
    config = json.loads((tmp_path / "fid" / "config.json").read_text())
    assert (config["decoder_start_token_id"], config["pad_token_id"]) == (2, 1)


def test_what_is_exported_for_fid_can_be_imported_again(tmp_path: Path) -> None:
    export_model(plain(tmp_path / "t5", LARGE_LIKE), out=tmp_path / "fid", layout="fid")
    assert json.loads((tmp_path / "fid" / "config.json").read_text())["architectures"] == ["FiDT5"]
    import_model(tmp_path / "fid", out=tmp_path / "again")
    assert_same_model(tmp_path / "again", t5(LARGE_LIKE))


def test_a_written_folder_is_as_readable_as_any_other(tmp_path: Path) -> None:
    """safetensors 0.8 makes files that only their owner may read."""
    import_model(plain(tmp_path / "reader", BASE_LIKE), out=tmp_path / "t5")
    (tmp_path / "ordinary").touch()
    modes = {path.stat().st_mode for path in [tmp_path / "ordinary", *(tmp_path / "t5").iterdir()]}
    assert len(modes) == 1


def test_tied_tensors_share_their_storage_in_an_export_for_fid(tmp_path: Path) -> None:
    export_model(plain(tmp_path / "t5", BASE_LIKE), out=tmp_path / "fid", layout="fid")
    tensors = torch.load(tmp_path / "fid" / "pytorch_model.bin", weights_only=True)
    names = (
        "shared.weight",
        "encoder.encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        HEAD,
    )
    assert len({tensors[name].data_ptr() for name in names}) == 1


def test_a_t5_that_transformers_302_does_not_know_is_refused_with_every_reason(
    tmp_path: Path,
) -> None:
    folder = plain(
        tmp_path / "t5", V11 | {"num_decoder_layers": 1, "relative_attention_max_distance": 64}
    )
    with pytest.raises(ConfigError) as caught:
        export_model(folder, out=tmp_path / "fid", layout="fid")
    for reason in (
        "feed_forward_proj='gated-gelu'",
        "tie_word_embeddings=false",
        "num_decoder_layers=1",
        "=64",
    ):
        assert reason in str(caught.value)
    assert not (tmp_path / "fid").exists()


def test_an_unknown_layout_is_refused_with_the_legal_ones(tmp_path: Path) -> None:
    with refused("reader_layout_unknown", legal="t5, fid"):
        export_model(plain(tmp_path / "t5", BASE_LIKE), out=tmp_path / "x", layout="haystack")


# Tokenizers
# --------------------------------------------------------------------------------------------------


def test_a_tokenizer_beside_the_reader_is_copied_as_it_is(tmp_path: Path) -> None:
    folder = tokenizer(plain(tmp_path / "reader", BASE_LIKE), words=20)
    import_model(folder, out=tmp_path / "t5")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "t5" / name).read_bytes()


def test_a_tokenizer_that_was_asked_for_is_written(tmp_path: Path) -> None:
    made = tokenizer(tmp_path / "words", words=20)
    import_model(plain(tmp_path / "reader", BASE_LIKE), out=tmp_path / "t5", tokenizer=str(made))
    assert (tmp_path / "t5" / "tokenizer.json").read_bytes() == (
        made / "tokenizer.json"
    ).read_bytes()


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused(tmp_path: Path) -> None:
    made = tokenizer(tmp_path / "words", words=21)
    with refused("ids_above_embeddings", largest=20, embeddings=20):
        import_model(
            plain(tmp_path / "reader", BASE_LIKE), out=tmp_path / "t5", tokenizer=str(made)
        )


def test_without_a_tokenizer_the_log_says_which_to_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        import_model(minfid(tmp_path / "reader", t5(BASE_LIKE)), out=tmp_path / "t5")
    assert '"tokenizer": "t5-large"' in caplog.text


# What is refused
# --------------------------------------------------------------------------------------------------


class Intruder:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    tmp_path: Path, place: str, is_zip: bool
) -> None:
    folder, content = (
        plain(tmp_path / "reader", BASE_LIKE),
        dict[str, Any](t5(BASE_LIKE).state_dict()),
    )
    (folder / "model.safetensors").unlink()
    harm = Intruder(tmp_path / "harm")
    content = (
        {"sd": content, "args": argparse.Namespace(lr=harm)}
        if place == "file"
        else content | {"x": harm}
    )
    torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    with refused("pickle_of_others_refused", name="posix.mkdir"):
        import_model(
            folder / "pytorch_model.bin" if place == "file" else folder, out=tmp_path / "t5"
        )
    assert not (tmp_path / "harm").exists()
    assert not (tmp_path / "t5").exists()


def test_missing_unexpected_and_misshaped_names_are_all_named(tmp_path: Path) -> None:
    tensors = dict(t5(BASE_LIKE).state_dict())
    del tensors["decoder.final_layer_norm.weight"]
    tensors |= {
        "decoder.qa_outputs.weight": torch.ones(2),
        "encoder.final_layer_norm.weight": torch.ones(9),
    }
    name = "encoder.final_layer_norm.weight"
    with refused("weights_of_another_shape", name=name, got=(9,), wanted=(8,)) as caught:
        import_model(plain(tmp_path / "reader", BASE_LIKE, tensors), out=tmp_path / "t5")
    says("weights_missing", caught.value, names="decoder.final_layer_norm.weight")
    says("weights_unexpected", caught.value, names="decoder.qa_outputs.weight")


def test_weights_of_another_size_than_the_config_states_are_refused(tmp_path: Path) -> None:
    folder = plain(tmp_path / "reader", LARGE_LIKE, dict(t5(BASE_LIKE).state_dict()))
    with refused("weights_missing", names=re.compile(r".*encoder\.block\.2.*")):
        import_model(folder, out=tmp_path / "t5")


def test_an_existing_out_is_refused_and_left_alone(tmp_path: Path) -> None:
    folder = plain(tmp_path / "reader", BASE_LIKE)
    (tmp_path / "t5").mkdir()
    for run in (import_model, export_model):
        with refused("path_exists"):
            run(folder, out=tmp_path / "t5")
    assert not list((tmp_path / "t5").iterdir())


@contextmanager
def full_disk(file_size: int) -> Iterator[None]:
    """No file can grow beyond `file_size` bytes meanwhile: the same refusal as of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("layout", ["t5", "fid"])
def test_nothing_half_written_is_left_behind_by_a_full_disk(tmp_path: Path, layout: str) -> None:
    folder = plain(tmp_path / "reader", BASE_LIKE)
    with (
        full_disk(4096),
        refused("out_unwritable"),
    ):
        export_model(folder, out=tmp_path / "out", layout=layout)
    assert [path.name for path in tmp_path.iterdir()] == ["reader"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, fault("reader_not_t5_config")),
        ("{", fault("reader_unreadable")),
        ('{"model_type": "bart"}', fault("reader_family", family="bart", wanted="t5")),
        ('{"model_type": "t5", "d_model": "wide"}', fault("reader_config_describes_none")),
    ],
)
def test_a_folder_without_a_t5_config_is_refused(
    tmp_path: Path, config: str | None, message: Fault
) -> None:
    folder = plain(tmp_path / "reader", BASE_LIKE)
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(config)
    with refused(message):
        import_model(folder, out=tmp_path / "t5")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = plain(tmp_path / "reader", BASE_LIKE)
    (folder / "model.safetensors").unlink()
    with refused("weights_absent", files=re.compile(r"model\.safetensors .*")):
        import_model(folder, out=tmp_path / "t5")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": {}}, fault("minfid_pickle")),
        (
            {"sd": {"t5.shared.weight": 1}, "args": argparse.Namespace()},
            fault("minfid_values"),
        ),
        (
            {"sd": {"t5.shared.weight": torch.ones(2, 2)}, "args": argparse.Namespace()},
            fault("minfid_sizes"),
        ),
    ],
)
def test_a_file_that_minfid_did_not_write_is_refused(
    tmp_path: Path, content: Any, message: Fault
) -> None:
    torch.save(content, tmp_path / "reader")
    with refused(message):
        import_model(tmp_path / "reader", out=tmp_path / "t5")


@pytest.mark.parametrize("content", [b"", b"a text, no pickle", None])
def test_a_torn_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    whole = minfid(tmp_path / "whole", t5(BASE_LIKE)).read_bytes()
    (tmp_path / "reader").write_bytes(whole[: len(whole) // 2] if content is None else content)
    with refused("reader_unreadable", at="reader"):
        import_model(tmp_path / "reader", out=tmp_path / "t5")
