"""A group as a whole: stop requests between experiments, errors of one rank, restarts."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.facts import experiment, write_facts
from tests.ranks import run_on_ranks


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def _group(experiments: list[dict[str, Any]], folder: Path, savedir: Path) -> int:
    from trainer.launch.group import run_group
    from trainer.runtime import distributed
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    options = Options(savedir, data_path=folder, cache_dir=folder / "cache")
    world, rank = distributed.world(), distributed.rank()
    return run_group(
        [plan(values, options, world=world, rank=rank) for values in experiments], options
    )


def _signalled(
    moment: str, experiments: list[dict[str, Any]], folder: Path, savedir: Path
) -> list[int]:
    """Only rank 1 gets the signal, inside the last step of the first experiment or behind it; then
    the same group again.
    """
    from trainer.launch import group
    from trainer.runtime import distributed
    from trainer.training import loop

    module, name, number = {"last step": (loop, "train_step", 2), "between": (group, "run", 1)}[
        moment
    ]
    original, calls = getattr(module, name), []

    def signalled(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        is_now = len(calls) == number and distributed.rank() == 1
        if is_now and moment == "last step":
            os.kill(os.getpid(), signal.SIGTERM)
        result = original(*args, **kwargs)
        if is_now and moment == "between":
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    setattr(module, name, signalled)
    try:
        first = _group(experiments, folder, savedir)
    finally:
        setattr(module, name, original)
    return [first, _group(experiments, folder, savedir), len(list(savedir.glob("[0-9a-f]*/final")))]


@pytest.mark.parametrize("moment", ["last step", "between"])
def test_a_stop_request_at_the_end_of_one_experiment_stops_the_group_on_all_ranks(
    moment: str, folder: Path, tmp_path: Path
) -> None:
    one = experiment("cross_attention", folder, train={"steps": 2})
    two = experiment("cross_attention", folder, train={"steps": 2, "seed": 6})
    ranks = run_on_ranks(2, _signalled, moment, [one, two], folder, tmp_path)
    assert ranks == [[75, 0, 2]] * 2


def _export_fails(values: dict[str, Any], folder: Path, savedir: Path) -> tuple[str, str]:
    """The disk refuses rank 0's best/ with an error as tokenizers raises it; rank 1 must not wait
    for ever.
    """
    from trainer.errors import LatheError
    from trainer.tasks.cross_attention.decoder import export

    def refused(*args: Any, **kwargs: Any) -> None:
        raise Exception(
            "No space left on device (os error 28)"
        )  # its very class: tokenizers has no other

    export.safetensors_file = SimpleNamespace(write_tensors=refused)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        _group([values], folder, savedir)
    except LatheError as error:
        return type(error).__name__, str(error)
    return "none", ""


def test_an_error_of_rank_0_alone_reaches_every_rank(folder: Path, tmp_path: Path) -> None:
    values = experiment("cross_attention", folder)
    for kind, text in run_on_ranks(2, _export_fails, values, folder, tmp_path):
        assert kind == "StorageError"
        assert "No space left" in text


def test_a_restarted_command_does_not_start_over_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import trainval

    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert not trainval._is_restart()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert trainval._is_restart()
