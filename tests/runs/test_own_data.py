"""The page docs/own-data.md is true: its file and its commands train on one table of foreign columns
and on bases that are folders.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from jobs.backends import BackendCache
from jobs.record.paths import BaseFolder
from jobs.record.status import survey
from tests import forked
from tests.facts import LLAMA, PLACES, facts, write_facts
from tests.jobs.conftest import queue, wait_until
from tests.long import long_but
from trainer.config.identity import exp_id

__all__ = ["queue"]

PAGE = forked.ROOT / "docs" / "own-data.md"
COMMAND = re.compile(r"^\$ python (.+)$", re.M)
FILE = re.compile(r"`mine\.py`:\n\n```python\n(.*?)```", re.S)
# What the others would find is mostly what their tasks' own tests find.
SHORT = ("my_chat", "my_reader")
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, "vocab_size": 384}


def commands() -> dict[str, list[str]]:
    """The words of every command of the page, by its group."""
    found = [shlex.split(line) for line in COMMAND.findall(PAGE.read_text())]
    return {words[words.index("-e") + 1]: words for words in found}


def write_table(path: Path, count: int) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["query", "reply", "passage", "topic", "claim", "false_claim"])
        for number, row in enumerate(facts(0, count)):
            name = f"No. {number}"
            said = f"{name}: it is {row['answer']}."
            cells = [f"{name}: {row['question']}", row["answer"], row["context"], row["answer"]]
            writer.writerow([*cells, said, f"{name}: it is in the {PLACES[number % 7]}, too."])


def write_bases(folder: Path, tokenizer: Path) -> None:
    """A decoder, an encoder and a T5, tiny and random, with their tokenizer."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    configs = {
        "decoder": (AutoModelForCausalLM, {**LLAMA["config"], "max_position_embeddings": 4096}),
        "encoder": (AutoModel, {"model_type": "bert", "num_hidden_layers": 2, **small, **IDS}),
        "t5": (
            AutoModelForSeq2SeqLM,
            {"model_type": "t5", **t5, **IDS, "decoder_start_token_id": 1},
        ),
    }
    for name, (kind, values) in configs.items():
        kind.from_config(AutoConfig.for_model(**values)).save_pretrained(folder / name)
        for file in tokenizer.iterdir():
            shutil.copy(file, folder / name)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the page says a reader has, and the file that it tells to write."""
    folder = tmp_path_factory.mktemp("mine")
    write_facts(folder / "facts")
    write_bases(folder / "bases", folder / "facts" / "tokenizer")
    (folder / "data").mkdir()
    write_table(folder / "data" / "questions.csv", 120)
    (found,) = FILE.findall(PAGE.read_text())
    (folder / "mine.py").write_text(found)
    return folder


@pytest.mark.parametrize(
    "group",
    long_but(SHORT, commands()),
)
def test_the_command_of_the_page_trains(group: str, place: Path) -> None:
    script, *words = commands()[group]
    assert script == "trainval.py"
    ended = forked.run(*forked.TRAINVAL, *words, cwd=place)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = " ".join(ended.stdout.split())  # a console breaks its lines
    assert re.search(r"train: \d+ rows, [\d,]+ tokens", said), ended.stdout
    (run,) = [
        path.parent
        for path in (place / "results").glob("*/exp_dict.json")
        if json.loads(path.read_text()) == json.loads(json.dumps(group_of(place, group)))
    ]
    assert json.loads((run / "status.json").read_text())["state"] == "succeeded"
    assert any((run / "final").iterdir())


@pytest.mark.long
@pytest.mark.parametrize("group", list(commands()))
def test_the_command_of_the_page_trains_as_a_job_of_its_folder(
    group: str, place: Path, queue: Path
) -> None:
    _, *words = commands()[group]
    words[words.index("results")] = "jobs"  # no model of `results` is gone on with
    sent = forked.run(*forked.TRAINVAL, *words, "-j", "local", "--allow_dirty", cwd=place)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    values = json.loads(json.dumps(group_of(place, group)))
    run = place / "jobs" / exp_id(values)
    rows = wait_until(
        lambda: survey(BaseFolder(place / "jobs"), only=[run.name], backend_of=BackendCache()),
        lambda rows: rows[0].state in ("succeeded", "failed"),
        within_s=300,
    )
    assert rows[0].state == "succeeded", (run / "attempts/1/err.txt").read_text()[-3000:]
    assert json.loads((run / "exp_dict.json").read_text()) == values
    assert any((run / "final").iterdir())
    print(
        f"SHOW own data: {group} with base {values['base']!r} by -j local: {rows[0].state}, {run.name}"
    )


def group_of(place: Path, group: str) -> object:
    names: dict[str, dict[str, list[object]]] = {}
    exec((place / "mine.py").read_text(), names)
    return names["EXP_GROUPS"][group][0]


def test_every_group_of_the_page_has_a_command(place: Path) -> None:
    assert sorted(commands()) == sorted(re.findall(r'"(my_\w+)": \[', PAGE.read_text()))
