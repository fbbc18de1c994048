"""Tokenizers: where they are found, the embedded one, and what identifies one."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.auto.tokenization_auto import (
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)

from trainer.config.schema import EmbeddedTokenizer
from trainer.config.userfile import may_be_hub_id, placed
from trainer.data import lookup, stdlib_docs
from trainer.errors import ConfigError
from trainer.files import hub, packages
from trainer.files.build_once import build_once

log = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"  # id 0: begins and ends a text
PAD = "<|pad|>"  # id 1: never the end of a text, so a masked pad cannot hide a real end
FOREIGN_CODE = (
    "it brings Python code of its own (auto_map), which is never run. Use a {} whose kind "
    "transformers knows, without "
    "auto_map."
)
_TOKENIZER_FILE = "tokenizer.json"
FILES = (  # what a tokenizer is made of in a model's folder
    *(
        _TOKENIZER_FILE,
        "spiece.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
)
VOCABULARIES = (_TOKENIZER_FILE, "spiece.model", "tokenizer.model", "vocab.json", "vocab.txt")
# How many times as many bytes UTF-8 has at most after each form of Unicode, as the Unicode FAQ on
# normalisation gives it: one ligature of 3 bytes becomes 18 letters of 33.
_GROWTH = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11}
_MERGES = {"vocab.json", "merges.txt"}  # of a byte-level BPE, as GPT-2's was published
_ids_of_tokenizers: dict[bytes, str] = {}  # by a digest of what they are made of
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes that say nothing


def load_tokenizer(
    spec: str | EmbeddedTokenizer,
    *,
    data_path: Path | None,
    cache_dir: Path,
    is_of_base: bool = False,
) -> PreTrainedTokenizerFast:
    """The tokenizer that an experiment names: the embedded one, a folder, or a Hub id.

    A name is looked for as a folder here, then as a folder under `data_path`, then on the Hub (or
    in its local cache); "package:NAME/FOLDER" is a folder of an installed package. Code that comes
    with a tokenizer is never run. Raises ConfigError when it is nowhere, or has no fast
    implementation. is_of_base: messages call it the base's, for the experiment names no other.
    """
    label = f"the tokenizer of base={spec!r}" if is_of_base else f"tokenizer={spec!r}"
    if isinstance(spec, EmbeddedTokenizer):
        return embedded_tokenizer(spec, cache_dir)
    if packages.is_packaged(spec):
        return _load(str(packages.folder_of(spec)), label, tried=[f"package {spec}"])
    folders = [Path(placed(spec))] + ([data_path / spec] if data_path is not None else [])
    for folder in folders:
        if folder.is_dir():
            return _load(str(folder), label, tried=[f"folder {folder}"])
    tried = [f"folder {folder}" for folder in folders]
    if not may_be_hub_id(spec):
        reason = "it is a path, and no such folder exists"
        if any(folder.is_file() for folder in folders):
            reason = "it is a file, and the folder that holds it is wanted"
        elif data_path is None:
            reason += "; it is also looked for below --data_path, which was not given"
        if Path(spec).parent.name == "tokenizers":  # as the built-in groups name theirs
            reason += "; `python -m trainer fetch tokenizers --out DIR` brings those of our groups"
        raise _not_found(label, tried, reason=reason)
    hub.use_cache_where_unreachable()
    return _load(spec, label, tried=[*tried, f"Hub id {spec}"])


def embedded_tokenizer(spec: EmbeddedTokenizer, cache_dir: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most spec.vocab_size ids trained on an embedded corpus; id 0 is bos =
    eos, id 1 the pad.

    Trained once (under a second) and kept in a folder of `cache_dir` named after the corpus, the
    size and the version of the tokenizers library; several processes may ask at the same time.
    Raises StorageError when the disk refuses.
    """
    corpus = (
        stdlib_docs.content_hash() if spec.corpus == "stdlib_docs" else f"lookup {lookup.VERSION}"
    )
    key = hashlib.sha256(
        f"{corpus} {spec.vocab_size} {tokenizers.__version__}".encode()
    ).hexdigest()

    def build(temporary: Path) -> None:
        _train(spec).save_pretrained(str(temporary))

    folder = cache_dir / "tokenizers" / f"embedded-{spec.vocab_size}-{key[:16]}"
    return PreTrainedTokenizerFast.from_pretrained(
        str(build_once(folder, build, is_whole=_holds_tokenizer))
    )


def byte_level_tokenizer(cache_dir: Path) -> Path:
    """The folder of an embedded tokenizer that merges nothing: one id for each byte, and nothing to
    train. Raises StorageError when the disk refuses.
    """

    def build(temporary: Path) -> None:
        _trained_on([], 2 + len(pre_tokenizers.ByteLevel.alphabet())).save_pretrained(
            str(temporary)
        )

    folder = cache_dir / "tokenizers" / f"bytes-{tokenizers.__version__}"
    return build_once(folder, build, is_whole=_holds_tokenizer)


