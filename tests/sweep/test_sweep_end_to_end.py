"""The toggles' ablation with real runs: stopped in the middle, gone on with, and reported."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.train.runs import make_model_folder, metrics, settings, write_config, write_rows
from tools.sweep import main

NUM_STEPS = 40


def write_ablation(folder: Path) -> Path:
    write_rows(folder / "rows.jsonl")
    tree = settings(folder, make_model_folder(folder / "tiny"), tokens__train_steps=NUM_STEPS)
    tree["checkpoints"] = {"export_hf": False}
    config = write_config(folder / "base.yaml", tree)
    path = folder / "sweep.yaml"
    command = [
        "torchrun",
        "--standalone",
        "--nproc_per_node=1",
        str(ROOT / "run_train.py"),
        "--config",
        str(config),
        "--general.run_name=isolated_{data.remove_cross_attention}",
        "${args}",
    ]
    parameters = {"data.remove_cross_attention": {"values": [True, False]}}
    path.write_text(yaml.safe_dump({"method": "grid", "parameters": parameters, "command": command}))
    return path


@pytest.mark.slow
def test_the_ablation_goes_on_where_it_was_stopped_and_draws_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path, runs = write_ablation(tmp_path), tmp_path / "runs"
    first = runs / "isolated_true"
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "sweep.py"), str(path)], stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not (first / "metrics.jsonl").exists() or len(metrics(first)) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert json.loads((first / "result.json").read_text())["status"] == "preempted"
    assert not (runs / "isolated_false").exists()
    seen = len(metrics(first))
    assert 2 <= seen < NUM_STEPS

    assert main([str(path)]) == 0
    for name in ("isolated_true", "isolated_false"):
        assert [line["step"] for line in metrics(runs / name)] == list(range(1, NUM_STEPS + 1))
        assert json.loads((runs / name / "result.json").read_text())["status"] == "completed"
    said = (first / "console.log").read_text()
    assert "resumed    " in said
    assert said.count("sftron     ") == 2  # by the run alone, once a start
    assert set(said.splitlines()) <= set((first / "output.log").read_text().splitlines())
    assert "2 of 2 runs completed" in (runs / "report.html").read_text()
    report = json.loads((runs / "report.json").read_text())
    assert {effect["figure"] for effect in report["effects"]} >= {"tokens_per_second", "peak_memory_gb"}
    # The same packs in both, which is what makes them comparable.
    ours, theirs = (
        [line["total_tokens"] for line in metrics(runs / name)] for name in ("isolated_true", "isolated_false")
    )
    assert ours == theirs
    assert (runs / "plots" / "loss_tokens.png").exists()
