#!/usr/bin/env python
"""Change the code in which the laws stand, one place at a time, and see whether a test of a law fails:
`python tools/mutants.py [--number 100] [--seed 0] [--workers 2] [--seconds 60] [--again [TEST ...]]`.

A mutant is one change that cosmic-ray makes to one line: another operator, another number, a condition turned round, a
loop that never runs. The mutants are drawn by the seed from all of them. For each, the tests run that execute its line,
the nearest and shortest first, until one fails; only tests that docs/invariants.md names for a law count. A mutant that
passes them all survives, and so does one whose line none of them executes.

    coverage of the tests of the laws  ->  the tests of each line  ->  the drawn mutants  ->  results.jsonl

Needs the repository, coverage and cosmic-ray. The coverage takes as long as the tests, and is made again only if src or
tests have changed; a mutant costs seconds. What is in results.jsonl is not run again, but with `--again` those that
survived are, with the given tests alone if there are some, or for more seconds.
"""

import argparse
import ast
import difflib
import gc
import hashlib
import inspect
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

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

_LEAST_TIMEOUT, _CONTROL_TIMEOUT = 60.0, 300.0
"""The least time after which a mutant that hangs is ended, and a test without a change."""
_OPTIONS = ("-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Of pytest, in a process that has imported its plugins before."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one place.

    Attributes:
        path: The file, relative to the root.
        operator: The name of cosmic-ray's operator.
        occurrence: Which of the operator's places in the file is changed, from 0.
        line: The line of the place, from 1.
        column: Its column, from 0.
        last_line: Its last line.
    """

    path: str
    operator: str
    occurrence: int
    line: int
    column: int
    last_line: int

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line} {self.operator} #{self.occurrence}"


# -- what is changed -------------------------------------------------------------------------------------------------


def paths_of_laws() -> list[Path]:
    return sorted({path for pattern in SOURCES for path in (ROOT / "src/sftron").glob(pattern)})


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yields every mutant of a file but those that cannot change what it computes: annotations, and @dataclass(...)."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator, operator_names

    nodes, silent = list(ast_nodes(get_ast_from_path(path))), _without_effect(ast.parse(path.read_text("utf-8")))
    for name in operator_names():
        if get_operator(name).arguments():
            continue
        operator = get_operator(name)()
        places = (place for node in nodes for place in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(places):
            if not any(first <= start and end <= last for first, last in silent):
                yield Mutant(str(path.relative_to(ROOT)), name, occurrence, start[0], start[1], end[0])


Span = tuple[tuple[int, int], tuple[int, int]]
"""(line, column) of the first character of a piece of source, and of the one behind it."""


def _without_effect(tree: ast.Module) -> list[Span]:
    found = list[ast.expr | None]()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            found.append(node.returns)
        elif isinstance(node, ast.ClassDef):
            found += [each for each in node.decorator_list if "dataclass" in ast.unparse(each)]
    return [
        ((each.lineno, each.col_offset), (each.end_lineno or 0, each.end_col_offset or 0)) for each in found if each
    ]


def changed(mutant: Mutant) -> str:
    """Returns the source of the mutant's file with its change."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = (ROOT / mutant.path).read_text(encoding="utf-8")
    result = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
    assert result is not None, mutant.name
    return result


# -- which tests execute a line --------------------------------------------------------------------------------------


def files_of_laws() -> list[str]:
    """Returns the test files that docs/invariants.md names, itself or through a test's name."""
    page = (ROOT / "docs/invariants.md").read_text(encoding="utf-8")
    paths, names = set(re.findall(r"`(tests/[\w/]+(?:\.py|/))`", page)), set(re.findall(r"`(test_\w+)`", page))
    found = {str(path.relative_to(ROOT)) for each in paths for path in _test_files(ROOT / each)}
    for path in (ROOT / "tests").rglob("test_*.py"):
        if names & set(re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))):
            found.add(str(path.relative_to(ROOT)))
    return sorted(found)


