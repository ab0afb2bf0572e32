"""Which standard configurations of which releases of other trainers fail which row of verify_trainer, and since when.

    python tools/failure_index.py                                   # everything that has changed, then the page
    python tools/failure_index.py --only trl-1.16.0 --configurations packing lora
    python tools/failure_index.py --differences                     # records of two releases, compared by sftron diff
    python tools/failure_index.py --page                            # the page alone, from tools/failures/*.json

Makes one environment for each release (tools/failures/releases.py) and runs each configuration in a process of its own.
Only the pinned packages are installed, without what they require: torch and all others are those of the environment
that runs this. Then the programs of tools/failures/programs, which do without sftron, confirm each failure in the
environments in which it was found. Needs uv and a network, for environments that do not exist yet.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from sftron.errors import show
from tools.failures.differences import Explained, explained
from tools.failures.known_failures import KNOWN_FAILURES
from tools.failures.page import page
from tools.failures.releases import COMPARED, CONFIGURATIONS, OLD, RELEASES, Release

ROOT = Path(__file__).parents[1]
FAILURES = ROOT / "tools" / "failures"
PROGRAMS, RESULTS, PAGE = FAILURES / "programs", FAILURES / "results.json", ROOT / "docs" / "silent-failures.md"
DIFFERENCES = FAILURES / "differences.json"
QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DO_NOT_TRACK": "1"}
SECONDS = 600
"""The most that one program may take."""
SHARED = ("materials.py", "capture.py", "mutants.py", "cells.py")


def environment(release: Release, folder: Path) -> Path:
    """Returns the Python of the release, in an environment that is made unless there is one with the same pins."""
    home = folder / release.name
    python, record = home / "bin" / "python", home / "pins.txt"
    wanted = "\n".join([sys.version, *release.pins, *release.empty, *release.for_newer_python])
    if record.exists() and record.read_text(encoding="utf-8") == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    uv = shutil.which("uv") or str(Path(sys.executable).parent / "uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(home)], check=True)
    # Nothing that is required: a resolver might choose another build of torch, which is a download of gigabytes.
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--python", str(python)]
    subprocess.run([*install, *release.pins], check=True)
    if release.for_newer_python:
        subprocess.run([*install, "--python-version", "3.12", *release.for_newer_python], check=True)
    packages = next(home.glob("lib/python3*/site-packages"))
    # Searched after the environment itself.
    (packages / "tools.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    for name in release.empty:
        (packages / f"{name}.py").write_text(f'"""Stands for {name}, which is not needed here."""\n', encoding="utf-8")
    record.write_text(wanted, encoding="utf-8")
    return python


def cells(
    python: Path | str, module: str, names: Sequence[str], program: Sequence[str] = ("tools.failures.cells",)
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the result of each configuration of tools/failures/MODULE.py in an environment, as soon as it is there.

    Args:
        program: What prints the results, with its first arguments.

    Raises:
        RuntimeError: The library cannot be imported.
    """
    command = [str(python), "-m", *program, module, *names]
    environ = os.environ | QUIET | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
        subprocess.Popen(command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        for line in process.stdout or ():
            if line.startswith('{"configuration": '):
                found = json.loads(line)
                yield found["configuration"], found["result"]
        if process.wait():
            errors.seek(0)
            raise RuntimeError(errors.read()[-2000:])


def shows(python: Path | str, program: str) -> bool:
    """Returns whether a program, with its argument, shows its fault; raises RuntimeError if it could not be run."""
    file, *arguments = program.split()
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), str(PROGRAMS / f"{file}.py"), *arguments]
    ended = subprocess.run(command, env=environ | QUIET, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    if ended.returncode not in (0, 1) or "Traceback (most recent call last)" in ended.stderr:
        raise RuntimeError(f"{program}: ended with {ended.returncode}\n{ended.stderr[-2000:]}")
    return ended.returncode == 1


def _hash(*paths: Path) -> str:
    """Returns a digest of the files: of sources, without their comments and their layout."""
    texts = [(path.suffix, path.read_text(encoding="utf-8")) for path in paths]
    parts = [ast.dump(ast.parse(text)) if suffix == ".py" else text for suffix, text in texts]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _known(path: Path, key: str) -> Any:
    """Returns what was stored for the same key, or None."""
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return stored["result"] if stored.get("key") == key else None


def _store(path: Path, key: str, result: Any, told: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"key": key, "result": result}), encoding="utf-8")
    show(f"{path.parents[1].name:24} {path.stem:40} {told}")


def measured(release: Release, folder: Path, names: list[str]) -> dict[str, Any]:
    """Returns what is known of a release: its cells, and which programs show their fault in it."""
    python = environment(release, folder)
    own = python.parents[1]
    key = _key(release, own, *SHARED)
    found = {name: _known(own / "cells" / f"{name}.json", key) for name in names}
    waiting = [name for name in names if found[name] is None]
    for name, cell in cells(python, release.module, waiting) if waiting else ():
        failed = [row for row, each in cell.get("rows", {}).items() if each["status"] == "FAIL"]
        told = cell.get("not_run") or cell.get("broken") or ", ".join(failed) or "nothing failed"
        _store(own / "cells" / f"{name}.json", "" if "broken" in cell else key, cell, told)  # what broke runs again
        found[name] = cell
    shown: dict[str, bool] = {}
    for program in sorted({each.program for each in KNOWN_FAILURES if each.library == release.library}):
        path, key = own / "programs" / f"{program}.json", _hash(own / "pins.txt", PROGRAMS / f"{program.split()[0]}.py")
        shown[program] = known if (known := _known(path, key)) is not None else shows(python, program)
        if known is None:
            _store(path, key, shown[program], "shows it" if shown[program] else "does not show it")
    return {"cells": {name: condensed(cell) for name, cell in found.items()}, "programs": shown}


