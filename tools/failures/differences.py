"""What `sftron diff` says of the same configurations in two releases, and the part of the page that it becomes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sftcheck.diff.difference import difference
from sftron.report.token_record import read_record
from tools.failures.releases import COMPARED, CONFIGURATIONS, OLD, RELEASES, Release

Explained = dict[str, Any]
"""By the names of two releases and of a configuration: its losses and what differs, or why it is not compared."""

_INTRODUCTION = """\
## What changes between two releases

The same conversations, model and seed in two environments: `sftron diff record` for an epoch in each, and what
[`sftron diff`](diff.md) says of both records. A is the older release. "nothing" means that rows, ids, trained tokens,
weights, context and model are equal, and so are the facts of the update but for the versions. Between TRL 1.9 and 1.16,
the same seed draws other adapters: what multiplies them is 0 at first, so the loss is the same.
`python tools/failure_index.py --differences` records again what has changed.
"""


def explained(a: Path, b: Path) -> Explained:
    """Returns the losses of two records, and the parts and the facts of the update that differ."""
    found = difference(read_record(a), read_record(b))
    parts = [
        {"part": each.factor.value, "value": round(each.value, 6), "sentence": each.cause.sentence}
        for each in found.named
    ]
    facts = [[each.name, each.a, each.b] for each in found.updates if not each.name.startswith("version of ")]
    kept: Explained = {"losses": [round(each, 6) for each in (found.a.loss, found.b.loss)]}
    return kept | ({"parts": parts} if parts else {}) | ({"facts": facts} if facts else {})


def section(differences: Mapping[str, Mapping[str, Explained]]) -> Iterator[str]:
    """Yields the texts of the page, in the order of the pairs."""
    releases = {each.name: each for each in (OLD, *RELEASES)}
    if differences:
        yield _INTRODUCTION
    for pair in COMPARED:
        a, b = (releases[each] for each in pair)
        if found := differences.get(" ".join(pair)):
            yield from _of_pair(a, b, found)


def _of_pair(a: Release, b: Release, found: Mapping[str, Explained]) -> Iterator[str]:
    yield f"### {a.library} {a.version} ({a.beside}) and {b.version} ({b.beside})\n"
    lines, lacking = list[str](), dict[str, list[str]]()
    for name, title in CONFIGURATIONS.items():
        own = found.get(name, {})
        if "losses" in own:
            losses = [f"{each:.6f}" for each in own["losses"]]
            lines.append(f"| {' | '.join([title, *losses, _what(own)])} |")
        reasons = own.get("not_run", {})
        for version, why in reasons.items() if [*reasons.values()] != ["has none"] * 2 else ():
            lacking.setdefault(f"not compared, as in {version}: {why}", []).append(title)
    yield "\n".join([f"| configuration | loss A | loss B | what differs |\n| {'--- | ' * 4}".strip(), *lines]) + "\n"
    if lacking:
        yield "\n".join(f"- {why}: {'; '.join(titles)}." for why, titles in sorted(lacking.items())) + "\n"


def _what(own: Explained) -> str:
    words = [f"{each['part']} {each['value']:+.6f}: {each['sentence']}" for each in own.get("parts", [])]
    words += [f"{name}: {_short(a)} in A, {_short(b)} in B" for name, a, b in own.get("facts", [])]
    return ". ".join(words).replace("|", "\\|") or "nothing"


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
