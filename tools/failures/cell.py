"""One configuration in the environment of a release, in a process of its own: prints one line of JSON.

python -m tools.failures.cell of_trl packing
"""

from __future__ import annotations

import importlib
import json
import logging
import random
import sys
import traceback
import warnings
from typing import Any

import numpy as np
import torch
import transformers

from sftron.verify.report import Check, carry_out
from sftron.verify.trainer.state import untouched
from sftron.verify.trainer.subject import TrainerSubject
from sftron.verify.verify_trainer import RULES, verify_trainer
from tools.failures.materials import FORGED, Configuration
from tools.failures.mutants import MUTANTS

_RULES = {rule.name: rule for rule in RULES}


def run(module: str, name: str) -> dict[str, Any]:
    """Returns what the page needs to know of one configuration: `rows`, or `not_run` with the reason."""
    library: Any = importlib.import_module(f"tools.failures.{module}")
    if name not in library.CONFIGURATIONS:
        return {"not_run": "has none"}
    configuration: Configuration = library.CONFIGURATIONS[name]
    found: dict[str, Any] = {"option": configuration.option}
    try:
        trainer = made(configuration)
    except Exception as error:
        return found | {"not_run": f"raises {_first_line(error)}", "trace": traceback.format_exc()}
    try:
        report = verify_trainer(trainer, configuration.conversations, configuration.roles)
    except ValueError as error:
        return found | {"not_run": f"cannot be checked: {_first_line(error)}"}
    return found | {"rows": {each.name: _row(each, trainer, configuration) for each in report.checks}}


def made(configuration: Configuration, *more: Any) -> Any:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    return configuration.make([*configuration.rows, *more])


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def _row(check: Check, trainer: Any, configuration: Configuration) -> dict[str, Any]:
    row: dict[str, Any] = {"status": check.status, "measured": check.measured}
    if check.passed is False:
        row |= {"remedy": check.remedy, "detail": list(check.detail)}
    if check.passed:
        mutated = mutated_check(check.name, trainer, configuration)
        row["mutant"] = {"status": mutated.status, "measured": mutated.measured}
    return row


def mutated_check(row: str, trainer: Any, configuration: Configuration) -> Check:
    """Returns the row of the same trainer with the fault of its mutant."""
    conversations = configuration.conversations
    if row == "forgery":
        trainer = made(configuration, FORGED)
        conversations = None if conversations is None else [*conversations, {**conversations[0], "messages": FORGED}]
    with untouched(trainer):
        MUTANTS.get(row, lambda _: None)(trainer)
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        subject = TrainerSubject(trainer, tokenizer, conversations, configuration.roles)
        (check,) = carry_out([_RULES[row]], subject)
    return check


def hush() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    hush()
    torch.set_num_threads(1)
    result = run(*sys.argv[1:])
    print("\n" + json.dumps(result))
