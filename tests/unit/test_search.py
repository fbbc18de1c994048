"""A search whose numbers contradict each other is refused wherever texts are generated."""

from __future__ import annotations

from typing import Any

import pytest

from tests.wording import Fault, fault, refused
from trainer.evaluation.search import check_search
from trainer.protocol.abilities import GREEDY, Search


@pytest.mark.parametrize(
    ("search", "problem"),
    [
        ({"top_p": 0.5}, fault("top_p_without_draws", top_p=0.5)),
        ({"temperature": 1.0, "num_beams": 2}, fault("draws_beside_beams", num_beams=2)),
        ({"num_answers": 3, "num_beams": 2}, fault("answers_above_beams", fix=3)),
        ({"temperature": -1.0}, fault("temperature_wanted", value=-1.0)),
        ({"temperature": float("nan")}, fault("temperature_wanted")),
        ({"temperature": 1.0, "top_p": 1.5}, fault("share_wanted", value=1.5)),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(
    search: dict[str, Any], problem: Fault
) -> None:
    with refused(problem):
        check_search(Search(**search))


def test_other_searches_pass() -> None:
    for search in (GREEDY, Search(4, 4), Search(1, 3, 0.7, 0.9)):
        check_search(search)
