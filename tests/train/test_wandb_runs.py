"""Runs with the real wandb: a server on loopback, none at all, and ones that hang or die."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LazyModule, chosen, rest_nightly
from tests.train.ranks import Ended, launch
from tests.train.runs import chat_line, metrics, settings, write_config, write_rows
from tests.train.wandb_server import Server, refusing, serving

LazyModule("wandb")

NUM_STEPS = 6
KEY = "k" * 40
PLANTED = {
    "MY_SERVICE_TOKEN": "planted-token-of-a-service",
    "MY_PLAIN_VARIABLE": "planted-plain-variable",
    "USER": "planted-user",
    "LOGNAME": "planted-user",
    "WANDB_API_KEY": KEY,
}
PLANTED_ARGUMENT = "planted-argument"


@dataclass(frozen=True)
class Run:
    """A run that is over."""

    directory: Path
    ended: Ended

    @property
    def offline_folders(self) -> list[Path]:
        return sorted(self.directory.glob("wandb/offline-run-*"))


def go(folder: Path, environment: dict[str, str], timeouts: dict[str, float], fault: str) -> int:
    """Does what run_train.py does, in a process of its own; `fault` happens in step 4."""
    from sftron.commands.train import run as main
    from sftron.train import loop
    from sftron.train.logs import trackers

    os.environ |= environment
    for name in ("WANDB_MODE", "WANDB_SILENT", "WANDB_ERROR_REPORTING"):
        os.environ.pop(name, None)
    sys.argv = [f"/{PLANTED_ARGUMENT}/run_train.py", f"--token={PLANTED_ARGUMENT}"]
    trackers._WANDB_SETTINGS |= timeouts
    train_step, count = loop.train_step, 0

    def step(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            if fault == "stopped":
                os.kill(os.getpid(), signal.SIGTERM)
            elif fault == "fails":
                raise RuntimeError("the step fails")
            elif fault == "killed":
                for process in processes_with(f"WANDB_DATA_DIR={os.environ['WANDB_DATA_DIR']}"):
                    if process != os.getpid():
                        os.kill(process, signal.SIGKILL)
        return train_step(*arguments, **options)

    loop.train_step = step
    return main(["--config", str(folder / "config.yaml")])


def processes_with(setting: str) -> list[int]:
    """Returns the processes whose environment holds it: those of one run, and what they have started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if setting.encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def train(
    folder: Path,
    model_folder: Path,
    *,
    url: str | None = None,
    fault: str = "",
    num_ranks: int = 1,
    environment: dict[str, str] | None = None,
    **timeouts: float,
) -> Run:
    """Trains in `folder`; offline without a `url`."""
    folder.mkdir(exist_ok=True)
    if not (folder / "rows.jsonl").exists():
        write_rows(folder / "rows.jsonl")
    options = {"mode": "online" if url else "offline", "project": "p", "tags": ["a", "b"], "notes": "words"}
    overrides: dict[str, Any] = {"logging__wandb": options, "tokens__train_steps": NUM_STEPS}
    overrides |= {"checkpoints__interval": 3, "tokens__batch_accumulation_per_replica": 2 // num_ranks}
    (folder / "prompts.jsonl").write_text(chat_line("What is 3?") + "\n")
    overrides |= {"evaluation__prompts": str(folder / "prompts.jsonl"), "evaluation__max_new_tokens": 2}
    write_config(folder / "config.yaml", settings(folder, model_folder, **overrides))
    home = folder / "planted-home"
    given = PLANTED | {"HOME": str(home), "NETRC": str(home / ".netrc"), "WANDB_BASE_URL": url or refusing()}
    given |= {"WANDB_DATA_DIR": str(folder / "runs/run/wandb")}
    ended = launch(num_ranks, go, folder, given | (environment or {}), timeouts, fault, folder=folder)[0]
    return Run(folder / "runs/run", ended)


def sync(*folders: Path) -> Server:
    """Returns a server that `wandb sync` has sent these folders of offline runs to."""
    with serving(Server()) as server:
        environment = os.environ | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "HOME": str(folders[0])}
        command = [sys.executable, "-m", "wandb", "sync", *map(str, folders)]
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    return server


