"""tools/mutants.py: which changes are drawn, and what they are."""

import ast
from dataclasses import replace
from pathlib import Path

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


def test_tests_of_a_package_come_first_the_shortest_before_all_up_to_a_number_of_seconds() -> None:
    seconds = {
        "tests/train/test_chat.py::quick": 0.1,
        "tests/data/test_labels.py::a": 0.3,
        "tests/data/test_labels.py::b": 0.4,
        "tests/data/test_chat_tokenizer.py::slow": 5.0,
    }
    path = "src/sftron/data/chat/tokenizer.py"
    mutant = mutants.Mutant(path, "core/AddNot", 0, 7, 0, 8)
    coverage = mutants.Coverage({path: {"6": ["tests/data/test_labels.py::a"], "8": sorted(seconds)}}, seconds)
    expected = [*list(seconds)[1:], "tests/train/test_chat.py::quick"]
    assert coverage.chosen(mutant) == expected
    assert coverage.chosen(mutant, most_seconds=5.7) == expected[:3]
    assert coverage.chosen(replace(mutant, line=6, last_line=7)) == expected[:1]


def test_a_mutant_survives_the_tests_that_do_not_notice_it_and_no_test(tmp_path: Path) -> None:
    path = ROOT / "src/sftron/data/types.py"
    (mutant, *_) = (
        each for each in mutants.mutants_of(path) if mutants.difference(each)[0].startswith("-IGNORE_INDEX")
    )
    (tmp_path / mutant.path).parent.mkdir(parents=True)
    (tmp_path / mutant.path).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    test = "def test_labels():\n    assert '\\nIGNORE_INDEX = -100\\n' in open('src/sftron/data/types.py').read()\n"
    for name, text in {
        "notices": test,
        "sleeps": "def test_nothing():\n    pass\n",
        "broken": "assert False\n",
    }.items():
        (tmp_path / f"test_{name}.py").write_text(text, encoding="utf-8")
    survived = [mutants.survives(mutant, tests, tmp_path, 60) for tests in ([], *_TESTS)]
    assert survived == [True, False, True, True]
    assert (tmp_path / mutant.path).read_text(encoding="utf-8") == path.read_text(encoding="utf-8")


_TESTS = (["test_notices.py"], ["test_sleeps.py"], ["test_broken.py"])
"""Of these, the last one fails without the change, too."""
