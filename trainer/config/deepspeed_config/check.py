"""Names, types and ranges of a DeepSpeed file, checked before anything is settled.

Imports no deepspeed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

from trainer.config.deepspeed_config.keys import LEGAL, REFUSED, REFUSED_VALUES, VERSION
from trainer.errors import nearest

Config = dict[str, Any]

AUTO = "auto"

# "auto" that the experiment or the model settles; keep_in_fp32_modules has an "auto" of DeepSpeed's
# own.
OPTIM_KEYS = ("lr", "betas", "eps", "weight_decay")
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SEQUENCE_KEY = "sequence_parallel_size"  # ranks that share the tokens of a row
# the formulas of transformers/integrations/deepspeed.py
FROM_HIDDEN_SIZE: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda width: width * width,
    "stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "stage3_param_persistence_threshold": lambda width: 10 * width,
}
_SETTLED = {
    *(
        *BATCH_KEYS,
        "gradient_clipping",
        "bf16.enabled",
        "fp16.enabled",
        "data_types.keep_in_fp32_modules",
    ),
    *(f"optimizer.params.{key}" for key in OPTIM_KEYS),
    *(f"zero_optimization.{key}" for key in FROM_HIDDEN_SIZE),
}

_KINDS = {
    "b": "true or false",
    "i": "an integer",
    "n": "a number",
    "s": "a string",
    "l": "a list of strings",
}


def sequence_ranks(config: Config) -> int:
    """How many neighbouring ranks share the tokens of each row, of any DeepSpeed dictionary. 1
    where the value is none that `build` takes.
    """
    size = config.get(SEQUENCE_KEY, 1)
    return size if type(size) is int and size > 0 else 1


def mistakes(preset: Config) -> list[str]:
    """All that is wrong with a file by itself, a sentence for each; empty when nothing is."""
    return [*_mistakes(preset, ""), *_numbers(preset)]


def _mistakes(block: Config, path: str) -> Iterator[str]:
    """Names and types, at every level."""
    for key, value in block.items():
        name = f"{path}.{key}" if path else key
        kind = LEGAL[path].get(key, "")
        if name in REFUSED:
            yield f"{name}: {REFUSED[name]}"
        elif not kind:
            yield f"{name}: no such key in DeepSpeed {VERSION}. {_where(key, path)}"
        elif value == AUTO:
            if name not in _SETTLED:
                yield (
                    f'{name}="auto": nothing in the experiment decides it. Write a value, or '
                    "delete the key."
                )
        elif not _fits(value, kind):
            yield f"{name}={json.dumps(value)}: want {_KINDS.get(kind[0], 'an object')}."
        elif name in REFUSED_VALUES and value == REFUSED_VALUES[name][0]:
            yield f"{name}={json.dumps(value)}: {REFUSED_VALUES[name][1]}. Delete the key."
        elif name in LEGAL and value is not None:
            yield from _mistakes(value, name)


def _where(key: str, path: str) -> str:
    homes = [block for block, keys in LEGAL.items() if key in keys and block != path]
    if len(homes) == 1:
        return f"It belongs {'into ' + repr(homes[0]) if homes[0] else 'to the top level'}."
    return nearest(key, sorted(LEGAL[path]))


def _fits(value: Any, kind: str) -> bool:
    if value is None:
        return kind.endswith("?")
    is_number = (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    )
    checks: dict[str, bool] = {
        "b": isinstance(value, bool),
        "i": is_number and int(value) == value,  # DeepSpeed files write 5e8
        "n": is_number,
        "s": isinstance(value, str),
        "l": isinstance(value, list)
        and all(isinstance(item, str) for item in cast(list[Any], value)),
        "o": isinstance(value, dict),
        "x": True,
    }
    return checks[kind[0]]


def _numbers(config: Config) -> Iterator[str]:
    """Ranges that DeepSpeed does not check.

    It trains with 1.5 accumulation steps, and without clipping at -1.
    """
    for key in (*BATCH_KEYS, SEQUENCE_KEY):
        value = config.get(key, AUTO)
        if value != AUTO and _fits(value, "i") and (type(value) is not int or value < 1):
            yield f"{key}={value}: want an integer above 0."
    clip = config.get("gradient_clipping", AUTO)
    if clip != AUTO and _fits(clip, "n") and clip < 0:
        yield (
            f"gradient_clipping={clip}: want a number that is not negative; 0.0 switches clipping "
            "off."
        )
    zero = config.get("zero_optimization", {"stage": 0})
    if not isinstance(zero, dict):
        return  # reported by _mistakes: DeepSpeed would take `true` for stage 1
    stage = cast(Config, zero).get("stage")
    if stage is None:
        yield "zero_optimization.stage: required, but not given. DeepSpeed would take 0."
    elif stage != AUTO and (type(stage) is not int or stage not in range(4)):
        yield f"zero_optimization.stage={json.dumps(stage)}: want 0, 1, 2 or 3."
