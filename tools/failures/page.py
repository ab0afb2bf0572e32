"""docs/silent-failures.md, from the results alone: no time, no path, and everything in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tools.failures.differences import Explained, section
from tools.failures.known_failures import KNOWN_FAILURES, Failure
from tools.failures.releases import CONFIGURATIONS, NOT_RUN, RELEASES, Release

ROWS = (
    "ids", "trained tokens", "stop tokens", "isolation", "positions", "truncation", "loss", "gradients",
    "padding", "forgery", "adapters", "generation",
)  # fmt: skip
Results = dict[str, Any]

INTRODUCTION = """\
# Silent failures

Which standard configurations of which releases fail which row of [`verify_trainer`](verify-any-trainer.md), and since
when. Each runs with the same few conversations, a random model of two layers, in float32 on a CPU; torch is the same
for all. `python tools/failure_index.py` makes an environment for each release (`tools/failures/releases.py`), runs what
has changed, and writes this page from `tools/failures/results.json`: the status of each row, and what it measured if it
did not pass. What [changes between two releases](#what-changes-between-two-releases) is from `differences.json`.

A row is **FAIL** if a program without sftron shows the fault in the same environment; it is "open" until there is one,
and "documented" if the library's own documentation or log says what happens, so that it is meant. The page assumes that
you want a loss over whole answers, each conversation by itself, ended and served as it was trained. A library's remedy
is in the last column.
"""
_FAULT_COLUMNS = ("configuration", "row and what was measured", "fails in", "what it is", "upstream", "program",
                  "how to avoid it")  # fmt: skip
_WORDS = {"PASS": "pass", "FAIL": "**FAIL**", "SKIP": "skip"}


def page(results: Results, differences: Mapping[str, Mapping[str, Explained]] | None = None) -> str:
    """Returns the page.

    Args:
        results: By the name of a release, its `cells` and its `programs`.
        differences: By the names of two releases, what differs in each configuration.
    """
    run = [each for each in RELEASES if each.name in results]
    parts = [INTRODUCTION]
    for library in dict.fromkeys(each.library for each in run):
        parts += _of_library(library, [each for each in run if each.library == library], results)
    parts += [
        *section(differences or {}),
        *_of_mutants(run, results),
        "## Not run\n",
        *(f"- {name}: {why}." for name, why in NOT_RUN.items()),
    ]
    return "\n".join(parts) + "\n"


def status(release: Release, configuration: str, row: str, results: Results) -> str:
    """Returns "PASS", "FAIL", "documented", "SKIP", "open" for a failure that no program confirms, or "" if not run."""
    cell = _cell(release, configuration, results)
    found = cell.get("rows", {}).get(row, "")
    if found != "FAIL":
        return found
    shown = results[release.name]["programs"]
    confirmed = [
        each.is_documented
        for each in KNOWN_FAILURES
        if (each.library, True) == (release.library, shown.get(each.program))
        and configuration in each.configurations
        and row in each.rows
        and has_found(each, cell)
    ]
    return "open" if not confirmed else "documented" if all(confirmed) else "FAIL"


def has_found(failure: Failure, cell: dict[str, Any]) -> bool:
    """Returns whether a report found the fault in one of its rows; what was measured without faults may have."""
    faults = cell.get("faults")
    return faults is None or any(failure.fault.name in faults.get(row, ()) for row in failure.rows)


def _cell(release: Release, configuration: str, results: Results) -> dict[str, Any]:
    return results[release.name]["cells"].get(configuration, {})


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(each.replace('|', chr(92) + '|') for each in row)} |" for row in rows) + "\n"


def _of_library(library: str, run: Sequence[Release], results: Results) -> list[str]:
    parts = [f"## {library}\n", f"Run: {', '.join(f'{each.version} ({each.beside})' for each in run)}.\n"]
    if empty := sorted({name for each in run for name in each.empty}):
        parts.append(f"An empty module stands for {', '.join(f'`{name}`' for name in empty)}.\n")
    lines = list[list[str]]()
    for name, title in CONFIGURATIONS.items():
        cells = [cell for each in run if (cell := _cell(each, name, results)).get("rows")]
        if cells:
            words = [{each.version: status(each, name, row, results) for each in run} for row in ROWS]
            lines.append([f"{title}: {cells[-1]['option']}", *map(_spans, words)])
    parts.append(_table(["configuration", *ROWS], lines))
    if faults := [
        line for each in KNOWN_FAILURES if each.library == library and (line := _line_of(each, run, results))
    ]:
        parts.append(_table(_FAULT_COLUMNS, faults))
    return [*parts, _rest(run, results)]


def _spans(words: dict[str, str]) -> str:
    """Returns the word of all versions that have one, or each word with its versions."""
    found = list(dict.fromkeys(filter(None, words.values())))
    if len(found) == 1:
        return _WORDS.get(found[0], found[0])
    grouped = {word: [version for version in words if words[version] == word] for word in found}
    return ", ".join(f"{_WORDS.get(word, word)} {_span(versions, list(words))}" for word, versions in grouped.items())


def _span(versions: Sequence[str], all_versions: Sequence[str]) -> str:
    """Returns "1.9.0 to 1.16.0" for versions that follow each other among those run; else all of them."""
    first, last = all_versions.index(versions[0]), all_versions.index(versions[-1])
    is_span = len(versions) > 1 and list(all_versions[first : last + 1]) == list(versions)
    return f"{versions[0]} to {versions[-1]}" if is_span else ", ".join(versions)


def _line_of(failure: Failure, run: Sequence[Release], results: Results) -> list[str]:
    """Returns the line of a failure; empty if it was not found."""
    measured, failing = dict[str, str](), list[str]()
    for release in run:
        cells = [(name, row) for name in failure.configurations for row in failure.rows]
        failed = [each for each in cells if status(release, *each, results) in ("FAIL", "documented")]
        if failed:
            failing.append(release.version)
            measured = {row: _cell(release, name, results)["measured"][row] for name, row in reversed(failed)}
    if not failing:
        return []
    where = _span(failing, [each.version for each in run])
    links = [f"[{each}](https://github.com/{each.replace('#', '/issues/')})" for each in failure.threads]
    return [
        "; ".join(CONFIGURATIONS[name] for name in failure.configurations),
        "; ".join(f"{row}: {measured[row]}" for row in failure.rows if row in measured),
        where + (", all that were run" if len(run) > 1 and len(failing) == len(run) else ""),
        f"{failure.what} Documented." if failure.is_documented else failure.what,
        ", ".join(links) or "none known",
        f"[{failure.program}](../tools/failures/programs/{failure.program.split()[0]}.py)",
        failure.avoid,
    ]


def _rest(run: Sequence[Release], results: Results) -> str:
    """Returns what was not run, and why rows were skipped or are open."""
    reasons: dict[str, list[str]] = {}
    for name, title in CONFIGURATIONS.items():
        cells = {each.version: _cell(each, name, results) for each in run}
        whys = {version: cell.get("not_run") or cell.get("broken") or "" for version, cell in cells.items()}
        for why in dict.fromkeys(filter(None, whys.values())):
            versions = [version for version in whys if whys[version] == why]
            where = "" if len(versions) == len(run) else f" ({_span(versions, list(whys))})"
            reasons.setdefault(f"not run: {why}" if why != "has none" else why, []).append(f"{title}{where}")
        for row in ROWS:
            last = {status(each, name, row, results): _cell(each, name, results) for each in run}
            if "SKIP" in last:
                reasons.setdefault(f"skip: {last['SKIP']['measured'][row]}", []).append(f"{title} ({row})")
            if "open" in last:
                reasons.setdefault(f"open: {row}: {last['open']['measured'][row]}", []).append(title)
    return "\n".join(f"- {why}: {'; '.join(names)}." for why, names in sorted(reasons.items())) + "\n"


def _of_mutants(run: Sequence[Release], results: Results) -> list[str]:
    num_passed, num_red, others = Counter[str](), Counter[str](), Counter[tuple[str, str, str]]()
    for release in run:
        for cell in results[release.name]["cells"].values():
            missed = cell.get("missed", {})
            num_here = [*cell.get("rows", {}).values()].count("PASS") - len(cell.get("without_mutant", {}))
            num_passed[release.library] += num_here
            num_red[release.library] += num_here - len(missed)
            for row, (word, measured) in missed.items():
                words = ["N" if each.replace(",", "").isdigit() else each for each in measured.split()]
                others[row, word, " ".join(words)] += 1
    by_library = "; ".join(f"{name} {num_red[name]:,} of {number:,}" for name, number in num_passed.items())
    text = (
        "## What a pass is worth\n\n"
        "For each row that passed, the same trainer gets a fault of that row (`tools/failures/mutants.py`): another "
        "token, a label too many, a masked stop token, an attention mask of ones, and so on; and the row is measured "
        f"again. {num_red.total():,} of {num_passed.total():,} rows that passed fail then ({by_library}). The others:\n"
    )
    lines = [[row, word, measured, f"{number:,}"] for (row, word, measured), number in sorted(others.items())]
    return [text, _table(["row", "with the fault", "measured", "rows"], lines) if lines else "none.\n"]
