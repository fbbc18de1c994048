"""The commands of docs/coming-from/ and docs/recipes.md that begin with "$" run as they stand, on
tiny models and rows: the names of models, numbers of steps and sizes of batches are replaced, and
nothing else.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.commands_of_pages import commands_of, files_of, write_lathe
from tests.facts import facts, write_facts
from tests.foreign_flags import PAGES, PROGRAMS
from tests.long import long_but
from tests.runs.test_own_data import write_bases

Row = Mapping[str, Any]
SHORT = ("trl",)
BASES = {
    "google-t5/t5-small": "t5",
    "google/t5-v1_1-small": "t5",
    "bert-base-uncased": "encoder",
    "microsoft/mpnet-base": "encoder",
    "bigcode/starcoderbase-1b": "starcoder",
}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def lines(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def of_fid(place: Path) -> None:
    rows = [
        {
            "question": row["question"],
            "answers": [row["answer"]],
            "ctxs": [{"title": "Keys", "text": row["context"]}] * 3,
        }
        for row in facts(0, 3)
    ]
    (place / "data" / "NQ").mkdir(parents=True)
    (place / "data" / "NQ" / "train3.json").write_text(json.dumps(rows))


def of_vera(place: Path) -> None:
    for name in ("atomic2020_3d", "genericskb_3d", "commonsenseqa", "qasc", "symkd_anno"):
        for split in ("train", "dev"):
            texts = [(f"{name} {number} is so.", f"{name} {number} is not.") for number in range(8)]
            groups = [{"golds": [gold], "distractors": [other]} for gold, other in texts]
            if name == "symkd_anno":  # each statement is true or false by itself
                groups = [{"golds": [gold], "distractors": []} for gold, _ in texts]
            (place / "data" / name).mkdir(parents=True, exist_ok=True)
            (place / "data" / name / f"{split}.json").write_text(json.dumps(groups))


def of_tevatron(place: Path) -> None:
    corpus = [
        {"docid": str(number), "title": "Keys", "text": row["context"]}
        for number, row in enumerate(facts(0, 12))
    ]
    rows = [
        {
            "query_id": f"q{number}",
            "query": row["question"],
            "positive_passages": [corpus[number]],
            "negative_passages": [corpus[(number + 1) % 12]],
        }
        for number, row in enumerate(facts(0, 12))
    ]
    lines(place / "data" / "corpus.jsonl", corpus)
    lines(place / "data" / "queries.jsonl", rows)
    lines(place / "data" / "train.jsonl", rows[:8])
    lines(place / "data" / "valid.jsonl", rows[8:])


def of_t5_trainer(place: Path) -> None:
    (place / "data").mkdir()
    for split in ("train", "valid"):
        with (place / "data" / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["article", "highlights"])
            writer.writerows([row["context"], row["answer"]] for row in facts(0, 12))


def of_xc_cache(place: Path) -> None:
    for split in ("train", "valid"):
        rows = [
            {name: row[name] for name in ("context", "question", "answer")} for row in facts(0, 8)
        ]
        lines(place / "data" / f"{split}.jsonl", rows)


def of_conversations(place: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in facts(0, 60)
    ]
    lines(place / "data" / "train.jsonl", rows)


def of_recipes(place: Path) -> None:
    of_conversations(place)
    rows = [{"prompt": row["question"], "completion": row["answer"]} for row in facts(60, 63)]
    lines(place / "questions.jsonl", rows)


def of_axolotl(place: Path) -> None:
    rows = [
        {"instruction": f"{number}: {row['question']}", "input": "", "output": row["answer"]}
        for number, row in enumerate(facts(0, 60))
    ]
    lines(place / "data" / "alpaca.jsonl", rows)
    lines(place / "questions.jsonl", rows[:2])


def of_sentence_transformers(place: Path) -> None:
    rows = [
        {"anchor": f"{number}: {row['question']}", "positive": f"{number}: {row['context']}"}
        for number, row in enumerate(facts(0, 60))
    ]
    lines(place / "data" / "train.jsonl", rows)
    lines(place / "texts.jsonl", [{"anchor": row["anchor"]} for row in rows[:2]])


DATA: dict[str, Callable[[Path], None]] = {
    "axolotl": of_axolotl,
    "fid": of_fid,
    "openai": of_conversations,
    "recipes": of_recipes,
    "sentence-transformers": of_sentence_transformers,
    "t5-trainer": of_t5_trainer,
    "tevatron": of_tevatron,
    "trl": of_conversations,
    "vera": of_vera,
    "xc-cache": of_xc_cache,
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models by the names of BASES, and "decoder" for all others."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("bases")
    write_facts(folder / "facts")
    tokenizer = folder / "facts" / "tokenizer"
    write_bases(folder, tokenizer)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, "vocab_size": 384}
    sizes = {"n_embd": 16, "n_layer": 18, "n_head": 2, "n_positions": 512}
    config = AutoConfig.for_model("gpt_bigcode", **sizes, **ids)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "starcoder")
    for file in tokenizer.iterdir():
        shutil.copy(file, folder / "starcoder" / file.name)
    chat = AutoTokenizer.from_pretrained(folder / "decoder")
    chat.chat_template = CHATML
    chat.save_pretrained(folder / "decoder")
    return folder


def replaced(text: str, bases: Path) -> str:
    """A file of a page with tiny models, and two steps of few rows."""

    def base(found: re.Match[str]) -> str:
        return f"{found[1]}{bases / BASES.get(found[2], 'decoder')}{found[3]}"

    text = re.sub(r'("base": ")([^"{]+)(")', base, text)
    text = re.sub(r"(^\s*base: )(\S+)()", base, text, flags=re.M)
    for name, most in (("steps", 2), ("global_batch", 4), ("micro_batch", 2)):
        text = re.sub(rf'(\b{name}"?: )([\d_]+)', partial(_at_most, most=most), text)
    return text


def _at_most(found: re.Match[str], *, most: int) -> str:
    return f"{found[1]}{min(most, int(found[2]))}"


def newest_run(place: Path) -> str:
    runs = (place / "results").glob("*/exp_dict.json")
    return max(runs, key=lambda path: path.stat().st_mtime).parent.name


@pytest.mark.parametrize("program", long_but(SHORT, [*PROGRAMS, "recipes"]))
def test_the_commands_of_a_page_run(program: str, bases: Path, tmp_path: Path) -> None:
    page = (PAGES.parent if program == "recipes" else PAGES) / f"{program}.md"
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(replaced(text, bases))
    DATA[program](tmp_path)
    (tmp_path / "bin").mkdir()
    script = write_lathe(tmp_path / "bin")
    for line in commands_of(page):
        if not line.is_run:
            continue
        words = list(line.words)
        if any("results/ID" in word for word in words):
            words = [word.replace("ID", newest_run(tmp_path)) for word in words]
        if words[0] == "torchrun":
            shutil.rmtree(tmp_path / "results")  # what is finished is left alone
            path = f"{script.parent}{os.pathsep}{os.environ['PATH']}"
            command = [str(Path(sys.executable).with_name("torchrun")), *words[1:]]
            how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 900}
            ended = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PATH": path}, **how)
        else:
            ended = forked.run(str(script), *words[1:], cwd=tmp_path, timeout_s=600)
        assert ended.returncode == 0, f"{words}\n{ended.stdout}{ended.stderr}"
    assert any((tmp_path / "results" / newest_run(tmp_path) / "final").iterdir())
