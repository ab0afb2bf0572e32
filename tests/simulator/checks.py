"""What a simulated run has left on disk, read without sftron's readers, and what must hold of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.simulator.data import is_dropped


def steps_in(checkpoints: Path) -> dict[int, Path]:
    """Returns the folders of checkpoints by their steps, newest first."""
    folders = checkpoints.glob("step-*") if checkpoints.is_dir() else ()
    found = {int(each.name[5:]): each for each in folders if each.name[5:].isdigit()}
    return dict(sorted(found.items(), reverse=True))


def is_intact(folder: Path) -> bool:
    try:
        files = json.loads((folder / "MANIFEST.json").read_bytes())["files"]
        contents = {name: (folder / name).read_bytes() for name in files}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    sums = {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()}
    stated = {name: (each["size"], each["sha256"]) for name, each in files.items()}
    return sums == stated and {each.name for each in folder.iterdir()} == {*files, "MANIFEST.json"}


def newest_step(checkpoints: Path) -> int:
    """Returns the step of the newest intact checkpoint; 0 if there is none."""
    return next((step for step, folder in steps_in(checkpoints).items() if is_intact(folder)), 0)


def last_step(run: Path) -> int:
    """Returns the last step in metrics.jsonl."""
    return json.loads((run / "metrics.jsonl").read_bytes().splitlines()[-1])["step"]


def status_of(run: Path) -> str:
    try:
        return json.loads((run / "result.json").read_bytes())["status"]
    except (OSError, ValueError):
        return "no result"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the whole tensors of a checkpoint, from the rows in the files of its ranks."""
    parts: dict[str, list[torch.Tensor]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            parts.setdefault(name, []).append(tensor)
    return {name: torch.cat(each) if each[0].ndim else each[0] for name, each in parts.items()}


def _matrix_of(export: Path) -> torch.Tensor | None:
    """Returns the weights of an export; None if it is not there, or not whole."""
    try:
        return load_file(export / "model.safetensors")["matrix"]
    except Exception:  # safetensors has errors of its own for each way in which a file is torn
        return None


def unsound_files(run: Path) -> Iterator[str]:
    """Yields what is wrong at any time: `latest` names no whole export, or a checkpoint's weights are broken."""
    export = (run / "latest").resolve()
    is_replaced = any(export.parent.glob(f"{export.name}.replaced-*"))  # the next start restores it
    if (run / "latest").is_symlink() and not is_replaced and _matrix_of(export) is None:
        yield f"latest names {export.name}, which is no whole export"
    for folder in steps_in(run / "checkpoints").values():
        if is_intact(folder) and not all(each.isfinite().all() for each in tensors_of(folder).values()):
            yield f"{folder.name} has weights that are not finite"


# --- The end of a run ---


@dataclass(frozen=True)
class End:
    """What a complete run has left, which no fault and no layout may change."""

    step: int
    weights: dict[str, Any]
    progress: dict[str, Any]
    position: dict[str, Any]
    metrics: list[Any] | str
    evaluations: list[Any] | str
    best: dict[str, Any] | str

    @classmethod
    def of(cls, run: Path) -> End:
        step = newest_step(run / "checkpoints")
        folder = run / "checkpoints" / f"step-{step}"
        state = json.loads((folder / "state.json").read_bytes())
        weights = {name: tensor.tolist() for name, tensor in tensors_of(folder).items()}
        metrics = _records(run / "metrics.jsonl", "step", "rows", "loss", "total_tokens")
        evaluations = _records(run / "evaluations.jsonl", "step", "sets")
        return cls(step, weights, state["progress"], state["data"], metrics, evaluations, _json(run / "best.json"))

    def differences(self, alone: End, excused: set[str]) -> Iterator[str]:
        """Yields how this end differs from that of the run that was left alone."""
        for name, expected in vars(alone).items():
            found = getattr(self, name)
            if name not in excused and found != expected:
                yield f"{name}: {_first_difference(found, expected)}, in the run that was left alone"


def wrong_counts(run: Path, num_epochs: int) -> Iterator[str]:
    """Yields the rows that the final weights have not trained once in each epoch."""
    matrix = tensors_of(run / "checkpoints" / f"step-{newest_step(run / 'checkpoints')}")["matrix"]
    for row, counts in enumerate(matrix[:, :-1].int().tolist()):
        wanted = 0 if is_dropped(row) else 1
        if counts != [wanted] * num_epochs + [0] * (len(counts) - num_epochs):
            yield f"row {row} was trained {counts} times in epochs 0, 1, ..."


def wrong_exports(run: Path, said: str, *, has_best: bool) -> Iterator[str]:
    """Yields which of `latest` and `best` has other weights than the checkpoint of its step.

    A link may be missing if the run has said that it cannot be made.
    """
    steps = {"latest": newest_step(run / "checkpoints")}
    if has_best and isinstance(best := _json(run / "best.json"), dict):
        steps["best"] = best["step"]
    for name, step in steps.items():
        if not (run / name).is_symlink() and f"{name} cannot name" in said:
            continue
        exported, saved = _matrix_of(run / name), tensors_of(run / "checkpoints" / f"step-{step}").get("matrix")
        if exported is None or saved is None or not exported.equal(saved):
            yield f"{name} has not the weights of step {step}"


def _records(path: Path, *names: str) -> list[Any] | str:
    try:
        return [[record[name] for name in names] for record in map(json.loads, path.read_text().splitlines())]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return repr(error)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        return repr(error)


def _first_difference(own: Any, other: Any) -> str:
    if isinstance(own, list) and isinstance(other, list):
        own, other = ({"length": len(each), **dict(enumerate(each))} for each in (own, other))
    if isinstance(own, dict) and isinstance(other, dict):
        name = next(name for name in own | other if own.get(name) != other.get(name))
        return f"{name}: {_first_difference(own.get(name), other.get(name))}"
    return f"{own}, and {other}"[:300]
