"""Exports are pushed in order, byte for byte, and whatever the Hub does, no failure loses the local one."""

import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from sftron.config import ConfigError, Hub
from sftron.train import hub
from sftron.train.exports import convert
from sftron.train.hub import HubPusher, require_hub
from sftron.train.loop import Steps
from tests.train.runs import make_config, on_each_step, opened, result, run, stop_in

NUM_STEPS = 4
TOKEN = "hf_" + "t" * 34


class FakeHub:
    """What HfApi was asked to do. `num_refused` uploads are refused, and none returns if it `hangs`."""

    def __init__(self) -> None:
        self.num_refused, self.hangs = 0, False
        self.files: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.is_private: dict[str, bool] = {}
        self.end = threading.Event()

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        if not repo_id.startswith(("me/", "our-team/")):
            raise PermissionError("you have no rights there")
        assert exist_ok
        self.is_private.setdefault(repo_id, private)

    def upload_folder(self, *, repo_id: str, folder_path: Path, path_in_repo: str | None, commit_message: str) -> None:
        if self.hangs:
            self.end.wait()
        if self.num_refused:
            self.num_refused -= 1
            raise OSError("the disk of this Hub is full")
        self.messages.append(commit_message)
        self.files |= files_of(folder_path, f"{repo_id}/{path_in_repo}/" if path_in_repo else f"{repo_id}/")


@pytest.fixture(autouse=True)
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The API of huggingface_hub without a network; its calls have to be ones that the real one takes."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fake = FakeHub()

    def called(name: str) -> Callable[..., None]:
        signature = inspect.signature(getattr(HfApi, name))

        def call(self: HfApi, *arguments: Any, **options: Any) -> None:
            signature.bind(self, *arguments, **options)
            getattr(fake, name)(*arguments, **options)

        return call

    for name in ("create_repo", "upload_folder"):
        monkeypatch.setattr(HfApi, name, called(name))
    yield fake
    fake.end.set()


def config_for(tmp_path: Path, model_folder: Path, **overrides: Any) -> Any:
    options = {"tokens__train_steps": NUM_STEPS, "hub__push_to": "me/tiny"}
    return make_config(tmp_path, model_folder, **options | overrides)


