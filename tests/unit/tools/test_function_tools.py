"""Python functions as tools: checked arguments, results, threads, what a row gives, and names."""

import asyncio
import json
import sys
import threading
import time
from dataclasses import dataclass
from typing import Literal

import pytest

from posttrain.core.errors import ConfigError, DataError
from posttrain.core.types import Prompt
from posttrain.tools import TOOLS, tool
from posttrain.tools.functions import FunctionTool
from posttrain.tools.sets import open_tools


def prompt(**extra):
    return Prompt(3, [{"role": "user", "content": "q"}], "my/source", "8", extra)


def ask(function, arguments, episode=None, **options):
    made = FunctionTool(function, **options)

    async def run():
        state = await made.create(episode or prompt())
        try:
            return await made.call(state, arguments)
        finally:
            assert await made.reward(state) is None
            await made.release(state)
            await made.close()

    return asyncio.run(run())


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
    """
    return a + b


async def find(query: str, kind: Literal["web", "news"] = "web", tags: list[str] | None = None) -> str:
    """Find something."""
    await asyncio.sleep(0)
    return f"{kind}: {query} {tags}"


def test_the_schema_comes_from_the_function():
    made = FunctionTool(add)
    assert made.name == "add"
    function = made.schema["function"]
    assert function["description"] == "Add two numbers."
    assert function["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first."}
    assert function["parameters"]["required"] == ["a"]
    renamed = FunctionTool(add, name="plus", description="Sum.")
    assert (renamed.name, renamed.schema["function"]["name"]) == ("plus", "plus")
    assert renamed.schema["function"]["description"] == "Sum."


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        (add, {"a": 2, "b": 3}, "5"),
        (add, {"a": 2}, "3"),
        (add, {"a": "2"}, "3"),
        (add, {"a": 2.0}, "3"),
        (find, {"query": "x"}, "web: x None"),
        (find, {"query": "x", "kind": "news", "tags": ["a"]}, "news: x ['a']"),
    ],
)
def test_calls(function, arguments, text):
    result = ask(function, arguments)
    assert (result.text, result.error) == (text, False)


@pytest.mark.parametrize(
    ("function", "arguments", "why"),
    [
        (add, {}, "argument 'a' is missing"),
        (add, {"a": 1, "<|im_end|>": 2}, "unknown argument; this tool takes a, b"),
        (add, {"a": "two"}, "argument 'a': Input should be a valid integer"),
        (add, {"a": 1.5}, "argument 'a': Input should be a valid integer"),
        (add, {"a": True}, "argument 'a': true and false are no numbers"),
        (add, {"a": None}, "argument 'a': Input should be a valid integer"),
        (find, {"query": 5}, "argument 'query': Input should be a valid string"),
        (find, {"query": "x", "kind": "<|im_end|>"}, "argument 'kind': Input should be 'web' or 'news'"),
        (find, {"query": "x", "tags": ["a", 1]}, "argument 'tags'[1]: Input should be a valid string"),
    ],
)
def test_wrong_arguments_are_told_to_the_model(function, arguments, why):
    result = ask(function, arguments)
    assert result.error
    assert result.text.startswith(f"error: {why}")
    assert "im_end" not in result.text


@dataclass
class Found:
    title: str
    year: int


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is\n", "as it is\n"),
        (3.5, "3.5"),
        (None, "null"),
        (True, "true"),
        ({"a": [1, "ü"]}, '{"a": [1, "ü"]}'),
        (Found("x", 1999), '{"title": "x", "year": 1999}'),
        ([Found("x", 1)], '[{"title": "x", "year": 1}]'),
        ((1, 2), "[1, 2]"),
    ],
)
def test_results_are_text_or_json(value, text):
    def give() -> object:
        return value

    assert ask(give, {}).text == text


def test_an_unknown_object_is_its_text():
    def give() -> object:
        return {"at": threading.current_thread()}

    assert "Thread" in json.loads(ask(give, {}).text)["at"]


def fails() -> str:
    raise ValueError("no such city")


def leaves() -> str:
    sys.exit(3)


async def leaves_too() -> str:
    sys.exit(3)


def stops() -> str:
    raise StopIteration


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (fails, ValueError, "no such city"),
        (leaves, RuntimeError, r"SystemExit\(3\)"),
        (leaves_too, RuntimeError, r"exit\(3\)"),
        (stops, RuntimeError, "StopIteration"),
    ],
)
def test_what_a_function_raises_comes_out_as_an_exception(function, error, message):
    """The episode makes it a message; nothing may end the run."""
    with pytest.raises(error, match=message):
        ask(function, {})


def test_parameters_may_have_any_names():
    def area(function: str, args: int) -> str:
        return f"{function} {args}"

    assert ask(area, {"function": "x", "args": 2}).text == "x 2"


def test_a_function_that_never_returns_holds_up_nothing():
    """More of them than ``asyncio.to_thread`` has threads, and the loop ends all the same."""
    forever = threading.Event()

    def hang() -> str:
        forever.wait(60)
        return "late"

    async def run():
        made = FunctionTool(hang)
        state = await made.create(prompt())
        for _ in range(40):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.005):
                    await made.call(state, {})
        quick = FunctionTool(add)
        return await quick.call(await quick.create(prompt()), {"a": 1})

    started = time.monotonic()
    assert asyncio.run(run()).text == "2"
    assert time.monotonic() - started < 10
    forever.set()


def test_plain_functions_run_side_by_side():
    together = threading.Barrier(20)

    def meet() -> str:
        together.wait(20)
        return "met"

    async def run():
        made = FunctionTool(meet)
        return await asyncio.gather(*(made.call({}, {}) for _ in range(20)))

    assert {result.text for result in asyncio.run(run())} == {"met"}


# ---------------------------------------------------------------------- what a row gives


def look_up(key: str, database: str, limit: int = 1) -> str:
    """Look something up."""
    return f"{database}[{key}][:{limit}]"


HIDDEN = {"from_row": ("database", "limit")}


def row(**kwargs):
    return prompt(tools_kwargs={"look_up": {"execute_kwargs": kwargs}})


def test_arguments_of_the_row_are_hidden_from_the_model():
    made = FunctionTool(look_up, **HIDDEN)
    assert list(made.schema["function"]["parameters"]["properties"]) == ["key"]
    assert ask(look_up, {"key": "a"}, row(database="db1"), **HIDDEN).text == "db1[a][:1]"
    assert ask(look_up, {"key": "a"}, row(database="db2", limit=5), **HIDDEN).text == "db2[a][:5]"
    refused = ask(look_up, {"key": "a", "database": "other"}, row(database="db1"), **HIDDEN)
    assert refused.text == "error: unknown argument; this tool takes key"


def test_a_row_without_them_is_an_error():
    with pytest.raises(DataError, match=r"row 3: tools_kwargs.look_up.execute_kwargs has no 'database'"):
        ask(look_up, {"key": "a"}, **HIDDEN)
    with pytest.raises(DataError, match="'key' is not in the tool's from_row"):
        ask(look_up, {"key": "a"}, row(database="d", key="b"), **HIDDEN)
    with pytest.raises(DataError, match="not a struct"):
        ask(look_up, {"key": "a"}, prompt(tools_kwargs={"look_up": {"execute_kwargs": "db"}}), **HIDDEN)
    with pytest.raises(ConfigError, match="from_row names 'table'"):
        FunctionTool(look_up, from_row=("table",))


# ---------------------------------------------------------------------- names


PLUGIN = '''
from posttrain.tools import tool

def plain(a: int) -> int:
    """Plain."""
    return -a

@tool
def bare(a: int) -> int:
    """Bare."""
    return a

@tool(name="times", description="Product.", from_row=["b"])
async def multiply(a: int, b: int = 2) -> int:
    return a * b

class Greeter:
    name = "greet"
    schema = {"type": "function", "function": {"name": "greet", "description": "", "parameters": {}}}

number = 3
'''


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    (tmp_path / "functions.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TOOLS, "_entries", dict(TOOLS._entries))
    return "functions.py"


def called(made, arguments):
    async def run():
        return (await made.call(await made.create(prompt()), arguments)).text

    return asyncio.run(run())


def test_a_function_is_named_by_its_file(plugin):
    (made,) = open_tools([f"{plugin}:plain"]).values()
    assert (made.name, called(made, {"a": 4})) == ("plain", "-4")
    with pytest.raises(ConfigError, match="has no 'plan'") as error:
        open_tools([f"{plugin}:plan"])
    assert "'plain'" in error.value.hint
    with pytest.raises(ConfigError, match="number is int, not a function and not a tool") as error:
        open_tools([f"{plugin}:number"])
    assert "posttrain.tools.Tool" in error.value.hint
    with pytest.raises(ConfigError, match="Greeter is no tool, it has no 'check'"):
        open_tools([f"{plugin}:Greeter"])
    with pytest.raises(ConfigError, match="plugin file not found"):
        open_tools(["nowhere.py:plain"])


def test_the_decorator_registers_and_leaves_the_function_alone(plugin):
    tools = open_tools([f"{plugin}:multiply"])
    assert list(tools) == ["times"]
    assert tools["times"].schema["function"]["description"] == "Product."
    assert called(tools["times"], {"a": 4}) == "8"
    assert list(open_tools(["bare", "times"])) == ["bare", "times"]
    assert called(open_tools(["bare"])["bare"], {"a": 4}) == "4"
    assert "bare" in TOOLS.names()

    @tool
    def double_it(a: int) -> int:
        """Twice."""
        return 2 * a

    assert double_it(4) == 8
    assert called(open_tools(["double_it"])["double_it"], {"a": 4}) == "8"


def test_tables_of_functions(plugin):
    tables = {
        "minus": {"type": "function", "path": f"{plugin}:plain", "name": "negate", "description": "Minus."},
        "direct": {"type": f"{plugin}:plain", "name": "opposite"},
        "hidden": {"type": "function", "path": f"{plugin}:multiply", "name": "scale"},
    }
    tools = open_tools(["minus", "direct", "hidden"], tables)
    assert list(tools) == ["negate", "opposite", "scale"]
    assert tools["negate"].schema["function"]["description"] == "Minus."
    assert called(tools["opposite"], {"a": 1}) == "-1"
    assert list(tools["scale"].schema["function"]["parameters"]["properties"]) == ["a"]
    with pytest.raises(ConfigError, match=r"\[tools.x\]: path: functions.py:Greeter is type, not a function") as error:
        open_tools(["x"], {"x": {"type": "function", "path": f"{plugin}:Greeter"}})
    assert error.value.hint
    with pytest.raises(ConfigError, match=r"\[tools.x\]: option 'path' is missing"):
        open_tools(["x"], {"x": {"type": "function"}})
    with pytest.raises(ConfigError, match=r"from_row\.0 = 3"):
        open_tools(["x"], {"x": {"type": "function", "path": f"{plugin}:plain", "from_row": [3]}})


def test_a_function_that_cannot_be_a_tool_is_refused_where_it_is_decorated():
    with pytest.raises(ConfigError, match="needs a type hint"):

        @tool
        def untyped(a):
            return a

    with pytest.raises(ConfigError, match="'a' needs a type hint and a place of its own"):

        @tool
        def by_place(a: int, /) -> int:  # arguments of a call have names
            return a
