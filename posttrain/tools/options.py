"""The options of a tool: the keyword arguments of its class, or of the function that makes it.

Their type hints check what a `[tools.NAME]` table gives; the docstring's ``Args:`` describes them in docs/tools.md.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from posttrain.core.errors import ConfigError
from posttrain.core.registry import nearest
from posttrain.tools.base import docstring_parts

REQUIRED = inspect.Parameter.empty
"""The default of an option that must be given."""


@dataclass(frozen=True)
class Option:
    """One keyword argument."""

    name: str
    hint: Any
    default: Any
    description: str = ""

    @property
    def about(self) -> str:
        """Return what it is, for a hint."""
        return self.description or f"it is annotated as {inspect.formatannotation(self.hint)}"


def options_of(factory: Callable[..., Any]) -> dict[str, Option]:
    """The options that a tool class, or a function that makes tools, takes."""
    described = docstring_parts(inspect.getdoc(factory) or "")[1]
    found = {}
    for name, parameter in inspect.signature(factory, eval_str=True).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            hint = Any if parameter.annotation is parameter.empty else parameter.annotation
            found[name] = Option(name, hint, parameter.default, described.get(name, ""))
    return found


def check_options(factory: Callable[..., Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The given options, typed. ``where`` names their table or file, for messages.

    Raises:
        ConfigError: one is unknown, missing, or of a wrong type.
    """
    known = options_of(factory)
    for name in given:
        if name not in known:
            close = nearest(name, known)
            hint = f"did you mean {close!r}?" if close else f"it takes: {', '.join(known) or 'no option'}"
            raise ConfigError(f"{where}: unknown option {name!r}", hint=hint)
    for option in known.values():
        if option.default is REQUIRED and option.name not in given:
            raise ConfigError(f"{where}: option {option.name!r} is missing", hint=option.about)
    return {name: _typed(known[name], value, where) for name, value in given.items()}


def _typed(option: Option, value: Any, where: str) -> Any:
    try:
        # As in a preset: through JSON in strict mode, so that "3" is no number and a list may fill a tuple.
        return TypeAdapter(option.hint).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = "".join(f".{part}" for part in first["loc"])
        raise ConfigError(
            f"{where}: {option.name}{at} = {first['input']!r}: {first['msg']}", hint=option.about
        ) from error
