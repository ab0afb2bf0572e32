"""Trains a model on conversations, or continues a run:

    sftron train --config FILE [--section.key=value ...] [--dry-run | --record N] [--quiet] [--verbose]
    torchrun --nproc_per_node=N -m sftron train --config FILE ...

Exit status: 0 completed, or stopped on request after saving; 1 failed; 2 invalid configuration or data (a message, no
traceback); 3 diverged, or the loss was not finite three times in a row or for the final weights; 4 the loss of a kept
set rose beyond a limit that stops the run (evaluation.keep).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sftron.errors import REFUSED, refuse, show, show_traceback
from sftron.train.signals import StopRequest, die_with_torchrun

if TYPE_CHECKING:
    from sftron.config import Config


_OPTIONS = """\
--dry-run      Check everything, and train nothing.
--record N     Write record.safetensors to the run's folder: what the first N steps train, for sftron diff.
-q, --quiet    Print only warnings and the outcome; console.log has everything.
-v, --verbose  Print the traceback of an error too.
"""
_SWITCHES = {
    **{each: each for each in ("--dry-run", "--quiet", "--verbose")},
    "-q": "--quiet",
    "-v": "--verbose",
}


def main(arguments: list[str]) -> int:
    """Runs the command in a process of its own that handles signals from its start.

    The imports of `run` take seconds, during which torchrun may be killed or a scheduler may send a signal.
    """
    die_with_torchrun()
    stop_request = StopRequest(prints=_is_main())
    stop_request.listen()
    try:
        return run(arguments, stop_request)
    finally:
        stop_request.ignore()


def run(arguments: list[str], stop_request: StopRequest | None = None) -> int:
    """Runs the command with another's signal handlers, or with its own for the time of the run."""
    from sftron.config import load_config
    from sftron.config.load import split_arguments

    if not arguments or {"-h", "--help"} & set(arguments):
        return _help(arguments)
    switches = {_SWITCHES[each] for each in arguments if each in _SWITCHES}
    arguments = [each for each in arguments if each not in _SWITCHES]
    dry_run, is_quiet, is_verbose = (each in switches for each in ("--dry-run", "--quiet", "--verbose"))
    try:
        num_recorded, arguments = _split_record(arguments)
        config = load_config(*split_arguments(arguments))
    except ValueError as error:
        return _refuse(error, is_verbose=is_verbose)
    from sftron.train.logs import console

    console.be_quiet(is_quiet)
    try:
        stop_request = stop_request or StopRequest(prints=_is_main())
        if dry_run:
            stop_request.give_back()  # there is nothing to save
            status = 1 if stop_request.received else _run(config, stop_request, dry_run, is_quiet, is_verbose)
        else:
            with stop_request.listening():
                status = _run(config, stop_request, dry_run, is_quiet, is_verbose, num_recorded)
    finally:
        console.be_quiet(False)
    from sftron.train.ranks import end_ranks

    end_ranks()
    return status


def _help(arguments: list[str]) -> int:
    """Prints the help, or that of the section that follows --help. Returns the exit status."""
    from sftron.config import describe_config

    after = [arguments[n + 1 : n + 2] for n, each in enumerate(arguments) if each in ("-h", "--help")]
    section = next((words[0] for words in after if words and not words[0].startswith("-")), None)
    try:
        keys = describe_config(section)
    except ValueError as error:
        return _refuse(error)
    usage = "usage: sftron train --config FILE [--section.key=value ...] [--dry-run | --record N] [-q] [-v]"
    around = f"{__doc__}\n{usage}\n       sftron train --help [SECTION]\n\n{_OPTIONS}\n"
    show((around if section is None else "") + keys)
    return 0 if arguments else REFUSED


def _split_record(arguments: list[str]) -> tuple[int, list[str]]:
    """Returns N of `--record N`, 0 without it, and the other arguments. Raises ValueError."""
    rest, number = list[str](), 0
    given = iter(arguments)
    for argument in given:
        name, equals, value = argument.partition("=")
        if name != "--record":
            rest.append(argument)
            continue
        value = value if equals else next(given, "")
        if not value.isdecimal() or not (number := int(value)):
            raise ValueError(f"--record: found {value!r}; wanted a number of steps, such as --record 1")
    return number, rest


def _run(
    config: Config, stop_request: StopRequest, dry_run: bool, is_quiet: bool, is_verbose: bool, num_recorded: int = 0
) -> int:
    if dry_run and _is_main() and not is_quiet:
        show("dry run    checking the data, the template and the model's files")  # before imports that take seconds
    # Imported here, so that --help and configuration errors take no time.
    from sftron.checkpoint.frozen_files import FrozenWeightsError
    from sftron.data.types import DataError
    from sftron.train import trainer

    try:
        if dry_run:
            return trainer.dry_run(trainer.open_setup(config, plans=True))
        opened = trainer.open_trainer(config, stop_request)
        if num_recorded and isinstance(opened, trainer.Trainer):
            from sftron.train.first_steps import FILE, record_run
            from sftron.train.logs import console

            path = opened.directory.folder / FILE
            record_run(opened, num_recorded).write(path)
            console.write(f"record     what the first steps train: {path}")
    except (ValueError, FrozenWeightsError) as error:
        return _refuse(error, is_verbose=is_verbose)
    try:
        return opened.train()
    except (DataError, FrozenWeightsError) as error:
        return _refuse(error, is_verbose=is_verbose)


def _refuse(error: ValueError | OSError, *, is_verbose: bool = False) -> int:
    """Prints the error on the main rank only, because every rank gets here. Returns the exit status."""
    if is_verbose and _is_main():
        show_traceback(error)
    return refuse(error) if _is_main() else REFUSED


def _is_main() -> bool:
    # A scheduler may leave RANK in the environment of a single process.
    return os.environ.get("RANK", "0") == "0" or "MASTER_ADDR" not in os.environ
