"""Shows which keys an experiment's dictionary may have and which groups there are, and writes a
file to begin with.
"""

from __future__ import annotations

import json
import pprint
import textwrap
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from trainer.commands.options import ExpConfigs, guard, id_of
from trainer.config import reference
from trainer.config.mistakes import other_place
from trainer.config.sweeps.sweep import SweepGroup
from trainer.config.synonyms import SYNONYMS
from trainer.errors import ConfigError, nearest
from trainer.files.atomic import refusals

Experiments = list[dict[str, Any]]
WIDTH = 100  # columns


@guard
def keys(
    task: Annotated[str, typer.Argument(help="Name of a task, such as causal_lm.")],
    key: Annotated[
        str | None, typer.Argument(help="A key or a block, such as train or optim.lr.")
    ] = None,
    is_schema: Annotated[
        bool, typer.Option("--json_schema", help="Print the JSON Schema of the whole dictionary.")
    ] = False,
) -> None:
    """List the keys of a task's dictionary with their types, defaults and meanings."""
    from trainer import tasks

    config = tasks.config_of(task)
    if is_schema:
        if key is not None:
            raise ConfigError(f"--json_schema is of the whole dictionary: leave {key!r} out.")
        typer.echo(json.dumps(reference.json_schema(config), indent=2))
        return
    matches = all_keys = reference.keys(config)
    if key is not None:
        matches = [one for one in all_keys if one.path == key or one.path.startswith(f"{key}.")]
        if not matches:
            legal = [one.path for one in all_keys]
            elsewhere = other_place(key, legal, SYNONYMS)
            raise ConfigError(f"{key}: no such key. {elsewhere or nearest(key, legal)}")
    for one in matches:
        typer.echo(text_of(one))


def text_of(key: reference.Key) -> str:
    """A key and its description as lines for a terminal."""
    default = "required" if key.default is None else f"default {key.default}"
    lines = textwrap.wrap(f"{key.path}: {key.kind}; {default}", WIDTH, subsequent_indent="    ")
    lines += textwrap.wrap(key.description, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


# Groups
# --------------------------------------------------------------------------------------------------


@guard
def groups(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A group, to print its experiments; or a part of a name, to list the "
            "groups that contain it."
        ),
    ] = None,
    exp_configs: ExpConfigs = None,
) -> None:
    """List the groups for -e with their tasks and steps, or print the dictionaries of one."""
    from exp_configs import read_groups

    all_groups = read_groups(exp_configs)
    if name in all_groups:
        typer.echo(whole(all_groups[name]))
        return
    matches = [group for group in all_groups if name is None or name in group]
    if not matches:
        raise ConfigError(f"{name}: no such group. {nearest(str(name), sorted(all_groups))}")
    width = max(map(len, matches))
    for group in sorted(matches):
        typer.echo(f"{group:{width}}  {summary(all_groups[group])}")


def summary(experiments: Experiments) -> str:
    """One line: how many experiments of which tasks, and their steps."""
    if isinstance(experiments, SweepGroup) and not experiments:
        return f"sweep of {experiments.sweep.search.trials} trials, which Optuna chooses"
    tasks = Counter(str(values.get("task")) for values in experiments)
    counts = ", ".join(f"{count} {task}" for task, count in tasks.items())
    steps = [values.get("train", {}).get("steps") for values in experiments]
    return f"{counts}; steps {', '.join(map(str, dict.fromkeys(steps)))}"


def whole(experiments: Experiments) -> str:
    """Every dictionary of a group with its id, as Python."""
    texts = [
        f"# {place} of {len(experiments)}: {id_of(values)}\n"
        + pprint.pformat(values, width=WIDTH, sort_dicts=False)
        for place, values in enumerate(experiments, start=1)
    ]
    return "\n\n".join(texts)


# A file to begin with
# --------------------------------------------------------------------------------------------------

Line = tuple[str, Any, str]  # a key, its value, what it means

