"""What docs/tools.md shows is true: its preset, functions and tool file are opened, and its tables are whole."""

import asyncio
import re
from pathlib import Path

import pytest

from posttrain.config.presets import resolve
from posttrain.core.types import Prompt
from posttrain.tools import TOOLS
from posttrain.tools.options import options_of
from posttrain.tools.sets import open_tools

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "tools.md").read_text(encoding="utf-8")

SERVER = """
from mcp.server.mcpserver import MCPServer
server = MCPServer("files", log_level="ERROR")
for name in ("read", "list_files", "write"):
    server.tool(name=name)(lambda path: path)
server.run()
"""


def block(language):
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.S | re.M)
    return text


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "preset.toml").write_text(block("toml"))
    (tmp_path / "my_tools.py").write_text(block("python"))
    (tmp_path / "tools.yaml").write_text(block("yaml"))
    (tmp_path / "my_server.py").write_text(SERVER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TOOLS, "_entries", dict(TOOLS._entries))
    return tmp_path


def test_the_preset(folder):
    pytest.importorskip("mcp", reason="the optional package mcp is not installed")
    cfg = resolve("rl", "preset.toml").config
    assert list(open_tools(cfg.rollout.tools, cfg.tools)) == ["calculator", "search", "fs_read", "fs_list_files"]
    assert list(open_tools(["count"], cfg.tools)) == ["word_count"]


def test_the_functions(folder):
    tools = open_tools(["my_tools.py:word_count", "lookup"])
    row = Prompt(0, [], "s", "t", {"tools_kwargs": {"lookup": {"execute_kwargs": {"country": "NL"}}}})

    async def call(name, **arguments):
        return (await tools[name].call(await tools[name].create(row), arguments)).text

    assert asyncio.run(call("word_count", text="a b A")) == "3"
    assert asyncio.run(call("word_count", text="a b A", unique=True)) == "2"
    assert asyncio.run(call("lookup", city="Delft")) == '{"city": "Delft", "country": "NL"}'
    assert list(tools["lookup"].schema["function"]["parameters"]["properties"]) == ["city"]


def test_the_tool_file(folder):
    assert list(open_tools(["tools.yaml"])) == ["search", "calc_gsm8k_reward"]


def test_every_tool_and_option_is_described():
    for name in TOOLS.names():
        assert f"### {name}\n" in PAGE
        for option in options_of(TOOLS.get(name)).values():
            assert option.description, f"{name}.{option.name}"
