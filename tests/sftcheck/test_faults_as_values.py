"""Faults are values: nothing in the checks decides by reading a sentence, and each fault has its row and its texts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest

from sftcheck.faults import Fault
from sftron import verify_trainer
from sftron.checks.report import Report
from tests.conftest import ROOT
from tests.sftcheck.trainer_zoo import ZOO, hush

_SENTENCES = {"measured", "remedy", "difference", "problem", "allowed", "proves", "meaning"}
_READING = {"startswith", "endswith", "split", "rsplit", "partition", "rpartition", "replace", "find", "index", "count"}
_VALUES = {"longest": 7, "pad": "<pad>", "name": "falcon", "attention": "sdpa", "stop": "</s>"}
_LIBRARIES = ("", "trl", "axolotl", "llamafactory", "swift", "loop")


def _name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def decisions_by_sentences(source: str) -> Iterator[int]:
    """Yields the lines of a module that read the sentence of a finding."""
    for node in ast.walk(ast.parse(source)):
        read: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _READING:
            read = node.func.value
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            read = node.comparators[0]
        if read is not None and _name_of(read) in _SENTENCES:
            yield read.lineno


@pytest.mark.parametrize(
    "line",
    [
        'x = check.remedy.startswith("In")',
        "x = measured.split()[0]",
        "x = [each for each in words if each in measured]",
        'x = "stop token" not in problem',
        'x = difference.startswith("a doubled")',
    ],
)
def test_reading_a_sentence_is_seen(line: str) -> None:
    assert list(decisions_by_sentences(line)) == [1]


def test_no_check_decides_by_reading_a_sentence() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for package in ("sftcheck", "sftron/checks")
        for path in sorted((ROOT / "src" / package).rglob("*.py"))
        for line in decisions_by_sentences(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_each_fault_has_texts_in_each_library_and_a_check_that_finds_it() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "src/sftcheck").rglob("*.py"))
    for fault in Fault:
        assert len(re.findall(rf"\bFault\.{fault.name}\b", sources)) > 0, fault
        assert fault.entry.rows
        for library in _LIBRARIES:
            assert len(fault.remedy(library, _VALUES)) > 20


_PREFIX = "A remedy in other words: "
_REWORDED = ["wrapped_packing", "doubled_bos", "labels_begin_with_the_line_break", "evaluation_over_prompts"]


def _decided(report: Report) -> list[tuple[Any, ...]]:
    return [(row.name, row.passed, row.faults, row.part, row.measured) for row in report.checks]


def _program(report: Report) -> str:
    try:
        return report.script()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", _REWORDED)
def test_other_words_change_no_verdict_and_no_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hush()
    before = verify_trainer(ZOO[name].make(), **ZOO[name].arguments)
    program = _program(before)
    original = Fault.remedy
    monkeypatch.setattr(Fault, "remedy", lambda *given: _PREFIX + original(*given))
    after = verify_trainer(ZOO[name].make(), **ZOO[name].arguments)
    assert _decided(after) == _decided(before)
    assert [row.remedy.replace(_PREFIX, "") for row in after.checks] == [row.remedy for row in before.checks]
    assert any(_PREFIX in row.remedy for row in after.checks)
    assert _program(after) == program