def _test_files(path: Path) -> list[Path]:
    return sorted(path.glob("test_*.py")) if path.is_dir() else [path]


class Durations:
    """A plugin of pytest: the seconds of each test that passes, also of those that run in workers."""

    def __init__(self) -> None:
        self.seconds = dict[str, float]()
        self.failed = set[str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self.failed.add(report.nodeid)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which tests execute each line of a file, and how long each takes. Tests that did not pass are left out."""

    tests: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]
    most_seconds: float = 60.0
    """Of the tests of one mutant."""
    given: Sequence[str] = ()
    """Tests that stand for those of each line."""

    def chosen(self, mutant: Mutant) -> list[str]:
        """Returns the tests of the mutant's lines up to `most_seconds` together: those of the nearest test files first,
        and of these the shortest of each file.

        Lines that run at import have none of their own: the tests of the whole file stand for them.
        """
        if self.given:
            return list(self.given)
        lines = self.tests.get(mutant.path, {})
        found = {test for line in range(mutant.line, mutant.last_line + 1) for test in lines.get(line, ())}
        if not found and mutant.line in lines:
            found = {test for tests in lines.values() for test in tests}
        by_file = defaultdict[str, list[str]](list)
        for test in sorted(found, key=self.seconds.__getitem__):
            by_file[test.partition("::")[0]].append(test)
        turns = sorted(
            (_distance(mutant.path, file), number, self.seconds[test], test)
            for file, tests in by_file.items()
            for number, test in enumerate(tests)
        )
        chosen, total = list[str](), 0.0
        for *_, seconds, test in turns:
            if chosen and total + seconds > self.most_seconds:
                break
            chosen.append(test)
            total += seconds
        return chosen


def _distance(path: str, test_file: str) -> int:
    """Returns 0 if a module and a test file have a package and a word of their names in common, 1 if a package."""
    module, tests = Path(path).relative_to("src/sftron"), Path(test_file).relative_to("tests")
    if module.parts[0] != tests.parts[0]:
        return 2
    return 0 if set(module.stem.split("_")) & set(tests.stem.split("_")) else 1


def measure_coverage(folder: Path, workers: int) -> Coverage:
    """Runs the tests of the laws once, unless their and the sources' bytes are those of the last time."""
    import coverage
    import pytest

    tracked = subprocess.run(["git", "ls-files", "-s", "src", "tests"], cwd=ROOT, capture_output=True, check=True)
    changes = subprocess.run(["git", "diff", "HEAD", "src", "tests"], cwd=ROOT, capture_output=True, check=True)
    state = hashlib.sha256(tracked.stdout + changes.stdout).hexdigest()
    cache = folder / "coverage.json"
    if cache.exists() and (cached := json.loads(cache.read_text(encoding="utf-8")))["state"] == state:
        return Coverage(_with_line_numbers(cached["tests"]), cached["seconds"])
    durations, data_file = Durations(), folder / ".coverage"
    rc = folder / "coveragerc"
    rc.write_text(f"[run]\nsource = {ROOT / 'src/sftron'}\npatch =\n    fork\n    _exit\nparallel = true\n", "utf-8")
    os.environ["COVERAGE_FILE"] = str(data_file)
    options = ["-q", "-p", "no:cacheprovider", "--cov", f"--cov-config={rc}", "--cov-context=test", "--cov-report="]
    pytest.main([*options, "-n", str(workers), "--dist", "loadfile", *files_of_laws()], plugins=[durations])
    data = coverage.CoverageData(str(data_file))
    data.read()
    passed = set(durations.seconds) - durations.failed
    tests = dict[str, dict[int, list[str]]]()
    for path in paths_of_laws():
        lines = data.contexts_by_lineno(str(path))
        tests[str(path.relative_to(ROOT))] = {
            line: sorted({name.partition("|")[0] for name in contexts} & passed) for line, contexts in lines.items()
        }
    found = {"state": state, "tests": tests, "seconds": {name: durations.seconds[name] for name in sorted(passed)}}
    cache.write_text(json.dumps(found), encoding="utf-8")
    return Coverage(_with_line_numbers(found["tests"]), found["seconds"])


def _with_line_numbers(tests: dict[str, dict[Any, list[str]]]) -> dict[str, dict[int, list[str]]]:
    return {path: {int(line): names for line, names in lines.items()} for path, lines in tests.items()}


# -- running ---------------------------------------------------------------------------------------------------------


def copy_of_repository(folder: Path) -> Path:
    """Returns a copy of the tracked files, whose compiled modules are checked by the sources' bytes, not by times."""
    shutil.rmtree(folder, ignore_errors=True)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    if (ROOT / "models").exists():
        (folder / "models").symlink_to(ROOT / "models")
    command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "src"]
    subprocess.run(command, cwd=folder, check=True)
    return folder


