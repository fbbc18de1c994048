"""What the environment switches on or off, and words that it does not know."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trainval
from tests.facts import experiment
from tests.ranks import run_on_ranks
from tests.wording import refused, says
from trainer import switches
from trainer.errors import ConfigError
from trainer.evaluation import predict
from trainer.launch import run, run_folder
from trainer.launch.run_folder import (
    _of_kernels as kernels_of,  # pyright: ignore[reportPrivateUsage]
)
from trainer.launch.together import run_together
from trainer.models.processor.row_attention import is_here
from trainer.plan.memory.measure import MeasureRequest
from trainer.plan.memory.measure import _key as key_of  # pyright: ignore[reportPrivateUsage]
from trainer.protocol.abilities import Prediction
from trainer.runtime import device_defaults, distributed
from trainer.switches import (
    CPU_KERNELS,
    EXAMINE,
    KEEP_MEMORY,
    LIGER,
    TF32,
    is_on,
    keeps_memory,
    uses_liger,
)


@pytest.mark.parametrize("name", [CPU_KERNELS, KEEP_MEMORY, TF32, LIGER, EXAMINE])
@pytest.mark.parametrize("word", ["yes", "true", "2", " 1", "On"])
def test_a_word_that_a_switch_does_not_know_is_refused_before_a_run(
    name: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, word)
    on, off = ("on", "off") if name == EXAMINE else ("1", "0")
    with refused("switch_word", name=name, word=word, on=on, off=off):
        device_defaults.before_torch()


def test_a_dry_run_refuses_the_word_that_the_run_would_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CPU_KERNELS, "yes")
    with refused("switch_word", name=CPU_KERNELS, word="yes", on="1", off="0"):
        trainval.begin([], {}, SimpleNamespace(together=None, survive=None, dry_run=True))  # type: ignore[arg-type]


class Looked(Exception):
    """What was to be seen was seen."""


def write(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def _refused_with(words: dict[str, str]) -> str:
    """What a rank says of a group in which the last rank's environment says these words."""
    for name in (CPU_KERNELS, EXAMINE, TF32):
        os.environ.pop(name, None)
    if not distributed.is_main():
        os.environ.update(words)
    try:
        distributed._refuse_other_switches()  # pyright: ignore[reportPrivateUsage]
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_whose_switches_differ_are_refused_on_all_of_them() -> None:
    """One rank would compute by kernels of its own, and nobody would be told."""
    for name, word in ((CPU_KERNELS, "0"), (EXAMINE, "off"), (TF32, "0")):
        for text in run_on_ranks(2, _refused_with, {name: word}):
            says("switches_of_ranks", text, name=name, word="not set", other=word, rank=1)
    assert run_on_ranks(2, _refused_with, {KEEP_MEMORY: "0"}) == ["", ""]


@pytest.mark.parametrize("default", [True, False])
def test_a_switch_that_is_not_set_has_its_default(default: bool) -> None:
    assert is_on(KEEP_MEMORY, {}, default=default) is default
    assert is_on(KEEP_MEMORY, {KEEP_MEMORY: ""}, default=default) is default
    assert is_on(KEEP_MEMORY, {KEEP_MEMORY: "1"}, default=default)
    assert not is_on(KEEP_MEMORY, {KEEP_MEMORY: "0"}, default=default)
    assert not is_on(EXAMINE, {EXAMINE: "off"}, default=default)


def test_memory_is_kept_unless_it_or_malloc_says_otherwise() -> None:
    assert keeps_memory({})
    assert not keeps_memory({KEEP_MEMORY: "0"})
    assert not keeps_memory({"MALLOC_MMAP_MAX_": "0", KEEP_MEMORY: "1"})
    with refused("switch_word", name=KEEP_MEMORY, word="no", on="1", off="0"):
        keeps_memory({KEEP_MEMORY: "no", "MALLOC_MMAP_MAX_": "0"})


def test_kernels_of_a_processor_refuse_a_word_where_no_run_has_looked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(CPU_KERNELS, raising=False)
    assert is_here(torch.ones(1))
    assert not is_here(torch.ones(1, device="meta"))
    monkeypatch.setenv(CPU_KERNELS, "0")
    assert not is_here(torch.ones(1))
    monkeypatch.setenv(CPU_KERNELS, "yes")
    with refused("switch_word", name=CPU_KERNELS, word="yes", on="1", off="0"):
        is_here(torch.ones(1))


