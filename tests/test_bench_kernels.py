"""The benchmark of the kernels runs, and a wrong result stops it. Nothing here looks at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conftest import ROOT
from tools import bench_kernels
from tools.bench.kernels import CASES, OURS, Case, Target, Way

CPU = torch.device("cpu")


def test_a_quick_run_on_a_cpu_times_every_case(tmp_path: Path) -> None:
    report, page = tmp_path / "report.json", tmp_path / "report.md"
    command = [sys.executable, "tools/bench_kernels.py", "--device=cpu", "--quick", f"--json={report}", f"--out={page}"]
    environment = os.environ | {"PYTHONPATH": "src"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert page.read_text(encoding="utf-8") in ended.stdout
    cases = json.loads(report.read_text(encoding="utf-8"))["cases"]
    titles = [case["title"].split(":")[0] for case in cases]
    assert [title for title in titles if title.startswith("RoPE")] == ["RoPE, forward", "RoPE, backward"]
    assert sum(title.startswith("Loss") for title in titles) == 3
    assert {title.split(",")[0] for title in titles} == {
        "RoPE",
        "Attention",
        "Loss and its gradients",
        "RMSNorm",
        "SwiGLU",
    }
    assert all(way["ms"] > 0 for case in cases for way in case["ways"].values())
    assert all(len(case["ways"]) > 1 or "Attention" in case["title"] for case in cases)


def make_case(found: Tensor) -> Case:
    exact = torch.ones(8)
    ways = [Way(OURS, lambda: [found]), Way("other", lambda: [exact * 3], is_checked=False)]
    targets = [Target(1e9, "times", OURS, "other", is_most=True), Target(1e9, "times", "other", OURS)]
    targets += [Target(1, "times the speed of what is not here", "absent", OURS)]
    return Case(title="a case", unit="GB/s", work=1, reference=lambda: [exact], ways=ways, targets=targets)


@pytest.mark.parametrize("wrong", [1.03, float("nan")])
def test_a_wrong_result_is_not_timed(wrong: float) -> None:
    with pytest.raises(bench_kernels.WrongResultError, match="a case: output 0 of sftron is off"):
        bench_kernels.measure(make_case(torch.full((8,), wrong)), 2, CPU)


def test_a_target_is_met_or_missed_and_left_out_where_nothing_was_measured() -> None:
    measured = bench_kernels.measure(make_case(torch.full((8,), 1.001)), 2, CPU)
    assert [target["met"] for target in measured["targets"]] == [True, False]
    page = bench_kernels.markdown({"machine": {}, "command": "", "how": "", "cases": [measured]})
    assert "target at most 1e+09 times" in page
    assert page.count("MISSED") == 1


def test_every_case_has_a_name() -> None:
    assert set(CASES) == {"rope", "attention", "loss", "norm"}