def files_of(folder: Path, prefix: str = "me/tiny/") -> dict[str, bytes]:
    return {prefix + path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")}


def test_the_last_export_is_pushed_and_the_token_is_nowhere(
    tmp_path: Path, model_folder: Path, api: FakeHub, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = run(config_for(tmp_path, model_folder, checkpoints__export_interval=2))
    folder = trainer.directory.folder
    assert api.files == files_of(folder / f"hf/step-{NUM_STEPS}")
    assert any(name.endswith(".safetensors") for name in api.files)
    assert (api.is_private, api.messages) == ({"me/tiny": True}, [f"step {NUM_STEPS}"])
    assert b'folder = "me/tiny"' in api.files["me/tiny/README.md"]
    convert(folder / f"checkpoints/step-{NUM_STEPS}", tmp_path / "converted")
    for not_pushed in (folder / "hf/step-2", tmp_path / "converted"):
        assert 'folder = "."' in (not_pushed / "README.md").read_text()

    ended, printed = result(trainer), capfd.readouterr().out
    assert (ended["status"], ended["step"]) == ("completed", NUM_STEPS)
    assert ended["hub"] == {"repository": "me/tiny", "pushed": [f"hf/step-{NUM_STEPS}"], "failed": {}}
    assert f"hf/step-{NUM_STEPS} is on the Hub, in me/tiny" in printed
    assert "WARNING" not in printed
    texts = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in text for text in [*texts, printed.encode()])


def test_a_push_that_is_refused_is_named_with_its_command_and_is_never_made_after_a_later_one(
    tmp_path: Path, model_folder: Path, api: FakeHub, capfd: pytest.CaptureFixture[str]
) -> None:
    api.num_refused = 1
    trainer = run(config_for(tmp_path, model_folder, checkpoints__export_interval=2, hub__every="exports"))
    folder = trainer.directory.folder
    assert api.messages == [f"step {NUM_STEPS}"]
    assert api.files == files_of(folder / f"hf/step-{NUM_STEPS}")
    hub_facts = result(trainer)["hub"]
    assert (hub_facts["pushed"], list(hub_facts["failed"])) == ([f"hf/step-{NUM_STEPS}"], ["hf/step-2"])
    assert "the disk of this Hub is full" in hub_facts["failed"]["hf/step-2"]
    command = f"hf upload me/tiny {folder}/hf/step-2 . --private --commit-message 'step 2'"
    assert command in capfd.readouterr().out


def test_exports_on_the_way_are_commits_and_an_adapter_has_its_folder(
    tmp_path: Path, model_folder: Path, api: FakeHub, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"checkpoints__export_interval": 1, "hub__every": 2, "hub__private": False, "lora__rank": 2}
    folder = run(config_for(tmp_path, model_folder, **options, lora__merge=False)).directory.folder
    assert api.messages == ["step 2", f"step {NUM_STEPS}"]
    assert api.files == files_of(folder / f"adapter/step-{NUM_STEPS}")
    api.files.clear()
    api.messages.clear()
    merged = config_for(tmp_path, model_folder, **options | {"hub__every": "end"}, general__run_name="merged")
    folder = run(merged).directory.folder
    assert api.messages == [f"step {NUM_STEPS}"] * 2
    adapter = files_of(folder / f"adapter/step-{NUM_STEPS}", "me/tiny/adapter/")
    assert api.files == adapter | files_of(folder / f"hf/step-{NUM_STEPS}")
    assert b'folder = "."' in api.files["me/tiny/adapter/README.md"]
    assert api.is_private == {"me/tiny": False}
    assert "WARNING" not in capfd.readouterr().out


def raise_in(step: int) -> Callable[[int], None]:
    def act(number: int) -> None:
        if number == step:
            raise RuntimeError("the device is lost")

    return act


@pytest.mark.parametrize("status", ["preempted", "failed", "not finite"])
def test_a_run_that_does_not_complete_ends_its_pushes_and_records_them(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, api: FakeHub, status: str
) -> None:
    api.hangs = True
    monkeypatch.setattr(hub, "_SHORT_TIME_S", 0.3)
    if status == "not finite":
        monkeypatch.setattr(Steps, "is_finite", lambda self, *_: self._progress.step < 3)
    else:
        on_each_step(monkeypatch, stop_in(3) if status == "preempted" else raise_in(3))
    trainer = opened(config_for(tmp_path, model_folder, checkpoints__export_interval=1, hub__every="exports"))
    if status == "failed":
        with pytest.raises(RuntimeError, match="the device is lost"):
            trainer.train()
    else:
        assert trainer.train() == (0 if status == "preempted" else 3)
    ended = result(trainer)
    assert ended["status"] == ("preempted" if status == "preempted" else "failed")
    failed = dict.fromkeys(("hf/step-1", "hf/step-2"), "the push did not finish in time")
    assert ended["hub"] == {"repository": "me/tiny", "pushed": [], "failed": failed}


def test_the_last_export_of_a_diverged_run_is_not_pushed(tmp_path: Path, model_folder: Path, api: FakeHub) -> None:
    rate = {"optimizer__learning_rate": 5.0, "optimizer__schedule": "constant"}
    trainer = opened(config_for(tmp_path, model_folder, tokens__train_steps=12, **rate))
    assert trainer.train() == 3
    ended = result(trainer)
    assert (ended["status"], ended["hub"]["pushed"], ended["hub"]["failed"]) == ("diverged", [], {})
    assert Path(ended["exported"]).is_dir()
    assert api.files == {}


def test_no_push_begins_after_the_end_though_a_second_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: FakeHub
) -> None:
    api.hangs = True
    monkeypatch.setattr(hub, "_SHORT_TIME_S", 0.3)
    pusher = HubPusher(Hub(push_to="me/tiny"), tmp_path)
    for step in (1, 2):
        write(tmp_path / str(step))
        pusher.push(tmp_path / str(step), step)
    pusher.start()
    found = pusher.finish(lambda: True)
    api.end.set()
    pusher._thread.join(30)
    assert (pusher._thread.is_alive(), api.messages) == (False, ["step 1"])
    assert (found["pushed"], list(found["failed"])) == ([], ["1", "2"])


