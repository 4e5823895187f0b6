"""A group of commands that names the nearest one for a word that is none."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from posttrain.registry import unknown


class Commands(TyperGroup):
    """Commands of the command line."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names. Ends with a usage error, exit code 2, where it names none."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            ctx.fail(f"No such command {args[0]!r}: {unknown(args[0], self.commands)}")
        return super().resolve_command(ctx, args)
