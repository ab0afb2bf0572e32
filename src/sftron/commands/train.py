#!/usr/bin/env python
"""Train: `python run_train.py --config FILE [--section.key=value ...] [--dry-run]`, or on N GPUs
`torchrun --nproc_per_node=N run_train.py ...`.

Exit status: 0 completed, or stopped on request after saving; 1 failed; 2 bad configuration or data (a message, no
traceback); 3 no finite loss three times in a row, or none of the final weights.
"""

import os
import sys

from sftron.train.signals import StopRequest, die_with_torchrun

if __name__ == "__main__":
    # This comes first, because the imports below take seconds, during which torchrun may be killed or a scheduler may
    # send a signal.
    die_with_torchrun()
    _stop_request = StopRequest(speaks=os.environ.get("RANK", "0") == "0")
    _stop_request.listen()

from sftron.config import Config, describe_config, load_config
from sftron.errors import REFUSED, exit_with, refuse, show
from sftron.config.load import split_arguments


def main(arguments: list[str], stop_request: StopRequest | None = None) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        usage = "usage: run_train.py --config FILE [--section.key=value ...] [--dry-run]"
        show(f"{__doc__}\n{usage}\n\n--dry-run checks everything and trains nothing.\n\n{describe_config()}")
        return 0 if arguments else 2
    dry_run = "--dry-run" in arguments
    arguments = [argument for argument in arguments if argument != "--dry-run"]
    try:
        config = load_config(*split_arguments(arguments))
    except ValueError as error:
        return _refuse(error)
    stop_request = stop_request or StopRequest(speaks=os.environ.get("RANK", "0") == "0")
    if dry_run:
        stop_request.give_back()  # there is nothing to save
        status = 1 if stop_request.received else _run(config, stop_request, dry_run)
    else:
        with stop_request.listening():
            status = _run(config, stop_request, dry_run)
    from sftron.train.ranks import end_ranks

    end_ranks()
    return status


def _run(config: Config, stop_request: StopRequest, dry_run: bool) -> int:
    # Imported here, so that --help and configuration errors take no time.
    from sftron.data.types import DataError
    from sftron.train.trainer import Trainer

    try:
        trainer = Trainer(config, stop_request)
        if dry_run:
            return trainer.dry_run()
        trainer.build()
    except ValueError as error:
        return _refuse(error)
    try:
        return trainer.train()
    except DataError as error:
        return _refuse(error)


def _refuse(error: ValueError) -> int:
    """Prints the error on the main rank only, because every rank gets here. Returns the exit status."""
    return refuse(error) if os.environ.get("RANK", "0") == "0" else REFUSED


def _main_then_ignore_signals() -> int:
    try:
        return main(sys.argv[1:], _stop_request)
    finally:
        _stop_request.ignore()


if __name__ == "__main__":
    exit_with(_main_then_ignore_signals)
