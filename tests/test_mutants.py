"""tools/mutants.py: which changes are drawn, and what they are."""

import ast
from dataclasses import replace

from tests.conftest import ROOT, LazyModule
from tools import mutants

LazyModule("cosmic_ray")


def test_a_seed_draws_the_same_mutants_of_different_places() -> None:
    places = mutants.all_places()
    few, many = mutants.drawn(places, 20, seed=3), mutants.drawn(places, 40, seed=3)
    assert many[:20] == few != mutants.drawn(places, 20, seed=4)
    assert len({(each.path, each.line, each.column) for each in many}) == 40


def test_a_mutant_changes_its_lines_and_no_annotation() -> None:
    path = ROOT / "src/sftron/data/labels.py"
    annotated = {node.lineno for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if _is_plain_field(node)}
    found = list(mutants.mutants_of(path))
    assert len(found) > 100
    for each in found[::25]:
        removed = [line for line in mutants.difference(each) if line.startswith("-")]
        assert removed
        assert each.line not in annotated


def _is_plain_field(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and node.value is None


def test_the_tests_of_the_laws_are_files_of_tests() -> None:
    files = mutants.files_of_laws()
    assert "tests/data/test_labels.py" in files
    assert all((ROOT / each).is_file() for each in files)


def test_tests_near_a_module_come_first_and_a_test_of_each_file_before_the_second_of_one() -> None:
    seconds = {
        "tests/train/test_chat.py::quick": 0.1,
        "tests/data/test_labels.py::a": 0.3,
        "tests/data/test_labels.py::b": 0.4,
        "tests/data/test_families.py::c": 0.5,
        "tests/data/test_chat_tokenizer.py::slow": 5.0,
    }
    path = "src/sftron/data/chat/tokenizer.py"
    mutant = mutants.Mutant(path, "core/AddNot", 0, 7, 0, 7)
    coverage = mutants.Coverage({path: {7: sorted(seconds)}}, seconds)
    expected = [
        "tests/data/test_chat_tokenizer.py::slow",
        "tests/data/test_labels.py::a",
        "tests/data/test_families.py::c",
        "tests/data/test_labels.py::b",
        "tests/train/test_chat.py::quick",
    ]
    assert coverage.chosen(mutant) == expected
    assert replace(coverage, most_seconds=5.5).chosen(mutant) == expected[:2]
