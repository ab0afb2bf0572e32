"""The checks of a run as one page: the verdict, the table, the details behind each row, the first pack in color."""

from __future__ import annotations

from sftron.report.page import render, shown_packs
from sftron.verify.subject import Subject
from sftron.verify.table import RunReport, not_measured, verdict


def run_page(report: RunReport, subject: Subject) -> str:
    """Returns the page as text; it needs no other file and no network."""
    return render(
        "checks.html.jinja",
        report=report,
        verdict=verdict(report),
        not_measured=not_measured(report),
        looks={True: "good", False: "bad", None: "open"},
        shown=shown_packs(subject.packs[:1], subject.chat_tokenizer.decode, subject.preparation.source_names),
    )
