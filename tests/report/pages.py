"""One of each kind of page, with text that would act wherever a page has text of others. A new page joins by a line."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import cast

from sftron.checks.report import Check, Report
from sftron.checks.subject import Subject
from sftron.checks.verify_run import RULES, page_of
from sftron.compare.comparison import compare
from sftron.compare.recorded_run import read_run
from sftron.data.types import ConversationKey, Dropped, Role
from sftron.report.audit import Audit
from sftron.report.html import render
from sftron.report.page import Inspection
from tests.compare.sweeps import ablation, write_run

from .bytes_tokenizer import CHATS, HOSTILE_TEXT, awkward_pack, conversation, decode, pack


def inspected() -> str:
    audit = Audit(("chats.jsonl",))
    for row, chat in enumerate(CHATS):
        audit.add_row(conversation(chat, row=row))
    audit.add_row(
        Dropped("overlong", "chats.jsonl:9: 5,000 tokens, but tokens.sequence_length is 4096", ConversationKey(0, 8))
    )
    return Inspection((awkward_pack(), awkward_pack()), audit, decode, "chats: what is trained").as_html()


def inspected_with_problems() -> str:
    """Text that would act, wherever a page has text of others."""
    audit = Audit((HOSTILE_TEXT,))
    audit.add_row(Dropped(HOSTILE_TEXT, HOSTILE_TEXT * 9, ConversationKey(0, 1)))
    audit.add_row(conversation([(Role.ASSISTANT, HOSTILE_TEXT)], is_stop_trained=False))
    every_role = [(role, "word " * 9) for role in Role if role is not Role.PADDING]
    return Inspection((pack([conversation(every_role)[1]]),), audit, decode, HOSTILE_TEXT).as_html()


def swept() -> str:
    with TemporaryDirectory() as folder:
        runs = [read_run(run) for run in ablation(Path(folder))]
        failed = write_run(Path(folder) / ("long-" + "x" * 60), status="failed", error=HOSTILE_TEXT)
        return compare(HOSTILE_TEXT, [*runs, read_run(failed)], num_expected=12).as_html()


def verified() -> str:
    """A row of each kind; the red one is open."""
    checks = [
        Check(
            rule.name,
            passed,
            "measured " * 5,
            "<= 1e-04",
            (HOSTILE_TEXT, "word " * 40),
            seconds=12.3,
            proves=rule.proves,
            remedy=rule.remedy,
        )
        for rule, passed in zip(RULES, (True, False, None), strict=False)
    ]
    subject = SimpleNamespace(
        packs=[awkward_pack()],
        chat_tokenizer=SimpleNamespace(decode=decode),
        preparation=SimpleNamespace(location=lambda key: f"chats.jsonl:{key.row + 1}"),
    )
    report = Report("run: before it begins", {"model": HOSTILE_TEXT, "data": "rows " * 30}, tuple(checks))
    return page_of(report, cast(Subject, subject))


PAGES: dict[str, Callable[[], str]] = {
    "inspect": inspected,
    "inspect-problems": inspected_with_problems,
    "sweep": swept,
    "verify": verified,
    "nothing": lambda: Inspection((), Audit(), decode, "Nothing").as_html(),
    "empty": lambda: render("page.html.jinja", title="Nothing"),
}
