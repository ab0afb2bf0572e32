"""A file is a noun, and no two files of a package have the same name."""

from collections import Counter

from tests.conftest import ROOT

TWICE = {
    ("verify", name)
    for name in (
        *("batches.py", "data_checks.py", "measurements.py", "model.py", "model_checks.py"),
        *("rank_checks.py", "state.py", "subject.py"),
    )
}
"""The packages that have two files of one name yet, and the names."""


def test_no_two_files_of_a_package_have_the_same_name() -> None:
    files = [path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*.py") if path.name != "__init__.py"]
    names = Counter((path.parts[1], path.name) for path in files if len(path.parts) > 2)
    assert ("train", "trainer.py") in names
    assert {name for name, count in names.items() if count > 1} <= TWICE
