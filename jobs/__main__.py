"""`python -m jobs`."""

from jobs.cli import app

if __name__ == "__main__":
    app(prog_name="lathe-jobs")
