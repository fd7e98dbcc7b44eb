"""A headless Chromium for tests, driven over its DevTools protocol. No test in here.

Needs the program alone: Debian's package `chromium` (`apt-get install chromium`), Google Chrome, or what the variable
RLSCALE_CHROMIUM names.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # it cannot make one where tests run as root, as in containers
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-port=0",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # whatever a page asks for by name is not there
)


def find_chromium() -> str:
    """The program. Raises RuntimeError that says how to get one."""
    named = os.environ.get("RLSCALE_CHROMIUM")
    found = named or next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        raise RuntimeError(
            f"a test needs one of {', '.join(NAMES)} on the PATH and found none; install it (Debian: apt-get install "
            "chromium) or set RLSCALE_CHROMIUM to its path"
        )
    return found


class Page:
    """One page. `errors` collects what its console calls errors and exceptions that nobody caught."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def open(self, url: str, *, width: int = 1440, height: int = 1200) -> None:
        """Loads a page and waits until its script has drawn everything."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.send("Page.navigate", url="about:blank")
        await self.send("Page.navigate", url=url)
        for _ in range(200):
            if await self.evaluate("document.documentElement?.dataset.ready === 'true'"):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"the page did not get ready: {self.errors}")

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def hover(self, selector: str) -> None:
        """Moves the mouse over the middle of an element, scrolling to it."""
        x, y = await self.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        await self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def screenshot(self, file: Path) -> None:
        """The whole page as PNG."""
        answer = await self.send("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(answer["data"]))

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=30)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        about = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(about["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if about["type"] == "error":
                self.errors.append(str(about["args"]))
            case "Log.entryAdded" if about["entry"]["level"] == "error":
                self.errors.append(about["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])


@asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Page]:
    """A page of a browser that lives as long as the context; `folder` is for its profile."""
    process = await asyncio.create_subprocess_exec(
        find_chromium(),
        *FLAGS,
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port = await _port(folder / "DevToolsActivePort", process)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            async with session.get("/json/list") as answer:
                targets = await answer.json()
            address = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _port(file: Path, process: asyncio.subprocess.Process) -> int:
    """Chromium writes the port it has taken into its profile."""
    for _ in range(int(START_S / 0.05)):
        assert process.returncode is None, f"chromium ended with {process.returncode} before it was ready"
        if file.exists() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        await asyncio.sleep(0.05)
    raise AssertionError("chromium did not get ready")
