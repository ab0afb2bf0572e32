"""Proves that a run trained every row once an epoch, across all kills, and names the rows of a step:

    sftron audit runs/quickstart
    sftron audit runs/quickstart --step 17

The run needs `logging.ledger: true`. Exit status: 0 all checks passed, 1 a check failed, 2 the run, its ledger or its
data cannot be opened.
"""

import argparse
import dataclasses
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
    from sftron.verify.ledger import OpenedRun, audit_run
    from sftron.verify.named_step import name_step

    try:
        run = OpenedRun(options.run, overrides)
        step = None if options.step is None else name_step(run, options.step)
        audit = audit_run(run)
        show(audit.as_text())
        if step is not None:
            show(f"\n{step.as_text()}")
        found = audit.as_dict() | ({} if step is None else {"step": dataclasses.asdict(step)})
        write_json(options.json, found)
    except (ValueError, OSError) as error:
        return refuse(error, "sftron audit")
    return 0 if audit.passed else 1
