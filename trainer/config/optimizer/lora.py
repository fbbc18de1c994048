"""The block of low-rank adapters. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from trainer.config.block import Fraction, Positive, Strict


def _list_or_all(value: Any) -> Any:
    is_list = isinstance(value, list) and value and all(isinstance(one, str) for one in value)  # pyright: ignore
    if value is None or value == "all-linear" or is_list:
        return value  # pyright: ignore[reportUnknownVariableType] (checked)
    raise ValueError('Input should be a list of names, such as ["q", "v"], or "all-linear"')


_NAMES = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_LIST_OR_ALL = {"anyOf": [_NAMES, {"const": "all-linear"}, {"type": "null"}]}
Targets = Annotated[
    list[str] | str | None, BeforeValidator(_list_or_all), WithJsonSchema(_LIST_OR_ALL)
]


Part = Literal["attention", "mlp", "output"]


class LayerPattern(Strict):
    """Layers with adapters of another rank or scale."""

    match: str
    """Their names, or the ends of their names, in which * stands for any text."""
    r: Positive | None = None
    """Their rank; None: as lora.r says."""
    alpha: Positive | None = None
    """Their adapters are scaled by alpha / r; None: as lora.alpha says."""


class Lora(Strict):
    """Low-rank adapters (peft) in a base that is frozen; a task's new layers train beside them."""

    r: Positive = 16
    """Rank: rows of the narrow matrix of every adapter."""
    alpha: Positive = 64
    """Adapters are scaled by alpha / r."""
    dropout: Fraction = 0.1
    """Of what goes into an adapter, in training."""
    targets: Targets = None
    """Names of linear layers, or the ends of their names. None: all seven projections of Llama and
    its kin; of other families what peft takes for them (q and v of a T5), else all of them.
    all-linear: all but the output layer.
    """
    parts: Annotated[list[Part], Field(min_length=1)] | None = None
    """Which parts get adapters, in any family: all linear layers of attention, all other ones of
    the blocks (mlp), the output layer, also where it shares its matrix with the embedding, which
    stays as it is. Names in `targets` get some besides. None: as `targets` says.
    """
    layers: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """The numbers of the blocks whose layers get adapters, from 0; None: all. They count in both
    halves of an encoder-decoder.
    """
    patterns: list[LayerPattern] = Field([])
    """Layers of another rank or scale: [{"match": "*.mlp.*", "r": 4, "alpha": 8}], by their names
    or the ends of their names. The first one counts that fits; without r or alpha, lora's own.
    """
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases of the base train besides. lora_only: of layers with adapters."""
    modules_to_save: list[str] = Field([])
    """Names of the base's modules, or the ends of their names, that train whole and get no
    adapters, such as ["lm_head"].
    """
    tokens: list[Annotated[int, Field(ge=0)]] = Field([])
    """Ids of tokens whose rows of the embedding train, such as those of new control tokens; also in
    an output layer that shares its matrix.
    """
    init: Literal["default", "gaussian", "pissa", "pissa_niter_16"] = "default"
    """What adapters begin with. default: A uniform, B 0. gaussian: A normal, B 0. pissa: the
    largest singular values of the base's weights, which are taken out of them (Meng et al. 2024);
    pissa_niter_16: the same by a faster approximation.
    """
    rslora: bool = False
    """Scaled by alpha / sqrt(r) instead of alpha / r (Kalajdzievski 2023)."""
    dora: bool = False
    """The norm of every row of a weight trains by itself (Liu et al. 2024)."""
    plus: Annotated[float, Field(gt=0)] = 1.0
    """The rate of an adapter's second matrix (B), as a multiple of that of its first, which is
    optim.lr (LoRA+, Hayou et al. 2024: 16). 1.0: both have one rate.
    """
    export: Literal["adapter", "merged"] = "adapter"
    """What best/ and final/ hold. adapter: peft's files, which name their base. merged: the whole
    base with the adapters added to its weights, which any program reads that reads the base.
    """

    @property
    def weights_of_base(self) -> str | None:
        """The first of these keys by which weights of the base change; None: it stays as it is."""
        changes = {
            f'init="{self.init}"': self.init.startswith("pissa"),
            f'bias="{self.bias}"': self.bias != "none",
            f"modules_to_save={self.modules_to_save}": bool(self.modules_to_save),
        }
        return next((text for text, is_set in changes.items() if is_set), None)

    @model_validator(mode="after")
    def _no_token_twice(self) -> Lora:
        twice = sorted({token for token in self.tokens if self.tokens.count(token) > 1})
        if twice:
            raise ValueError(
                f"tokens: {', '.join(map(str, twice))} stand(s) there twice; once is enough"
            )
        return self

    @model_validator(mode="after")
    def _a_part_of_the_base_has_no_norms(self) -> Lora:
        if self.dora and self.init.startswith("pissa"):
            raise ValueError(
                f'init="{self.init}" with dora: the norms of weights would be those of what is '
                "left of them. Leave one of the two out"
            )
        return self
