"""Settings of transformers' `generate`: a cache for decoders of any depth, and
generation_config.json of an export.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from trainer.models.weights.weight_files import find_file

NAME = "generation_config.json"


def write(folder: Path, model_config: Any, **said: Any) -> None:
    """Write the settings that transformers derives from the model's config, replaced by `said`."""
    values = GenerationConfig.from_model_config(model_config).to_diff_dict()
    values.pop("_from_model_config", None)
    # not save_pretrained: it refuses what published bases say (a temperature that nothing reads)
    (folder / NAME).write_text(json.dumps(values | said, indent=2, sort_keys=True) + "\n")


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


def of_base(source: Any) -> dict[str, Any]:
    """The content of the file in a base, a folder or Hub id; {} when it has none."""
    file = find_file(source, NAME) if isinstance(source, str) else None
    values = {} if file is None else json.loads(file.read_text())
    return {name: value for name, value in values.items() if name != "transformers_version"}
