"""Records of the configurations of one library in the environment of a release, for `sftron diff`.

    python -m tools.failures.records FOLDER of_trl packing lora

Prints one line of JSON for each configuration: {} where its record is in the folder, or why there is none.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from sftcheck.record.recorder import record_trainer
from tools.failures.cells import configuration_of, first_line, made, print_each

STEPS = 64
"""More than an epoch of any configuration has, so that another shuffle is no other rows."""


def record(folder: Path, module: str, name: str) -> dict[str, Any]:
    """Records an epoch of one configuration. Returns why there is no record, as `not_run`."""
    configuration = configuration_of(module, name)
    if configuration is None:
        return {"not_run": "has none"}
    try:
        trainer = made(configuration)
    except Exception as error:
        return {"not_run": f"raises {first_line(error)}"}
    try:
        found = record_trainer(trainer, configuration.conversations, configuration.roles, steps=STEPS)
    except ValueError as error:
        return {"not_run": f"cannot be recorded: {first_line(error)}"}
    found.write(folder / f"{name}.safetensors")
    return {}


if __name__ == "__main__":
    print_each(partial(record, Path(sys.argv[1])), sys.argv[2], sys.argv[3:])
