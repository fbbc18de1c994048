"""`from trainer import submit`: what `lathe submit` does, with dictionaries in place of a group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exp_configs import EXP_GROUPS, vary
from tests.jobs.conftest import Place
from tests.wording import refused
from trainer import load, submit
from trainer.config.identity import exp_id
from trainer.errors import LatheError

SWEEP = [vary(EXP_GROUPS["causal_lm_tiny"][0], train={"seed": seed}) for seed in range(2)]
Make = Callable[[int], Place]


def send(here: Place, experiments: list[dict[str, Any]], **how: Any) -> list[dict[str, Any]]:
    job = {"python_binary": str(here.python)}
    given = {"backend": "local", "job": job, "allow_dirty": True, **how}
    return submit(experiments, savedir_base=here.base, **given)


def test_dictionaries_are_sent_once_under_the_ids_and_flags_of_the_command(
    place: Make, tmp_path: Path
) -> None:
    here = place(2)
    sent = send(here, SWEEP, data=tmp_path, log_every=7, strict=True)
    assert [row["exp_id"] for row in sent] == [exp_id(values) for values in SWEEP]
    assert {row["action"] for row in sent} == {"send"}
    rows = here.until_all("succeeded")
    assert {row["group"] for row in rows} == {"python"}
    assert {row["exp_id"] for row in rows} == {row["exp_id"] for row in sent}
    log = (here.base / rows[0]["exp_id"] / "attempts" / "1" / "logs.txt").read_text()
    for flag in (f"--data_path={tmp_path}", "--log_every=7", "'--strict'"):
        assert flag in log
    again = send(here, SWEEP)
    assert [(row["action"], row["text"]) for row in again] == [("skip", "it is done")] * 2
    first = load(here.base / sent[0]["exp_id"])
    assert first.metrics() == [{"step": 1, "loss": 0.0}]
    by_command = here.submit("--json").json  # the group `sweep` holds the same dictionaries
    assert {row["action"] for row in by_command} == {"skip"}


def test_what_cannot_be_sent_is_an_error_with_every_reason(place: Make) -> None:
    here = place(1)
    with refused("key_unknown", key="colour"):
        send(here, [SWEEP[0], {**SWEEP[1], "colour": "blue"}])
    with refused("backend_unknown", name="cloud"):
        send(here, SWEEP, backend="cloud")
    with refused("key_unknown", key="gpux"):
        send(here, SWEEP, job={"gpux": 8})
    with refused("experiments_equal", group="python"):
        send(here, [SWEEP[0], SWEEP[0]])
    assert not list(here.base.glob("*/job.jsonl"))
    folder = here.base / exp_id(SWEEP[0])
    folder.mkdir(parents=True)
    (folder / "exp_dict.json").write_text("{}")
    with pytest.raises(LatheError) as caught:
        send(here, SWEEP)
    assert caught.value.exit_code == 3
    assert exp_id(SWEEP[0]) in str(caught.value)
    assert exp_id(SWEEP[1]) not in str(caught.value)
