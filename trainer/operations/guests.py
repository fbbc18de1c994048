"""The runs that ask the worker of another one, the host, to compute them on its base.

`HOST/operations/guests/TOKEN.json` asks: {"id": of the run, beside the host's folder}. Whoever asks
again with the same token changes nothing. `TOKEN.in.json`: the worker computes it.
`TOKEN.out.json`: it has left, with `code` (0 ended, 10 put aside, 75 to go on elsewhere, else
failed) and `error`. `TOKEN.stop`: it is to leave, and is never let in.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.files.atomic import create_json, read_json, refusals, write_json
from trainer.operations.operation_log import FOLDER

GUESTS = "guests"
_ASKED, _IN, _OUT, _STOP = ".json", ".in.json", ".out.json", ".stop"


@dataclass(frozen=True)
class Stay:
    """How a guest stands. code, error: how it left."""

    state: Literal["absent", "waiting", "in", "out"]
    code: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Guests:
    """The guests of one host."""

    folder: Path

    @classmethod
    def of(cls, host: Path) -> Guests:
        """Those of a host, by its run folder."""
        return cls(host / FOLDER / GUESTS)

    def ask(self, token: str, exp_id: str) -> None:
        """Ask to be let in, once. StorageError."""
        with refusals(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        create_json(self.folder / f"{token}{_ASKED}", {"id": exp_id})

    def stop(self, token: str) -> None:
        """Ask for the end of a stay. StorageError."""
        with refusals(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{token}{_STOP}").touch()

    def stay(self, token: str) -> Stay:
        """How the guest of a token stands."""
        out = read_json(self.folder / f"{token}{_OUT}")
        if out is not None:
            return Stay("out", out.get("code"), out.get("error"))
        for state, ending in (("in", _IN), ("waiting", _ASKED)):
            if (self.folder / f"{token}{ending}").exists():
                return Stay(state)  # pyright: ignore[reportArgumentType]
        return Stay("absent")

    def num_staying(self) -> int:
        """How many are in, or wait."""
        return len([*self.arrivals()])

    # The worker's side

    def arrivals(self) -> Iterator[dict[str, Any]]:
        """{"token", "id"} of those who have not left, and are not asked to: also of those whom an
        earlier worker of this host computed.
        """
        names = self._names()
        for name in sorted(names):
            token = name.removesuffix(_ASKED)
            is_asked = name.endswith(_ASKED) and not name.endswith((_IN, _OUT))
            if is_asked and not {f"{token}{_OUT}", f"{token}{_STOP}"} & names:
                values = read_json(self.folder / name)
                if values is not None:
                    yield {"token": token, "id": str(values["id"])}

    def stops(self) -> list[str]:
        """The tokens of those who are to leave."""
        return [name.removesuffix(_STOP) for name in self._names() if name.endswith(_STOP)]

    def let_in(self, token: str) -> None:
        """Write down that the worker computes a guest."""
        write_json(self.folder / f"{token}{_IN}", {"at": time.time()})

    def let_out(self, token: str, code: int, error: str | None = None) -> None:
        """Write down how a guest has left."""
        write_json(self.folder / f"{token}{_OUT}", {"code": code, "error": error})

    def _names(self) -> set[str]:
        with suppress(FileNotFoundError):
            return set(os.listdir(self.folder))
        return set()
