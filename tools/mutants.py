#!/usr/bin/env python
"""Change the code in which the laws stand, one place at a time, and print what no test of a law notices:
`python tools/mutants.py [--number 100] [--seed 0]`.

A mutant is one change that cosmic-ray makes to one line: another operator, another number, a negated condition, a loop
that never runs. The seed draws mutants from all of them. For each, the tests run that execute its line, its package's
and the shortest first, until one fails; only tests of the files that docs/invariants.md names for a law count. A mutant
that passes them all survives, and so does a mutant whose line none of them executes. First all tests of the laws run,
unless src and tests are those of the last time, which shows what each executes. Needs pytest-cov and cosmic-ray.
"""

import argparse
import ast
import difflib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from sftron.commands.arguments import positive
from sftron.errors import exit_with, show

ROOT = Path(__file__).parents[1]
SOURCES = (
    *("data/labels.py", "data/packing.py", "data/prepare.py", "data/lanes/*.py", "data/chat/*.py"),
    *("models/loss.py", "models/attention*.py", "models/delta*.py", "models/*rout*.py", "models/experts*.py"),
    *("models/adapters.py", "models/context*.py", "models/linear.py", "models/llama.py"),
    *("train/step.py", "train/progress.py", "train/run.py", "train/resume.py", "train/saving.py"),
    "checkpoint/*.py",
)
"""The files of src/sftron in which the laws stand."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one place: the `occurrence`th (from 0) of the places that an operator of cosmic-ray finds."""

    path: str
    operator: str
    occurrence: int
    line: int
    column: int
    last_line: int


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yields every mutant of a file but those that cannot change what it computes: annotations, and @dataclass(...)."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator, operator_names

    silent = list[Any]()
    for node in ast.walk(ast.parse(path.read_bytes())):
        silent += filter(None, (getattr(node, name, None) for name in ("annotation", "returns")))
        silent += [each for each in getattr(node, "decorator_list", ()) if "dataclass" in ast.unparse(each)]
    spans = [((each.lineno, each.col_offset), (each.end_lineno, each.end_col_offset)) for each in silent]
    nodes = list(ast_nodes(get_ast_from_path(path)))
    for name in (name for name in operator_names() if not get_operator(name).arguments()):
        operator = get_operator(name)()
        places = (place for node in nodes for place in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(places):
            if not any(first <= start and end <= last for first, last in spans):
                yield Mutant(str(path.relative_to(ROOT)), name, occurrence, start[0], start[1], end[0])


def changed(mutant: Mutant) -> str:
    """Returns the source of the mutant's file with its change."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = (ROOT / mutant.path).read_text(encoding="utf-8")
    result = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
    assert result is not None, mutant
    return result


def difference(mutant: Mutant) -> list[str]:
    """Returns the changed lines, those before with "-" and those after with "+"."""
    before = (ROOT / mutant.path).read_text(encoding="utf-8").splitlines()
    lines = difflib.unified_diff(before, changed(mutant).splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def all_places() -> dict[tuple[str, int, int], list[Mutant]]:
    """Returns the mutants of each place: (path, line, column)."""
    places = defaultdict[tuple[str, int, int], list[Mutant]](list)
    for path in sorted({path for pattern in SOURCES for path in (ROOT / "src/sftron").glob(pattern)}):
        for mutant in mutants_of(path):
            places[mutant.path, mutant.line, mutant.column].append(mutant)
    return places


def drawn(places: dict[tuple[str, int, int], list[Mutant]], number: int, seed: int) -> list[Mutant]:
    """Returns mutants drawn by the seed, each of another place; a larger number adds to a smaller one.

    Places are drawn and then one mutant of each, as a `+` has a dozen and a condition has two.
    """
    draw, found = random.Random(seed), list[Mutant]()
    for place in draw.sample(sorted(places), len(places)):
        mutant = draw.choice(places[place])
        with suppress(AttributeError, SyntaxError):  # such as a `*` before keywords that became a `&`
            compile(changed(mutant), mutant.path, "exec")
            found.append(mutant)
        if len(found) == number:
            break
    return found


def files_of_laws() -> list[str]:
    """Returns the test files that docs/invariants.md names, itself, by their folder or through a test's name."""
    named = set(re.findall(r"`(tests?[_/][\w/.]+)`", (ROOT / "docs/invariants.md").read_text(encoding="utf-8")))
    return sorted(
        str(path)
        for path in (each.relative_to(ROOT) for each in (ROOT / "tests").rglob("test_*.py"))
        if named & {str(path), f"{path.parent}/", *re.findall(r"def (test_\w+)", (ROOT / path).read_text("utf-8"))}
    )


class Durations:
    """A plugin of pytest: the seconds of each test, also of tests in workers, and which ones did not pass."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        self.failed = set[str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which tests execute each line of a file (the line as text, for JSON), and how many seconds each takes."""

    tests: dict[str, dict[str, list[str]]]
    seconds: dict[str, float]

    def chosen(self, mutant: Mutant, most_seconds: float = 60.0) -> list[str]:
        """Returns the tests of the mutant's lines, or of the whole file for a line that runs at import, up to
        `most_seconds` together: those of its package first, and of these the shortest."""
        lines = self.tests.get(mutant.path, {})
        found = {test for line in range(mutant.line, mutant.last_line + 1) for test in lines.get(str(line), ())}
        if not found and str(mutant.line) in lines:
            found = {test for tests in lines.values() for test in tests}
        package = mutant.path.split("/")[2]
        tests = sorted(found, key=lambda test: (not test.startswith(f"tests/{package}/"), self.seconds[test]))
        totals = accumulate(self.seconds[test] for test in tests)
        return [test for test, total in zip(tests, totals, strict=True) if test == tests[0] or total <= most_seconds]


def measure_coverage(folder: Path) -> Coverage:
    """Runs the tests of the laws once, unless their and the sources' bytes are those of the last time."""
    import coverage
    import pytest

    paths = sorted(path for name in ("src", "tests") for path in (ROOT / name).rglob("*.py"))
    digest = hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in paths)).hexdigest()
    known = folder / f"coverage-{digest[:16]}.json"
    if known.exists():
        return Coverage(*json.loads(known.read_text(encoding="utf-8")))
    durations, settings = Durations(), folder / "coveragerc"
    settings.write_text(f"[run]\nsource = {ROOT}/src/sftron\npatch = fork, _exit\nparallel = true\n", encoding="utf-8")
    os.environ["COVERAGE_FILE"] = str(folder / ".coverage")
    os.chdir(ROOT)
    options = ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    pytest.main(["-q", "-nauto", "--dist=loadfile", *options, *files_of_laws()], plugins=[durations])
    data, passed = coverage.CoverageData(str(folder / ".coverage")), set(durations.seconds) - durations.failed
    assert passed, "the tests of the laws cannot be run"
    data.read()
    tests = defaultdict[str, dict[str, list[str]]](dict)
    for path in data.measured_files():
        for line, names in data.contexts_by_lineno(path).items():
            found = {name.partition("|")[0] for name in names}
            tests[str(Path(path).relative_to(ROOT))][str(line)] = sorted(found & passed)
    known.write_text(json.dumps([tests, {test: durations.seconds[test] for test in passed}]), encoding="utf-8")
    return Coverage(tests, durations.seconds)


