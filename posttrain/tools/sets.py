"""From names to tools: registered ones, `[tools.NAME]` tables and sets, files of functions, verl's tool files."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from posttrain.config import SandboxConfig
from posttrain.core.errors import CodeError, ConfigError
from posttrain.core.plugins import definition_of, described, user_code, with_place
from posttrain.core.registry import load_object, nearest
from posttrain.core.types import ToolSchema
from posttrain.core.user_calls import value_of
from posttrain.tools.base import TOOLS, Tool, shown_name, with_parameters
from posttrain.tools.functions import from_function
from posttrain.tools.options import check_options
from posttrain.tools.verl import REPLACEMENTS, Entry, read_tool_file

Tables = Mapping[str, Mapping[str, Any]]

_CLOSE_S = 30.0
"""Longest wait for one tool at the end of a run."""
_MEMBERS = ("name", "schema", "check", "create", "call", "reward", "release", "close")


def open_tools(
    names: Sequence[str], tables: Tables | None = None, sandbox: SandboxConfig | None = None
) -> dict[str, Tool]:
    """The tools that ``names`` ask for, by the function name that the model calls.

    Args:
        names: each one a `[tools.NAME]` table, a name in the registry, ``my_file.py:function`` (or a class, or
            ``package.module:name``), or a ``.yaml`` file in verl's format. A tool named twice is opened once.
        tables: the config's `[tools.NAME]`: ``{"type": ..., options}``, or ``{"use": [names]}`` for a set.
        sandbox: of the run, to compare with what a file of verl says; None where nothing will be called.

    Raises:
        ConfigError: a name, type or option is unknown, an option is wrong, a tool cannot be made, or two have one name.
    """
    tables = tables or {}
    opened: dict[str, Tool] = {}
    origin: dict[str, str] = {}
    for name in _flat(names, tables):
        for where, tool in _open(name, tables, sandbox):
            if tool.name in opened:
                raise ConfigError(
                    f"two tools are called {tool.name!r}: one of {origin[tool.name]}, one of {where}",
                    hint="leave one out, or give it another name (option `name`, or `prefix` for MCP)",
                )
            opened[tool.name], origin[tool.name] = tool, where
    return opened


async def close_tools(tools: Mapping[str, Tool], report: Callable[[str], None]) -> None:
    """Close every tool, in the event loop that used them. Failures go to ``report``: the run itself is over."""

    async def close(name: str, tool: Tool) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await value_of(tool.close())
        except TimeoutError:
            report(f"tool {name} did not close within {_CLOSE_S:g} s")
        except (SystemExit, Exception) as error:  # a user's code: the other tools are closed all the same
            report(f"tool {name} failed to close: {described(error)}")

    await asyncio.gather(*(close(name, tool) for name, tool in tools.items()))


def _flat(names: Sequence[str], tables: Tables) -> Iterator[str]:
    """The names with sets replaced by what they use, each once."""
    seen: set[str] = set()

    def walk(names: Sequence[str], inside: tuple[str, ...]) -> Iterator[str]:
        for name in names:
            if name in inside:
                circle = " -> ".join([*inside, name])
                raise ConfigError(f"tool sets use each other in a circle: {circle}", hint="take one of them out")
            table = tables.get(name, {})
            if "use" in table:
                yield from walk(_used(name, table), (*inside, name))
            elif name not in seen:
                seen.add(name)
                yield name

    return walk(names, ())


def _used(name: str, table: Mapping[str, Any]) -> list[str]:
    used = table["use"]
    if len(table) > 1 or not isinstance(used, list) or not all(isinstance(item, str) for item in used):
        raise ConfigError(f"[tools.{name}]: a set has one key, `use`, a list of names", hint='use = ["calculator"]')
    return used


def _open(name: str, tables: Tables, sandbox: SandboxConfig | None) -> Iterator[tuple[str, Tool]]:
    """(where it comes from, tool) of each tool that one name stands for."""
    if name in tables:
        where = f"[tools.{name}]"
        options = dict(tables[name])
        kind = options.pop("type", None)
        if not isinstance(kind, str):
            raise ConfigError(f"{where} has no `type`", hint=f"one of: {', '.join(TOOLS.names())}; or `use` for a set")
        yield from ((where, tool) for tool in _make(_factory(kind, where), options, where))
    elif name.endswith((".yaml", ".yml")):
        for entry in read_tool_file(name, sandbox):
            yield from ((entry.where, tool) for tool in _of_entry(entry))
    else:
        where = f"tool {name!r}"
        if ":" not in name and name not in TOOLS and (close := nearest(name, tables)):
            raise ConfigError(f"unknown {where}", hint=f"did you mean {close!r}?")
        yield from ((where, tool) for tool in _make(_factory(name, where), {}, where))


def _factory(kind: str, where: str) -> Callable[..., Any]:
    """What makes a tool, called with its options."""
    if ":" not in kind:
        factory: Callable[..., Any] = TOOLS.get(kind)
        return factory
    found = load_object(kind, what=where)
    if inspect.isclass(found):
        return found
    if inspect.isroutine(found):
        return functools.partial(_named_function, found)
    if all(hasattr(found, member) for member in _MEMBERS):
        return lambda: found
    raise ConfigError(
        f"{where}: {kind} is {type(found).__name__}, not a function and not a tool",
        hint="name a function with type hints, or a class derived from posttrain.tools.Tool",
    )


def _named_function(
    function: Callable[..., Any], /, name: str = "", description: str = "", from_row: tuple[str, ...] = ()
) -> Tool:
    return from_function(function, name=name, description=description, from_row=from_row)


def _make(factory: Callable[..., Any], options: Mapping[str, Any], where: str) -> list[Tool]:
    """Raises ``ConfigError``, whatever a user's class raises."""
    try:
        with user_code("it cannot be made", factory):
            checked = check_options(factory, options, where)
            made = factory(**checked)
    except ConfigError as error:
        message = error.message if error.message.startswith(where) else f"{where}: {error.message}"
        raise type(error)(message, hint=error.hint) from error
    tools = list(made) if isinstance(made, list | tuple) else [made]
    for tool in tools:
        _check_members(tool, where)
        if (schema := with_parameters(tool.schema)) != tool.schema:
            with user_code(f"{where}: its schema has no parameters, and none can be set", factory):
                tool.schema = schema
    return tools


