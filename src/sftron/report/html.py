"""The page of packs and their audit: the verdict, the audit, the packs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sftron.data.types import Pack, Role
from sftron.report.audit import Audit
from sftron.report.pack_html import pack_section, role_class
from sftron.report.page import escaped, page, resource
from sftron.report.pieces import Decode
from sftron.report.transcript import role_name

_TIP = '<div id="tip" role="status" hidden></div>\n'
_TOGGLES = {
    "dim": "Dim what is not trained",
    "edges": "Show token borders",
    "ends": "Show line ends",
}


def report_page(packs: Sequence[Pack], audit: Audit, decode: Decode, *, title: str) -> str:
    """The page as text; it is the same for the same arguments."""
    return page(
        title,
        header=_verdict(audit),
        body="".join((*_audit_sections(audit), pack_sections(packs, decode, audit.source_names))),
        styles=["pack.css"],
        script=resource("pack.js"),
    )


def pack_sections(packs: Sequence[Pack], decode: Decode, source_names: Sequence[str]) -> str:
    """HTML of packs under their legend, for a page with pack.css and pack.js."""
    sections = (
        pack_section(pack, decode, number=number, source_names=source_names) for number, pack in enumerate(packs)
    )
    return "".join((_legend(packs) if packs else "", *sections, _TIP))


def _verdict(audit: Audit) -> str:
    if not audit.problems:
        return f'<p class="verdict good"><b>No problem found.</b> <span>{audit.assurance}</span></p>'
    problems = "".join(f"<li>{escaped(problem)}</li>" for problem in audit.problems)
    return f'<div class="verdict bad"><b>Do not train on this.</b><ul>{problems}</ul></div>'


def _audit_sections(audit: Audit) -> Iterator[str]:
    facts = (*audit.row_facts(), *audit.pack_facts())
    numbers = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in facts)
    yield f'<section class="audit"><h2>Audit</h2><dl class="numbers">{numbers}</dl><div class="charts">\n'
    yield _sources(audit)
    yield _roles(audit)
    yield _lengths(audit)
    yield "</div>\n"
    if audit.dropped:
        rows = "".join(
            f'<tr><th scope="row">{escaped(reason)}</th><td class="n">{count:,}</td><td>{escaped(first)}</td></tr>'
            for reason, count, first in audit.drops()
        )
        head = '<th scope="col">Reason</th><th scope="col" class="n">Rows</th><th scope="col">The first</th>'
        yield (
            '<table class="drops"><caption>Rows dropped</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>\n"
        )
    yield "</section>\n"


def _sources(audit: Audit) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escaped(name)}</th><td class="n">{kept}</td><td class="n">{tokens}</td></tr>'
        for name, kept, tokens in audit.source_facts()
    )
    if not rows:
        return ""
    head = '<th scope="col"></th><th scope="col" class="n">Rows kept</th><th scope="col" class="n">Tokens trained</th>'
    return (
        '<table class="sources"><caption>Data sets</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>\n"
    )


def _roles(audit: Audit) -> str:
    """Tokens by role as bars; the filled part is trained."""
    roles = audit.row_roles if audit.num_kept else audit.pack_roles
    highest = max(roles.tokens.values(), default=1)
    rows = "".join(
        f'<tr class="{role_class(role)}"><th scope="row">{role_name(role)}</th><td class="bar">'
        + _bar(roles.tokens[role] / highest, roles.trained[role] / roles.tokens[role])
        + f'</td><td class="n">{roles.tokens[role]:,}</td><td class="n">{roles.trained[role]:,}</td></tr>'
        for role in sorted(roles.tokens)
    )
    head = (
        '<th scope="col">Role</th><td></td><th scope="col" class="n">Tokens</th><th scope="col" class="n">Trained</th>'
    )
    return f"<table><caption>Tokens by role</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>\n"


def _lengths(audit: Audit) -> str:
    """The histogram of conversation lengths as bars, with the quantiles said above it."""
    buckets = audit.lengths.buckets()
    if not buckets:
        return ""
    highest = max(bucket.count for bucket in buckets)
    rows = "".join(
        f'<tr><th scope="row" class="n">{bucket.low:,} – {bucket.high:,}</th>'
        f'<td class="bar">{_bar(bucket.count / highest, 1)}</td><td class="n">{bucket.count:,}</td></tr>'
        for bucket in buckets
    )
    quantiles = audit.lengths.as_dict()["quantiles"]
    said = ", ".join(f"{name} {length:,}" for name, length in quantiles.items())
    head = '<th scope="col" class="n">Tokens</th><td></td><th scope="col" class="n">Conversations</th>'
    return (
        f"<table><caption>Conversation lengths <small>{said}</small></caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>\n"
    )


def _bar(length: float, filled: float) -> str:
    """A bar of `length` (a share of the column), of which the share `filled` is solid."""
    return (
        '<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="whole" width="{100 * length:.2f}" height="10"/>'
        f'<rect class="part" width="{100 * length * filled:.2f}" height="10"/></svg>'
    )


def _legend(packs: Sequence[Pack]) -> str:
    present = sorted({Role(role) for pack in packs for role in pack.role_ids[: pack.num_tokens].tolist()})
    roles = "".join(f'<li class="{role_class(role)}">{role_name(role)}</li>' for role in present)
    toggles = "".join(
        f'<label><input type="checkbox" id="{name}"{" checked" * (name == "ends")}> {text}</label>'
        for name, text in _TOGGLES.items()
    )
    return (
        '<aside class="legend" aria-label="Legend"><ul><li><mark class="assistant">trained</mark></li>'
        f'<li><span class="template">not trained</span></li>{roles}</ul><div class="toggles">{toggles}</div></aside>\n'
    )
