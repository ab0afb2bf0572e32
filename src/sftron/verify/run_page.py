"""The checks of a run as one page: the verdict, the table with the details of each row, the first pack in color."""

from __future__ import annotations

from collections.abc import Mapping

from sftron.report.html import pack_sections
from sftron.report.page import escaped, page, resource
from sftron.verify.subject import Subject
from sftron.verify.table import Check, RunReport, not_measured, verdict

_CLASSES = {True: "good", False: "bad", None: "open"}


def run_page(report: RunReport, subject: Subject) -> str:
    """Returns the page as text; it needs no other file and no network."""
    packs = subject.packs[:1]
    shown = pack_sections(packs, subject.chat_tokenizer.decode, subject.preparation.source_names)
    checks = "".join(map(_check, report.checks))
    body = (
        f'<section class="checks"><h2>What was looked at</h2><p class="facts">{len(report.checks)} checks, the cheap '
        f"ones first; each opens.</p>\n{checks}</section>\n"
        f'<section class="about"><h2>Of what</h2>{_facts(report.facts)}</section>\n'
        '<section><h2>What is trained</h2><p class="facts">The first pack of the run, as it will be trained.</p>'
        f"</section>\n{shown}"
    )
    return page(
        report.title, header=_header(report), body=body, styles=["pack.css", "verify.css"], script=resource("pack.js")
    )


def _header(report: RunReport) -> str:
    """Returns the verdict, and for each check a square that links to it."""
    look = "good" if report.passed else "bad"
    squares = "".join(
        f'<a class="{_CLASSES[check.passed]}" href="#{_id(check)}" title="{escaped(check.name)}: {check.word}"></a>'
        for check in report.checks
    )
    return (
        f'<p class="verdict {look}"><b>{escaped(verdict(report))}</b> <span>{escaped(not_measured(report))}</span></p>'
        f'<nav class="squares" aria-label="Checks">{squares}</nav>'
    )


def _id(check: Check) -> str:
    return "check-" + "".join(c if c.isalnum() else "-" for c in check.name)


def _check(check: Check) -> str:
    """Returns one row, which opens; a red one is open, and explains what to do."""
    detail = "".join(f"<li>{escaped(line)}</li>" for line in check.detail)
    remedy = f'<p class="remedy">{escaped(check.if_red)}</p>' if check.passed is False else ""
    return (
        f'<details class="check {_CLASSES[check.passed]}" id="{_id(check)}"{" open" * (check.passed is False)}>'
        f'<summary><b class="word">{check.word}</b><span class="name">{escaped(check.name)}</span>'
        f'<span class="measured">{escaped(check.measured)}</span>'
        f'<span class="allowed">{escaped(check.allowed)}</span><span class="n">{check.seconds:.1f} s</span></summary>'
        f'<div class="more">{remedy}<p>{escaped(check.proves)}</p>{f"<ul>{detail}</ul>" if detail else ""}</div>'
        "</details>\n"
    )


def _facts(facts: Mapping[str, str]) -> str:
    rows = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in facts.items())
    return f'<dl class="facts-of">{rows}</dl>'
