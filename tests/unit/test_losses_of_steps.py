"""The service refuses what the ranks would refuse: it knows the same losses."""

from __future__ import annotations

from jobs.serve.steps.datums import CONFIG, INPUTS
from trainer.driven.losses import LOSSES
from trainer.driven.packs import TARGETS


def test_the_service_knows_the_losses_of_the_ranks_with_their_inputs_and_settings() -> None:
    ours = {name: (sorted(need), sorted(may)) for name, (need, may) in INPUTS.items()}
    theirs = {
        name: (sorted([TARGETS, *loss.inputs]), sorted(loss.optional))
        for name, loss in LOSSES.items()
    }
    assert ours == theirs
    assert {name: sorted(keys) for name, keys in CONFIG.items()} == {
        name: sorted(loss.config) for name, loss in LOSSES.items()
    }
