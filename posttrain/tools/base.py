"""The Tool protocol, the registry of tools, and function schemas made from Python functions."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Union, get_args, get_origin

from posttrain.core.errors import ConfigError, DataError
from posttrain.core.registry import Registry
from posttrain.core.types import Prompt, ToolSchema


@dataclass(frozen=True)
class ToolResult:
    """What the model reads back. ``error`` says that the call itself was wrong or failed."""

    text: str
    error: bool = False
    images: tuple[bytes, ...] = ()
    """Files of images (PNG, JPEG) for a model that sees. The text says ``<image>`` where each belongs."""


class Tool(Protocol):
    """One tool, shared by all episodes of a process; whatever belongs to one episode lives in its state.

    ``name`` is the function name the model calls, which may differ from the name in the registry. A class derived from
    this one inherits a ``check``, ``create``, ``reward``, ``release`` and ``close`` that do nothing.

    The options of a tool are the keyword arguments of its constructor, with type hints (``posttrain.tools.options``).
    The constructor runs before the event loop does, also in ``posttrain prep``, which needs the schema alone: it opens
    nothing that must be closed.
    """

    name: str
    schema: ToolSchema
    tells_answer: bool = False
    """True for one that tells the model whether an answer is right: scores sampled with it are none of a benchmark."""
    gives_images: bool = False
    """True for one whose results have images: before a run starts it is checked that the model reads them."""

    def check(self) -> None:
        """Called once, before a run exists. Raises ``ConfigError`` where the tool cannot work in it."""
        return  # not left out: type checkers take a method without a body for abstract

    async def create(self, prompt: Prompt) -> Any:
        """State for one episode."""
        return None

    async def call(self, state: Any, arguments: dict[str, Any]) -> ToolResult:
        """Run one call. Wrong arguments are a ``ToolResult(error=True)`` that the model can read, not an exception."""

    async def reward(self, state: Any) -> float | None:
        """The tool's own reward for the episode so far; None when it has no opinion."""
        return None

    async def release(self, state: Any) -> None:
        """Free what ``create`` took. Called exactly once per state, also after errors."""
        return

    async def close(self) -> None:
        """Free what the tool itself holds. Called at the end of the run, in its event loop; a run that starts its
        workers again (`run.restarts`) makes the tool anew."""
        return


