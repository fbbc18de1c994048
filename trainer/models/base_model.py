"""Base models: by Hub id, from a folder, with random weights from a dictionary, or out of another
experiment.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from trainer.config.identity import canonical_json, exp_id
from trainer.config.schema import Base, Experiment, ExperimentBase, RandomBase
from trainer.data import vocabulary
from trainer.errors import ConfigError, nearest
from trainer.files import hub, packages, safetensors_file
from trainer.files.remembered import remembered_sha256
from trainer.models import adapters, families, fused, masks
from trainer.models.decoder.halves import adapted_source
from trainer.models.frozen import quantized
from trainer.models.weights import weight_files
from trainer.models.weights.t5_encoder_weights import encoder_source

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers import PreTrainedTokenizerFast as Tokenizer

    from trainer.protocol.task import Places

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Kind = Literal[
    "causal_lm", "seq2seq_lm", "encoder"
]  # encoder: the body without a head; of a T5, its encoder
_DIGEST = "#sha256="
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.json")


def resolve(base: Base, places: Places) -> str | RandomBase:
    """A Hub id, a folder's path, or the random base itself; an experiment becomes the path of its
    final/ folder, or of what is made of it, and "package:NAME/FOLDER" that of the folder.

    A name may end in "#sha256=" and the digest of its weights: ConfigError when they have another.
    """
    if isinstance(base, ExperimentBase):
        folder = places.savedir_base / exp_id(base.experiment) / "final"
        adapters.refuse(folder, because="but is named as a base")
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"base: experiment {folder.parent.name} (task {base.experiment.get('task')}), "
                "which it names, has not "
                f"finished: {folder} holds no model. Run it first, into the same --savedir_base."
            )
        if base.adapted is None:
            return str(folder)
        with _unpartitioned():
            return adapted_source(str(folder), base.adapted, places.cache_dir)
    if isinstance(base, RandomBase):
        return base
    source = named(base, places.cache_dir)
    if not source or not Path(source).is_dir():
        _ask_the_hub(source)
    return source


def _ask_the_hub(source: str) -> None:
    """ConfigError for a name that is neither a folder here nor can be one on the Hub."""
    if vocabulary.may_be_hub_id(source):
        return hub.use_cache_where_unreachable()
    problem = "it is a file" if Path(source).is_file() else "there is no such folder here"
    raise ConfigError(
        f"base={source!r}: {problem}. Give the folder that holds config.json and the weights, a "
        "Hub id, or a dictionary with a config."
    )


def named(name: str, cache_dir: Path) -> str:
    """The folder or Hub id that the name of a base means; see resolve."""
    source, _, digest = name.partition(_DIGEST)
    if packages.is_packaged(source):
        source = str(packages.folder_of(source))
    if _DIGEST in name:
        weight_files.check_digest(source, digest, lambda path: remembered_sha256(path, cache_dir))
    return source


def config_of(base: Base, places: Places) -> PretrainedConfig:
    """The transformers config of a base; ConfigError when it can be found nowhere."""
    from transformers import AutoConfig

    source = resolve(base, places)
    if isinstance(source, RandomBase):
        return _random_config(source)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        if vocabulary.is_of_foreign_code(error):
            raise ConfigError(
                f"base={source!r}: {vocabulary.FOREIGN_CODE.format('model')}"
            ) from None
        raise ConfigError(
            f"base={source!r}: neither a folder with config.json ({Path(source).absolute()}) nor a "
            f"model that the Hub gives out ({reason}).\n"
            "Give an existing folder, a Hub id this machine can reach, or a dictionary with a "
            "config."
        ) from None


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
    weights. ConfigError when transformers has no model of this kind for the base.
    """
    masks.keep_masks_of_devices()
    source = resolve(base, places)
    build = _model_class(config := config_of(base, places), kind)
    options = _body_options(build, kind)
    if isinstance(source, RandomBase):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(source.seed)
            # not from_config: under ZeRO-3 that partitions while it initialises, and draws other
            # numbers
            with _buildable(config):
                model = build(config, **options)
        return _finished(model, bits, precision)
    weight_files.refuse_quantized(config, source)
    if kind == "encoder" and config.model_type in families.T5:
        source = encoder_source(source, places.cache_dir)
    with _reading(source), _tied_as_saved(build, config, source), _pooler_unread(build, options):
        model, told = build.from_pretrained(
            source,
            dtype=DTYPES[precision],
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    weight_files.refuse_mostly_new(model, set(told["missing_keys"]), source)
    return _finished(model, bits, precision)


def _finished(
    model: PreTrainedModel, bits: quantized.Bits | None, precision: str
) -> PreTrainedModel:
    """The same model as tasks take it."""
    if bits is not None:
        quantized.quantize(model, bits, DTYPES[precision])
    masks.mend_attention(model)
    fused.fuse(model)
    return model


@contextlib.contextmanager
def _buildable(config: PretrainedConfig) -> Iterator[None]:
    """Inside, a model is built of a config; numbers that do not go together are a ConfigError."""
    try:
        yield
    except (ValueError, TypeError, AssertionError, ZeroDivisionError) as error:
        raise ConfigError(
            f"base: no {config.model_type} can be built of its config ({_first_line(error)}). Mend "
            "base.config, or the config.json of the folder that it names."
        ) from error


@contextlib.contextmanager
def _reading(source: str) -> Iterator[None]:
    """Inside, weights of `source` are read; whatever is wrong with the files becomes one
    ConfigError.
    """
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


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@contextlib.contextmanager
def _tied_as_saved(build: Any, config: PretrainedConfig, source: str) -> Iterator[None]:
    """Inside, a partitioned from_pretrained ties what the files hold once, or twice alike.

    transformers 5.23, tie_weights: what its class ties and the files hold twice (the output layer
    of T5 v1.1) is compared when all is read. Under ZeRO-3 both are empty by then and count as
    equal, and the checkpoint's own output layer would be thrown away.
    """
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    untied = _saved_apart(build, config, source) if is_deepspeed_zero3_enabled() else set()
    if not untied:
        yield
        return
    of_class = build.get_expanded_tied_weights_keys

    def of_files(model: PreTrainedModel, **how: Any) -> dict[str, str]:
        return {name: to for name, to in of_class(model, **how).items() if name not in untied}

    build.get_expanded_tied_weights_keys = of_files
    try:
        yield
    finally:
        build.get_expanded_tied_weights_keys = of_class


def _saved_apart(build: Any, config: PretrainedConfig, source: str) -> set[str]:
    """The weights that the model class ties to another one, but whose files hold both, unlike each
    other.
    """
    with torch.device("meta"), _unpartitioned():
        tied: dict[str, str] = build(config).all_tied_weights_keys
    saved = weight_files.tensors(source, {*tied, *tied.values()}) if tied else {}
    return {
        name
        for name, to in tied.items()
        if name in saved and to in saved and not torch.equal(saved[name], saved[to])
    }


@contextlib.contextmanager
def _unpartitioned() -> Iterator[None]:
    """Inside, transformers 5.23 partitions no model that it builds.

    Under ZeRO-3 the parts of a T5Gemma 2 would partition themselves, which nothing on the meta
    device can.
    """
    from transformers.integrations import deepspeed as integration

    before = integration._hf_deepspeed_config_weak_ref
    integration._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = before


def skeleton(
    base: Base, places: Places, *, kind: Kind = "causal_lm", bits: quantized.Bits | None = None
) -> PreTrainedModel:
    """The model of a base without storage (meta device): names and shapes only."""
    masks.keep_masks_of_devices()
    config = config_of(base, places)
    build = _model_class(config, kind)
    with torch.device("meta"), _buildable(config):
        model = build(config, **_body_options(build, kind))
    return _finished(model, bits, "fp32")


def exported_config(base: Base, places: Places, *, kind: Kind) -> PretrainedConfig:
    """The config of a base, with the name of the class whose weights are exported."""
    config = config_of(base, places)
    config.architectures = [type(skeleton(base, places, kind=kind)).__name__]
    return config


def _body_options(build: Any, kind: Kind) -> dict[str, bool]:
    """A body of BERT's family is built without its own pooler, whose output nobody reads and
    nothing would train.
    """
    takes_pooler = (
        kind == "encoder" and "add_pooling_layer" in inspect.signature(build.__init__).parameters
    )
    return {"add_pooling_layer": False} if takes_pooler else {}


@contextlib.contextmanager
def _pooler_unread(build: Any, options: dict[str, bool]) -> Iterator[None]:
    """Inside, nobody is told of a pooler in the files that _body_options left out of the model."""
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
    }[kind]
    if type(config) not in classes:
        wanted = {
            "causal_lm": "a causal language model, such as gpt_bigcode",
            "seq2seq_lm": "a seq2seq model, such as t5",
            "encoder": "a model with a body of its own, such as t5, bert or llama",
        }
        raise ConfigError(
            f"base: a {config.model_type} is not what this task trains. Use {wanted[kind]}."
        )
    return classes[type(config)]


