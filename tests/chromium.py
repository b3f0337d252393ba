"""Headless Chromium for tests and pictures, spoken to over a pipe: no port, no further package.

Pages are read as a person would see them: texts, sizes and pictures of what was drawn, frames of
another origin included, with every address that the page asked for.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["LAPTOP", "Browser", "BrowserError", "Page", "browser", "program"]

LAPTOP = (1366, 768)
"""Width and height of a small laptop's screen, in pixels."""

WAIT_SECONDS = 120.0
"""For a page to show what it should, on a machine that is busy otherwise."""

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2"  # there is a mouse, which buttons
    ",primaryPointerType=4,availablePointerTypes=4",  # that appear under it wait for
    "--remote-debugging-pipe",
)

_LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4);"
    "os.execvp(sys.argv[3], sys.argv[3:])"
)
"""Chromium reads commands from descriptor 3 and answers on 4."""


class BrowserError(Exception):
    """The browser refuses a command, ended, or a page does not show what was waited for."""


def program() -> str | None:
    """Chromium's command on this machine, if it is there."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@contextmanager
def browser(*, size: tuple[int, int] = LAPTOP) -> Iterator[Browser]:
    """Chromium with an empty profile of its own; it and the profile are gone afterwards."""
    command = program()
    if command is None:
        raise BrowserError("Chromium is not installed (apt-get install chromium)")
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        running = Browser(command, Path(folder), size)
        try:
            yield running
        finally:
            running.stop()


class Browser:
    """A running Chromium."""

    def __init__(self, command: str, folder: Path, size: tuple[int, int]) -> None:
        self._size = size
        self._numbers = itertools.count(1)
        self._rest = b""
        self._pages: list[Page] = []
        reads, self._commands = os.pipe()
        self._answers, writes = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (reads, writes)]  # none is 3 or 4
        options = [*FLAGS, f"--user-data-dir={folder}/profile"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, *map(str, ends), command, *options, "about:blank"],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)},
        )
        for end in (reads, writes, *ends):
            os.close(end)

    def open(self, url: str, *, first: str = "") -> Page:
        """Open a page in a tab of its own; it may still be loading.

        Args:
            first: a script that runs in each document before its own do.
        """
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        self._pages.append(page)
        page.follow(session)
        page.resize(*self._size)
        page.call("Page.enable")
        page.call("Page.addScriptToEvaluateOnNewDocument", source=first)
        page.call("Page.navigate", url=url)
        return page

    def call(self, method: str, *, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events that come before it are noted."""
        number = self.send(method, session=session, **params)
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            message = self._next(deadline)
            if message.get("id") == number:
                if "error" in message:
                    raise BrowserError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result
            for page in self._pages:
                page.note(message)

    def send(self, method: str, *, session: str | None = None, **params: Any) -> int:
        """Send a command; returns its number."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        with suppress(BrokenPipeError):  # the answer says it
            os.write(self._commands, json.dumps(message).encode() + b"\0")
        return number

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], deadline - time.monotonic())
            data = os.read(self._answers, 1 << 20) if ready else b""
            if not data:
                raise BrowserError("Chromium ended" if ready else "Chromium does not answer")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def stop(self) -> None:
        """End it and all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)


class Page:
    """A tab, with its frames."""

    def __init__(self, owner: Browser, session: str) -> None:
        self._owner = owner
        self._session = session
        self._sessions: list[str] = []
        self._width = 0
        self.requests: list[str] = []
        """Addresses that the page and its frames asked for, in order."""
        self.errors: list[str] = []
        """What its scripts raised, and what it was refused."""

    def follow(self, session: str) -> None:
        """Note what happens in the page, or in a frame that is a process of its own."""
        self._sessions.append(session)
        for domain in ("Network", "Runtime", "Log"):
            self._owner.send(f"{domain}.enable", session=session)
        self._owner.send(
            "Target.setAutoAttach",
            session=session,
            autoAttach=True,
            waitForDebuggerOnStart=False,
            flatten=True,
        )

    def note(self, message: dict[str, Any]) -> None:
        """Take an event of the browser."""
        if message.get("sessionId") not in self._sessions:
            return
        what, params = message.get("method"), message.get("params", {})
        if what == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif what == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif what == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif what == "Target.attachedToTarget" and params["targetInfo"]["type"] == "iframe":
            self.follow(params["sessionId"])
        elif what == "Target.detachedFromTarget" and params["sessionId"] in self._sessions:
            self._sessions.remove(params["sessionId"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command to the page itself."""
        return self._owner.call(method, session=self._session, **params)

    def resize(self, width: int, height: int) -> None:
        """Show the page in a window of this size."""
        self._width = width
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def value(self, script: str, *, session: str | None = None) -> Any:
        """What an expression is, in the page or in one of its frames."""
        answer = self._owner.call(
            "Runtime.evaluate",
            session=session or self._session,
            expression=script,
            returnByValue=True,
            awaitPromise=True,
        )
        if "exceptionDetails" in answer:
            raise BrowserError(f"{script}: {answer['exceptionDetails']['exception']}")
        return answer["result"].get("value")

    def wait(self, script: str, *, what: str = "", frames: bool = False) -> Any:
        """Wait until an expression is true in the page, or in one of its frames; what it is then.

        Raises:
            BrowserError: it is not in `WAIT_SECONDS`; the message holds the text of the page.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            for session in list(self._sessions) if frames else [self._session]:
                with suppress(BrowserError):  # between two documents
                    if found := self.value(script, session=session):
                        return found
            if time.monotonic() > deadline:
                text = self.value("document.body.innerText")
                raise BrowserError(f"{what or script} does not come; the page reads:\n{text}")
            time.sleep(0.2)

    def click(self, script: str) -> None:
        """Click in the middle of the element that an expression finds, once it moves no more."""
        places = [None, self._place(script)]
        while places[-1] != places[-2]:
            time.sleep(0.3)
            places.append(self._place(script))
        x, y = places[-1]
        for kind in ("mousePressed", "mouseReleased"):
            at = {"x": x, "y": y, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **at)

    def _place(self, script: str) -> Any:
        return self.wait(
            f"""(() => {{
                const element = {script};
                if (!element) return null;
                element.scrollIntoView({{block: "center"}});
                const box = element.getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )

    def turn(self, x: float, y: float, *, by: float) -> None:
        """Turn the mouse wheel at a place, by so many pixels."""
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)

    def settle(self) -> None:
        """Wait until the window looks the same twice, half a second apart."""
        before, now = b"", self.picture()
        while before != now:
            time.sleep(0.5)
            before, now = now, self.picture()

    def write(self, text: str) -> None:
        """Put a text where the cursor is."""
        self.call("Input.insertText", text=text)

    def picture(self, *, height: int | None = None) -> bytes:
        """A PNG of the window, or of so much of the page from its top."""
        more: dict[str, Any] = {}
        if height is not None:
            clip = {"x": 0, "y": 0, "width": self._width, "height": height, "scale": 1}
            more = {"clip": clip, "captureBeyondViewport": True}
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **more)["data"])
