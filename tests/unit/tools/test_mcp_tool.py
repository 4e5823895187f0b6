"""Tools of MCP servers, with real servers: processes over stdio, and one over HTTP."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import pytest_asyncio

from posttrain.core.errors import ConfigError
from posttrain.tools import mcp as ours
from posttrain.tools.mcp import mcp_tools
from posttrain.tools.sets import close_tools, open_tools

pytest.importorskip("mcp", reason="the optional package mcp is not installed")

SERVER = [sys.executable, str(Path(__file__).parents[2] / "helpers" / "mcp_server.py")]
one_loop = pytest.mark.asyncio(loop_scope="module")
"""A process of the server takes a second to start: tests share one where they can."""


def opened(**options):
    return {tool.name: tool for tool in mcp_tools(**{"command": tuple(SERVER), **options})}


async def ask(tools, tool, /, **arguments):
    state = await tools[tool].create(None)
    try:
        return await tools[tool].call(state, arguments)
    finally:
        await tools[tool].release(state)


async def closed(tools):
    problems = []
    await close_tools(tools, problems.append)
    assert problems == []


def alive(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def offered():
    """The tools of one server, before any loop runs."""
    return opened()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def call(offered):
    """``call(tool, argument=...)`` over one connection, which tests may break."""

    async def call(tool, /, **arguments):
        return await ask(offered, tool, **arguments)

    yield call
    pid = (await call("process_id")).text
    await closed(offered)
    assert not alive(pid)


@pytest.fixture
def server(offered, monkeypatch):
    """The connection's server, whose options a test may change."""
    server = offered["add"].server

    def change(**options):
        for name, value in options.items():
            assert hasattr(server, f"_{name}")
            monkeypatch.setattr(server, f"_{name}", value)

    return change


# ---------------------------------------------------------------------- what a server has


def test_tools_are_found_before_anything_runs(offered):
    assert list(offered) == ["add", "process_id", "variable", "fail", "die", "wait", "freeze", "noise", "look"]
    function = offered["add"].schema["function"]
    assert function["name"] == "add"
    assert function["description"] == "Add two numbers."
    assert function["parameters"]["required"] == ["a", "b"]
    assert function["parameters"]["properties"]["a"]["type"] == "integer"


def test_a_table_chooses_tools_a_prefix_and_the_environment(monkeypatch):
    monkeypatch.setenv("POSTTRAIN_SECRET", "hidden")
    monkeypatch.setenv("POSTTRAIN_PASSED", "passed")
    table = {
        "type": "mcp",
        "command": SERVER,
        "tools": ["variable", "add"],
        "prefix": "test_",
        "env": {"POSTTRAIN_SET": "set"},
        "pass_env": ["POSTTRAIN_PASSED"],
        "start_deadline_s": 60.0,
    }
    tools = open_tools(["server"], {"server": table})
    assert list(tools) == ["test_variable", "test_add"]
    assert tools["test_add"].schema["function"]["name"] == "test_add"

    async def play():
        try:
            return [
                (await ask(tools, "test_variable", name=f"POSTTRAIN_{name}")).text
                for name in ("SECRET", "PASSED", "SET")
            ]
        finally:
            await closed(tools)

    assert asyncio.run(play()) == ["unset", "passed", "set"]


@pytest.mark.slow
def test_a_tool_that_the_server_does_not_have():
    with pytest.raises(ConfigError, match=r"\[tools.server\]: MCP server .*it has no tool 'ad'") as error:
        open_tools(["server"], {"server": {"type": "mcp", "command": SERVER, "tools": ["ad"]}})
    assert error.value.hint == "did you mean 'add'?"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": (sys.executable, "-c", "import sys; sys.exit('no licence')")}, "it wrote last: no licence"),
        ({"command": (sys.executable, "-c", "input(); print('hello'); input()")}, "it was not there within 1 s"),
        ({"command": ("/no/such/program",)}, "No such file"),
        ({"command": ("sleep", "60"), "start_deadline_s": 0.3}, r"it was not there within 0\.3 s"),
        ({"command": (), "url": "http://127.0.0.1:9/mcp"}, r"MCP server http://127\.0\.0\.1:9/mcp: "),
        ({"command": (), "url": "ftp://host"}, "not an http or https URL"),
        ({"command": ()}, "give one of command and url"),
        ({"url": "http://127.0.0.1:9/mcp"}, "give one of command and url"),
        ({"command": "python 'my server.py"}, "command is no command line: No closing quotation"),
        ({"command": (), "url": "http://127.0.0.1:9/mcp", "env": {"A": "b"}}, "^env has no effect with url"),
        ({"command": (), "url": "http://127.0.0.1:9/mcp", "cwd": "/tmp"}, "^cwd has no effect with url"),
        ({"api_key_env": "HOME"}, "^api_key_env has no effect with command"),
        ({"pass_env": ("NO_SUCH_VARIABLE",)}, r"\$NO_SUCH_VARIABLE is not set"),
    ],
)
def test_a_server_that_does_not_start_is_a_clear_error_within_its_deadline(options, message, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    started = time.monotonic()
    with pytest.raises(ConfigError, match=message):
        opened(**{"start_deadline_s": 1.0, **options})
    assert time.monotonic() - started < 15


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match="need the package mcp") as error:
        opened()
    assert "posttrain[mcp]" in error.value.hint


