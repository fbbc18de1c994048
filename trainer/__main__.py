"""Models in and out: `python -m trainer import fid FOLDER --out DIR`. Imports no torch until a command really runs."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

EXIT_OK, EXIT_FAILED = 0, 1

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _about() -> None:
    """What is done with models besides training them."""


TaskName = Annotated[str, typer.Argument(metavar="TASK", help="The system, as experiments name it: fid.")]
Out = Annotated[Path, typer.Option("--out", help="The folder to write; it must not exist yet.")]
CompatCrossBias = Annotated[
    bool, typer.Option("--compat_cross_bias", help="fid: keep the position bias of cross-attention.")
]
TokenizerName = Annotated[
    str | None, typer.Option("--tokenizer", help="A folder or Hub id whose tokenizer is written into the folder.")
]
Layout = Annotated[str | None, typer.Option("--layout", help="fid: t5 (default), or fid for facebookresearch/FiD.")]


@app.command("import")
def import_(
    task: TaskName,
    source: Annotated[Path, typer.Argument(metavar="FOLDER_OR_FILE", help="A published model: a folder or a file.")],
    out: Out,
    compat_cross_bias: CompatCrossBias = False,
    tokenizer: TokenizerName = None,
) -> None:
    """Read a published model and write a folder that experiments take as their base."""
    given = {"compat_cross_bias": compat_cross_bias or None, "tokenizer": tokenizer}
    _run(lambda: _interchange(task, "import_model", given)(source, out=out))


@app.command("export")
def export(
    task: TaskName,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A model of ours: the best/ or final/ folder of a run.")
    ],
    out: Out,
    layout: Layout = None,
) -> None:
    """Read a trained model and write it as other programs read it."""
    _run(lambda: _interchange(task, "export_model", {"layout": layout})(folder, out=out))


ExpGroup = Annotated[str | None, typer.Option("-e", "--exp_group", help="Group of the experiment.")]
SavedirBase = Annotated[Path, typer.Option("-sb", "--savedir_base", help="Root of all run folders.")]
ExpId = Annotated[str | None, typer.Option("--exp_id", help="This one only; alone, read from its folder.")]
ExpConfigs = Annotated[Path | None, typer.Option("--exp_configs", help="Python file with EXP_GROUPS.")]
Steps = Annotated[int | None, typer.Option("--steps", min=1, help="As given to trainval.py: it is part of the id.")]
DataPath = Annotated[Path | None, typer.Option("--data_path", help="Folder of the data set.")]
CacheDir = Annotated[Path, typer.Option("--cache_dir", help="Token caches and tokenizers.")]
Model = Annotated[str, typer.Option("--model", help="best or final of the run, or any exported folder.")]
Split = Annotated[str, typer.Option("--split", help="train, valid or test.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="The first rows only.")]
BatchSize = Annotated[int | None, typer.Option("--batch", min=1, help="Rows per device; default train.eval_batch.")]
NumBeams = Annotated[int, typer.Option("--num_beams", min=1, help="1: greedy.")]
NumAnswers = Annotated[int, typer.Option("--num_answers", min=1, help="The n best answers of each row.")]
Pred = Annotated[
    Path | None, typer.Option("--pred", help="JSON lines to write: question, answers, prediction, scores.")
]
WriteScores = Annotated[
    Path | None, typer.Option("--write_scores", help="JSON to write: the rows, with ctxs[].score of each passage.")
]


@app.command("evaluate")
def evaluate(
    savedir_base: SavedirBase,
    exp_group: ExpGroup = None,
    exp_id: ExpId = None,
    exp_configs: ExpConfigs = None,
    steps: Steps = None,
    data_path: DataPath = None,
    cache_dir: CacheDir = Path("tmp-cache"),
    model: Model = "best",
    split: Split = "valid",
    limit: Limit = None,
    batch: BatchSize = None,
    num_beams: NumBeams = 1,
    num_answers: NumAnswers = 1,
    pred: Pred = None,
    write_scores: WriteScores = None,
) -> None:
    """Score a trained model on a split, every row exactly once; under torchrun, on all its ranks."""

    def command() -> None:
        from trainer import distributed
        from trainer.evaluation import Question, run
        from trainer.run import Options
        from trainer.task import Search

        values = _experiment(exp_group, exp_id, exp_configs, savedir_base, steps)
        distributed.init()
        options = Options(savedir_base, data_path=data_path, cache_dir=cache_dir)
        asked = Question(
            values,
            model=model,
            split=split,
            limit=limit,
            batch=batch,
            search=Search(num_beams, num_answers),
            predictions=pred,
            passage_scores=write_scores,
        )
        for name, value in run(asked, options).items():
            if distributed.is_main():
                typer.echo(f"{split}/{name} {value:.6f}")

    _run(command)


Declarer = Annotated[str, typer.Option("--declarer", help="original, or rules: more by rule before the converter.")]
Variant = Annotated[
    list[str] | None, typer.Option("--variant", metavar="NAME=VALUE", help="Of a data set, such as case=fit.")
]


@app.command("convert")
def convert(
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="copa, qasc, ...; unifiedqa: its TSV files.")],
    raw: Annotated[Path, typer.Option("--in", help="The publisher's folder, or the one file of a split.")],
    out: Annotated[Path, typer.Option("--out", help="Holds <task>/<split>.json and .tsv, and report.json.")],
    split: Annotated[str | None, typer.Option("--split", help="This one only; else all that are there.")] = None,
    task: Annotated[str | None, typer.Option("--task", help="The folder's name; default DATASET.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on rows that would be left out.")] = False,
    converter: Annotated[
        str | None, typer.Option("--converter", help="Question converter: a T5's folder or id.")
    ] = None,
    declarer: Declarer = "original",
    variant: Variant = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Texts per forward of the converter.")] = 64,
    cache_dir: CacheDir = Path("tmp-cache"),
) -> None:
    """Make statement groups for the plausibility verifier out of publishers' question-answering data."""

    def command() -> None:
        from trainer.tasks.vera.conversion import convert as conversion

        model = None
        if converter is not None:
            from trainer.tasks.vera.conversion.neural import QuestionConverter

            model = QuestionConverter(converter, cache_dir=cache_dir, batch=batch)
        asked = conversion.Conversion(
            dataset,
            raw,
            out,
            split=split,
            task=task,
            variants=conversion.named_values(variant or []),
            declarer=conversion.known_declarer(declarer),
            is_strict=strict,
        )
        for report in conversion.convert(asked, model):
            typer.echo("\n".join(report.lines()))

    _run(command)


