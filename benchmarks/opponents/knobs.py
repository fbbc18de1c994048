"""What the author of a training loop may choose, and the search for the fastest choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

ALL = 10_000  # rows or texts at once: all of them


@dataclass(frozen=True)
class Knobs:
    """The choices of one opponent. Of `packing`, "padded" alone computes pads."""

    packing: str = "padded"  # single: one row at a time; rows, equal, flattened: one long row
    micro_batch: int = ALL  # rows in one graph
    chunk: int = ALL  # texts of like length that an encoder reads at once, of one graph
    attention: str = "sdpa"  # eager: plain products
    head: str = "labelled"  # stock: also the logits of tokens without labels
    optimizer: str = "fused"  # of torch's AdamW: fused, foreach
    grouped: bool = True  # rows of like length share a micro-batch
    multiple: int = 1  # widths are rounded up to a multiple of it
    loss: str = "own"  # of sentence-transformers: mnrl, cached_mnrl
    autocast: bool = False  # bf16
    compiled: bool = False  # torch.compile(dynamic=True)

    def __str__(self) -> str:
        """What differs from the usual."""
        usual, said = Knobs(), []
        for name, value in vars(self).items():
            if value != getattr(usual, name):
                said.append(name if value is True else f"{name} {value}")
        return ", ".join(said) or "padded, all rows at once"


Space = dict[str, tuple[Any, ...]]
_SIZES = (1, 2, 4, 8, 16, ALL)
_OTHERS: Space = {"attention": ("sdpa", "eager"), "optimizer": ("fused", "foreach")}
_OTHERS |= {"grouped": (True, False), "multiple": (1, 8)}
_MICRO, _CHUNK = {"micro_batch": (2, 4, 8, ALL)}, {"chunk": (2, 4, 8, 16, ALL)}
_HEAD = {"head": ("labelled", "stock")}
PADDED: dict[str, Space] = {
    "causal_lm": {**_MICRO, **_HEAD, **_OTHERS},
    "summariser": {**_MICRO, **_HEAD, **_OTHERS},
    "fid": {"micro_batch": (1, 2), "chunk": _CHUNK["chunk"], **_HEAD, **_OTHERS},
    "vera": {**_CHUNK, **_OTHERS},
    "retriever": {**_CHUNK, "loss": ("own", "mnrl", "cached_mnrl"), **_OTHERS},
    "cross_attention": {**_MICRO, **_OTHERS},
}
_STREAM: Space = {"micro_batch": (1, 2, 4, 8, ALL), "packing": ("rows", "equal", "single")}
_PRODUCTS: Space = {"attention": ("eager", "sdpa")}
_T5 = {**_STREAM, **_PRODUCTS}
UNPADDED: dict[str, Space] = {
    "causal_lm": {**_STREAM, "packing": ("rows", "equal", "flattened", "single")},
    "summariser": _T5,
    "fid": {**_T5, "micro_batch": (1, 2), "chunk": (1, 2, 5, ALL)},
    "vera": {"chunk": (1, 4, 16, ALL), "packing": _STREAM["packing"], **_PRODUCTS},
    # not flattened: of BERT transformers takes position ids for no mask of rows, as of decoders
    "retriever": {"chunk": (1, 4, 16, ALL), "packing": _STREAM["packing"]},
    "cross_attention": _STREAM,
}
FIRST = {"padded": Knobs(), "unpadded": Knobs(packing="rows")}
USUAL = {  # what races without a search
    "padded": (Knobs(), Knobs(micro_batch=4, chunk=4)),
    "unpadded": (Knobs(packing="equal"), Knobs(packing="single", attention="eager")),
}
SPACES = {"padded": PADDED, "unpadded": UNPADDED}
SLOW: Space = {"compiled": (False, True)}  # it compiles for a minute


def search(
    first: Knobs, space: Space, seconds_of: Callable[[Knobs], float | str]
) -> list[tuple[float, Knobs]]:
    """Every choice that works, the fastest first. One knob after the other takes the value that is
    fastest beside the values of the others; then all knobs once more, if one has moved.

    seconds_of: the seconds of a choice, or the reason why it does not work.
    """
    tried: dict[Knobs, float | str] = {}

    def took(knobs: Knobs) -> float:
        if knobs not in tried:
            tried[knobs] = seconds_of(knobs)
        seconds = tried[knobs]
        return seconds if isinstance(seconds, float) else float("inf")

    best = first
    for _ in range(2):
        before = best
        for name, values in space.items():
            best = min((replace(best, **{name: value}) for value in values), key=took)
        if best == before:
            break
    if took(best) == float("inf"):
        raise RuntimeError(f"no choice works: {tried}")
    works = [(value, knobs) for knobs, value in tried.items() if isinstance(value, float)]
    return sorted(works, key=lambda pair: pair[0])
