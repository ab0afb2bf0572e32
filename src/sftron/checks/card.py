"""The card of a verified run (verify.yaml): every check, with the versions and hashes of its subject.

docs/verify.md describes the keys. train/model_card.py links the card that is in a run directory.
"""

from __future__ import annotations

import platform
import shlex
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from sftron import __version__
from sftron.checkpoint.hf_weights import file_digests
from sftron.checks.report import Report
from sftron.checks.subject import Subject
from sftron.checks.verify_run import select
from sftron.config import Config, dump_config
from sftron.errors import without_secrets
from sftron.local_paths import without_folders
from sftron.train.logs.run_logs import git_state
from sftron.train.model_card import VERIFY_CARD_SCHEMA, config_digest


def card_of(report: Report, subject: Subject, config: Config, command: str) -> str:
    """Returns the card as YAML for `yaml.safe_load`, without secrets and without this machine's folders.

    Args:
        report: The rows measured on `subject`.
        config: The configuration as loaded; the subject's has fewer layers with --layers.
        command: The command line.
    """
    of_data, setup = subject.preparation.fingerprint, subject.setup_or_refusal
    # The future config.yaml of the run, or the loaded configuration if the run would be refused.
    resolved = config if isinstance(setup, ValueError) else replace(setup, config=config).resolved_config
    all_checks = {rule.name for rule in select((), with_ranks=False, with_lora=config.lora is not None)}
    is_partial = {"--only": not all_checks <= {check.name for check in report.checks}, "--layers": bool(subject.depth)}
    columns = ("name", "status", "measured", "allowed", "proves", "remedy")
    card = {
        "schema": VERIFY_CARD_SCHEMA,
        "passed": report.passed,
        "verdict": f"{report.verdict} {report.not_measured}".strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "git": git_state(Path.cwd()),
        "versions": {
            "sftron": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "partial": [option for option, has_left_out in is_partial.items() if has_left_out],
        "scope": {name: fact for name, fact in report.facts.items() if name not in ("versions", "date")},
        "hashes": {
            "config": config_digest(dump_config(resolved)),
            "chat_template": of_data["chat_template"],
            "tokenizer": of_data["tokenizer"],
            "weights": file_digests(subject.model_folder),
            "data": of_data,
        },
        "checks": [
            {name: getattr(check, name) for name in columns if name != "remedy" or check.passed is False}
            for check in report.checks
        ],
    }
    shortened = without_folders(without_secrets(card), _folders(subject, config, command))
    return yaml.safe_dump(shortened, sort_keys=False, width=120)


def _folders(subject: Subject, config: Config, command: str) -> list[str]:
    """Returns the folders of all known paths, the longest first."""
    texts = [*shlex.split(command), *_strings(config.model_dump(mode="json"))]
    words = [text.rpartition("=")[2].removeprefix("file://") for text in texts]
    paths = [Path(word).expanduser() for word in words if word.startswith(("/", "~/"))]
    paths += [subject.model_folder.absolute(), subject.scratch / "file", config.run_dir.absolute(), Path.cwd() / "file"]
    parents = {str(each.parent) for path in paths for each in (path, path.resolve())}
    return sorted(parents - {"/"}, key=len, reverse=True)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)
