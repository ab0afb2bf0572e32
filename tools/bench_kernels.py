"""`sftron bench kernels`, from a checkout."""

import sys
from pathlib import Path

# Makes sftron importable without an installation.
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from sftron.__main__ import main
from sftron.errors import exit_with

if __name__ == "__main__":
    exit_with(lambda: main(["bench", "kernels", *sys.argv[1:]]))