def _key(release: Release, own: Path, *names: str) -> str:
    """Returns a digest of all that the result of a configuration depends on."""
    files = (own / "pins.txt", *(FAILURES / name for name in (f"{release.module}.py", *names)))
    return _hash(*files, *sorted((ROOT / "src").rglob("*.py")))


def recorded(release: Release, folder: Path, names: list[str]) -> dict[str, Path | str]:
    """Returns the record of each configuration in the environment of a release, or why there is none."""
    python = environment(release, folder)
    own, records = python.parents[1], python.parents[1] / "records"
    records.mkdir(exist_ok=True)
    key = _key(release, own, "materials.py", "capture.py", "cells.py", "records.py")
    found = {name: _known(records / f"{name}.json", key) for name in names}
    waiting = [name for name in names if found[name] is None]
    for name, each in (
        cells(python, release.module, waiting, ("tools.failures.records", str(records))) if waiting else ()
    ):
        why = each.get("not_run") or each.get("broken") or ""
        _store(records / f"{name}.json", "" if "broken" in each else key, why, why or "recorded")
        found[name] = why
    return {name: found[name] or records / f"{name}.safetensors" for name in names}


def compared(a: Release, b: Release, folder: Path, names: list[str]) -> dict[str, Explained]:
    """Returns what differs in each configuration of two releases."""
    of_a, of_b, found = recorded(a, folder, names), recorded(b, folder, names), dict[str, Explained]()
    for name in names:
        own = {a.version: of_a[name], b.version: of_b[name]}
        missing = {version: each for version, each in own.items() if isinstance(each, str)}
        found[name] = {"not_run": missing} if missing else explained(*(Path(each) for each in own.values()))
    return found


def condensed(found: dict[str, Any]) -> dict[str, Any]:
    """Returns what tools/failures/results.json keeps of a configuration.

    It has the status of each row, the faults of each that failed, what was measured where a row did not pass, the
    status and measurement of each row that passed and missed the fault of its mutant, the rows whose mutant came
    later, and a digest of all that was measured.
    """
    if "rows" not in found:
        return found
    kept = {"option": found["option"], "rows": {}, "measured": {}, "missed": {}, "faults": {}, "without_mutant": {}}
    for row, each in found["rows"].items():
        kept["rows"][row] = each["status"]
        if each["status"] == "FAIL":
            kept["faults"][row] = each["faults"]
        if each["status"] != "PASS":
            kept["measured"][row] = each["measured"]
        elif "mutant" not in each:
            kept["without_mutant"][row] = True
        elif each["mutant"]["status"] != "FAIL":
            kept["missed"][row] = [each["mutant"]["status"], each["mutant"]["measured"]]
    kept["digest"] = hashlib.sha256(json.dumps(found["rows"], sort_keys=True).encode()).hexdigest()[:12]
    return {key: part for key, part in kept.items() if part}


def as_json(results: dict[str, Any]) -> str:
    """Returns the results as JSON, each fact of a configuration on a line, and without a path of a machine."""

    def written(value: Any, depth: int) -> str:
        if depth == 5 or not isinstance(value, dict) or len(value) == 1:
            return json.dumps(value, sort_keys=True)
        indent = " " * depth
        lines = [f"{indent}{json.dumps(key)}: {written(value[key], depth + 1)}" for key in sorted(value)]
        return "{\n" + ",\n".join(lines) + f"\n{indent[1:]}}}"

    return re.sub(r"""[^\s("']*/site-packages/""", "", written(results, 1)) + "\n"


def read_results(path: Path = RESULTS) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [each.name for each in RELEASES]
    parser.add_argument("--only", nargs="+", metavar="RELEASE", default=names, choices=names)
    parser.add_argument("--configurations", nargs="+", default=list(CONFIGURATIONS), choices=list(CONFIGURATIONS))
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "failure-index", metavar="FOLDER")
    parser.add_argument("--differences", action="store_true", help="record and compare releases in place of all else")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    chosen = parser.parse_args()
    folder, releases = chosen.environments.resolve(), {each.name: each for each in (OLD, *RELEASES)}
    for a, b in COMPARED if chosen.differences else ():
        differences = read_results(DIFFERENCES)
        found = compared(releases[a], releases[b], folder, chosen.configurations)
        differences.setdefault(f"{a} {b}", {}).update(found)
        DIFFERENCES.write_text(as_json(differences), encoding="utf-8")
    for name in chosen.only if not (chosen.page or chosen.differences) else ():
        release = releases[name]
        found, results = measured(release, folder, chosen.configurations), read_results()
        known = results.setdefault(release.name, {"cells": {}, "programs": {}})
        known["cells"].update(found["cells"])
        known["programs"] = found["programs"]
        RESULTS.write_text(as_json(results), encoding="utf-8")
    PAGE.write_text(page(read_results(), read_results(DIFFERENCES)), encoding="utf-8")


if __name__ == "__main__":
    main()
