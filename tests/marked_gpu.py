"""Whether a session of pytest runs the tests that need a GPU; it imports nothing that looks for one."""

import argparse
import re

from _pytest.mark.expression import Expression


def wants_gpus(arguments: list[str]) -> bool:
    """Returns whether pytest's -m names the mark `gpu` and selects tests that have it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", default="")
    selected = parser.parse_known_args(arguments)[0].m
    if not re.search(r"\bgpu\b", selected):
        return False
    return Expression.compile(selected).evaluate(lambda name, **_: name == "gpu")
