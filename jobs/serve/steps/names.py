"""Ids of the Tinker dialect, each of which says what it belongs to.

    sess-0123...            a session
    sess-0123...:train:0    a training run: the session's n-th training client
    sess-0123...:train:0:7  a future: operation 7 of that run, by the client's own number
    sess-0123...:sample:0   a sampler: the session's n-th sampling client
    sess-0123...:sample:0:7 a future: request 7 of that sampler
    tinker://RUN/weights/NAME, .../sampler_weights/NAME, .../external_weights/NAME   saved weights

Nothing has to be remembered to find what an id names, so any server process answers for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from jobs.serve.requests import Refusal, quote

SESSION = "sess-"
ClientKind = Literal["train", "sample"]
WeightsKind = Literal["weights", "sampler_weights", "external_weights"]
KIND_OF_CHECKPOINT: dict[WeightsKind, str] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
MOST_CLIENTS = 100_000  # of one session
_CLIENT = re.compile(rf"({SESSION}[0-9a-f]{{24}}):(train|sample):(0|[1-9][0-9]{{0,8}})")
_FUTURE = re.compile(rf"({_CLIENT.pattern}):(0|[1-9][0-9]{{0,18}})")
_PATH = re.compile(rf"tinker://([^/]{{1,80}})/(weights|sampler_weights|external_weights)/({NAME})")


@dataclass(frozen=True)
class ClientId:
    """A training client or a sampling client of a session."""

    session: str
    kind: ClientKind
    number: int

    def __str__(self) -> str:
        return f"{self.session}:{self.kind}:{self.number}"


@dataclass(frozen=True)
class WeightsPath:
    """Saved weights of a run."""

    run: ClientId
    kind: WeightsKind
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        """How the SDK calls it within its run."""
        return f"{self.kind}/{self.name}"


def client_id(text: str, kind: ClientKind) -> ClientId:
    """The client that an id names. Refusal (404) for any other text."""
    match = _CLIENT.fullmatch(text)
    if match is None or match[2] != kind or int(match[3]) >= MOST_CLIENTS:
        raise absent("training run" if kind == "train" else "sampler", text)
    return ClientId(match[1], kind, int(match[3]))


def future_id(text: str) -> tuple[ClientId, int]:
    """The client and the number of the request that a future is of. Refusal (404)."""
    match = _FUTURE.fullmatch(text)
    if match is None or int(match[4]) >= MOST_CLIENTS:
        raise absent("request", text)
    kind: ClientKind = "train" if match[3] == "train" else "sample"
    return ClientId(match[2], kind, int(match[4])), int(match[5])


def weights_path(text: str, *, param: str = "path") -> WeightsPath:
    """What a tinker path names. Refusal (400) for a text that is none."""
    match = _PATH.fullmatch(text)
    if match is None:
        want = "tinker://RUN/weights/NAME, or sampler_weights in the place of weights"
        raise Refusal(400, f"{param}: got {quote(text)}, want {want}.", param=param)
    kind: WeightsKind = match[2]  # type: ignore[assignment]
    return WeightsPath(client_id(match[1], "train"), kind, match[3])


def checkpoint_path(run: str, checkpoint: str) -> WeightsPath:
    """The weights that a run's id and a checkpoint's id name together. Refusal."""
    return weights_path(f"tinker://{run}/{checkpoint}", param="checkpoint_id")


def is_name(text: str) -> bool:
    """Whether a text may name saved weights: it is safe as a part of the name of a folder."""
    return re.fullmatch(NAME, text) is not None


def absent(noun: str, text: str) -> Refusal:
    """The refusal (404) of an id that names nothing, or what is another token's: nobody can tell
    which of the two.
    """
    return Refusal(404, f"There is no {noun} {quote(text)} of yours. Use an id of your own.")
