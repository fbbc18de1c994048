"""haven's own launcher trains a group of three; wandb's and haven's own readers read it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.facts import experiment, write_facts
from tests.ranks import run_alone
from tests.wording import refused
from trainer.config.groups import read
from trainer.config.identity import exp_id

HAS_HAVEN = importlib.util.find_spec("haven") is not None
needs_haven = pytest.mark.skipif(
    not HAS_HAVEN, reason="haven is an extra: pip install -e '.[haven]'"
)
KEY = "0123456789abcdef" * 2 + "5ecre7ed"
TRAIN = {"steps": 3, "log_every": 1, "eval_every": 3, "save_every": 3}


def launch(folder: Path, **flags: Any) -> None:
    """Let haven's launcher train the group here, as a program of one's own does."""
    home = str(folder / "home")
    os.environ |= {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY, "WANDB_DATA_DIR": home}
    os.environ |= {"WANDB_CACHE_DIR": home, "WANDB_CONFIG_DIR": home, "MPLBACKEND": "Agg"}
    facts, groups = folder / "facts", folder / "groups.py"
    if not groups.exists():
        write_facts(facts)
        sweep = [experiment("causal_lm", facts, train={**TRAIN, "seed": n}) for n in (1, 2, 3)]
        groups.write_text(f"EXP_GROUPS = {{'sweep': {sweep!r}}}\n")
    sys.argv = ["launch.py", "-e", "sweep", "-sb", str(folder / "runs")]
    from jobs.haven.library import connect

    connect()
    from haven import haven_wizard  # type: ignore[import-untyped]

    from trainer.api.haven import trainval

    given = {"data_path": str(facts), "cache_dir": str(folder / "cache"), "device": "None"}
    args = Namespace(exp_configs=str(groups), wandb_project_name="p", **given, **flags)
    haven_wizard.run_wizard(func=trainval, exp_groups=read(groups), args=args)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs of the group, trained once."""
    if not HAS_HAVEN:
        pytest.skip("haven is an extra: pip install -e '.[haven]'")
    folder = tmp_path_factory.mktemp("group")
    run_alone(launch, folder)
    return folder / "runs"


def group_of(runs: Path) -> list[dict[str, Any]]:
    return read(runs.parent / "groups.py")["sweep"]


