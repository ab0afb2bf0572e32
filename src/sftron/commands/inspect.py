"""Shows the data as training will see it: packs in color, and an audit of the rows. Needs no weights.

Proves, on the rows it reads: each conversation has the ids of apply_chat_template (it counts texts that spell control
tokens separately); every assistant turn trains its stop token; every label is the next token of the same conversation;
and, on the first 400 conversations, each answer is trained from the end of its prompt as transformers renders it. It
counts conversations that it cannot compare by reason; more than 5% of them are a problem. It counts rows that are held
out of training but does not audit them. Exit status: 0 nothing wrong, 1 a problem found, 2 bad configuration or data.
"""

import sys

from sftron.commands.arguments import OVERRIDES, as_path, count, make_parser, refusing, write_json, write_report
from sftron.config import load_config
from sftron.errors import show


@refusing(ValueError)
def main(arguments: list[str]) -> int:
    parser = make_parser("inspect", __doc__, OVERRIDES)
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's configuration")
    parser.add_argument("-n", type=count, default=1, metavar="N", help="packs to show (default 1)")
    parser.add_argument("--packs", type=count, default=100, metavar="N", help="packs to count (default 100)")
    parser.add_argument("--rows", type=count, default=10_000, metavar="N", help="rows to audit (default 10000; 0: all)")
    parser.add_argument("--all-tokens", action="store_true", help="show whole packs, however long")
    parser.add_argument("--html", type=as_path, metavar="OUT", help="also write one self-contained page")
    parser.add_argument("--json", type=as_path, metavar="FILE", help="also write the audit as JSON")
    options, overrides = parser.parse_known_args(arguments)
    # Imported here, so that --help takes no time.
    from sftron.checks.inspect_run import inspect, open_data
    from sftron.data.chat.layout import kwarg_in_words
    from sftron.data.formats.detect import FORMAT_SAMPLE, unread_columns
    from sftron.report.terminal import wants_color

    config = load_config(options.config, overrides)
    preparation = open_data(config)
    num_rows = options.rows or None
    inspection = inspect(
        config, num_shown=options.n, num_packs=options.packs, num_rows=num_rows, preparation=preparation
    )
    if kwargs := preparation.chat_tokenizer.template.kwargs:
        show(f"the chat template gets {', '.join(map(kwarg_in_words, kwargs.items()))} (tokenizer.template_kwargs)\n")
    for each in preparation.datasets:
        if unread := unread_columns(each.first_rows(FORMAT_SAMPLE), each.row_format):
            show(f"{each.name}: columns that are not read: {', '.join(unread)}\n")
        if pieces := each.pieces_in_words:
            show(f"{each.name}: {pieces}; {preparation.chat_tokenizer.documents.frame_in_words}\n")
    max_tokens = None if options.all_tokens else 1000
    show(inspection.as_text(color=wants_color(sys.stdout), max_tokens=max_tokens), end="", is_visible=True)
    if options.html:
        write_report(options.html, inspection.as_html(), "--html")
        show(f"\nwritten: {options.html}")
    write_json(options.json, inspection.audit.as_dict())
    return 1 if inspection.problems else 0
