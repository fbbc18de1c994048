"""generation_config.json: what of a base's file is obeyed, what an export's file says, and a cache
for decoders of any depth.

Of a base's file only the ids of tokens count: where texts end, how a prompt begins, the pad. What a
decoder's text starts with is its config's, by which it is trained. Penalties,
least lengths, tokens that are suppressed, and how draws are made are not used, here and in exports:
the experiment and the flags alone say how texts are generated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from transformers import GenerationConfig

from trainer.errors import ConfigError
from trainer.models.families import start_of
from trainer.models.weights.weight_files import find_file

NAME = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_START = "decoder_start_token_id"
# these do not change the text, or (lengths) the experiment or a flag always sets them
_WITHOUT_EFFECT = (
    *("transformers_version", "_from_model_config", "use_cache", "cache_implementation"),
    *("cache_config", "return_dict_in_generate", "max_length", "max_new_tokens"),
)
_NEUTRAL: dict[str, Any] = {
    **{"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "early_stopping": False},
    **{"repetition_penalty": 1, "length_penalty": 1, "temperature": 1, "top_p": 1, "top_k": 50},
    **{"min_length": 0, "min_new_tokens": 0, "no_repeat_ngram_size": 0},
    **{"encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0, "typical_p": 1},
}


def write(folder: Path, model_config: Any, **said: Any) -> None:
    """Write the settings that transformers derives from the model's config, replaced by `said`."""
    values = GenerationConfig.from_model_config(model_config).to_diff_dict()
    values.pop("_from_model_config", None)
    # not save_pretrained: it refuses what published bases say (a temperature that nothing reads)
    (folder / NAME).write_text(json.dumps(values | said, indent=2, sort_keys=True) + "\n")


def is_in(folder: Path) -> bool:
    """Whether a folder holds the file."""
    return (folder / NAME).is_file()


def keep_ids_alone(model: Any) -> None:
    """Drop from a model's generation settings all that a base's file says but ids of tokens; an id
    that the file lacks is the config's, and so is the one that a decoder's text starts with.
    """
    of_file = getattr(model, "generation_config", None)
    if of_file is None:
        return
    of_config = GenerationConfig.from_model_config(model.config)
    ids = {name: getattr(of_file, name, None) for name in _IDS}
    missing = {name: getattr(of_config, name, None) for name, one in ids.items() if one is None}
    start = {_START: start_of(model.config)}  # a file's own may be another one, or a list
    model.generation_config = GenerationConfig(**(ids | missing | start))


def cache_of(config: Any) -> Any:
    """A cache for a T5's decoder of any depth; None where generate() makes a right one itself.

    transformers 5.23, DynamicCache(config): takes num_layers, which is the encoder's, for the
    decoder's, so that a decoder of more blocks fails at the first token.
    """
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    blocks = getattr(config, "num_decoder_layers", None)  # a T5Gemma says it elsewhere
    if blocks is None or blocks <= config.num_layers:
        return None
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def ends_of_base(source: Any, config: Any) -> list[int]:
    """The ids of the tokens at which a base's texts end, as its file says. Without a file: those
    that its config lists, if it lists several; a single one may be the default of its family.

    source: a folder or Hub id; anything else has no file. ConfigError for values that are not token
    ids.
    """
    ends = _of_base(source).get("eos_token_id")
    if ends is None:
        of_config = getattr(config, "eos_token_id", None)
        ends = cast("list[Any]", of_config) if isinstance(of_config, list) else []
    ids = cast("list[Any]", ends) if isinstance(ends, list) else [ends]
    if any(type(one) is not int or one < 0 for one in ids):
        raise ConfigError(
            f"base={source!r}: eos_token_id={ends!r} in its {NAME}, want the id of a token, or a "
            "list of ids. Mend the file, or delete it."
        )
    return ids


def unused_of_base(source: Any, config: Any) -> dict[str, Any]:
    """The settings of a base's file that would change texts and that nothing obeys, by name.

    config: the base's own, for the token that a decoder's text starts with.
    """
    neutral = {**_NEUTRAL, _START: start_of(config)}
    return {
        name: value
        for name, value in _of_base(source).items()
        if name not in (*_IDS, *_WITHOUT_EFFECT)
        and not name.startswith("output_")
        and value not in (None, [], neutral.get(name))
    }


def _of_base(source: Any) -> Mapping[str, Any]:
    """The content of the file in a base, a folder or Hub id; {} when it has none."""
    file = find_file(source, NAME) if isinstance(source, str) else None
    if file is None:
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file}: got no JSON ({error}), want an object. Mend the file, or delete it."
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: got a {type(values).__name__}, want an object. Mend the file.")
    return cast("dict[str, Any]", values)
