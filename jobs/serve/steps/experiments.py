"""The experiment of a driven run: a causal language model of an offer, with adapters, whose rows a
client sends.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import Field

from jobs.serve.steps.bodies import AdapterWish
from trainer import tasks
from trainer.config.block import Positive, Strict
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from jobs.serve.offers import Offer, ServiceConfig

Values = dict[str, Any]
MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$"
ALPHA = 32  # of adapters of any rank, as the SDK's documentation says of its service
GIBIBYTE = 1 << 30
# What a driven run has of the dictionary of its offer; its client says all else.
OF_OFFER = ("base", "tokenizer", "deepspeed")
OF_TRAIN = (
    "precision",
    "micro_batch",
    "micro_tokens",
    "global_batch",
    "gradient_checkpointing",
    "base_bits",
    "attention",
)


class Driven(Strict):
    """How an offer may be driven step by step (docs/steps-over-http.md)."""

    name: Annotated[str, Field(pattern=MODEL_NAME)] | None = None
    """What clients call the base model, such as "Qwen/Qwen3-8B"; None: the name of the offer."""
    tokenizer: Annotated[str, Field(max_length=256)] | None = None
    """What clients load as its tokenizer: a name of the Hub. None: the name."""
    max_tokens: Positive = 2048
    """Of one row, and of a prompt with its continuation."""
    max_rank: Positive = 128
    steps: Positive = 1_000_000
    """The most steps of the optimizer of one run."""
    put_aside_s: Annotated[float, Field(gt=0)] = 600.0
    """Without an operation for so long a run saves its state and gives its device back; the next
    operation wakes it.
    """
    together: Positive = 1
    """How many runs one worker computes on one base; 1: each has a worker of its own."""
    log_bytes: Positive = 4 * GIBIBYTE
    """Of the operations of a run that may have to be run again."""
    changes: Values = Field(default_factory=dict)
    """Blocks laid over the dictionary of the offer, such as {"deepspeed": "zero2"}."""


@dataclass(frozen=True)
class DrivenOffer:
    """An offer that may be driven. key: its name in service.py."""

    key: str
    name: str
    offer: Offer
    driven: Driven

    @property
    def tokenizer(self) -> str:
        """What clients load as the tokenizer."""
        return self.driven.tokenizer or self.name


def driven_offers(config: ServiceConfig) -> dict[str, DrivenOffer]:
    """The offers that may be driven, by the names that clients of the dialect use."""
    offers: dict[str, DrivenOffer] = {}
    for key, offer in config.models.items():
        if offer.driven:
            one = driven_offer(key, offer)
            offers.setdefault(one.name, one)
    return offers


def driven_offer(key: str, offer: Offer) -> DrivenOffer:
    """An offer that may be driven, by its name in service.py."""
    driven = offer.driven if isinstance(offer.driven, Driven) else Driven()
    return DrivenOffer(key, driven.name or key, offer, driven)


def check_driven(config: ServiceConfig, key: str, offer: Offer, *, source: str) -> None:
    """Return if an offer can be driven, under a name that no other offer has; else ConfigError."""
    one = next(
        one for one in driven_offers(config).values() if one.key == key or one.offer is offer
    )
    if one.key != key:
        raise ConfigError(f"{source}: the name {one.name!r} is that of {one.key!r}. Use another.")
    tasks.parse(driven_experiment(one, AdapterWish(rank=1), "trial", 0), source=source)


def driven_experiment(one: DrivenOffer, adapters: AdapterWish, label: str, seed: int) -> Values:
    """The experiment of a driven run. ConfigError for an offer that is none of a causal language
    model.

    label: a text that no other run has, so that the run has a folder of its own. seed: of the
    adapters that are drawn, and of all dropout.
    """
    before = one.offer.experiment
    if before.get("task") != "causal_lm":
        raise ConfigError(
            f"driven: the model {one.key!r} has the task {before.get('task')!r}, want 'causal_lm'. "
            "Leave driven out."
        )
    values = {key: copy.deepcopy(before[key]) for key in OF_OFFER if key in before}
    if values.get("deepspeed") == "auto":
        values["deepspeed"] = "zero2"
    values["task"] = "causal_lm"
    values["optim"] = {"lr": before["optim"]["lr"]}  # which no step uses
    values["data"] = {
        "source": "client",
        "max_tokens": one.driven.max_tokens,
        "put_aside_s": one.driven.put_aside_s,
    }
    if one.driven.together > 1:
        values["data"]["together"] = one.driven.together
    parts = {
        "attention": adapters.train_attn,
        "mlp": adapters.train_mlp,
        "output": adapters.train_unembed,
    }
    own = {k: v for k, v in before.get("lora", {}).items() if k not in ("targets", "r", "alpha")}
    values["lora"] = {"dropout": 0.0, **own, "r": adapters.rank, "alpha": ALPHA}
    values["lora"]["parts"] = [part for part, trains in parts.items() if trains]
    train = {key: one for key, one in before["train"].items() if key in OF_TRAIN and one != "auto"}
    values["train"] = {"micro_batch": 1, **train, "steps": one.driven.steps, "seed": seed}
    values["train"].setdefault("global_batch", values["train"]["micro_batch"])
    for key, block in one.driven.changes.items():
        old: Any = values.get(key)
        if isinstance(old, dict) and isinstance(block, dict):
            values[key] = {**cast("Values", old), **cast("Values", block)}
        else:
            values[key] = block
    values["label"] = label
    return values
