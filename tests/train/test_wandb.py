"""What is known of a run before it begins to log to wandb: its id, its key, its commit; and its final figures."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sftron.config import Logging, Wandb
from sftron.train.logs import run_logs
from sftron.train.logs.loggers import run_id
from sftron.train.logs.run_logs import git_state, require_loggers
from sftron.train.logs.trackers import final_figures


def test_final_figures_are_weighted_by_tokens() -> None:
    assert final_figures([]) == {}
    steps = [{"trained_tokens": n, "tokens": 100, "step_seconds": 2.0, "loss": float(n)} for n in range(1, 4)]
    steps.append({"trained_tokens": 0, "tokens": 100, "step_seconds": 2.0, "loss": None})
    assert final_figures(steps) == {"final/tokens_per_second": 50.0, "final/loss": 14 / 6}


def test_a_run_keeps_its_id_where_it_is_moved_a_copy_of_it_is_another_run_and_a_given_one_takes_precedence(
    tmp_path: Path,
) -> None:
    def id_in(name: str, given: str | None = None) -> str:
        return run_id("wandb", tmp_path / name, given)

    (tmp_path / "a").mkdir()
    first = id_in("a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert id_in("link") == id_in("a") == first
    (tmp_path / "a").rename(tmp_path / "b")
    assert id_in("b") == first
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    copy = id_in("c")
    assert copy != first
    assert (id_in("b"), id_in("c")) == (first, copy)
    assert id_in("b", "trial3") == id_in("b") == "trial3"
    assert json.loads((tmp_path / "b/wandb.json").read_text())["id"] == "trial3"


# --- What is sent besides the metrics ---


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_the_commit_is_that_of_the_working_copy_and_no_program_that_it_names_is_run(tmp_path: Path) -> None:
    """Anybody may have written the working copy's settings."""
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("a")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "a")
    git(tmp_path, "tag", "-am", "v", "v1")
    (tmp_path / "monitor").write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
    (tmp_path / "monitor").chmod(0o700)
    git(tmp_path, "config", "core.fsmonitor", str(tmp_path / "monitor"))
    commit = git(tmp_path, "-c", "core.fsmonitor=false", "rev-parse", "HEAD").strip()
    (tmp_path / "inner").mkdir()
    (tmp_path / "untracked").write_text("output of a run")
    assert git_state(tmp_path / "inner") == {"commit": commit, "dirty": False}
    (tmp_path / "a").write_text("b")
    assert git_state(tmp_path) == {"commit": commit, "dirty": True}
    assert not (tmp_path / "was-run").exists()


def test_a_git_that_is_missing_or_hangs_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_logs, "_TIME_FOR_GIT_S", 0.2)
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o700)
    for path in (f"{tmp_path}{os.pathsep}{os.environ['PATH']}", str(tmp_path / "none")):
        monkeypatch.setenv("PATH", path)
        assert git_state(tmp_path) is None


# --- Before anything is loaded ---


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("API_KEY", "IDENTITY_TOKEN_FILE", "CONFIG_DIR", "BASE_URL", "MODE"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    return tmp_path


def require_wandb(mode: Any) -> None:
    require_loggers(Logging(wandb=Wandb(mode=mode)))


def test_an_online_run_without_a_key_is_refused_and_others_need_none(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / ".netrc").write_text("machine github.com login me password x\n")
    with pytest.raises(ValueError, match="no API key is set: run `wandb login`, or set WANDB_API_KEY, or set the mode"):
        require_wandb("online")
    require_wandb("disabled")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    require_wandb("offline")
    assert capsys.readouterr().out == "wandb      mode offline, as configured; sftron ignores WANDB_MODE=disabled\n"


@pytest.mark.parametrize(
    ("variable", "path", "text"),
    [
        ("WANDB_API_KEY", "", ""),
        ("NETRC", "other", "machine wandb.my-firm.com\n  login user\n"),
        ("IGNORED", ".config/wandb/settings", "[default]\nbase_url = https://wandb.my-firm.com\n"),
    ],
)
def test_a_key_in_the_environment_in_netrc_and_in_wandbs_settings_is_a_key(
    home: Path, monkeypatch: pytest.MonkeyPatch, variable: str, path: str, text: str
) -> None:
    if path:
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.my-firm.com")
    monkeypatch.setenv(variable, str(home / path))
    require_wandb("online")