def require_nothing_of_the_environment(sent: bytes) -> None:
    for planted in [*PLANTED.values(), "planted-home", PLANTED_ARGUMENT, os.environ["PATH"]]:
        assert planted.encode() not in sent
    assert not re.search(rf'"{re.escape(socket.gethostname())}"'.encode(), sent)
    assert not any(name in sent for name in (b"wandb-metadata.json", b"requirements.txt", b"output.log"))


# --- Offline ---


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Run:
    """Of two ranks, of which the first alone logs."""
    return train(tmp_path_factory.mktemp("offline"), model_folder, num_ranks=2)


def test_an_offline_run_has_every_step_and_how_it_ended_to_send_later(offline: Run) -> None:
    assert offline.ended.exit_code == 0, offline.ended.err
    (folder,) = offline.offline_folders
    assert f"wandb      offline; `wandb sync {folder}` sends it" in offline.ended.out
    server, written = sync(folder), metrics(offline.directory)

    assert server.steps == [step["step"] for step in written] == list(range(1, NUM_STEPS + 1))
    assert [point["loss"] for point in server.points if "loss" in point] == [step["loss"] for step in written]
    assert server.config["_wandb"]["value"]["m"] == [
        {"1": "step", "6": [3], "7": []},
        {"2": "*", "5": 1, "6": [1], "7": []},  # all are drawn over step, the first of the list
    ]
    assert (server.exit_code, server.is_preempting, server.summary["final/status"]) == (0, False, "completed")
    trained = sum(step["trained_tokens"] for step in written)
    mean = sum(step["loss"] * step["trained_tokens"] for step in written) / trained
    assert server.summary["final/loss"] == pytest.approx(mean)


def test_its_files_have_the_page_of_the_first_pack_and_nothing_of_the_environment(offline: Run) -> None:
    (page,) = offline.directory.glob("wandb/offline-run-*/files/media/html/*.html")
    assert page.read_bytes() == (offline.directory / "samples.html").read_bytes()
    tables = [json.loads(path.read_text()) for path in offline.directory.glob("wandb/**/eval/answers*.table.json")]
    assert [(len(table["data"]), table["data"][0][0]) for table in tables] == [(1, "What is 3?")] * 2
    files = [path for path in offline.directory.glob("wandb/**/*") if path.is_file()]
    assert len(files) >= 4
    require_nothing_of_the_environment(b"\n".join(path.read_bytes() for path in files))


# --- A server ---


@dataclass(frozen=True)
class Online:
    """A run that was stopped in its fourth step and trained that again, and what its server knew each time."""

    server: Server
    printed: str
    endings: list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Online:
    folder, printed, endings = tmp_path_factory.mktemp("online"), "", []
    with serving(Server()) as server:
        for fault in ("stopped", ""):
            run = train(folder, model_folder, url=server.url, fault=fault)
            endings.append((server.exit_code, server.is_preempting, server.summary["final/status"]))
            printed += run.ended.out + run.ended.err
            shutil.rmtree(run.directory / "checkpoints/step-4", ignore_errors=True)
    return Online(server, printed, endings)


def test_a_run_that_is_stopped_and_continues_is_one_and_steps_trained_again_are_not_lost(online: Online) -> None:
    server = online.server
    assert online.endings == [(1, True, "preempted"), (0, True, "completed")]
    assert len({variables["name"] for variables in server.runs}) == 1
    assert server.steps == [1, 2, 3, 4, 4, 5, 6]
    # wandb drops a point that is not after the last one, by its own count.
    own = [point["_step"] for point in server.points]
    assert own == sorted(set(own))


