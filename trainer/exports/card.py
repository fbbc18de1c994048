"""README.md of an export: a model card that says what lathe.json knows, and nothing else."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from trainer import tasks
from trainer.config.userfile import may_be_hub_id
from trainer.exports.record import NAME, Record
from trainer.models.weights.model_folder import TRIED
from trainer.protocol.abilities import Answers, Usage

CARD = "README.md"
_RUN_HERE = """\
import json

EXP_GROUPS = {"this": [json.load(open("FOLDER/lathe.json"))["experiment"]]}
"""
_OWN_PROGRAM = (
    "In Lathe: `python -m trainer predict FOLDER --data_path ROWS.jsonl --out ANSWERS.jsonl`."
)
_TRIED = (
    f"Exports of every family that Lathe names were loaded in transformers {' and '.join(TRIED)}, "
    "and computed the same there."
)
_NOT_MEASURED = (
    "Nothing was measured but what stands under Scores: not on other data, not for bias, not for "
    "safety."
)


def write(folder: Path, record: Record) -> None:
    """Write README.md into an export whose record is `record`."""
    (folder / CARD).write_text(text(folder, record), encoding="utf-8")


def text(folder: Path, record: Record) -> str:
    """The card of the export in `folder`."""
    cfg = tasks.parse(record.experiment, source=str(folder / NAME))
    use = Usage("lathe", [], ["How other programs load it is not known."])
    if (Path(tasks.__file__).parent / cfg.package.replace(".", "/") / "trained.py").is_file():
        use = importlib.import_module(f"trainer.tasks.{cfg.package}.trained").usage(cfg, folder)
    programs = [f"{heading}:\n\n```python\n{code}```" for heading, code in use.programs]
    front_matter = ["---", f"library_name: {use.library}"]  # what the Hub reads of a card
    if record.licence is not None:
        front_matter.append(f"license: {record.licence}")
    base = _base_name(record)
    if base is not None and may_be_hub_id(base) and "/" in base:
        front_matter.append(f"base_model: {base}")
    front_matter += ["tags:", "- lathe", f"- {record.experiment['task']}"]
    front_matter += [*_model_index(record, f"{cfg.task} {record.exp_id[:8]}"), "---"]
    what = type(cfg).model_fields["task"].description
    base, name = record.experiment["base"], _base_name(record)
    if name is not None:
        origin = f"`{name}`, as the dictionary names it."
    elif "experiment" in base:
        origin = (
            f"What another run trained (task {base['experiment'].get('task')}), see Dictionary."
        )
    else:
        origin = f"Random weights of a {base['config'].get('model_type')}: no model was pretrained."
    frozen = f" Its weights: `{record.base_fingerprint}`." if record.base_fingerprint else ""
    licence = record.licence or "unknown to this card"
    if name is None and "experiment" not in base:
        licence = "it has none"
    parts = [
        "\n".join(front_matter),
        f"# {cfg.task} {record.exp_id[:8]}\n\n{what} Trained with Lathe {record.lathe}; this card "
        "was written by it, from what the run recorded. What it does not say is unknown to it.",
        "## How to load it\n\n" + "\n\n".join([*programs, _TRIED, _OWN_PROGRAM]),
        "## Limits\n\n" + "\n".join(f"- {limit}" for limit in [*use.limits, _NOT_MEASURED]),
        *([] if record.average is None else [f"## Average\n\n{_average(record.average)}"]),
        f"## Base\n\n{origin}{frozen} Its licence: {licence}.",
        "## Data\n\n" + _data(record),
        "## Scores\n\n" + _scores(record),
        "## Dictionary\n\n```json\n" + json.dumps(record.experiment, indent=2) + "\n```",
        "## Files\n\n"
        + _table(["file", "sha256"], [[f"`{n}`", d] for n, d in record.files.items()]),
    ]
    return "\n\n".join(parts) + "\n"


def _model_index(record: Record, name: str) -> list[str]:
    """The scores as the Hub reads them: the lines of `model-index` in a card's front matter, with a
    result for each set of validation rows; none without scores.

    Source: huggingface_hub 1.x, repocard_data.model_index_to_eval_results.
    """
    by_set: dict[str, dict[str, float]] = {}
    for score, value in record.scores.items():
        of_set, _, metric = score.partition("/")
        if metric:
            by_set.setdefault(of_set, {})[metric] = value
    source = record.experiment.get("data", {}).get("source") or "mix"
    results: list[str] = []
    for of_set, scores in by_set.items():
        results += [
            "  - task:",
            f"      type: {record.experiment['task']}",
            "    dataset:",
            f"      name: {json.dumps(f'{of_set} rows of this run')}",
            f"      type: {json.dumps(str(source))}",
            f"      split: {json.dumps(of_set)}",
            "    metrics:",
        ]
        for metric, value in scores.items():
            results += [f"    - type: {json.dumps(metric)}", f"      value: {_yaml_float(value)}"]
    if not results:
        return []
    return ["model-index:", f"- name: {json.dumps(name)}", "  results:", *results]


def _yaml_float(value: float) -> str:
    """Six digits, with a point before the exponent: without it YAML 1.1 reads 1e-05 as a text."""
    digits, is_power, power = f"{value:.6g}".partition("e")
    return f"{digits}{'' if '.' in digits or not is_power else '.0'}{is_power}{power}"


def _base_name(record: Record) -> str | None:
    base = record.experiment["base"]
    return base if isinstance(base, str) else None


def _data(record: Record) -> str:
    if not record.data and record.average is not None:
        return "That of the runs that the average is of, which differ."
    if not record.data:
        return "Unknown: the run recorded none."
    rows = [
        [name, str(facts.get("rows")), _tokens(facts), str(facts.get("digest"))]
        for name, facts in record.data.items()
    ]
    return (
        _table(["split", "rows", "tokens", "digest of the rows as they were read"], rows)
        + "\n\nWhere they come from is in the dictionary under `data`, as far as it says; their "
        "licence is unknown to this card."
    )


def _average(average: dict[str, Any]) -> str:
    """What the weights are a mean of."""
    if "ema" in average:
        return (
            "These weights are no single step's: they are an exponential moving average over the "
            f"steps of the run, in which the past kept a share of {average['ema']} at every step "
            "(`train.ema`). The scores are theirs."
        )
    parts = [
        f"step {one['step']}" if "step" in one else f"a model of run `{one['exp_id']}`"
        for one in average["of"]
    ]
    rows = [[part, f"{one['weight']:.6g}"] for part, one in zip(parts, average["of"], strict=True)]
    return (
        "These weights are a mean that `lathe average` took, in fp32, of\n\n"
        + _table(["of", "share"], rows)
        + "\n\nAdapters, if these are some, were averaged matrix by matrix. The dictionary is that "
        "of the first."
    )


def _tokens(facts: dict[str, Any]) -> str:
    counts = facts.get("tokens")
    return "unknown" if not isinstance(counts, dict) else f"{sum(counts.values()):,}"


def _scores(record: Record) -> str:
    if not record.scores and record.average is not None and "of" in record.average:
        return "None: the average was not evaluated when it was made."
    if not record.scores:
        return "None: the run had no evaluation before this export."
    step = int(record.scores["step"])
    rows = [[f"`{name}`", f"{x:.6g}"] for name, x in record.scores.items() if name != "step"]
    task = importlib.import_module(
        f"trainer.tasks.{tasks.parse(record.experiment).package}.task"
    ).Task
    train = "python trainval.py -e this --exp_configs this.py -sb results --data_path DATA"
    judge = "python -m trainer evaluate -e this --exp_configs this.py -sb results --data_path DATA "
    judge += "--model FOLDER"
    repeated = f"The same training gives them again:\n\n{_code_block(train)}"
    what = "these answers are scored" if issubclass(task, Answers) else "this folder has them"
    repeated += f"\n\nand of the validation rows {what} by\n\n{_code_block(judge)}"
    table = _table(["name", "value"], rows)
    where = f"Of the validation rows, at step {step}. With `this.py`:"
    return "\n\n".join([table, where, _code_block(_RUN_HERE.strip(), "python"), repeated])


def _code_block(code: str, language: str = "") -> str:
    return f"```{language}\n{code}\n```"


def _table(names: list[str], rows: list[list[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
