"""Command classes that suggest the nearest command or option for an unknown word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup

from posttrain.cli.console import echo
from posttrain.core.registry import nearest, unknown

_UNREADABLE = cast("type[Exception]", typer.BadParameter.__mro__[1])
"""Error of any word that cannot be read. Typer exports only this one kind of it."""


class Commands(TyperGroup):
    """Group of commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names. Ends with a message, exit code 2, where it names none."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            _refuse(ctx, f"No such command {args[0]!r}", unknown(args[0], self.commands))
        return super().resolve_command(ctx, args)


class OneCommand(TyperCommand):
    """One command, with options."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the words after the command. Ends with a message, exit code 2, at an option that it does not have, a
        value that it cannot read or an argument that is missing."""
        known = [
            *ctx.help_option_names,
            *(opt for param in self.params for opt in [*param.opts, *param.secondary_opts]),
        ]
        words = args[: args.index("--")] if "--" in args else args
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            if option not in known:
                _refuse(ctx, f"No such option: {option}", _option_hint(option, known))
        try:
            return super().parse_args(ctx, args)
        except _UNREADABLE as error:
            _refuse(ctx, cast(Any, error).format_message(), f"{ctx.command_path} --help")


def _refuse(ctx: Any, message: str, hint: str) -> NoReturn:
    """End with a message as of any other bad input."""
    echo(f"error: {message}", err=True)
    echo(f"hint: {hint}", err=True)
    ctx.exit(2)
    raise AssertionError


def _option_hint(option: str, known: Sequence[str]) -> str:
    """Return the nearest option; else, for a command that has `--set`, the key of the config that it may have meant."""
    options = [name for name in known if name.startswith("--")]
    if close := nearest(option, options):
        return f"did you mean {close}?"
    if "--set" in options:
        from posttrain.config.keys import leaf_keys, nearest_key

        if key := nearest_key(option.strip("-").replace("-", "_"), leaf_keys()):
            return f"did you mean --set {key}=VALUE?"
    return f"there are {', '.join(options)}"