def test_a_server_gets_the_configuration_and_nothing_of_the_environment(online: Online) -> None:
    server = online.server
    assert f"wandb      {server.url}/e/p/runs/" in online.printed
    config = {key: item["value"] for key, item in server.config.items()}
    assert config["optimizer"]["learning_rate"] == 1e-2
    assert {"python", "sftron", "wandb", "torch", "transformers"} <= config["run"]["versions"].keys()
    assert config["run"]["data"]["data.num_lanes"] == "4"
    assert config["run"]["parameters"] > 10_000
    assert (config["run"]["device"], config["run"]["num_ranks"]) == ("cpu", 1)
    variables = server.runs[0]
    assert (variables["project"], variables["displayName"], variables["notes"]) == ("p", "run", "words")
    assert variables["tags"] == ["a", "b"]
    sent = b"\n".join(server.bodies)
    assert b"sample_page" in sent
    require_nothing_of_the_environment(sent)
    assert KEY not in online.printed


def test_a_run_of_a_sweep_is_the_one_that_the_agent_has_chosen_and_fails_there_too(
    tmp_path: Path, model_folder: Path
) -> None:
    chosen = {"WANDB_SWEEP_ID": "sweep7", "WANDB_RUN_ID": "trial3", "WANDB_PROJECT": "agents", "WANDB_ENTITY": "them"}
    with serving(Server()) as server:
        failed = train(tmp_path, model_folder, url=server.url, fault="fails", environment=chosen)
    assert failed.ended.exit_code == 1
    assert (server.exit_code, server.is_preempting, server.summary["final/status"]) == (1, False, "failed")
    assert server.steps == [1, 2, 3]
    variables = server.runs[0]
    assert [variables[key] for key in ("name", "sweep", "project", "entity")] == ["trial3", "sweep7", "agents", "them"]


# --- Faults ---

FAULTS = {
    "refused": ({"init_timeout": 2}, "cannot reach its server"),
    "hangs": ({"init_timeout": 2}, "cannot reach its server"),
    "hangs later": ({"finish_timeout": 4}, "failed: TimeoutError"),
    "killed": ({"finish_timeout": 4}, "failed: "),
}


@pytest.fixture(scope="module")
def faulty(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, request: pytest.FixtureRequest
) -> Iterator[dict[str, Run]]:
    """All at once, as they mostly wait."""

    def run(name: str) -> Run:
        with serving(Server(hangs={"hangs": "always", "hangs later": "later"}.get(name, "never"))) as server:
            url = refusing() if name == "refused" else server.url
            return train(tmp_path_factory.mktemp("faulty"), model_folder, url=url, fault=name, **FAULTS[name][0])

    with ThreadPoolExecutor(4) as pool:
        names = chosen(FAULTS, request)
        yield dict(zip(names, pool.map(run, names), strict=True))


@pytest.mark.parametrize("name", rest_nightly(FAULTS, ["hangs", "hangs later"]))
def test_whatever_wandb_and_its_server_do_the_run_completes_with_every_step_in_the_file(
    faulty: dict[str, Run], name: str
) -> None:
    run = faulty[name]
    assert run.ended.exit_code == 0, run.ended.err
    assert json.loads((run.directory / "result.json").read_text())["status"] == "completed"
    assert [step["step"] for step in metrics(run.directory)] == list(range(1, NUM_STEPS + 1))
    assert f"wandb      {FAULTS[name][1]}" in run.ended.out
    assert run.ended.out.count("wandb      failed: ") == name.endswith(("later", "killed"))  # once, and not once a step
    assert KEY not in run.ended.out + run.ended.err
    assert "Traceback" not in run.ended.err


def test_a_server_that_is_not_there_leaves_files_with_every_step_to_send_later(faulty: dict[str, Run]) -> None:
    assert sync(*faulty["hangs"].offline_folders).steps == list(range(1, NUM_STEPS + 1))