def copy_repository(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    (folder / "models").symlink_to(ROOT / "models")


def pass_all(copy: Path, tests: Sequence[str], timeout: float) -> bool:
    """Runs tests in a copy of the repository until one fails; returns whether all passed in the time."""
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *tests]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CI": "1"}
    environment = os.environ | offline | {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            return process.wait(timeout) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):  # nothing is left
                os.killpg(process.pid, signal.SIGKILL)


def survives(mutant: Mutant, tests: Sequence[str], copy: Path, timeout: float) -> bool:
    """Returns whether a mutant passes its tests. Tests that fail without the change too kill nothing."""
    path = copy / mutant.path
    original = path.read_text(encoding="utf-8")
    path.write_text(changed(mutant), encoding="utf-8")
    survived = not tests or pass_all(copy, tests, timeout)
    path.write_text(original, encoding="utf-8")
    return survived or not pass_all(copy, tests, timeout)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=positive, default=100, metavar="N", help="how many mutants are drawn")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw")
    options, folder, copy = parser.parse_args(arguments), ROOT / "build/mutants", ROOT / "build/mutants/copy"
    folder.mkdir(parents=True, exist_ok=True)
    places, alive = all_places(), list[Mutant]()
    show(f"{sum(map(len, places.values())):,} mutants of {len(places):,} places; seed {options.seed}")
    coverage, mutants = measure_coverage(folder), drawn(places, options.number, options.seed)
    copy_repository(copy)
    for mutant in mutants:
        tests = coverage.chosen(mutant)
        if survives(mutant, tests, copy, 60 + 5 * sum(coverage.seconds[test] for test in tests)):
            alive.append(mutant)
            show("\n    ".join([f"{mutant.path}:{mutant.line} {mutant.operator}", *difference(mutant)]))
    show(f"{len(mutants) - len(alive)} of {len(mutants)} mutants killed ({1 - len(alive) / len(mutants):.1%})")
    return 0


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
