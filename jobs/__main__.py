"""`python -m jobs`."""

from jobs.cli import app

app(prog_name="lathe-jobs")
