"""What wandb is told beside the metrics; and what has to be there before it is."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from sftron.config import Wandb
from sftron.data.chat_tokenizer import ChatTokenizer
from sftron.data.types import Pack
from sftron.train import wandb_facts
from sftron.train.wandb_facts import SAMPLE_COLUMNS, FinalFigures, git_state, sample_rows, without_secrets
from sftron.train.wandb_log import flat_numbers
from sftron.train.wandb_start import _earlier_steps, require_wandb
from tests.data.streams import Rows, as_dataset, chat, make_mixture


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def working_copy(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("a")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "a")
    return tmp_path


def test_the_commit_is_that_of_the_working_copy_and_whether_it_was_changed(working_copy: Path) -> None:
    commit = git(working_copy, "rev-parse", "HEAD").strip()
    (working_copy / "inner").mkdir()
    (working_copy / "untracked").write_text("output of a run")
    assert git_state(working_copy / "inner") == {"commit": commit, "dirty": False}
    (working_copy / "a").write_text("b")
    assert git_state(working_copy) == {"commit": commit, "dirty": True}


def test_where_there_is_no_working_copy_or_no_git_there_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None


def test_a_git_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(wandb_facts, "_TIME_FOR_GIT_S", 0.2)
    started = time.monotonic()
    assert git_state(tmp_path) is None
    assert time.monotonic() - started < 30


def test_what_the_working_copy_names_is_not_run(working_copy: Path) -> None:
    """It may be anybody's."""
    (working_copy / "monitor").write_text(f"#!/bin/sh\ntouch {working_copy}/was-run\n")
    (working_copy / "monitor").chmod(0o700)
    git(working_copy, "config", "core.fsmonitor", str(working_copy / "monitor"))
    assert git_state(working_copy) is not None
    assert not (working_copy / "was-run").exists()


def test_no_text_of_it_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "of-some-service")
    facts = {"of-some-service": 1, "data": [{"path": "https://me:word@host/x.jsonl"}, "hf_" + "x" * 30, 2, None]}
    assert without_secrets(facts) == {"***": 1, "data": [{"path": "https://***@host/x.jsonl"}, "***", 2, None]}


def test_the_sample_has_a_row_for_each_stretch_of_one_role_that_is_trained_or_is_not(
    chat_tokenizer: ChatTokenizer,
) -> None:
    pack: Pack = next(
        iter(make_mixture([as_dataset(Rows([chat("Hi", "Yo", "And", "This")], "a.jsonl"))], chat_tokenizer))
    )
    rows = [
        dict(zip(SAMPLE_COLUMNS, row, strict=True)) for row in sample_rows(pack, chat_tokenizer.decode, ("a.jsonl",))
    ]

    trained = [row for row in rows if row["trained"]]
    assert [(row["role"], row["text"]) for row in trained] == [
        ("assistant", "Yo<|im_end|>"),
        ("assistant", "This<|im_end|>"),
    ]
    assert sum(row["tokens"] for row in rows) == pack.num_tokens
    assert sum(row["tokens"] for row in trained) == int((pack.loss_weights > 0).sum())
    assert {row["conversation"] for row in rows} == {"row 0 of a.jsonl"}


def test_a_long_sample_is_cut(chat_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_facts, "_MAX_ROWS", 2)
    pack = next(iter(make_mixture([as_dataset(Rows([chat("Hi", "Yo")], "a.jsonl"))], chat_tokenizer)))
    assert len(sample_rows(pack, chat_tokenizer.decode, ("a.jsonl",))) == 2


def test_final_figures_are_those_of_the_last_steps_by_their_tokens() -> None:
    final = FinalFigures()
    assert final.as_dict() == {}
    for step in range(1, 61):
        numbers = {"trained_tokens": step, "tokens": 100, "step_seconds": 2.0, "loss": float(step)}
        final.add(numbers if step != 60 else {**numbers, "trained_tokens": 0, "loss": 0.0})
        final.add({"eval/x/loss": 9.0})
    steps = range(11, 60)
    assert final.as_dict() == {
        "final/tokens_per_second": 50.0,
        "final/loss": pytest.approx(sum(n * n for n in steps) / sum(steps)),
    }


def test_earlier_steps_are_those_between_what_is_known_and_where_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [json.dumps({"step": step, "roles": {"user": {"loss": 0.5, "tokens": None}}}) for step in range(1, 9)]
    path.write_text("\n".join([*records[:3], "{broken", *records[3:], '{"step": ']))
    assert list(_earlier_steps(path, 6)(3)) == [({"step": step, "roles/user/loss": 0.5}, step) for step in (4, 5, 6)]
    assert list(_earlier_steps(tmp_path / "none", 6)(0)) == []
    assert dict(flat_numbers({"a": {"b": {"c": 1}}, "d": "text"})) == {"a/b/c": 1}


# --- Before anything is loaded ---


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (
        "WANDB_API_KEY",
        "WANDB_IDENTITY_TOKEN_FILE",
        "WANDB_CONFIG_DIR",
        "WANDB_BASE_URL",
        "NETRC",
        "WANDB_MODE",
    ):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


ONLINE = Wandb(mode="online", project="p")


def test_an_online_run_without_a_key_is_refused_and_others_need_none(home: Path) -> None:
    (home / ".netrc").write_text("machine github.com login me password x\n")
    with pytest.raises(
        ValueError, match="no API key for it: run `wandb login`, or set WANDB_API_KEY, or set the mode to"
    ):
        require_wandb(ONLINE)
    require_wandb(Wandb(mode="offline"))
    require_wandb(Wandb())


@pytest.mark.parametrize("host", ["api.wandb.ai", "api.forge.coreweave.com", "wandb.my-firm.com"])
def test_a_key_in_netrc_is_a_key(home: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.my-firm.com")
    (home / "other").write_text(f"machine {host}\n  login user\n  password {'k' * 40}\n")
    monkeypatch.setenv("NETRC", str(home / "other"))
    require_wandb(ONLINE)


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"])
def test_a_key_in_the_environment_is_a_key(home: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "k" * 40)
    require_wandb(ONLINE)


def test_a_server_of_ones_own_in_wandbs_settings_is_left_to_wandb(home: Path) -> None:
    (home / ".config/wandb").mkdir(parents=True)
    (home / ".config/wandb/settings").write_text("[default]\nbase_url = https://wandb.my-firm.com\n")
    require_wandb(ONLINE)


def test_another_mode_in_the_environment_is_said_and_not_read(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    require_wandb(Wandb(mode="offline"))
    assert capsys.readouterr().out == "wandb      mode offline, as configured; WANDB_MODE=disabled is not read\n"
