"""Names to tools: tables and sets of a preset, options, verl's tool files, and the end of a run."""

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest
import tomli

from posttrain.config import Config, SandboxConfig
from posttrain.config.presets import resolve
from posttrain.config.writing import dump_toml, flatten_config
from posttrain.core.errors import CodeError, ConfigError
from posttrain.core.types import Prompt
from posttrain.tools import TOOLS, Tool, ToolResult, row_kwargs
from posttrain.tools import sets as sets_module
from posttrain.tools.sets import close_tools, open_tools
from posttrain.tools.verl import REPLACEMENTS
from tests.helpers.scripted import ScriptedSampler, environment, run_episode

URL = "http://127.0.0.1:1/retrieve"
SCHEMA = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}


class Probe(Tool):
    """A tool with an option of every kind.

    Args:
        limit: how many.
    """

    name, schema = "probe", SCHEMA

    def __init__(self, limit: int = 3, rate: float = 1.0, names: tuple[str, ...] = (), on: bool = False, odd=None):
        self.options = (limit, rate, names, on, odd)

    async def call(self, state, arguments):
        return ToolResult("probed")


@pytest.fixture(autouse=True)
def _probe(monkeypatch):
    monkeypatch.setattr(TOOLS, "_entries", {**TOOLS._entries, "probe": Probe})


# ---------------------------------------------------------------------- names, tables, sets


def test_names_of_the_registry():
    tools = open_tools(["gsm8k", "calculator"])
    assert list(tools) == ["calc_gsm8k_reward", "calculator"]
    assert open_tools([]) == {}
    for name in TOOLS.names():
        assert callable(TOOLS.get(name))


def test_tables_and_sets():
    tables = {
        "calculator": {"type": "calculator", "digits": 3},
        "wiki": {"type": "search", "url": URL, "name": "wiki"},
        "maths": {"use": ["calculator", "gsm8k"]},
        "research": {"use": ["maths", "wiki", "calculator"]},
    }
    tools = open_tools(["research", "gsm8k", "maths"], tables)
    assert list(tools) == ["calculator", "calc_gsm8k_reward", "wiki"]
    assert tools["calculator"].digits == 3  # the table goes before the registry


@pytest.mark.parametrize(
    ("names", "tables", "message"),
    [
        (["calculater"], {}, "unknown tool 'calculater'"),
        (["wiky"], {"wiki": {"type": "search", "url": URL}}, "unknown tool 'wiky'"),
        (["x"], {"x": {"type": "serch"}}, "unknown tool 'serch'"),
        (["x"], {"x": {}}, r"\[tools.x\] has no `type`"),
        (["x"], {"x": {"type": 3}}, r"\[tools.x\] has no `type`"),
        (["x"], {"x": {"use": "calculator"}}, r"\[tools.x\]: a set has one key, `use`"),
        (["x"], {"x": {"use": ["calculator"], "type": "search"}}, r"\[tools.x\]: a set has one key, `use`"),
        (["a"], {"a": {"use": ["b"]}, "b": {"use": ["a"]}}, "in a circle: a -> b -> a"),
        (["search"], {}, "tool 'search': option 'url' is missing"),
        (
            ["a", "b"],
            {"a": {"type": "calculator"}, "b": {"type": "calculator"}},
            r"two tools are called 'calculator': one of \[tools.a\], one of \[tools.b\]",
        ),
    ],
)
def test_mistakes_are_named(names, tables, message):
    with pytest.raises(ConfigError, match=message) as error:
        open_tools(names, tables)
    assert error.value.hint


def test_a_near_name_is_suggested():
    with pytest.raises(ConfigError) as error:
        open_tools(["wiky"], {"wiki": {"type": "search", "url": URL}})
    assert "'wiki'" in error.value.hint
    with pytest.raises(ConfigError) as error:
        open_tools(["calculater"])
    assert "'calculator'" in error.value.hint


