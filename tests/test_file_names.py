"""A file is a noun, and no two files of a package have the same name."""

from collections import Counter
from pathlib import Path

from tests.conftest import ROOT


def test_no_two_files_of_a_package_have_the_same_name() -> None:
    files = [path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*.py") if path.name != "__init__.py"]
    names = Counter((_package(path), path.name) for path in files)
    assert ("train", "trainer.py") in names
    assert ("sftcheck", "verify_trainer.py") in names
    assert [name for name, count in names.items() if count > 1] == []


def _package(path: Path) -> str:
    """Returns `sftcheck`, or the package of sftron that a file is in; "" for those of no package."""
    return "sftcheck" if path.parts[0] == "sftcheck" else "".join(path.parts[1:2] if len(path.parts) > 2 else ())