@pytest.mark.parametrize("began", [False, True])
def test_a_run_goes_on_with_the_kernels_that_it_began_with(
    began: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.json"
    monkeypatch.setenv(CPU_KERNELS, str(int(began)))
    said = kernels_of(path, has_begun=False)
    assert said == ({"cpu_kernels": True} if began else {})
    path.write_text(json.dumps({"identity": {}, **said}))
    assert kernels_of(path, has_begun=True) == said
    monkeypatch.setenv(CPU_KERNELS, str(int(not began)))
    with refused("kernels_changed", switch=CPU_KERNELS, was=int(began), now=int(not began)):
        kernels_of(path, has_begun=True)


@pytest.mark.parametrize("began", [False, True])
def test_where_the_environment_says_nothing_a_run_keeps_its_kernels(
    began: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CPU_KERNELS, raising=False)
    plan: Any = SimpleNamespace(id="a", folder=tmp_path / "a")
    new: Any = SimpleNamespace(id="b", folder=tmp_path / "b")
    plan.folder.mkdir()
    said = {"cpu_kernels": True} if began else {}  # runs of before decision 46 have no key
    (plan.folder / "data.json").write_text(json.dumps({"identity": {}, **said}))
    options: Any = SimpleNamespace(resets=lambda _: False)
    for plans in ([plan], [new, plan]):  # a group in one process is of one kind
        with run_folder.kernels_of(plans, options):
            assert is_here(torch.ones(1)) == began
            assert kernels_of(plan.folder / "data.json", has_begun=True) == said
        assert CPU_KERNELS not in os.environ
    with run_folder.kernels_of([new], options):
        assert is_here(torch.ones(1))
    resets: Any = SimpleNamespace(resets=lambda _: True)
    with run_folder.kernels_of([plan], resets):
        assert is_here(torch.ones(1)), "a run that starts over is new"
    monkeypatch.setenv(CPU_KERNELS, str(int(not began)))
    with (
        run_folder.kernels_of([plan], options),
        refused("kernels_changed", switch=CPU_KERNELS, was=int(began), now=int(not began)),
    ):
        kernels_of(plan.folder / "data.json", has_begun=True)


def test_a_damaged_record_of_a_run_does_not_hide_that_its_kernels_are_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(CPU_KERNELS, raising=False)
    (tmp_path / "data.json").write_text("{")
    assert kernels_of(tmp_path / "data.json", has_begun=False) == {"cpu_kernels": True}
    assert "by which kernels the run began" in caplog.text


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_record_that_was_removed_does_not_hide_it_either(
    has_begun: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Errors advise to remove a damaged data.json where nothing has changed since."""
    monkeypatch.delenv(CPU_KERNELS, raising=False)
    assert kernels_of(tmp_path / "data.json", has_begun=has_begun) == {"cpu_kernels": True}
    assert ("by which kernels the run began" in caplog.text) == has_begun


def test_a_group_follows_the_kernels_of_those_that_still_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run of before made the group refuse one that began later."""
    monkeypatch.delenv(CPU_KERNELS, raising=False)
    plans: list[Any] = []
    for name, said in (("done", {}), ("goes_on", {"cpu_kernels": True})):
        plans.append(SimpleNamespace(id=name, folder=tmp_path / name))
        write(tmp_path / name / "data.json", {"identity": {}, **said})
    write(tmp_path / "done" / "status.json", {"state": "succeeded"})
    write(tmp_path / "done" / "final" / "model.json", {})
    seen: list[bool] = []
    monkeypatch.setattr(run_together, "refuse", lambda *_: None)
    monkeypatch.setattr(
        run_together._Group,  # pyright: ignore[reportPrivateUsage]
        "train",
        lambda _: seen.append(is_here(torch.ones(1))),
    )
    options: Any = SimpleNamespace(resets=lambda _: False)
    run_together.run_together(plans, options, most_tokens=1)
    assert seen == [True]


@pytest.mark.parametrize("began", [False, True])
def test_predictions_go_on_by_the_kernels_that_they_began_with(
    began: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of before say nothing, and were begun without."""
    (tmp_path / "rows.jsonl").write_text("{}\n")
    request = predict.RowsToPredict(
        tmp_path, tmp_path / "rows.jsonl", tmp_path / "out.jsonl", Prediction()
    )
    parts, task = tmp_path / ".out.jsonl.parts", SimpleNamespace(fingerprint=lambda: "")

    def begin(*_: Any) -> None:
        predict._begin(parts, request, tmp_path, task, 1)  # pyright: ignore

    monkeypatch.setattr(predict, "fingerprint", lambda *_: "")
    monkeypatch.setenv(CPU_KERNELS, str(int(began)))
    begin()
    plan = json.loads((parts / "plan.json").read_text())
    assert plan[CPU_KERNELS] == str(int(began))
    if not began:
        write(parts / "plan.json", {key: one for key, one in plan.items() if key != CPU_KERNELS})
    monkeypatch.delenv(CPU_KERNELS)
    seen: list[bool] = []
    monkeypatch.setattr(predict, "_predicted", lambda *_: seen.append(is_here(torch.ones(1))))
    predict.predict(request)
    assert seen == [began]
    monkeypatch.setenv(CPU_KERNELS, str(int(not began)))
    with refused("pieces_of_others", changed=CPU_KERNELS):
        begin()


@pytest.mark.parametrize("began", [False, True])
def test_a_finished_run_is_tested_by_the_kernels_that_it_was_trained_with(
    began: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CPU_KERNELS, raising=False)
    plan: Any = SimpleNamespace(id="a", folder=tmp_path)
    write(tmp_path / "data.json", {"identity": {}, **({"cpu_kernels": True} if began else {})})
    seen: list[bool] = []

    def look(*_: Any) -> Any:
        seen.append(is_here(torch.ones(1)))
        raise Looked

    monkeypatch.setattr(run, "choose", look)
    options: Any = SimpleNamespace(resets=lambda _: False)
    with pytest.raises(Looked):
        run.test_finished(plan, options, None)  # pyright: ignore[reportArgumentType]
    assert seen == [began]


def test_a_step_measured_with_one_kind_of_kernels_is_not_read_for_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = MeasureRequest(experiment("retriever", tmp_path), "train", [], device="cpu")
    of_gpu = replace(request, device="cuda")
    monkeypatch.setenv(CPU_KERNELS, "0")
    without, gpus = key_of(request, "program"), key_of(of_gpu, "program")
    monkeypatch.delenv(CPU_KERNELS)
    assert key_of(request, "program") != without
    assert key_of(of_gpu, "program") == gpus


def test_kernels_of_a_gpu_are_torchs_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_installed in (False, True):
        monkeypatch.setattr(switches, "has_liger", lambda is_there=is_installed: is_there)
        assert not uses_liger({})
        assert not uses_liger({LIGER: "0"})
        with refused("switch_word", name=LIGER, word="yes", on="1", off="0"):
            uses_liger({LIGER: "yes"})
    assert uses_liger({LIGER: "1"})
    monkeypatch.setattr(switches, "has_liger", lambda: False)
    with refused("extra_not_installed", name="liger-kernel", extra="gpu"):
        uses_liger({LIGER: "1"})


def test_kernels_of_a_gpu_need_their_library_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"liger_kernel", "triton"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in there or None)
    has_liger = switches.has_liger.__wrapped__
    assert has_liger()
    for name in tuple(there):
        there.remove(name)
        assert not has_liger()
        there.add(name)


@pytest.mark.parametrize("began", [False, True])
def test_a_run_goes_on_with_the_kernels_of_a_gpu_that_it_began_with(
    began: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.json"
    monkeypatch.setenv(CPU_KERNELS, "0")
    monkeypatch.setattr(switches, "has_liger", lambda: True)
    monkeypatch.setattr(run_folder, "is_gpu", lambda: True)
    monkeypatch.setenv(LIGER, str(int(began)))
    said = kernels_of(path, has_begun=True)
    assert said == ({"liger": True} if began else {})
    path.write_text(json.dumps({"identity": {}, **said}))
    assert kernels_of(path, has_begun=True) == said
    monkeypatch.setenv(LIGER, str(int(not began)))
    with refused("kernels_changed", switch=LIGER, was=int(began), now=int(not began)):
        kernels_of(path, has_begun=True)
    # on a processor, which has none of them, the run keeps what it says
    monkeypatch.setattr(run_folder, "is_gpu", lambda: False)
    assert kernels_of(path, has_begun=True) == said


def test_a_step_planned_for_a_gpu_with_its_kernels_is_not_read_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switches, "has_liger", lambda: True)
    keys: dict[tuple[str, str], str] = {}
    for device in ("fakegpu", "cpu"):
        request = MeasureRequest(experiment("retriever", tmp_path), "train", [], device=device)
        for word in ("0", "1"):
            monkeypatch.setenv(LIGER, word)
            keys[device, word] = key_of(request, "program")
    assert keys["fakegpu", "0"] != keys["fakegpu", "1"]
    assert keys["cpu", "0"] == keys["cpu", "1"]
