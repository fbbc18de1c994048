"""Reads `--survive RANKS[+SPARES][,hang_s=S][,every=K]`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.errors import ConfigError

FORM = r"([1-9]\d{0,3})(?:\+(\d{1,3}))?(?:,hang_s=([1-9]\d{0,5}))?(?:,every=([1-9]\d{0,5}))?"
LAUNCHED = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True)
class Survival:
    """How many ranks train, and how many spare processes wait to take the place of a lost one."""

    ranks: int
    spares: int = 0
    hang_s: float = 60.0  # without progress; ten steps if those take longer
    every: int = 1  # steps between two copies of what ranks go on from


def parse(text: str, *, environment: Mapping[str, str] = os.environ) -> Survival:
    """ConfigError for another text, or under a launcher that starts ranks itself."""
    match = re.fullmatch(FORM, text)
    if match is None:
        raise ConfigError(
            f"--survive {text!r}: want RANKS or RANKS+SPARES, such as 3+1: three ranks, and one "
            "process that takes the place of any of them. Then, if wanted, ,hang_s=SECONDS and "
            ",every=STEPS."
        )
    launched = [name for name in LAUNCHED if name in environment]
    if launched:
        raise ConfigError(
            f"--survive {text}: {', '.join(launched)} is set, but --survive starts the ranks "
            "itself. Start it with python, not with torchrun or deepspeed."
        )
    ranks, spares, hang_s, every = (int(number or 0) for number in match.groups())
    return Survival(ranks, spares, hang_s or Survival.hang_s, every or Survival.every)