def test_options_are_typed():
    given = {"type": "probe", "limit": 5, "rate": 2, "names": ["a", "b"], "on": True, "odd": {"any": 1}}
    assert open_tools(["x"], {"x": given})["probe"].options == (5, 2.0, ("a", "b"), True, {"any": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": "5"}, r"\[tools.x\]: limit = '5': Input should be a valid integer"),
        ({"limit": 1.5}, "limit = 1.5: "),
        ({"limit": True}, "limit = True: Input should be a valid integer"),
        ({"names": ["a", 1]}, r"names\.1 = 1: Input should be a valid string"),
        ({"on": 1}, "on = 1: Input should be a valid boolean"),
        ({"limmit": 5}, "unknown option 'limmit'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        open_tools(["x"], {"x": {"type": "probe", **options}})
    types = {"names": "it is annotated as tuple[str, ...]", "on": "it is annotated as bool"}
    hints = {"limmit": "did you mean 'limit'?", "limit": "how many.", **types}
    assert error.value.hint == hints[next(iter(options))]


def test_a_class_that_raises_or_is_no_tool(tmp_path, monkeypatch):
    class Broken(Probe):
        def __init__(self):
            raise OSError("no disk")

    class Half:
        name, schema = "half", SCHEMA

        async def call(self, state, arguments): ...

    monkeypatch.setattr(TOOLS, "_entries", {**TOOLS._entries, "broken": Broken, "half": Half})
    with pytest.raises(ConfigError, match="tool 'broken': it cannot be made: OSError: no disk"):
        open_tools(["broken"])
    with pytest.raises(ConfigError, match="Half is no tool, it has no 'check'") as error:
        open_tools(["half"])
    assert "posttrain.tools.Tool" in error.value.hint


def test_tables_in_a_preset(tmp_path):
    preset = tmp_path / "mine.toml"
    preset.write_text(
        'command = "rl"\n[rollout]\ntools = ["research"]\n'
        f'[tools.wiki]\ntype = "search"\nurl = "{URL}"\ntopk = 5\n'
        '[tools.server]\ntype = "mcp"\ncommand = ["python", "server.py"]\nenv = { A-B = "1", "c.d" = "2" }\n'
        '[tools.research]\nuse = ["calculator", "wiki"]\n'
    )
    resolved = resolve("rl", str(preset))
    assert list(open_tools(resolved.config.rollout.tools, resolved.config.tools)) == ["calculator", "search"]
    text = dump_toml(resolved.config, resolved.provenance)
    assert tomli.loads(text)["tools"] == resolved.config.tools
    lines = [line for line in text.splitlines() if line.startswith(("topk", "use", "A-B", '"c.d"'))]
    assert len(lines) == 4
    assert all(line.endswith("# preset mine") for line in lines if not line.startswith("use"))
    assert flatten_config(resolved.config)["tools.wiki.topk"] == 5
    changed = resolve(
        "rl", str(preset), ['tools={calculator={type="calculator", digits=4}}', 'rollout.tools=["calculator"]']
    )
    assert open_tools(changed.config.rollout.tools, changed.config.tools)["calculator"].digits == 4
    with pytest.raises(ConfigError, match="tools"):
        resolve("rl", str(preset), ["tools.wiki=3"])


def test_the_default_config_has_no_tables():
    assert Config(command="rl").tools == {}
    assert "default" in dump_toml(Config(command="rl"), resolve("rl").provenance)


# ---------------------------------------------------------------------- verl's tool files


def verl(tmp_path, text):
    (tmp_path / "tools.yaml").write_text(text)
    return str(tmp_path / "tools.yaml")


GSM8K = """
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "check_answer"
        description: "Is it right?"
        parameters:
          type: "object"
          properties:
            answer: {type: "string", description: "The answer, digits only"}
          required: ["answer"]
"""

SEARCH = f"""
tools:
  - class_name: verl.tools.search_tool.SearchTool
    config:
      retrieval_service_url: {URL}
      num_workers: 120
      rate_limit: 12
      timeout: 30
      topk: 4
      type: native
    tool_schema:
      type: function
      function:
        name: search
        description: Searches the web.
        parameters:
          type: object
          properties:
            query_list: {{type: array, item: {{type: string}}, description: Queries.}}
          required: [query_list]
"""


def test_verls_gsm8k_tool_under_another_name(tmp_path):
    (tool,) = open_tools([verl(tmp_path, GSM8K)]).values()
    assert tool.name == "check_answer"
    assert tool.schema["function"]["description"] == "Is it right?"
    kwargs = {"check_answer": {"create_kwargs": {"ground_truth": "12"}}}
    prompt = Prompt(0, [{"role": "user", "content": "q"}], "openai/gsm8k", "5", {"tools_kwargs": kwargs})

    async def play():
        state = await tool.create(prompt)
        await tool.call(state, {"answer": "12"})
        return await tool.reward(state)

    assert asyncio.run(play()) == 1.0
    assert TOOLS.get("gsm8k").name == "calc_gsm8k_reward"  # the class is as it was


def test_verls_search_tool(tmp_path):
    (tool,) = open_tools([verl(tmp_path, SEARCH)]).values()
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["query_list"]
    assert tool._topk == 4
    assert tool._format == "json"
    assert tool._endpoint._deadline_s == 30
    assert tool._endpoint._slots._value == 12


def test_several_entries_beside_other_names(tmp_path):
    both = GSM8K + SEARCH.replace("tools:\n", "", 1)
    assert list(open_tools([verl(tmp_path, both), "calculator"])) == ["check_answer", "search", "calculator"]


@pytest.mark.slow
def test_verls_mcp_servers(tmp_path):
    pytest.importorskip("mcp", reason="the optional package mcp is not installed")
    server = {"command": sys.executable, "args": [str(Path(__file__).parents[2] / "helpers" / "mcp_server.py")]}
    servers = {"one": server, "off": server | {"disabled": True}}
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    text = f"""
tools:
  - class_name: verl.tools.mcp_search_tool.MCPSearchTool
    config: {{rate_limit: 7, timeout: 9, type: mcp}}
    mcp:
      mcp_servers_config_path: {tmp_path}/servers.json
      tool_selected_list: [add]
"""
    tools = open_tools([verl(tmp_path, text)])
    assert list(tools) == ["add"]
    assert tools["add"].server._timeout_s == 9
    with pytest.raises(ConfigError, match="no server has a tool 'sub'"):
        sets_module._selected(list(tools.values()), ["sub"], "tools.yaml")


def test_a_schema_without_parameters_is_one_of_a_function_that_takes_none(tmp_path):
    file = tmp_path / "bare.py"
    file.write_text(
        "from posttrain.tools import Tool\n"
        "class Bare(Tool):\n"
        "    name = 'bare'\n"
        "    schema = {'type': 'function', 'function': {'name': 'bare', 'description': ''}}\n"
        "class Fixed(Bare):\n"
        "    schema = property(lambda self: Bare.schema)\n"
    )
    (tool,) = open_tools([f"{file}:Bare"]).values()
    assert tool.schema["function"]["parameters"] == {"type": "object", "properties": {}}
    with pytest.raises(CodeError, match=r"Fixed': its schema has no parameters, and none can be set: .*bare.py"):
        open_tools([f"{file}:Fixed"])
    text = GSM8K[: GSM8K.index("        parameters:")]
    (tool,) = open_tools([verl(tmp_path, text)]).values()
    assert tool.schema["function"]["parameters"] == {"type": "object", "properties": {}}


def test_a_class_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own_tools.py").write_text(
        "from posttrain.tools import Tool\n"
        "class Own(Tool):\n"
        "    name = 'own'\n"
        "    schema = {'type': 'function', 'function': {'name': 'own', 'description': '', 'parameters': {}}}\n"
        "    def __init__(self, limit: int = 1):\n        self.limit = limit\n"
        "    async def call(self, state, arguments): ...\n"
        "class Theirs:\n    def __init__(self, config=None, tool_schema=None): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = "tools:\n- {class_name: own_tools.NAME, config: {type: native, OPTION}}"
    text = entry.replace("NAME", "Own").replace("OPTION", "limit: 4")
    assert open_tools([verl(tmp_path, text)])["own"].limit == 4
    with pytest.raises(ConfigError, match="Theirs is no tool") as error:
        open_tools([verl(tmp_path, entry.replace("NAME", "Theirs").replace(", OPTION", ""))])
    assert "posttrain.tools.Tool" in error.value.hint
    with pytest.raises(ConfigError, match="unknown option 'limits'"):
        open_tools([verl(tmp_path, entry.replace("NAME", "Own").replace("OPTION", "limits: 4"))])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tools: [", "is not YAML"),
        ("- a", "has no list `tools`"),
        ("tools: {}", "has no list `tools`"),
        ("tools: [3]", "has no list `tools`"),
        ("tools: [{}]", r"tools\[0\]: class_name = None"),
        ("tools: [{class_name: Gsm8kTool}]", "is not package.module.Class"),
        ("tools: [{class_name: verl.tools.x.Geo3kTool}]", r"tools\[0\] \(Geo3kTool\): .*verl"),
        ("tools: [{class_name: a.Gsm8kTool, config: 3}]", "config is no mapping"),
        ("tools: [{class_name: a.Gsm8kTool, config: {type: benchmax}}]", "config.type = 'benchmax'"),
        ("tools: [{class_name: a.Gsm8kTool, config: {speed: 3}}]", "unknown option 'speed'"),
        ("tools: [{class_name: a.Gsm8kTool, tool_schema: 3}]", "tool_schema is no mapping"),
        ("tools: [{class_name: a.Gsm8kTool, tool_schema: {function: {}}}]", "tool_schema is no function schema"),
        (
            GSM8K.replace("answer: {type", "reply: {type"),
            "tool_schema shows an argument 'reply' that the tool does not take",
        ),
        (SEARCH.replace("topk: 4", "default_timeout: 4"), "both mean timeout_s"),
        (SEARCH.replace("topk: 4", "topk: many"), "topk = 'many'"),
        (SEARCH.replace(f"retrieval_service_url: {URL}", ""), "option 'url' is missing"),
        ("tools: [{class_name: a.MCPSearchTool, config: {type: mcp}}]", "mcp_servers_config_path is missing"),
        (
            "tools: [{class_name: a.MCPSearchTool, mcp: {mcp_servers_config_path: /no/such.json}}]",
            "/no/such.json cannot be read",
        ),
        ("tools: [{class_name: a.MCPSearchTool, mcp: {tool_selected_list: add}}]", "mcp = "),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        open_tools([verl(tmp_path, text)])
    assert "tools.yaml" in error.value.message
    assert error.value.hint


def test_a_file_that_is_not_there():
    with pytest.raises(ConfigError, match=r"tool file nowhere\.yaml cannot be read") as error:
        open_tools(["nowhere.yaml"])
    assert error.value.hint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "holds no MCP servers"),
        ('{"mcpServers": [1]}', "holds no MCP servers"),
        ('{"mcpServers": {}}', "holds no MCP servers: .*there is none"),
        ('{"mcpServers": {"a": {"command": "x", "disabled": true}}}', "no MCP servers: .*all of them are disabled"),
        ('{"mcpServers": {"a": {"url": "http://host", "auth_token": "x"}}}', "must hold no secret"),
        ('{"mcpServers": {"a": {"command": "x", "speed": 3}}}', "server 'a': unknown key 'speed'"),
        ('{"mcpServers": {"a": {"command": "x", "args": null}}}', "server 'a': args = None is not a list of strings"),
        ('{"mcpServers": {"a": {"command": "x", "args": "s.py"}}}', "args = 's.py' is not a list of strings"),
        ('{"mcpServers": {"a": {"command": "x", "args": [1]}}}', r"args = \[1\] is not a list of strings"),
    ],
)
def test_mistakes_in_a_file_of_servers_are_named(tmp_path, content, message):
    (tmp_path / "servers.json").write_text(content)
    text = f"tools: [{{class_name: a.MCPSearchTool, mcp: {{mcp_servers_config_path: {tmp_path}/servers.json}}}}]"
    with pytest.raises(ConfigError, match=message) as error:
        open_tools([verl(tmp_path, text)])
    assert error.value.hint


CODE = """
tools:
  - class_name: recipe.retool.retool.CustomSandboxFusionTool
    config: {sandbox_fusion_url: "http://host:8080/run_code", num_workers: 64, enable_global_rate_limit: true,
      rate_limit: 64, default_timeout: 30, default_language: python, memory_limit_mb: 1024, type: native}
"""


class Interpreter(Probe):
    """Stands in for the code interpreter: these tests are about verl's keys."""

    def __init__(self, timeout_s: float = 1.0, max_concurrent: int = 1):
        self.options = (timeout_s, max_concurrent)


def test_verls_code_interpreter_runs_where_the_sandbox_says(tmp_path, monkeypatch):
    monkeypatch.setattr(TOOLS, "_entries", {**TOOLS._entries, "code_interpreter": Interpreter})
    file = verl(tmp_path, CODE)
    remote = SandboxConfig(mode="remote", url="http://host:8080/")
    for sandbox in (None, remote):
        assert open_tools([file], {}, sandbox)["probe"].options == (30, 64)
    with pytest.raises(ConfigError, match="this run's programs go elsewhere") as error:
        open_tools([file], {}, SandboxConfig())
    assert "--set sandbox.url=http://host:8080," in error.value.hint
    with pytest.raises(ConfigError, match="memory_limit_mb = 1024"):
        open_tools([file], {}, SandboxConfig(mode="remote", url="http://host:8080", memory_mb=512))
    with pytest.raises(ConfigError, match="only python"):
        open_tools([verl(tmp_path, CODE.replace("language: python", "language: java"))])


def test_every_replacement_is_a_tool_or_waits_for_one():
    for name, replacement in REPLACEMENTS.items():
        assert replacement.type in (*TOOLS.names(), "code_interpreter"), name


# ---------------------------------------------------------------------- rows, and the end of a run


def test_what_a_row_gives_a_tool():
    kwargs = {"f": {"create_kwargs": {"a": 1, "b": None}, "execute_kwargs": None}, "g": None}
    prompt = Prompt(0, [], "s", "t", {"tools_kwargs": kwargs})
    assert row_kwargs(prompt, "f", "create_kwargs") == {"a": 1}
    for function, kind in (("f", "execute_kwargs"), ("f", "release_kwargs"), ("g", "create_kwargs"), ("h", "x")):
        assert row_kwargs(prompt, function, kind) == {}


def test_every_tool_is_closed_whatever_the_others_do(monkeypatch):
    monkeypatch.setattr(sets_module, "_CLOSE_S", 0.1)
    closed = []

    class Closing(Probe):
        async def close(self):
            closed.append(self)

    class Failing(Probe):
        async def close(self):
            raise OSError("gone")

    class Hanging(Probe):
        async def close(self):
            await asyncio.sleep(30)

    problems = []
    tools = {"a": Failing(), "b": Hanging(), "c": Closing(), "d": Probe()}
    asyncio.run(close_tools(tools, problems.append))
    assert closed == [tools["c"]]
    assert re.fullmatch(r"tool a failed to close: OSError: gone \(.*test_tool_sets.py, line \d+\)", min(problems))
    assert max(problems) == "tool b did not close within 0.1 s"


def test_an_episode_with_tools_of_every_kind(tmp_path, monkeypatch):
    (tmp_path / "shop.py").write_text("def price(item: str) -> int:\n    return {'apple': 3}[item]\n")
    monkeypatch.chdir(tmp_path)
    tools = open_tools(["shop.py:price", "calculator", "gsm8k"])

    def calls(*pairs):
        return "".join(
            f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
            for name, arguments in pairs
        )

    sampler = ScriptedSampler(
        calls(("price", {"item": "apple"}), ("price", {"item": "pear"}), ("price", {})),
        calls(("calculator", {"expression": "3 * 4"}), ("calc_gsm8k_reward", {"answer": "12"})),
        "#### 12",
    )
    env = environment(*tools.values(), max_turns=3, max_response_tokens=2000)
    prompt = Prompt(0, [{"role": "user", "content": "What do 4 apples cost?"}], "openai/gsm8k", "12")

    async def play():
        try:
            return await run_episode(prompt, sampler, env)
        finally:
            await close_tools(tools, pytest.fail)

    episode = asyncio.run(play())
    assert episode.error is None
    assert [m["content"] for m in episode.messages if m["role"] == "tool"] == [
        "3",
        "error: price failed: KeyError: 'pear' (shop.py, line 2)",
        "error: argument 'item' is missing",
        "12",
        "answer=12 reward=1.0",
    ]
    assert episode.reward_parts == {"tool/calc_gsm8k_reward": 1.0}
