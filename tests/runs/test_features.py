"""What the command and a run folder promise: preview, ids, starting over, exports that load,
pruning, one owner.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exp_configs import EXP_GROUPS, vary
from tests.contract.runs import train, untimed
from tests.facts import TINY_BASE, experiment, with_dropout, write_facts
from tests.forked import TRAINVAL, Started, start
from tests.ranks import run_on_ranks
from tests.wording import refused, says
from trainer import tasks
from trainer.config.identity import exp_id
from trainer.protocol.task import Places

SMALL = {"steps": 2, "eval_every": 2, "save_every": 2}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


# The command
# --------------------------------------------------------------------------------------------------


def _die_before_renaming(name: str, occurrence: int) -> None:
    """From now on this process kills itself just before it renames something to `name` for the n-th
    time.
    """
    rename, seen = os.replace, []

    def dying(source: Any, target: Any, **options: Any) -> None:
        seen.append(Path(target).name)
        if seen.count(name) == occurrence:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target, **options)

    os.replace = dying


class Launcher:
    """Starts trainval.py on a file of groups; every run folder lies in `savedir`."""

    def __init__(self, folder: Path, tmp_path: Path, **groups: list[dict[str, Any]]) -> None:
        self.savedir = tmp_path / "out"
        path = tmp_path / "groups.py"
        path.write_text(f"EXP_GROUPS = {groups!r}\n")
        self._flags = [
            "--exp_configs",
            str(path),
            "--data_path",
            str(folder),
            "--cache_dir",
            str(folder / "cache"),
        ]

    def start(self, *flags: str, kill_at: tuple[str, int] | None = None) -> Started:
        first = functools.partial(_die_before_renaming, *kill_at) if kill_at else None
        return start(*TRAINVAL, *self._flags, "-sb", str(self.savedir), *flags, first=first)

    def run(self, *flags: str) -> str:
        """What a command that must succeed printed."""
        done = self.start(*flags).finish()
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.savedir.glob("*")) if self.savedir.exists() else []


def test_a_dry_run_shows_everything_and_makes_no_run_folder(folder: Path, tmp_path: Path) -> None:
    tiny = EXP_GROUPS["crossattn_tiny"][0]
    unreachable = vary(tiny, base="/no/such/folder")
    launcher = Launcher(folder, tmp_path, mine=[tiny, unreachable])
    done = launcher.start("-e", "mine", "--dry_run").finish()
    assert done.returncode == 2, "a run of the second would be refused"
    assert f"{exp_id(unreachable)}: base='/no/such/folder'" in done.stderr
    first, second = done.stdout.split(f"experiment  {exp_id(unreachable)}")
    train = tiny["train"]
    assert exp_id(tiny) in first
    for part in (first, second):
        assert f"= {train['micro_batch']} micro x" in part
        assert f"{train['global_batch']} = " in part
        assert '"train_micro_batch_size_per_gpu": ' in part
        assert '"initialisation": ' in part, "defaults are filled in"
    assert "parameters train" in first
    assert "not counted: base='/no/such/folder'" in second
    assert launcher.folders() == []


def test_steps_change_the_id_and_neither_cadence_nor_deepspeed_does(
    folder: Path, tmp_path: Path
) -> None:
    values = experiment("cross_attention", folder)
    launcher = Launcher(folder, tmp_path, mine=[values])
    same = launcher.run("-e", "mine", "--dry_run", "--log_every", "7", "--deepspeed", "zero3")
    assert exp_id(values) in same
    assert '"stage": 3' in same
    changed = vary(values, train={"steps": 9})
    assert exp_id(changed) != exp_id(values)
    output = launcher.run("-e", "mine", "--dry_run", "--steps", "9")
    assert exp_id(changed) in output
    assert '"steps": 9' in output


def test_reset_moves_the_old_folder_aside_and_starts_over(folder: Path, tmp_path: Path) -> None:
    values = experiment("cross_attention", folder, train=SMALL)
    launcher = Launcher(folder, tmp_path, mine=[values])
    launcher.run("-e", "mine")
    own = launcher.savedir / exp_id(values)
    before = {path.name: path.read_bytes() for path in own.rglob("*") if path.is_file()}
    launcher.run("-e", "mine", "-r", "1")
    (aside,) = launcher.savedir.glob(f"{exp_id(values)}.bak-*")
    assert {path.name: path.read_bytes() for path in aside.rglob("*") if path.is_file()} == before
    assert untimed(own / "metrics.jsonl") == untimed(aside / "metrics.jsonl")
    one, two = (path / "final" / "model.safetensors" for path in (own, aside))
    assert one.read_bytes() == two.read_bytes()


def test_an_exp_id_takes_its_dictionary_from_its_folder(folder: Path, tmp_path: Path) -> None:
    values = experiment("cross_attention", folder, train=SMALL)
    launcher = Launcher(folder, tmp_path)
    own = launcher.savedir / exp_id(values)
    own.mkdir(parents=True)
    (own / "exp_dict.json").write_text(json.dumps(values))
    launcher.run("--exp_id", exp_id(values))
    assert json.loads((own / "status.json").read_text())["state"] == "succeeded"
    assert json.loads((own / "exp_dict.json").read_text()) == values


def test_a_second_process_on_a_run_folder_is_refused_and_the_first_goes_on(
    folder: Path, tmp_path: Path
) -> None:
    values = experiment(
        "cross_attention", folder, train={"steps": 5000, "eval_every": 5000, "save_every": 5000}
    )
    launcher = Launcher(folder, tmp_path, mine=[values])
    first = launcher.start("-e", "mine")
    metrics = launcher.savedir / exp_id(values) / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    second = launcher.start("-e", "mine", "-r", "1").finish()
    assert second.returncode == 2
    assert "HeldError" in second.stderr
    says("lock_held", second.stderr)
    os.kill(first.pid, signal.SIGTERM)
    assert first.finish().returncode == 75
    assert not list(launcher.savedir.glob("*.bak-*"))


def _content(run_folder: Path) -> dict[str, Any]:
    """Every file of a run by name, timings and times apart."""
    found: dict[str, Any] = {}
    for path in run_folder.rglob("*"):
        name = str(path.relative_to(run_folder))
        if path.name == "metrics.jsonl":
            found[name] = untimed(path)
        elif path.name == "status.json":
            timed = dict.fromkeys(("updated_at", "process", "goodput", "startup"))
            found[name] = {**json.loads(path.read_text()), **timed}
        elif path.name == "console.log":  # a killed run says another time what it says again
            found[name] = path.stat().st_size > 0
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def _half_removed(checkpoint: Path) -> None:
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "manifest.json").write_text("{}")


def test_a_run_killed_between_any_two_of_its_files_ends_with_the_files_of_an_undisturbed_one(
    folder: Path, tmp_path: Path
) -> None:
    """An evaluation writes score_list.json, score_list.pkl, best/ (the old one aside first), then a
    checkpoint, which then removes the oldest.
    """
    values = with_dropout(
        experiment("cross_attention", folder, train={"steps": 4, "eval_every": 1, "save_every": 2})
    )
    launcher = Launcher(folder, tmp_path, mine=[values])
    own = launcher.savedir / exp_id(values)
    launcher.run("-e", "mine")
    straight = _content(own)
    assert "best/model.safetensors" in straight
    kills = ("score_list.pkl", 2), ("best", 3), ("step-3", 1), (".step-2.gone", 1), ("final", 1)
    for kill_at in kills:
        shutil.rmtree(own)
        assert (
            launcher.start("-e", "mine", kill_at=kill_at).finish().returncode == -signal.SIGKILL
        ), kill_at
        if kill_at == ("final", 1):  # or earlier: step-2 is removed beside
            _half_removed(own / "checkpoints" / ".step-2.gone")
        launcher.run("-e", "mine")
        resumed = _content(own)
        assert resumed.keys() == straight.keys(), kill_at
        different = [name for name in straight if resumed[name] != straight[name]]
        assert not different, kill_at


# What a run leaves
# --------------------------------------------------------------------------------------------------


def _trained(task: str, folder: Path, savedir: Path, **changes: Any) -> tuple[dict[str, Any], Path]:
    values = experiment(task, folder, **changes)
    return values, run_on_ranks(1, train, values, folder, savedir)[0][0]


def _loaded_task(values: dict[str, Any], folder: Path, savedir: Path) -> Any:
    return tasks.load(tasks.parse(values), Places(folder, folder / "cache", savedir))


@pytest.fixture(scope="module")
def cross_attention(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    return _trained("cross_attention", folder, tmp_path_factory.mktemp("runs"))


def _last_valid(run_folder: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "valid/loss" in line][-1]


def _valid_rows(task: Any) -> Iterator[list[dict[str, Any]]]:
    rows = [task.encode(row) for row in task.rows("valid")]
    yield from (rows[start : start + 8] for start in range(0, len(rows), 8))


@torch.no_grad()
def _valid_scores(task: Any, model: torch.nn.Module) -> dict[str, float]:
    found: dict[str, Any] = {}
    for rows in _valid_rows(task):
        for name, score in task.scores(model, task.collate(rows)).items():
            found[name] = found[name] + score if name in found else score
    return {name: score.value() for name, score in found.items()}


def test_an_exported_cross_attention_model_loads_and_scores_what_the_run_scored(
    cross_attention: tuple[dict[str, Any], Path], folder: Path
) -> None:
    from trainer.tasks.cross_attention.decoder import export

    values, run_folder = cross_attention
    task = _loaded_task(values, folder, run_folder.parent)
    scores = _valid_scores(task, export.load(run_folder / "final", task.places))
    wanted = _last_valid(run_folder)
    for name in ("loss", "shuffled_loss"):
        assert scores[name] == pytest.approx(wanted[f"valid/{name}"], rel=1e-5)


def test_an_export_on_another_base_is_refused(
    cross_attention: tuple[dict[str, Any], Path], folder: Path, tmp_path: Path
) -> None:
    from trainer.tasks.cross_attention.decoder import export

    values, run_folder = cross_attention
    copied = shutil.copytree(run_folder / "final", tmp_path / "final")
    content = json.loads((copied / export.DESCRIPTION).read_text())
    content["base"]["seed"] += 1
    (copied / export.DESCRIPTION).write_text(json.dumps(content))
    with refused("layers_of_other_base"):
        export.load(copied, _loaded_task(values, folder, tmp_path).places)


def test_training_starts_from_the_layers_that_init_from_names(
    cross_attention: tuple[dict[str, Any], Path], folder: Path, tmp_path: Path
) -> None:
    """The first step of a warm-up has learning rate 0, so its evaluation is that of the weights it
    began with.
    """
    values, run_folder = cross_attention
    again = {**vary(values, train={**SMALL, "steps": 1}), "init_from": str(run_folder / "final")}
    second, _ = run_on_ranks(1, train, again, folder, tmp_path)[0]
    assert _last_valid(second)["valid/loss"] == pytest.approx(
        _last_valid(run_folder)["valid/loss"], rel=1e-6
    )


@pytest.mark.parametrize("shared_weights", [False, True])
def test_a_published_folder_of_the_whole_model_with_aliases_imports_through_init_from(
    shared_weights: bool, folder: Path, tmp_path: Path
) -> None:
    values = experiment("cross_attention", folder, layers={"shared_weights": shared_weights})
    fresh = _loaded_task(values, folder, tmp_path).model()
    added = {name: torch.randn_like(p) for name, p in fresh.named_parameters() if p.requires_grad}
    whole = {
        name.removeprefix("base."): p.detach().clone() for name, p in fresh.named_parameters()
    } | added
    if shared_weights:
        low, high = (f"cross_attn_layers.{index}." for index in fresh.indices)
        whole |= {name.replace(low, high): tensor.clone() for name, tensor in added.items()}
    (tmp_path / "published").mkdir()
    save_file(whole, tmp_path / "published" / "model.safetensors")
    assert any(name.startswith("transformer.") for name in whole)
    started = _loaded_task(
        {**values, "init_from": str(tmp_path / "published")}, folder, tmp_path
    ).model()
    for name, parameter in started.named_parameters():
        assert torch.equal(
            parameter, added[name] if name in added else fresh.get_parameter(name)
        ), name


def test_a_trained_language_model_loads_with_from_pretrained_and_has_the_loss_of_its_run(
    folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    values, run_folder = _trained("causal_lm", folder, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(run_folder / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(run_folder / "final")
    nats, tokens = 0.0, 0
    for line in (folder / "valid.jsonl").read_text().splitlines():
        ids = [*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]
        limit = values["data"]["max_tokens"]
        for first in range(0, len(ids), limit):
            piece = torch.tensor([ids[first : first + limit]])
            if piece.shape[1] < 2:
                continue
            with torch.no_grad():
                logits = model(piece).logits[0, :-1]
            nats += float(torch.nn.functional.cross_entropy(logits, piece[0, 1:], reduction="sum"))
            tokens += piece.shape[1] - 1
    assert nats / tokens == pytest.approx(_last_valid(run_folder)["valid/loss"], rel=1e-5)


def test_old_checkpoints_go_and_the_best_one_stays(folder: Path, tmp_path: Path) -> None:
    """The loss falls, so with best_is=max the evaluation before any learning is the best one for
    good.
    """
    each = {"eval_every": 1, "save_every": 1, "keep_last": 2, "best_is": "max"}
    _, run_folder = _trained(
        "cross_attention", folder, tmp_path, train=each, data={"shuffled_context": False}
    )
    assert sorted(path.name for path in (run_folder / "checkpoints").iterdir()) == [
        "step-1",
        "step-5",
        "step-6",
    ]
    best, final = (load_file(run_folder / name / "model.safetensors") for name in ("best", "final"))
    (shard,) = (run_folder / "checkpoints" / "step-1").glob("weights-*.safetensors")
    saved = load_file(shard)
    assert best.keys() == saved.keys()
    assert all(torch.equal(best[name], saved[name]) for name in best)
    assert any(not torch.equal(best[name], final[name]) for name in best)


LARGER = {"config": {**TINY_BASE["config"], "n_embd": 128, "n_inner": 512, "n_layer": 2}}  # type: ignore[dict-item]


def _checkpoint_sizes(
    values: dict[str, Any], folder: Path, savedir: Path
) -> dict[str, tuple[int, int]]:
    """(bytes of the whole checkpoint, trained numbers) by precision and stage."""
    found = {}
    for precision in ("fp32", "bf16"):
        for stage in (0, 2):
            chosen = vary(values, train={"precision": precision})
            run_folder, _ = train(chosen, folder, savedir / f"{stage}", stage)
            size = sum(
                path.stat().st_size for path in (run_folder / "checkpoints" / "step-1").iterdir()
            )
            weights = load_file(run_folder / "final" / "model.safetensors")
            found[f"{precision} zero{stage}"] = (
                size,
                sum(tensor.numel() for tensor in weights.values()),
            )
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_holds_12_bytes_a_trained_number_in_fp32_and_14_in_bf16(
    world: int, folder: Path, tmp_path: Path
) -> None:
    values = experiment("causal_lm", folder, base=LARGER, train={"steps": 1, "best": None})
    for case, (size, trained) in run_on_ranks(world, _checkpoint_sizes, values, folder, tmp_path)[
        0
    ].items():
        assert trained > 200_000
        ideal = trained * (12 if case.startswith("fp32") else 14)
        assert ideal <= size < 1.05 * ideal, f"{case}: {size / trained:.2f} bytes a number"


WANDB_KEY = "0123456789abcdef" * 2 + "5ecre7ed"  # as long as a real one


def _train_with_wandb(values: dict[str, Any], folder: Path, savedir: Path) -> Path:
    os.environ |= {"WANDB_MODE": "offline", "WANDB_API_KEY": WANDB_KEY}
    return train(
        values, folder, savedir, wandb_entity_name="someone", wandb_project_name="something"
    )[0]


def test_a_run_with_wandb_leaves_its_rows_and_no_key(folder: Path, tmp_path: Path) -> None:
    values = experiment("cross_attention", folder, train=SMALL)
    (run_folder,) = run_on_ranks(1, _train_with_wandb, values, folder, tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (record,) = [content for path, content in files.items() if path.suffix == ".wandb"]
    assert b"valid/loss" in record
    assert exp_id(values).encode() in record
    assert not [path for path, content in files.items() if WANDB_KEY.encode() in content]
    assert json.loads((run_folder / "status.json").read_text())["state"] == "succeeded"
