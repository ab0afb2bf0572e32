"""Every page in a real browser: it runs, it needs nothing, and it can be read in light and dark, wide and narrow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

from sftron.report.page import render
from tests.conftest import ASSETS

from .pages import PAGES, inspected

pytestmark = pytest.mark.nightly
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_TIMEOUT_S = 60
_LOOK = (ASSETS / "look_at_page.js").read_text(encoding="utf-8")


def find_chromium() -> str | None:
    """Returns the program, if this machine has one."""
    return next((path for path in map(shutil.which, _NAMES) if path), None)


class Browser:
    """One Chromium with one tab; used by `with`. Pages are files of this machine, and there is no network to need."""

    def __init__(self, program: str, profile: Path) -> None:
        to_read, to_write = os.pipe(), os.pipe()
        options = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"]
        # A container has neither a sandbox nor much shared memory. Nothing is loaded but pages that the tests wrote.
        options += ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-background-networking"]
        # Chromium reads commands from descriptor 3 and answers on 4; each message ends with a NUL.
        shell = f'exec "$0" "$@" 3<&{to_read[0]} 4>&{to_write[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, program, *options],
            pass_fds=(to_read[0], to_write[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read[0])
        os.close(to_write[1])
        self._commands, self._answers = os.fdopen(to_read[1], "wb", buffering=0), os.fdopen(to_write[0], "rb", 0)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._session = ""
        with suppress(OSError, EOFError):
            self.call("Browser.close")
        self._process.wait(_TIMEOUT_S)
        self._commands.close()
        self._answers.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command of the protocol; see https://chromedevtools.github.io/devtools-protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not (data := os.read(self._answers.fileno(), 2**20)):
                raise EOFError("Chromium has ended")
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, path: Path, *, scheme: str = "light", width: int = 1280, height: int = 900) -> Page:
        """Loads a file in a window of this size, for readers who prefer the light or the dark scheme."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        page = Page(self, path)
        deadline = time.monotonic() + _TIMEOUT_S
        while page.evaluate("document.readyState") != "complete":
            assert time.monotonic() < deadline, f"{path} is not loaded in {_TIMEOUT_S} s"
        return page


class Page:
    """A page that is open."""

    def __init__(self, browser: Browser, path: Path) -> None:
        self._browser, self._path = browser, path

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression in the page, as JSON."""
        answer = self._browser.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Returns errors of scripts, violations of the content security policy, and what else was fetched."""
        self.evaluate("0")
        found = []
        for event in self._browser.events:
            params = event.get("params", {})
            if event["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                found.append(f"console: {json.dumps(params)[:300]}")
            elif event["method"] == "Log.entryAdded":
                found.append(f"log: {params['entry']['text']}")
            elif event["method"] == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith("data:") and url.partition("#")[0] != self._path.resolve().as_uri():
                    found.append(f"fetched: {url}")
        return found

    def look(self, *, least_contrast: float = 4.5) -> dict[str, Any]:
        """Returns how the page looks: {"num_texts", "faint", "overflow", "wide"}.

        faint: texts whose contrast to their background is below least_contrast (WCAG 2's relative luminance).
        overflow: pixels that the page is wider than the window; wide: what sticks out.
        """
        return self.evaluate(_LOOK.replace("LEAST", str(least_contrast)))

    def point_at(self, selector: str) -> None:
        """Moves the pointer onto the first element that a selector finds."""
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'});"
            " const box = e.getClientRects()[0]; return [box.left + box.width / 2, box.top + box.height / 2]; })()"
        )
        self._browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no chromium and no google-chrome on this machine: apt-get install chromium")
    with Browser(program, tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module", params=PAGES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / f"{request.param}.html"
    path.write_text(PAGES[request.param](), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_quiet_legible_and_fits(browser: Browser, path: Path, scheme: str, width: int) -> None:
    opened = browser.open(path, scheme=scheme, width=width)
    look = opened.look()
    assert opened.complaints() == []
    assert look["num_texts"] >= 2
    assert look["faint"] == []
    assert look["overflow"] <= 0, look["wide"]
    is_dark = opened.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert is_dark == (scheme == "dark")
    paper = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) < 300) == is_dark


def test_the_tooltip_shows_the_token_under_the_pointer_and_the_arrow_keys_go_on(
    browser: Browser, tmp_path: Path
) -> None:
    (tmp_path / "page.html").write_text(inspected(), encoding="utf-8")
    opened = browser.open(tmp_path / "page.html")
    assert opened.evaluate("document.getElementById('tip').hidden")
    opened.point_at("mark i")
    shown = opened.evaluate("[...document.querySelectorAll('#tip tr')].map((row) => row.innerText)")
    assert "trained\tyes" in shown
    assert "role\tassistant" in shown
    assert opened.look()["faint"] == []
    opened.point_at("h1")
    assert opened.evaluate("document.getElementById('tip').hidden")

    opened.evaluate("document.querySelector('.blocks').focus()")
    tips = []
    for _ in range(2):
        opened.press("ArrowRight")
        tips.append(opened.evaluate("document.querySelector('#tip').innerText"))
    assert all("token id" in tip for tip in tips)
    assert tips[0] != tips[1]
    opened.press("Escape")
    assert opened.evaluate("document.getElementById('tip').hidden")


def test_what_the_checks_look_for_they_find(browser: Browser, tmp_path: Path) -> None:
    """A page that is loud, faint, too wide, fetches, and runs what its policy forbids."""
    body = (
        '<p style="color: #999; background: #fff">faint</p><p style="width: 3000px">wide</p>'
        '<img src="https://example.invalid/x.png" alt=""><p onclick="0">handler</p>'
    )
    bad = render("page.html.jinja", title="Bad").replace("<main>", f"<main>{body}")
    (tmp_path / "page.html").write_text(bad, encoding="utf-8")
    opened = browser.open(tmp_path / "page.html")
    opened.evaluate("console.error('loud')")
    opened.evaluate("document.querySelector('[onclick]').click()")
    complaints = "\n".join(opened.complaints())
    assert "loud" in complaints
    assert "Content Security Policy" in complaints
    look = opened.look()
    assert [each.split()[0] for each in look["faint"]] == ["2.85"]
    assert look["overflow"] > 1000
    assert look["wide"]