def _check_members(tool: Any, where: str) -> None:
    """Raise ``ConfigError`` for something that is no tool."""
    if missing := [member for member in _MEMBERS if not hasattr(tool, member)]:
        what = f"it has no {missing[0]!r}"
    elif not isinstance(tool.name, str):
        what = f"its 'name' is {type(tool.name).__name__}"
    elif (shown := shown_name(tool.schema)) is None:
        what = "its 'schema' is no OpenAI function schema"
    elif shown != tool.name:
        what = f"its 'schema' has the name {shown!r}, and its 'name' is {tool.name!r}"
    else:
        return
    raise CodeError(
        with_place(f"{where}: {type(tool).__name__} is no tool, {what}", definition_of(tool)),
        hint="derive from posttrain.tools.Tool, and write name, schema (type, function.name, ...) and call",
    )


def _of_entry(entry: Entry) -> list[Tool]:
    """The tools of one entry of verl's file."""
    try:
        factory = _factory(entry.type, entry.where)
    except ConfigError as error:
        raise ConfigError(
            f"{entry.where}: no tool stands for this class, and it cannot be used itself: {error.message}",
            hint=f"classes of verl that have a tool here: {', '.join(REPLACEMENTS)}",
        ) from error
    if entry.type == "mcp":
        tools = [tool for options in entry.servers for tool in _make(factory, options, entry.where)]
        return _selected(tools, entry.only, entry.where)
    tools = _make(factory, entry.options, entry.where)
    if entry.schema is not None:
        for tool in tools:
            _show(tool, entry.schema, entry.where)
    return tools


def _selected(tools: list[Tool], only: Sequence[str], where: str) -> list[Tool]:
    offered = [tool.name for tool in tools]
    for name in only:
        if name not in offered:
            raise ConfigError(f"{where}: no server has a tool {name!r}", hint=f"there are: {', '.join(offered)}")
    return [tool for tool in tools if not only or tool.name in only]


def _show(tool: Tool, schema: ToolSchema, where: str) -> None:
    """Let the model see another schema, and with it another name."""
    try:
        function = schema["function"]
        name, shown = function["name"], set(function.get("parameters", {}).get("properties", {}))
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: tool_schema is no function schema", hint="type, function.name, ...") from error
    known = set(tool.schema["function"]["parameters"].get("properties", {}))
    if unknown := sorted(shown - known):
        raise ConfigError(
            f"{where}: tool_schema shows an argument {unknown[0]!r} that the tool does not take",
            hint=f"it takes: {', '.join(sorted(known))}",
        )
    tool.name, tool.schema = name, with_parameters(schema)
