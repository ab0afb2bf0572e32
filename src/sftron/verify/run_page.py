"""The checks of a run as one page: the verdict, the table, the details behind each row, the first pack in color."""

from __future__ import annotations

from sftron.report.page import render, shown_packs
from sftron.verify.run_subject import Subject
from sftron.verify.run_table import not_measured, verdict
from sftron.verify.verify_run import RunReport


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
