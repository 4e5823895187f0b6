"""Tool files of verl: ``tools: [{class_name, config, tool_schema, mcp}, ...]`` in YAML.

verl's own classes are replaced by tools of ours, by the last part of ``class_name``; docs/tools.md has the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.config import SandboxConfig
from posttrain.core.errors import ConfigError
from posttrain.core.types import ToolSchema


@dataclass(frozen=True)
class Replacement:
    """What stands for a class of verl."""

    type: str
    """Name in the registry."""
    options: Mapping[str, str | None] = field(default_factory=dict)
    """verl's key to our option; None: it configures verl's own processes, and says nothing here."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Our options that are set so that the model reads what it reads under verl."""


_POOL = {"num_workers": None, "enable_global_rate_limit": None}
_SEARCH = Replacement(
    "search",
    {
        "retrieval_service_url": "url",
        "timeout": "timeout_s",
        "default_timeout": "timeout_s",
        "rate_limit": "max_concurrent",
        **_POOL,
    },
    {"format": "json"},
)
_CODE = Replacement(
    "code_interpreter",
    {"timeout": "timeout_s", "default_timeout": "timeout_s", "rate_limit": "max_concurrent", **_POOL},
)
_MCP = Replacement("mcp", {"timeout": "timeout_s", "rate_limit": "max_concurrent", "use_mcp": None, **_POOL})
_SHAPE = "each item: class_name, config, tool_schema"
REPLACEMENTS: dict[str, Replacement] = {
    "Gsm8kTool": Replacement("gsm8k"),
    "SearchTool": _SEARCH,
    "SandboxFusionTool": _CODE,
    "CustomSandboxFusionTool": _CODE,
    "CodeInterpreter": _CODE,
    "CodeInterpreterTool": _CODE,
    "MCPBaseTool": _MCP,
    "MCPSearchTool": _MCP,
}


@dataclass(frozen=True)
class Entry:
    """One entry of a file, in our terms."""

    where: str
    """For messages: the file and the class."""
    type: str
    """Name in the registry, or ``module:Class`` of a class that verl's name does not stand for."""
    options: dict[str, Any]
    schema: ToolSchema | None
    """What the model sees instead of the tool's own schema."""
    only: tuple[str, ...] = ()
    """MCP: the tools that are taken, of all servers of the file together."""
    servers: tuple[dict[str, Any], ...] = ()
    """MCP: options of each server."""


def read_tool_file(path: str, sandbox: SandboxConfig | None = None) -> list[Entry]:
    """The entries of a file. ``sandbox`` is the run's, to compare with the service that the file names.

    Raises:
        ConfigError: the file is missing, malformed, or asks for what is not there.
    """
    listed = load_tool_file(path)
    return [_entry(item, f"{path}, tools[{index}]", sandbox) for index, item in enumerate(listed)]


def load_tool_file(path: str) -> list[dict[str, Any]]:
    """The entries of a file as verl writes them. Raises ``ConfigError``: the file is missing or malformed."""
    try:
        content = _load_yaml(Path(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"tool file {path} cannot be read: {error}", hint="paths are relative to where you run"
        ) from error
    listed = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise ConfigError(f"tool file {path} has no list `tools`", hint=_SHAPE)
    return listed


def _load_yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"tool file {path} is not YAML: {error}", hint=_SHAPE) from error


def _entry(item: dict[str, Any], where: str, sandbox: SandboxConfig | None) -> Entry:
    name, config, schema = item.get("class_name"), item.get("config") or {}, item.get("tool_schema")
    if not isinstance(name, str) or "." not in name:
        raise ConfigError(f"{where}: class_name = {name!r} is not package.module.Class", hint=_SHAPE)
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: config is no mapping", hint=_SHAPE)
    if schema is not None and not isinstance(schema, dict):
        raise ConfigError(f"{where}: tool_schema is no mapping", hint="type, function.name, ...")
    given = dict(config)
    if (kind := given.pop("type", "native")) not in ("native", "mcp"):
        raise ConfigError(f"{where}: config.type = {kind!r} is not supported", hint="native or mcp")
    module, _, last = name.rpartition(".")
    where = f"{where} ({last})"
    replacement = REPLACEMENTS.get(last)
    if replacement is None:
        return Entry(where, f"{module}:{last}", given, schema)
    if replacement is _CODE:
        _check_code(given, where, sandbox)
    options = {**replacement.defaults, **_renamed(given, replacement, where)}
    if replacement is not _MCP:
        return Entry(where, replacement.type, options, schema)
    mcp = item.get("mcp") or {}
    only = mcp.get("tool_selected_list") or [] if isinstance(mcp, dict) else None
    if not isinstance(only, list):
        raise ConfigError(f"{where}: mcp = {mcp!r}", hint="mcp_servers_config_path, and tool_selected_list, a list")
    servers = tuple({**options, **server} for server in _servers(mcp.get("mcp_servers_config_path"), where))
    return Entry(where, "mcp", options, None, tuple(map(str, only)), servers)


