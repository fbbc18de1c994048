"""Wrong inputs of a new user's first hour: each gets one sentence that says what was got, what is
wanted and how to mend it, with exit code 2, and leaves the disk as it was.

Most are one table that a single process works through; what the command line adds has tests below.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

import trainval
from exp_configs import EXP_GROUPS
from tests.facts import TINY_BASE, experiment, write_facts
from tests.ranks import run_on_ranks
from tests.runs.test_bad_input import refuse
from tests.wording import Fault, fault, is_said, refused, says
from trainer.commands import models
from trainer.config import groups, userfile
from trainer.config.identity import exp_id
from trainer.config.schema import RandomBase
from trainer.errors import ConfigError, LatheError, ResumeError, StorageError
from trainer.files import hub
from trainer.files.build_once import build_once
from trainer.launch.choose import choose
from trainer.launch.run_folder import claim_folder
from trainer.models import base_model, base_source
from trainer.protocol.task import Places
from trainer.tasks.cross_attention.reader import Reader, _device
from trainer.training.options import Options
from trainer.training.run_plan import is_finished, plan

Refusal = tuple[str, int, str]  # class, exit code and text of an error


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


# A base and its tokenizer, as folders
# --------------------------------------------------------------------------------------------------


def _emptied(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def _of_another_model(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    weights = {"other.weight": torch.zeros(3)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _of_half_a_model(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    half = {name: weights[name] for name in sorted(weights)[::2]}
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})


def _narrower(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_embd": 16}))


def _without(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink(missing_ok=True)

    return change


def _torn(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text("{")

    return change


# What is done to a good base folder, and what the refusal says.
BASES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "no weights": (_emptied, ["holds a config.json and no weights", "Put model.safetensors there"]),
    "torn weights": (_cut_short, ["(model.safetensors: ", "Copy the folder again"]),
    "foreign weights": (_of_another_model, ["lack 52 of the 52", "of another model"]),
    "half the weights": (_of_half_a_model, ["lack 26 of the 52", "Copy the folder again"]),
    "other shapes": (_narrower, ["other shapes than its config.json says"]),
    "torn config.json": (_torn("config.json"), ["config.json is torn", "Copy it again"]),
    "no tokenizer": (
        _without("tokenizer.json", "tokenizer_config.json"),
        ["the tokenizer of base=", "are none, and one with the vocabulary is wanted"],
    ),
    "no vocabulary": (_without("tokenizer.json"), ["are tokenizer_config.json, and one with"]),
    "torn tokenizer": (_torn("tokenizer.json"), ["tokenizer.json is torn", "copy it again"]),
}


def _refused_bases(values: dict[str, Any], folder: Path, root: Path) -> dict[str, Refusal]:
    """For each entry of BASES what a run on such a base says, and that of the good one."""
    good = root / "whole"
    base = base_model.load(
        RandomBase(**TINY_BASE),  # pyright: ignore[reportArgumentType]
        Places(None, root, root),
        precision="fp32",
    )
    base.save_pretrained(good)
    shutil.copytree(folder / "tokenizer", good, dirs_exist_ok=True)
    changes: dict[str, Callable[[Path], None]] = {name: one[0] for name, one in BASES.items()}
    refused: dict[str, Refusal] = {}
    for name, change in {**changes, "good": lambda folder: None}.items():
        changed = root / name
        shutil.copytree(good, changed, dirs_exist_ok=True)
        change(changed)
        before = sorted(path.name for path in changed.iterdir())
        own = {**values, "base": str(changed), "tokenizer": None}
        refused[name] = refuse(own, folder, root / "out", root / "cache")
        assert before == sorted(path.name for path in changed.iterdir()), name
    return refused


def test_a_base_that_is_not_whole_is_refused_by_the_file_that_is_wrong(
    folder: Path, tmp_path: Path
) -> None:
    values = experiment("causal_lm", folder, train={"steps": 1})
    refused = run_on_ranks(1, _refused_bases, values, folder, tmp_path)[0]
    assert refused.pop("good") == ("none", 0, ""), "the folder before it was changed trains"
    for name, (_, parts) in BASES.items():
        kind, code, text = refused[name]
        assert (kind, code) == ("ConfigError", 2), f"{name}: {text}"
        for part in parts:
            assert part in text, f"{name}: {text}"


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("./models/mine", fault("base_absent", problem="there is no such folder here")),
        ("models/deep/mine", fault("base_absent", problem="there is no such folder here")),
        ("", fault("base_absent")),
        ("C:\\models\\mine", fault("base_absent", problem="there is no such folder here")),
        ("my model", fault("base_absent", problem="there is no such folder here")),
        ("mine--2", fault("base_absent", problem="there is no such folder here")),
        ("owner/model:4bit", fault("base_absent", problem="there is no such folder here")),
        (__file__, fault("base_absent", problem="it is a file")),
        ("models/mine", fault("base_absent_on_hub")),
    ],
)
def test_a_base_that_is_nowhere_is_blamed_itself_and_not_its_tokenizer(
    base: str, said: Fault, folder: Path, tmp_path: Path
) -> None:
    cfg = plan(
        experiment("causal_lm", folder) | {"base": base, "tokenizer": None},
        Options(tmp_path),
        world=1,
        rank=0,
    ).cfg
    with refused(said, base=base) as refusal:
        base_source.tokenizer_of(cfg, Places(None, tmp_path, tmp_path))
    assert str(refusal.value).startswith("base=")


def test_a_hub_that_does_not_answer_is_asked_once_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from huggingface_hub import constants

    asked: list[Any] = []

    def refused(address: Any, **how: Any) -> Any:
        asked.append(address)
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.socket, "create_connection", refused)
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)
    hub.may_answer.cache_clear()
    try:
        for _ in range(3):
            hub.use_cache_where_unreachable()
        assert constants.HF_HUB_OFFLINE, "the library looks into its cache at once from now on"
    finally:
        hub.may_answer.cache_clear()
    assert len(asked) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be reached" in caplog.text


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"n_head": 3}, "no gpt_bigcode can be built of its config"),
        ({"n_embd": "32"}, "base.config (Validation error for field 'n_embd'"),
    ],
)
def test_a_config_that_no_model_can_be_built_of_is_refused(
    config: dict[str, Any], part: str, tmp_path: Path
) -> None:
    base = RandomBase(config={**TINY_BASE["config"], **config})  # type: ignore[dict-item]
    with pytest.raises(ConfigError) as refusal:
        base_model.skeleton(base, Places(None, tmp_path, tmp_path))
    assert part in str(refusal.value)


def test_a_tokenizer_that_is_looked_for_below_a_missing_data_path_says_so(tmp_path: Path) -> None:
    (values,) = EXP_GROUPS["lm_nq_cpu"]
    cfg = plan(values, Options(tmp_path), world=1, rank=0).cfg
    with refused("tokenizer_below_data_path"):
        base_source.tokenizer_of(cfg, Places(None, tmp_path, tmp_path))


# Flags and folders
# --------------------------------------------------------------------------------------------------


def test_a_data_path_that_is_a_file_or_not_there_is_refused_before_anything_is_read(
    folder: Path, tmp_path: Path
) -> None:
    values = experiment("causal_lm", folder)
    file = folder / "train.jsonl"
    with refused("data_path_is_file_of_a_run", folder=folder):
        plan(values, Options(tmp_path, data_path=file), world=1, rank=0)
    with refused("data_path_absent"):
        plan(values, Options(tmp_path, data_path=tmp_path / "nowhere"), world=1, rank=0)
    options = Options(tmp_path, data_path=folder, device="zzz")
    with refused("device_unknown", device="zzz"):
        choose(plan(values, options, world=1, rank=0), options)


@pytest.mark.parametrize("below", ["", "runs"])
def test_a_savedir_that_is_a_file_is_called_one(below: str, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "results"
    file.write_text("mine")
    options = Options(file / below)
    planned = plan(experiment("causal_lm", folder), options, world=1, rank=0)
    with refused("savedir_is_file", at="results"):
        claim_folder(planned, options).__enter__()
    assert file.read_text() == "mine"


def test_a_run_folder_that_is_a_link_out_of_its_base_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    base, elsewhere = tmp_path / "base", tmp_path / "elsewhere"
    planned = plan(experiment("causal_lm", folder), Options(base), world=1, rank=0)
    base.mkdir()
    elsewhere.mkdir()
    planned.folder.symlink_to(elsewhere)
    with refused("run_folder_leads_out", folder=planned.id):
        claim_folder(planned, Options(base)).__enter__()
    assert not list(elsewhere.iterdir())
    planned.folder.unlink()
    (base / "inside").mkdir()
    planned.folder.symlink_to("inside")
    with claim_folder(planned, Options(base)):
        assert (base / "inside" / "exp_dict.json").is_file()


def test_a_cache_that_cannot_be_written_says_where_to_put_another(tmp_path: Path) -> None:
    def refused(number: int) -> Callable[[Path], None]:
        def build(temporary: Path) -> None:
            raise OSError(number, os.strerror(number))

        return build

    def said(cache: Path, number: int) -> str:
        with pytest.raises(StorageError) as refusal:
            build_once(cache / "tokens", refused(number), is_whole=lambda folder: False)
        return str(refusal.value)

    file = tmp_path / "file"
    file.write_text("")
    assert "Free space there" in said(tmp_path, errno.ENOSPC)
    assert "This user may not write there: choose another" in said(tmp_path, errno.EROFS)
    assert "Free space" not in said(tmp_path, errno.EROFS)
    assert f"{file} is a file: choose another cache folder" in said(file, errno.EROFS)


# Files of a run folder that are torn or of another shape
# --------------------------------------------------------------------------------------------------

FORMS = ["", "{", "3", "null", "[3]", '{"identity": 3}']


@pytest.mark.parametrize("name", ["exp_dict.json", "data.json"])
@pytest.mark.parametrize("content", FORMS)
def test_a_torn_file_that_nothing_else_tells_of_is_named_and_left_as_it_is(
    name: str, content: str, folder: Path, tmp_path: Path
) -> None:
    options = Options(tmp_path)
    planned = plan(experiment("causal_lm", folder), options, world=1, rank=0)
    planned.folder.mkdir()
    (planned.folder / name).write_text(content)
    with pytest.raises(ResumeError) as refusal:
        claim_folder(planned, options).__enter__()
    text = str(refusal.value)
    is_unfit = is_said("run_file_unfit", text, file=name)
    assert is_unfit or is_said("run_of_others", text, file=name)
    assert "-r 1" in str(refusal.value)
    assert (planned.folder / name).read_text() == content


def test_every_torn_file_of_a_run_folder_is_named_at_once(folder: Path, tmp_path: Path) -> None:
    options = Options(tmp_path)
    planned = plan(experiment("causal_lm", folder), options, world=1, rank=0)
    planned.folder.mkdir()
    for name in ("data.json", "exp_dict.json"):
        (planned.folder / name).write_text("{")
    with refused("run_file_unfit", file="exp_dict.json") as refusal:
        claim_folder(planned, options).__enter__()
    first, _, second = str(refusal.value).partition("\n")
    assert first.count("exp_dict.json: ") == 1
    says("run_file_unfit", second, file="data.json")


@pytest.mark.parametrize("content", [*FORMS, '{"state": "failed"}'])
def test_a_status_of_another_shape_is_not_that_of_a_finished_run(
    content: str, folder: Path, tmp_path: Path
) -> None:
    planned = plan(experiment("causal_lm", folder), Options(tmp_path), world=1, rank=0)
    planned.folder.mkdir()
    (planned.folder / "status.json").write_text(content)
    assert not is_finished(planned)


# Groups, ids and their files
# --------------------------------------------------------------------------------------------------


def test_an_id_in_place_of_a_group_is_told_from_a_misspelt_one() -> None:
    (values,) = EXP_GROUPS["crossattn_tiny"]
    with refused("group_of_an_id", group="crossattn_tiny", id=exp_id(values)):
        groups.experiments_of_group(EXP_GROUPS, exp_id(values), None)
    with refused("group_wanted") as refusal:
        groups.experiments_of_group(EXP_GROUPS, "0" * 32, None)
    assert len(str(refusal.value)) < 300, "no list of a hundred groups"


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("groups.yaml", "a: 1", "it is a .yaml; want"),
        ("groups.ipynb", "{}", "jupyter nbconvert"),
        ("groups.json", "{}", "as a dictionary of Python"),
        ("groups", "", "it is a file without a suffix"),
        ("none.py", None, "there is no such file"),
        (".", None, "it is a folder"),
    ],
)
def test_a_file_of_groups_that_is_no_python_says_how_to_come_to_one(
    name: str, content: str | None, part: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as refusal:
        userfile.execute(tmp_path / name, flag="--exp_configs", defines="EXP_GROUPS")
    assert part in str(refusal.value)
    assert "EXP_GROUPS" in str(refusal.value)


def _refusal_of(action: Callable[..., Any], *given: Any, **options: Any) -> str:
    """The text of the error of ours that this ends with, whose exit code is 2."""
    with pytest.raises(LatheError) as refusal:
        action(*given, **options)
    assert refusal.value.exit_code == 2
    return str(refusal.value)


def test_an_id_goes_with_a_group_that_has_it_and_with_a_folder_that_holds_a_dictionary(
    tmp_path: Path,
) -> None:
    (values,) = EXP_GROUPS["crossattn_tiny"]

    def of(group: str | None, name: str) -> list[dict[str, Any]]:
        which = trainval.WhichRuns(exp_group=group, exp_id=name)
        return trainval._experiments(which, tmp_path)

    assert of("crossattn_tiny", exp_id(values)) == [values]
    said = _refusal_of(of, "crossattn_tiny", "0" * 32)
    assert "is not in -e crossattn_tiny" in said
    (tmp_path / "mine").mkdir()
    for content in ("[1]", "3", "{"):
        (tmp_path / "mine" / "exp_dict.json").write_text(content)
        said = _refusal_of(of, None, "mine")
        assert "exp_dict.json" in said
    assert "a group is trained with -e" in _refusal_of(of, None, "none")


# Models at work
# --------------------------------------------------------------------------------------------------


def test_export_of_a_folder_that_the_hub_takes_as_it_is_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(typer.Exit) as ended:
        models.export("causal_lm", tmp_path, tmp_path / "out")
    assert ended.value.exit_code == 2
    says("export_not_needed", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_reader_refuses_what_it_cannot_read_and_devices_that_are_not_there() -> None:
    reader = object.__new__(Reader)  # it is refused before the model is needed
    assert "no context that is not blank" in _refusal_of(reader.answer, "Who?", [])
    assert "no context that is not blank" in _refusal_of(reader.answer, "Who?", "  ")
    assert "2 questions and 1 contexts" in _refusal_of(reader.answers, ["Who?", "Where?"], ["x"])
    assert "cuda:99" in _refusal_of(_device, "cuda:99")
    assert "Use cpu, cuda" in _refusal_of(_device, "gpu")


def test_rows_whose_passages_have_another_name_are_not_told_to_read_none(
    folder: Path, tmp_path: Path
) -> None:
    from trainer.data.readers.retrieved import _passages

    row = {"question": "Who?", "answers": ["me"], "texts": ["a text"]}
    said = _refusal_of(_passages, row, "train.jsonl, line 1")
    assert "Is that 'texts' here? data.columns maps it to 'ctxs'." in said
    assert '"ctxs": []' not in said
    assert '"ctxs": []' in _refusal_of(_passages, {"question": "Who?"}, "train.jsonl, line 1")
