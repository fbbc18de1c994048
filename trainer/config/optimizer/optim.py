"""The optimizer and the rates of its weights: the block `optim`. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config.block import Fraction, Strict

# The keys that only some optimizers read.
_OF_NAME = {
    "betas": ("adamw", "lion", "muon", "adamw8bit"),
    "eps": ("adamw", "muon", "adamw8bit"),
    "momentum": ("sgd", "muon"),
    "nesterov": ("sgd", "muon"),
}
# What an optimizer has where its dictionary says nothing, if it is not the schema's default.
# Sources: Chen et al. 2023 (Lion), sec. 3.3; torch.optim.SGD; torch.optim.Muon.
_OWN_DEFAULTS = {
    "lion": {"betas": (0.9, 0.99)},
    "sgd": {"momentum": 0.0, "nesterov": False},
    "muon": {"momentum": 0.95, "nesterov": True},
}


class RateGroup(Strict):
    """Weights, by their names, with a learning rate or a weight decay of their own."""

    match: Annotated[str, Field(min_length=1)]
    """Names of weights, with * for any text and ? for any character. A weight that several entries
    name belongs to the first.
    """
    lr: Annotated[float, Field(ge=0)] | None = None
    """Their learning rate at its highest, in place of `optim.lr`, layer_decay and lora.plus; the
    schedule scales it. None: as without this entry.
    """
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Their weight decay, also of biases and norms; None: as without this entry."""

    @model_validator(mode="after")
    def _says_something(self) -> RateGroup:
        if self.lr is None and self.weight_decay is None:
            raise ValueError(f'match="{self.match}" changes nothing: give it lr or weight_decay')
        return self


class Optim(Strict):
    """AdamW; Adafactor: second moments as a row and a column, steps in proportion to the size of
    a weight; SGD; Lion: the sign of a momentum; Muon: the momentum of a matrix made orthogonal;
    adamw8bit: moments in 8 bits. See optimisers.md.
    """

    name: Literal["adamw", "adafactor", "sgd", "lion", "muon", "adamw8bit"] = "adamw"
    """Which optimizer. What each needs and where it runs: optimisers.md."""
    lr: Annotated[float, Field(gt=0)]
    """Learning rate at its highest. Adafactor: of a step relative to its weights, at most
    1/sqrt(step). Muon: the rate of AdamW, to whose steps its own are scaled.
    """
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay of the first and second moments, of AdamW, adamw8bit and what Muon leaves to AdamW.
    Lion: of the step and of its momentum, 0.9 and 0.99 unless given.
    """
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moments. AdamW, adamw8bit and what Muon leaves to AdamW."""
    momentum: Fraction | None = None
    """Decay of the sum of gradients. None: 0 for SGD, which then remembers nothing; Muon: 0.95."""
    nesterov: bool | None = None
    """Whether a step looks ahead by its momentum. None: false for SGD, true for Muon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled (Loshchilov & Hutter 2019), times the rate of the step. SGD: added to the gradient,
    as torch does.
    """
    decay: Literal["matrices", "all"] = "matrices"
    """What weight decay applies to. matrices: never biases, norms or other 1-D parameters."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the whole gradient; 0.0 switches clipping off. Muon: of the gradient, before
    anything is made orthogonal.
    """
    groups: tuple[RateGroup, ...] = ()
    """Weights with a learning rate or a weight decay of their own, by name."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The rate of each block, as a share of that of the block above it: its last block has so much
    of optim.lr, embeddings have the least, what stands above the blocks has all of it. 1.0: all
    weights have one rate.
    """

    @model_validator(mode="after")
    def _moments_are_adamws(self) -> Optim:
        foreign = [
            key
            for key, names in _OF_NAME.items()
            if self.name not in names
            and key in self.model_fields_set
            and getattr(self, key) is not None
        ]
        if foreign:
            readers = "; ".join(f"{key} is read by {', '.join(_OF_NAME[key])}" for key in foreign)
            raise ValueError(
                f'name="{self.name}" has no {" and no ".join(foreign)}: leave out what only others '
                f"read ({readers})"
            )
        return self

    @model_validator(mode="after")
    def _has_its_own_defaults(self) -> Optim:
        for key, value in _OWN_DEFAULTS.get(self.name, {}).items():
            if key not in self.model_fields_set or getattr(self, key) is None:
                vars(self)[key] = value
        if self.name == "sgd" and self.nesterov and not self.momentum:
            raise ValueError("nesterov=true without momentum: give momentum, say 0.9, or leave it")
        return self
