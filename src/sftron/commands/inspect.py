"""Shows the data as it will be trained on: packs in color, and an audit of the rows. Needs no weights.

Proves, on the rows it reads: each conversation's ids are those of apply_chat_template (but for texts that spell control
tokens, which are counted); every assistant turn trains its stop token; every label is the next token of the same
conversation; and, on the first 400 conversations, each answer is trained from where its prompt, as transformers renders
it, ends. Conversations that cannot be compared so are counted by reason; more than 5% of them are a problem. Rows that
are held out of training are counted, not audited.
Exit status: 0 nothing wrong, 1 a problem found, 2 bad configuration or data.
"""

import argparse
import sys
from pathlib import Path

from sftron.commands.arguments import OVERRIDES, make_parser, write_json, writing
from sftron.config import load_config
from sftron.errors import refuse, show


def count(text: str) -> int:
    """Parses an integer of 0 or more; argparse reports a ValueError with the name of the argument."""
    if (number := int(text)) < 0:
        raise ValueError
    return number


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = make_parser("inspect", __doc__, OVERRIDES)
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's configuration")
    parser.add_argument("-n", type=count, default=1, metavar="N", help="packs to show (default 1)")
    parser.add_argument("--packs", type=count, default=100, metavar="N", help="packs to count (default 100)")
    parser.add_argument("--rows", type=count, default=10_000, metavar="N", help="rows to audit (default 10000; 0: all)")
    parser.add_argument("--all-tokens", action="store_true", help="show packs whole, however long")
    parser.add_argument("--html", type=Path, metavar="OUT", help="also write one self-contained page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the audit as JSON")
    return parser.parse_known_args(arguments)


def main(arguments: list[str]) -> int:
    options, overrides = parse_arguments(arguments)
    # Imported here, so that --help takes no time.
    from sftron.data.formats.detect import FORMAT_SAMPLE, unread_columns
    from sftron.report.terminal import wants_color
    from sftron.verify.inspect_run import inspect, open_data

    try:
        config = load_config(options.config, overrides)
        preparation = open_data(config)
        num_rows = options.rows or None
        inspection = inspect(
            config, num_shown=options.n, num_packs=options.packs, num_rows=num_rows, preparation=preparation
        )
    except ValueError as error:
        return refuse(error)
    for each in preparation.datasets:
        if unread := unread_columns(each.first_rows(FORMAT_SAMPLE), each.row_format):
            show(f"{each.name}: columns that are not read: {', '.join(unread)}\n")
    max_tokens = None if options.all_tokens else 1000
    show(inspection.as_text(color=wants_color(sys.stdout), max_tokens=max_tokens), end="", is_visible=True)
    try:
        if options.html:
            with writing(options.html, "choose another place with --html"):
                options.html.parent.mkdir(parents=True, exist_ok=True)
                inspection.write_html(options.html)
            show(f"\nwritten: {options.html}")
        if options.json:
            with writing(options.json, "choose another place with --json"):
                write_json(options.json, inspection.audit.as_dict())
    except OSError as error:
        return refuse(error)
    return 1 if inspection.problems else 0
