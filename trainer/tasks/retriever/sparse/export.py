"""The files beside the model in an export of a sparse retriever: what it makes of texts, and a
description by which sentence-transformers' SparseEncoder (6.2 is tested) makes the same.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.config.block import validate
from trainer.errors import ConfigError
from trainer.files import safetensors_file
from trainer.models.weights import model_folder
from trainer.tasks.retriever import sentence_folder
from trainer.tasks.retriever.config import Sparse, Strict
from trainer.tasks.retriever.export import DESCRIBED_DATA, OF_SPARSE

if TYPE_CHECKING:
    from trainer.tasks.retriever.config import Config
    from trainer.tasks.retriever.tokens import Tokens

_MODULES = "sentence_transformers."
_TRANSFORMER = f"{_MODULES}base.modules.transformer.Transformer"
_POOLING = f"{_MODULES}sparse_encoder.modules.splade_pooling.SpladePooling"
_TOKENS = f"{_MODULES}sparse_encoder.modules.sparse_static_embedding.SparseStaticEmbedding"
_ROUTER = f"{_MODULES}base.modules.router.Router"
_POOLING_FOLDER, _TOKENS_FOLDER = "1_SpladePooling", "query_0_SparseStaticEmbedding"
_HERE = "."  # the folder of the model, in a list of modules with routes


class DescribedWords(Strict):
    """sparse_config.json. temperature: scores were divided by it in training."""

    pooling: str
    queries: str
    temperature: float
    separator: str
    query_prefix: str
    passage_prefix: str
    query_tokens: int
    passage_tokens: int
    append_eos: bool


def read(folder: Path) -> DescribedWords:
    """The description in an export; ConfigError when there is none, or it is malformed."""
    path = folder / OF_SPARSE
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: {error}. Want the folder of a sparse retriever: give best/ or final/ of an "
            'experiment with form="sparse", or export it again.'
        ) from None
    return validate(DescribedWords, values, source=str(path))


def sparse_of(described: DescribedWords, otherwise: Sparse) -> Sparse:
    """How an exported model makes weights; what only training reads is that of `otherwise`."""
    names = ("pooling", "queries", "temperature")
    own = {name: getattr(described, name) for name in names}
    return otherwise.model_copy(update=own)


def write(folder: Path, cfg: Config) -> None:
    """Write the description."""
    data = cfg.data.model_dump()
    content = {
        "pooling": cfg.sparse.pooling,
        "queries": cfg.sparse.queries,
        "temperature": cfg.sparse.temperature,
        **{name: data[name] for name in DESCRIBED_DATA},
    }
    (folder / OF_SPARSE).write_text(json.dumps(content, indent=2) + "\n")


def can_say(cfg: Config, tokens: Tokens, vocabulary: int) -> bool:
    """Whether sentence-transformers can express this retriever: a whole model, with the
    tokenizer's own special tokens. Its queries of tokens have as many words as the tokenizer.
    """
    if cfg.exports_adapters or cfg.data.append_eos:
        return False
    return cfg.sparse.queries == "encoded" or len(tokens.tokenizer.get_vocab()) == vocabulary


def write_for_sentences(folder: Path, cfg: Config, tokens: Tokens) -> None:
    """Write the modules of a SparseEncoder around the model in `folder`. The longer of the two
    limits is written for both sides where a model reads both.
    """
    data, is_encoded = cfg.data, cfg.sparse.queries == "encoded"
    limit = max(data.query_tokens, data.passage_tokens) if is_encoded else data.passage_tokens
    text = {"text": {"method": "forward", "method_output_name": "logits"}}
    _write(
        folder / "sentence_bert_config.json",
        {
            "max_seq_length": limit,
            "do_lower_case": False,
            "transformer_task": "fill-mask",
            "modality_config": text,
            "module_output_name": "token_embeddings",
        },
    )
    _write(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "SparseEncoder",
            "prompts": {"query": data.query_prefix, "document": data.passage_prefix},
            "default_prompt_name": None,
            "similarity_fn_name": "dot",
        },
    )
    pooling = {"pooling_strategy": cfg.sparse.pooling, "activation_function": "relu"}
    _write(folder / _POOLING_FOLDER / "config.json", {**pooling, "embedding_dimension": None})
    if is_encoded:
        places = [("", _TRANSFORMER), (_POOLING_FOLDER, _POOLING)]
    else:
        places = [("", _ROUTER)]
        _write_queries_of_tokens(folder, tokens)
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": kind}
        for number, (path, kind) in enumerate(places)
    ]
    _write(folder / sentence_folder.MODULES, modules)


def _write_queries_of_tokens(folder: Path, tokens: Tokens) -> None:
    """What queries and passages pass through, and the weight 1 for each token of a query."""
    _write(
        folder / "router_config.json",
        {
            "types": {_TOKENS_FOLDER: _TOKENS, _HERE: _TRANSFORMER, _POOLING_FOLDER: _POOLING},
            "structure": {"query": [_TOKENS_FOLDER], "document": [_HERE, _POOLING_FOLDER]},
            "parameters": {
                "default_route": "document",
                "allow_empty_key": True,
                "route_mappings": {},
            },
        },
    )
    place = folder / _TOKENS_FOLDER
    tokenizer = copy.deepcopy(sentence_folder.with_pad(tokens.tokenizer))
    around = len(tokens.before) + len(tokens.after)
    tokenizer.model_max_length = tokens.limit("query") - around
    model_folder.write_tokenizer(place, tokenizer)
    ones = torch.ones(len(tokenizer.get_vocab()))
    safetensors_file.write_tensors(place, "model.safetensors", {"weight": ones})
    _write(place / "config.json", {"frozen": True})


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")
