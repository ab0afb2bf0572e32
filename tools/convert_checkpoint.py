"""`sftron convert`, from a checkout."""

import sys

from sftron.__main__ import main
from sftron.errors import exit_with

if __name__ == "__main__":
    exit_with(lambda: main(["convert", *sys.argv[1:]]))