@app.command("calibrate")
def calibrate(
    savedir_base: SavedirBase,
    exp_group: ExpGroup = None,
    exp_id: ExpId = None,
    exp_configs: ExpConfigs = None,
    steps: Steps = None,
    data_path: DataPath = None,
    cache_dir: CacheDir = Path("tmp-cache"),
    model: Model = "best",
    split: Split = "valid",
    batch: BatchSize = None,
    objective: Annotated[
        str, typer.Option("--objective", help="What the temperature makes least: ece or nll.")
    ] = "ece",
) -> None:
    """Fit the temperature of a trained verifier on a split, and store it with the model."""

    def command() -> None:
        from trainer import distributed
        from trainer.evaluation import Question, model_folder, pooled
        from trainer.run import Options, on_main

        values = _experiment(exp_group, exp_id, exp_configs, savedir_base, steps)
        use = _module_of(values["task"], "use", "calibrate or score")
        if objective not in ("ece", "nll"):
            raise _bad(f"--objective {objective}: no such objective. Use ece or nll.")
        distributed.init()
        options = Options(savedir_base, data_path=data_path, cache_dir=cache_dir)
        asked = Question(values, model=model, split=split, batch=batch)
        table, folder = pooled(asked, options, use.POOL), model_folder(asked, options)
        report = savedir_base / _id_of(values) / f"calibration-{folder.name}"

        def store() -> dict[str, Any]:
            return asdict(use.calibrate_model(folder, table, split=split, objective=objective, report=report))

        for name, value in on_main(store).items():
            if distributed.is_main():
                typer.echo(f"{name} {value:.6f}" if isinstance(value, float) else f"{name} {value}")

    _run(command)


