"""docs/silent-failures.md, from the results alone: no time, no path, and everything in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tools.failures.faults import FAULTS, Fault
from tools.failures.releases import CONFIGURATIONS, NOT_RUN, RELEASES, Release

NOT_MEASURED = ("gradients",)
"""The rows of verify_trainer that came after the configurations were measured."""

ROWS = (
    "ids", "trained tokens", "stop tokens", "isolation", "positions", "truncation", "loss", "padding", "forgery",
    "adapters", "generation",
)  # fmt: skip
Results = dict[str, Any]

INTRODUCTION = """\
# Silent failures

Which standard configurations of which releases fail which row of [`verify_trainer`](verify-any-trainer.md), and since
when. Each runs with the same few conversations, a random model of two layers, in float32 on a CPU; torch is the same
for all. `python tools/failure_index.py` makes an environment for each release (`tools/failures/releases.py`), runs what
has changed, and writes this page from `tools/failures/results.json`: the status of each row, and what it measured if it
did not pass.

A row is **FAIL** if a program without sftron shows the fault in the same environment; it is "open" until there is one,
and "documented" if the library's own documentation or log says what happens, so that it is meant. The page assumes that
you want a loss over whole answers, each conversation by itself, ended and served as it was trained. A library's remedy
is in the last column.
"""


def page(results: Results) -> str:
    """Returns the page. `results` has, by the name of a release, its `cells` and its `programs`."""
    run = [each for each in RELEASES if each.name in results]
    libraries = list(dict.fromkeys(each.library for each in run))
    parts = [INTRODUCTION]
    for library in libraries:
        parts += _of_library(library, [each for each in run if each.library == library], results)
    parts += _of_mutants(run, results)
    parts.append("## Not run\n")
    parts.append("\n".join(f"- {name}: {why}." for name, why in NOT_RUN.items()) + "\n")
    return "\n".join(parts)


def status(release: Release, configuration: str, row: str, results: Results) -> str:
    """Returns "PASS", "FAIL", "SKIP", "open" for a failure that no program confirms, or "" if it was not run."""
    found = _cell(release, configuration, results).get("rows", {}).get(row, "")
    if found != "FAIL":
        return found
    shown = results[release.name]["programs"]
    return "FAIL" if any(shown.get(each.program) for each in _faults(release.library, configuration, row)) else "open"


def _is_documented(release: Release, configuration: str, row: str, results: Results) -> bool:
    """Returns whether all faults that programs confirm in a cell are documented."""
    shown = results[release.name]["programs"]
    confirmed = [each for each in _faults(release.library, configuration, row) if shown.get(each.program)]
    return all(each.is_documented for each in confirmed)


def _faults(library: str, configuration: str, row: str) -> Iterator[Fault]:
    for each in FAULTS:
        if each.library == library and configuration in each.configurations and row in each.rows:
            yield each


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(each.replace('|', chr(92) + '|') for each in row)} |" for row in rows) + "\n"


# -- one library -------------------------------------------------------------------------------------------------------


def _of_library(library: str, run: Sequence[Release], results: Results) -> list[str]:
    versions = ", ".join(f"{each.version} ({each.beside})" for each in run)
    parts = [f"## {library}\n", f"Run: {versions}.\n"]
    empty = sorted({name for each in run for name in each.empty})
    if empty:
        parts.append(f"An empty module stands for {', '.join(f'`{name}`' for name in empty)}.\n")
    named = [name for name in CONFIGURATIONS if any(_cell(each, name, results).get("rows") for each in run)]
    lines = [[_described(name, run, results), *(_word(name, row, run, results) for row in ROWS)] for name in named]
    parts.append(_table(["configuration", *ROWS], lines))
    faults = [line for each in FAULTS if each.library == library and (line := _line_of(each, run, results))]
    if faults:
        parts.append(_table(["configuration", "row and what was measured", "fails in", "what it is", "upstream",
                             "program", "how to avoid it"], faults))  # fmt: skip
    parts.append(_rest(library, run, results))
    return parts


def _cell(release: Release, configuration: str, results: Results) -> dict[str, Any]:
    return results[release.name]["cells"].get(configuration, {})


def _described(name: str, run: Sequence[Release], results: Results) -> str:
    options = [option for each in run if (option := _cell(each, name, results).get("option"))]
    return f"{CONFIGURATIONS[name]}: {options[-1]}"


def _word(name: str, row: str, run: Sequence[Release], results: Results) -> str:
    words = {each.version: status(each, name, row, results) for each in run}
    for each in run:
        if words[each.version] == "FAIL" and _is_documented(each, name, row, results):
            words[each.version] = "documented"
    found = [word for word in words.values() if word]
    shown = {"PASS": "pass", "FAIL": "**FAIL**", "SKIP": "skip"}
    if len(set(found)) == 1:
        return shown.get(found[0], found[0])
    grouped = {word: [version for version in words if words[version] == word] for word in dict.fromkeys(found)}
    return ", ".join(f"{shown.get(word, word)} {_span(versions, list(words))}" for word, versions in grouped.items())


def _span(versions: Sequence[str], all_versions: Sequence[str]) -> str:
    """Returns "1.9.0 to 1.16.0" for versions that follow each other among those run; else all of them."""
    first, last = all_versions.index(versions[0]), all_versions.index(versions[-1])
    if len(versions) == 1:
        return versions[0]
    is_span = list(all_versions[first : last + 1]) == list(versions)
    return f"{versions[0]} to {versions[-1]}" if is_span else ", ".join(versions)


def _line_of(fault: Fault, run: Sequence[Release], results: Results) -> list[str]:
    """Returns the line of a fault; empty if it was not found."""
    cells = [(name, row) for name in fault.configurations for row in fault.rows]
    failing = [each for each in run if any(status(each, name, row, results) == "FAIL" for name, row in cells)]
    if not failing:
        return []
    last = failing[-1]
    measured = dict[str, str]()
    for name, row in cells:
        if status(last, name, row, results) == "FAIL":
            measured.setdefault(row, _cell(last, name, results)["measured"][row])
    where = _span([each.version for each in failing], [each.version for each in run])
    if len(run) > 1 and len(failing) == len(run):
        where += ", all that were run"
    file = fault.program.split()[0]
    return [
        "; ".join(CONFIGURATIONS[name] for name in fault.configurations),
        "; ".join(f"{row}: {text}" for row, text in measured.items()),
        where,
        f"{fault.what} Documented." if fault.is_documented else fault.what,
        ", ".join(map(_link, fault.threads)) or "none known",
        f"[{fault.program}](../tools/failures/programs/{file}.py)",
        fault.avoid,
    ]  # fmt: skip


def _link(thread: str) -> str:
    return f"[{thread}](https://github.com/{thread.replace('#', '/issues/')})"


def _rest(library: str, run: Sequence[Release], results: Results) -> str:
    """Returns what was not run, and why rows were skipped or are open."""
    reasons: dict[str, list[str]] = {}
    for name, title in CONFIGURATIONS.items():
        whys = {each.version: _why_not(_cell(each, name, results)) for each in run}
        for why in dict.fromkeys(filter(None, whys.values())):
            versions = [version for version in whys if whys[version] == why]
            where = "" if len(versions) == len(run) else f" ({_span(versions, list(whys))})"
            reasons.setdefault(f"not run: {why}" if why != "has none" else why, []).append(f"{title}{where}")
        for row in ROWS:
            for word in ("SKIP", "open"):
                found = [each for each in run if status(each, name, row, results) == word]
                if found:
                    measured = _cell(found[-1], name, results)["measured"][row]
                    key = f"skip: {measured}" if word == "SKIP" else f"open: {row}: {measured}"
                    reasons.setdefault(key, []).append(f"{title} ({row})" if word == "SKIP" else title)
    return "\n".join(f"- {why}: {'; '.join(names)}." for why, names in sorted(reasons.items())) + "\n"


def _why_not(cell: dict[str, Any]) -> str:
    return cell.get("not_run") or cell.get("broken") or ""


# -- mutants -----------------------------------------------------------------------------------------------------------


def _of_mutants(run: Sequence[Release], results: Results) -> list[str]:
    num_passed, num_red, others = Counter[str](), Counter[str](), Counter[tuple[str, str, str]]()
    for release in run:
        for cell in results[release.name]["cells"].values():
            num_here, missed = [*cell.get("rows", {}).values()].count("PASS"), cell.get("missed", {})
            num_passed[release.library] += num_here
            num_red[release.library] += num_here - len(missed)
            others.update((row, word, _without_numbers(measured)) for row, (word, measured) in missed.items())
    total = f"{num_red.total():,} of {num_passed.total():,}"
    by_library = "; ".join(f"{name} {num_red[name]:,} of {number:,}" for name, number in num_passed.items())
    text = (
        "## What a pass is worth\n\n"
        "For each row that passed, the same trainer gets a fault of that row (`tools/failures/mutants.py`): another "
        "token, a label too many, a masked stop token, an attention mask of ones, and so on; and the row is measured "
        f"again. {total} rows that passed fail then ({by_library}). The others:\n"
    )
    lines = [[row, word, measured, f"{number:,}"] for (row, word, measured), number in sorted(others.items())]
    return [text, _table(["row", "with the fault", "measured", "rows"], lines) if lines else "none.\n"]


def _without_numbers(text: str) -> str:
    return " ".join("N" if word.replace(",", "").isdigit() else word for word in text.split())