def cut(text: str, limit: int, where: Literal["left", "middle", "right"] = "middle") -> str:
    """At most about ``limit`` characters of a text, and a note of how many are missing at its start (``left``), in the
    middle, or at its end (``right``)."""
    missing = len(text) - limit
    if missing <= 0:
        return text
    head = {"left": 0, "middle": limit // 2, "right": limit}[where]
    tail = {"left": limit, "middle": limit // 2, "right": 0}[where]
    note = f"... {len(text) - head - tail} characters cut ..."
    return "\n".join(part for part in (text[:head], note, text[len(text) - tail :]) if part)


def telling(tools: Iterable[Tool]) -> list[str]:
    """Return the names of the tools that tell the model whether an answer is right."""
    return [tool.name for tool in tools if getattr(tool, "tells_answer", False)]  # a user's need not derive from Tool


def telling_warning(names: Sequence[str]) -> str:
    """Return what to know of scores that are sampled with such tools; ``names``: at least one."""
    return f"warning: no scores of a benchmark: the model learns from {' and '.join(names)} whether its answer is right"


TOOLS: Registry[Any] = Registry(
    "tool",
    {
        "calculator": "posttrain.tools.calculator:Calculator",
        "code_interpreter": "posttrain.tools.code:CodeInterpreter",
        "function": "posttrain.tools.functions:function_tool",
        "gsm8k": "posttrain.tools.gsm8k:Gsm8kTool",
        "mcp": "posttrain.tools.mcp:mcp_tools",
        "search": "posttrain.tools.search:Search",
        "zoom": "posttrain.tools.zoom:Zoom",
    },
)
"""Tool classes, and functions that return a tool or a list of tools. All take options as keyword arguments."""


def shown_name(schema: Any) -> str | None:
    """Return the name by which the model calls the function of a schema; None: it is no OpenAI function schema."""
    function = schema.get("function") if isinstance(schema, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def with_parameters(schema: ToolSchema) -> ToolSchema:
    """Return the schema of a function with its parameters: none, where it leaves them out, as OpenAI's clients may.
    Chat templates read them."""
    function = schema["function"]
    if function.get("parameters"):
        return schema
    return {**schema, "function": {**function, "parameters": {"type": "object", "properties": {}}}}


def row_kwargs(prompt: Prompt, function: str, kind: str) -> dict[str, Any]:
    """What a row gives a tool: ``tools_kwargs.<function>.<kind>``, ``kind`` being ``create_kwargs``,
    ``execute_kwargs``, ``calc_reward_kwargs`` or ``release_kwargs`` (verl's names). Empty where the row has none.

    Raises:
        DataError: it is no mapping.
    """
    of_tool = prompt.tools_kwargs.get(function) or {}
    given = (of_tool.get(kind) or {}) if isinstance(of_tool, dict) else of_tool
    if not isinstance(given, dict):
        raise DataError(f"row {prompt.index}: tools_kwargs.{function}.{kind} is {given!r}, not a struct")
    # Parquet fills a struct's fields that a row lacks with null.
    return {key: value for key, value in given.items() if value is not None}


def function_schema(function: Callable[..., Any], leave_out: Collection[str] = ()) -> ToolSchema:
    """The OpenAI function schema of a function, from its name, type hints and docstring.

    The docstring's text up to ``Args:`` (or another section) becomes the description; lines ``name: text`` under
    ``Args:`` describe the parameters. A parameter without default is required. ``self`` and the parameters in
    ``leave_out`` are left out.

    Raises:
        ConfigError: a parameter has no type hint, or one that JSON cannot express.
    """
    description, documented = docstring_parts(inspect.getdoc(function) or "")
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self" or name in leave_out:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or name not in hints:
            raise ConfigError(
                f"tool {function.__name__!r}: parameter {name!r} needs a type hint and a place of its own",
                hint="write every parameter as `name: type`, without *, ** or a / behind it",
            )
        properties[name] = _json_type(hints[name], f"tool {function.__name__!r}, parameter {name!r}")
        if name in documented:
            properties[name]["description"] = documented[name]
        if parameter.default is parameter.empty:
            required.append(name)
    return {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


_SIMPLE: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def _json_type(hint: Any, where: str) -> dict[str, Any]:
    """JSON schema of one type hint."""
    if hint is Any:
        return {}
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal and len({type(value) for value in args}) == 1 and type(args[0]) in _SIMPLE:
        return {"type": _SIMPLE[type(args[0])], "enum": list(args)}
    if (origin or hint) is list:
        return {"type": "array", "items": _json_type(args[0] if args else Any, where)}
    if (origin or hint) is dict and (not args or args[0] is str):
        values = _json_type(args[1] if args else Any, where)
        return {"type": "object", "additionalProperties": values} if values else {"type": "object"}
    if origin in (Union, types.UnionType):
        options = [_json_type(arg, where) for arg in args if arg is not type(None)]
        return options[0] if len(options) == 1 else {"anyOf": options}
    raise ConfigError(f"{where}: type {hint!r} has no JSON schema", hint="use str, int, float, bool, list or dict")


def docstring_parts(doc: str) -> tuple[str, dict[str, str]]:
    """(description, parameter descriptions) of a docstring with an optional ``Args:`` section."""
    description: list[str] = []
    parameters: dict[str, str] = {}
    section = current = ""
    for line in doc.splitlines():
        if line.rstrip() in ("Args:", "Returns:", "Raises:", "Example:", "Examples:", "Yields:"):
            section = line.rstrip()
        elif not section:
            description.append(line.strip())
        elif section == "Args:" and line.strip():
            name, colon, text = line.strip().partition(":")
            if colon and line.startswith("    ") and not line.startswith("     "):
                current = name.split(" ")[0]
                parameters[current] = text.strip()
            elif current:
                parameters[current] += " " + line.strip()
    return " ".join(part for part in description if part), parameters
