#!/usr/bin/env python
"""Train: `torchrun --nproc_per_node=1 run_train.py --config FILE [--section.key=value ...] [--dry-run]`.

Exit status: 0 completed, or stopped on request after saving; 1 failed; 2 bad configuration or data (a message, no
traceback); 3 no finite loss three times in a row.
"""

import os
import sys
import traceback
from types import TracebackType

from sftron.config import ConfigError, describe_config, load_config
from sftron.config.secrets import redacted

USAGE = "usage: run_train.py --config FILE [--section.key=value ...] [--dry-run]"


def main(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__, USAGE, "\n--dry-run checks everything and trains nothing.\n", describe_config(), sep="\n")
        return 0 if arguments else 2
    dry_run = "--dry-run" in arguments
    arguments = [argument for argument in arguments if argument != "--dry-run"]
    try:
        config = load_config(*_config_and_overrides(arguments))
    except ValueError as error:
        return _refuse(error)
    # Imported here, so that --help and a broken configuration answer at once.
    from sftron.data.types import DataError
    from sftron.train.distributed import end_ranks
    from sftron.train.trainer import Trainer

    try:
        try:
            trainer = Trainer(config)
            if dry_run:
                return trainer.dry_run()
            trainer.build()
        except ValueError as error:
            return _refuse(error)
        try:
            return trainer.train()
        except DataError as error:
            return _refuse(error)
    finally:
        end_ranks()


def _refuse(error: ValueError) -> int:
    """Every rank of several comes here; one of them says it."""
    if os.environ.get("RANK", "0") == "0":
        print(redacted(str(error)), file=sys.stderr)
    return 2


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """As Python does, without secrets: what libraries raise may quote a proxy's or a mirror's URL."""
    print(redacted("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def _config_and_overrides(arguments: list[str]) -> tuple[str, list[str]]:
    """Raises ConfigError where no file, or more than one, is named."""
    paths, overrides, rest = [], [], iter(arguments)
    for argument in rest:
        if argument == "--config":
            paths.append(next(rest, ""))
        elif argument.startswith("--config="):
            paths.append(argument.removeprefix("--config="))
        else:
            overrides.append(argument)
    if len(paths) != 1 or not paths[0]:
        raise ConfigError([f"one --config FILE is needed, found {len(paths)}. {USAGE}"])
    return paths[0], overrides


if __name__ == "__main__":
    sys.excepthook = _show_traceback
    sys.exit(main(sys.argv[1:]))
