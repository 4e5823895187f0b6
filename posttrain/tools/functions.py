"""Python functions as tools: ``@tool`` in a plugin, or ``my_file.py:function`` in `rollout.tools`."""

from __future__ import annotations

import functools
import inspect
import json
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar, overload

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from posttrain.core.errors import ConfigError, DataError
from posttrain.core.registry import load_object
from posttrain.core.types import Prompt
from posttrain.tools.base import TOOLS, Tool, ToolResult, function_schema, row_kwargs

F = TypeVar("F", bound=Callable[..., Any])

_FACTORY = "__posttrain_tool__"
"""Attribute of a function that ``@tool`` decorates: makes the tool as the decorator was told to."""


@overload
def tool(function: F) -> F: ...


@overload
def tool(*, name: str = "", description: str = "", from_row: Sequence[str] = ()) -> Callable[[F], F]: ...


def tool(
    function: F | None = None, *, name: str = "", description: str = "", from_row: Sequence[str] = ()
) -> F | Callable[[F], F]:
    """Decorator: register a function, plain or ``async``, as a tool. The function itself stays as it is.

    Args:
        name: what the model calls it, and its name in the registry; empty: the function's own.
        description: what the model reads about it; empty: its docstring.
        from_row: parameters that the model does not see. Each row gives them as
            ``tools_kwargs.<name>.execute_kwargs``.

    Raises:
        ConfigError: a parameter has no type hint, or one that JSON cannot express; the name is taken.
    """

    def register(function: F) -> F:
        factory = functools.partial(FunctionTool, function, name=name, description=description, from_row=from_row)
        TOOLS.register(factory().name)(factory)
        vars(function)[_FACTORY] = factory
        return function

    return register if function is None else register(function)


class FunctionTool(Tool):
    """A tool that calls a function. Its schema is made by ``function_schema``.

    Arguments are checked against the type hints, and text that reads as a number is taken for one. What the function
    returns is sent as it is when it is text, else as JSON. A plain function runs in a thread, so that a slow one does
    not hold up the other episodes. Nothing can end it there: after its deadline it goes on, and nobody listens.

    Args:
        function: the function; see ``tool`` for the others.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str = "",
        description: str = "",
        from_row: Sequence[str] = (),
    ) -> None:
        self.function = function
        parameters = inspect.signature(function).parameters
        if missing := [parameter for parameter in from_row if parameter not in parameters]:
            raise ConfigError(
                f"tool {_name(function)!r}: from_row names {missing[0]!r}, which is no parameter",
                hint=f"it has {_list(parameters)}",
            )
        schema = function_schema(function, leave_out=from_row)
        about = schema["function"]
        self.name = name or about["name"]
        about |= {"name": self.name, "description": description or about["description"]}
        self.schema = schema
        self.from_row = frozenset(from_row)
        self._needed_from_row = [p for p in from_row if parameters[p].default is inspect.Parameter.empty]
        hints = typing.get_type_hints(function)
        self._adapters = {key: TypeAdapter[Any](hints[key]) for key in about["parameters"]["properties"]}

    async def create(self, prompt: Prompt) -> dict[str, Any]:
        """The row's own arguments. Raises ``DataError`` where one is missing or unknown."""
        given = row_kwargs(prompt, self.name, "execute_kwargs")
        where = f"row {prompt.index}: tools_kwargs.{self.name}.execute_kwargs"
        if unknown := sorted(set(given) - self.from_row):
            hint = f"it has {_list(self.from_row)}"
            raise DataError(f"{where}: {unknown[0]!r} is not in the tool's from_row", hint=hint)
        if missing := [name for name in self._needed_from_row if name not in given]:
            raise DataError(f"{where} has no {missing[0]!r}, which the function needs")
        return given

    async def call(self, state: dict[str, Any], arguments: dict[str, Any]) -> ToolResult:
        try:
            checked = self._checked(arguments)
        except _WrongArguments as error:
            return ToolResult(f"error: {error}", error=True)
        result = await self._run({**checked, **state})
        return result if isinstance(result, ToolResult) else ToolResult(_text(result))

    async def _run(self, arguments: dict[str, Any]) -> Any:
        from posttrain.core.user_calls import in_thread, value_of  # here: a schema alone (prep) needs no event loop

        if not inspect.iscoroutinefunction(self.function):
            result = await in_thread(self.function, **arguments)
        else:
            result = self.function(**arguments)
        try:
            return await value_of(result)
        except SystemExit as error:  # it would end the run
            raise RuntimeError(f"it called exit({error.code})") from error

    def _checked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments as the hints have them. Raises ``_WrongArguments``; the model's own text is not echoed."""
        required = self.schema["function"]["parameters"]["required"]
        if missing := [name for name in required if name not in arguments]:
            raise _WrongArguments(f"argument {missing[0]!r} is missing")
        if len(arguments.keys() - self._adapters.keys()):
            raise _WrongArguments(f"unknown argument; this tool takes {_list(self._adapters)}")
        checked = {}
        for name, value in arguments.items():
            try:
                checked[name] = self._adapters[name].validate_python(value)
                if isinstance(value, bool) and not isinstance(checked[name], bool):
                    raise _WrongArguments(f"argument {name!r}: true and false are no numbers")
            except ValidationError as error:
                first = error.errors(include_url=False, include_context=False, include_input=False)[0]
                at = "".join(f"[{part}]" for part in first["loc"] if isinstance(part, int))
                raise _WrongArguments(f"argument {name!r}{at}: {first['msg']}") from error
        return checked


def function_tool(path: str, name: str = "", description: str = "", from_row: Sequence[str] = ()) -> FunctionTool:
    """A Python function with type hints.

    Args:
        path: `my_file.py:function` or `package.module:function`.
        name: what the model calls it; empty: the function's own name.
        description: what the model reads about it; empty: its docstring.
        from_row: parameters that the model does not see; each row gives them as `execute_kwargs`.
    """
    function = load_object(path, what="path")
    if not inspect.isroutine(function):
        raise ConfigError(f"path: {path} is {type(function).__name__}, not a function", hint="name a function there")
    return from_function(function, name=name, description=description, from_row=from_row)


def from_function(function: Callable[..., Any], **options: Any) -> FunctionTool:
    """The tool of a function, as its ``@tool`` says where it has one, changed by the options that are not empty."""
    factory = getattr(function, _FACTORY, None) or functools.partial(FunctionTool, function)
    made: FunctionTool = factory(**{key: value for key, value in options.items() if value})
    return made


class _WrongArguments(Exception):
    """The message is for the model."""


def _text(result: Any) -> str:
    if isinstance(result, str):
        return result
    return json.dumps(to_jsonable_python(result, fallback=str), ensure_ascii=False)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))


def _list(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
