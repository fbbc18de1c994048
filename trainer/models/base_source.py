"""Where a base comes from: a Hub id, a folder, random weights from a dictionary, or another
experiment; and what can be read without its weights: config, tokenizer, fingerprint.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.identity import canonical_json, exp_id
from trainer.config.mistakes import no_base
from trainer.config.schema import Base, Experiment, ExperimentBase, RandomBase
from trainer.config.userfile import may_be_hub_id, placed
from trainer.data import vocabulary
from trainer.errors import ConfigError, nearest
from trainer.files import hub, packages
from trainer.files.remembered import cached_sha256
from trainer.metrics.judge_record import refusals_of
from trainer.models import adapters
from trainer.models.decoder.halves import adapted_source
from trainer.models.weights import config_file, weight_files
from trainer.models.weights.zero3 import without_partitioning

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from transformers import PreTrainedTokenizerFast as Tokenizer

    from trainer.protocol.task import Places

log = logging.getLogger(__name__)

_DIGEST = "#sha256="
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.json")


def resolve(base: Base, places: Places) -> str | RandomBase:
    """A Hub id, the path of a folder, or the random base itself.

    An experiment becomes the path of its final/ or best/ folder, or with `adapted` of the folder
    that is made from it; adapters become the path of the model that merged_base.py has made of them
    and their own base; "package:NAME/FOLDER" becomes the path of that folder. A name may end with
    "#sha256=" and the digest of its weights. ConfigError when the weights have another digest, or
    when a name is neither a folder nor a Hub id.
    """
    if isinstance(base, ExperimentBase):
        run_folder = places.savedir_base / exp_id(base.experiment)
        folder = run_folder / base.model
        _check_digest(base, folder, places)
        if adapters.are_in(folder):
            whole = _whole(folder, places)
            return _as_adapted(whole, base, places)
        if base.model.startswith("step-"):
            if not (folder / "config.json").is_file():
                raise ConfigError(
                    f"base.model={base.model!r}: {folder} is not there. The service makes it when "
                    'a job names that checkpoint. Name it there, or use "final".'
                )
            return _as_adapted(str(folder), base, places)
        refusals = refusals_of(run_folder)
        if refusals and base.model == "final":
            raise ConfigError(
                f"base: experiment {run_folder.name}, which it names, has no final/: its gate kept "
                f'it back ({"; ".join(refusals)}). Name another run, or its "best".'
            )
        if not refusals and not (run_folder / "final" / "config.json").is_file():
            raise ConfigError(
                f"base: experiment {run_folder.name} (task {base.experiment.get('task')}), which "
                f"it names, has not finished: {run_folder / 'final'} holds no model. Run it first, "
                "into the same --savedir_base."
            )
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f'base.model="best": {folder} holds no model, for no evaluation of that run had '
                'the metric of train.best. Use "final".'
            )
        return _as_adapted(str(folder), base, places)
    if isinstance(base, RandomBase):
        return base
    source = folder_or_id(base, places.cache_dir)
    if source and Path(source).is_dir():
        return _whole(Path(source), places) if adapters.are_in(Path(source)) else source
    if may_be_hub_id(source):
        hub.use_cache_where_unreachable()
        return source
    raise ConfigError(no_base(source))


def _as_adapted(folder: str, base: ExperimentBase, places: Places) -> str:
    """The folder itself, or what base.adapted makes of it."""
    if base.adapted is None:
        return folder
    with without_partitioning():
        return adapted_source(folder, base.adapted, places.cache_dir)


def _check_digest(base: ExperimentBase, folder: Path, places: Places) -> None:
    """ConfigError when the weights of another run are others than the experiment names."""
    if base.sha256 is None:
        return
    if adapters.are_in(folder):
        got = cached_sha256(folder / adapters.WEIGHTS, places.cache_dir / "fingerprints")
        if got != base.sha256:
            raise ConfigError(
                f"base: {folder / adapters.WEIGHTS} has the sha256 {got}, but base.sha256 is "
                f"{base.sha256}: that run was trained anew since. Put the folder back, or state "
                "its digest."
            )
        return
    weight_files.check_digest(
        str(folder), base.sha256, lambda path: cached_sha256(path, places.cache_dir)
    )


# Adapters as a base
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdaptersOfBase:
    """Adapters that an experiment names as its base."""

    folder: Path
    whole: Path  # of the cache: the model with the adapters merged into their own base


def adapters_of(base: Base, places: Places) -> AdaptersOfBase | None:
    """The adapters that are named as a base; None when it is anything else."""
    if isinstance(base, RandomBase):
        return None
    if isinstance(base, ExperimentBase):
        folder = places.savedir_base / exp_id(base.experiment) / base.model
    else:
        name = base.partition(_DIGEST)[0]
        folder = packages.folder_of(name) if packages.is_packaged(name) else Path(placed(name))
    if not adapters.are_in(folder):
        return None
    digest = _digest_of(folder, places)
    return AdaptersOfBase(folder, places.cache_dir / "merged" / digest)


def is_whole(folder: Path) -> bool:
    """Whether a folder of the cache holds a merged model."""
    return (folder / "config.json").is_file()


def _whole(folder: Path, places: Places) -> str:
    whole = places.cache_dir / "merged" / _digest_of(folder, places)
    if not is_whole(whole):
        adapters.refuse(folder, because="but is named as a base, and was not merged into its own")
    return str(whole)


def begun_with(base: Base, places: Places) -> str | None:
    """A digest of the weights that another run has left and this one begins with; None when it
    begins with something else.
    """
    adapters = adapters_of(base, places)
    if adapters is not None:
        return f"files:{_digest_of(adapters.folder, places)}"
    source = resolve(base, places)
    is_of_run = isinstance(base, ExperimentBase) or (
        isinstance(source, str) and (Path(source) / "lathe.json").is_file()
    )
    return f"files:{_digest_of(Path(str(source)), places)}" if is_of_run else None


def folder_or_id(name: str, cache_dir: Path) -> str:
    """The folder or Hub id that a base's name stands for; see resolve."""
    source, _, digest = name.partition(_DIGEST)
    source = str(packages.folder_of(source)) if packages.is_packaged(source) else placed(source)
    if _DIGEST in name:
        weight_files.check_digest(source, digest, lambda path: cached_sha256(path, cache_dir))
    return source


