"""The command: `python -m jobs`, or `lathe-jobs`.

Exit codes: 0 success, 2 bad input, 3 the command failed for some experiments, 4 a scheduler cannot
be reached, 5 nothing matched. No command asks a question: dangerous ones need --yes. With --json,
stdout holds JSON and nothing else.
"""

from __future__ import annotations

import typer

from jobs import backends
from jobs.commands import change, look, send, serve, sweep
from trainer.program import PartOfLathe
from trainer.version import Version

app = typer.Typer(
    cls=PartOfLathe,
    context_settings={"help_option_names": ["-h", "--help"]},  # every command inherits them
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Submit groups of experiments, and follow them. Backends: "
    + ", ".join(backends.names())
    + ". `doctor -j NAME` says how far each was validated.",
)


@app.callback()
def _about(version: Version = False) -> None:
    pass


RETRIES = (
    "`retry ID` sends exactly what was sent before: flags, job dictionary and code. "
    "`submit --retry failed` sends those of now."
)

app.command("plan")(send.plan_command)
app.command("submit", epilog=RETRIES)(send.submit_command)
app.command("sweep")(sweep.sweep_command)
app.command("status")(look.status_command)
app.command("show")(look.show_command)
app.command("logs")(look.logs_command)
app.command("cancel")(change.cancel_command)
app.command("retry", epilog=RETRIES)(change.retry_command)
app.command("reset")(change.reset_command)
app.command("reconcile")(change.reconcile_command)
app.command("doctor")(look.doctor_command)
app.command("results")(look.results_command)
app.command("gc")(change.gc_command)
app.command("export")(send.export_command)
app.command("token")(serve.token_command)
app.command("mcp")(serve.mcp_command)
app.command(
    "serve",
    add_help_option=False,  # the program that it starts has the options and the help
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)(serve.serve_command)

if __name__ == "__main__":
    app(prog_name="lathe-jobs")
