"""Checks a run before it begins, on your own model and data: one table, green or red, and one page.

    sftron verify --config configs/quickstart.yaml

Exit status: 0 no check failed, 1 a check failed, 2 bad configuration or data (a message, no traceback).
"""

import shlex
from pathlib import Path

from sftron.commands.arguments import OVERRIDES, as_path, make_parser, positive, refusing, write_json, write_report
from sftron.config import load_config
from sftron.errors import show


@refusing(ValueError)
def main(arguments: list[str]) -> int:
    parser = make_parser("verify", __doc__, OVERRIDES)
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="the run's configuration")
    add("--only", action="append", default=[], metavar="NAME", help="run only this check; repeat it for more")
    add("--rows", type=positive, default=400, metavar="N", help="rows to look at (default %(default)s)")
    add("--layers", type=positive, metavar="N", help="compute only the first N layers of the model")
    add(
        "--tokens",
        type=positive,
        metavar="N",
        help="tokens per computation of the model (default: by the device)",
    )
    add("--ranks", type=positive, metavar="N", help="also train with N processes, which takes a minute")
    add("--context", type=positive, metavar="N", help="also train with N processes that share each pack")
    add("--html", type=as_path, metavar="FILE", help="the page (default: {run directory}-verify.html)")
    add("--json", type=as_path, metavar="FILE", help="write the report there too")
    add(
        "--card",
        type=as_path,
        nargs="?",
        const=Path(),
        metavar="FILE",
        help="write a card of everything checked, with versions and hashes (without FILE: verify.yaml in the run "
        "directory; exports copy and link it)",
    )
    options, overrides = parser.parse_known_args(arguments)
    config = load_config(options.config, overrides)
    # Imported here, so that --help and configuration errors take no time.
    from transformers.utils.logging import disable_progress_bar

    from sftron.checks.card import card_of
    from sftron.checks.presentation import Table
    from sftron.checks.verify_run import checked_run, page_of
    from sftron.train.model_card import VERIFY_CARD

    disable_progress_bar()
    sizes, table = (options.rows, options.layers, options.tokens, options.ranks, options.context), Table()
    with checked_run(config, options.only, *sizes, table.start, table.check) as (report, subject):
        table.finish(report)
        page = options.html or Path(f"{config.run_dir}-verify.html")
        card = config.run_dir / VERIFY_CARD if options.card == Path() else options.card
        write_report(page, page_of(report, subject), "--html")
        if card is not None:
            command = shlex.join(["sftron", "verify", *arguments])
            write_report(card, card_of(report, subject, subject.whole_config, command), "--card")
        write_json(options.json, report.as_dict())
        for path in filter(None, (page, card, options.json)):
            show(f"\nwritten: {path}")
    return 0 if report.passed else 1
