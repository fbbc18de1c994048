"""Losses of preferences are computed in chunks of targets under ZeRO-3, too, where a rank may have
more chunks than another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.runs import Runs, losses, train
from tests.ranks import run_on_ranks

FORMS = ["preference", "preference, kto", "preference, orpo", "preference, t5"]


def _in_chunks(values: dict[str, Any], folder: Path, savedir: Path) -> list[float]:
    from trainer.models import losses as of_base

    of_base.CHUNK_BYTES, of_base.CHUNK_POSITIONS = 0, 5
    return losses(train(values, folder, savedir, stage=3)[1])


@pytest.mark.long
@pytest.mark.parametrize("name", FORMS)
def test_chunks_change_no_loss_where_weights_are_partitioned(
    name: str, runs: Runs, tmp_path: Path
) -> None:
    wanted = runs.of(name, "at once").losses
    found = run_on_ranks(2, _in_chunks, runs.values(name, "plain"), runs.folder, tmp_path)[0]
    assert found == pytest.approx(wanted, abs=1e-5)
