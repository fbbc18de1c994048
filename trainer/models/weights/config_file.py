"""config.json of a base, or the dictionary in its place: what is refused before transformers builds
anything of it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from trainer.errors import ConfigError
from trainer.models.weights import weight_files

NAME = "config.json"
# transformers 4 wrote them, and transformers 5 turns them into `rope_parameters` and `dtype`.
EARLIER_KEYS = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")
EARLIER_KEYS += ("torch_dtype",)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
_LAYERS += ("num_encoder_layers", "encoder_layers", "decoder_layers")
# transformers makes lists of them before anything is built; the deepest published have hundreds
_MOST_LAYERS = 10_000
_SIZES = (*_LAYERS, "hidden_size", "n_embd", "d_model", "dim", "intermediate_size", "n_inner")
_SIZES += ("d_ff", "hidden_dim", "vocab_size", "head_dim", "d_kv", "num_heads", "n_head", "n_heads")
_SIZES += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "n_positions")
_DTYPES = ("dtype", "torch_dtype")
# what transformers 5.23 raises for values that do not fit
UNFIT = (ValueError, TypeError, KeyError, AttributeError, IndexError, AssertionError)
UNFIT += (ArithmeticError, StrictDataclassError)
# how torch 2.13 begins a RuntimeError about the shape of a tensor
_OF_SHAPES = ("negative dimension", "calculation overflowed", "can't allocate memory")


def check_file(source: str) -> bool:
    """Whether a folder or Hub id has a config.json; ConfigError for values in it that no model can
    have.
    """
    path = weight_files.find_file(source, NAME)
    if path is None:
        return False
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"base={source!r}: {NAME} is torn ({error}). Copy it again.") from None
    check_values(values, f"base={source!r}: {NAME}: ")
    return True


def check_values(values: Any, where: str) -> None:
    """ConfigError names every size and dtype that no model can have. where: begins each name."""
    problems = [f"{where}{problem}" for problem in _problems(values, "")]
    if problems:
        raise ConfigError("\n".join(problems))


def _problems(values: Any, within: str) -> Iterator[str]:
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        name = f"{within}{key}"
        if isinstance(value, dict):
            yield from _problems(value, f"{name}.")
        elif key in _DTYPES and value is not None:
            dtype = getattr(torch, value, None) if isinstance(value, str) else value
            if not isinstance(dtype, torch.dtype):
                yield f"{name}={value!r} is no dtype of torch. Use float32, bfloat16 or float16."
        elif key in _SIZES and isinstance(value, int) and value < 0:
            yield f"{name}={value}, want at least 1. Write the number that the model has."
        elif key in _LAYERS and isinstance(value, int) and value > _MOST_LAYERS:
            yield f"{name}={value}, want at most {_MOST_LAYERS}. Write the number of its blocks."


@contextlib.contextmanager
def refusals(what: str, fix: str) -> Iterator[None]:
    """Inside, values of a config that do not fit together are a ConfigError.

    what: the sentence before the reason of transformers; fix: the one behind it.
    """
    try:
        yield
    except ConfigError:
        raise
    except UNFIT as error:
        raise ConfigError(f"{what} ({_reason(error)}). {fix}") from error
    except RuntimeError as error:
        if not any(words in str(error) for words in _OF_SHAPES):
            raise
        raise ConfigError(f"{what} ({_reason(error)}). {fix}") from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if isinstance(error, KeyError) else text
