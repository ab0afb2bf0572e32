"""What all commands have in common: how they report that something is wrong."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sftron.__main__ import main
from sftron.errors import exit_with, refuse, show
from tests.conftest import ROOT
from tools.budget import weights

SECRET = "a-token-of-somebody"
ARGUMENTS = {
    "audit": "{}",
    "check": "--model {}",
    "compare": "{}",
    "convert": "{} {}-target",
    "generate": "--model {}",
    "inspect": "--config {}",
    "sweep": "{}",
    "train": "--config {}",
    "verify": "--config {}",
    "verify-trainer": "{}:make",
}
"""The commands that read files of the user's, with a path that does not exist."""


@pytest.mark.parametrize("command", ARGUMENTS)
def test_a_command_that_refuses_what_it_is_given_shows_no_secret_and_exits_with_2(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with pytest.raises(SystemExit) as ended:
        exit_with(lambda: main([command, *ARGUMENTS[command].replace("{}", str(tmp_path / SECRET)).split()]))
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert "***" in printed.err
    assert SECRET not in printed.err + printed.out
    assert "Traceback" not in printed.err


def test_an_unexpected_error_is_shown_without_secrets_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)

    def fail() -> int:
        raise RuntimeError(f"GET https://host/?token={SECRET}")

    with pytest.raises(SystemExit) as ended:
        exit_with(fail)
    printed = capsys.readouterr().err
    assert ended.value.code == 1
    assert "RuntimeError: GET https://host/?token=***" in printed
    assert SECRET not in printed


def test_an_error_of_the_machine_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error is a real one: /dev/full is a full disk."""
    (tmp_path / "part-0").symlink_to("/dev/full")

    def write() -> int:
        with (tmp_path / "part-0").open("w") as file:
            file.write("x")
        return 0

    with pytest.raises(SystemExit) as ended:
        exit_with(write)
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("OSError: [Errno 28] No space left on device (")
    assert re.search(r"test_tools\.py:\d+, in write\)$", line)


def test_a_command_with_closed_streams_ends_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as ended:
        exit_with(lambda: show("a line") or show("another", to=sys.stderr) or len(sys.stdin.read()))
    streams = sys.stdin, sys.stdout, sys.stderr
    monkeypatch.undo()
    assert ended.value.code == 0
    for stream in streams:
        stream.close()


def test_ctrl_c_ends_a_command_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        exit_with(interrupted)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "stopped\n"


ABORTS_AT_SHUTDOWN = """
import atexit, os, sys
from sftron.errors import exit_with

class Aborts:
    def __del__(self, abort=os.abort):
        abort()

sys.modules["aborts"] = Aborts()
atexit.register(lambda: print("handlers ran"))
exit_with(lambda: print("done") or 3)
"""


def test_a_rank_ends_with_its_status_whatever_python_would_do_at_shutdown() -> None:
    """As gloo's threads, which may drop the tensor of a finished collective then."""
    command = [sys.executable, "-c", ABORTS_AT_SHUTDOWN]
    statuses = {}
    for num_ranks in ("1", "2"):
        environment = os.environ | {"WORLD_SIZE": num_ranks, "PYTHONPATH": str(ROOT / "src")}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        statuses[num_ranks] = ended.returncode
        assert ended.stdout == "done\nhandlers ran\n"
    assert statuses == {"1": -signal.SIGABRT, "2": 3}


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    ended = subprocess.run(
        f"{sys.executable} -m sftron sweep configs/sweep_toggles.yaml --dry-run | head -c 1",
        shell=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert ended.stderr == ""
    with pytest.raises(BrokenPipeError):  # where the reader goes before the last line is printed
        refuse(BrokenPipeError(32, "Broken pipe"), "sweep")


def test_the_budget_counts_each_package_by_itself_and_those_of_its_parts_together(tmp_path: Path) -> None:
    files = {"src/one/__init__.py": 1, "src/one/a/b/c.py": 4, "src/two/__init__.py": 2, "src/two/a/d.py": 8}
    files |= {"tests/e.py": 16, "docs/f/g.md": 32, "docs/h.svg": 64}
    for name, num_lines in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("line\n" * num_lines, encoding="utf-8")
    counted = {name.strip(): num_lines for name, (num_lines, _) in weights(tmp_path).items()}
    assert counted == {
        "one": 5,
        "one/*.py": 1,
        "one/a": 4,
        "two": 10,
        "two/*.py": 2,
        "two/a": 8,
        "tests": 16,
        "tools": 0,
        "docs": 32,
    }
