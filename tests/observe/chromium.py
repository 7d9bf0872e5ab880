"""Chromium without a screen, driven over its debugging pipe: one start serves many pages."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-extensions", "--disable-default-apps", "--remote-debugging-pipe")
LIMIT_S = 120


def executable() -> str:
    """The path of Chromium; skips the test if it is not installed or does not start."""
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{path} does not start: {done.stderr.strip()[:200]}")
    return path


class Browser:
    """A running Chromium. Messages are JSON, each ended by a zero byte."""

    def __init__(self, folder: Path) -> None:
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        # the browser reads from descriptor 3 and writes to 4
        command = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out} 2>"$0"'
        self._process = subprocess.Popen(
            ["bash", "-c", command, str(folder / "stderr"), executable(), *FLAGS,
             f"--user-data-dir={folder / 'profile'}"], pass_fds=(theirs_in, theirs_out))
        os.close(theirs_in)
        os.close(theirs_out)
        self._folder, self._last, self._unread = folder, 0, b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send one command and return its result; events that arrive first are kept."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._last:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def wait(self, method: str, session: str) -> None:
        """Wait for an event."""
        while not any(e["method"] == method and e["sessionId"] == session for e in self.events):
            self.events.append(self._read())

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + LIMIT_S
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._from, 1 << 16) if ready else b""
            assert part, f"no answer: {(self._folder / 'stderr').read_text()[-2000:]}"
            self._unread += part
        message, self._unread = self._unread.split(b"\0", 1)
        return json.loads(message)

    def open(self, html: str, width: int = 1200, scheme: str = "light", *,
             scripts: bool = True) -> Page:
        """A page in a new tab. scheme: the colour scheme that the reader prefers; scripts: run."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                  deviceScaleFactor=1, mobile=False)
        page.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        file = self._folder / f"{session}.html"
        file.write_text(html, encoding="utf-8")
        page.go(file)
        return page

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command for this tab."""
        return self._browser.call(method, self._session, **params)

    def go(self, where: Path | str) -> None:
        """Show a file or an address, and wait until it is loaded; what came before is forgotten."""
        self._browser.events = [e for e in self._browser.events
                                if e.get("sessionId") != self._session]
        self.call("Page.navigate", url=where.as_uri() if isinstance(where, Path) else where)
        self._browser.wait("Page.loadEventFired", self._session)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True,
                          awaitPromise=True, userGesture=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        self.value(f"""new Promise((done) => {{
            const look = () => ({condition}) ? done() : setTimeout(look, 20);
            look();
        }})""")

    def place(self, selector: str, across: float, down: float) -> tuple[float, float]:
        """Scroll to an element; the pixel at shares of its width and height."""
        x, y = self.value(f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: "center", behavior: "instant"}});
            const box = element.getBoundingClientRect();
            return [box.left + {across} * box.width, box.top + {down} * box.height];
        }})()""")
        return x, y

    def point(self, selector: str, across: float, down: float) -> None:
        """Move the pointer to shares of an element's width and height."""
        self._mouse("mouseMoved", *self.place(selector, across, down))

    def drag(self, selector: str, begin: float, end: float) -> None:
        """Drag across an element, from one share of its width to another."""
        x, y = self.place(selector, begin, 0.5)
        last, _ = self.place(selector, end, 0.5)
        self._mouse("mouseMoved", x, y)
        self._mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
        self._mouse("mouseMoved", (x + last) / 2, y, button="left", buttons=1)
        self._mouse("mouseMoved", last, y, button="left", buttons=1)
        self._mouse("mouseReleased", last, y, button="left", clickCount=1)

    def double_click(self, selector: str) -> None:
        """A double click into the middle of an element."""
        at = self.place(selector, 0.5, 0.5)
        for count in (1, 2):
            self._mouse("mousePressed", *at, button="left", buttons=1, clickCount=count)
            self._mouse("mouseReleased", *at, button="left", clickCount=count)

    def _mouse(self, kind: str, x: float, y: float, **how: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **how)

    def press(self, *keys: str) -> None:
        """Press keys where the focus is, one after the other."""
        for key in keys:
            code = {"Tab": 9, "Enter": 13, " ": 32}.get(key, 0)
            text = {"Enter": "\r", " ": " "}.get(key, "")
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text,
                      windowsVirtualKeyCode=code)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings that the browser logged."""
        self.value("new Promise(requestAnimationFrame)")
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(e["params"]) for e in self._events() if e["method"] in kinds]

    @property
    def requests(self) -> list[str]:
        """Addresses that the page asked for, without the page itself and data in it."""
        asked = [e["params"]["request"]["url"] for e in self._events()
                 if e["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith(("data:", "file:"))]

    def _events(self) -> list[dict[str, Any]]:
        return [e for e in self._browser.events if e.get("sessionId") == self._session]
