"""The index of silent failures: its page, what its mutants do, and what its results hold."""

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the extra dev")
pytest.importorskip("peft", reason="needs the extra lora")

from tools.failure_index import (
    DIFFERENCES,
    PAGE,
    PROGRAMS,
    RESULTS,
    as_json,
    cells,
    compared,
    condensed,
    environment,
)
from tools.failures import materials, of_trl
from tools.failures.cells import made, mutated_check
from tools.failures.differences import explained, section
from tools.failures.known_failures import KNOWN_FAILURES
from tools.failures.mutants import MUTANTS, faults_of
from tools.failures.page import ROWS, _span, page, status
from tools.failures.releases import COMPARED, CONFIGURATIONS, RELEASES

OLD, NEW = (next(each for each in RELEASES if each.name == name) for name in ("trl-1.9.0", "trl-1.16.0"))
KNOWN: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
KNOWN_DIFFERENCES: dict[str, Any] = json.loads(DIFFERENCES.read_text(encoding="utf-8"))


def small() -> dict[str, Any]:
    """Results of two releases: one row fails in the old one alone, one fails in both, and one has no program."""
    rows = {"ids": "FAIL", "loss": "FAIL", "isolation": "PASS", "padding": "PASS", "adapters": "SKIP"}
    measured = {"ids": "4 conversations | leak", "loss": "4 conversations | leak", "adapters": "nothing to measure"}
    missed = {"padding": ["PASS", "12 of 34 tokens"]}
    cell = {"option": "`packing=True`", "rows": rows, "measured": measured, "missed": missed}
    other = cell | {"rows": rows | {"ids": "PASS"}}
    missing = {"not_run": "has none"}
    return {
        "trl-1.9.0": {"cells": {"thoughts": cell, "jinja": missing}, "programs": {"trl_thoughts": True}},
        "trl-1.16.0": {"cells": {"thoughts": other, "jinja": missing}, "programs": {"trl_thoughts": False}},
    }


def test_results_keep_statuses_what_did_not_pass_and_a_digest_of_everything_measured() -> None:
    def found(measured: str = "fine", mutant: str = "FAIL") -> dict[str, Any]:
        passed = {"status": "PASS", "measured": measured, "mutant": {"status": mutant, "measured": "12 tokens"}}
        failed = {"status": "FAIL", "measured": "4 leak", "faults": ["UNDIVIDED"], "remedy": "Do.", "detail": ["at 3"]}
        return {"option": "`x`", "rows": {"ids": passed, "loss": failed}}

    kept = condensed(found())
    rows, measured = {"ids": "PASS", "loss": "FAIL"}, {"loss": "4 leak"}
    faults = {"loss": ["UNDIVIDED"]}
    assert kept == {"option": "`x`", "rows": rows, "measured": measured, "faults": faults, "digest": kept["digest"]}
    later = found()
    del later["rows"]["ids"]["mutant"]
    assert condensed(later)["without_mutant"] == {"ids": True}
    assert condensed(found(mutant="SKIP"))["missed"] == {"ids": ["SKIP", "12 tokens"]}
    assert len({condensed(each)["digest"] for each in (found(), found("other"), found(mutant="SKIP"))}) == 3
    missing = {"not_run": "raises", "option": "`x`"}
    assert condensed(missing) == missing


def test_results_are_written_a_fact_a_line_in_order_and_without_a_path() -> None:
    text = as_json(KNOWN)
    assert json.loads(text) == KNOWN
    assert text == as_json(shuffled(KNOWN)) == RESULTS.read_text(encoding="utf-8")
    assert as_json({"a": {"cells": {"b": {"broken": 'in "/x/lib/site-packages/y.py"'}}}}).count("site-packages") == 0
    assert len(text.splitlines()) < 1500
    assert as_json(KNOWN_DIFFERENCES) == DIFFERENCES.read_text(encoding="utf-8")


def test_the_page_has_the_span_of_each_failure_and_what_was_not_run() -> None:
    text = page(small())
    (line,) = [line for line in text.splitlines() if line.startswith("| thoughts in the answers: `packing=True` |")]
    words = dict(zip(ROWS, [cell.strip() for cell in line.strip("|").split(" | ")][1:], strict=True))
    assert words["ids"] == "documented 1.9.0, pass 1.16.0"
    assert (words["loss"], words["isolation"], words["adapters"], words["generation"]) == ("open", "pass", "skip", "")
    (fault,) = [line for line in text.splitlines() if "](../tools/failures/programs/trl_thoughts.py)" in line]
    assert "ids: 4 conversations \\| leak | 1.9.0 |" in fault
    assert "https://github.com/huggingface/trl/issues/5824" in fault
    assert "- has none: messages, the tokenizer's template by another backend." in text
    assert "- open: loss: 4 conversations | leak: thoughts in the answers." in text
    assert "3 of 5 rows that passed fail then (TRL 3 of 5)" in text
    assert "| padding | PASS | N of N tokens | 2 |" in text


