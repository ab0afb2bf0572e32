"""The module that logs to wandb, with a wandb that fails; and what it sends besides the metrics."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sftron.config import Wandb
from sftron.config.errors import without_secrets
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.train import wandb as wandb_module
from sftron.train.metrics import Table, flat_numbers
from sftron.train.wandb import WandbRun, final_figures, git_state, require_wandb, sample_rows, wandb_id
from tests.data.streams import Rows, as_dataset, chat, make_mixture

Calls = list[tuple[str, Any]]


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Calls]:
    """Puts a wandb in place whose `name` raises `error` at its n-th call; returns the list of its calls."""

    def make(name: str = "", nth: int = 1, error: BaseException | None = None) -> Calls:
        calls: Calls = []

        def call(own: str, value: Any) -> None:
            calls.append((own, value))
            if error and own == name and [each for each, _ in calls].count(name) == nth:
                raise error

        def init(settings: Any, **options: Any) -> SimpleNamespace:
            call("init", options["mode"])
            return SimpleNamespace(
                log=lambda numbers: call("log", numbers),
                finish=lambda exit_code: call("finish", exit_code),
                define_metric=lambda *_, **__: None,
                mark_preempting=lambda: None,
                summary={},
                url=None,
                dir="/there/files",
            )

        fake = SimpleNamespace(
            init=init,
            teardown=lambda exit_code: None,
            Settings=lambda **options: None,
            Table=lambda columns, data: (columns, data),
            Html=lambda text, inject: text,
            __spec__=ModuleSpec("wandb", None),
        )
        monkeypatch.setitem(sys.modules, "wandb", fake)
        return calls

    return make


@pytest.mark.parametrize(
    ("name", "nth", "error", "num_calls"),
    [
        ("init", 1, PermissionError("no room"), 1),
        ("log", 3, BrokenPipeError("wandb-core is dead"), 4),
        ("log", 1, SystemExit(1), 2),
        ("finish", 1, TimeoutError("slow"), 7),
    ],
)
def test_a_wandb_that_fails_is_reported_once_and_called_no_more(
    fake_wandb: Callable[..., Calls],
    capsys: pytest.CaptureFixture[str],
    name: str,
    nth: int,
    error: BaseException,
    num_calls: int,
) -> None:
    calls = fake_wandb(name, nth, error)
    log = WandbRun(lambda: {"mode": "offline"})
    log.start()
    for step in range(1, 6):
        log.log(step, {"loss": 1.0})
    log.finish("completed")

    assert len(calls) == num_calls
    reported = [line for line in capsys.readouterr().out.splitlines() if "stopped" in line]
    rest = "" if name == "init" else ", and `wandb sync /there` may send the rest"
    assert reported == [f"wandb      stopped: {type(error).__name__}: {error}. metrics.jsonl has every step{rest}"]


def test_options_that_cannot_be_had_end_no_run(
    fake_wandb: Callable[..., Calls], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    calls = fake_wandb()
    log = WandbRun(lambda: {"id": wandb_id(tmp_path / "no such folder")})
    log.start()
    log.log(1, {"loss": 1.0})
    assert not calls
    assert "wandb      stopped: FileNotFoundError" in capsys.readouterr().out


def test_without_a_server_the_run_is_logged_offline(
    fake_wandb: Callable[..., Calls], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = fake_wandb("init", 1, ConnectionError("no route\nto the host"))
    log = WandbRun(lambda: {"mode": "online"})
    log.start()
    log.finish("failed")

    assert calls == [("init", "online"), ("init", "offline"), ("finish", 1)]
    assert capsys.readouterr().out.splitlines() == [
        "wandb      has no server (ConnectionError: no route to the host), and the run is logged offline",
        "wandb      offline; `wandb sync /there` sends it",
    ]


def test_tables_and_pages_become_wandbs_own(fake_wandb: Callable[..., Calls], tmp_path: Path) -> None:
    calls = fake_wandb()
    (tmp_path / "page.html").write_text("<p>")
    log = WandbRun(lambda: {"mode": "offline"}, {"t": Table(["a"], [(1,)]), "p": tmp_path / "page.html"})
    log.start()
    assert calls[1:] == [("log", {"step": 0, "t": (["a"], [[1]]), "p": "<p>"})]


def test_a_table_that_fails_stops_tables_and_no_numbers(
    fake_wandb: Callable[..., Calls], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = fake_wandb("log", 2, ConnectionError("no answer"))
    log = WandbRun(lambda: {"mode": "offline"})
    log.start()
    for step in (1, 2):
        log.log(step, {"loss": 1.0, "t": Table(["a"], [(1,)])})
    log.finish("completed")

    logged = [numbers for name, numbers in calls if name == "log"]
    assert logged == [{"step": 1, "loss": 1.0}, {"step": 1, "t": (["a"], [[1]])}, {"step": 2, "loss": 1.0}]
    assert calls[-1] == ("finish", 0)
    assert capsys.readouterr().out.count("gets no more tables (ConnectionError: no answer)") == 1


# --- The id ---


@pytest.fixture(autouse=True)
def _no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)


def test_a_run_keeps_its_id_where_it_is_moved_and_by_whatever_path_it_is_reached(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    first = wandb_id(tmp_path / "a")
    assert wandb_id(tmp_path / "a") == first
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert wandb_id(tmp_path / "link") == first
    (tmp_path / "a").rename(tmp_path / "b")
    assert wandb_id(tmp_path / "b") == first


def test_a_copy_of_a_run_is_another_run(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    first = wandb_id(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copy = wandb_id(tmp_path / "b")
    assert copy != first
    assert (wandb_id(tmp_path / "a"), wandb_id(tmp_path / "b")) == (first, copy)


def test_the_id_of_a_sweep_goes_before_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb_id(tmp_path)
    monkeypatch.setenv("WANDB_RUN_ID", "trial3")
    assert wandb_id(tmp_path) == "trial3"
    monkeypatch.delenv("WANDB_RUN_ID")
    assert wandb_id(tmp_path) == "trial3"


@pytest.mark.parametrize("broken", ["", "[]", "{}"])
def test_a_broken_file_is_replaced(tmp_path: Path, broken: str) -> None:
    (tmp_path / "wandb.json").write_text(broken)
    assert wandb_id(tmp_path) == json.loads((tmp_path / "wandb.json").read_text())["id"]


# --- What is sent besides the metrics ---


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


def test_a_git_that_is_missing_or_hangs_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None
    monkeypatch.setattr(wandb_module, "_TIME_FOR_GIT_S", 0.2)
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert git_state(tmp_path) is None


def test_no_program_that_the_working_copy_names_is_run(working_copy: Path) -> None:
    """Anybody may have written it."""
    (working_copy / "monitor").write_text(f"#!/bin/sh\ntouch {working_copy}/was-run\n")
    (working_copy / "monitor").chmod(0o700)
    git(working_copy, "config", "core.fsmonitor", str(working_copy / "monitor"))
    assert git_state(working_copy) is not None
    assert not (working_copy / "was-run").exists()


def test_secrets_in_texts_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "of-some-service")
    facts = {"of-some-service": 1, "data": [{"path": "https://me:word@host/x.jsonl"}, "hf_" + "x" * 30, 2, None]}
    assert without_secrets(facts) == {"***": 1, "data": [{"path": "https://***@host/x.jsonl"}, "***", 2, None]}


def test_the_sample_has_a_row_for_each_span_of_one_role_that_is_trained_or_is_not(
    chat_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = make_mixture([as_dataset(Rows([chat("Hi", "Yo", "And", "This")], "a.jsonl"))], chat_tokenizer)
    pack = next(iter(mixture))
    rows = sample_rows(pack, chat_tokenizer.decode, ("a.jsonl",))

    assert [(role, text) for _, role, text, trained, _ in rows if trained] == [
        ("assistant", "Yo<|im_end|>"),
        ("assistant", "This<|im_end|>"),
    ]
    assert sum(tokens for *_, tokens in rows) == pack.num_tokens
    assert sum(tokens for *_, trained, tokens in rows if trained) == int((pack.loss_weights > 0).sum())
    assert {name for name, *_ in rows} == {"row 0 of a.jsonl"}
    monkeypatch.setattr(wandb_module, "_MAX_SAMPLE_ROWS", 2)
    assert sample_rows(pack, chat_tokenizer.decode, ("a.jsonl",)) == rows[:2]


def test_final_figures_are_weighted_by_tokens() -> None:
    assert final_figures([]) == {}
    steps = [{"trained_tokens": n, "tokens": 100, "step_seconds": 2.0, "loss": float(n)} for n in range(1, 4)]
    steps.append({"trained_tokens": 0, "tokens": 100, "step_seconds": 2.0})
    assert final_figures(steps) == {"final/tokens_per_second": 50.0, "final/loss": 14 / 6}


def test_numbers_are_flattened() -> None:
    assert dict(flat_numbers({"a": {"b": {"c": 1}}, "d": "text"})) == {"a/b/c": 1}


# --- Before anything is loaded ---

ONLINE = Wandb(mode="online", project="p")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("API_KEY", "IDENTITY_TOKEN_FILE", "CONFIG_DIR", "BASE_URL", "MODE"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    return tmp_path


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


def test_a_private_server_in_wandbs_settings_is_left_to_wandb(home: Path) -> None:
    (home / ".config/wandb").mkdir(parents=True)
    (home / ".config/wandb/settings").write_text("[default]\nbase_url = https://wandb.my-firm.com\n")
    require_wandb(ONLINE)


def test_another_mode_in_the_environment_is_reported_and_not_read(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    require_wandb(Wandb(mode="offline"))
    assert capsys.readouterr().out == "wandb      mode offline, as configured; WANDB_MODE=disabled is not read\n"
