"""What proves a run: a chain over what every step did, and a seal on every line of metrics.jsonl.

The chain is a function of what was computed: (step, rows, loss bits, bits of the gradient's norm),
step by step on every rank, and the random state where a line shows it. A replay from a checkpoint
gives the same proofs, or names the first step that differs. The seals are a function of the file:
a line that was changed, lost or written twice does not fit those before it.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from trainer.runtime import distributed, rng

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

PROOF, SEAL = "proof", "seal"
DIGITS = 16  # hexadecimal ones of a digest in the file: 64 bits
DOUBLED = "stands there twice"
MOST_PENDING = 256  # steps whose numbers may wait on the device
_SEALED = re.compile(rb', "seal": "([0-9a-f]{16})"\}\n')


@dataclass
class StepChain:
    """The chain of this rank: each link is a digest of the one before and of what a step did.

    Numbers stay on the device until a line, a save or MOST_PENDING steps ask for them.
    """

    link: str = ""  # of this rank, up to the last step that was taken in
    _pending: list[tuple[bytes, Tensor, Tensor]] = field(default_factory=list[Any])

    @classmethod
    def of(cls, links: Sequence[str]) -> StepChain:
        """The chain that continues from the result of links(), for any world size."""
        if len(links) == distributed.world():
            return cls(links[distributed.rank()])
        return cls(_digest(*links) if links else "")

    def add(
        self, step: int, rows: Sequence[np.ndarray], loss: Tensor, norm: Tensor | float
    ) -> None:
        """Add one step. loss: () this rank's part; norm: () of the unclipped gradient."""
        if not torch.is_tensor(norm):
            norm = torch.tensor(norm, dtype=torch.float64)
        step_bytes = struct.pack("<q", step) + b"".join(row.astype("<i8").tobytes() for row in rows)
        # copies: an engine may write the next norm into the same tensor
        self._pending.append((step_bytes, loss.detach().clone(), norm.detach().double().clone()))
        if len(self._pending) >= MOST_PENDING:
            self._settle()

    def present(self) -> str:
        """The last link of this rank."""
        self._settle()
        return self.link

    def links(self) -> list[str]:
        """The last link of every rank, by rank, for a checkpoint. A collective."""
        return distributed.gather(self.present())

    def proof(self) -> str:
        """ "<digest>/<world>" over all ranks' links and random states, as they are now. A
        collective.
        """
        self._settle()
        own = _digest(self.link, digest_of_random_state())
        return f"{_digest(*distributed.gather(own))[:DIGITS]}/{distributed.world()}"

    def _settle(self) -> None:
        if not self._pending:
            return
        losses = torch.stack([loss.double() for _, loss, _ in self._pending]).tolist()
        norms = torch.stack([norm.to(loss.device) for _, loss, norm in self._pending]).tolist()
        for (step_bytes, _, _), loss, norm in zip(self._pending, losses, norms, strict=True):
            step = hashlib.sha256(step_bytes + struct.pack("<dd", loss, norm))
            self.link = _digest(self.link, step.hexdigest())
        self._pending.clear()


def digest_of_random_state() -> str:
    """A digest of the state of every random generator of this process."""
    state = rng.capture()
    return _digest(
        *(hashlib.sha256(state[name].numpy().tobytes()).hexdigest() for name in sorted(state))
    )


def seal_line(entry: dict[str, Any], previous: str) -> tuple[bytes, str]:
    """A line of metrics.jsonl, and its seal. previous: the seal of the line before, "" at first."""
    content = json.dumps(entry).encode()
    seal = _seal(content, previous)
    return content[:-1] + f', "{SEAL}": "{seal}"}}\n'.encode(), seal


def seal_of(line: bytes) -> str:
    """The seal of a line; "" for a line of an older version, which has none."""
    match = _SEALED.search(line)
    return match[1].decode() if match and match.end() == len(line) else ""


def damage(lines: Sequence[bytes]) -> Iterator[tuple[int, str]]:
    """(number from 1, what is wrong) of every whole line that is not as the run wrote it there.

    Lines of versions without seals are taken as they are, as long as none before has one.
    """
    previous, earlier = "", set[bytes]()
    for number, line in enumerate(lines, start=1):
        seal = seal_of(line)
        if line in earlier and seal:
            yield number, DOUBLED
            continue
        try:
            is_entry = isinstance(json.loads(line), dict)
        except ValueError:
            is_entry = False
        if not is_entry:
            yield number, "is no line of a run"
            continue
        content = line[: line.rindex(b', "seal"')] + b"}" if seal else line
        if (seal or previous) and _seal(content, previous) != seal:
            yield number, "was changed, or lines before it are lost"
        previous = seal or previous
        earlier.add(line)


def _seal(content: bytes, previous: str) -> str:
    return hashlib.sha256(previous.encode() + content).hexdigest()[:DIGITS]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
