"""Tools of MCP servers (Model Context Protocol), through the protocol's official SDK.

What a server offers is asked before the run starts. The connection for calls is opened at the first call, shared by all
episodes, and opened again when the server died or does not answer any more.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import shlex
import tempfile
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from pydantic import Field

from posttrain.core.errors import ConfigError
from posttrain.core.http import api_key, http_url
from posttrain.core.registry import nearest
from posttrain.core.types import ToolSchema
from posttrain.data.turns import IMAGE, without_marks
from posttrain.tools.base import Tool, ToolResult

if TYPE_CHECKING:
    from mcp import Client
    from mcp import Tool as Offered
    from mcp.types import CallToolResult

_STOP_S = 20.0
"""Longest wait for a connection to end. The SDK gives a process two seconds to go by itself and kills it four seconds
later at most; to cancel that would leave the process behind."""
_CHECK_S = 5.0
"""After a call without an answer the server is asked for its tools; one that is silent for so long is given up."""
_SHOWN = 300
"""Characters of somebody else's text that an error shows."""


def mcp_tools(
    command: str | tuple[str, ...] = (),
    url: str = "",
    tools: tuple[str, ...] = (),
    prefix: str = "",
    env: dict[str, str] | None = None,
    pass_env: tuple[str, ...] = (),
    cwd: str = "",
    api_key_env: str = "",
    start_deadline_s: Annotated[float, Field(gt=0.0)] = 30.0,
    timeout_s: Annotated[float, Field(gt=0.0)] = 20.0,
    max_concurrent: Annotated[int, Field(gt=0)] = 32,
) -> list[Tool]:
    """The tools of an MCP server: a command that speaks over stdin and stdout, or a streamable HTTP URL.

    Args:
        command: starts the server: a list of words, or one line.
        url: of a running server, for example `http://127.0.0.1:8000/mcp`, instead of `command`.
        tools: only these of the server's tools; empty: all.
        prefix: put before the names that the model calls.
        env: environment variables of the command, beside a few such as `PATH` and `HOME`.
        pass_env: names of environment variables that the command gets from yours. Unlike `env`, no value is stored
            with the run.
        cwd: folder that the command runs in; empty: where you are.
        api_key_env: environment variable that holds a bearer token for `url`; empty: none is sent.
        start_deadline_s: longest wait until a server is there and has said which tools it has.
        timeout_s: longest wait for the answer to a call. Keep it below `rollout.tool_deadline_s`.
        max_concurrent: most calls at once.

    Raises:
        ConfigError: the `mcp` package is missing, the server does not start or answer, or has no such tool.
    """
    _check_installed()
    try:
        words = tuple(shlex.split(command)) if isinstance(command, str) else command
    except ValueError as error:
        raise ConfigError(f"command is no command line: {error}", hint="give a list of words") from error
    if bool(words) == bool(url):
        raise ConfigError("give one of command and url", hint='for example command = ["python", "server.py"]')
    of_command, of_url = {"env": env, "pass_env": pass_env, "cwd": cwd}, {"api_key_env": api_key_env}
    if idle := [name for name, value in (of_command if url else of_url).items() if value]:
        raise ConfigError(f"{idle[0]} has no effect with {'url' if url else 'command'}", hint=f"remove {idle[0]}")
    target: Target
    if words:
        target = _Command(words, {**(env or {}), **_passed(pass_env)}, cwd)
    else:
        checked = http_url(url, what="url", example="http://127.0.0.1:8000/mcp")
        target = _Url(str(checked), api_key(api_key_env, what="api_key_env"))
    server = Server(target, start_deadline_s, timeout_s, max_concurrent)
    offered = {tool.name: tool for tool in asyncio.run(server.offered())}
    for name in tools:
        if name not in offered:
            close = nearest(name, offered)
            hint = f"did you mean {close!r}?" if close else f"it has: {', '.join(offered) or 'none'}"
            raise ConfigError(f"MCP server {target.name}: it has no tool {name!r}", hint=hint)
    if not offered:
        raise ConfigError(f"MCP server {target.name}: it has no tools", hint=target.hint)
    return [McpTool(server, offered[name], prefix) for name in tools or offered]


