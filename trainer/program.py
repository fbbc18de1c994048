"""What the programs `python -m trainer` and lathe-jobs say for a command of another program."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from trainer.errors import nearest


class PartOfLathe(TyperGroup):
    """A program with a part of lathe's commands: for a name that is none of its own it tells where
    all of them are listed.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            ctx.fail(
                f"No such command {name!r}. {nearest(name, [*self.commands])} `lathe` has the "
                "commands of all programs: `lathe -h` lists them."
            )
        return super().resolve_command(ctx, args)
