"""A task of a SLURM array makes its own run of the sweep, and goes back into the queue when it is stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.conftest import ROOT
from tests.sweep.sweeps import write_sweep

SBATCH = ROOT / "examples" / "slurm" / "sweep.sbatch"


def test_a_stopped_task_is_requeued_after_its_run_has_saved(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, {"optimizer.learning_rate": {"values": [0.1, 3.0]}})
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\n')
    scontrol.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "SLURM_ARRAY_JOB_ID": "77",
        "SLURM_ARRAY_TASK_ID": "1",
    }
    job = subprocess.Popen(["bash", SBATCH, path], env=environment, cwd=ROOT)
    deadline = time.monotonic() + 60
    while not (tmp_path / "runs" / "run-3.0" / "begun").exists():
        assert time.monotonic() < deadline
        assert job.poll() is None
        time.sleep(0.05)
    os.kill(job.pid, signal.SIGUSR1)
    assert job.wait(60) == 0
    assert (tmp_path / "said").read_text() == "requeue 77_1\n"
    assert json.loads((tmp_path / "runs" / "run-3.0" / "result.json").read_text())["status"] == "preempted"
    assert not (tmp_path / "runs" / "run-0.1").exists()


def test_it_says_how_to_use_it() -> None:
    ended = subprocess.run(["bash", SBATCH], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "sbatch --array=0-N" in ended.stderr