def pad_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """An id of the vocabulary that is not the end of a text: the tokenizer's pad where that is so,
    else another one.

    Pads are masked by the length of a row and never by their id, so any id will do that the
    embedding has a row for; the smallest special token is taken, then the smallest id. (GPT-style
    tokenizers pad with their EOS, and a label mask built from that id hides every real EOS: such a
    model never learns to stop.)
    """
    pad, end = _id_of(tokenizer, "pad"), _id_of(tokenizer, "eos")
    if pad is not None and pad != end:
        return pad
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    return min(special - {end}, default=1 if end == 0 else 0)


def eos_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """The id that ends a text; ConfigError when the tokenizer has none."""
    end = _id_of(tokenizer, "eos")
    if end is None:
        raise ConfigError(
            f"tokenizer {tokenizer.name_or_path!r} has no end-of-text token (eos_token), and a "
            "model that never sees one never learns to stop. Set eos_token in its "
            "tokenizer_config.json, or use another tokenizer."
        )
    return end


def opening_of(tokenizer: Any) -> list[int]:
    """The beginning-of-text token, as a list.

    Empty unless the tokenizer puts one before every text by itself, as Llama's does.
    """
    bos = tokenizer.bos_token_id
    plain, opened = (
        tokenizer("a", add_special_tokens=is_added)["input_ids"] for is_added in (False, True)
    )
    return [bos] if bos is not None and opened[: len(plain) + 1] == [bos, *plain] else []


def most_tokens_per_byte(tokenizer: Any) -> int | None:
    """The most tokens that a byte of a text can become, special ones apart; None where only the
    tokenizer itself can tell, as one that puts a blank before every text, or that knows no bytes.
    """
    content: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    steps = _steps(content["pre_tokenizer"], "pretokenizers")
    is_of_bytes = any(step["type"] == "ByteLevel" for step in steps)
    if not is_of_bytes or any(step.get("add_prefix_space") for step in steps):
        return None
    growth = 1
    for step in _steps(content["normalizer"], "normalizers"):
        if step["type"] not in _GROWTH:
            return None
        growth *= _GROWTH[step["type"]]
    return growth


