"""A real headless Chromium for tests, spoken to by its DevTools protocol over a pipe: no driver and no library is needed.

with Browser() as browser:
    browser.open(path)
    assert browser.problems == []
    browser.run("document.title")
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.processes import LIMIT

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


class Browser:
    """One page in a Chromium of its own.

    Attributes:
        problems: errors of the console, uncaught exceptions, and what the page's security policy refused.
        requests: addresses that the page asked for.
    """

    def __init__(self, *, width: int = 1200, height: int = 900, dark: bool = False):
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._numbers, self._answers, self._rest = 0, dict[int, dict[str, Any]](), b""
        self._loaded = False
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        assert CHROMIUM is not None
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}"]

        def place_pipes() -> None:  # Chromium reads from 3 and writes to 4
            ends = [os.dup(to_browser), os.dup(from_browser)]
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *flags, "about:blank"],
            preexec_fn=place_pipes,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._session = ""
        [page] = [t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)

    def open(self, path: Path) -> None:
        """Load a file and wait until all of it is there."""
        self._loaded = False
        self._call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + LIMIT
        while not self._loaded:
            assert time.monotonic() < deadline, f"{path} does not load"
            self._listen(1.0)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key, as a person would."""
        words = {"key": key, "windowsVirtualKeyCode": code, **({"text": text} if text else {})}
        self._call("Input.dispatchKeyEvent", type="keyDown", **words)
        self._call("Input.dispatchKeyEvent", type="keyUp", **words)

    def screenshot(self, path: Path) -> None:
        """Keep a picture of the whole page."""
        image = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(image["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._numbers += 1
        message = {"id": self._numbers, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + LIMIT
        while self._numbers not in self._answers:
            assert time.monotonic() < deadline, f"no answer to {method}"
            self._listen(1.0)
        answer = self._answers.pop(self._numbers)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _listen(self, seconds: float) -> None:
        if not select.select([self._read], [], [], seconds)[0]:
            return
        chunk = os.read(self._read, 1 << 20)
        assert chunk, f"Chromium has ended with exit code {self._process.wait(LIMIT)}"
        *whole, self._rest = (self._rest + chunk).split(b"\0")
        for message in map(json.loads, whole):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self._note(message["method"], message["params"])

    def _note(self, event: str, about: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Runtime.exceptionThrown":
            self.problems.append(str(about["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.problems.append(str(about["args"]))
        elif event == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.problems.append(about["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        try:
            os.close(self._write)  # Chromium ends when its pipe does
            os.close(self._read)
            self._process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait(10)
        self._profile.cleanup()