def _renamed(given: dict[str, Any], replacement: Replacement, where: str) -> dict[str, Any]:
    """verl's keys as our options. What the table does not know is taken for an option of ours, and checked as one."""
    options: dict[str, Any] = {}
    for key, value in given.items():
        ours = replacement.options.get(key, key)
        if ours is None:
            continue
        if ours in options:
            raise ConfigError(f"{where}: {key} and another key both mean {ours}", hint="remove one of them")
        options[ours] = value
    return options


def _check_code(given: dict[str, Any], where: str, sandbox: SandboxConfig | None) -> None:
    """Take out what is the sandbox's to say, and refuse what it does not say too."""
    language = given.pop("default_language", "python")
    if language != "python":
        raise ConfigError(f"{where}: default_language = {language!r}: only python runs here", hint="remove the key")
    url, memory = given.pop("sandbox_fusion_url", None), given.pop("memory_limit_mb", None)
    if sandbox is None:  # nothing will run: the schema alone is wanted
        return
    if url is not None:
        base = str(url).rstrip("/").removesuffix("/run_code").rstrip("/")
        if sandbox.mode != "remote" or sandbox.url.rstrip("/").removesuffix("/run_code") != base:
            raise ConfigError(
                f"{where}: sandbox_fusion_url = {url!r}, and this run's programs go elsewhere (sandbox.mode = "
                f"{sandbox.mode!r})",
                hint=f"--set sandbox.mode=remote --set sandbox.url={base}, or remove the key to run them in the local "
                "sandbox",
            )
    if memory is not None and memory != sandbox.memory_mb:
        raise ConfigError(f"{where}: memory_limit_mb = {memory!r}", hint=f"--set sandbox.memory_mb={memory}")


def _servers(path: Any, where: str) -> list[dict[str, Any]]:
    """Options of each server in a file ``{"mcpServers": {name: {"command", "args", "env"} or {"url"}}}``, without those
    that are ``disabled``."""
    if not isinstance(path, str):
        raise ConfigError(f"{where}: mcp.mcp_servers_config_path is missing", hint="name a JSON file of servers")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        named: dict[str, dict[str, Any]] = dict(content["mcpServers"])
        items = [(name, dict(server)) for name, server in named.items()]
        if not (used := [(name, server) for name, server in items if not server.pop("disabled", False)]):
            raise ValueError("all of them are disabled" if items else "there is none")
    except OSError as error:
        raise ConfigError(
            f"{where}: {path} cannot be read: {error}", hint="paths are relative to where you run"
        ) from error
    except (ValueError, TypeError, LookupError) as error:
        hint = '{"mcpServers": {"NAME": {"command": "python", "args": ["server.py"]}}}'
        raise ConfigError(f"{where}: {path} holds no MCP servers: {error!r}", hint=hint) from error
    return [_server(server, f"{path}, server {name!r}") for name, server in used]


def _server(given: dict[str, Any], where: str) -> dict[str, Any]:
    if "auth_token" in given or "headers" in given:
        raise ConfigError(
            f"{where}: a file that is stored must hold no secret",
            hint='write [tools.NAME] with type = "mcp", url and api_key_env in the preset instead',
        )
    options: dict[str, Any] = {key: given.pop(key) for key in ("url", "env", "cwd") if key in given}
    if "command" in given:
        args = given.pop("args", [])
        if not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
            raise ConfigError(f"{where}: args = {args!r} is not a list of strings", hint='"args": ["server.py"]')
        options["command"] = [given.pop("command"), *args]
    given.pop("transport", None), given.pop("type", None)
    if given:
        raise ConfigError(f"{where}: unknown key {next(iter(given))!r}", hint="command, args, env, cwd or url")
    return options