def set_dropout(model: nn.Module, dropout: float) -> None:
    """Make `dropout` the probability of every dropout of a model, those that T5's attention keeps
    as numbers too.

    ConfigError for a model that has none: it would change nothing.
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


def tokenizer_of(cfg: Experiment, places: Places, *, needs_eos: bool = True) -> Tokenizer:
    """The tokenizer that an experiment names, or its base's own. ConfigError when there is none, or
    one without the end-of-text token that a model needs which writes.
    """
    spec = cfg.tokenizer
    num_embeddings = config_of(cfg.base, places).vocab_size  # first: whose base is wrong reads that
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
    """Names the weights of a base: a digest of its files, a Hub commit, or the digest of a random
    base's dictionary.
    """
    source = resolve(base, places)
    if isinstance(source, RandomBase):
        return "random:" + hashlib.sha256(canonical_json(source.model_dump()).encode()).hexdigest()
    folder = Path(source)
    if folder.is_dir():
        return "files:" + _digest_of_files(folder, places.cache_dir / "fingerprints")
    commit = getattr(config_of(base, places), "_commit_hash", None)
    return f"hub:{source}@{commit}"


def _random_config(base: RandomBase) -> PretrainedConfig:
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
    legal = sorted(
        {*default.to_dict(), *default.attribute_map, "decoder_start_token_id"}
    )  # the last has no default
    unknown = [key for key in values if key not in legal]
    if unknown:
        raise ConfigError(
            "\n".join(f"base.config.{key}: no such key. {nearest(key, legal)}" for key in unknown)
        )
    try:
        return AutoConfig.for_model(family, **values)
    except (ValueError, TypeError, StrictDataclassError) as error:
        told = " ".join(str(error).split())
        raise ConfigError(f"base.config: {told}. Mend it in the experiment.") from error


def _digest_of_files(folder: Path, cache: Path) -> str:
    """sha256 over the names and contents of a model folder's files."""
    files = sorted({path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)})
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.name}:{remembered_sha256(path, cache)};".encode())
    return total.hexdigest()


def export_folder(
    folder: Path, config: PretrainedConfig, tokenizer: Any, weights: dict[str, torch.Tensor]
) -> None:
    """Write a model folder that from_pretrained loads: config.json, model.safetensors, tokenizer
    files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    _say_scaling_to_all_versions(folder / "config.json")
    safetensors_file.write_tensors(
        folder, "model.safetensors", weights
    )  # safetensors' own writer makes it unreadable to others
    tokenizer.save_pretrained(folder)


def _say_scaling_to_all_versions(path: Path) -> None:
    """tie_word_embeddings=false means an unscaled decoder output to every version of transformers.

    save_pretrained of 5.x writes true beside scale_decoder_outputs=false instead, which 4.x takes
    for a T5 v1.0.
    """
    said = json.loads(path.read_text())
    if "scale_decoder_outputs" in said:
        said["tie_word_embeddings"] = said.pop("scale_decoder_outputs")
        path.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")
