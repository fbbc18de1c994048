"""The front page is true: its example trains on a tiny base, its four commands are understood, its
pictures and tables are there, and it stays short.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.distributed.run import get_args_parser

import exp_configs
import trainval
from jobs.serve import app as server
from jobs.serve import offers
from tests import forked
from tests.facts import LLAMA, facts, write_facts
from trainer import tasks

ROOT = forked.ROOT
FRONT_PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
PAGE = FRONT_PAGES[0].read_text()
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", PAGE, re.M | re.S)
(EXAMPLE,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
COMMANDS = next(block for block in BLOCKS if "torchrun" in block)
HERE, EIGHT_GPUS, CLUSTER, SERVICE = (shlex.split(line) for line in COMMANDS.splitlines())
# What Qwen2.5's own template writes of a conversation without a system prompt.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LARGEST_PICTURE = 150_000  # bytes: a page that is read on a slow line


def table_under(heading: str) -> list[list[str]]:
    """The cells of a section's table, without its heading's row and the line below that."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def parsed(app: typer.Typer, words: list[str]) -> dict[str, Any]:
    """The options of a command as the program understands them. UsageError: it does not."""
    command = typer.main.get_command(app)
    return command.make_context("test", words).params


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with chat.py of the page, conversations, and a tiny base in place of the page's."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    write_facts(tmp_path / "facts")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "facts" / "tokenizer")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "base")
    config = {**LLAMA["config"], "max_position_embeddings": 4096}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(tmp_path / "base")
    base, is_found = re.subn(r'"base": "[^"]+"', '"base": "base"', EXAMPLE)
    assert is_found == 1
    (tmp_path / "chat.py").write_text(base)
    (tmp_path / "data").mkdir()
    with (tmp_path / "data" / "train.jsonl").open("w") as file:
        for row in facts(0, 128):
            said = [("user", row["question"]), ("assistant", row["answer"])]
            turns = [{"role": role, "content": content} for role, content in said]
            file.write(json.dumps({"messages": turns}) + "\n")
    return tmp_path


def test_the_front_page_stays_short() -> None:
    assert len(PAGE.splitlines()) <= 120
    assert len(EXAMPLE.splitlines()) <= 12


def test_the_costs_are_six_rows_of_two_columns() -> None:
    assert [len(row) for row in table_under("What it costs")] == [2] * 6


def test_the_tasks_of_the_page_are_those_of_the_program() -> None:
    named = [re.findall(r"`(\w+)`", row[0])[0] for row in table_under("Seven tasks")]
    assert sorted(named) == sorted(tasks.names())


def test_the_example_of_the_page_trains_on_a_tiny_base(place: Path) -> None:
    script, *words = HERE[1:]
    assert (HERE[0], script) == ("python", "trainval.py")
    ended = forked.run(*forked.TRAINVAL, *words, "--steps", "2", cwd=place)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (run,) = (path.parent for path in (place / "results").glob("*/exp_dict.json"))
    assert json.loads((run / "status.json").read_text())["state"] == "succeeded"
    assert (run / "final" / "adapter_model.safetensors").is_file()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]


def test_the_first_three_commands_train_the_same_group() -> None:
    here = parsed(trainval.app, HERE[2:])
    assert here["exp_group"] == "chat"
    launch = get_args_parser().parse_args(EIGHT_GPUS[1:])
    assert (EIGHT_GPUS[0], launch.nproc_per_node, launch.training_script) == (
        "torchrun",
        "8",
        "trainval.py",
    )
    assert parsed(trainval.app, launch.training_script_args) == here
    assert parsed(trainval.app, CLUSTER[2:]) == {**here, "job_scheduler": "slurm"}


def test_the_batch_of_the_example_divides_among_one_and_eight_gpus(place: Path) -> None:
    (values,) = exp_configs.read_groups(place / "chat.py")["chat"]
    train = values["train"]
    for world in (1, 8):
        assert train["global_batch"] % (train["micro_batch"] * world) == 0


def test_the_fourth_command_offers_the_example_to_others(place: Path) -> None:
    assert SERVICE[:2] == ["lathe-jobs", "serve"]
    program = typer.Typer()
    program.command()(server.serve)
    options = parsed(program, SERVICE[2:])
    offered = offers.read(place / options["service_config"])
    (values,) = exp_configs.read_groups(place / "chat.py")["chat"]
    share = values["data"].pop("valid_share")  # the service writes both splits itself
    assert offered.models["chat"].experiment == values
    assert offered.models["chat"].held_out == share


@pytest.mark.parametrize("page", FRONT_PAGES, ids=lambda page: page.name)
def test_pictures_of_a_front_page_are_there_and_small(page: Path) -> None:
    named = re.findall(r'(?:src|srcset)="([^"]+)"', page.read_text())
    assert [Path(name).name for name in named] == ["live_dark.png", "live_light.png"]
    for name in named:
        assert 0 < (page.parent / name).stat().st_size < LARGEST_PICTURE


def test_the_site_begins_with_the_same_example_and_commands() -> None:
    site = FRONT_PAGES[1].read_text()
    assert EXAMPLE in site
    assert COMMANDS in site


def test_nobody_is_told_to_install_another_projects_package() -> None:
    """On PyPI the name lathe is somebody else's. A line of a text may end within the words."""
    texts = [*FRONT_PAGES, *ROOT.glob("docs/**/*.md"), *ROOT.glob("*.py")]
    texts += [path for folder in ("trainer", "jobs") for path in (ROOT / folder).rglob("*.py")]
    install = re.compile(r"pip install[\s'\"]+lathe\b")
    assert not [path for path in texts if install.search(path.read_text())]


def test_what_the_page_has_one_make_is_there() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"\bmake (\w+)(?=`|\s+#)", PAGE))
    assert {"demo", "test", "picture", "site"} <= named
    assert named <= targets
