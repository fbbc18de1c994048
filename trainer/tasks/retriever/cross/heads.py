"""The heads of the sequence classifiers of transformers, with one output: the score.
Their weights are exported under the names that transformers gives them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.models.weights import weight_files
from trainer.tasks.retriever.model import is_causal

# N texts, D width of a state


@dataclass(frozen=True)
class HeadForm:
    """The head of one family. The names are those of its layers in transformers; {body} stands for
    that of the body.
    """

    output: str
    hidden: str | None = None  # a layer below the output layer; None: there is none
    norm: str | None = None  # of the hidden layer's states
    activation: str = "tanh"
    drops_states: bool = False  # dropout also before the hidden layer
    dropout: tuple[
        str, ...
    ] = ()  # the keys of its dropout in a config; the first that says a number


_FIRST = HeadForm(
    output="classifier",
    hidden="{body}.pooler.dense",
    dropout=("classifier_dropout", "hidden_dropout_prob"),
)
_OF_ROBERTA = HeadForm(
    output="classifier.out_proj",
    hidden="classifier.dense",
    drops_states=True,
    dropout=("classifier_dropout", "hidden_dropout_prob"),
)
_FORMS = {
    "bert": _FIRST,
    "roberta": _OF_ROBERTA,
    "xlm-roberta": _OF_ROBERTA,
    "distilbert": HeadForm(
        output="classifier",
        hidden="pre_classifier",
        activation="relu",
        dropout=("seq_classif_dropout",),
    ),
    "modernbert": HeadForm(
        output="classifier",
        hidden="head.dense",
        norm="head.norm",
        activation="gelu",
        dropout=("classifier_dropout",),
    ),
}
_OF_DECODERS = HeadForm(output="score")


def classifier_of(config: Any) -> Any:
    """The class of transformers that classifies texts with a body of this configuration.
    ConfigError where its head is not known here.
    """
    import transformers

    build = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    is_known = config.model_type in _FORMS or (is_causal(config) and not config.is_encoder_decoder)
    if build is None or not is_known:
        raise ConfigError(
            f'base: got model_type {config.model_type!r}, which has no head for form="cross" here, '
            f"want {', '.join(_FORMS)} or a decoder that transformers classifies texts with, such "
            "as llama or qwen3. Choose such a base."
        )
    return build


def form_of(config: Any) -> HeadForm:
    """The head of a family, of which classifier_of() knows."""
    return _FORMS.get(config.model_type, _OF_DECODERS)


def pooling_of(config: Any) -> str:
    """Which state of a pair is scored: "cls", "mean" or, of a decoder, "eos", the last one."""
    if config.model_type not in _FORMS:
        return "eos"
    return getattr(config, "classifier_pooling", "cls")


def names_of(form: HeadForm, own: Iterable[str], *, body: str) -> dict[str, str]:
    """By the names `own` of a head's weights here, their names in transformers. body: the name of
    the body there.
    """
    layers = {"hidden": form.hidden, "norm": form.norm, "output": form.output}
    names: dict[str, str] = {}
    for name in own:
        layer, _, rest = name.partition(".")
        names[name] = f"{layers[layer]}.{rest}".format(body=body)
    return names


class RankingHead(nn.Module):
    """The score of a pair, from its pooled state. It computes in fp32 whatever the dtype of its
    weights: of bf16 many scores would be equal.
    """

    def __init__(self, base: Any, *, seed: int, dropout: float | None) -> None:
        """base: a body of transformers, whose width and dtype are taken. dropout: in place of the
        base's own.
        """
        super().__init__()
        config = base.config
        self.form, width = form_of(config), config.hidden_size
        how: dict[str, Any] = {"dtype": next(base.parameters()).dtype}
        form = self.form
        has_bias = getattr(config, "classifier_bias", True)
        self.hidden = nn.Linear(width, width, bias=has_bias, **how) if form.hidden else None
        self.norm = None
        if form.norm:
            bias = getattr(config, "norm_bias", True)
            self.norm = nn.LayerNorm(width, eps=config.norm_eps, bias=bias, **how)
        self.output = nn.Linear(width, 1, bias=form.hidden is not None, **how)
        own = [getattr(config, key, None) for key in form.dropout]
        self.dropout = next((rate for rate in own if rate is not None), 0.0)
        if dropout is not None and form.dropout:
            self.dropout = dropout
        self._draw(seed, getattr(config, "initializer_range", 0.02))

    @torch.no_grad()
    def _draw(self, seed: int, spread: float) -> None:
        """Fill the weights as transformers does, under a seed of their own."""
        generator = torch.Generator().manual_seed(seed)
        for layer in (self.hidden, self.output):
            if layer is None or layer.weight.device.type == "meta":
                continue
            drawn = torch.empty(layer.weight.shape).normal_(0.0, spread, generator=generator)
            layer.weight.copy_(drawn)
            if layer.bias is not None:
                layer.bias.zero_()

    def forward(self, states_ND: Tensor) -> Tensor:
        """(N,) fp32 scores."""
        states_ND = states_ND.float()
        if self.form.drops_states:
            states_ND = self._dropped(states_ND)
        if self.hidden is not None:
            activate = getattr(torch, self.form.activation, None) or getattr(
                F, self.form.activation
            )
            states_ND = activate(_linear(self.hidden, states_ND))
        if self.norm is not None:
            weight, bias = self.norm.weight.float(), self.norm.bias
            states_ND = F.layer_norm(states_ND, weight.shape, weight, _float(bias), self.norm.eps)
        return _linear(self.output, self._dropped(states_ND)).squeeze(-1)

    def _dropped(self, states: Tensor) -> Tensor:
        return F.dropout(states, self.dropout, self.training)


def _linear(layer: nn.Linear, states: Tensor) -> Tensor:
    return F.linear(states, layer.weight.float(), _float(layer.bias))


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


@torch.no_grad()
def load(head: RankingHead, source: str, *, body: str) -> list[str]:
    """Fill a head from the weights of a folder, where they fit; the names of those that it lacks.

    A body that was saved alone has its pooler without the name of the body. Layers with another
    number of outputs classify something else, and are not taken.
    """
    names = names_of(head.form, dict(head.named_parameters()), body=body)
    short = {name: full.removeprefix(f"{body}.") for name, full in names.items()}
    tensors = weight_files.tensors(source, {*names.values(), *short.values()})
    missing: list[str] = []
    for name, parameter in head.named_parameters():
        values = tensors.get(names[name], tensors.get(short[name]))
        if values is None or values.shape != parameter.shape:
            missing.append(names[name])
        else:
            parameter.copy_(values)
    return missing
