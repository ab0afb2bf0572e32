"""Every page in a real browser: it runs, it needs nothing, and it can be read in light and dark, wide and narrow.

A new page joins by a line in PAGES.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import cast

import pytest

from sftron.data.types import ConversationKey, Dropped, Role
from sftron.report.audit import Audit
from sftron.report.html import report_page
from sftron.report.page import page
from sftron.sweep.comparison import compare
from sftron.sweep.comparison_page import comparison_page
from sftron.sweep.recorded_run import read_run
from sftron.verify.run_page import run_page
from sftron.verify.subject import Subject
from sftron.verify.table import Check, RunReport
from sftron.verify.verify_run import RULES
from tests.browser import Browser
from tests.sweep.sweeps import write_run
from tests.sweep.test_comparison import ablation

from .bytes_tokenizer import CHATS, HOSTILE_TEXT, awkward_pack, conversation, decode, pack


def inspected() -> str:
    audit = Audit(("chats.jsonl",))
    for row, chat in enumerate(CHATS):
        audit.add_row(conversation(chat, row=row))
    audit.add_row(
        Dropped("overlong", "chats.jsonl:9: 5,000 tokens, tokens.sequence_length is 4096", ConversationKey(0, 8))
    )
    return report_page([awkward_pack(), awkward_pack()], audit, decode, title="chats: what is trained")


def inspected_with_problems() -> str:
    """Text that would act, wherever a page has text of others."""
    audit = Audit((HOSTILE_TEXT,))
    audit.add_row(Dropped(HOSTILE_TEXT, HOSTILE_TEXT * 9, ConversationKey(0, 1)))
    audit.add_row(conversation([(Role.ASSISTANT, HOSTILE_TEXT)], is_stop_trained=False))
    every_role = [(role, "word " * 9) for role in Role if role is not Role.PADDING]
    return report_page([pack([conversation(every_role)[1]])], audit, decode, title=HOSTILE_TEXT)


def swept() -> str:
    with TemporaryDirectory() as folder:
        runs = [read_run(run) for run in ablation(Path(folder))]
        failed = write_run(Path(folder) / ("long-" + "x" * 60), status="failed", error=HOSTILE_TEXT)
        return comparison_page(compare(HOSTILE_TEXT, [*runs, read_run(failed)], num_expected=12))


def verified() -> str:
    """A row of each kind; the red one is open."""
    checks = [
        Check(
            rule.name, passed, "measured " * 5, "<= 1e-04", 12.3, (HOSTILE_TEXT, "word " * 40), rule.proves, rule.if_red
        )
        for rule, passed in zip(RULES, (True, False, None), strict=False)
    ]
    subject = SimpleNamespace(
        packs=[awkward_pack()],
        chat_tokenizer=SimpleNamespace(decode=decode),
        preparation=SimpleNamespace(source_names=("chats.jsonl",)),
    )
    report = RunReport("run: before it begins", {"model": HOSTILE_TEXT, "data": "rows " * 30}, tuple(checks))
    return run_page(report, cast(Subject, subject))


PAGES: dict[str, Callable[[], str]] = {
    "inspect": inspected,
    "inspect-problems": inspected_with_problems,
    "sweep": swept,
    "verify": verified,
    "empty": lambda: page("Nothing", body=""),
}


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


def test_the_tooltip_tells_of_the_token_under_the_pointer(browser: Browser, tmp_path: Path) -> None:
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


def test_the_arrow_keys_go_from_token_to_token(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(inspected(), encoding="utf-8")
    opened = browser.open(tmp_path / "page.html")
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
    (tmp_path / "page.html").write_text(page("Bad", body=body, script="console.error('loud')"), encoding="utf-8")
    opened = browser.open(tmp_path / "page.html")
    opened.evaluate("document.querySelector('[onclick]').click()")
    complaints = "\n".join(opened.complaints())
    assert "loud" in complaints
    assert "Content Security Policy" in complaints
    look = opened.look()
    assert [each.split()[0] for each in look["faint"]] == ["2.85"]
    assert look["overflow"] > 1000
    assert look["wide"]