@pytest.mark.parametrize(("found", "text"), [("2", "2"), ("12", "1 to 2"), ("13", "1, 3"), ("123", "1 to 3")])
def test_versions_that_follow_each_other_are_a_span(found: str, text: str) -> None:
    assert _span(list(found), list("123")) == text


def test_a_failure_is_documented_only_if_each_fault_that_shows_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def cell() -> str:
        (line,) = [each for each in page(small()).splitlines() if each.startswith("| thoughts in the answers: `pack")]
        return line.split(" | ")[1]

    (failure,) = [each for each in KNOWN_FAILURES if each.program == "trl_thoughts"]
    assert cell() == "documented 1.9.0, pass 1.16.0"
    others = (*(each for each in KNOWN_FAILURES if each is not failure), replace(failure, is_documented=False))
    monkeypatch.setattr("tools.failures.page.KNOWN_FAILURES", others)
    assert cell() == "**FAIL** 1.9.0, pass 1.16.0"
    monkeypatch.setattr("tools.failures.page.KNOWN_FAILURES", (*others, failure))
    assert cell() == "**FAIL** 1.9.0, pass 1.16.0"


def test_a_failure_that_no_program_shows_is_open() -> None:
    results = small()
    assert [status(OLD, "thoughts", row, results) for row in ("ids", "loss", "padding")] == [
        "documented",
        "open",
        "PASS",
    ]
    results["trl-1.9.0"]["programs"]["trl_thoughts"] = False
    assert status(OLD, "thoughts", "ids", results) == "open"


def test_a_failure_is_confirmed_only_if_the_report_found_its_fault() -> None:
    results = small()
    cell = results["trl-1.9.0"]["cells"]["thoughts"]
    for faults, expected in (({"ids": ["TRAINING_TEMPLATE"]}, "documented"), ({"ids": ["DOUBLED_BOS"]}, "open")):
        cell["faults"] = faults
        assert status(OLD, "thoughts", "ids", results) == expected


def test_the_page_does_not_depend_on_the_order_of_the_results() -> None:
    assert page(shuffled(KNOWN)) == page(KNOWN) == page(KNOWN)