async def test_tools_that_were_never_called_have_nothing_to_close(offered):
    await closed(offered)


# ---------------------------------------------------------------------- calls


@one_loop
async def test_episodes_share_one_process(call):
    pids = await asyncio.gather(*(call("process_id") for _ in range(10)))
    assert len({pid.text for pid in pids}) == 1
    assert alive(pids[0].text)
    sums = await asyncio.gather(*(call("add", a=i, b=1) for i in range(20)))
    assert [(s.text, s.error) for s in sums] == [(str(i + 1), False) for i in range(20)]


@one_loop
async def test_what_a_tool_refuses_is_read_by_the_model(call):
    pid = (await call("process_id")).text
    failed = await call("fail", message="no such city")
    assert failed.error
    assert failed.text.startswith("error: ")
    assert "no such city" in failed.text
    assert (await call("add", a="two", b=1)).error
    assert (await call("add")).error
    long = await call("noise")
    assert not long.error
    assert len(long.text) > 100_000
    assert (await call("process_id")).text == pid  # none of these is a reason to connect again


@one_loop
async def test_a_slow_call_ends_at_its_deadline_and_leaves_the_others_their_server(call, server):
    pid = (await call("process_id")).text
    server(timeout_s=0.8)
    started = time.monotonic()
    late, fine = await asyncio.gather(call("wait", seconds=30), call("wait", seconds=0.1))
    assert time.monotonic() - started < 25
    assert (late.text, late.error) == ("error: no answer for 0.8 s", True)
    assert fine.text == "waited 0.1"
    assert (await call("process_id")).text == pid


@one_loop
async def test_an_episode_that_is_cancelled_takes_nothing_from_the_others(call):
    pid = (await call("process_id")).text
    other = asyncio.create_task(call("wait", seconds=0.5))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await call("wait", seconds=30)
    assert (await other).text == "waited 0.5"
    assert (await call("process_id")).text == pid


@one_loop
async def test_no_more_calls_at_once_than_allowed(call, server):
    await call("process_id")
    server(slots=asyncio.Semaphore(1))
    started = time.monotonic()
    await asyncio.gather(call("wait", seconds=0.2), call("wait", seconds=0.2))
    assert time.monotonic() - started >= 0.4
    server(timeout_s=0.8)
    first, second = await asyncio.gather(call("wait", seconds=30), call("add", a=1, b=1))
    assert first.text == "error: no answer for 0.8 s"
    assert second.text == "error: every slot was taken for 0.8 s"


@one_loop
async def test_a_server_that_dies_is_an_error_and_the_next_call_has_a_new_one(call):
    before = (await call("process_id")).text
    slow = asyncio.create_task(call("wait", seconds=30))
    await asyncio.sleep(0.1)
    died = await call("die")
    assert died.error
    assert died.text.startswith("error: ")
    assert (await asyncio.wait_for(slow, 5)).error
    after = await call("process_id")
    assert after.text.isdigit()
    assert after.text != before


@pytest.mark.slow
@one_loop
async def test_a_server_that_hangs_is_replaced(call, server, monkeypatch):
    before = (await call("process_id")).text
    with monkeypatch.context() as quick:
        quick.setattr(ours, "_CHECK_S", 0.3)
        server(timeout_s=0.8)
        hung = await call("freeze", seconds=600)
    assert hung.text == "error: no answer for 0.8 s"
    server(timeout_s=20.0)
    after = (await call("process_id")).text
    assert after.isdigit()
    assert after != before
    for _ in range(100):  # it is killed in the background
        if not alive(before):
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the old process is still there")


@one_loop
async def test_images_come_beside_the_text_which_names_them(call, tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(b"whatever is in it")
    found = await call("look", file=str(file))
    assert (found.text, found.images, found.error) == (
        "before < image>\n<image>\nafter",
        (b"whatever is in it",),
        False,
    )
    missing = await call("look", file=str(tmp_path / "none.png"))
    assert (missing.images, missing.error) == ((), True)


# ---------------------------------------------------------------------- HTTP


@pytest.mark.slow
def test_over_http(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("SERVER_KEY", "sk-1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start():
        process = subprocess.Popen([*SERVER, "--http", str(port)], stderr=subprocess.DEVNULL)
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return process
            time.sleep(0.05)
        raise AssertionError("the server does not listen")

    process = start()
    try:
        tools = opened(command=(), url=f"http://127.0.0.1:{port}/mcp", api_key_env="SERVER_KEY")

        async def play():
            nonlocal process
            assert (await ask(tools, "add", a=2, b=3)).text == "5"
            process.kill()
            process.wait()
            assert (await ask(tools, "add", a=2, b=3)).error
            process = await asyncio.to_thread(start)
            result = await ask(tools, "add", a=2, b=3)
            await closed(tools)
            return result

        assert asyncio.run(play()).text == "5"
    finally:
        process.kill()
        process.wait()
