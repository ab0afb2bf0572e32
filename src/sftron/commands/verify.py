"""Checks a run before it begins, on your own model and data: one table, green or red, and one page.

    sftron verify --config configs/quickstart.yaml

Exit status: 0 no check failed, 1 a check failed, 2 bad configuration or data (a message, no traceback).
"""

import argparse
import shlex
from contextlib import ExitStack
from pathlib import Path

from sftron.commands.arguments import OVERRIDES, add_reports, make_parser, positive
from sftron.config import load_config
from sftron.errors import refuse


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = make_parser("verify", __doc__, OVERRIDES)
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's configuration")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this check alone; may be repeated")
    parser.add_argument("--rows", type=positive, default=400, metavar="N", help="rows to look at (default %(default)s)")
    parser.add_argument("--layers", type=positive, metavar="N", help="compute the first N layers of the model alone")
    parser.add_argument(
        "--tokens", type=positive, metavar="N", help="tokens that the model computes at once (default: by the device)"
    )
    parser.add_argument("--ranks", type=positive, metavar="N", help="also train with N processes, which takes a minute")
    add_reports(parser, "the page (default: {run directory}-verify.html)")
    parser.add_argument(
        "--card",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FILE",
        help="write a card of all that was checked, with versions and hashes (without FILE: verify.yaml in the run "
        "directory, which exports copy and link)",
    )
    return parser.parse_known_args(arguments)


def main(arguments: list[str]) -> int:
    options, overrides = parse_arguments(arguments)
    try:
        config = load_config(options.config, overrides)
    except ValueError as error:
        return refuse(error)
    # Imported here, so that --help and configuration errors take no time.
    from transformers.utils.logging import disable_progress_bar

    from sftron.commands.checked import ShownTable
    from sftron.train.exports.model_card import VERIFY_CARD
    from sftron.verify.card import card_of
    from sftron.verify.verify_run import open_subject, page_of, report_on, select

    disable_progress_bar()
    shown = ShownTable()
    with ExitStack() as stack:
        try:
            rules = select(options.only, with_ranks=options.ranks is not None, with_lora=config.lora is not None)
            sizes = options.rows, options.layers, options.tokens, options.ranks
            subject = stack.enter_context(open_subject(config, *sizes))
            subject.facts  # noqa: B018  computed here, where a ValueError is the user's
        except ValueError as error:
            return refuse(error)
        report = report_on(subject, rules, shown.start, shown.check)
        page = options.html or Path(f"{config.run_dir}-verify.html")
        card = config.run_dir / VERIFY_CARD if options.card == Path() else options.card
        command = shlex.join(["sftron", "verify", *arguments])
        files = {
            page: lambda: page_of(report, subject),
            card: lambda: card_of(report, subject, subject.whole_config, command),
        }
        return shown.finish(report, files, options.json)