def config_of(base: Base, places: Places) -> PretrainedConfig:
    """The transformers config of a base; ConfigError when it can be found nowhere."""
    from transformers import AutoConfig

    source = resolve(base, places)
    if isinstance(source, RandomBase):
        return random_config(source)
    has_file = config_file.check_file(source)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, *config_file.UNFIT) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if vocabulary.is_of_foreign_code(error):
            raise ConfigError(
                f"base={source!r}: {vocabulary.FOREIGN_CODE.format('model')}"
            ) from None
        if has_file:
            raise ConfigError(
                f"base={source!r}: of its config.json transformers makes no model ({reason}). Mend "
                "the file, or copy it again."
            ) from error
        raise ConfigError(
            f"base={source!r}: neither a folder with config.json ({Path(source).absolute()}) nor a "
            f"model that the Hub gives out ({reason}).\n"
            "Give an existing folder, a Hub id this machine can reach, or a dictionary with a "
            "config."
        ) from None


def tokenizer_of(cfg: Experiment, places: Places, *, needs_eos: bool = True) -> Tokenizer:
    """The tokenizer that an experiment names, or its base's own.

    needs_eos: the model writes texts, so that a tokenizer without an end-of-text token is a
    ConfigError. So is no tokenizer at all, or one with more tokens than the base has embeddings.
    """
    spec = cfg.tokenizer
    # read first, so that a wrong base is reported as a wrong base
    config = config_of(cfg.base, places)
    num_embeddings = getattr(config.get_text_config(), "vocab_size", None)
    if num_embeddings is None:
        raise ConfigError(
            f"base: got model_type {config.model_type!r}, which has no vocabulary, want "
            "a language model. Choose such a base."
        )
    if spec is None:
        source = resolve(cfg.base, places)
        if isinstance(source, RandomBase):
            raise ConfigError(
                "tokenizer: required, because a base given as a dictionary brings none. "
                'Name a folder, a Hub id, or {"vocab_size": 2048} for the embedded one.'
            )
        spec = source
    tokenizer = vocabulary.load_tokenizer(
        spec,
        data_path=places.data_path,
        cache_dir=places.cache_dir,
        is_of_base=cfg.tokenizer is None,
    )
    if needs_eos:
        vocabulary.eos_id(tokenizer)
    vocabulary.check_fits(tokenizer, num_embeddings)
    return tokenizer


def fingerprint(base: Base, places: Places) -> str:
    """A string that identifies the weights of a base: a digest of its files, a Hub commit, or the
    digest of a random base's dictionary.
    """
    source = resolve(base, places)
    if isinstance(source, RandomBase):
        return "random:" + hashlib.sha256(canonical_json(source.model_dump()).encode()).hexdigest()
    folder = Path(source)
    if folder.is_dir():
        return f"files:{_digest_of(folder, places)}"
    commit = getattr(config_of(base, places), "_commit_hash", None)
    return f"hub:{source}@{commit}"


def _digest_of(folder: Path, places: Places) -> str:
    """A digest of the files of a folder that say what its model is."""
    files = {path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)}
    total = hashlib.sha256()
    for path in sorted(files):
        digest = cached_sha256(path, places.cache_dir / "fingerprints")
        total.update(f"{path.name}:{digest};".encode())
    return total.hexdigest()


def random_config(base: RandomBase) -> PretrainedConfig:
    """The transformers config that the dictionary of a random base states, which may be one that
    transformers 4 wrote; ConfigError names every key that its family does not have.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    values = dict(base.config)
    family = values.pop("model_type", None)
    if family not in CONFIG_MAPPING:
        legal = sorted(CONFIG_MAPPING.keys())
        close = nearest(str(family), legal)
        raise ConfigError(
            f"base.config.model_type={family!r} does not exist in transformers. {close}"
        )
    default = CONFIG_MAPPING[family]()
    # decoder_start_token_id has no default, so that to_dict() lacks it
    legal = sorted({*default.to_dict(), *default.attribute_map, "decoder_start_token_id"})
    earlier = config_file.EARLIER_KEYS if "rope_parameters" in legal else ("torch_dtype",)
    unknown = [key for key in values if key not in legal and key not in earlier]
    if unknown and "transformers_version" in values:  # as published, not written by hand
        log.info("base.config: transformers reads nothing of %s", ", ".join(unknown))
    elif unknown:
        raise ConfigError(
            "\n".join(f"base.config.{key}: no such key. {nearest(key, legal)}" for key in unknown)
        )
    config_file.check_values(values, "base.config.")
    with config_file.refusals("base.config", "Mend it in the experiment."):
        return AutoConfig.for_model(family, **copy.deepcopy(values))  # which changes inner ones
