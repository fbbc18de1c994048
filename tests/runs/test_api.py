"""`fine_tune`, `load` and `plan` against the commands: the same ids, folders, bits and predictions, in
a process that is afterwards as it was.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import forked
from tests.contract.runs import untimed
from tests.facts import LLAMA, experiment, facts, with_dropout, write_facts
from tests.ranks import run_alone
from tests.runs.test_signals import MOMENTS
from tests.wording import says
from trainer import fine_tune, load, plan
from trainer.config.identity import exp_id
from trainer.errors import LatheError
from trainer.launch.ending import LIBRARIES
from trainer.runtime import distributed
from trainer.runtime.preemption import SIGNALS

QUESTIONS = [row["question"] for row in facts(0, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def values_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of six steps with dropout."""
    return with_dropout(experiment("causal_lm", folder, base=LLAMA, **changes))


def result(run: Path) -> tuple[list[dict[str, Any]], str]:
    """What a run leaves: its numbers, and the digest of its weights."""
    weights = (run / "final" / "model.safetensors").read_bytes()
    return untimed(run / "metrics.jsonl"), hashlib.sha256(weights).hexdigest()


def command(folder: Path, savedir: Path, values: dict[str, Any]) -> Path:
    """Train an experiment by the command; its folder."""
    groups = savedir.with_suffix(".json")
    groups.write_text(json.dumps({"one": [values]}))
    flags = ["-e", "one", "--exp_configs", str(groups), "-sb", str(savedir)]
    flags += ["--data_path", str(folder), "--cache_dir", str(folder / "cache")]
    done = forked.run(*forked.TRAINVAL, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (path.parent for path in savedir.glob("*/status.json"))
    return run


def of_process() -> dict[str, Any]:
    """What belongs to the whole process, and a run changes while it trains."""
    loggers = {name: logging.getLogger(name) for name in ("", "trainer", *LIBRARIES)}
    return {
        "environment": dict(os.environ),
        "signals": [signal.getsignal(number) for number in SIGNALS],
        "loggers": {n: (one.level, one.propagate, one.handlers) for n, one in loggers.items()},
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "group": distributed.has_group(),
        "alone": distributed.leaves_alone(),
        "random": (random.getstate(), torch.get_rng_state().tolist()),
        "numpy": np.random.get_state(legacy=False)["state"]["key"].tolist(),
        "folder": os.getcwd(),
        # tqdm keeps a thread of its own, a daemon
        "work": [one.name for one in threading.enumerate() if not one.daemon],
    }


def changed(before: dict[str, Any]) -> list[str]:
    now = of_process()
    return [name for name in before if before[name] != now[name]]


# Two runs in one process
# --------------------------------------------------------------------------------------------------


def _in_one_process(folder: Path, root: Path, all_values: list[dict[str, Any]]) -> dict[str, Any]:
    """Train each experiment by fine_tune, in a process that has settings of its own."""
    torch.set_default_dtype(torch.float64)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    random.seed(7)
    with torch.no_grad():
        before, runs, left, seconds = of_process(), [], [], []
        for values in all_values:
            began = time.monotonic()
            run = fine_tune(values, folder, savedir_base=root, cache_dir=folder / "cache")
            seconds.append(time.monotonic() - began)
            runs.append(run.folder)
            left += changed(before)
        rows = [{"text": text} for text in QUESTIONS]
        predictions = run.predict(rows, max_tokens=4, batch=2)
        answer = load(runs[-1] / "final", cache_dir=folder / "cache").answer(
            QUESTIONS[0], max_tokens=4
        )
        left += changed(before)
    made = {"runs": runs, "left": left, "seconds": seconds, "answer": answer}
    return {**made, "predictions": list(predictions)}


def test_two_runs_in_a_process_are_those_of_the_command_and_leave_it_as_it_was(
    folder: Path, tmp_path: Path
) -> None:
    own = {"lr": 0.02, "weight_decay": 0.0}
    both = [values_of(folder), values_of(folder, optim=own)]
    made = run_alone(_in_one_process, folder, tmp_path / "api", both)
    assert [run.name for run in made["runs"]] == [exp_id(values) for values in both]
    assert made["left"] == []
    by_command = [
        command(folder, tmp_path / f"command{n}", values) for n, values in enumerate(both)
    ]
    assert [run.name for run in by_command] == [run.name for run in made["runs"]]
    assert [result(run) for run in made["runs"]] == [result(run) for run in by_command]
    first, last = made["runs"]
    table = load(first).metrics()
    assert [row["loss"] for row in table] == [
        line["loss"] for line in untimed(first / "metrics.jsonl") if "loss" in line
    ]
    for run, took_s in zip(made["runs"], made["seconds"], strict=True):
        assert sum(load(run).status["startup"].values()) < took_s

    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in QUESTIONS))
    words = ["predict", str(last), "--data_path", str(rows), "--out", str(out)]
    words += ["--cache_dir", str(folder / "cache"), "--max_tokens", "4", "--batch", "2"]
    done = forked.run(*forked.TRAINER, *words)
    assert done.returncode == 0, done.stderr
    predicted = [json.loads(line) for line in out.read_text().splitlines()]
    assert made["predictions"] == predicted
    assert made["answer"] == predicted[0]["prediction"]


