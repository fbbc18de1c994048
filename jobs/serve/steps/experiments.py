"""The experiment of a driven run: a causal language model of an offer, with adapters, whose rows a
client sends.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

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


class Driven(Strict):
    """How an offer may be driven step by step (docs/steps-over-http.md)."""

    name: Annotated[str, Field(pattern=MODEL_NAME)] | None = None
    """What clients call the base model, such as "Qwen/Qwen3-8B"; None: the name of the offer."""
    tokenizer: Annotated[str, Field(max_length=256)] | None = None
    """What clients load as its tokenizer: a name of the Hub. None: the name."""
    max_tokens: Positive = 2048
    """Of one row, and of a prompt with its continuation."""
    max_rank: Positive = 128
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
    tasks.parse(driven_experiment(one, AdapterWish(rank=1), "trial"), source=source)


def driven_experiment(one: DrivenOffer, adapters: AdapterWish, label: str) -> Values:
    """The experiment of a driven run. ConfigError for an offer that is none of a causal language
    model.

    label: a text that no other run has, so that the run has a folder of its own.
    """
    before = one.offer.experiment
    if before.get("task") != "causal_lm":
        raise ConfigError(
            f"driven: the model {one.key!r} has the task {before.get('task')!r}, want 'causal_lm'. "
            "Leave driven out."
        )
    values = copy.deepcopy({k: v for k, v in before.items() if k not in ("data", "schedule")})
    values["data"] = {"source": "client", "max_tokens": one.driven.max_tokens}
    if one.driven.together > 1:
        values["data"]["together"] = one.driven.together
    values["lora"] = {**values.get("lora", {}), "r": adapters.rank, "alpha": ALPHA}
    train = dict(values["train"])
    for key in ("eval_every", "save_every", "answers", "best", "best_is", "hours", "patience"):
        train.pop(key, None)
    values["train"] = train
    for key, block in one.driven.changes.items():
        old = values.get(key)
        values[key] = (
            {**old, **block} if isinstance(old, dict) and isinstance(block, dict) else block
        )
    values["label"] = label
    return values
