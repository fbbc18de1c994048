"""What a run leaves in final/ is loaded by those it is for, in a process without `trainer`, and
makes there what it makes here; its card says how, and what was trained on what.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import exported, forked
from tests.exported import ADAPTED, NAMES, both, values_of
from tests.facts import write_facts
from tests.ranks import run_on_ranks

CLOSE = 1e-6  # of the largest number, or of 1: a loss of 6 has steps of 5e-7 in fp32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


@pytest.fixture(scope="module")
def finals(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """final/ of a run of every task."""
    values = {name: values_of(name, folder) for name in (*NAMES, *ADAPTED)}
    (runs,) = run_on_ranks(1, exported.trained, values, folder, tmp_path_factory.mktemp("runs"))
    finals = {name: run / "final" for name, (run, _) in runs.items()}
    (finals["vera"] / "vera.json").write_text('{"temperature": 2.5, "max_tokens": 48}\n')
    merged = finals["cross_attention with adapters"].with_name("merged")
    words = ["export", "cross_attention", str(merged.with_name("final")), "--out", str(merged)]
    done = forked.run(*forked.TRAINER, *words, "--merge")
    assert done.returncode == 0, done.stderr
    return finals


@pytest.fixture(scope="module")
def sides(
    finals: dict[str, Path], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By task: what we make of an input, and what strangers do."""
    values = {name: values_of(name, folder) for name in finals}
    exports = {name: (values[name], final) for name, final in finals.items()}
    adapted = finals["cross_attention with adapters"]
    exports["merged"] = (values["cross_attention with adapters"], adapted.with_name("merged"))
    return both(exports, folder, tmp_path_factory.mktemp("stranger"))


@pytest.mark.parametrize("name", [*NAMES, *ADAPTED, "merged"])
def test_a_stranger_computes_what_we_do(
    name: str, sides: dict[str, tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    own, theirs = sides[name]
    wanted = own["said"]
    for of, tensor in own.items():
        if of == "said":
            continue
        largest = float(tensor.abs().max())
        assert largest > 1e-2, of
        assert float((tensor - theirs[of]).abs().max()) <= CLOSE * max(1.0, largest), of
    shown = theirs["shown"]
    assert shown
    assert all(shown), "every program of the card prints"
    if wanted is not None:
        assert shown[0] == wanted
        assert wanted.strip()
    if name == "causal_lm":
        assert theirs["ends"] == [0, 1]


def test_a_card_says_what_the_run_recorded(finals: dict[str, Path], folder: Path) -> None:
    for name, final in finals.items():
        card, record = (
            (final / "README.md").read_text(),
            json.loads((final / "lathe.json").read_text()),
        )
        assert record["format"] == 1
        assert record["experiment"] == values_of(name, folder) == _dictionary(card)
        for file, digest in record["files"].items():
            assert hashlib.sha256((final / file).read_bytes()).hexdigest() == digest
            assert f"| `{file}` | {digest} |" in card
        for split in ("train", "valid"):
            told = json.loads((final.parent / "data.json").read_text())
            assert told["identity"][split] in card
            assert f"| {split} | {told['splits'][split]['rows']} |" in card
        last = json.loads((final.parent / "score_list.json").read_text())[-1]
        assert f"| `valid/loss` | {last['valid/loss']:.6g} |" in card
        no_base = "Its licence: it has none." in card
        assert no_base == (name in NAMES), "a folder without a card says nothing of a licence"
        if name in NAMES:
            assert str(folder) not in card.replace(str(folder / "tokenizer"), ""), "a path of here"


def _dictionary(card: str) -> dict[str, Any]:
    return json.loads(
        card.partition("## Dictionary")[2].partition("```json\n")[2].partition("```")[0]
    )


def test_the_same_weights_give_the_same_bytes(
    finals: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    from trainer.exports import card, record

    final = finals["cross_attention"]
    values = values_of("cross_attention", folder)
    task, model = exported.loaded(values, folder, final)
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    task.export(weights, tmp_path / "again")
    said = record.of_run(tmp_path / "again", values=values, task=task, run_folder=final.parent)
    record.write(tmp_path / "again", said)
    card.write(tmp_path / "again", said)
    assert _contents(tmp_path / "again") == _contents(final)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_commands_of_a_card_repeat_its_scores(
    finals: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    final = finals["vera"]
    card = (final / "README.md").read_text()
    (code,) = re.findall(r"```python\n(import json\n.*?)```", card, re.S)
    (tmp_path / "this.py").write_text(code.replace("FOLDER", str(final)))
    (line,) = re.findall(r"^python (-m trainer evaluate .*)$", card, re.M)
    words = [{"FOLDER": str(final), "DATA": str(folder)}.get(word, word) for word in line.split()]
    done = forked.run(*words, "--cache_dir", str(folder / "cache"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    scores = json.loads((final / "lathe.json").read_text())["scores"]
    for name in ("valid/loss", "valid/accuracy/choices"):
        assert f"{name} {scores[name]:.6f}" in done.stdout
