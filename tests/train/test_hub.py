"""Exports are pushed to a server that speaks the Hub's protocol, byte for byte, and no failure loses the local one."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from sftron.config import ConfigError, Hub
from sftron.train.exports import hub
from sftron.train.exports.exporter import export_checkpoint
from sftron.train.exports.hub import HubPusher, Push, require_hub
from sftron.train.loop import TrainingLoop
from sftron.train.trainer import Trainer
from tests.train.hub_server import TOKEN, HubServer, serving
from tests.train.runs import make_config, metrics, on_each_step, result, run, stop_in

NUM_STEPS = 4
# huggingface_hub's own call of its HTTP client.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")  # the server speaks git-LFS
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setattr(constants, name, True)


def config_for(tmp_path: Path, model_folder: Path, **overrides: Any) -> Any:
    options = {"tokens__train_steps": NUM_STEPS, "hub__push_to": "me/tiny"}
    return make_config(tmp_path, model_folder, **options | overrides)


def files_of(folder: Path, prefix: str = "") -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert len(found) > 3
    return {f"me/tiny/{prefix}{name}": content for name, content in found.items()}


def test_a_push_arrives_byte_for_byte_and_the_token_is_nowhere(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(HubServer()) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        trainer = run(config_for(tmp_path, model_folder, checkpoints__export_interval=2))
    folder = trainer.directory.folder
    assert server.files == files_of(folder / f"hf/step-{NUM_STEPS}")
    assert any(name.endswith(".safetensors") for name in server.files)
    assert (server.is_private, server.messages) == ({"me/tiny": True}, [f"step {NUM_STEPS}"])
    assert b'folder = "me/tiny"' in server.files["me/tiny/README.md"]
    export_checkpoint(trainer.config, folder / f"checkpoints/step-{NUM_STEPS}", tmp_path / "converted")
    for not_pushed in (folder / "hf/step-2", tmp_path / "converted"):
        assert 'folder = "."' in (not_pushed / "README.md").read_text()

    ended, printed = result(trainer), capfd.readouterr().out
    assert (ended["status"], ended["step"]) == ("completed", NUM_STEPS)
    assert ended["hub"] == {"repository": "me/tiny", "pushed": [f"hf/step-{NUM_STEPS}"], "failed": {}}
    assert f"hf/step-{NUM_STEPS} is on the Hub, in me/tiny" in printed
    assert "WARNING" not in printed
    texts = [path.read_bytes() for path in folder.rglob("*") if path.is_file()] + server.bodies
    assert not any(TOKEN.encode() in text for text in [*texts, printed.encode()])


def test_a_push_that_is_refused_is_named_with_its_command_and_is_never_made_after_a_later_one(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(HubServer(fails=1)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        trainer = run(config_for(tmp_path, model_folder, checkpoints__export_interval=2, hub__every="exports"))
    folder = trainer.directory.folder
    assert [line[-3:] for line in server.log if "/commit/" in line] == ["403", "200"]
    assert server.files == files_of(folder / f"hf/step-{NUM_STEPS}")
    hub_facts = result(trainer)["hub"]
    assert (hub_facts["pushed"], list(hub_facts["failed"])) == ([f"hf/step-{NUM_STEPS}"], ["hf/step-2"])
    assert "the disk of this Hub is full" in hub_facts["failed"]["hf/step-2"]
    command = f"hf upload me/tiny {folder}/hf/step-2 . --private --commit-message 'step 2'"
    assert command in capfd.readouterr().out


def test_a_server_that_never_answers_costs_a_bounded_wait_and_nothing_of_the_run(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_SILENCE_S", 1.0)
    alone = run(config_for(tmp_path, model_folder, hub__push_to=None, general__run_name="alone"))
    with serving(HubServer(hangs=True)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        started = time.monotonic()
        trainer = run(config_for(tmp_path, model_folder))
        assert time.monotonic() - started < 40
    folder = trainer.directory.folder
    assert "POST /api/repos/create -> no answer" in server.log
    assert server.files == {}
    ended = result(trainer)
    assert ended["status"] == "completed"
    assert "Timeout" in ended["hub"]["failed"][f"hf/step-{NUM_STEPS}"]
    exports = [
        files_of(each.directory.folder / f"hf/step-{NUM_STEPS}")["me/tiny/model.safetensors"]
        for each in (alone, trainer)
    ]
    assert exports[0] == exports[1]
    assert [step["loss"] for step in metrics(folder)] == [step["loss"] for step in metrics(alone.directory.folder)]


def test_exports_on_the_way_are_commits_and_an_adapter_has_its_folder(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"checkpoints__export_interval": 1, "hub__every": 2, "hub__private": False, "lora__rank": 2}
    with serving(HubServer()) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        trainer = run(config_for(tmp_path, model_folder, **options, lora__merge=False))
        folder = trainer.directory.folder
        assert server.messages == ["step 2", f"step {NUM_STEPS}"]
        assert server.files == files_of(folder / f"adapter/step-{NUM_STEPS}")
        server.files.clear()
        server.messages.clear()
        merged = config_for(tmp_path, model_folder, **options | {"hub__every": "end"}, general__run_name="merged")
        folder = run(merged).directory.folder
    assert server.messages == [f"step {NUM_STEPS}"] * 2
    both = files_of(folder / f"adapter/step-{NUM_STEPS}", "adapter/") | files_of(folder / f"hf/step-{NUM_STEPS}")
    assert server.files == both
    assert b'folder = "."' in server.files["me/tiny/adapter/README.md"]
    assert server.is_private == {"me/tiny": False}
    assert "WARNING" not in capfd.readouterr().out


def raise_in(step: int) -> Callable[[int], None]:
    def act(number: int) -> None:
        if number == step:
            raise RuntimeError("the device is lost")

    return act


@pytest.mark.parametrize("status", ["preempted", "failed", "not finite"])
def test_a_run_that_does_not_complete_ends_its_pushes_and_records_them(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    monkeypatch.setattr(hub, "_SHORT_TIME_S", 0.3)
    if status == "not finite":
        monkeypatch.setattr(TrainingLoop, "_is_finite", lambda self, *_: self.progress.step < 3)
    else:
        on_each_step(monkeypatch, stop_in(3) if status == "preempted" else raise_in(3))
    with serving(HubServer(hangs=True)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        trainer = Trainer(config_for(tmp_path, model_folder, checkpoints__export_interval=1, hub__every="exports"))
        trainer.build()
        if status == "failed":
            with pytest.raises(RuntimeError, match="the device is lost"):
                trainer.train()
        else:
            assert trainer.train() == (0 if status == "preempted" else 3)
    ended = result(trainer)
    assert ended["status"] == ("preempted" if status == "preempted" else "failed")
    failed = dict.fromkeys(("hf/step-1", "hf/step-2"), "the push was not done in time")
    assert ended["hub"] == {"repository": "me/tiny", "pushed": [], "failed": failed}


def test_the_last_export_of_a_diverged_run_is_not_pushed(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(HubServer()) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        rate = {"optimizer__learning_rate": 5.0, "optimizer__schedule": "constant"}
        trainer = Trainer(config_for(tmp_path, model_folder, tokens__train_steps=12, **rate))
        trainer.build()
        assert trainer.train() == 3
    ended = result(trainer)
    assert (ended["status"], ended["hub"]["pushed"], ended["hub"]["failed"]) == ("diverged", [], {})
    assert Path(ended["exported"]).is_dir()
    assert server.files == {}


def test_no_push_begins_after_the_end_though_a_second_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_SHORT_TIME_S", 0.3)
    with serving(HubServer(hangs=True)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        pusher = HubPusher(Hub(push_to="me/tiny"), tmp_path)
        monkeypatch.setattr(pusher, "_try", lambda push: (push, server.end.wait())[0] and None)
        for step in (1, 2):
            write(tmp_path / str(step))
            pusher.push(tmp_path / str(step), step)
        pusher.start()
        found = pusher.finish(lambda: True)
        tried: list[Push | None] = []
        monkeypatch.setattr(pusher, "_try", tried.append)
        server.end.set()
        pusher._thread.join(30)
    assert (pusher._thread.is_alive(), tried) == (False, [])
    assert (found["pushed"], list(found["failed"])) == ([], ["1", "2"])


def test_a_process_ends_though_its_push_hangs(tmp_path: Path) -> None:
    write(tmp_path / "1")
    script = (
        "import sys; from pathlib import Path; from sftron.config import Hub; from sftron.train.exports import hub\n"
        "hub._SILENCE_S, hub._SHORT_TIME_S, folder = 600.0, 0.3, Path(sys.argv[1])\n"
        "pusher = hub.HubPusher(Hub(push_to='me/tiny'), folder)\n"
        "pusher.start(), pusher.push(folder / '1', 1)\n"
        "print(pusher.finish(lambda: True)['failed'], pusher._thread.is_alive())"
    )
    with serving(HubServer(hangs=True)) as server:
        environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", script, str(tmp_path)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines()[-1] == "{'1': 'the push was not done in time'} True"


def write(folder: Path) -> None:
    folder.mkdir()
    (folder / "file").write_text("content")


def test_a_signal_shortens_the_last_wait_and_a_second_ctrl_c_ends_it_and_the_run_stays_completed(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_SHORT_TIME_S", 60.0)
    waits: list[float] = []
    wait = HubPusher._wait

    def wait_and_signal(self: HubPusher, seconds: float, *arguments: Any, **options: Any) -> None:
        waits.append(seconds)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        wait(self, seconds, *arguments, **options)

    monkeypatch.setattr(HubPusher, "_wait", wait_and_signal)
    with serving(HubServer(hangs=True)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        started = time.monotonic()
        trainer = run(config_for(tmp_path, model_folder))
        assert time.monotonic() - started < 40
    assert waits == [pytest.approx(hub._LEAST_TIME_S, abs=10), 60.0]
    ended = result(trainer)
    assert (ended["status"], list(ended["hub"]["failed"])) == ("completed", [f"hf/step-{NUM_STEPS}"])


def test_a_repository_that_the_token_cannot_make_is_warned_of_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(HubServer()) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        for repository in ("they/tiny", "our-team/tiny"):
            pusher = hub.HubPusher(Hub(push_to=repository), tmp_path)
            pusher.start()
            pusher._jobs.put(None)
            pusher._thread.join(60)
            assert pusher.finish(lambda: False) == {"repository": repository, "pushed": [], "failed": {}}
    printed = capfd.readouterr().out
    assert "exports may not reach they/tiny: " in printed
    assert "our-team/tiny:" not in printed


def test_a_push_by_hand_is_quoted() -> None:
    command = Push(Path("runs/a run/hf/step-2"), ".", 2).command(Hub(push_to="me/tiny", private=False))
    assert command == "hf upload me/tiny 'runs/a run/hf/step-2' . --no-private --commit-message 'step 2'"


def test_without_a_token_or_offline_a_push_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    require_hub(Hub(push_to="me/tiny"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ValueError, match=r"hub.push_to is me/tiny, but there is no token for it: run `hf auth login`"):
        require_hub(Hub(push_to="me/tiny"))
    require_hub(Hub())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="but HF_HUB_OFFLINE is set: unset it"):
        require_hub(Hub(push_to="me/tiny"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"checkpoints__export_hf": False}, "hub.push_to: is me/tiny, but checkpoints.export_hf is false"),
        ({"hub__every": 3}, "hub.every: is 3, but checkpoints.export_interval is null"),
        ({"hub__every": 3, "checkpoints__export_interval": 2}, "hub.every: is 3, but checkpoints.export_interval is 2"),
        ({"hub__push_to": None, "hub__private": False}, "hub.private: is set, but push_to is null"),
        ({"hub__push_to": None, "hub__every": "exports"}, "hub.every: is set, but push_to is null"),
        ({"logging__to": ["mlflow", "mlflow"]}, "logging.to: has .*mlflow twice"),
        ({"hub__push_to": "tiny"}, 'found "tiny" .text.; wanted the name of a repository, user/name'),
    ],
)
def test_settings_that_push_nothing_are_refused(
    tmp_path: Path, model_folder: Path, change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        config_for(tmp_path, model_folder, **change)
