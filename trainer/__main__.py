"""Evaluate, export, plan and prepare: `python -m trainer COMMAND`. Imports no torch until a command
really runs.
"""

from __future__ import annotations

import atexit
import gc

import typer

from trainer.commands import (
    dictionaries,
    evaluate,
    judge,
    models,
    plan,
    predict,
    prepare,
    proof,
    retrieval,
    verifier,
)
from trainer.commands.ranking import fuse, rerank
from trainer.commands.vectors import rounds, search
from trainer.program import PartOfLathe
from trainer.runtime import device_defaults
from trainer.version import Version

app = typer.Typer(
    cls=PartOfLathe,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _about(version: Version = False) -> None:
    """Evaluate, export, plan and prepare."""
    device_defaults.before_torch()
    atexit.register(gc.freeze)  # Python's last look through all that was imported takes .8 s


app.command("import")(models.import_)
app.command()(models.export)
app.command()(models.merge)
app.command()(models.average)
app.command()(evaluate.evaluate)
app.command()(prepare.fetch)
app.command()(predict.predict)
app.command()(predict.read)
app.command()(prepare.prepare)
app.command()(retrieval.encode)
app.command()(search.search)
app.command()(retrieval.bm25)
app.command()(rerank.rerank)
app.command()(fuse.fuse)
app.command()(judge.judge)
app.command()(retrieval.mine)
app.command()(retrieval.contexts)
app.command()(rounds.rounds)
app.command()(verifier.convert)
app.command()(verifier.calibrate)
app.command()(verifier.score)
app.command()(plan.stats)
app.command()(plan.plan)
app.command()(plan.calibrate_device)
app.command()(proof.verify)
app.command()(dictionaries.new)
app.command()(dictionaries.keys)
app.command()(dictionaries.groups)
app.command()(proof.doctor)

if __name__ == "__main__":
    app(prog_name="python -m trainer")
