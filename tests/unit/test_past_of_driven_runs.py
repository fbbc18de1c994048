"""What a run that starts again knows of its past, and what a failure of one run does to others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.wording import refused
from trainer.driven import adam
from trainer.driven.account import Account, outcome_of
from trainer.driven.checks import adam_of, loss_of
from trainer.driven.model import DrivenModel
from trainer.driven.states import States
from trainer.driven.together.shared_loop import SharedLoop
from trainer.errors import CheckpointError, StorageError
from trainer.launch.driving import runs
from trainer.operations.operation_log import FOLDER, STATES, Operation
from trainer.operations.results import ResultWriter


def operation(seq: int, kind: Any) -> Operation:
    return Operation(seq, kind, {}, b"", 0.0, "", "")


def write_results(run: Path, *results: tuple[str, dict[str, Any]]) -> None:
    writer = ResultWriter(run / FOLDER)
    for seq, (kind, fields) in enumerate(results):
        writer.append(seq, fields, work={"kind": kind})
    writer.close()


def test_a_run_that_was_stopped_behind_its_end_has_ended(tmp_path: Path) -> None:
    refusal = {"error": "the run has ended", "category": "user"}
    write_results(tmp_path, ("create", {}), ("end", {}), ("forward", refusal))
    ended = [runs._past(tmp_path, after)["has_ended"] for after in (-1, 0, 1, 2)]
    assert ended == [False, False, True, True]
    created = [runs._past(tmp_path, after)["is_created"] for after in (-1, 0)]
    assert created == [False, True]


def test_an_end_that_a_disk_refused_is_left_out_of_a_replay(tmp_path: Path) -> None:
    """Where the disk has room by now, it would give another result than the client was given."""
    full = {"error": "no space", "category": "server"}
    write_results(tmp_path, ("create", {}), ("end", full), ("end", {}))
    model: Any = SimpleNamespace(progress=SimpleNamespace(step=0))
    account = Account(model, tmp_path, after=-1, every=50)
    assert [account.skips(operation(seq, "end")) for seq in (1, 2)] == [True, False]
    account.close()


def test_a_list_of_states_that_a_disk_refuses_fails_on_no_rank(tmp_path: Path) -> None:
    """Only rank 0 writes it: the others would go on alone."""
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / STATES).mkdir()  # cannot be replaced by a file
    states = States(tmp_path, lambda *_: lambda: tmp_path, "base")
    states.keep(SimpleNamespace(), 3)  # pyright: ignore[reportArgumentType]
    states.saves.wait()


def test_a_step_that_was_made_is_not_told_to_have_failed_where_its_line_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stops before it has told anything, and makes the step again when there is room."""

    def full(step: int, line: dict[str, float]) -> None:
        raise StorageError("metrics.jsonl: no space left")

    monkeypatch.setattr(adam, "update", lambda engine, how: 1.0)
    unused: Any = SimpleNamespace()
    progress: Any = SimpleNamespace(step=0)
    how: Any = {"engine": unused, "layout": unused, "states": unused, "lora": unused}
    how |= {"vocabulary": 9, "most_tokens": 9, "most_steps": 9, "seed": 0, "export": print}
    model = DrivenModel(progress=progress, log=full, is_created=True, **how)
    model.pending.operations = 1
    numbers = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
    step = Operation(0, "optim_step", dict.fromkeys(numbers, 0.5), b"", 0.0, "", "")
    account = Account(model, tmp_path, after=-1, every=50)
    outcome = outcome_of(lambda: model.do(step))
    assert outcome[0] == {"metrics": {"grad_norm": 1.0, "step": 1}}
    with pytest.raises(StorageError):
        account.book(step, outcome)
    assert account._stored(0) is None
    account.close()


@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan")])
def test_a_number_beyond_every_float_is_refused(value: float) -> None:
    names = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
    with refused("driven_adam", name="learning_rate"):
        adam_of({**dict.fromkeys(names, 0.5), "learning_rate": value})
    with refused("driven_loss_number", key="beta"):
        loss_of({"loss_fn": "dro", "loss_fn_config": {"beta": value}})


class Member:
    """A run of a worker, whose log cannot be read with `error`."""

    def __init__(self, name: str, folder: Path, error: Exception | None) -> None:
        self.name, self.current, self.worked_at = name, None, 0.0
        self.happened: list[Any] = []
        states = SimpleNamespace(saves=SimpleNamespace(leave=self._note("waits for its save")))
        self.model = SimpleNamespace(has_ended=False, states=states)
        self.account = SimpleNamespace(folder=folder, close=self._note("closes"))
        self.leave = self.happened.append
        self.reader = SimpleNamespace(next=lambda: self._raise(error))

    def _note(self, text: str) -> Any:
        return lambda *_: self.happened.append(text)

    def _raise(self, error: Exception | None) -> None:
        if error is not None:
            raise error

    def is_idle(self, now: float) -> bool:
        return False


def turn(tmp_path: Path, error: Exception, *, stops: list[str]) -> Any:
    """The guest, whose log cannot be read, after one turn of a worker."""
    host: Any = Member("host", tmp_path, None)
    guest: Any = Member("guest", tmp_path, error)
    guest.account.keep = lambda: guest.happened.append("saves")
    guest.model.states.saves.wait = lambda: None
    door: Any = SimpleNamespace(stops=lambda: stops, arrivals=lambda: [])
    preemption: Any = SimpleNamespace(requested=False)
    base: Any = None
    loop = SharedLoop(host, base, door, preemption, most_tokens=8, most_runs=2)
    loop.members["guest"] = guest
    loop._turn()
    assert list(loop.members) == ["host"]
    return guest


@pytest.mark.parametrize(
    ("error", "kind"),
    [(CheckpointError("altered"), CheckpointError), (PermissionError(13, "no"), StorageError)],
)
def test_a_log_that_cannot_be_read_ends_its_own_run_when_its_save_is_over(
    error: Exception, kind: type[Exception], tmp_path: Path
) -> None:
    guest = turn(tmp_path, error, stops=[])
    assert guest.happened[:2] == ["waits for its save", "closes"]
    assert isinstance(guest.happened[2], kind)


def test_a_run_with_a_damaged_log_that_is_asked_to_stop_leaves_once(tmp_path: Path) -> None:
    guest = turn(tmp_path, CheckpointError("altered"), stops=["guest"])
    assert guest.happened == ["saves", "closes", "preempted"]