@app.command("score")
def score(
    savedir_base: SavedirBase,
    exp_group: ExpGroup = None,
    exp_id: ExpId = None,
    exp_configs: ExpConfigs = None,
    steps: Steps = None,
    data_path: DataPath = None,
    cache_dir: CacheDir = Path("tmp-cache"),
    model: Model = "best",
    source: Annotated[
        Path | None, typer.Option("--in", help="One statement a line; without it, standard input.")
    ] = None,
) -> None:
    """Write how plausible each statement is, 0 to 1, a tab, and the statement."""

    def command() -> None:
        from trainer.evaluation import Question, opened
        from trainer.run import Options

        for handler in logging.getLogger().handlers:
            handler.setStream(sys.stderr)  # pyright: ignore[reportAttributeAccessIssue] (standard output is for scores)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise _bad("score runs on one device: start it with python, not with torchrun.")
        values = _experiment(exp_group, exp_id, exp_configs, savedir_base, steps)
        use = _module_of(values["task"], "use", "calibrate or score")
        lines = (source.read_text(encoding="utf-8") if source else sys.stdin.read()).splitlines()
        statements = [line.strip() for line in lines if line.strip()]
        task, verifier, folder = opened(
            Question(values, model=model), Options(savedir_base, data_path=data_path, cache_dir=cache_dir)
        )
        for text, plausibility in zip(
            statements, use.plausibilities(task, verifier, statements, folder=folder), strict=True
        ):
            typer.echo(f"{plausibility:.6f}\t{text}")

    _run(command)


def _module_of(task: str, name: str, what: str) -> Any:
    """trainer/tasks/<task>/<name>.py; ConfigError when the task has none."""
    from trainer import tasks

    known = sorted(file.parent.name for file in Path(tasks.__file__).parent.glob(f"*/{name}.py"))
    if task not in known:
        raise _bad(f"task {task!r} has nothing to {what}. Tasks that have: {', '.join(known)}.")
    return importlib.import_module(f"trainer.tasks.{task}.{name}")


def _bad(text: str) -> Exception:
    from trainer.errors import ConfigError

    return ConfigError(text)


def _id_of(values: dict[str, Any]) -> str:
    from trainer.config import exp_id

    return exp_id(values)


def _experiment(
    group: str | None, exp_id: str | None, file: Path | None, savedir_base: Path, steps: int | None
) -> dict[str, Any]:
    """The one experiment that is meant: of a group, by its id, or out of its folder."""
    from exp_configs import experiments_of
    from trainer.config import exp_id as id_of
    from trainer.errors import ConfigError

    if group is None:
        if exp_id is None:
            raise ConfigError("-e GROUP or --exp_id ID is required: the experiment whose model is evaluated.")
        path = savedir_base / exp_id / "exp_dict.json"
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read ({error}). Give the id of a run in {savedir_base}.") from None
    found = {id_of(values): values for values in experiments_of(group, file, steps)}
    if exp_id is None and len(found) > 1:
        raise ConfigError(f"-e {group} has {len(found)} experiments. Say which by --exp_id: {', '.join(found)}.")
    if exp_id is not None and exp_id not in found:
        raise ConfigError(
            f"--exp_id {exp_id} is not in -e {group}, which has {', '.join(found)}. (--steps changes it.)"
        )
    return found[exp_id or next(iter(found))]


def _interchange(task: str, function: str, given: dict[str, Any]) -> Callable[..., None]:
    """A function of trainer/tasks/<task>/interchange.py with the options that were given (None: was not)."""
    from trainer import tasks
    from trainer.errors import ConfigError

    known = sorted(file.parent.name for file in Path(tasks.__file__).parent.glob("*/interchange.py"))
    if task not in known:
        raise ConfigError(f"task {task!r} has no models to import or export. Those that have: {', '.join(known)}.")
    chosen = getattr(importlib.import_module(f"trainer.tasks.{task}.interchange"), function)
    options = {name: value for name, value in given.items() if value is not None}
    foreign = sorted(options.keys() - inspect.signature(chosen).parameters.keys())
    if foreign:
        raise ConfigError(f"{task} knows no {', '.join(f'--{name}' for name in foreign)}. Leave it out.")
    return lambda path, **always: chosen(path, **always, **options)


def _run(command: Callable[[], None]) -> None:
    """Run a command as trainval.py does: an error of ours is one message on stderr, and its own exit code."""
    from trainer.errors import LatheError

    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stdout)
    for name in ("httpx", "filelock", "torch", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    code = EXIT_OK
    try:
        command()
    except LatheError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        code = error.exit_code
    except Exception:
        logging.exception("failed")
        code = EXIT_FAILED
    if "torch" in sys.modules:
        from trainer import distributed

        if distributed.has_group():
            distributed.shutdown(code)
    raise typer.Exit(code)


if __name__ == "__main__":
    app(prog_name="python -m trainer")