_FILES = "train.csv, .tsv, .jsonl, .json or .parquet in --data_path"
_COLUMNS = "our name of a field: your name of the column"
_REST: list[Line] = [
    ("data.valid_share", 0.05, "this share of the rows is for validation; 0 with a valid.* file"),
    ("train.steps", 1000, "updates of the weights"),
    ("train.global_batch", 32, "rows of an update, on all GPUs together"),
    ("train.micro_batch", 4, "rows on a GPU at once: less needs less memory, not another result"),
    ("train.precision", "bf16", '"fp32" on a CPU'),
]
_ASKED = {"question": "question", "answers": "answers", "contexts": "contexts"}
TASKS: dict[str, list[Line]] = {
    "causal_lm": [
        ("base", "Qwen/Qwen2.5-7B-Instruct", "a Hub id, or a folder as transformers saves it"),
        ("lora.r", 16, "adapters of this rank train; without this block all weights do"),
        ("data.source", "chat", f"a conversation a row: {_FILES}"),
        ("data.columns", {"messages": "messages"}, _COLUMNS),
        *_REST,
        ("optim.lr", 2e-4, "learning rate; 1e-5 where all weights train"),
    ],
    "cross_attention": [
        ("base", "bigcode/starcoderbase-1b", "a decoder; it stays frozen"),
        ("layers.count", 6, "this many layers are added, and train"),
        ("layers.stride", 4, "blocks of the base from one of them to the next"),
        ("data.source", "files", _FILES),
        ("data.columns", _ASKED, _COLUMNS),
        *_REST[1:],
        ("optim.lr", 1e-4, "learning rate"),
    ],
    "fid": [
        ("base", "google/t5-v1_1-base", "a T5: a Hub id, or a folder"),
        ("data.source", "files", _FILES),
        ("data.columns", _ASKED, _COLUMNS),
        ("data.contexts", 10, "passages that are read for a question"),
        *_REST,
        ("optim.lr", 1e-4, "learning rate"),
    ],
    "preference": [
        ("base", "Qwen/Qwen2.5-7B-Instruct", "a Hub id, or a folder as transformers saves it"),
        ("preference.loss", "dpo", "or ipo, simpo, orpo, kto, reward"),
        ("data.source", "chat", f"a prompt with two answers a row: {_FILES}"),
        ("data.columns", {"chosen": "chosen", "rejected": "rejected"}, _COLUMNS),
        *_REST,
        ("optim.lr", 5e-7, "learning rate; 5e-6 with adapters"),
    ],
    "retriever": [
        ("base", "bert-base-uncased", "an encoder or a decoder: a Hub id, or a folder"),
        ("encoder.pooling", "mean", "how a text becomes one vector: mean, cls or eos"),
        ("data.source", "files", _FILES),
        ("data.columns", _ASKED, _COLUMNS),
        *_REST,
        ("optim.lr", 2e-5, "learning rate"),
    ],
    "summariser": [
        ("base", "google/flan-t5-base", "a T5: a Hub id, or a folder"),
        ("data.source", "files", _FILES),
        ("data.columns", {"document": "document", "summary": "summary"}, _COLUMNS),
        ("data.source_tokens", 1024, "longer documents are cut, and counted"),
        *_REST,
        ("optim.lr", 1e-4, "learning rate"),
    ],
    "vera": [
        ("base", "google/t5-v1_1-large", "a T5 or a decoder: a Hub id, or a folder"),
        ("data.source", "files", _FILES),
        ("data.columns", {"golds": "true", "distractors": "false"}, _COLUMNS),
        ("data.train_tasks", ["mine"], "what your rows are called in the scores"),
        ("data.valid_tasks", ["mine"], "the same of the validation rows"),
        *_REST[1:],
        ("optim.lr", 1e-5, "learning rate"),
    ],
}


@guard
def new(
    task: Annotated[str, typer.Argument(help="Name of a task, such as causal_lm.")],
    out: Annotated[Path | None, typer.Option("--out", help="The file; usual: TASK.py.")] = None,
) -> None:
    """Write a commented file with one experiment of ten keys for your own data."""
    if task not in TASKS:
        raise ConfigError(f"task {task!r}: no such task. {nearest(task, sorted(TASKS))}")
    file = out or Path(f"{task}.py")
    if file.suffix != ".py":
        raise ConfigError(f"--out {file}: want a Python file, such as {task}.py.")
    with refusals(file):
        try:
            with file.open("x") as opened:
                opened.write(file_of(task))
        except FileExistsError:
            raise ConfigError(
                f"{file} exists already. Give another name by --out, or move it away."
            ) from None
    typer.echo(
        f"{file} is written. Change base, data.columns and what else is yours, then\n"
        f"  lathe train {file} --data_path data --dry_run   # checks it, and says what is read\n"
        f"  lathe train {file} --data_path data\n"
        f"Every key: lathe keys {task}"
    )


def file_of(task: str) -> str:
    """The Python file for a task: EXP_GROUPS with one group of one experiment."""
    body: list[str] = []
    block = ""
    for key, value, comment in TASKS[task]:
        parent, _, name = key.rpartition(".")
        if parent != block:
            body += ["    },"] * bool(block) + [f'    "{parent}": {{'] * bool(parent)
            block = parent
        indent = "        " if parent else "    "
        literal = repr(value).replace("'", '"')
        body += [f"{indent}# {comment}", f'{indent}"{name}": {literal},']
    body += ["    },"] * bool(block)
    return "\n".join(
        [
            f'"""My experiments: {task}. Every key: `lathe keys {task}`."""',
            "",
            "MINE = {",
            f'    "task": "{task}",',
            *body,
            "}",
            f'EXP_GROUPS = {{"my_{task}": [MINE]}}',
            "",
        ]
    )
