"""Prints what the house weighs: the lines and files of src and tests, and the contracts against import circles.

python tools/budget.py
"""

import tomllib
from pathlib import Path

from sftron.errors import show

ROOT = Path(__file__).parents[1]


def main() -> None:
    for folder, pattern in (("src", "*.py"), ("tests", "*.py"), ("docs", "*.md")):
        files = list((ROOT / folder).rglob(pattern))
        num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        show(f"{folder:<6} {num_lines:>7,} lines in {len(files)} files")
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    show(f"{len(linter['contracts'])} import contracts, which admit no circle in any package (lint-imports)")


if __name__ == "__main__":
    main()