def _steps(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer, which is one step, a sequence of them, or missing."""
    if step is None:
        return []
    return [one for inner in step[name] for one in _steps(inner, name)] if name in step else [step]


def check_fits(tokenizer: PreTrainedTokenizerFast, num_embeddings: int) -> None:
    """ConfigError when the tokenizer can produce an id that the embedding has no row for."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= num_embeddings:
        raise ConfigError(
            f"tokenizer {tokenizer.name_or_path!r} has ids up to {largest}, the base only "
            f"{num_embeddings} embeddings. "
            f"Use the base's own tokenizer, or a base with vocab_size of at least {largest + 1}."
        )


def tokenizer_id(tokenizer: PreTrainedTokenizerFast) -> str:
    """sha256, 64 hex characters, over what turns text into ids: the backend's JSON and the bos and
    eos ids.

    The backend's truncation and padding are left out: they are switched by the last call and say
    nothing about content.
    """
    text = tokenizer.backend_tokenizer.to_str()
    ends = [_id_of(tokenizer, name) for name in ("bos", "eos")]
    key = hashlib.sha256(f"{ends}{text}".encode()).digest()
    if key not in _ids_of_tokenizers:  # to read the text takes as long as to encode 2,000 rows
        content: dict[str, Any] = json.loads(text)
        content |= {"truncation": None, "padding": None, "bos": ends[0], "eos": ends[1]}
        plain = json.dumps(content, sort_keys=True).encode()
        _ids_of_tokenizers[key] = hashlib.sha256(plain).hexdigest()
    return _ids_of_tokenizers[key]


def _id_of(tokenizer: PreTrainedTokenizerFast, name: str) -> int | None:
    number = getattr(tokenizer, f"{name}_token_id")
    return None if number is None else int(number)


def _load(source: str, label: str, *, tried: list[str]) -> PreTrainedTokenizerFast:
    try:
        tokenizer = _of_merges(Path(source))
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # any: tokenizers (Rust) raises Exception itself for a torn file
        if is_of_foreign_code(error):
            raise ConfigError(f"{label}: {FOREIGN_CODE.format('tokenizer')}") from None
        reason = _of_files(Path(source)) or str(error).split("\n", 1)[0]
        raise _not_found(label, tried, reason=reason) from error
    if isinstance(tokenizer, ByT5Tokenizer):
        return _of_bytes(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(
            f"{label} is a {type(tokenizer).__name__} without a fast implementation. "
            f"Use a tokenizer that has a {_TOKENIZER_FILE}."
        )
    return tokenizer


def _of_bytes(slow: ByT5Tokenizer) -> PreTrainedTokenizerFast:
    """ByT5's tokenizer in its fast form, for transformers 5.23 has a slow one only, which has no
    content that a token store could be named after. The same ids for every text, special tokens
    included: byte b is id b + 3, behind pad, end and unknown. Bytes that are no UTF-8 are decoded
    to U+FFFD, where the slow one drops them.
    """
    special: dict[int, Any] = dict(slow.added_tokens_decoder)
    of_byte = {char: byte + slow.offset for byte, char in bytes_to_unicode().items()}
    vocabulary = of_byte | {str(token): number for number, token in special.items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    end = str(slow.eos_token)
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, slow.eos_token_id)]
    )
    backend.add_special_tokens([special[number] for number in sorted(special)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=str(slow.pad_token),
        eos_token=end,
        unk_token=str(slow.unk_token),
        clean_up_tokenization_spaces=False,
    )


def _of_merges(folder: Path) -> Any:
    """The tokenizer of a folder whose vocabulary is vocab.json and merges.txt alone; None for any
    other folder, and where AutoTokenizer reads the two.

    transformers 5.23 asks the model_type for the class: for some, such as gpt_bigcode, it wants a
    tokenizer.json whatever tokenizer_config.json names, and for others, such as gemma2, it makes a
    tokenizer without a vocabulary.
    """
    files = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    if not files >= _MERGES or (files & {*VOCABULARIES}) - _MERGES:
        return None
    settings = _json_of(folder / "tokenizer_config.json")
    kind = settings.get("tokenizer_class")
    registered = TOKENIZER_MAPPING_NAMES.get(_json_of(folder / "config.json").get("model_type", ""))
    is_read = _reads_merges(registered)
    if "auto_map" in settings or (is_read and kind not in _GENERIC):
        return None
    name = registered if is_read else "GPT2Tokenizer" if kind in (None, *_GENERIC) else kind
    if not _reads_merges(name):
        return None
    log.info("%s: its vocab.json and merges.txt are read as a %s's", folder, name)
    build: Any = tokenizer_class_from_name(str(name))
    return build.from_pretrained(str(folder))


def _reads_merges(name: Any) -> bool:
    """Whether a class of this name makes a tokenizer of vocab.json and merges.txt."""
    build: Any = tokenizer_class_from_name(name) if isinstance(name, str) else None
    return {*getattr(build, "vocab_files_names", {}).values()} >= _MERGES


def _json_of(path: Path) -> dict[str, Any]:
    """The dictionary in a file; {} where there is none that can be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def is_of_foreign_code(error: Exception) -> bool:
    """Whether transformers refused a folder because it would have to run its code (auto_map)."""
    return "custom code" in str(error)


def _of_files(folder: Path) -> str | None:
    """What can be seen to be wrong with the files of a tokenizer's folder; None for nothing."""
    if not folder.is_dir():
        return None
    for path in (folder / name for name in FILES):
        try:
            if path.suffix == ".json" and path.is_file():
                json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return f"{path.name} is torn ({error}), so copy it again"
    if not any((folder / name).is_file() for name in VOCABULARIES):
        present = ", ".join(name for name in FILES if (folder / name).is_file()) or "none"
        return (
            f"its files of a tokenizer are {present}, and one with the vocabulary is wanted: "
            f"{' or '.join(VOCABULARIES)}"
        )
    return None


def _not_found(label: str, tried: list[str], *, reason: str) -> ConfigError:
    return ConfigError(
        f"{label} cannot be loaded (tried {', '.join(tried)}): {reason.rstrip('.')}. "
        'Give a folder (here or under --data_path), a Hub id, or {"vocab_size": 2048} for the '
        "embedded one."
    )


def _holds_tokenizer(folder: Path) -> bool:
    files = [folder / _TOKENIZER_FILE, folder / "tokenizer_config.json"]
    return all(path.is_file() and path.stat().st_size > 0 for path in files)


def _train(spec: EmbeddedTokenizer) -> PreTrainedTokenizerFast:
    if spec.corpus == "lookup":
        texts = lookup.sample_texts()
    else:
        texts = [row["text"] for split in ("train", "valid") for row in stdlib_docs.texts(split)]
    trained = _trained_on(texts, spec.vocab_size)
    log.info(
        "trained the embedded tokenizer: %d ids from %d texts of %s",
        len(trained),
        len(texts),
        spec.corpus,
    )
    return trained


def _trained_on(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        # every byte has an id, so nothing is ever unknown
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer, length=len(texts))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,  # decoding must give back exactly what was encoded
    )
