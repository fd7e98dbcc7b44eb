"""An MCP server by the library's own server side: over standard input and output, or with a port over HTTP."""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("server of the tests")
texts: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def remember(text: str) -> str:
    """Keeps texts; returns all of them."""
    texts.append(text)
    return f"{os.getpid()} {'+'.join(texts)}"


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("the library keeps this text")


@server.tool()
def crash() -> str:
    """Ends the server."""
    sys.stderr.write("the disk is full\n")
    sys.stderr.flush()
    os._exit(3)


@server.tool()
async def wait() -> str:
    """Never returns."""
    await asyncio.sleep(1000)
    return ""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
