"""The model of a base: with its weights, mended and with fused operators, or with names and shapes
alone.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn

from trainer.config.schema import Base, RandomBase
from trainer.errors import ConfigError
from trainer.models import base_source, families, fused, masks
from trainer.models.frozen import fp8, quantized
from trainer.models.lean import gated, liger
from trainer.models.processor import products
from trainer.models.weights import absent, config_file, generation_file, weight_files
from trainer.models.weights.t5_encoder_weights import encoder_source
from trainer.models.weights.zero3 import tied_as_saved
from trainer.runtime import distributed

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from trainer.protocol.task import Places

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What is taken of a base. "encoder": the body without a head; of a T5, its encoder. "masked_lm":
# the body with the head that fills masks.
Kind = Literal["causal_lm", "seq2seq_lm", "encoder", "masked_lm"]


def load(
    base: Base,
    places: Places,
    *,
    precision: str,
    kind: Kind = "causal_lm",
    bits: quantized.Bits | None = None,
) -> PreTrainedModel:
    """The model of a base, in the dtype of `precision`; its linear layers in `bits`, if given.

    A random base is built in fp32 under its own seed, so that every rank and every run has the same
    weights. ConfigError when transformers has no model of this kind for the base, and for "fp8" on
    a device that does not multiply such numbers.
    """
    masks.keep_masks_of_devices()
    products.use(DTYPES[precision])
    if bits == "fp8" and (problem := fp8.problem_of(distributed.device())):
        raise ConfigError(problem)
    source = base_source.resolve(base, places)
    config = base_source.config_of(base, places)
    build = _model_class(config, kind)
    options = _body_options(build, kind)
    if isinstance(source, RandomBase):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(source.seed)
            # not from_config: under ZeRO-3 that partitions while it initialises, and draws other
            # numbers
            with _buildable(config):
                model = build(config, **options)
        return _mend(model, bits, precision)
    weight_files.refuse_quantized(config, source)
    weight_files.of(source)  # transformers follows an index wherever it leads
    if kind == "encoder" and config.model_type in families.T5:
        source = encoder_source(source, places.cache_dir)
    with _reading(source), tied_as_saved(build, config, source), _pooler_unread(build, options):
        model, report = build.from_pretrained(
            source,
            dtype=DTYPES[precision],
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    weight_files.refuse_mostly_new(model, set(report["missing_keys"]), source)
    absent.note(model, report["missing_keys"], source)
    return _mend(model, bits, precision)


def _mend(model: PreTrainedModel, bits: quantized.Bits | None, precision: str) -> PreTrainedModel:
    """The same model, quantised where `bits` says so, with mended attention and fused operators,
    and without the settings of generation that a base recommends.
    """
    if bits is not None:
        quantized.quantize(model, bits, DTYPES[precision])
    masks.mend_attention(model)
    fused.fuse(model)
    gated.keep_less(model)
    liger.put_into(model)
    generation_file.keep_ids_alone(model)
    return model


def _buildable(config: PretrainedConfig) -> AbstractContextManager[None]:
    """Inside, a model is built from a config; values that do not fit together are a ConfigError."""
    return config_file.refusals(
        f"base: no {config.model_type} can be built of its config",
        "Mend base.config, or the config.json of the folder that it names.",
    )


@contextlib.contextmanager
def _reading(source: str) -> Iterator[None]:
    """Inside, the weights of `source` are read; damaged or unfitting files are a ConfigError."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"base={source!r}: its pytorch_model.bin is not tensors alone, or is torn; code in a "
            "pickle is never run.\n"
            "Copy the folder again, or save its weights as safetensors: "
            "model.save_pretrained(FOLDER)."
        ) from error
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(weight_files.unreadable(source, error)) from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):  # transformers 5.23: its words for shapes
            raise
        raise ConfigError(
            f"base={source!r}: its weights have other shapes than its config.json says (the table "
            "above names them). Copy the folder again, or mend config.json."
        ) from error


