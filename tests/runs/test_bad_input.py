"""Every kind of bad input: one clear error that says got, want and fix, exit code 2, and nothing on
disk lost.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from exp_configs import vary
from tests.contract.runs import from_folder
from tests.facts import TINY_BASE, experiment, facts, write_facts
from tests.forked import TRAINVAL, run
from tests.ranks import run_on_ranks
from trainer.errors import LatheError


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


def trainval(*flags: str) -> subprocess.CompletedProcess[str]:
    return run(*TRAINVAL, *flags)


def with_groups(tmp_path: Path, values: dict[str, Any]) -> list[str]:
    path = tmp_path / "groups.py"
    path.write_text(f"EXP_GROUPS = {{'mine': [{values!r}]}}\n")
    return ["--exp_configs", str(path), "-e", "mine", "-sb", str(tmp_path / "out")]


def expect_refusal(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert result.returncode == 2, result.stdout + result.stderr
    for part in parts:
        assert part in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_group_names_the_nearest_one() -> None:
    expect_refusal(
        trainval("-e", "crossattn_tinny", "-sb", "out"),
        "crossattn_tinny",
        "Did you mean 'crossattn_tiny'?",
    )


def test_a_missing_savedir_is_asked_for() -> None:
    expect_refusal(trainval("-e", "crossattn_tiny"), "-sb/--savedir_base is required")


def test_an_unknown_flag_suggests_the_nearest_one() -> None:
    expect_refusal(
        trainval("-e", "crossattn_tiny", "-sb", "out", "--log_evry", "3"),
        "--log_evry",
        "--log_every",
    )


def test_a_switch_that_is_neither_on_nor_off_is_refused() -> None:
    expect_refusal(
        trainval("-e", "x", "-sb", "out", "--push_to_hub", "maybe"), "maybe", "true, false, on, off"
    )


def test_an_entity_without_a_project_is_refused(folder: Path, tmp_path: Path) -> None:
    flags = [
        *with_groups(tmp_path, experiment("cross_attention", folder)),
        "--wandb_entity_name",
        "me",
    ]
    flags += ["--data_path", str(folder), "--cache_dir", str(folder / "cache")]
    expect_refusal(trainval(*flags), "--wandb_entity_name and --wandb_project_name")


def test_an_id_that_is_not_that_of_the_folders_dictionary_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    (renamed / "exp_dict.json").write_text(json.dumps(experiment("cross_attention", folder)))
    expect_refusal(
        trainval("--exp_id", "renamed", "-sb", str(tmp_path)),
        "renamed",
        "Give the folder that name",
    )


def test_every_misspelt_and_mistyped_key_is_named_at_once(folder: Path, tmp_path: Path) -> None:
    values = experiment(
        "cross_attention", folder, train={"percision": "fp32"}, optim={"lr": "fast"}
    )
    values["layers"] = {**values["layers"], "strid": 2}  # type: ignore[dict-item]
    result = trainval(*with_groups(tmp_path, values))
    expect_refusal(
        result, "3 mistake(s)", "Did you mean 'precision'?", "optim.lr", "Did you mean 'stride'?"
    )
    assert not (tmp_path / "out").exists()


def test_batch_sizes_that_do_not_divide_name_both_numbers(folder: Path, tmp_path: Path) -> None:
    values = experiment("cross_attention", folder, train={"global_batch": 30, "micro_batch": 4})
    expect_refusal(
        trainval(*with_groups(tmp_path, values)), "global_batch=30", "micro_batch=4", "28 or 32"
    )


def test_adapters_for_layers_that_do_not_exist_are_refused(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the optional package peft is not installed")
    flags = with_groups(tmp_path, experiment("fid", folder, lora={"targets": ["q", "q_prj"]}))
    flags += ["--data_path", str(folder), "--cache_dir", str(folder / "cache")]
    expect_refusal(
        trainval(*flags),
        "lora.targets=['q', 'q_prj']: there is no 'q_prj'",
        "The linear layers of a t5 are k, o, q, v, wi, wo.",
        '"all-linear"',
    )


def test_a_deepspeed_key_that_does_not_exist_is_refused(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimisation": {"stage": 3}}))
    flags = [
        *with_groups(tmp_path, experiment("cross_attention", folder)),
        "--deepspeed",
        str(file),
    ]
    expect_refusal(trainval(*flags), "zero_optimisation", "Did you mean 'zero_optimization'?")


def refuse(
    values: dict[str, Any], data: Path | None, savedir: Path, cache: Path
) -> tuple[str, int, str]:
    """(class, exit code, text) of the error that this experiment raises on one rank."""
    from trainer.launch.run import run
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    options = Options(savedir, data_path=data, cache_dir=cache)
    try:
        run(plan(values, options, world=1, rank=0), options, Preemption())
    except LatheError as error:
        return type(error).__name__, error.exit_code, str(error)
    return "none", 0, ""


def _refusals(
    cases: list[tuple[dict[str, Any], Path | None, Path]], cache: Path
) -> list[tuple[str, int, str]]:
    return [refuse(values, data, savedir, cache) for values, data, savedir in cases]


def test_models_and_data_that_do_not_fit_are_refused_before_training(
    folder: Path, tmp_path: Path
) -> None:
    plain = experiment("cross_attention", folder)
    bad_row = shutil.copytree(folder, tmp_path / "bad_row", ignore=shutil.ignore_patterns("cache"))
    lines = [json.dumps(row) for row in facts(0, 9)]
    lines[4] = json.dumps({**facts(4, 5)[0], "question": "  "})
    (bad_row / "train.jsonl").write_text("\n".join(lines) + "\n")
    torn = shutil.copytree(bad_row, tmp_path / "torn")
    (torn / "train.jsonl").write_text("\n".join([*lines[:2], '{"question": "x", ']) + "\n")
    empty = shutil.copytree(bad_row, tmp_path / "empty")
    (empty / "train.jsonl").write_text("")
    cases = {
        "stride": (
            vary(plain, layers={"count": 3}),
            folder,
            "ConfigError",
            ["layers.count=3 x layers.stride=2"],
        ),
        "heads": (
            vary(plain, layers={"heads": 3}),
            folder,
            "ConfigError",
            ["layers.heads=3", "layers.width=16"],
        ),
        "positions": (
            vary(plain, data={"context_tokens": 999}),
            folder,
            "ConfigError",
            ["context_tokens=999", "128"],
        ),
        "no folder": (plain, tmp_path / "nowhere", "DataError", ["nowhere"]),
        "no flag": (plain, None, "DataError", ["--data_path"]),
        "blank": (plain, bad_row, "DataError", ["train.jsonl", "5", "question"]),
        "torn": (plain, torn, "DataError", ["train.jsonl", "3"]),
        "empty": (plain, empty, "DataError", ["train.jsonl", "empty"]),
        "cut answer": (
            vary(plain, data={"loss_on": "answer", "decoder_tokens": 8}),
            folder,
            "DataError",
            ["decoder_tokens=8"],
        ),
        "vocabulary": (
            vary(plain, base={"config": {**TINY_BASE["config"], "vocab_size": 300}}),  # type: ignore[dict-item]
            folder,
            "ConfigError",
            ["300"],
        ),
        "base key": (
            vary(plain, base={"config": {"model_type": "gpt_bigcode", "n_hed": 2}}),
            folder,
            "ConfigError",
            ["n_head"],
        ),
        "best metric": (
            vary(plain, train={"best": "valid/f2"}),
            folder,
            "ConfigError",
            ["valid/f2", "valid/loss"],
        ),
        "base run": (
            vary(plain, base={"experiment": plain}),
            folder,
            "ConfigError",
            ["holds no model"],
        ),
    }
    inputs = [
        (values, data, tmp_path / f"out {name}") for name, (values, data, _, _) in cases.items()
    ]
    found = run_on_ranks(1, _refusals, inputs, tmp_path / "cache")[0]
    for (name, (_, _, kind, parts)), (got, code, text) in zip(cases.items(), found, strict=True):
        assert (got, code) == (kind, 2), f"{name}: {got} {text}"
        for part in parts:
            assert part in text, f"{name}: {text}"


def _train_then(
    values: dict[str, Any], folder: Path, savedir: Path, change: str
) -> list[tuple[str, int, str]]:
    """Train to the end, change something behind the run's back, and ask for more steps of the same
    folder.
    """
    from trainer.launch.run import run
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    options = Options(savedir, data_path=folder, cache_dir=savedir / "cache")
    planned = plan(values, options, world=1, rank=0)
    first = refuse(values, folder, savedir, savedir / "cache")
    if change == "dictionary":
        path = planned.folder / "exp_dict.json"
        stored = json.loads(path.read_text())
        path.write_text(json.dumps({**stored, "optim": {"lr": 5.0}}))
    elif change == "data":
        with (folder / "train.jsonl").open("a") as file:
            file.write(json.dumps(facts(900, 901)[0]) + "\n")
    else:
        import torch
        from safetensors.torch import load_file, save_file

        weights = load_file(Path(values["base"]) / "model.safetensors")
        weights["transformer.ln_f.bias"] += torch.tensor(1e-3)
        save_file(weights, Path(values["base"]) / "model.safetensors", metadata={"format": "pt"})
    before = sorted((p.name, p.read_bytes()) for p in planned.folder.rglob("*.safetensors"))
    second = refuse(values, folder, savedir, savedir / "cache")
    assert before == sorted((p.name, p.read_bytes()) for p in planned.folder.rglob("*.safetensors"))
    assert callable(run)
    return [first, second]


@pytest.mark.parametrize("change", ["dictionary", "data", "base"])
def test_resuming_with_something_else_than_it_began_with_is_refused(
    change: str, tmp_path: Path
) -> None:
    folder = write_facts(tmp_path / "facts")
    values = experiment("cross_attention", folder)
    if change == "base":
        from transformers import AutoConfig, AutoModelForCausalLM

        config = dict(TINY_BASE["config"])  # type: ignore[call-overload]
        AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config.pop("model_type"), **config)
        ).save_pretrained(tmp_path / "base")
        values = {**values, "base": str(tmp_path / "base")}
    first, second = run_on_ranks(1, _train_then, values, folder, tmp_path / "out", change)[0]
    assert first[1] == 0, first
    assert second[:2] == ("ResumeError", 2)
    assert {"dictionary": "optim", "data": "train", "base": "base"}[change] in second[2]
    assert "-r 1" in second[2]


def _fill_the_disk(
    values: dict[str, Any], folder: Path, savedir: Path
) -> tuple[tuple[str, int, str], list[str]]:
    """The second save meets a full disk: writes past a file size limit fail as they do when no
    space is left.
    """
    from trainer.training import checkpoint

    original, calls = checkpoint.save, []

    def full(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) < 2:
            return original(*args, **kwargs)
        import trainer.files.safetensors_file as shards

        def refused(*args: Any, **kwargs: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        shards.os.fsync, real = refused, shards.os.fsync
        try:
            return original(*args, **kwargs)
        finally:
            shards.os.fsync = real

    checkpoint.save = full
    try:
        outcome = refuse(values, folder, savedir, savedir / "cache")
    finally:
        checkpoint.save = original
    return outcome, sorted(p.name for p in savedir.glob("[0-9a-f]*/checkpoints/*"))


def test_a_full_disk_during_a_save_keeps_the_checkpoint_before_it(
    folder: Path, tmp_path: Path
) -> None:
    values = experiment("cross_attention", folder)
    outcome, left = run_on_ranks(1, _fill_the_disk, values, folder, tmp_path / "out")[0]
    assert outcome[:2] == ("StorageError", 2)
    assert "No space left" in outcome[2]
    assert left == ["step-3"]


def _disturbed(
    cases: dict[str, dict[str, Any]], folder: Path, root: Path
) -> dict[str, tuple[tuple[str, int, str], dict[str, Any], list[str]]]:
    """For each run the error, status.json and its checkpoints. The name says what is disturbed: the
    disk is full from the first write into a folder of that name on, or the lock is removed."""
    from trainer.training import loop

    fsync, train_step = os.fsync, loop.train_step
    found = {}
    for name, values in cases.items():
        is_full: list[int] = []

        def refused(descriptor: int, name: str = name, is_full: list[int] = is_full) -> None:
            if f"/{name}" in os.readlink(f"/proc/self/fd/{descriptor}").replace("/.", "/"):
                is_full.append(1)
            if is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        def unlocked(*args: Any, savedir: Path = root / f"run of {name}", **options: Any) -> Any:
            for lock in savedir.glob(".*.lock"):
                lock.unlink()
            return train_step(*args, **options)

        os.fsync, loop.train_step = refused, unlocked if name == "no_lock" else train_step
        try:
            outcome = refuse(values, folder, root / f"run of {name}", root / "cache")
        finally:
            os.fsync, loop.train_step = fsync, train_step
        (status,) = (root / f"run of {name}").glob("*/status.json")
        left = sorted(path.name for path in (root / f"run of {name}").glob("*/checkpoints/*"))
        found[name] = outcome, json.loads(status.read_text()), left
    return found


def test_a_disk_that_is_full_or_a_lock_that_is_removed_ends_a_run_as_failed(
    folder: Path, tmp_path: Path
) -> None:
    short = {"steps": 2, "eval_every": 2, "save_every": 2}
    cases = {
        "best": experiment("causal_lm", folder, train=short),
        "answers": experiment("fid", folder, train=short | {"answers": 2}),
        "no_lock": experiment("causal_lm", folder, train=short),
    }
    found = run_on_ranks(1, _disturbed, cases, folder, tmp_path)[0]
    for name, (outcome, status, left) in found.items():
        is_disk = name != "no_lock"
        assert outcome[:2] == ("StorageError" if is_disk else "HeldError", 2), f"{name}: {outcome}"
        text = f"/{name}" if is_disk else ".lock was removed"
        assert text in outcome[2].replace("/.", "/"), f"{name}: {outcome}"  # still a hidden name
        assert status["state"] == "failed", name
        assert {*left} <= {"step-2"}, f"{name}: a whole checkpoint or none"
        assert outcome[2][:40] in status["error"], name


def _diverge(
    values: dict[str, Any], folder: Path, savedir: Path
) -> tuple[tuple[str, int, str], list[str]]:
    outcome = refuse(values, folder, savedir, savedir / "cache")
    return outcome, sorted(p.name for p in savedir.glob("[0-9a-f]*/checkpoints/*"))


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(
    log_every: int, folder: Path, tmp_path: Path
) -> None:
    train = {"steps": 12, "log_every": log_every, "save_every": 1, "eval_every": 100}
    values = experiment("cross_attention", folder, train=train, optim={"lr": 1e36, "clip": 0.0})
    outcome, left = run_on_ranks(1, _diverge, values, folder, tmp_path / "out")[0]
    assert outcome[:2] == ("DivergedError", 1)
    assert "optim.lr" in outcome[2]
    assert left, "the checkpoint before the first update with a learning rate above 0 is kept"


@pytest.mark.parametrize(
    "train",
    [{"log_every": 100}, {"on_bad_step": "skip"}, {"precision": "bf16"}],
)
def test_a_weight_of_the_base_that_is_no_number_is_blamed_and_not_the_rows(
    train: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    values = from_folder(experiment("causal_lm", folder, train=train), tmp_path / "bases")
    (file, *_) = sorted(Path(str(values["base"])).glob("*.safetensors"))
    weights = load_file(file)
    name = next(name for name, weight in weights.items() if weight.ndim == 2)
    weights[name][:] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    outcome, _ = run_on_ranks(1, _diverge, values, folder, tmp_path / "out")[0]
    assert outcome[:2] == ("ConfigError", 2)
    assert f"{file}: {name} holds NaN" in outcome[2]


def _push(values: dict[str, Any], folder: Path, savedir: Path) -> tuple[str, str, bool]:
    from trainer.launch.run import run
    from trainer.runtime.preemption import Preemption
    from trainer.training.options import Options
    from trainer.training.run_plan import plan

    planned = plan(values, Options(savedir), world=1, rank=0)
    try:
        run(planned, Options(savedir, data_path=folder, push_to_hub=True), Preemption())
    except LatheError as error:
        return (
            type(error).__name__,
            str(error),
            (planned.folder / "metrics.jsonl").stat().st_size > 0,
        )
    return "none", "", True


def test_a_hub_that_cannot_be_pushed_to_is_noticed_before_training(
    folder: Path, tmp_path: Path
) -> None:
    kind, text, has_trained = run_on_ranks(
        1, _push, experiment("cross_attention", folder), folder, tmp_path
    )[0]
    assert kind == "ConfigError", text
    assert "--push_to_hub" in text
    assert "hf auth login" in text
    assert not has_trained