def in_wandb(run: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of a run by their kinds, as wandb's own reader shows them. It is called without
    wandb's command line, which takes 1.5 CPU seconds to begin.
    """
    package = importlib.util.find_spec("wandb")
    assert package is not None
    assert package.origin is not None
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    reader = [Path(package.origin).parent / "bin" / "wandb-core", "leet", "inspect"]
    words = [*reader, "--no-observability", "--json", "--run-file", file]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    records: dict[str, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        record = json.loads(line)
        records.setdefault(record["type"], []).append(record[record["type"]])
    return records


@needs_haven
def test_wandb_knows_group_names_tags_notes_and_dictionary(runs: Path) -> None:
    for number, values in enumerate(group_of(runs), 1):
        folder = runs / exp_id(values)
        (run,) = in_wandb(folder)["run"]
        assert run["run_id"] == folder.name
        assert run["display_name"] == f"sweep {number}/3 seed={number}"
        assert (run["run_group"], run["job_type"]) == ("sweep", "train")
        assert run["tags"] == ["causal_lm", "random gpt_bigcode"]
        name, place = run["notes"].splitlines()
        assert name == run["display_name"]
        assert place.endswith(f":{folder}")
        config = run["config"]["update"]
        del config["_wandb"]
        assert config == values


@needs_haven
def test_wandb_knows_data_and_model_by_digest_and_gets_no_weights(runs: Path) -> None:
    for values in group_of(runs):
        folder = runs / exp_id(values)
        identity = json.loads((folder / "data.json").read_text())["identity"]
        data, model = in_wandb(folder)["artifact"]
        assert (data["type"], data["name"]) == ("dataset", f"data-{identity['train'][:12]}")
        about = json.loads(data["metadata"])
        assert about.pop("folder").endswith(f":{runs.parent / 'facts'}")
        assert about == identity
        (entry,) = data["manifest"]["contents"]
        assert entry["ref"] == (folder / "data.json").as_uri()
        assert (model["type"], model["name"]) == ("model", f"model-{folder.name}")
        files = {entry["path"]: entry.get("ref") for entry in model["manifest"]["contents"]}
        assert files.pop("lathe.json") is None  # its weights, by sha256
        final = {path.relative_to(folder).as_posix() for path in (folder / "final").iterdir()}
        assert set(files) == final
        assert all(str(ref).startswith("file:///") for ref in files.values())


@needs_haven
def test_ids_folders_and_losses_are_those_of_a_plain_run(runs: Path) -> None:
    ids = {exp_id(values) for values in group_of(runs)}
    assert {path.name for path in runs.iterdir() if len(path.name) == 32} == ids
    for name in ids:
        history = in_wandb(runs / name)["history"]
        losses = [row["item"]["loss"] for row in history if "loss" in row["item"]]
        lines = [
            json.loads(line)
            for line in (runs / name / "metrics.jsonl").read_text().split("\n")
            if line
        ]
        assert losses == [line["loss"] for line in lines if "loss" in line]
        assert len(losses) == 3


@needs_haven
def test_haven_reads_the_scores_of_the_group(runs: Path) -> None:
    from jobs.haven import library as haven

    table = haven.result_manager(runs, verbose=False).get_score_df()
    assert sorted(table["train.seed"].astype(int)) == [1, 2, 3]
    scores = {
        json.loads((runs / exp_id(values) / "score_list.json").read_text())[-1]["valid/loss"]
        for values in group_of(runs)
    }
    assert {float(one) for one in table["valid/loss"]} == scores


@needs_haven
def test_havens_dashboard_runs(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    widgets = pytest.importorskip("ipywidgets", reason="pip install -e '.[haven]' brings it")
    from jobs.haven import library as haven

    monkeypatch.setenv("MPLBACKEND", "Agg")
    before = set(widgets.Widget.widgets) if hasattr(widgets.Widget, "widgets") else set()
    haven.dashboard(runs)
    made = [one for key, one in widgets.Widget.widgets.items() if key not in before]
    buttons = {one.description: one for one in made if isinstance(one, widgets.Button)}
    for name in ("Display Table", "Jobs Status", "Jobs Failed", "Display Plot"):
        buttons[name].click()
    shown = capsys.readouterr().out
    assert "3 experiments selected" in shown or "valid/loss" in shown
    assert "'NEVER LAUNCHED': 3" in shown


@needs_haven
def test_artifacts_are_off_by_a_flag_and_a_given_name_is_told_apart(
    tmp_path: Path,
) -> None:
    run_alone(_one_without_artifacts, tmp_path)
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if len(path.name) == 32)
    records = in_wandb(folder)
    assert "artifact" not in records
    assert records["run"][0]["display_name"] == "mine 1/3 seed=1"


def _one_without_artifacts(folder: Path) -> None:
    from trainer.api import haven

    facts = write_facts(folder / "facts")
    sweep = [experiment("causal_lm", facts, train={**TRAIN, "seed": n}) for n in (1, 2, 3)]
    (folder / "groups.py").write_text(f"EXP_GROUPS = {{'sweep': {sweep!r}}}\n")
    home = str(folder / "home")
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DATA_DIR": home, "WANDB_CACHE_DIR": home}
    args = Namespace(
        exp_group_list=["sweep"],
        exp_configs=str(folder / "groups.py"),
        data_path=facts,
        cache_dir=folder / "cache",
        wandb_project_name="p",
        wandb_run_name="mine",
        wandb_artifacts="False",
    )
    haven.trainval(sweep[0], folder / "runs" / exp_id(sweep[0]), args)


def test_another_folder_and_steps_are_refused(tmp_path: Path) -> None:
    from trainer.api.haven import trainval

    values = experiment("causal_lm", tmp_path)
    with refused("haven_savedir", folder=tmp_path, id=exp_id(values)):
        trainval(values, tmp_path)
    with refused("haven_steps", steps=7):
        trainval(values, tmp_path / exp_id(values), Namespace(steps="7"))
    with refused("argument_kind", name="log_every", value="often", kind="int"):
        trainval(values, tmp_path / exp_id(values), Namespace(log_every="often"))
