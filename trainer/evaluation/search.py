"""How texts are generated, checked the one way for evaluation, predict and the functions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.protocol.abilities import Search


def check_search(search: Search) -> None:
    """ConfigError for a search of which a number is none, or contradicts another one."""
    if search.temperature is not None and not 0 < search.temperature < math.inf:
        raise ConfigError(f"--temperature {search.temperature}: want a number above 0.")
    if not 0 <= search.top_p <= 1:
        raise ConfigError(f"--top_p {search.top_p}: want a share between 0 and 1.")
    if search.temperature is None and search.top_p < 1.0:
        raise ConfigError(
            f"--top_p {search.top_p} says what is drawn from, but nothing is. Add --temperature "
            "1.0."
        )
    if search.temperature is not None and search.num_beams > 1:
        raise ConfigError(
            f"--temperature draws, --num_beams {search.num_beams} searches. Leave one of the two "
            "out."
        )
    if search.temperature is None and search.num_answers > search.num_beams:
        raise ConfigError(
            f"--num_answers {search.num_answers} with --num_beams {search.num_beams}: that many "
            "beams end in no more "
            f"answers than beams. Use --num_beams {search.num_answers} or more."
        )