class McpTool(Tool):
    """One tool of a server."""

    def __init__(self, server: Server, offered: Offered, prefix: str) -> None:
        self.server = server
        self.remote_name = offered.name
        self.name = prefix + offered.name
        parameters = {"type": "object", "properties": {}, **offered.input_schema}
        function = {"name": self.name, "description": offered.description or "", "parameters": parameters}
        self.schema: ToolSchema = {"type": "function", "function": function}

    async def call(self, state: Any, arguments: dict[str, Any]) -> ToolResult:
        return await self.server.call(self.remote_name, arguments)

    async def close(self) -> None:
        await self.server.close()


class Server:
    """A server's one connection at a time, which all its tools share. It belongs to one event loop.

    Args:
        start_deadline_s: longest wait for a connection.
        timeout_s: longest wait for the answer to a call, that for a connection and for a free slot included.
        max_concurrent: most calls at once.
    """

    def __init__(self, target: Target, start_deadline_s: float, timeout_s: float, max_concurrent: int) -> None:
        self._target = target
        self._start_deadline_s, self._timeout_s = start_deadline_s, timeout_s
        self._slots = asyncio.Semaphore(max_concurrent)
        self._connection: _Connection | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def offered(self) -> list[Offered]:
        """All tools of the server, over a connection that ends with this call. Raises ``ConfigError``."""
        connection = _Connection(self._target, self._start_deadline_s)
        try:
            client = await connection.client()
            async with asyncio.timeout(self._start_deadline_s):
                return await _list_tools(client)
        except Exception as error:  # of the server, of the transport, of an answer that breaks the protocol
            timeout = f"it did not list its tools within {self._start_deadline_s:g} s"
            reason = timeout if isinstance(error, TimeoutError) else _reason(error)
            raise ConfigError(f"MCP server {self._target.name}: {reason}", hint=self._target.hint) from error
        finally:
            await connection.close()

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool. Whatever happens to the server is an error that the model can read."""
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(self._timeout_s), self._slots:
                connection = self._open()
                client = await connection.client()
                return _result(await client.call_tool(name, arguments))
        except TimeoutError:
            what = "every slot was taken" if connection is None else "no answer"
            failure = f"{what} for {self._timeout_s:g} s"
        except asyncio.CancelledError:
            self._check(connection)
            raise
        except Exception as error:  # as in `offered`
            failure = _reason(error)
        if (check := self._check(connection)) is not None:
            await asyncio.wait({check})
        return ToolResult(f"error: {failure}", error=True)

    async def close(self) -> None:
        """End the connection, and the process behind it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._keep(connection.close())
        while self._background:
            await asyncio.wait(self._background)

    def _open(self) -> _Connection:
        if self._connection is None or self._connection.ended:
            self._connection = _Connection(self._target, self._start_deadline_s)
        return self._connection

    def _check(self, connection: _Connection | None) -> asyncio.Task[None] | None:
        """After a call without a proper answer, find out whether the server still answers at all: a call may just be
        slow, and others be under way. A connection that is still being opened has a deadline of its own."""
        if connection is None or connection is not self._connection or not connection.ready:
            return None
        if connection.check is None:
            connection.check = self._keep(self._check_now(connection))
        return connection.check

    async def _check_now(self, connection: _Connection) -> None:
        try:
            async with asyncio.timeout(_CHECK_S):
                await _list_tools(await connection.client())
        except Exception:  # whatever it was: the next call opens a new connection
            if connection is self._connection:
                self._connection = None
            self._keep(connection.close())
        finally:
            connection.check = None

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run in the background; ``close`` waits for it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class _Connection:
    """A connection that a task of its own opens and closes: the SDK's contexts must be left by the task that entered
    them."""

    def __init__(self, target: Target, start_deadline_s: float) -> None:
        self.check: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(target, start_deadline_s))

    @property
    def ready(self) -> bool:
        return self._ready.done()

    @property
    def ended(self) -> bool:
        return self._task.done()

    async def client(self) -> Client:
        """The SDK's client, once it is connected. Raises ``_NotConnected``."""
        return await asyncio.shield(self._ready)

    async def close(self) -> None:
        self._stop.set()
        if not self._ready.done():
            self._task.cancel()
        done, _ = await asyncio.wait({self._task}, timeout=_STOP_S)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_CHECK_S)

    async def _live(self, target: Target, start_deadline_s: float) -> None:
        failure = "it was closed"
        with tempfile.TemporaryFile("w+") as log:
            try:
                async with AsyncExitStack() as stack:
                    async with asyncio.timeout(start_deadline_s):
                        client = await target.connect(stack, log)
                    self._ready.set_result(client)
                    await self._stop.wait()
            except TimeoutError:
                failure = f"it was not there within {start_deadline_s:g} s"
            except Exception as error:  # after the start: the calls under way have been told
                failure = _reason(error)
            finally:
                if not self._ready.done():
                    self._ready.set_exception(_NotConnected(failure + _last_words(log)))
                    self._ready.exception()  # seen, also where nobody waits


