"""A base that lies inside an installed package, and weights whose digest an experiment states."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.wording import Fault, fault, refused
from trainer.config.schema import RandomBase
from trainer.data.vocabulary import load_tokenizer
from trainer.evaluation.run import Question, model_folder
from trainer.files import packages
from trainer.models import base_source
from trainer.training.options import Options

NAME = "weights_of_nobody"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with a model in it, whose code must not run."""
    root = tmp_path / "site" / NAME
    (root / "model").mkdir(parents=True)
    (root / "__init__.py").write_text("raise SystemExit('the code of a package was run')\n")
    save_file({"weight": torch.ones(3)}, root / "model" / "model.safetensors")
    monkeypatch.syspath_prepend(root.parent)
    return root


def named(name: str, tmp_path: Path) -> str:
    return base_source.folder_or_id(name, tmp_path / "cache")


def test_a_folder_of_a_package_is_found_without_running_its_code(
    package: Path, tmp_path: Path
) -> None:
    assert named(f"package:{NAME}/model", tmp_path) == str((package / "model").resolve())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("package:no_such_package/model", fault("package_absent", package="no_such_package")),
        (f"package:{NAME}/modle", fault("package_folder_absent", nearest="model")),
        (f"package:{NAME}/../..", fault("package_folder_absent")),
        ("package:os.path/model", fault("package_name")),
        ("package:", fault("package_name")),
        ("package:json.decoder", fault("package_name")),
    ],
)
@pytest.mark.usefixtures("package")
def test_a_package_that_is_not_there_is_one_error(name: str, said: Fault, tmp_path: Path) -> None:
    with refused(said) as caught:
        named(name, tmp_path)
    assert name in str(caught.value)


def test_a_module_that_is_no_package_holds_no_folder(tmp_path: Path) -> None:
    with refused("package_absent"):
        named("package:this/model", tmp_path)  # of the standard library; it prints when it runs


def test_a_tokenizer_is_looked_for_in_the_package(package: Path, tmp_path: Path) -> None:
    with refused("tokenizer_unloadable", places=f"package package:{NAME}/model"):
        load_tokenizer(f"package:{NAME}/model", data_path=None, cache_dir=tmp_path)
    (package / "model" / "tokenizer.json").write_text(
        '{"version": "1.0", "added_tokens": [], '
        '"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
    )
    (package / "model" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    tokenizer = load_tokenizer(f"package:{NAME}/model", data_path=None, cache_dir=tmp_path)
    assert tokenizer.get_vocab() == {"a": 0}


def test_the_stated_digest_of_weights_is_that_of_their_file(package: Path, tmp_path: Path) -> None:
    file = package / "model" / "model.safetensors"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    name = f"package:{NAME}/model#sha256={digest}"
    assert named(name, tmp_path) == str(package / "model")
    save_file({"weight": torch.zeros(3)}, file)
    other = hashlib.sha256(file.read_bytes()).hexdigest()
    with refused("digest_of_file_differs", has=other, stated=digest):
        named(name, tmp_path)


def test_the_stated_digest_of_shards_is_that_of_what_sha256sum_prints(tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    folder.mkdir()
    for number in (1, 2):
        save_file(
            {f"w{number}": torch.ones(number)}, folder / f"model-0000{number}-of-00002.safetensors"
        )
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w2": "model-00002-of-00002.safetensors", '
        '"w1": "model-00001-of-00002.safetensors"}}'
    )
    printed = subprocess.run(
        "sha256sum model-*", shell=True, cwd=folder, capture_output=True, check=True
    ).stdout
    digest = hashlib.sha256(printed).hexdigest()
    assert named(f"{folder}#sha256={digest}", tmp_path) == str(folder)
    with refused("digest_differs", more=1):
        named(f"{folder}#sha256={'0' * 64}", tmp_path)


def test_a_digest_needs_a_folder_with_weights(tmp_path: Path) -> None:
    with refused("digest_of_hub"):
        named("org/name#sha256=00", tmp_path)
    with refused("digest_of_nothing"):
        named(f"{tmp_path}#sha256=00", tmp_path)


def test_a_name_without_a_digest_stays_as_it_is(tmp_path: Path) -> None:
    assert named("org/name", tmp_path) == "org/name"
    assert named("/a/folder#1", tmp_path) == "/a/folder#1"


# --model base
# --------------------------------------------------------------------------------------------------


def asked(base: Any, monkeypatch: pytest.MonkeyPatch) -> Question:
    parsed = SimpleNamespace(base=base)
    monkeypatch.setattr("trainer.evaluation.run.tasks.parse", lambda values: parsed)
    return Question({}, model="base")


def test_the_untrained_model_is_the_folder_of_the_base(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(tmp_path, cache_dir=tmp_path / "cache")
    with refused("model_absent"):
        model_folder(asked(f"package:{NAME}/model", monkeypatch), options)
    (package / "model" / "config.json").write_text("{}")
    assert model_folder(asked(f"package:{NAME}/model", monkeypatch), options) == package / "model"


def test_random_weights_have_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    question = asked(RandomBase(config={"model_type": "bert"}), monkeypatch)
    with refused("model_random"):
        model_folder(question, Options(tmp_path))


def test_a_package_is_named_as_a_model_too(package: Path, tmp_path: Path) -> None:
    question = Question({}, model=f"package:{NAME}/model")
    assert model_folder(question, Options(tmp_path)) == package / "model"


def test_what_is_no_package_is_told_apart() -> None:
    assert packages.is_packaged("package:a/b")
    assert not packages.is_packaged("org/package:a")
