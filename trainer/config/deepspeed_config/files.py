"""A DeepSpeed file as a dictionary. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from trainer.config.deepspeed_config.check import Config
from trainer.config.readers.json_text import finite, without_twins
from trainer.config.userfile import placed
from trainer.errors import ConfigError, nearest

PRESETS = Path(__file__).resolve().parent.parent.parent.parent / "ds_configs"


def read(name_or_path: str) -> Config:
    """The DeepSpeed file as a dictionary: "zero2" is ds_configs/zero2.json, anything with a slash
    or a dot is a path.

    Raises ConfigError when the file is missing, is no JSON object, or states a key twice.
    """
    is_path = "/" in name_or_path or "." in name_or_path
    path = Path(placed(name_or_path)) if is_path else PRESETS / f"{name_or_path}.json"
    if not path.is_file():
        names = sorted(file.stem for file in PRESETS.glob("*.json"))
        hint = "" if is_path else f" {nearest(name_or_path, names)}"
        raise ConfigError(
            f"deepspeed={name_or_path!r}: there is no file {path}.{hint} Use one of "
            f"{', '.join(names)}, or the path of a JSON file."
        )
    try:
        values = json.loads(
            path.read_text(), object_pairs_hook=without_twins, parse_constant=finite
        )
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ConfigError(f"{path}: not a DeepSpeed file: {error}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds a {type(values).__name__}. Want one JSON object.")
    return cast(Config, values)
