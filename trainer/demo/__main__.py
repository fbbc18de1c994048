"""`make demo`: `python -m trainer.demo` trains a small reader, and then asks it ten questions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from exp_configs import EXP_GROUPS
from trainer.api.training import fine_tune
from trainer.config.flags import CacheDir
from trainer.config.groups import vary
from trainer.demo import rows, talk
from trainer.errors import EXIT_OK, EXIT_PREEMPTED
from trainer.evaluation.run import Question, open_model
from trainer.launch.ending import end
from trainer.training.options import Options

NEXT = """\
What to do next:
  train on your own data              docs/own-data.md, in ten minutes
  train a chat model on a GPU         README.md, "A chat model by LoRA"
  let others train, through a service docs/service.md"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    savedir_base: Annotated[
        Path, typer.Option("-sb", "--savedir_base", help="Root of all run folders.")
    ] = Path("results"),
    cache_dir: CacheDir = Path("tmp-cache"),
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the training.")] = None,
) -> None:
    """Train the group `demo`, and ask it ten questions. Given again, it goes on where it was
    stopped, and of a trained model it only asks.
    """
    end(lambda: _train_and_talk(savedir_base, cache_dir, seed))


def _train_and_talk(savedir_base: Path, cache_dir: Path, seed: int | None) -> int:
    (values,) = EXP_GROUPS["demo"]
    if seed is not None:
        values = vary(values, train={"seed": seed})
    data, passages, train = savedir_base / "demo_rows", values["data"]["contexts"], values["train"]
    num_train = train["steps"] * train["global_batch"]  # each is read once
    rows.write(data, rows.questions(num_train, passages=passages))
    try:
        fine_tune(values, data, savedir_base=savedir_base, cache_dir=cache_dir)
    except KeyboardInterrupt as stop:
        typer.echo(f"{stop}\nThe same command goes on there.", err=True)
        return EXIT_PREEMPTED
    options = Options(savedir_base, data_path=data, cache_dir=cache_dir)
    asked = talk.questions(passages)
    base_task, base, _ = open_model(Question(values, model="base"), options)
    before = talk.answers(base_task, base, asked)
    task, model, folder = open_model(Question(values, model="final"), options)
    own = talk.answers(task, model, asked)
    others = talk.answers(task, model, talk.without_contexts(asked))
    typer.echo(f"\n{talk.Talk(asked, own, others, before).text()}\n")
    typer.echo(f"The model is in {folder}, its rows in {data}.\n{NEXT}")
    return EXIT_OK


if __name__ == "__main__":
    app()
