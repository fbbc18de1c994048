"""The masked-LM heads of transformers: what stands between a body's states and the output layer,
which gives each token a logit for each word of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.models.weights import absent

Transform = Callable[[Tensor], Tensor]


def _of_bert(model: Any) -> Transform:
    return model.cls.predictions.transform


def _of_roberta(model: Any) -> Transform:
    head = model.lm_head
    return lambda states: head.layer_norm(F.gelu(head.dense(states)))


def _of_distilbert(model: Any) -> Transform:
    return lambda states: model.vocab_layer_norm(model.activation(model.vocab_transform(states)))


def _of_modernbert(model: Any) -> Transform:
    return model.head


_TRANSFORMS: dict[str, Callable[[Any], Transform]] = {
    "bert": _of_bert,
    "roberta": _of_roberta,
    "xlm-roberta": _of_roberta,
    "distilbert": _of_distilbert,
    "modernbert": _of_modernbert,
}


def check(config: Any) -> None:
    """ConfigError for a base whose masked-LM head is not known here."""
    if config.model_type not in _TRANSFORMS or getattr(config, "is_decoder", False):
        raise ConfigError(
            f"base: got model_type {config.model_type!r}, which has no masked-LM head for "
            f'form="sparse" here, want {", ".join(_TRANSFORMS)}. Choose such a base.'
        )


def check_read(model: Any, source: str) -> None:
    """ConfigError when the files of a base lack weights of its head: transformers has drawn them at
    random, and the words of a text would be random, too.
    """
    body = f"{model.base_model_prefix}."
    lost = [name for name in absent.names(model) if not name.startswith(body)]
    if lost:
        raise ConfigError(
            f"base={source!r}: its files hold a body without its masked-LM head (they lack "
            f'{", ".join(sorted(lost))}), and form="sparse" reads the words of a text off that '
            "head. Name a folder with the weights of a model that fills masks, such as "
            "BertForMaskedLM."
        )


def transform_of(model: Any) -> Transform:
    """The layers before the output layer: (M, D) states of the body -> (M, D)."""
    return _TRANSFORMS[model.config.model_type](model)


def output_of(model: Any) -> nn.Linear:
    """The output layer. ConfigError where adapters stand in it: its logits are computed in chunks
    without them.
    """
    layer: Any = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear) or hasattr(layer, "lora_A"):
        raise ConfigError(
            f"lora: got adapters in the output layer of the base ({type(layer).__name__}), which "
            'form="sparse" reads without them. Name other layers in lora.targets or lora.parts.'
        )
    return layer
