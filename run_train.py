#!/usr/bin/env python
"""`sftron train`, from a checkout, also with `torchrun --nproc_per_node=N run_train.py ...`."""

import sys

from sftron.__main__ import main
from sftron.errors import exit_with

if __name__ == "__main__":
    exit_with(lambda: main(["train", *sys.argv[1:]]))
