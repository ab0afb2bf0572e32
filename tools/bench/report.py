"""What was measured, as Markdown."""

from __future__ import annotations

import datetime
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

_SPEED = {
    "tokens/s": "tokens/s",
    "median": "median",
    "quartiles": "quartiles",
    "lowest": "lowest",
    "s/step": "s a step",
    "tokens/step": "tokens a step",
    "computed/real": "computed / real",
}
_PACKS = {
    "median": "tokens/s",
    "quartiles": "quartiles",
    "lowest": "lowest",
    "s/step": "s a step",
    "TFLOP/s": "TFLOP/s",
    "mfu": "mfu",
    "of matmul rate": "of matmul rate",
    "peak GB": "peak GB",
}


def machine(device: torch.device) -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.split(": ")[1] for line in lines if line.startswith("model name") and ": " in line]
    packages = ("torch", "transformers", "triton", "liger_kernel", "tokenizers")
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cores": f"{os.cpu_count()}, {names[0] if names else platform.machine()}",
        "threads": str(torch.get_num_threads()),
        "load before": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        **{name: version(name) for name in packages if importlib.util.find_spec(name)},
    }


def markdown(results: Mapping[str, Any]) -> str:
    """The whole report; `results` as bench_step.py has them."""
    parts = [
        "# Whole training steps, timed by turns",
        ", ".join(f"{name} {value}" for name, value in results["machine"].items()),
        f"```\n{results['command']}\n```",
        "Real tokens only: padding and the unused tail are computed and not counted. Reading, collating and packing, "
        "clipping and AdamW are in each step.",
    ]
    for name, found in results["speed"].items():
        parts += [f"## {TITLES[name]}", *_speed(found), *_targets(found["targets"])]
    for name, found in results["memory"].items():
        columns = {"peak": "peak GB", "weights": "of it weights, gradients, AdamW"}
        parts += [f"## Peak memory, {TITLES[name]}", table(found["ways"], columns), *_targets(found["targets"])]
    for name, found in results["loss"].items():
        ends = {way: {"steps seen": len(curve) - 1, **curve[-1]} for way, curve in found["curves"].items()}
        columns = {"tokens": "tokens", "seconds": "s", "loss": "validation loss"}
        start = next(iter(found["curves"].values()))[0]["loss"]
        parts += [
            f"## Validation loss, {TITLES[name]}",
            f"From {start:.4f} before the first step; {found['shape']}; held-out conversations one by one.",
            table(ends, columns),
            *([f"![loss against tokens and seconds]({Path(found['plot']).name})"] if found["plot"] else []),
            *_targets(found["targets"]),
        ]
    for shape, found in results["packs"].items():
        parts += [f"## {shape}", *_packs(found), *_targets(found["targets"])]
    return "\n\n".join(parts) + "\n"


TITLES = {"flan": "FLAN-like lengths", "file": "lengths of the file"}


def _speed(found: Mapping[str, Any]) -> list[str]:
    data = ", ".join(f"{name} {value}" for name, value in found["conversations"].items())
    leaking = next(name for name in found if "use_cache" in name)
    return [
        f"{data}; packs of {found['token budget']} tokens; {found['left out']} longer conversations left out for all.",
        table(found["ways"], _SPEED),
        f"Loss of the first conversations, the same for all to rounding: {_losses(found['same losses'])}. "
        f"{leaking}: {found[leaking]['loss']:.3f}, as its documents see each other; it is not timed.",
    ]


def _packs(found: Mapping[str, Any]) -> list[str]:
    turns = "by turns" if found["interleaved"] else "one family after another, as memory does not hold all"
    return [
        f"{found['device']}. Timed {turns}; one large bf16 product ran at {found['matmul TFLOP/s']:.3g} TFLOP/s "
        "between the rounds.",
        table(found["ways"], _PACKS),
        f"Loss of the first conversations, the same for all to rounding: {_losses(found['same losses'])}.",
        *(f"Left out: {name}, {why}." for name, why in found["left out"].items()),
    ]


def _losses(checked: Mapping[str, Mapping[str, float]]) -> str:
    return "; ".join(f"{name} {each['loss']:.4f}" for name, each in checked.items())


def _targets(targets: Mapping[str, bool]) -> list[str]:
    lines = [f"- {'reached' if reached else 'MISSED'}: {what}" for what, reached in targets.items()]
    return ["\n".join(lines)] if lines else []


def table(lines: Mapping[str, Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A Markdown table; columns: from the key of a value to its heading."""
    head = ["", *columns.values()]
    rows = [[name, *(as_text(each.get(key)) for key in columns)] for name, each in lines.items()]
    rule = ["---", *("---:" for _ in columns)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def as_text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Sequence):
        return " to ".join(map(as_text, value))
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def say(line: str) -> None:
    """While it runs, beside the report."""
    print(line, file=sys.stderr, flush=True)
