"""A real Chromium, headless, driven over its DevTools socket: open a page, click what users click, look at it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

TIMEOUT_S = 20.0
NAMES = ("chromium", "chromium-browser", "google-chrome")


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One DevTools command."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                message = json.loads((await self._socket.receive()).data)
                if message.get("id") == number:
                    assert "error" not in message, message
                    result: dict[str, Any] = message["result"]
                    return result
                self._note(message)

    async def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, script: str) -> Any:
        """Waits until the expression is truthy, and returns it."""
        async with asyncio.timeout(TIMEOUT_S):
            while not (value := await self.run(script)):  # noqa: ASYNC110  another process, it sets no Event here
                await asyncio.sleep(0.05)
        return value

    async def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> int:
        """Loads the page; returns the milliseconds until it was drawn, as the page itself measured."""
        phone = width < 700
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        await self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url="about:blank")
        await self.call("Page.navigate", url=url)
        return int(await self.until("document.documentElement?.dataset.ready"))

    async def main_thread_s(self) -> float:
        """Processor seconds that the page's main thread has used since it was opened: what others run is not in it."""
        found = await self.call("Performance.getMetrics")
        return float({metric["name"]: metric["value"] for metric in found["metrics"]}["ThreadTime"])

    async def click(self, selector: str) -> None:
        """A real mouse click in the middle of the element."""
        x, y = await self.place(selector)
        await self.mouse("mousePressed", x, y, button="left", clickCount=1)
        await self.mouse("mouseReleased", x, y, button="left", clickCount=1)

    async def place(self, selector: str) -> tuple[float, float]:
        """The middle of the element, scrolled into view, in CSS pixels of the window."""
        script = f"""(async () => {{ const e = document.querySelector({json.dumps(selector)});
            e.scrollIntoView({{block: 'center'}}); await new Promise(requestAnimationFrame);
            const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; }})()"""
        x, y = await self.run(script)
        return x, y

    async def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """One mouse event."""
        await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    async def screenshot(self, path: Path) -> None:
        """What the window shows, as PNG."""
        found = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))  # noqa: ASYNC240  a test, and nothing else runs

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """A browser with one tab. Skips nothing: without Chromium the test fails and says what to install."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.fail("no Chromium: the report is tested in a real browser, run 'apt-get install chromium'")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program,
            *("--headless=new", "--no-sandbox", "--disable-gpu-sandbox", "--disable-dev-shm-usage", "--no-first-run"),
            *("--hide-scrollbars", "--disable-background-networking", "--disable-component-update", "--mute-audio"),
            *(f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            port = await _port(process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tab = next(each for each in await answer.json() if each["type"] == "page")
                async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=1 << 27) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Network", "Performance"):
                        await page.call(f"{domain}.enable")
                    yield page
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _port(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    lines = []
    async with asyncio.timeout(TIMEOUT_S):
        while line := (await process.stderr.readline()).decode(errors="replace"):
            lines.append(line)
            if "DevTools listening on ws://" in line:
                return int(line.split("://")[1].split("/")[0].rpartition(":")[2])
    raise RuntimeError(f"Chromium did not start: {''.join(lines)[-1000:]}")
