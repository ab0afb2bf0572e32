"""Proves that a run trained every row once an epoch, across all kills, and names the rows of a step:

    sftron audit runs/quickstart
    sftron audit runs/quickstart --step 17

It makes the packs of each step again from the data, and compares them with the digests in metrics.jsonl. Exit status: 0
passed, 1 a check failed, 2 the run or its data cannot be opened.
"""

import argparse
from pathlib import Path

from sftron.commands.arguments import add_reports, make_parser, write_json
from sftron.errors import refuse, show


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = make_parser(
        "audit", __doc__, epilog="--section.key=value overrides the run's configuration, as for data that has moved."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument("--step", type=int, metavar="N", help="name the rows of this step, with file and line")
    add_reports(parser, html=None)
    return parser.parse_known_args(arguments)


def main(arguments: list[str]) -> int:
    options, overrides = parse_arguments(arguments)
    # Imported here, so that --help takes no time.
    from sftron.verify.replay import OpenedRun, audit_run

    try:
        audit = audit_run(OpenedRun(options.run, overrides), options.step)
        show(audit.as_text())
        write_json(options.json, audit.as_dict())
    except (ValueError, OSError) as error:
        return refuse(error, "sftron audit")
    return 0 if audit.passed else 1
