"""A browser that stays open, driven over two pipes by Chromium's protocol: no port, no driver."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from browser import NO_NETWORK, find_browser

_LIMIT_SEC = 40.0
# Other tests make network interfaces meanwhile; then the browser ends each of its requests once.
_NETWORK_CHANGED = "net::ERR_NETWORK_CHANGED"
_AS_3_AND_4 = """import os, sys
for given, wanted in zip(sys.argv[1:3], (3, 4)):
    os.dup2(int(given), wanted)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A headless browser with one page; leaving it as a context ends it.

    Attributes:
        complaints: what the browser has written to its console, such as what a policy refused.
    """

    def __init__(self, folder: Path) -> None:
        """Start it.

        Args:
            folder: where it keeps what it needs.
        """
        to_browser, self._writer = os.pipe()
        self._reader, from_browser = os.pipe()
        # Out of the way of those numbers that the browser expects.
        given = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]
        words = [
            *(sys.executable, "-I", "-S", "-c", _AS_3_AND_4, *map(str, given)),
            *(find_browser(), "--headless=new", "--no-sandbox", "--disable-gpu", NO_NETWORK),
            *(
                "--hide-scrollbars",
                "--remote-debugging-pipe",
                f"--user-data-dir={folder}",
                "about:blank",
            ),
        ]
        self._process = subprocess.Popen(
            words,
            pass_fds=given,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_browser, from_browser, *given):
            os.close(end)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session = ""
        self.complaints: list[str] = []

    def __enter__(self) -> Self:
        (page,) = (t for t in self._targets() if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._writer)
        os.close(self._reader)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, url: str, width: int = 1280) -> None:
        """Open a page in a window of this width."""
        self.resize(width)
        while self.call("Page.navigate", url=url).get("errorText") == _NETWORK_CHANGED:
            time.sleep(0.1)

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window another size, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def value(self, script: str) -> Any:
        """Return the value of an expression of JavaScript on the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Return the value of an expression once it is true."""
        deadline = time.monotonic() + _LIMIT_SEC
        while not (value := self.value(script)):
            assert time.monotonic() < deadline, f"never true: {script}\n{self.complaints}"
            time.sleep(0.1)
        return value

    def press(self, key: str, text: str = "") -> None:
        """Press a key."""
        code = {"Tab": 9, "Enter": 13}[key]
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def screenshot(self) -> bytes:
        """Return the whole page as a PNG."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(taken["data"])

    def _targets(self) -> list[dict[str, Any]]:
        return self.call("Target.getTargets")["targetInfos"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._reader], [], [], _LIMIT_SEC)[0], "no answer"
            chunk = os.read(self._reader, 1 << 16)
            assert chunk, f"the browser has ended with {self._process.wait()}"
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Log.entryAdded":
            if _NETWORK_CHANGED not in (text := event["params"]["entry"]["text"]):
                self.complaints.append(text)
        elif event.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.complaints.append(json.dumps(event["params"]))
