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
from tests.facts import LLAMA, TINY_T5, experiment, write_facts
from tests.ranks import run_on_ranks

SHORT = {"steps": 2, "eval_every": 2, "save_every": 2, "best": None}
NAMES = ("cross_attention", "rotary", "causal_lm", "summariser", "fid", "retriever", "vera")
LIMIT = {"query_tokens": 32, "passage_tokens": 32}  # sentence-transformers knows one for both
CLOSE = 1e-6  # the largest difference of a loss, a logit, a number of a vector, a score


def values_of(name: str, folder: Path) -> dict[str, Any]:
    task = "cross_attention" if name == "rotary" else name
    own: dict[str, Any] = {"train": SHORT, "optim": {"lr": 1e-3}}
    if name == "rotary":
        own |= {"base": LLAMA, "data": {"template": "plain", "chunked": True}}
        own |= {"layers": {"stride": 1}}
    if name == "fid":
        own |= {"base": {**TINY_T5, "seed": 3}}
    if name == "summariser":
        own |= {"generation": {"min_tokens": 4, "num_beams": 2, "no_repeat_ngram": 2}}
    if name == "retriever":
        own |= {"data": LIMIT}
    return experiment(task, folder, **own)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


@pytest.fixture(scope="module")
def finals(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """final/ of a run of every task."""
    values = {name: values_of(name, folder) for name in NAMES}
    (runs,) = run_on_ranks(1, exported.trained, values, folder, tmp_path_factory.mktemp("runs"))
    finals = {name: run / "final" for name, (run, _) in runs.items()}
    (finals["vera"] / "vera.json").write_text('{"temperature": 2.5, "max_tokens": 48}\n')
    return finals


@pytest.fixture(scope="module")
def sides(
    finals: dict[str, Path], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By task: what we make of an input, and what strangers do."""
    own: dict[str, Any] = {}
    exports: dict[str, Any] = {}
    for name, final in finals.items():
        values = values_of(name, folder)
        task, model = exported.loaded(values, folder, final)
        given = exported.asked(task)
        own[name] = exported.ours(task, model, given) | {"said": exported.said(task, model)}
        exports[name] = (values["task"], final, given)
    told = exported.told(exports, tmp_path_factory.mktemp("stranger"))
    return {name: (own[name], told[name]) for name in own}


@pytest.mark.parametrize("name", NAMES)
def test_a_stranger_computes_what_we_do(
    name: str, sides: dict[str, tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    own, theirs = sides[name]
    wanted = own.pop("said")
    for of, tensor in own.items():
        assert float((tensor - theirs[of]).abs().max()) <= CLOSE, of
        assert float(tensor.abs().max()) > 1e-2, of
    shown = theirs["shown"]
    assert shown
    assert all(shown), "every program of the card prints"
    if wanted is not None:
        assert shown[0] == wanted
        assert wanted.strip()


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
        assert "Its licence: it has none." in card
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
