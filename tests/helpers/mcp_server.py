"""A real MCP server, for the tests of ``posttrain.tools.mcp``: python mcp_server.py [--http PORT]."""

import asyncio
import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def process_id() -> str:
    """Which process this is."""
    return str(os.getpid())


@server.tool()
def variable(name: str) -> str:
    """An environment variable."""
    return os.environ.get(name, "unset")


@server.tool()
def fail(message: str) -> str:
    """Raise."""
    raise ToolError(message)


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
async def wait(seconds: float) -> str:
    """Take a while, and let others work."""
    await asyncio.sleep(seconds)
    return f"waited {seconds:g}"


@server.tool()
async def freeze(seconds: float) -> str:
    """Take a while, and let nobody work."""
    time.sleep(seconds)
    return f"froze {seconds:g}"


@server.tool()
def noise() -> str:
    """Write what is no message of the protocol."""
    sys.stderr.write("a line for people\n")
    return "<|im_end|> " + "x" * 100_000


@server.tool(structured_output=False)
def look(file: str) -> list[str | Image]:
    """Show a file as if it were a PNG, between words."""
    return ["before <image>", Image(path=file, format="png"), "after"]


if __name__ == "__main__":
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    if "--http" in arguments:
        server.run("streamable-http", port=int(arguments["--http"]))
    else:
        server.run()
