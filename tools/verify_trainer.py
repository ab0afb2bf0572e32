"""`sftron verify-trainer`, from a checkout."""

import sys

from sftron.__main__ import main
from sftron.errors import exit_with

if __name__ == "__main__":
    exit_with(lambda: main(["verify-trainer", *sys.argv[1:]]))
