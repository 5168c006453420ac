"""A headless browser for tests: Chromium by the DevTools protocol, Firefox by WebDriver BiDi, without a driver."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

PROGRAMS = {"chromium": "chromium", "firefox": "firefox-esr"}
_INTERRUPTED = "was interrupted while the page was loading"
"""What Firefox logs of a stream of events whose page is left; the page's own handler closes it a moment later."""
VIOLATIONS = """\
addEventListener("securitypolicyviolation",
  (event) => (window.violations ??= []).push(`${event.blockedURI} ${event.effectiveDirective}`))"""
"""A script of each new page, which collects what the policy has refused."""


def explain_missing(name: str) -> str:
    """Return why a browser cannot be used; empty if it can."""
    program = PROGRAMS[name]
    return "" if shutil.which(program) else f"{program} is not installed: apt-get install {program}"


class Browser:
    """One page of a headless browser. ``requests``: the addresses that it has fetched; ``errors``: of its scripts."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._extra: dict[str, Any] = {}
        self._context = ""
        self.requests: list[str] = []
        self.errors: list[str] = []

    async def __aenter__(self) -> Self:
        self._process = self._start()
        address = await asyncio.to_thread(self._read_address)
        self._http = aiohttp.ClientSession()
        self._socket = await self._http.ws_connect(address, max_msg_size=0)
        self._reader = asyncio.create_task(self._read())
        await (self._open_chromium() if self._name == "chromium" else self._open_firefox())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.cancel()
        await self._socket.close()
        await self._http.close()
        self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _start(self) -> subprocess.Popen[str]:
        profile = self._folder / "profile"
        profile.mkdir()
        command = [PROGRAMS[self._name]]
        if self._name == "chromium":
            command += ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
            command += ["--remote-debugging-port=0", "--no-first-run", "about:blank"]
        else:
            (profile / "user.js").write_text('user_pref("layout.css.prefers-color-scheme.content-override", 0);\n')
            command += ["--headless", "--no-remote", "--profile", str(profile), "--remote-debugging-port", "0"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def _read_address(self) -> str:
        """Return the address that the browser prints."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if match := re.search(r"listening on (ws://\S+)", line):
                return match[1] if self._name == "chromium" else f"{match[1]}/session"
        raise AssertionError(f"{self._name} ended with {self._process.wait()}")

    async def _read(self) -> None:
        async for message in self._socket:
            content = json.loads(message.data)
            answer = self._answers.pop(content.get("id"), None)
            if answer is None:
                self._note(content.get("method"), content.get("params") or {})
            elif "error" in content:
                answer.set_exception(AssertionError(str(content)[:500]))
            else:
                answer.set_result(content.get("result"))

    def _note(self, method: str | None, values: dict[str, Any]) -> None:
        if method in ("Network.requestWillBeSent", "network.beforeRequestSent"):
            self.requests.append(values["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(values["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.errors.append(values["entry"]["text"])
        elif method == "log.entryAdded" and values["level"] == "error" and _INTERRUPTED not in str(values["text"]):
            self.errors.append(str(values["text"]))

    async def _call(self, method: str, **values: Any) -> Any:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": values, **self._extra})
        return await asyncio.wait_for(self._answers[number], 120)

    async def _open_chromium(self) -> None:
        target = (await self._call("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self._call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        self._extra = {"sessionId": session}
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self._call(f"{domain}.enable")
        await self._call("Page.addScriptToEvaluateOnNewDocument", source=VIOLATIONS)
        await self._call("Emulation.setScrollbarsHidden", hidden=True)
        await self.choose_theme("dark")

    async def choose_theme(self, theme: str) -> None:
        """Have Chromium prefer light or dark colours; another browser keeps the dark ones of its profile."""
        features = [{"name": "prefers-color-scheme", "value": theme}]
        await self._call("Emulation.setEmulatedMedia", features=features)

    async def _open_firefox(self) -> None:
        await self._call("session.new", capabilities={})
        await self._call("session.subscribe", events=["log.entryAdded", "network.beforeRequestSent"])
        self._context = (await self._call("browsingContext.getTree"))["contexts"][0]["context"]
        await self._call("script.addPreloadScript", functionDeclaration=f"() => {{ {VIOLATIONS} }}")

    async def resize(self, width: int, height: int) -> None:
        """Set the size of the page."""
        if self._name == "chromium":
            sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            await self._call("Emulation.setDeviceMetricsOverride", **sizes)
        else:
            viewport = {"width": width, "height": height}
            await self._call("browsingContext.setViewport", context=self._context, viewport=viewport)

    async def go(self, address: str) -> None:
        """Open an address."""
        if self._name == "chromium":
            await self._call("Page.navigate", url=address)
        else:
            await self._call("browsingContext.navigate", context=self._context, url=address, wait="none")

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, or of its promise."""
        wrapped = f"(async () => JSON.stringify(await ({expression})))()"
        if self._name == "chromium":
            result = await self._call("Runtime.evaluate", expression=wrapped, awaitPromise=True)
            assert "exceptionDetails" not in result, result
        else:
            target = {"context": self._context}
            result = await self._call("script.evaluate", expression=wrapped, target=target, awaitPromise=True)
            assert result["type"] == "success", result
        value = result["result"].get("value")
        return None if value is None else json.loads(value)

    async def press(self, key: str) -> None:
        """Press a key that types a letter, or Enter or Tab."""
        code = {"Enter": "\ue007", "Tab": "\ue004"}.get(key, key)
        if self._name == "chromium":
            numbers = {"Enter": (13, "\r"), "Tab": (9, "")}
            number, text = numbers.get(key, (ord(key.upper()[0]), key))
            values = {"key": key, "text": text, "windowsVirtualKeyCode": number}
            await self._call("Input.dispatchKeyEvent", type="keyDown", **values)
            await self._call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=number)
        else:
            actions = [{"type": "keyDown", "value": code}, {"type": "keyUp", "value": code}]
            source = {"type": "key", "id": "keyboard", "actions": actions}
            await self._call("input.performActions", context=self._context, actions=[source])

    async def until(self, expression: str, check: Callable[[Any], bool] = bool) -> Any:
        """Return the value of an expression once it passes the check."""
        while True:
            value = None
            try:
                value = await self.evaluate(expression)
            except AssertionError:  # the page is just replaced
                pass
            if check(value):
                return value
            await asyncio.sleep(0.1)

    async def shoot(self, path: Path) -> None:
        """Write a picture of what is visible."""
        if self._name == "chromium":
            data = (await self._call("Page.captureScreenshot"))["data"]
        else:
            data = (await self._call("browsingContext.captureScreenshot", context=self._context))["data"]
        path.write_bytes(base64.b64decode(data))
