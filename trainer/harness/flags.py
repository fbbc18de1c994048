"""The flags of `evaluate` for the tasks of lm-eval and MTEB. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from trainer.errors import ConfigError

_OF_LM_EVAL = ("num_fewshot", "apply_chat_template")


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


@dataclass(frozen=True)
class HarnessFlags:
    """Which tasks are run, and how."""

    lm_eval: Annotated[
        str | None,
        typer.Option(
            "--lm_eval", help="Tasks of lm-eval, such as hellaswag,arc_easy, instead of a split."
        ),
    ] = None
    mteb: Annotated[
        str | None,
        typer.Option(
            "--mteb", help="Tasks of MTEB, such as SciFact, for a retriever, instead of a split."
        ),
    ] = None
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            "--num_fewshot",
            min=0,
            help="lm-eval: solved examples before each question; default: as the task says.",
        ),
    ] = None
    include_path: Annotated[
        Path | None,
        typer.Option(
            "--include_path",
            help="More tasks: a folder of lm-eval's YAML files, or a Python file with MTEB's "
            "classes.",
        ),
    ] = None
    apply_chat_template: Annotated[
        bool | None,
        typer.Option(
            "--apply_chat_template/--no_chat_template",
            help="lm-eval: write questions as conversations; default: if the run learnt from them.",
        ),
    ] = None
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help="Also run the tasks on base (untrained), best, final or an exported folder, and "
            "tell the differences.",
        ),
    ] = None

    @property
    def lm_eval_tasks(self) -> list[str]:
        """The names that --lm_eval lists."""
        return _names(self.lm_eval)

    @property
    def mteb_tasks(self) -> list[str]:
        """The names that --mteb lists."""
        return _names(self.mteb)

    @property
    def is_set(self) -> bool:
        """Whether published tasks are run. ConfigError for flags that do not go together."""
        names = {"--lm_eval": self.lm_eval, "--mteb": self.mteb}
        programs = [flag for flag, text in names.items() if text is not None]
        for flag in programs:
            if not _names(names[flag]):
                raise ConfigError(
                    f"{flag} {names[flag]!r}: want names of tasks, such as {flag} "
                    f"{'SciFact' if flag == '--mteb' else 'hellaswag,arc_easy'}."
                )
        if len(programs) > 1:
            raise ConfigError(
                "--lm_eval and --mteb: a model either writes texts or embeds them. Give one."
            )
        foreign = {"--lm_eval": (), "--mteb": _OF_LM_EVAL}.get((programs or [""])[0])
        if foreign is None:
            foreign = [one.name for one in fields(self) if one.name not in ("lm_eval", "mteb")]
        flags = [f"--{name}" for name in foreign if getattr(self, name) is not None]
        if flags:
            program = "--lm_eval" if programs else "--lm_eval or --mteb"
            raise ConfigError(
                f"{', '.join(flags)}: got no {program}, to which that belongs. Give it, or leave "
                "that out."
            )
        return bool(programs)
