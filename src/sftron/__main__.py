"""The command `sftron`, and `python -m sftron`."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module, metadata
from typing import NoReturn

from sftron import __version__
from sftron.errors import REFUSED, exit_with, show

COMMANDS = {
    "init": "write a configuration for your own data, after looking at it",
    "train": "train a model on your conversations, or continue a run",
    "inspect": "show the data as it will be trained on, with an audit of the rows",
    "verify": "check a run before it begins: data, masks, model, packing, resume",
    "verify-trainer": "check a trainer of TRL, transformers or another library before it trains",
    "diff": "explain why two trainers, releases or runs differ, token by token",
    "check": "compare a model folder with transformers, or an adapter with peft",
    "generate": "chat with a trained model",
    "sweep": "run the grid of a sweep file",
    "compare": "compare runs: losses, speed, memory",
    "convert": "convert a checkpoint, or merge an adapter into its base",
    "completion": "print a script that completes commands and keys in bash or zsh",
    "audit": "prove that a run trained every row, and name the rows of a step",
}
"""What each command does. Its module in sftron.commands has the same name."""


OTHER_NAMES = {
    "chat": "generate",
    "infer": "generate",
    "serve": "generate",
    "export": "convert",
    "merge": "convert",
    "merge-lora": "convert",
    "eval": "check",
    "evaluate": "check",
    "sft": "train",
    "finetune": "train",
    "fine-tune": "train",
    "resume": "train",
    "preprocess": "inspect",
}
"""Command names of other trainers, each with the closest command here."""

WITHOUT_TRAINING = ("verify-trainer", "diff")
"""The commands that run without the packages of the extra `train`."""


def packages_for_training() -> list[str]:
    """Returns the requirements of the extra `train` that this environment does not meet, with installed versions."""
    from packaging.requirements import Requirement  # of transformers

    try:
        stated = metadata.requires("sftron") or []
    except metadata.PackageNotFoundError:  # run from its sources
        return []
    missing = []
    for requirement in map(Requirement, stated):
        if requirement.marker is None or not requirement.marker.evaluate({"extra": "train"}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(str(requirement).partition(";")[0])
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"{requirement.name}{requirement.specifier} ({version} is installed)")
    return missing


def usage() -> str:
    lines = [f"  {name:<16}{text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: sftron COMMAND [arguments]",
            "",
            "Supervised fine-tuning that you can verify.",
            "",
            *lines,
            "",
            "`sftron COMMAND --help` describes its arguments. On N GPUs:",
            "  torchrun --nproc_per_node=N -m sftron train ...",
            "Exit status: 0 success, 1 a failure, 2 invalid arguments, configuration or data; of train also",
            "3 if the run diverges or its loss is not finite, 4 if it forgets more than evaluation.keep allows.",
        ]
    )


def main(arguments: list[str]) -> int:
    """Runs one command. Returns its exit status."""
    name, rest = arguments[0] if arguments else "--help", arguments[1:]
    if name in ("-h", "--help", "help"):
        show(usage())
        return 0 if arguments else REFUSED
    if name in ("-V", "--version"):
        show(f"sftron {__version__}")
        return 0
    if name not in COMMANDS:
        near = OTHER_NAMES.get(name) or next(iter(get_close_matches(name, COMMANDS)), None)
        advice = f"; `sftron {near}` can {COMMANDS[near]}" if near else ""
        show(f"sftron: unknown command {name!r}; choose from {', '.join(COMMANDS)}{advice}", to=sys.stderr)
        return REFUSED
    if name not in WITHOUT_TRAINING and (missing := packages_for_training()):
        words = f"sftron {name} needs {', '.join(missing)}: pip install 'sftron[train]'"
        show(words, to=sys.stderr)
        return REFUSED
    # Imported here, because the imports of a command take seconds.
    return import_module(f"sftron.commands.{name.replace('-', '_')}").main(rest)


def entry_point() -> NoReturn:
    exit_with(lambda: main(sys.argv[1:]))


if __name__ == "__main__":
    entry_point()