def preload() -> None:
    """Imports the libraries of the tests, and nothing of sftron's models: a mutant's process is forked from this one.

    sftron itself is imported by the mutant's process, from its own copy.
    """
    os.environ |= {"TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    # The tests use one thread then. A pool of threads does not survive a fork.
    os.environ["PYTEST_XDIST_WORKER"] = "mutants"
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import torch.distributed
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.set_num_threads(1)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sftron"]:
        del sys.modules[name]


Codes = dict[tuple[str, int], CodeType]
"""Code objects by their qualified name and first line."""


def codes_of(source: str, path: Path) -> tuple[Codes, list[object]]:
    """Returns the code of all functions of a module, and what the bodies of the module and of its classes execute."""
    functions, bodies = Codes(), list[object]()

    def read(code: CodeType) -> None:
        inner = [each for each in code.co_consts if isinstance(each, CodeType)]
        if code.co_flags & inspect.CO_OPTIMIZED:
            functions[code.co_qualname, code.co_firstlineno] = code
        else:
            values = [(type(each), each) for each in code.co_consts if not isinstance(each, CodeType)]
            bodies.append((code.co_qualname, code.co_code, code.co_names, values))
        for each in inner:
            read(each)

    read(compile(source, path, "exec"))
    return functions, bodies


def codes_to_replace(mutant: Mutant, copy: Path) -> Codes | None:
    """Returns the code of the functions that a mutant changes; None if it changes what is executed at import."""
    path = copy / mutant.path
    functions, bodies = codes_of((ROOT / mutant.path).read_text(encoding="utf-8"), path)
    new_functions, new_bodies = codes_of(changed(mutant), path)
    if bodies != new_bodies or functions.keys() != new_functions.keys():
        return None
    return {key: code for key, code in new_functions.items() if code != functions[key]}


def functions_of(copy: Path) -> list[FunctionType]:
    """Returns all functions of this process whose source is in the copy, wherever they are held."""
    functions = (each for each in gc.get_objects() if isinstance(each, FunctionType))
    return [each for each in functions if each.__code__.co_filename.startswith(f"{copy / 'src'}")]


def with_new_code(functions: Iterable[FunctionType], codes: Codes) -> dict[FunctionType, CodeType]:
    """Returns the functions that a mutant changes, each with its new code."""
    (path,) = {code.co_filename for code in codes.values()}
    of_file = (each for each in functions if each.__code__.co_filename == path)
    keys = {each: (each.__code__.co_qualname, each.__code__.co_firstlineno) for each in of_file}
    return {each: codes[key] for each, key in keys.items() if key in codes}


def replace_codes(new: dict[FunctionType, CodeType]) -> None:
    for function, code in new.items():
        function.__code__ = code


def import_all(copy: Path, tests: Iterable[str]) -> None:
    """Imports sftron and tests from a copy, so that forks of this process need not."""
    _enter(copy)
    import pytest

    output = os.open(os.devnull, os.O_WRONLY)
    kept = os.dup(1)
    os.dup2(output, 1)
    status = pytest.main(["--collect-only", *_OPTIONS, *sorted(tests)])
    os.dup2(kept, 1)
    assert status == pytest.ExitCode.OK, f"the tests of the laws cannot be collected: {status}"


def _enter(copy: Path) -> None:
    os.chdir(copy)
    sys.path.insert(0, str(copy / "src"))
    os.environ |= {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1", "CI": "1"}
    sys.dont_write_bytecode = True


def run_in_fork(
    folder: Path, tests: list[str], timeout: float, replaces: Callable[[], None] | None = None
) -> tuple[str, str]:
    """Runs tests in a copy until one fails; returns "killed" or "survived", and what killed it.

    Args:
        replaces: Called in the fork of a process that has imported the copy; None if it has not, so that the fork does.
    """
    report = folder / "mutant.json"
    report.unlink(missing_ok=True)
    process = os.fork()
    if process == 0:
        try:
            _run_tests(folder, tests, report, replaces)
        finally:
            os._exit(1)
    ends, has_ended = time.monotonic() + timeout, False
    while time.monotonic() < ends and not has_ended:
        has_ended = bool(os.waitpid(process, os.WNOHANG)[0])
        time.sleep(0.02)
    with suppress(ProcessLookupError):  # nothing is left
        os.killpg(process, signal.SIGKILL)
    if not has_ended:
        os.waitpid(process, 0)
        return "killed", "a test did not end"
    if not report.exists():
        return "killed", "the process of the tests ended"
    found = json.loads(report.read_text(encoding="utf-8"))
    if found["failed"]:
        return "killed", found["failed"][0]
    return ("survived", "") if found["status"] == 0 else ("killed", "the tests cannot be imported")


def _run_tests(folder: Path, tests: list[str], report: Path, replaces: Callable[[], None] | None) -> None:
    os.setsid()
    output = os.open(report.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if replaces is None:
        _enter(folder)
    else:
        replaces()
    import pytest

    durations = Durations()
    status = pytest.main(["-x", *_OPTIONS, *tests], plugins=[durations])
    report.write_text(json.dumps({"status": int(status), "failed": sorted(durations.failed)}), encoding="utf-8")


def run_mutants(mutants: Sequence[Mutant], coverage: Coverage, folder: Path, results: Path) -> None:
    """Runs mutants one after another in one copy of the repository, and appends a line for each.

    Those that change what is executed at import come first. Then everything is imported, once for all others.
    """
    copy = copy_of_repository(folder)
    codes = {mutant: codes_to_replace(mutant, copy) for mutant in mutants}
    functions = list[FunctionType]()
    for mutant in sorted(mutants, key=lambda mutant: codes[mutant] is not None):
        new = codes[mutant]
        if new is not None and not functions:
            import_all(copy, {test.partition("::")[0] for each in mutants for test in coverage.chosen(each)})
            gc.collect()
            functions = functions_of(copy)
            gc.freeze()  # what is imported stays shared between the forks
        started, tests = time.monotonic(), coverage.chosen(mutant)
        outcome, by, replaces = "uncovered", "", None
        if new == {}:
            outcome, by, tests = "survived", "it is the same code", []
        elif new is not None:
            replaces = partial(replace_codes, new_code := with_new_code(functions, new))
            tests = tests if new_code else []  # no test holds a function of it
        while tests:
            original = (ROOT / mutant.path).read_text(encoding="utf-8")
            (copy / mutant.path).write_text(changed(mutant), encoding="utf-8")
            seconds = sum(coverage.seconds.get(test, coverage.most_seconds) for test in tests)
            outcome, by = run_in_fork(copy, tests, max(_LEAST_TIMEOUT, 5 * seconds), replaces)
            (copy / mutant.path).write_text(original, encoding="utf-8")
            # A test that also fails without the change kills nothing.
            control = by if by in tests else tests[0]
            if outcome == "survived" or _passes(copy, control, has_imported=new is not None):
                break
            tests.remove(control)
        line = {"name": mutant.name, **asdict(mutant), "change": difference(mutant), "outcome": outcome, "by": by}
        line |= {"tests": len(tests), "seconds": round(time.monotonic() - started, 1)}
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@cache
def _passes(copy: Path, test: str, *, has_imported: bool) -> bool:
    outcome, by = run_in_fork(copy, [test], _CONTROL_TIMEOUT, (lambda: None) if has_imported else None)
    assert outcome == "survived" or by == test, f"without a change, {test}: {by}"
    return outcome == "survived"


def difference(mutant: Mutant) -> list[str]:
    """Returns the changed lines, those before with "-" and those after with "+"."""
    before = (ROOT / mutant.path).read_text(encoding="utf-8").splitlines()
    lines = difflib.unified_diff(before, changed(mutant).splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


Places = dict[tuple[str, int, int], list[Mutant]]
"""The mutants of each place: (path, line, column)."""


def all_places() -> Places:
    places = defaultdict[tuple[str, int, int], list[Mutant]](list)
    for mutant in (mutant for path in paths_of_laws() for mutant in mutants_of(path)):
        places[mutant.path, mutant.line, mutant.column].append(mutant)
    return places


def drawn(places: Places, number: int, seed: int) -> list[Mutant]:
    """Returns mutants drawn by the seed, each of another place; a larger number adds to a smaller one.

    Places are drawn and then one mutant of each, as a `+` has a dozen and a condition has two.
    """
    draw = random.Random(seed)
    chosen = (draw.choice(places[place]) for place in draw.sample(sorted(places), len(places)))
    return list(islice(filter(_is_python, chosen), number))


def _is_python(mutant: Mutant) -> bool:
    """Returns whether cosmic-ray can make the mutant, and it is no change of a `*` before keywords to a `&`."""
    try:
        compile(changed(mutant), mutant.path, "exec")
    except (AttributeError, SyntaxError):
        return False
    return True


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {line["name"]: line for line in lines}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=100, metavar="N", help="how many mutants are drawn")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/mutants", metavar="DIR")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of the tests of one mutant")
    parser.add_argument("--again", nargs="*", metavar="TEST", help="run what survived again, with these tests alone")
    options = parser.parse_args(arguments)
    if options.number < 1:
        parser.error(f"--number {options.number}: wanted at least 1, as no mutant shows nothing")
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    places, path = all_places(), options.folder / "results.jsonl"
    mutants, known = drawn(places, options.number, options.seed), read_results(path)
    counts = {"seed": options.seed, "number": len(mutants), "places": len(places), "files": len(paths_of_laws())}
    counts["seconds"] = options.seconds
    head = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    counts |= {"mutants": sum(map(len, places.values())), "commit": head.stdout.strip()}
    (options.folder / "drawn.json").write_text(json.dumps(counts), encoding="utf-8")
    show("{mutants:,} mutants of {places:,} places in {files} files; seed {seed}".format(**counts))
    missing = [each for each in mutants if each.name not in known]
    if options.again is not None:
        missing = [each for each in mutants if known.get(each.name, {"outcome": "killed"})["outcome"] != "killed"]
    coverage = Coverage({}, {}) if options.again else measure_coverage(options.folder, options.workers)
    coverage = replace(coverage, most_seconds=options.seconds, given=options.again or ())
    preload()
    workers = []
    for number in range(options.workers):
        if (process := os.fork()) == 0:
            run_mutants(missing[number :: options.workers], coverage, options.folder / f"copy-{number}", path)
            os._exit(0)
        workers.append(process)
    for process in workers:
        _, status = os.waitpid(process, 0)
        assert status == 0, "a worker failed"
    known = read_results(path)
    found = [known[mutant.name] for mutant in mutants if mutant.name in known]
    alive = [each for each in found if each["outcome"] != "killed"]
    for each in alive:
        show(f"{each['outcome']}  {each['name']}")
        for line in each["change"]:
            show(f"    {line}")
    show(f"{len(found) - len(alive)} of {len(found)} mutants killed ({1 - len(alive) / max(1, len(found)):.1%})")
    return 0 if len(found) == len(mutants) else 1


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
