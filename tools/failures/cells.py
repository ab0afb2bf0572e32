"""Configurations of one library in the environment of a release, each in a process of its own with a time limit.

    python -m tools.failures.cells of_trl packing lora

The libraries are imported once, and each process is a fork. Prints one line of JSON for each configuration: the report
of verify_trainer, and what each row that passed says of the same trainer with the fault of its mutant.
"""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import random
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import transformers

from sftcheck.restore import restore_after
from sftcheck.trainer.trainer_subject import TrainerSubject
from sftcheck.verify_trainer import RULES, verify_trainer
from sftron.checks.report import Check, carry_out
from tools.failures.materials import FORGED, SCRATCH, Configuration
from tools.failures.mutants import MUTANTS, faults_of

SECONDS = 600
"""The most that one configuration may take."""


def run(module: str, name: str) -> dict[str, Any]:
    """Returns what is known of one configuration: `rows`, or `not_run` with the reason."""
    configuration = configuration_of(module, name)
    if configuration is None:
        return {"not_run": "has none"}
    found: dict[str, Any] = {"option": configuration.option}
    try:
        trainer = made(configuration)
    except Exception as error:
        return found | {"not_run": f"raises {first_line(error)}"}
    try:
        report = verify_trainer(trainer, configuration.conversations, configuration.roles)
    except ValueError as error:
        return found | {"not_run": f"cannot be checked: {first_line(error)}"}
    return found | {"rows": {each.name: _row(each, trainer, configuration) for each in report.checks}}


def configuration_of(module: str, name: str) -> Configuration | None:
    return importlib.import_module(f"tools.failures.{module}").CONFIGURATIONS.get(name)


def made(configuration: Configuration, *more: Any) -> Any:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    return configuration.make([*configuration.rows, *more])


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def _row(check: Check, trainer: Any, configuration: Configuration) -> dict[str, Any]:
    row: dict[str, Any] = {"status": check.status, "measured": check.measured}
    if check.passed is False:
        row |= {"faults": list(check.faults), "remedy": check.remedy, "detail": list(check.detail)}
    if check.passed and faults_of(check.name):
        mutated = mutated_check(check.name, trainer, configuration)
        row["mutant"] = {"status": mutated.status, "measured": mutated.measured}
    return row


def mutated_check(row: str, trainer: Any, configuration: Configuration) -> Check:
    """Returns the row of the same trainer with the fault of its mutant."""
    conversations = configuration.conversations
    if row == "forgery":
        trainer = made(configuration, FORGED)
        conversations = None if conversations is None else [*conversations, {**conversations[0], "messages": FORGED}]
    with restore_after(trainer):
        MUTANTS[faults_of(row)[0]](trainer)
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        subject = TrainerSubject(trainer, tokenizer, conversations, configuration.roles)
        (check,) = carry_out([rule for rule in RULES if rule.name == row], subject)
    return check


Run = Callable[[str, str], dict[str, Any]]
"""Returns the result of a configuration, by its module and its name."""


def _send(run: Run, module: str, name: str, sender: Connection) -> None:
    sender.send(run(module, name))
    sender.close()


def limited(run: Run, module: str, name: str) -> dict[str, Any]:
    """Returns what `run` returns in a fork, or why there is nothing, as `broken`."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_send, args=(run, module, name, sender))
    process.start()
    sender.close()
    try:
        result = receiver.recv() if receiver.poll(SECONDS) else {"broken": f"took longer than {SECONDS} s"}
    except EOFError:
        result = {"broken": "the process ended without a result"}
    process.kill()
    process.join()
    return result


def print_each(run: Run, module: str, names: Sequence[str]) -> None:
    """Prints the result of each configuration as a line of JSON."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    importlib.import_module(f"tools.failures.{module}")
    try:
        for chosen in names:
            print("\n" + json.dumps({"configuration": chosen, "result": limited(run, module, chosen)}), flush=True)
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)


if __name__ == "__main__":
    print_each(run, sys.argv[1], sys.argv[2:])