# Errors
# --------------------------------------------------------------------------------------------------


def _refused(folder: Path, root: Path) -> list[tuple[str, str, list[str]]]:
    """(type, message, what was left) of wrong calls."""
    good = values_of(folder)
    calls: list[Callable[[], Any]] = [
        lambda: fine_tune({**good, "colour": "blue"}, folder, savedir_base=root),
        lambda: fine_tune(good, folder / "absent", savedir_base=root),
        lambda: fine_tune(good, savedir_base=root, cache_dir=folder / "cache"),
        lambda: fine_tune(good, folder, savedir_base=folder / "train.jsonl"),
        lambda: plan({**good, "colour": "blue"}, folder),
        lambda: plan(good, folder, device="abacus"),
    ]
    told: list[tuple[str, str, list[str]]] = []
    for call in calls:
        before = of_process()
        try:
            call()
        except LatheError as error:  # no SystemExit
            told.append((type(error).__name__, str(error), changed(before)))
    return told


def test_wrong_input_is_an_error_of_ours_and_nothing_is_left_behind(
    folder: Path, tmp_path: Path
) -> None:
    told = run_alone(_refused, folder, tmp_path / "runs")
    names = ["ConfigError", "DataError", "DataError", "StorageError", "ConfigError", "ConfigError"]
    assert [name for name, _, _ in told] == names
    assert [left for _, _, left in told] == [[]] * len(names)
    says("key_unknown", told[0][1], key="colour")
    says("device_unknown", told[5][1], device="abacus")


def _with_a_group(folder: Path) -> str:
    distributed.init()
    try:
        fine_tune(values_of(folder), folder)
    except LatheError as error:
        assert torch.distributed.is_initialized()
        assert distributed.total(torch.ones(())) == 1, "it can still be used"
        return str(error)
    return ""


def test_a_process_group_of_somebody_else_is_not_touched(folder: Path) -> None:
    says("group_of_api", run_alone(_with_a_group, folder))


def _wrong_rows(folder: Path, root: Path) -> list[str]:
    from tests.exported import trained

    values = {name: values_of(folder) for name in ("causal_lm",)}
    values["retriever"] = experiment("retriever", folder)
    distributed.init()
    runs = trained(values, folder, root)
    torch.distributed.destroy_process_group()
    decoder, retriever = (
        load(runs[name][0], cache_dir=folder / "cache") for name in ("causal_lm", "retriever")
    )
    calls: list[Callable[[], Any]] = [
        lambda: decoder.predict([{"text": "a"}, "b"]),  # pyright: ignore[reportArgumentType]
        lambda: decoder.predict([{"text": {1, 2}}]),
        lambda: decoder.predict([{"text": "a"}], num_answers=2),
        lambda: decoder.predict([{"text": "a"}], top_p=0.5),
        lambda: decoder.predict([{"text": "\ud83d"}]),
        lambda: decoder.answer("\ud83d"),
        lambda: decoder.answer("a", stop=""),
        lambda: decoder.answer("a", "b"),
        lambda: retriever.answer([{"role": "user", "content": "a"}]),
        lambda: retriever.answer("a"),
    ]
    told: list[str] = []
    for call in calls:
        try:
            call()
        except LatheError as error:
            told.append(str(error))
    told.append(str(len(retriever.predict([{"query": "a"}])[0]["vector"])))
    return told


def test_rows_and_questions_that_a_model_cannot_read_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    told = run_alone(_wrong_rows, folder, tmp_path)
    assert len(told) == 11
    says("row_kind", told[0], row=1, kind="str")
    says("row_not_json", told[1], row=0)
    says("answers_above_beams", told[2])
    says("top_p_without_draws", told[3], top_p=0.5)
    says("row_not_json", told[4], row=0)
    says("question_holds_half", told[5])
    says("answer_texts_wanted", told[6], value="", name="stop")
    says("answer_reads_no_contexts", told[7])
    says("answer_reads_text", told[8])
    says("makes_none", told[9], things="texts")
    assert told[10] == "16"


# An interrupt
# --------------------------------------------------------------------------------------------------


def _interrupt_in(moment: str, number: signal.Signals, times: int) -> None:
    """From now on this process gets a signal as it begins that call of a function."""
    place, call = MOMENTS[moment]
    module, _, name = place.partition(":")
    owner, seen = importlib.import_module(module), []
    function = getattr(owner, name)

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        if len(seen) == call:
            for _ in range(times):
                os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    setattr(owner, name, disturbed)


