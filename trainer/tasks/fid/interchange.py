"""Readers of facebookresearch/FiD and minFiD as plain T5 folders, and plain T5 folders for
facebookresearch/FiD.

A reader is a T5 whose encoder was wrapped, so its files differ from those of a stock T5 in names
alone: FiD writes `encoder.encoder.block.0.module.layer...` for `encoder.block.0.layer...`; minFiD
writes another word for "module" and puts a prefix in front.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration, T5Tokenizer

from trainer.data import vocabulary
from trainer.errors import ConfigError, nearest
from trainer.files import safetensors_file
from trainer.files.atomic import new_folder, refuse_existing
from trainer.models.frozen.freezing import load_into
from trainer.models.weights import model_folder, weight_files
from trainer.models.weights.pickled import unpickle
from trainer.tasks.fid import fido
from trainer.tasks.fid.transformers_302 import config_302, refuse_newer
from trainer.tasks.fid.weights import CROSS_BIAS

log = logging.getLogger(__name__)

LAYOUTS = ["t5", "fid"]
_EMBEDDING, _HEAD = "shared.weight", "lm_head.weight"
_TIED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", _HEAD)
_TOKENIZER_FILES = ("tokenizer.json", "spiece.model")  # one of them makes a tokenizer
_WRAPPED_BLOCK = re.compile(r"encoder\.block\.(\d+)\.(?!layer\.)\w+\.layer\.")


@dataclass(frozen=True)
class Source:
    """A reader as a stock T5 has it, whatever file it came from."""

    path: Path
    config: dict[str, Any]  # as config.json states it
    tensors: dict[str, Tensor]  # by plain T5 name; tied tensors stand once, as shared.weight
    copied: tuple[Path, ...] = ()  # files to copy: the tokenizer and the generation settings
    tokenizer_hint: str = "google-t5/t5-base"


def import_model(
    source: Path, *, out: Path, tokenizer: str | None = None, compat_cross_bias: bool = False
) -> None:
    """Write the reader in `source` to the new folder `out`, which
    T5ForConditionalGeneration.from_pretrained loads.

    source: a folder of facebookresearch/FiD or of a plain T5, or a file that minFiD saved.
    tokenizer: a folder or Hub id whose files are written too, instead of those beside the reader.
    compat_cross_bias: keep the position bias of cross-attention, for an experiment with
    reader.compat_cross_bias. Raises ConfigError and StorageError; `out` then does not exist.
    """
    refuse_existing(out)
    read = _check(_read_pickle(source) if source.is_file() else _read_folder(source))
    has_bias = CROSS_BIAS in read.tensors
    if compat_cross_bias and not has_bias:
        raise ConfigError(
            f"{source} holds no {CROSS_BIAS}: there is nothing to keep. Leave "
            "--compat_cross_bias out."
        )
    if has_bias and not compat_cross_bias:
        read = replace(
            read, tensors={name: t for name, t in read.tensors.items() if name != CROSS_BIAS}
        )
        log.info("left out: the position bias of cross-attention (--compat_cross_bias keeps it)")
    _write_t5(read, out, tokenizer)


def export_model(folder: Path, *, out: Path, layout: str = "t5") -> None:
    """Write the T5 in `folder` to the new folder `out`: as a plain T5, or as facebookresearch/FiD
    reads it.

    layout: "t5", or "fid" for FiDT5.from_pretrained of transformers 3.0.2. Raises ConfigError when
    transformers 3.0.2 cannot express the model, and StorageError; `out` then does not exist.
    """
    if layout not in LAYOUTS:
        raise ConfigError(
            f"--layout {layout}: no such layout of a reader. {nearest(layout, LAYOUTS)}"
        )
    refuse_existing(out)
    read = _check(_read_folder(folder))
    if layout == "fid":
        config = _t5_config(read)
        refuse_newer(config, read.path)
        tensors = dict(read.tensors)
        # a tensor that is left out would be filled with random numbers by transformers 3.0.2
        if CROSS_BIAS not in tensors:
            shape = config.relative_attention_num_buckets, config.num_heads
            tensors[CROSS_BIAS] = torch.zeros(shape, dtype=tensors[_EMBEDDING].dtype)
            log.info("added: a position bias of zeros for cross-attention, which changes nothing")
        tensors |= dict.fromkeys(_TIED, tensors[_EMBEDDING])
        wrapped: dict[str, Tensor] = {}
        for name in _skeleton(config, is_untied=False, has_cross_bias=True).state_dict():
            wrapped_name = re.sub(r"^encoder\.", "encoder.encoder.", name)
            block = r"^(encoder\.encoder\.block\.\d+\.)layer\."
            wrapped[re.sub(block, r"\1module.layer.", wrapped_name)] = tensors[name]
        with new_folder(out) as written:
            _write_config(written, config_302(config) | {"architectures": ["FiDT5"]})
            _save(wrapped, written / "pytorch_model.bin")
        log.info("%s: %s", out, _describe(read))
    else:
        _write_t5(read, out, None)


# RowsToRead
# --------------------------------------------------------------------------------------------------


def _read_folder(folder: Path) -> Source:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{folder}: got no folder with config.json. Give a folder that save_pretrained "
            "wrote, or a file of minFiD."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}). Copy the folder again.") from None
    family = config.get("model_type") if isinstance(config, dict) else None
    if family == fido.MODEL_TYPE:
        raise ConfigError(
            f"{path}: got a FiDO reader, whose decoder lacks cross-attention that a plain T5 and "
            "facebookresearch/FiD have, want a whole one. Use the folder as it is, with "
            "reader.cross_attention_every and reader.cross_attention_multi_query as it was trained."
        )
    if family != "t5":
        raise ConfigError(
            f"{path}: got model_type={family!r}, want 't5'. Give the folder of a T5 or of a reader."
        )
    tensors: dict[str, Tensor] = {}
    files = weight_files.of(str(folder))
    if not files:
        legal = ", ".join(f"{single} or {single}.index.json" for single in weight_files.KINDS)
        raise ConfigError(f"{folder}: holds no weights, want {legal}. Copy the folder again.")
    for file in files:
        if file.suffix != ".safetensors":
            tensors |= _tensors_by_name(unpickle(file), file)
            continue
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{file}: cannot be read ({error}). Copy the checkpoint again."
            ) from None
    copied = [folder / "generation_config.json", *(folder / name for name in vocabulary.FILES)]
    return Source(
        folder, config, _rename(tensors, folder), tuple(file for file in copied if file.is_file())
    )


def _read_pickle(file: Path) -> Source:
    content = unpickle(file)
    if not isinstance(content, dict) or not {"sd", "args"} <= content.keys():
        raise ConfigError(
            f"{file}: got no checkpoint of minFiD, want a pickle of {{'sd', 'args'}}. "
            "Give such a file, or the folder that holds config.json and the weights."
        )
    tensors = _rename(_tensors_by_name(content["sd"], file), file)
    args = content["args"] if isinstance(content["args"], dict) else vars(content["args"])
    hint = str(args.get("t5_name", args.get("base_seq2seq", Source.tokenizer_hint)))
    return Source(file, _config_of(tensors, file), tensors, tokenizer_hint=hint)


def _tensors_by_name(value: Any, file: Path) -> dict[str, Tensor]:
    if not isinstance(value, dict) or not all(
        isinstance(tensor, Tensor) for tensor in value.values()
    ):
        raise ConfigError(
            f"{file}: got something else than tensors by name. Give a file with the weights alone."
        )
    return dict(value)


def _rename(tensors: Mapping[str, Tensor], source: Path) -> dict[str, Tensor]:
    """The tensors under the names that a plain T5 gives them."""
    plain: dict[str, Tensor] = {}
    for wrapped_name, tensor in tensors.items():
        # minFiD has these two prefixes, the second in its translate_model.py
        name = re.sub(r"^(t5|seq2seq)\.", "", wrapped_name)
        name = re.sub(r"^encoder\.encoder\.", "encoder.", name)
        plain[_WRAPPED_BLOCK.sub(r"encoder.block.\1.layer.", name)] = tensor
    if len(plain) < len(tensors):
        raise ConfigError(
            f"{source}: holds the same tensors under plain and under wrapped names. Keep one of "
            "both."
        )
    return plain


def _config_of(tensors: Mapping[str, Tensor], source: Path) -> dict[str, Any]:
    """The config.json of a reader whose file holds none, as minFiD's do.

    Sizes are read off the tensors' shapes; other values are those of every published T5.
    """
    block = "encoder.block.0.layer."
    gated = f"{block}1.DenseReluDense.wi_0.weight" in tensors
    names = [
        _EMBEDDING,
        *(f"{block}0.SelfAttention.{part}.weight" for part in ("relative_attention_bias", "q")),
    ]
    names.append(f"{block}1.DenseReluDense.wo.weight")
    missing = [name for name in names if name not in tensors or tensors[name].ndim != 2]
    if missing:
        raise ConfigError(
            f"{source}: its sizes cannot be told, it misses {missing}. Give a file with a whole "
            "reader."
        )
    (vocab_size, d_model), (num_buckets, num_heads), (d_inner, _), (_, d_ff) = (
        tensors[name].shape for name in names
    )
    is_untied = _HEAD in tensors and not torch.equal(tensors[_HEAD], tensors[_EMBEDDING])
    return {
        "model_type": "t5",
        "vocab_size": vocab_size,
        "d_model": d_model,
        "d_kv": d_inner // num_heads,
        "d_ff": d_ff,
        "num_layers": _num_blocks("encoder", tensors),
        "num_decoder_layers": _num_blocks("decoder", tensors),
        "num_heads": num_heads,
        "relative_attention_num_buckets": num_buckets,
        "relative_attention_max_distance": 128,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-6,
        "initializer_factor": 1.0,
        "is_encoder_decoder": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": not is_untied,
    }


def _num_blocks(stack: str, tensors: Mapping[str, Tensor]) -> int:
    matches = [re.match(rf"{stack}\.block\.(\d+)\.", name) for name in tensors]
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


# Checking
# --------------------------------------------------------------------------------------------------


def _check(source: Source) -> Source:
    """The source with each tied tensor stored once, and with a config that every version of
    transformers reads alike.

    ConfigError names every missing, unexpected and misshaped tensor at once.
    """
    config = _t5_config(source)
    tensors = dict(source.tensors)
    embedding = next((name for name in (_EMBEDDING, *_TIED) if name in tensors), _EMBEDDING)
    if embedding in tensors:
        tensors.setdefault(_EMBEDDING, tensors[embedding])
    # T5 v1.1 has an output layer of its own, and does not scale the decoder's output
    has_both = _HEAD in tensors and _EMBEDDING in tensors
    is_untied = (
        not config.scale_decoder_outputs
        and has_both
        and not torch.equal(tensors[_HEAD], tensors[_EMBEDDING])
    )
    model = _skeleton(config, is_untied=is_untied, has_cross_bias=CROSS_BIAS in tensors)
    # the model has no storage, so this compares names and shapes only
    load_into(model, tensors, source=str(source.path))
    once = {
        name: t.contiguous()
        for name, t in tensors.items()
        if name not in _TIED or (is_untied and name == _HEAD)
    }
    # To every version of transformers, tie_word_embeddings=false means an unscaled decoder
    # output. save_pretrained of 5.x writes true beside scale_decoder_outputs=false instead,
    # which 4.x takes for a T5 v1.0.
    left_out = ("scale_decoder_outputs", "compat_cross_bias", "_name_or_path")
    own_config = {name: value for name, value in source.config.items() if name not in left_out}
    own_config |= {
        "architectures": ["T5ForConditionalGeneration"],
        "tie_word_embeddings": config.scale_decoder_outputs,
    }
    start = {"decoder_start_token_id": own_config.get("pad_token_id", 0)}  # as every published T5
    return replace(source, config={**start, **own_config}, tensors=once)


def _t5_config(source: Source) -> Any:
    try:
        return T5Config.from_dict(dict(source.config))
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{source.path}: its config.json describes no T5 ({error}). Correct it."
        ) from None


def _skeleton(config: Any, *, is_untied: bool, has_cross_bias: bool) -> Any:
    """A T5 without storage whose parameters are those that a file should hold."""
    with torch.device("meta"):
        model: Any = T5ForConditionalGeneration(config)
        # transformers 5 ties whatever the config says, until from_pretrained meets two tensors
        if is_untied:
            model.lm_head.weight = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        if has_cross_bias:
            table = nn.Embedding(config.relative_attention_num_buckets, config.num_heads)
            model.decoder.block[0].layer[1].EncDecAttention.relative_attention_bias = table
    return model


# Writing
# --------------------------------------------------------------------------------------------------


def _write_t5(source: Source, out: Path, tokenizer: str | None) -> None:
    config = source.config | ({"compat_cross_bias": True} if CROSS_BIAS in source.tensors else {})
    own = [file for file in source.copied if file.name in _TOKENIZER_FILES]
    loaded = None if tokenizer is None else _tokenizer(tokenizer, out.parent)
    if loaded is not None:
        vocabulary.check_fits(loaded, config["vocab_size"])
    with new_folder(out) as folder:
        _write_config(folder, config)
        safetensors_file.write_tensors(folder, "model.safetensors", source.tensors)
        for file in source.copied:
            if loaded is None or file.name not in vocabulary.FILES:
                shutil.copyfile(file, folder / file.name)
        if loaded is not None:
            model_folder.write_tokenizer(folder, loaded)
    log.info("%s: %s", out, _describe(source))
    if loaded is None and not own:
        log.info(
            '%s has no tokenizer: name one in the experiment, "tokenizer": "%s"',
            out,
            source.tokenizer_hint,
        )


def _tokenizer(spec: str, cache_dir: Path) -> Any:
    """The tokenizer of a folder or Hub id.

    A folder may hold a bare spiece.model, as T5 was published at first.
    """
    folder = Path(spec)
    is_bare = (folder / "spiece.model").is_file() and not (
        folder / "tokenizer_config.json"
    ).is_file()
    if not is_bare or (folder / "tokenizer.json").is_file():
        return vocabulary.load_tokenizer(spec, data_path=None, cache_dir=cache_dir)
    try:
        return T5Tokenizer.from_pretrained(folder)
    except (ImportError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--tokenizer {spec}: its spiece.model cannot be read ({reason}). Install the packages "
            "sentencepiece and protobuf, or name a folder with a tokenizer.json."
        ) from error


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        torch.save(tensors, path)
    except RuntimeError as error:  # how torch 2.13 reports every refusal of the disk
        raise OSError(f"{path.name}: {error}") from error


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _describe(source: Source) -> str:
    count = sum(tensor.numel() for tensor in source.tensors.values())
    return f"{count:,} parameters of {source.path}, in {len(source.tensors)} tensors"