def shuffled(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    names = random.Random(0).sample(list(value), len(value))
    return {name: shuffled(value[name]) for name in names}


def test_the_command_runs_in_a_checkout_as_the_page_says() -> None:
    """The folder of a script is where Python looks for modules, and not that of the repository."""
    command = [sys.executable, str(PAGE.parents[1] / "tools/failure_index.py"), "--help"]
    assert subprocess.run(command, cwd="/", capture_output=True, env={}, check=False).returncode == 0


def test_the_page_in_docs_is_that_of_the_committed_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(KNOWN, KNOWN_DIFFERENCES), "python tools/failure_index.py --page"


def test_the_page_has_no_path_and_no_time() -> None:
    text = page(KNOWN, KNOWN_DIFFERENCES)
    assert not re.search(r"/tmp|/home|/root|site-packages|\d\d:\d\d", text)


def test_each_pair_of_releases_is_compared_in_each_configuration_or_says_why_not() -> None:
    assert {*KNOWN_DIFFERENCES} == {" ".join(pair) for pair in COMPARED}
    for found in KNOWN_DIFFERENCES.values():
        assert {*found} == {*CONFIGURATIONS}
        assert all(len(each.get("losses", ())) == 2 or all(each["not_run"].values()) for each in found.values())
        assert sum("losses" in each for each in found.values()) > 10


def test_the_page_has_what_differs_between_two_releases_and_what_is_not_compared() -> None:
    parts = [{"part": "ids", "value": -0.25, "sentence": "another | template"}]
    found = {
        "lora": {"losses": [2.0, 1.75], "parts": parts, "facts": [["gradient norm", 1.0, 0.5], ["betas", "x", "y"]]},
        "packing": {"losses": [2.0, 2.0]},
        "thoughts": {"not_run": {"1.9.0": "raises KeyError"}},
        "jinja": {"not_run": {"1.9.0": "has none", "1.16.0": "has none"}},
        "sanitized": {"not_run": {"1.9.0": "has none"}},
    }
    text = page(KNOWN, {"trl-1.9.0 trl-1.16.0": found})
    assert "### TRL 1.9.0 (transformers 5.16.1) and 1.16.0 (transformers 5.23.0)\n" in text
    what = "ids -0.250000: another \\| template. gradient norm: 1 in A, 0.5 in B. betas: x in A, y in B"
    assert f"| LoRA | 2.000000 | 1.750000 | {what} |\n" in text
    assert "| packing | 2.000000 | 2.000000 | nothing |\n" in text
    assert "- not compared, as in 1.9.0: raises KeyError: thoughts in the answers.\n" in text
    assert "- not compared, as in 1.9.0: has none: a text spells control tokens, the library's own remedy.\n" in text
    own = text[text.index("## What changes") : text.index("## What a pass is worth")]
    assert CONFIGURATIONS["jinja"] not in own
    assert not list(section({}))


def test_a_configuration_that_one_release_refuses_is_not_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def recorded(release: Any, _folder: Path, names: list[str]) -> dict[str, Path | str]:
        return dict.fromkeys(names, "raises KeyError" if release is OLD else tmp_path)

    monkeypatch.setattr("tools.failure_index.recorded", recorded)
    assert compared(OLD, NEW, tmp_path, ["lora"]) == {"lora": {"not_run": {"1.9.0": "raises KeyError"}}}


def test_records_of_configurations_differ_in_what_their_options_say(tmp_path: Path) -> None:
    """In the environment of the tests, each in a process of its own."""
    names = ["prompt_completion", "accumulation", "answers", "jinja"]
    found = dict(cells(sys.executable, "of_trl", names, ("tools.failures.records", str(tmp_path))))
    assert found == {name: {} if name != "jinja" else {"not_run": "has none"} for name in names}
    one, accumulated, answers = (tmp_path / f"{name}.safetensors" for name in names[:3])
    assert [*explained(one, one)] == ["losses"]
    batches = ["batches", {"rows": 4, "micro_batches": 1}, {"rows": 1, "micro_batches": 4}]
    assert explained(one, accumulated) == explained(one, one) | {"facts": [batches]}
    (part,) = explained(one, answers)["parts"]
    assert part["part"] == "trained tokens"
    assert part["sentence"].startswith("B trains 1,281 tokens that A does not: 1,281 of the answers; A trains 21")


def test_each_failure_has_a_program_without_sftron_and_names_what_exists() -> None:
    for each in KNOWN_FAILURES:
        source = (PROGRAMS / f"{each.program.split()[0]}.py").read_text(encoding="utf-8")
        assert "sftron" not in source, each.program
        assert set(each.configurations) <= set(CONFIGURATIONS), each.program
        assert set(each.rows) <= set(ROWS), each.program
        assert set(each.rows) & set(each.fault.entry.rows), each.program
        assert each.library in {release.library for release in RELEASES}, each.program


def test_a_program_shows_its_fault_exactly_where_a_row_fails() -> None:
    """A program that shows a fault where nothing failed would be about something else."""
    for release in (each for each in RELEASES if each.name in KNOWN):
        for each in (failure for failure in KNOWN_FAILURES if failure.library == release.library):
            pairs = [(name, row) for name in each.configurations for row in each.rows]
            has_failed = any(status(release, *pair, KNOWN) in ("FAIL", "documented", "open") for pair in pairs)
            assert KNOWN[release.name]["programs"][each.program] == has_failed, (release.name, each.program)


def test_every_row_of_verify_trainer_has_a_mutant() -> None:
    from sftcheck.verify_trainer import RULES

    assert [rule.name for rule in RULES] == list(ROWS)
    assert all(faults_of(row) for row in ROWS)
    assert all(set(fault.entry.rows) <= set(ROWS) for fault in MUTANTS)


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(materials, "SCRATCH", tmp_path)
    monkeypatch.setenv("CI", "1")  # no telemetry


@pytest.mark.parametrize(("name", "skipped"), [("prompt_completion", ()), ("packing", ("padding",)), ("lora", ())])
@pytest.mark.filterwarnings("ignore::")
@pytest.mark.usefixtures("scratch")
def test_each_row_that_passes_finds_the_fault_of_its_mutant(name: str, skipped: tuple[str, ...]) -> None:
    configuration = of_trl.CONFIGURATIONS[name]
    configuration = replace(configuration, rows=configuration.rows[:12])
    trainer = made(configuration)
    found = {row: mutated_check(row, trainer, configuration) for row in ROWS}
    missed = [row for row, check in found.items() if not {each.name for each in faults_of(row)} & {*check.faults}]
    assert missed == [row for row, check in found.items() if check.status != "FAIL"] == list(skipped)


def test_two_runs_of_a_configuration_give_the_same_page() -> None:
    """In the environment of the tests, each in a process of its own."""
    first, second = cells(sys.executable, "of_trl", ["prompt_completion", "prompt_completion"])
    assert first == second
    assert {row["status"] for row in first[1]["rows"].values()} == {"PASS"}
    kept = [{name: condensed(found)} for name, found in (first, second)]
    pages = {page({"trl-1.16.0": {"cells": each, "programs": {}}}) for each in kept}
    assert len(pages) == 1


def test_an_environment_is_made_once_and_no_resolver_chooses_a_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands = list[list[str]]()

    def run(command: list[str], **_: Any) -> None:
        commands.append(command)
        if "venv" in command:
            (Path(command[-1]) / "lib" / "python3.11" / "site-packages").mkdir(parents=True)

    monkeypatch.setattr(subprocess, "run", run)
    assert environment(NEW, tmp_path) == environment(NEW, tmp_path)
    assert ["venv" in each for each in commands] == [True, False]
    assert "--no-deps" in commands[1]
    environment(replace(NEW, pins=(*NEW.pins, "another==1")), tmp_path)
    assert len(commands) == 4
    assert not [pin for each in RELEASES for pin in each.pins if pin.startswith(("torch==", "triton", "nvidia"))]