def _interrupted(
    folder: Path, root: Path, number: signal.Signals, times: int
) -> tuple[str, dict[str, Any], list[str], Path]:
    """What an interrupt said, the state afterwards, what was left, and the run that went on."""
    heard: list[int] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    values, before, said = values_of(folder), of_process(), ""
    call = functools.partial(fine_tune, values, folder, savedir_base=root)
    _interrupt_in("step", number, times)
    try:
        state = call(cache_dir=folder / "cache").status
        assert heard == [signal.SIGTERM]
    except KeyboardInterrupt as error:
        said = str(error)
        state = load(root / exp_id(values)).status
    left = changed(before)
    return said, state, left, call(cache_dir=folder / "cache").folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_says_how_to_go_on_and_the_same_call_does(
    number: signal.Signals, folder: Path, tmp_path: Path
) -> None:
    said, state, left, run = run_alone(_interrupted, folder, tmp_path / "api", number, 1)
    assert (state["state"], state["step"]) == ("preempted", 5)
    assert left == []
    if number == signal.SIGINT:
        says("interrupt_saved", said, signal="SIGINT", step=5, total=6, folder=run)
    assert result(run) == result(command(folder, tmp_path / "command", values_of(folder)))


@pytest.mark.long
def test_a_second_interrupt_leaves_without_saving(folder: Path, tmp_path: Path) -> None:
    said, state, left, run = run_alone(_interrupted, folder, tmp_path, signal.SIGINT, 2)
    says("interrupt_left", said)
    assert (state["state"], state["checkpoint"], left) == ("failed", 3, [])
    assert json.loads((run / "status.json").read_text())["state"] == "succeeded"


# Several ranks
# --------------------------------------------------------------------------------------------------

PROGRAM = """
import json, sys
from trainer import fine_tune

values, data, base, cache, ranks = json.loads(sys.argv[1])
if __name__ == "__main__":
    run = fine_tune(values, data, savedir_base=base, cache_dir=cache, ranks=ranks)
    print("ended in", run.folder)
"""


def program(folder: Path, base: Path, values: dict[str, Any], **how: Any) -> forked.Started:
    file = base.with_suffix(".py")
    file.write_text(PROGRAM)
    given = [values, str(folder), str(base), str(folder / "cache"), 2]
    return forked.start(str(file), json.dumps(given), variables={"PYTHONPATH": str(forked.ROOT)})


@pytest.mark.long  # starts torchrun
def test_several_ranks_are_started_by_torchrun_and_their_error_is_raised(
    folder: Path, tmp_path: Path
) -> None:
    values = values_of(folder)
    done = program(folder, tmp_path / "api", values).finish()
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "api" / exp_id(values)
    assert f"ended in {run}" in done.stdout
    alone = command(folder, tmp_path / "command", values)
    losses = [row["loss"] for row in load(run).metrics()]
    assert losses == pytest.approx([row["loss"] for row in load(alone).metrics()], abs=1e-5)
    broken = {**values, "data": {**values["data"], "max_tokens": 1}}
    done = program(folder, tmp_path / "broken", broken).finish()
    assert done.returncode == 1
    assert "trainer.errors.DataError: " in done.stderr


@pytest.mark.long
def test_an_interrupt_of_several_ranks_saves_and_the_same_call_goes_on(
    folder: Path, tmp_path: Path
) -> None:
    train = {"steps": 400, "log_every": 1, "eval_every": 400, "save_every": 400}
    values = values_of(folder, train=train)
    started = program(folder, tmp_path / "api", values)
    run = tmp_path / "api" / exp_id(values)
    while "step 5/400" not in started.output and started.process.is_alive():
        threading.Event().wait(0.1)
    os.kill(started.pid, signal.SIGINT)
    done = started.finish()
    says("interrupt_saved", done.stderr, at="KeyboardInterrupt", signal="SIGINT", total=400)
    assert load(run).status["state"] == "preempted"


# A plan
# --------------------------------------------------------------------------------------------------


def test_a_plan_is_what_the_command_prints(folder: Path, tmp_path: Path) -> None:
    values, cache = values_of(folder), folder / "cache"
    groups = tmp_path / "groups.py"
    groups.write_text(f"print('read')\nEXP_GROUPS = {{'one': [{values!r}]}}\n")
    words = ["plan", "-e", "one", "--exp_configs", str(groups), "--data_path", str(folder)]
    words += ["--cache_dir", str(cache), "--device", "h100", "--json"]
    done = forked.run(*forked.TRAINER, *words)
    assert done.returncode == 0, done.stderr
    before = of_process()
    forecast = plan(values, folder, device="h100", cache_dir=cache)
    assert changed(before) == []
    wanted = json.loads(done.stdout, parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    for content in (wanted, found := json.loads(json.dumps(forecast.plain()))):
        for part in ("plan", "advice"):
            del content[part]["seconds"]
    assert found == wanted
    assert "GiB" in str(forecast)
    assert forecast._repr_html_().startswith("<pre>")
    assert "trainer.plan.forecast" in sys.modules
