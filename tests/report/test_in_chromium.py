"""Every page in a real browser: it runs, it needs nothing, and it can be read in light and dark, wide and narrow."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sftron.report.page import render
from tests.browser import Browser, find_chromium

from .pages import PAGES, inspected

pytestmark = pytest.mark.nightly


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
