"""Sweeps of runs that take no time: a substitute for run_train.py, and records as a run writes them."""

import itertools
import json
from pathlib import Path
from typing import Any

import yaml

from sftron.config import dump_config, load_config

ISOLATED, COMPLETIONS = "data.remove_cross_attention", "data.train_on_completions_only"
CONFIG = """\
general: {run_name: run}
model: {path: nowhere}
data: {datasets: [{path: rows.jsonl}]}
tokens: {sequence_length: 64, train_steps: 4}
optimizer: {learning_rate: 1.0e-3}
"""

SUBSTITUTE = '''\
"""Writes what a run writes. Its learning rate decides how it goes: 1 fails, 2 is refused, 3 waits to be stopped."""
import json, signal, sys, time
from sftron.config import dump_config, load_config

config = load_config(sys.argv[2], sys.argv[3:])
rate = config.optimizer.learning_rate
folder = config.run_dir
if rate == 2:
    sys.exit("data.datasets: rows.jsonl does not exist")
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.yaml").write_text(dump_config(config))


def end(status, code, **facts):
    (folder / "result.json").write_text(json.dumps({"status": status, **facts}))
    sys.exit(code)


begun = (folder / "begun").exists()
if rate == 1:
    end("failed", 1, error="CUDA out of memory")
if rate == 3 and not begun:
    signal.signal(signal.SIGTERM, lambda *_: end("preempted", 0))
    (folder / "result.json").write_text(json.dumps({"status": "running"}))
    (folder / "begun").touch()
    time.sleep(60)
with (folder / "metrics.jsonl").open("a") as file:
    file.write(json.dumps({"step": 1, "loss": rate, "total_tokens": 64, "step_seconds": 1.0}) + "\\n")
with (folder.parent / "order").open("a") as file:
    file.write(f"{folder.name}{' again' if begun else ''}\\n")
end("completed", 0)
'''


def write_sweep(folder: Path, parameters: dict[str, Any], **more: Any) -> Path:
    """Writes sweep.yaml, its base configuration and the substitute into `folder`."""
    (folder / "base.yaml").write_text(CONFIG)
    (folder / "run_train.py").write_text(SUBSTITUTE)
    name = "-".join(f"{{{key}}}" for key in parameters)
    tree = {
        "method": "grid",
        "parameters": parameters,
        "command": [
            "${interpreter}",
            str(folder / "run_train.py"),
            "--config",
            str(folder / "base.yaml"),
            f"--general.output_dir={folder / 'runs'}",
            f"--general.run_name=run-{name}",
            "${args}",
        ],
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({**tree, **more}, sort_keys=False))
    return path


def write_run(
    folder: Path,
    *overrides: str,
    status: str = "completed",
    steps: list[dict[str, Any]] | None = None,
    evaluations: list[dict[str, Any]] | None = None,
    error: str = "",
) -> Path:
    """Writes a run directory whose configuration has these overrides."""
    folder.mkdir(parents=True)
    (folder / "base.yaml").write_text(CONFIG)
    names = [f"--general.run_name={folder.name!r}", f"--general.output_dir={folder.parent}"]
    config = load_config(folder / "base.yaml", [*names, *overrides])
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "result.json").write_text(json.dumps({"status": status, "error": error}))
    for name, records in (("metrics", steps), ("evaluations", evaluations)):
        if records is not None:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def step(number: int, *, loss: float = 1.0, speed: float = 100.0, answers: float | None = None) -> dict[str, Any]:
    """A line of metrics.jsonl; `answers` is the assistant's loss, None where it is not measured."""
    roles = {} if answers is None else {"roles": {"assistant": {"loss": answers, "tokens": 40}}}
    return {
        "step": number,
        "loss": loss,
        "trained_tokens": 50,
        "total_tokens": 64 * number,
        "tokens_per_second": speed,
        "tflops": speed / 1e3,
        "step_seconds": 64 / speed,
        "peak_memory_gb": 2.5,
        **roles,
    }


def ablation(folder: Path) -> list[Path]:
    """2 x 2 toggles, 2 seeds. Isolated runs are 1.5 times as fast; all-token runs have answers that are 0.1 worse."""
    folders = []
    for seed, completions, isolated in itertools.product((1, 2), ("true", "false"), ("true", "false")):
        speed = (150.0 if isolated == "true" else 100.0) * seed
        answers = 1.0 + seed / 100 + (0.0 if completions == "true" else 0.1)
        loss = answers if completions == "true" else answers + 5
        steps = [step(n, speed=speed, answers=answers, loss=loss) for n in range(1, 7)]
        overrides = (f"--{COMPLETIONS}={completions}", f"--{ISOLATED}={isolated}", f"--general.seed={seed}")
        folders.append(write_run(folder / "runs" / f"c_{completions}-i_{isolated}-{seed}", *overrides, steps=steps))
    return folders
