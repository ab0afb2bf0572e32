"""Prints the size of the project: lines and files by package, of tests, tools and docs, and the import contracts.

python tools/budget.py
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path

from sftron.errors import show

ROOT = Path(__file__).parents[1]


def lines_of(paths: Iterable[Path]) -> tuple[int, int]:
    """Returns the number of lines of all files, and the number of files."""
    sizes = [len(path.read_text(encoding="utf-8").splitlines()) for path in paths]
    return sum(sizes), len(sizes)


def weights(root: Path) -> dict[str, tuple[int, int]]:
    """Returns the lines and files of each root package, of each package in it, of tests, tools and docs."""
    found = dict[str, tuple[int, int]]()
    for package in sorted(path.parent for path in root.glob("src/*/__init__.py")):
        inner = sorted(path for path in package.iterdir() if path.is_dir() and any(path.rglob("*.py")))
        found[package.name] = lines_of(package.rglob("*.py"))
        found[f"  {package.name}/*.py"] = lines_of(package.glob("*.py"))
        found |= {f"  {package.name}/{path.name}": lines_of(path.rglob("*.py")) for path in inner}
    for folder, pattern in (("tests", "*.py"), ("tools", "*.py"), ("docs", "*.md")):
        found[folder] = lines_of((root / folder).rglob(pattern))
    return found


def main() -> None:
    for name, (num_lines, num_files) in weights(ROOT).items():
        show(f"{name:<20} {num_lines:>7,} lines in {num_files} files")
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    show(f"{len(linter['contracts'])} import contracts, which admit no circle in any package (lint-imports)")


if __name__ == "__main__":
    main()
