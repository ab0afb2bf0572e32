"""Explains why two trainers, releases or runs differ, down to the tokens: two records, one table.

    sftron diff record my_script.py:make_trainer --out A.safetensors     # in each environment
    sftron diff A.safetensors B.safetensors                              # in any, without torch

A record holds what the first steps train, token by token, at the first weights; the trainer is left as it was. The
difference of the losses is a sum of parts: rows, ids, trained tokens, weights, context, model. Exit status: 0 the parts
add up to the difference, 1 a residual is left that no part explains, 2 a file or a trainer cannot be read (a message,
no traceback).
"""

import errno
import os
import sys
from pathlib import Path

from sftron.commands.arguments import as_path, make_parser, positive, refusing, write_json, writing
from sftron.errors import show
from sftron.report.token_record import TokenRecord, read_record
from sftron.user_code import naming_the_users_line
from sftron.visible_text import counted


@refusing(ValueError)
def main(arguments: list[str]) -> int:
    return record(arguments[1:]) if arguments[:1] == ["record"] else compare(arguments)


def compare(arguments: list[str]) -> int:
    parser = make_parser("diff", __doc__)
    parser.add_argument("a", type=as_path, metavar="A", help="a record")
    parser.add_argument("b", type=as_path, metavar="B", help="another one; the table says what B does otherwise than A")
    parser.add_argument("--json", type=as_path, metavar="FILE", help="write the parts there too")
    options = parser.parse_args(arguments)
    if options.json is not None and options.json.resolve() in (options.a.resolve(), options.b.resolve()):
        parser.error(f"--json: {options.json} is a record that is compared; name another file")
    # Imported here, so that --help and wrong arguments take no time.
    from sftcheck.diff.difference import as_text, difference

    try:
        found = difference(*map(read_record, (options.a, options.b)))
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}; write a record with sftron diff record") from error
    show(as_text(found, color=sys.stdout.isatty() and not os.environ.get("NO_COLOR")), is_visible=True, end="")
    write_json(options.json, found.as_dict())
    return 0 if found.is_explained else 1


def record(arguments: list[str]) -> int:
    parser = make_parser("diff record", "Writes a record of what the first steps of a trainer train.")
    parser.add_argument("target", metavar="SCRIPT.py:FUNCTION", help="a function without arguments; gives the trainer")
    parser.add_argument("--out", type=as_path, required=True, metavar="FILE", help="the record, a safetensors file")
    parser.add_argument("--steps", type=positive, default=1, metavar="N", help="how many steps (default: 1)")
    parser.add_argument("--trained-roles", choices=("assistant", "all"), default="assistant", help="what is meant")
    parser.add_argument("--conversations", type=as_path, metavar="FILE", help="the rows, if only ids are left (JSONL)")
    parser.add_argument("--with-text", action="store_true", help="hold the texts of the tokens, to show them")
    options = parser.parse_args(arguments)
    from sftron.commands.verify_trainer import make_trainer, read_conversations

    require_writable(options.out)
    given = None if options.conversations is None else read_conversations(options.conversations)
    with naming_the_users_line():
        trainer = make_trainer(options.target)
        from sftcheck.record.recorder import record_trainer

        found = record_trainer(trainer, given, options.trained_roles, steps=options.steps, with_text=options.with_text)
    write(found, options.out)
    if found.num_steps < options.steps:
        show(f"found {found.num_steps:,} of {counted(options.steps, 'steps')}: an epoch has no more")
    return 0


def require_writable(path: Path) -> None:
    """Makes the folder of a file. Raises ValueError if the file cannot be written."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        reason = errno.EISDIR if path.is_dir() else errno.EACCES
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise OSError(reason, os.strerror(reason), str(path))


def write(found: TokenRecord, path: Path) -> None:
    """Writes a record, and says what it holds. Raises ValueError if it cannot be written."""
    with writing(path):
        found.write(path)
    trained = int(found.is_trained.sum())
    show(
        f"{len(found.id):,} tokens, {trained:,} trained, in {counted(found.num_steps, 'steps')}; loss {found.loss:.6g}"
    )
    show(f"written: {path}")
