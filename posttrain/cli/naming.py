"""Command classes that suggest the nearest command or option for an unknown word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from posttrain.core.registry import nearest, unknown


class Commands(TyperGroup):
    """Group of commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names. Ends with a usage error, exit code 2, where it names none."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            ctx.fail(f"No such command {args[0]!r}: {unknown(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


class OneCommand(TyperCommand):
    """One command, with options."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the words after the command. Ends with a usage error, exit code 2, at an option that it does not
        have."""
        known = [
            *ctx.help_option_names,
            *(opt for param in self.params for opt in [*param.opts, *param.secondary_opts]),
        ]
        words = args[: args.index("--")] if "--" in args else args
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            if option not in known:
                ctx.fail(f"No such option: {option}; {_option_hint(option, known)}")
        return super().parse_args(ctx, args)


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
