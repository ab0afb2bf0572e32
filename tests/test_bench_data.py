"""The benchmark of the data side runs, and its checks can fail. Nothing here looks at a time."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from sftron.data.types import DataError
from sftron.train import feed
from tests.conftest import ASSETS, ROOT

with patch.dict(os.environ):  # where it says that there is one thread, which is not for the other tests
    from tools import bench_data

TOKENIZER = str(ASSETS / "tokenizer")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": f"What is {n} + {n}?", "answer": f"It is {n + n}. " * (n % 7 + 1)} for n in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_run_measures_every_way_and_all_checks_hold(data: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "tools/bench_data.py", "--tokenizer", TOKENIZER, "--data", str(data)]
    command += ["--sequence-length=256", "--repeat=1", "--times=3", f"--json={report}"]
    environment = os.environ | {"PYTHONPATH": "src"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = json.loads(report.read_text(encoding="utf-8"))
    assert len(results["checks"]) == 5
    assert all(results["checks"].values())
    assert {bench_data.SFTRON, bench_data.ENCODE} < set(results["ways"])
    assert len({way["tokens"] for name, way in results["ways"].items() if "TRL" not in name}) == 1
    assert [opened["rows"] for opened in results["opening"].values()] == [60, 180]
    assert all(name in ended.stdout for name in (*results["ways"], *results["opening"], *results["checks"]))


def test_each_check_fails_where_it_does_not_hold(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Namespace(
        data=data, tokenizer=TOKENIZER, chat_template=None, format="auto", rows=None, sequence_length=256
    )
    config = bench_data.config_of(options)
    preparation = feed.prepare(config, feed.load_chat_tokenizer(config))
    corpus = bench_data.read_corpus(options, preparation)
    packs = list(bench_data.one_epoch(feed.make_dataset(config, preparation)))
    measured = {bench_data.SFTRON: {"tokens": corpus.num_tokens}, bench_data.ENCODE: {"tokens": corpus.num_tokens}}

    def failing() -> list[int]:
        checks = bench_data.checks(corpus, preparation, packs, measured)
        return [place for place, holds in enumerate(checks.values()) if not holds]

    assert not failing()
    *packs, last = packs
    assert failing() == [0, 2]
    packs += [last, last]
    assert failing() == [1, 2]
    packs[-2:] = [last]
    measured[bench_data.ENCODE]["tokens"] += 1
    assert failing() == [4]
    corpus = replace(corpus, holds_control_text=True)
    assert not failing()

    def refuse(*_: object) -> None:
        raise DataError("the ids differ")

    monkeypatch.setattr(bench_data, "require_own_ids", refuse)
    assert failing() == [3]


@pytest.mark.parametrize(("holds", "status"), [(True, 0), (False, 1)])
def test_a_check_that_fails_is_the_exit_status(holds: bool, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    results = {part: {} for part in ("machine", "data")} | {part: {"a": {"b": 1}} for part in ("ways", "opening")}
    results["why TRL is left out"] = "there is no such thing"
    monkeypatch.setattr(bench_data, "benchmark", lambda _: results | {"checks": {"all is well": holds}})
    monkeypatch.setattr(bench_data, "settle_process", lambda: None)
    monkeypatch.setattr("sys.argv", ["bench_data.py", "--tokenizer=any", "--data=any"])
    assert bench_data.main() == status


def test_data_that_cannot_be_read_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_data, "settle_process", lambda: None)
    monkeypatch.setattr("sys.argv", ["bench_data.py", f"--tokenizer={TOKENIZER}", "--data=nowhere.jsonl"])
    assert bench_data.main() == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
