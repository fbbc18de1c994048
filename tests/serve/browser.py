"""A headless Chromium, driven through chromedriver by the WebDriver protocol. Nothing else is needed."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.jobs.conftest import wait_until

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1280,900",
)

WIDE, NARROW = 1280, 390  # pixels


def missing() -> str | None:
    """What a browser needs and is not here; None when all is."""
    names = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(names)} not here (Debian: chromium chromium-driver)" if names else None


@dataclass
class Browser:
    """One window."""

    driver: str
    session: str = ""

    def ask(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        """What chromedriver answers of this session."""
        content = None if method != "POST" else json.dumps(body or {}).encode()
        request = urllib.request.Request(
            f"{self.driver}{self.session}{path}", content, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from None

    def open(self, url: str) -> None:
        """Load a page."""
        self.ask("/url", {"url": url})

    def run(self, script: str, *values: Any) -> Any:
        """What a script, the body of an asynchronous function, returns. AssertionError: its own."""
        value, error = self._run(script, *values)
        assert error is None, f"{script}: {error}"
        return value

    def _run(self, script: str, *values: Any) -> list[Any]:
        call = f"(async (...args) => {{{script}}})(...arguments)"
        ends = ".then(value => done([value, null]), error => done([null, String(error)]))"
        text = f"const done = arguments[arguments.length - 1]; {call}{ends}"
        return self.ask("/execute/async", {"script": text, "args": list(values)})

    def texts(self, selector: str) -> list[str]:
        """The texts of the elements that a selector finds."""
        return self.run(
            "return [...document.querySelectorAll(args[0])].map(one => one.innerText)", selector
        )

    def until(self, script: str, *values: Any, within_s: float = 60) -> Any:
        """What a script returns as soon as that is true; fails with the page's text."""

        def look() -> Any:
            return self._run(script, *values)[0]

        try:
            return wait_until(look, bool, within_s=within_s)
        except AssertionError:
            raise AssertionError(
                f"{script}\n{self.run('return document.body.innerText')}"
            ) from None

    def press(self, text: str) -> None:
        """Click the button, link or label that reads so, as soon as it is there."""
        find = "return [...document.querySelectorAll('dialog[open] button, button, a, label')].find(one => one.innerText.trim() === args[0])"
        self.until(find.replace("return ", "return !!"), text)
        self.run(find.replace("return ", "const it = ") + "; it.click()", text)

    def keys(self, *names: str) -> None:
        """Press keys, one after another."""
        actions = [{"type": kind, "value": name} for name in names for kind in ("keyDown", "keyUp")]
        self.ask("/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def choose_file(self, selector: str, name: str, content: str) -> None:
        """Choose a file with this content, as a person does in the dialog of the browser."""
        script = """
            const files = new DataTransfer();
            files.items.add(new File([args[2]], args[1]));
            const input = document.querySelector(args[0]);
            input.files = files.files;
            input.dispatchEvent(new Event('change'))"""
        self.run(script, selector, name, content)

    def prefer(self, scheme: str) -> None:
        """Have pages believe that their reader prefers light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.cdp("Emulation.setEmulatedMedia", {"features": features})

    def cdp(self, command: str, values: dict[str, Any]) -> Any:
        """A command of the browser's own protocol."""
        return self.ask("/goog/cdp/execute", {"cmd": command, "params": values})

    def complaints(self) -> list[str]:
        """What the browser has logged as severe since it was asked last: errors, and what its policy stopped."""
        found = self.ask("/se/log", {"type": "browser"})
        return [one["message"] for one in found if one["level"] == "SEVERE"]

    def resize(self, width: int, height: int = 900) -> None:
        """Show the page in so many pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.cdp("Emulation.setDeviceMetricsOverride", size)

    def shoot(self, path: Path, width: int = WIDE) -> None:
        """A picture of the whole page."""
        self.resize(width)
        height = self.run("return document.documentElement.scrollHeight")
        self.resize(width, min(height, 4000))
        self.run(
            "await new Promise(done => setTimeout(done, 300))"
        )  # what came into sight is drawn
        path.write_bytes(base64.b64decode(self.cdp("Page.captureScreenshot", {})["data"]))
        self.cdp("Emulation.clearDeviceMetricsOverride", {})


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser with a new, empty profile in a folder."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        ["chromedriver", f"--port={port}", f"--log-path={folder / 'chromedriver.log'}"],
        stdout=subprocess.DEVNULL,
    )
    browser = Browser(f"http://127.0.0.1:{port}")
    try:
        options = {"args": [*FLAGS, f"--user-data-dir={folder / 'profile'}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        wanted["timeouts"] = {"script": 60_000}
        began = time.monotonic()
        while True:
            try:
                made = browser.ask("/session", {"capabilities": {"alwaysMatch": wanted}})
                break
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() - began < 60, "chromedriver does not answer"
                time.sleep(0.05)
        browser.session = f"/session/{made['sessionId']}"
        try:
            yield browser
        finally:
            browser.ask("", method="DELETE")  # the browser's own processes end with it
    finally:
        process.terminate()
        process.wait()
