"""The benchmark of the loader runs, and its checks can fail. Nothing here looks at a time."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.conftest import ASSETS

with patch.dict(os.environ):  # where it says that there is one thread, which is not for the other tests
    from tools import bench_loader


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """run(name=limit, ...) -> exit status and report, of few rows; limits that are not given hold on any machine."""

    def run(**limits: float) -> tuple[int, dict[str, Any]]:
        for name in ("MOST_OVERHEAD", "MOST_SECONDS"):
            monkeypatch.setattr(bench_loader, name, limits.get(name, 1e9))
        monkeypatch.setattr(bench_loader, "MOST_BYTES", limits.get("MOST_BYTES", bench_loader.MOST_BYTES))
        monkeypatch.setattr(bench_loader, "NUM_ROWS", 100_000)
        monkeypatch.setattr(bench_loader, "BUDGET", 1024)
        report = tmp_path / "report.json"
        options = ["--tokenizer", str(ASSETS / "tokenizer"), "--batches=1", "--repeat=1", f"--json={report}"]
        monkeypatch.setattr("sys.argv", ["bench_loader.py", *options])
        return bench_loader.main(), json.loads(report.read_text(encoding="utf-8"))

    return run


def test_it_measures_every_layout_and_all_checks_hold(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run()
    said = capsys.readouterr().out

    assert status == 0
    assert len(report["resumes"]) == 6
    assert len(report["loaders"]) == 4
    assert all(each["ours"] > 0 and each["plain"] > 0 for each in report["loaders"].values())
    assert 240 * 64 < report["state, bytes"] <= 65_536
    assert list(report["checks"].values()) == [True] * 3
    assert all(name in said for name in (*report["resumes"], *report["loaders"], *report["checks"]))


def test_each_check_fails_where_it_does_not_hold(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"ours": 1.0, "plain": 1.0, "overhead": 0.0, "from": 0.0, "to": 0.0}
    monkeypatch.setattr(bench_loader, "seconds_to_first_batch", lambda *_, **__: 0.1)
    monkeypatch.setattr(bench_loader, "overhead", lambda *_, **__: times)
    assert run()[0] == 0
    status, report = run(MOST_OVERHEAD=-1e9, MOST_SECONDS=0, MOST_BYTES=1)
    assert status == 1
    assert list(report["checks"].values()) == [False] * 3