@pytest.mark.parametrize(("silence", "problem"), [(600.0, "the push did not finish in time"), (0.5, "Timeout")])
def test_a_process_ends_though_the_hub_never_answers(tmp_path: Path, silence: float, problem: str) -> None:
    """The real client; a request without an answer fails after a time, and a push that goes on ends with its run."""
    write(tmp_path / "1")
    script = (
        "import sys; from pathlib import Path; from sftron.config import Hub; from sftron.train import hub\n"
        f"hub._SILENCE_S, hub._SHORT_TIME_S, folder = {silence}, {0.3 if silence > 1 else 60.0}, Path(sys.argv[1])\n"
        "pusher = hub.HubPusher(Hub(push_to='me/tiny'), folder)\n"
        "pusher.start(), pusher.push(folder / '1', 1)\n"
        "print(pusher.finish(lambda: True)['failed'], pusher._thread.is_alive())"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = {**os.environ, "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", script, str(tmp_path)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    last = ended.stdout.splitlines()[-1]
    assert problem in last
    assert last.endswith(str(silence > 1))


def write(folder: Path) -> None:
    folder.mkdir()
    (folder / "file.txt").write_text("content")


def test_a_signal_shortens_the_last_wait_and_a_second_ctrl_c_ends_it_and_the_run_stays_completed(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, api: FakeHub
) -> None:
    api.hangs = True
    monkeypatch.setattr(hub, "_SHORT_TIME_S", 60.0)
    finish = HubPusher.finish

    def finish_and_signal(self: HubPusher, should_hurry: Callable[[], bool]) -> dict[str, Any]:
        for seconds in (0.5, 1.0):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
        return finish(self, should_hurry)

    monkeypatch.setattr(HubPusher, "finish", finish_and_signal)
    started = time.monotonic()
    trainer = run(config_for(tmp_path, model_folder))
    assert time.monotonic() - started < 40
    ended = result(trainer)
    assert (ended["status"], list(ended["hub"]["failed"])) == ("completed", [f"hf/step-{NUM_STEPS}"])


def test_a_repository_that_the_token_cannot_make_is_warned_of_at_the_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for repository in ("they/tiny", "our-team/tiny"):
        pusher = HubPusher(Hub(push_to=repository), tmp_path)
        pusher.start()
        pusher._jobs.put(None)
        pusher._thread.join(60)
        assert pusher.finish(lambda: False) == {"repository": repository, "pushed": [], "failed": {}}
    printed = capfd.readouterr().out
    assert "exports may not reach they/tiny: " in printed
    assert "our-team/tiny:" not in printed


def test_without_a_token_or_offline_a_push_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    require_hub(Hub(push_to="me/tiny"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ValueError, match=r"hub.push_to is me/tiny, .* no token"):
        require_hub(Hub(push_to="me/tiny"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE"):
        require_hub(Hub(push_to="me/tiny"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"checkpoints__export_hf": False}, "hub.push_to: is me/tiny, but checkpoints.export_hf is false"),
        ({"hub__every": 3}, "hub.every: is 3, but checkpoints.export_interval is null"),
        ({"hub__every": 3, "checkpoints__export_interval": 2}, "hub.every: is 3, but checkpoints.export_interval is 2"),
        ({"hub__push_to": None, "hub__private": False}, "hub.private: is set, but push_to is null"),
        ({"hub__push_to": None, "hub__every": "exports"}, "hub.every: is set, but push_to is null"),
        ({"logging__to": ["mlflow", "mlflow"]}, "logging.to: mlflow, mlflow has a logger twice"),
        ({"hub__push_to": "tiny"}, 'found "tiny" .text.; wanted the name of a repository, user/name'),
    ],
)
def test_settings_that_push_nothing_are_refused(
    tmp_path: Path, model_folder: Path, change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        config_for(tmp_path, model_folder, **change)
