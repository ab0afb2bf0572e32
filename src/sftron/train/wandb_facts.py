"""What wandb is told of a run beside its metrics: what it is made of, what it is trained on, how it ended."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from sftron import __version__
from sftron.config.secrets import redacted, without_secrets
from sftron.data.types import Pack
from sftron.report.tokens import Decode, key_text, role_name, shown_conversations
from sftron.train.plan import RunPlan
from sftron.visible_text import visible_text

_PACKAGES = ("torch", "transformers", "tokenizers", "triton", "datasets", "torchdata", "wandb")
_TIME_FOR_GIT_S = 5.0
_MAX_ROWS, _MAX_CHARACTERS = 500, 10_000
"""Of the sample's table."""
_FINAL_STEPS = 50

SAMPLE_COLUMNS = ("conversation", "role", "text", "trained", "tokens")


def run_facts(plan: RunPlan, num_parameters: int) -> dict[str, Any]:
    """The resolved configuration, section by section, and beside it under `run` what else decides the numbers. Nothing
    of the machine but its accelerator."""
    device, devices = plan.ranks.device, plan.ranks.dp_world_size
    facts = {
        **plan.config.model_dump(mode="json"),
        "run": {
            "versions": _versions(),
            "git": git_state(Path.cwd()),
            "data": plan.fingerprint,
            "parameters": num_parameters,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "num_ranks": devices,
            "peak_tflops": plan.peak.tflops,
            "attention": plan.attention,
            "loss": plan.loss,
            "tokens_per_epoch": plan.projection.tokens_per_epoch,
        },
    }
    return without_secrets(facts)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "sftron": __version__}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["torch"] = str(torch.__version__)  # with its build, which a wheel's name may lack
    return versions | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of the working copy that `folder` is in, and whether files differ from it; None where there is none.

    For seconds at most: on a network's file system git may take minutes. Nothing that the working copy's own settings
    name is run.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *arguments],
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIME_FOR_GIT_S,
            check=True,
        ).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def sample_rows(pack: Pack, decode: Decode, source_names: tuple[str, ...]) -> list[tuple[str, str, str, bool, int]]:
    """The pack as rows of SAMPLE_COLUMNS: each stretch of one role that is trained, or is not.

    conversation      role       text                        trained  tokens
    row 3 of a.jsonl  template   <|im_start|>user              False    3
    row 3 of a.jsonl  user       Hi                            False    1
    row 3 of a.jsonl  template   <|im_end|> <|im_start|>...    False    5
    row 3 of a.jsonl  assistant  Yo<|im_end|>                  True     2
    """
    rows: list[tuple[str, str, str, bool, int]] = []
    for stretch in _stretches(pack, decode, source_names):
        rows.append(stretch)
        if len(rows) == _MAX_ROWS:
            break
    return rows


def _stretches(pack: Pack, decode: Decode, source_names: tuple[str, ...]) -> Iterator[tuple[str, str, str, bool, int]]:
    for conversation in shown_conversations(pack, decode):
        name = redacted(key_text(conversation.key, source_names))
        pieces = [piece for block in conversation.blocks for piece in block.pieces]
        while pieces:
            first, number = pieces[0], 1
            while number < len(pieces) and _is_alike(first, pieces[number]):
                number += 1
            stretch, pieces = pieces[:number], pieces[number:]
            text = visible_text("".join(piece.text for piece in stretch))[:_MAX_CHARACTERS]
            num_tokens = stretch[-1].end - first.start
            yield name, role_name(first.role), redacted(text), first.is_trained, num_tokens


def _is_alike(one: Any, other: Any) -> bool:
    return (one.role, one.is_trained) == (other.role, other.is_trained)


class FinalFigures:
    """Of the last 50 steps, for tables of runs and for sweeps: one step's loss is a matter of luck."""

    def __init__(self) -> None:
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=_FINAL_STEPS)

    def add(self, numbers: Mapping[str, Any]) -> None:
        """numbers: of one step; others are passed over."""
        if "trained_tokens" in numbers and "step_seconds" in numbers:
            self._steps.append(numbers)

    def as_dict(self) -> dict[str, float]:
        """loss: the mean over trained tokens. Empty before the first step."""
        if not self._steps:
            return {}
        figures = {
            "final/tokens_per_second": sum(step["tokens"] for step in self._steps)
            / sum(step["step_seconds"] for step in self._steps)
        }
        told = [step for step in self._steps if "loss" in step and step["trained_tokens"]]
        if told:
            weight = sum(step["trained_tokens"] for step in told)
            figures["final/loss"] = sum(step["loss"] * step["trained_tokens"] for step in told) / weight
        return figures
