"""Judges: a trained model against another one, or a run file of retrieval by its measures."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer.commands import options
from trainer.commands.retrieval import RankingOptions, measures_of
from trainer.config.flags import CacheDir, DataPath, Strict
from trainer.errors import EXIT_REFUSED, ConfigError
from trainer.files.atomic import read_json
from trainer.metrics.win_rate import WinRate

if TYPE_CHECKING:
    from trainer.judging.llm_judge import LanguageModel
    from trainer.judging.sides import ComparedModels
    from trainer.verdict.judgement import Judgement

Runs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]...",
        help="A finished run: its id, the beginning of it, or its folder. Several are seeds of one "
        "recipe. None: a run file of retrieval is measured (--run).",
    ),
]


@dataclass(frozen=True)
class JudgeOptions:
    """How a trained model is compared; what is not given is as in the "judge" of its dictionary."""

    savedir_base: options.SavedirBase = Path("results")
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help="base (default): what the run began with; or a run. Several runs, with commas "
            "between, are seeds.",
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option("--model", help="best or final of the runs; default: best, else final."),
    ] = None
    limit: options.Limit = None
    batch: options.BatchSize = None
    answers: Annotated[
        int | None,
        typer.Option("--answers", min=0, help="Rows that both language models answer."),
    ] = None
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep",
            help="Texts by which forgetting is measured: a file below --data_path, stdlib_docs "
            "(default), or nothing.",
        ),
    ] = None
    overlap: Annotated[
        str | None,
        typer.Option(
            "--overlap", help="Rows that are training rows, too: refuse (default) or leave_out."
        ),
    ] = None
    slices_by: Annotated[
        str | None, typer.Option("--slices_by", help="The score by which slices are compared.")
    ] = None
    gate: Annotated[
        str | None,
        typer.Option(
            "--gate",
            help='What must hold, as JSON: {"em": {"gain": 0.01}}. Exit code 11 if it does not.',
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of judge.json and judge.md; default: the run's."),
    ] = None
    data_path: DataPath = None
    cache_dir: CacheDir = Path("tmp-cache")
    llm_judge: Annotated[
        str | None,
        typer.Option(
            "--llm_judge",
            help="Address of an endpoint of the OpenAI dialect, such as http://127.0.0.1:8000/v1: "
            "a language model says of each pair of answers which is better, in both orders.",
        ),
    ] = None
    llm_model: Annotated[
        str | None, typer.Option("--llm_model", help="Name of the model at --llm_judge.")
    ] = None
    llm_key_file: Annotated[
        Path | None,
        typer.Option("--llm_key_file", help="File that holds the key of --llm_judge alone."),
    ] = None
    llm_rows: Annotated[
        int, typer.Option("--llm_rows", min=1, help="Pairs that --llm_judge is asked about.")
    ] = 200


@options.guard
def judge(
    ranking: RankingOptions,
    how: JudgeOptions,
    runs: Runs = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            help="Of runs: test (default) or valid. Of a run file: only questions of this split.",
        ),
    ] = None,
    strict: Strict = False,
) -> None:
    """Say whether a trained model is better than its base or than another run, what broke and what
    it forgot; under torchrun, on all its ranks. Or measure a run file of retrieval: recall, MRR,
    nDCG and MAP as trec_eval defines them, and DPR's answer recall.
    """
    if not runs:
        _refuse(how, JudgeOptions, "without a RUN, whose model would be judged")
        for name, value in measures_of(ranking, split, strict=strict).items():
            typer.echo(f"{name} {value:.6f}")
        return
    _refuse(ranking, RankingOptions, f"with the RUN {runs[0]}: a run file needs none")
    from trainer.judging.compare import run_judge
    from trainer.runtime import distributed
    from trainer.training.options import Options

    language_model = _language_model(how)
    comparison = _comparison(how, runs, split)
    distributed.init()
    run_options = Options(
        how.savedir_base, data_path=how.data_path, cache_dir=how.cache_dir, strict=strict
    )
    run_folder = how.savedir_base / options.id_of(comparison.after.experiments[0])
    folder = how.out or run_folder
    judgement = run_judge(comparison, run_options, folder)
    if distributed.is_main():
        _tell(judgement, folder)
        if language_model is not None:
            from trainer.judging.llm_judge import ask_language_model

            says = ask_language_model(language_model, folder, run_folder, most=how.llm_rows)
            typer.echo(f"{says.model} prefers the trained model's answer in {says.words}")
    if judgement.refusals:
        raise typer.Exit(EXIT_REFUSED)


def _refuse(asked: Any, kind: type, why: str) -> None:
    """ConfigError for flags of the other use of this command."""
    usual = {field.name: field.default for field in fields(kind)}
    given = [f"--{name}" for name, one in vars(asked).items() if one != usual[name]]
    if given:
        raise ConfigError(f"judge: got {', '.join(given)} {why}. Give the one or the other.")


def _language_model(how: JudgeOptions) -> LanguageModel | None:
    """The language model that judges, if one is to."""
    if how.llm_judge is None:
        flags = {"--llm_model": how.llm_model, "--llm_key_file": how.llm_key_file}
        stray = [name for name, value in flags.items() if value is not None]
        if stray:
            raise ConfigError(
                f"judge: got {', '.join(stray)} without --llm_judge, the address of the endpoint. "
                "Give both, or neither."
            )
        return None
    if how.llm_model is None:
        raise ConfigError(
            f"--llm_judge {how.llm_judge}: no --llm_model. Give the name of a model there."
        )
    from trainer.judging.llm_judge import LanguageModel, read_key

    key = None if how.llm_key_file is None else read_key(how.llm_key_file)
    return LanguageModel(how.llm_judge, how.llm_model, key)


def _comparison(how: JudgeOptions, runs: list[str], split: str | None) -> ComparedModels:
    from trainer.evaluation.named_run import dictionary_of
    from trainer.judging import sides

    experiments = [dictionary_of(how.savedir_base, one) for one in runs]
    flags = {"against": how.against, "split": split, "answers": how.answers}
    flags |= {"overlap": how.overlap, "slices_by": how.slices_by}
    stated: dict[str, Any] = {name: one for name, one in flags.items() if one is not None}
    if how.keep is not None:
        stated["keep"] = None if how.keep == "nothing" else how.keep
    if how.gate is not None:
        stated["gate"] = _gate(how.gate)
    where: dict[str, Any] = {"model": how.model, "limit": how.limit, "batch": how.batch}
    return sides.compared(how.savedir_base, experiments, stated, **where)


def _gate(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"--gate {text!r} is not JSON ({error}). Write it such as "
            '--gate \'{"em": {"gain": 0.01}}\'.'
        ) from None


def _tell(judgement: Judgement, folder: Path) -> None:
    for name, score in judgement.scores.items():
        one = score.outcome
        typer.echo(
            f"{name} {one.before:.6f} -> {one.after:.6f} ({one.effect:+.6f}, 95%: {one.low:+.6f} "
            f"to {one.high:+.6f}, p {score.p:.4g}): {score.result}"
        )
    for name, (before, after, why) in judgement.untested.items():
        typer.echo(f"{name} {before} -> {after}: not tested, {why}")
    record: dict[str, Any] = read_json(folder / "judge.json") or {}
    for name, why in record["not_measured"].items():
        typer.echo(f"not measured: {name}; {why}")
    if (votes := record["votes"]) is not None:
        rate = WinRate(**votes["rate"])
        typer.echo(f"{votes['votes']} votes prefer the trained model's answer in {rate.words}")
    typer.echo(f"verdict: {judgement.words}")
    for line in judgement.refusals:
        typer.echo(f"refused: {line}")
    typer.echo(f"wrote {folder / 'judge.json'} and {folder / 'judge.md'}")
