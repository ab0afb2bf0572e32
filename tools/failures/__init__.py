"""The index of silent failures: what tools/failure_index.py runs in the environments of other releases.

releases.py         the releases, with the versions of their packages, and the configurations of each library
materials.py        the conversations, tokenizer and models that all configurations share
of_*.py             one function for each configuration of a library, which returns its trainer
mutants.py          one fault for each row, for any trainer
cells.py            each configuration in one process: the report of verify_trainer, and what the mutants do to it
known_failures.py   the failures that were found, by the fault that the report finds
records.py          each configuration in one process: its record for sftron diff
differences.py      what sftron diff says of the records of two releases
page.py             docs/silent-failures.md, from results.json and differences.json alone
"""
