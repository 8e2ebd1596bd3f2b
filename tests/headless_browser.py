"""Headless Chromium under Chrome's DevTools protocol, for tests of pages."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--window-size=1000,800")


class DevTools:
    """Connection to a page. `problems` collects the page's exceptions and log entries: errors and blocked requests."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self.problems: list[Any] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(message["params"])

    async def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        return (await self.call("Runtime.evaluate", expression=expression, returnByValue=True))["result"].get("value")

    async def save_picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of what the window shows, or of the whole page."""
        picture = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))


@contextlib.asynccontextmanager
async def open_page(url: str, folder: Path, seconds: float = 60.0) -> AsyncIterator[DevTools]:
    """Open a page in a new browser with its profile in `folder`. Needs Chromium or Chrome in PATH."""
    import aiohttp

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser is not None, "install chromium"
    process = subprocess.Popen(
        [browser, *_OPTIONS, f"--user-data-dir={folder}/profile", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port_file = folder / "profile" / "DevToolsActivePort"
        async with asyncio.timeout(seconds), aiohttp.ClientSession() as session:
            while not port_file.exists() or len(port_file.read_text().split()) < 2:
                await asyncio.sleep(0.05)
            port = port_file.read_text().split()[0]
            targets = await (await session.get(f"http://127.0.0.1:{port}/json")).json()
            address = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                tools = DevTools(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await tools.call(f"{domain}.enable")
                await tools.call("Page.navigate", url=url)
                while await tools.value("document.readyState") != "complete":
                    await asyncio.sleep(0.05)
                yield tools
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
