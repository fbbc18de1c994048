"""The weight files of a base that is a folder or a Hub id: safetensors or pickles of tensors, one
or sharded; memory-mapped, so that the ranks of a machine share what they read.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Set
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

KINDS = ("model.safetensors", "pytorch_model.bin")  # the first that is there is read


def find_file(source: str, name: str) -> Path | None:
    """The file `name` of a folder or Hub id; None when it has none, or cannot be reached."""
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file

    path = cached_file(
        source,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else Path(path)


def of(source: str) -> list[Path]:
    """The files that hold a base's weights; none when it has none, or cannot be reached.

    ConfigError when an index lists a file that is not there.
    """
    for kind in KINDS:
        single, index = find_file(source, kind), find_file(source, f"{kind}.index.json")
        if single is not None:
            return [single]
        if index is not None:
            return _shards(source, index)
    return []


def _shards(source: str, index: Path) -> list[Path]:
    """The files that an index lists; ConfigError unless they are in its folder or below."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        outside = [name for name in names if ".." in Path(name).parts or Path(name).is_absolute()]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"base={source!r}: {index.name} cannot be read ({type(error).__name__}: {error}), want "
            '{"weight_map": {NAME: FILE}}. Copy it again.'
        ) from None
    if outside:
        raise ConfigError(
            f"base={source!r}: {index.name} lists {', '.join(outside)}, outside of its folder. "
            "Name files that lie beside the index."
        )
    shards = [find_file(source, name) for name in names]
    missing = [name for name, path in zip(names, shards, strict=True) if path is None]
    if missing:
        raise ConfigError(
            f"base={source!r}: {', '.join(missing)} missing, which {index.name} lists. Copy it "
            "again."
        )
    return [path for path in shards if path is not None]


def is_torn(path: Path) -> bool:
    """Whether a safetensors file is not as long as its own header says, or has none."""
    try:
        with safe_open(path, framework="pt", device="cpu"):
            return False
    except SafetensorError:
        return path.suffix == ".safetensors"


def unreadable(source: str, error: Exception) -> str:
    """What is wrong with weight files that could not be read, and what to do."""
    files = of(source)
    first_line = str(error).strip().partition("\n")[0]
    if Path(source).is_dir() and not files:
        return (
            f"base={source!r}: the folder holds a config.json and no weights. Put "
            "model.safetensors there (or pytorch_model.bin, or shards with their index); for "
            'random weights give {"config": {...}} instead of the folder.'
        )
    torn = [path.name for path in files if is_torn(path)]
    names = f"{', '.join(torn)}: " if torn else ""
    return (
        f"base={source!r}: its weights cannot be read ({names}{first_line}). Copy the folder again."
    )


def check_whole(source: str) -> None:
    """ConfigError when the weight files of a base that is a folder are missing or torn. Reads their
    headers alone.
    """
    if not Path(source).is_dir():
        return
    files = of(source)
    if not files or any(is_torn(path) for path in files):
        raise ConfigError(unreadable(source, SafetensorError("not as long as its header says")))


def check_digest(source: str, digest: str, sha256_of: Callable[[Path], str]) -> None:
    """ConfigError when a folder's weights have another sha256.

    One file: its own. Shards: that of the lines that `sha256sum model-*` prints, in the order of
    their names.
    """
    if not Path(source).is_dir():
        raise ConfigError(
            f"base={source!r}: a digest goes with a folder or a package, not with a Hub id. Leave "
            "#sha256=... out, or download the model and name its folder."
        )
    files = of(source)
    if not files:
        raise ConfigError(
            f"base={source!r}: the folder itself holds no weights that a digest could be of. Leave "
            "#sha256=... out."
        )
    digests = [sha256_of(path) for path in files]
    lines = [f"{each}  {path.name}\n" for each, path in zip(digests, files, strict=True)]
    got = digests[0] if len(files) == 1 else hashlib.sha256("".join(lines).encode()).hexdigest()
    if got != digest.lower():
        raise ConfigError(
            f"base={source!r}: its weights ({files[0].name}"
            f"{'' if len(files) == 1 else f' and {len(files) - 1} more'}) have the sha256 {got}, "
            f"but the experiment wants {digest}. Get the right files, or state their digest."
        )


def tensors(source: str, names: Set[str]) -> dict[str, Tensor]:
    """Those of a base's weights that are called so in its files."""
    tensors: dict[str, Tensor] = {}
    for path in of(source):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt", device="cpu") as file:
                tensors |= {name: file.get_tensor(name) for name in names & set(file.keys())}
        else:
            tensors |= {name: tensor for name, tensor in read_pickle(path).items() if name in names}
    return tensors


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a pytorch_model.bin; ConfigError when it holds anything else, and no code of
    it is run.
    """
    try:
        return torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except UnpicklingError as error:
        raise ConfigError(
            f"{path}: a pickle of more than tensors, which could run code. Use safetensors."
        ) from error


def refuse_mostly_new(model: PreTrainedModel, missing: set[str], source: str) -> None:
    """ConfigError when the files hold at most half of a base's weights: the others are drawn at
    random, and what is fine-tuned is then no pretrained model. A few are said by transformers.
    """
    names = {name for name, _ in model.named_parameters()} - set(model.all_tied_weights_keys)
    new = names & missing
    if 2 * len(new) >= len(names):
        raise ConfigError(
            f"base={source!r}: its files lack {len(new)} of the {len(names)} weights of a "
            f"{model.config.model_type}, such as {min(new)}. They are of another model than "
            "config.json says, or of a part of it. Copy the folder again, or name the right one."
        )


def refuse_quantized(config: PretrainedConfig, source: str) -> None:
    """ConfigError for a base whose files hold packed weights: layers of another package would
    compute with them, and not all of those have a gradient.
    """
    how = getattr(config, "quantization_config", None)
    if how is not None:
        method = how.get("quant_method") if isinstance(how, dict) else type(how).__name__
        raise ConfigError(
            f"base={source!r}: its config.json has a quantization_config ({method}): its weights "
            "are packed already. Use the weights that they were made of; train.base_bits packs a "
            "frozen base here, in 8 or 4 bits."
        )
