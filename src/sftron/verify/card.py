"""The card of a verified run (verify.yaml): every check, and the versions and hashes of what was checked.

docs/verify.md describes the keys. train/model_card.py links the card that is in a run directory.
"""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from sftron import __version__
from sftron.checkpoint.hf_weights import file_digests
from sftron.config import Config, dump_config
from sftron.errors import without_secrets
from sftron.train.model_card import VERIFY_CARD_SCHEMA
from sftron.verify.subject import Subject
from sftron.verify.table import Check, RunReport

_FOLDERS = re.compile(r"(?<![\w.~/:-])(?:~|\.\.?)?/(?:[^\s/,;:'\"]+/)+")
"""Matches the folders of an absolute path, or of one that begins with ~ or a dot."""


def card_of(report: RunReport, subject: Subject, config: Config, command: str) -> str:
    """Returns the card as YAML that `yaml.safe_load` reads, without secrets and without folders of this machine.

    Args:
        report: The rows that were carried out on `subject`.
        config: The configuration as it was loaded; the subject's has fewer layers with --layers.
        command: The command line.
    """
    of_data = subject.preparation.fingerprint
    card = {
        "schema": VERIFY_CARD_SCHEMA,
        "passed": report.passed,
        "verdict": f"{report.verdict} {report.not_measured}".strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "git": _commit(Path.cwd()),
        "versions": {
            "sftron": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "scope": {name: fact for name, fact in report.facts.items() if name not in ("versions", "date")},
        "hashes": {
            "config": hashlib.sha256(dump_config(config).encode()).hexdigest(),
            "chat_template": of_data["chat_template"],
            "tokenizer": of_data["tokenizer"],
            "weights": file_digests(subject.model_folder),
            "data": of_data,
        },
        "checks": [_row(check) for check in report.checks],
    }
    return yaml.safe_dump(_shortened(without_secrets(card)), sort_keys=False, width=120)


def _row(check: Check) -> dict[str, Any]:
    row: dict[str, Any] = {"name": check.name, "status": check.status, "measured": check.measured}
    row |= {"allowed": check.allowed, "proves": check.proves}
    return row | ({"remedy": check.remedy} if check.passed is False else {})


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shortened(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    return _FOLDERS.sub("", value) if isinstance(value, str) else value


def _commit(folder: Path) -> dict[str, Any] | None:
    """Returns the commit of the repository that `folder` is in, and whether files differ from it; None without one."""
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=60
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "modified": bool(changes)}