class _NotConnected(Exception):
    """The server did not start or cannot be reached."""


@dataclass(frozen=True)
class _Command:
    """A server that is a process of ours."""

    words: tuple[str, ...]
    env: dict[str, str]
    cwd: str

    hint = "run the command by hand: it must wait for input, and write nothing else to stdout"

    @property
    def name(self) -> str:
        return repr(shlex.join(self.words))

    async def connect(self, stack: AsyncExitStack, log: TextIO) -> Client:
        from mcp import Client, StdioServerParameters, stdio_client

        command, *args = self.words
        parameters = StdioServerParameters(command=command, args=args, env=self.env, cwd=self.cwd or None)
        return await stack.enter_async_context(Client(stdio_client(parameters, errlog=log)))


@dataclass(frozen=True)
class _Url:
    """A server that runs already."""

    url: str
    key: str = field(repr=False)

    hint = "is it running, and does it speak streamable HTTP at this path?"

    @property
    def name(self) -> str:
        return self.url.partition("?")[0]

    async def connect(self, stack: AsyncExitStack, log: TextIO) -> Client:
        import httpx2
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        # No timeouts of the client's own: each wait here has a deadline already.
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=None))
        return await stack.enter_async_context(Client(streamable_http_client(self.url, http_client=http)))


Target = _Command | _Url


def _check_installed() -> None:
    try:
        from mcp import Client  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"MCP tools need the package mcp, version 2 or newer: {error}", hint="pip install 'posttrain[mcp]'"
        ) from error
    # What it logs (lines that are no message, connections that end) reaches us as errors of calls.
    logging.getLogger("mcp").setLevel(logging.CRITICAL)


def _passed(names: Sequence[str]) -> dict[str, str]:
    for name in names:
        if name not in os.environ:
            raise ConfigError(f"pass_env: ${name} is not set", hint=f"export {name}=...")
    return {name: os.environ[name] for name in names}


async def _list_tools(client: Client) -> list[Offered]:
    found: list[Offered] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor, cache_mode="bypass")
        found += page.tools
        cursor = page.next_cursor
        if not cursor:
            return found


def _result(result: CallToolResult) -> ToolResult:
    """Return the text of a result, and its images. What is neither is named, with its type."""
    parts: list[str] = []
    images: list[bytes] = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource":
            parts.append(getattr(block.resource, "text", f"[{block.resource.uri}]"))
        elif block.type == "resource_link":
            parts.append(f"[{block.uri}]")
        elif block.type == "image" and not result.is_error:
            parts.append(IMAGE)
            try:
                images.append(base64.b64decode(block.data, validate=True))
            except ValueError as error:
                return ToolResult(f"error: an image of the server's answer is no base64: {error}", error=True)
        else:
            parts.append(f"[{block.type}: {block.mime_type}]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    if images:  # a server's own texts name none of them
        named = [block.type == "image" for block in result.content]
        parts = [part if own else without_marks(part) for part, own in zip(parts, named, strict=True)]
    text = "\n".join(parts)
    return ToolResult(f"error: {text}", error=True) if result.is_error else ToolResult(text, images=tuple(images))


def _reason(error: BaseException) -> str:
    """One line about an error, of the first one in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    named = str(error) if isinstance(error, _NotConnected) else f"{type(error).__name__}: {error}"
    return " ".join(named.split())[:_SHOWN]


def _last_words(log: TextIO) -> str:
    """The last line that a process wrote to stderr."""
    size = os.fstat(log.fileno()).st_size
    end = os.pread(log.fileno(), 4096, max(0, size - 4096)).decode("utf-8", "replace")
    lines = [line.strip() for line in end.splitlines() if line.strip()]
    return f"; it wrote last: {lines[-1][:_SHOWN]}" if lines else ""