def skeleton(
    base: Base, places: Places, *, kind: Kind = "causal_lm", bits: quantized.Bits | None = None
) -> PreTrainedModel:
    """The model of a base without storage (meta device): names and shapes only."""
    masks.keep_masks_of_devices()
    config = base_source.config_of(base, places)
    build = _model_class(config, kind)
    with torch.device("meta"), _buildable(config):
        model = build(config, **_body_options(build, kind))
    return _mend(model, bits, "fp32")


def exported_config(base: Base, places: Places, *, kind: Kind) -> PretrainedConfig:
    """The config of a base, with the name of the class whose weights are exported."""
    config = base_source.config_of(base, places)
    config.architectures = [type(skeleton(base, places, kind=kind)).__name__]
    return config


def _body_options(build: Any, kind: Kind) -> dict[str, bool]:
    """Arguments that build a body of BERT's family without its pooler: nothing reads the pooler's
    output, so that it would never train.
    """
    takes_pooler = (
        kind == "encoder" and "add_pooling_layer" in inspect.signature(build.__init__).parameters
    )
    return {"add_pooling_layer": False} if takes_pooler else {}


@contextlib.contextmanager
def _pooler_unread(build: Any, options: dict[str, bool]) -> Iterator[None]:
    """Inside, transformers does not warn of a pooler that the files hold and _body_options left out
    of the model.
    """
    before = build._keys_to_ignore_on_load_unexpected
    if options:
        build._keys_to_ignore_on_load_unexpected = [*(before or []), r"(^|\.)pooler\."]
    try:
        yield
    finally:
        build._keys_to_ignore_on_load_unexpected = before


def _model_class(config: PretrainedConfig, kind: Kind) -> Any:
    import transformers

    if kind == "encoder" and config.model_type in families.T5:
        return transformers.MODEL_FOR_TEXT_ENCODING_MAPPING[type(config)]
    classes: Any = {
        "causal_lm": transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        "seq2seq_lm": transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        "encoder": transformers.MODEL_MAPPING,
        "masked_lm": transformers.MODEL_FOR_MASKED_LM_MAPPING,
    }[kind]
    what, advice = _description(config)
    is_other = kind == "causal_lm" and (config.is_encoder_decoder or what == _MASKED)
    if is_other or type(config) not in classes:
        raise ConfigError(
            f"base: got model_type {config.model_type!r}, {what}, want {_WANTED[kind]}. Choose "
            f"such a base{advice}."
        )
    return classes[type(config)]


def check_kind(base: Base, places: Places, kind: Kind) -> None:
    """ConfigError if a base is of another kind than a task trains; it says of which."""
    _model_class(base_source.config_of(base, places), kind)


_WANTED: dict[Kind, str] = {
    "causal_lm": "a decoder, which writes a text from left to right, such as llama or gpt_bigcode",
    "seq2seq_lm": "an encoder-decoder, such as t5",
    "encoder": "a language model with a body of its own, such as t5, bert or llama",
    "masked_lm": "an encoder of masked language modelling, such as bert or modernbert",
}
_MASKED = "an encoder of masked language modelling"


def _description(config: PretrainedConfig) -> tuple[str, str]:
    """(what the models of a config are, the tasks that train them, for messages)."""
    import transformers

    is_decoder = any(getattr(config, name, False) for name in ("is_decoder", "causal"))
    if type(config) in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        return "an encoder-decoder", ", or train a T5 with the task fid or summariser"
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not is_decoder:
        return _MASKED, ", or train this one with the task retriever"
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return "a decoder", ", or train this one with the task causal_lm"
    return "no language model that transformers knows", ""


def set_dropout(model: nn.Module, dropout: float) -> None:
    """Set the probability of every dropout of a model, also where T5's attention holds it as a
    number.

    ConfigError for a model without dropout: the key would change nothing.
    """
    # an adapter's dropout is its own
    own = [module for name, module in model.named_modules() if ".lora_dropout." not in name]
    if not any(isinstance(module, nn.Dropout) for module in own):
        raise ConfigError(
            f"dropout={dropout}: {type(model).__name__} has no dropout layer. Leave dropout out."
        )
    for module in own:
        if isinstance(module, nn.Dropout):
            module.p = dropout
        elif hasattr(module, "relative_attention_num_buckets"):
            module.dropout = dropout  # pyright: ignore[reportArgumentType] (a number in T5Attention)
