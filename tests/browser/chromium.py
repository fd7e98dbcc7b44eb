"""Headless Chromium for tests, controlled over the DevTools protocol. Contains no tests.

Needs only the program: Debian's package `chromium` (`apt-get install chromium`), Google Chrome, or the path in
RLSCALE_CHROMIUM.
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
    "--no-sandbox",  # Chromium cannot create one as root, e.g. in containers
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-port=0",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no host name resolves
)


def find_chromium() -> str:
    """Path of the program. Raises RuntimeError with installation advice if there is none."""
    named = os.environ.get("RLSCALE_CHROMIUM")
    found = named or next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        raise RuntimeError(
            f"a test needs one of {', '.join(NAMES)} on the PATH and found none; install it (Debian: apt-get install "
            "chromium) or set RLSCALE_CHROMIUM to its path"
        )
    return found


class Page:
    """One page. `errors` collects console errors and uncaught exceptions."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def open(self, url: str, *, width: int = 1440, height: int = 1200) -> None:
        """Loads a page and waits until its scripts have drawn everything."""
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
        raise AssertionError(f"the page did not become ready: {self.errors}")

    async def evaluate(self, expression: str) -> Any:
        """Evaluates a JavaScript expression."""
        answer = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def hover(self, selector: str) -> None:
        """Scrolls to an element and moves the mouse over its center."""
        x, y = await self.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        await self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def screenshot(self, file: Path) -> None:
        """Writes the whole page as PNG."""
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
            self._record(message)

    def _record(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] == "error":
                self.errors.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])


@asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Page]:
    """Starts a browser with the profile in `folder` and yields a page. Ends the browser with the context."""
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
        port = await _read_port(folder / "DevToolsActivePort", process)
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


async def _read_port(file: Path, process: asyncio.subprocess.Process) -> int:
    """Waits for the port, which Chromium writes into its profile."""
    for _ in range(int(START_S / 0.05)):
        assert process.returncode is None, f"chromium ended with {process.returncode} before it was ready"
        if file.exists() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        await asyncio.sleep(0.05)
    raise AssertionError("chromium did not become ready")
