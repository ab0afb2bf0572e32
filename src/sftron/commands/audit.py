"""Proves that a run trained every row once an epoch, across all kills, and names the rows of a step:

    sftron audit runs/quickstart
    sftron audit runs/quickstart --step 17

It rebuilds the packs of each step from the data and compares them with the digests in metrics.jsonl. Exit status: 0
passed, 1 a check failed, 2 the run or its data cannot be opened.
"""

from sftron.commands.arguments import OVERRIDES_OF_RUN, as_path, make_parser, refusing, write_json
from sftron.errors import show


@refusing(ValueError, OSError, tool="sftron audit")
def main(arguments: list[str]) -> int:
    parser = make_parser("audit", __doc__, OVERRIDES_OF_RUN)
    parser.add_argument("run", type=as_path, metavar="RUN", help="the run directory")
    parser.add_argument("--step", type=int, metavar="N", help="name the rows of this step, with file and line")
    parser.add_argument("--json", type=as_path, metavar="FILE", help="write the report there too")
    options, overrides = parser.parse_known_args(arguments)
    # Imported here, so that --help takes no time.
    from sftron.checks.replay import OpenedRun, audit_run

    audit = audit_run(OpenedRun(options.run, overrides), options.step)
    show(audit.as_text())
    write_json(options.json, audit.as_dict())
    return 0 if audit.passed else 1
