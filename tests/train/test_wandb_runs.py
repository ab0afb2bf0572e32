"""Real wandb: runs read back from disk, a server on loopback, and servers that refuse, hang, fail and die."""

import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.train.ranks import Ended, launch
from tests.train.runs import metrics, settings, write_config, write_rows
from tests.train.wandb_files import OfflineRun, offline_files, read_offline
from tests.train.wandb_server import Server, refusing, serving, wait_until

pytest.importorskip("wandb")

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
    """A run that is over. seconds: that it took, with its end."""

    directory: Path
    ended: Ended
    seconds: float

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.directory / "result.json").read_text())

    @property
    def offline(self) -> list[OfflineRun]:
        return [read_offline(path) for path in offline_files(self.directory)]


def go(folder: Path, environment: dict[str, str], limits_s: tuple[float, float], fault: str) -> int:
    """What run_train.py does, in a process of its own. fault: what happens in step 4."""
    from run_train import main

    from sftron.train import trainer, wandb_log

    os.environ |= environment
    for name in ("WANDB_MODE", "WANDB_SILENT", "WANDB_ERROR_REPORTING"):
        os.environ.pop(name, None)
    sys.argv = [f"/{PLANTED_ARGUMENT}/run_train.py", f"--token={PLANTED_ARGUMENT}"]
    wandb_log._TIME_TO_START_S, wandb_log._TIME_TO_FINISH_S = limits_s
    train_step, count = trainer.train_step, 0
    opens, is_open = wandb_log.WandbLog._open, threading.Event()

    def opened(self: Any, module: Any) -> Any:
        run = opens(self, module)
        is_open.set()
        return run

    def step(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            if fault == "stopped":
                os.kill(os.getpid(), signal.SIGTERM)
            elif fault == "fails":
                raise RuntimeError("the step fails")
            elif fault.endswith("later"):
                is_open.wait(60)
            if fault == "wandb is killed later":
                for process in processes_with(f"WANDB_DATA_DIR={os.environ['WANDB_DATA_DIR']}"):
                    if process != os.getpid():
                        os.kill(process, signal.SIGKILL)
        return train_step(*arguments, **options)

    trainer.train_step, wandb_log.WandbLog._open = step, opened
    return main(["--config", str(folder / "config.yaml")])


def processes_with(setting: str) -> list[int]:
    """Whose environment holds it: those of one run, and what they have started."""
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
    limits_s: tuple[float, float] = (40, 40),
    environment: dict[str, str] | None = None,
    **overrides: Any,
) -> Run:
    """Train in `folder`; offline without a `url`. A server is never one of the real ones."""
    folder.mkdir(exist_ok=True)
    if not (folder / "rows.jsonl").exists():
        write_rows(folder / "rows.jsonl")
    options = {"mode": "online" if url else "offline", "project": "p", "tags": ["a", "b"], "notes": "words"}
    defaults = {"logging__wandb": options, "tokens__train_steps": NUM_STEPS, "checkpoints__interval": 3}
    write_config(folder / "config.yaml", settings(folder, model_folder, **(defaults | overrides)))
    home = folder / "planted-home"
    given = PLANTED | {"HOME": str(home), "NETRC": str(home / ".netrc"), "WANDB_BASE_URL": url or refusing()}
    given |= {"WANDB_DATA_DIR": str(folder / "runs/run/wandb")}
    started = time.monotonic()
    ended = launch(num_ranks, go, folder, given | (environment or {}), limits_s, fault, folder=folder)[0]
    return Run(folder / "runs/run", ended, time.monotonic() - started)


def files_of_wandb(run: Run) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.directory.glob("wandb/**/*") if path.is_file()}


# --- Offline ---


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Run:
    return train(tmp_path_factory.mktemp("offline"), model_folder)


def test_an_offline_run_has_every_step_by_its_own_axis_and_how_it_ended(offline: Run) -> None:
    assert offline.ended.exit_code == 0, offline.ended.err
    (found,) = offline.offline
    written = metrics(offline.directory)

    assert found.steps == [step["step"] for step in written] == list(range(1, NUM_STEPS + 1))
    assert [point["loss"] for point in found.points if "loss" in point] == [step["loss"] for step in written]
    assert found.metrics == {"step": "", "*": "step"}
    assert (found.exit_code, found.is_preempting) == (0, False)
    assert found.summary["final/status"] == "completed"
    trained = sum(step["trained_tokens"] for step in written)
    mean = sum(step["loss"] * step["trained_tokens"] for step in written) / trained
    assert found.summary["final/loss"] == pytest.approx(mean)


def test_it_says_what_the_run_is_made_of(offline: Run) -> None:
    import torch
    import transformers

    (found,) = offline.offline
    told, told_run = found.config, found.run
    assert told["optimizer"]["learning_rate"] == 1e-2
    assert told["run"]["versions"]["torch"] == torch.__version__
    assert told["run"]["versions"]["transformers"] == transformers.__version__
    assert {"python", "sftron", "wandb"} <= told["run"]["versions"].keys()
    assert told["run"]["data"]["data.num_lanes"] == "4"
    assert len(told["run"]["data"]["data.datasets.0"]) > 20
    assert told["run"]["parameters"] > 10_000
    assert (told["run"]["device"], told["run"]["num_ranks"], told["run"]["continued_from"]) == ("cpu", 1, None)
    assert (told_run.project, told_run.display_name, told_run.notes, list(told_run.tags)) == (
        "p",
        "run",
        "words",
        ["a", "b"],
    )


def test_the_sample_is_a_table_of_who_says_what_and_what_of_it_is_trained(offline: Run) -> None:
    (path,) = offline.directory.glob("wandb/offline-run-*/files/media/table/*.json")
    table = json.loads(path.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]

    assert rows[0]["text"].startswith("<|im_start|>user")
    assert {row["trained"] for row in rows if row["role"] == "assistant"} == {True}
    assert not any(row["trained"] for row in rows if row["role"] == "user")
    (page,) = offline.directory.glob("wandb/offline-run-*/files/media/html/*.html")
    assert page.read_bytes() == (offline.directory / "samples.html").read_bytes()


def test_no_file_of_it_holds_anything_of_the_environment(offline: Run) -> None:
    files = files_of_wandb(offline)
    assert len(files) >= 5
    for planted in [*PLANTED.values(), "planted-home", PLANTED_ARGUMENT, os.environ["PATH"]]:
        assert [str(path) for path, content in files.items() if planted.encode() in content] == []
    (found,) = offline.offline
    assert not {"environment", "output", "output_raw", "stats"} & set(found.kinds)
    assert (found.run.host, found.run.git.commit, found.run.git.remote_url) == ("", "", "")
    name = re.escape(socket.gethostname())
    assert not re.search(rf"(?<![\w-]){name}(?![\w-])", found.text)
    assert "requirements.txt" not in {path.name for path in files}


def test_a_run_that_is_stopped_and_goes_on_is_one_and_steps_trained_again_are_not_lost(
    tmp_path: Path, model_folder: Path
) -> None:
    first = train(tmp_path, model_folder, fault="stopped")
    assert first.result["status"] == "preempted"
    shutil.rmtree(first.directory / "checkpoints/step-4")
    second = train(tmp_path, model_folder)

    before, after = second.offline
    assert before.run.run_id == after.run.run_id
    assert after.run.resume
    assert (before.exit_code, before.is_preempting, before.summary["final/status"]) == (1, True, "preempted")
    assert (after.exit_code, after.is_preempting, after.summary["final/status"]) == (0, False, "completed")
    assert (before.steps, after.steps) == ([1, 2, 3, 4], [4, 5, 6])
    assert not list(second.directory.glob("wandb/offline-run-*/files/media/table/*"))[1:]  # the sample is the same
    state = json.loads((second.directory / "checkpoints/step-6/state.json").read_text())
    assert state["wandb"] == {"id": after.run.run_id, "run_name": "run"}


def test_a_run_that_fails_has_failed_there_too(tmp_path: Path, model_folder: Path) -> None:
    failed = train(tmp_path, model_folder, fault="fails")

    assert failed.ended.exit_code == 1
    (found,) = failed.offline
    assert (found.exit_code, found.is_preempting, found.summary["final/status"]) == (1, False, "failed")
    assert found.steps == [1, 2, 3]


def test_of_two_ranks_the_first_alone_logs(tmp_path: Path, model_folder: Path) -> None:
    run = train(tmp_path, model_folder, num_ranks=2, tokens__batch_accumulation_per_replica=1)

    assert run.ended.exit_code == 0, run.ended.err
    (found,) = run.offline
    assert found.steps == list(range(1, NUM_STEPS + 1))
    assert found.config["run"]["num_ranks"] == 2


def test_under_a_sweep_the_run_is_the_one_that_the_agent_has_chosen(tmp_path: Path, model_folder: Path) -> None:
    chosen = {"WANDB_SWEEP_ID": "sweep7", "WANDB_RUN_ID": "trial3", "WANDB_PROJECT": "theirs", "WANDB_ENTITY": "them"}
    run = train(tmp_path, model_folder, environment=chosen)

    (found,) = run.offline
    assert (found.run.run_id, found.run.sweep_id) == ("trial3", "sweep7")
    assert (found.run.project, found.run.entity) == ("theirs", "them")
    assert json.loads((run.directory / "wandb.json").read_text())["id"] == "trial3"


# --- A server ---


def test_an_online_run_sends_every_step_and_nothing_of_the_environment(tmp_path: Path, model_folder: Path) -> None:
    with serving(Server()) as server:
        run = train(tmp_path, model_folder, url=server.url)

    assert server.steps == list(range(1, NUM_STEPS + 1))
    assert (server.exit_code, server.is_preempting) == (0, False)
    assert server.config["run"]["value"]["versions"]["sftron"]
    assert f"wandb      {server.url}/e/p/runs/" in run.ended.out
    sent = b"\n".join(server.bodies)
    assert b"sample.table.json" in sent
    for planted in [*PLANTED.values(), "planted-home", PLANTED_ARGUMENT, os.environ["PATH"]]:
        assert planted.encode() not in sent
    assert not re.search(rf'"{re.escape(socket.gethostname())}"'.encode(), sent)
    assert not any(name in sent for name in (b"wandb-metadata.json", b"requirements.txt", b"output.log"))
    assert KEY not in run.ended.out + run.ended.err


def test_a_preempted_run_is_preempted_there_and_a_server_that_lacks_steps_gets_them_when_it_goes_on(
    tmp_path: Path, model_folder: Path
) -> None:
    """As if steps 3 and 4 had been trained while it was out of reach."""
    with serving(Server()) as server:
        stopped = train(tmp_path, model_folder, url=server.url, fault="stopped")
    assert stopped.result["status"] == "preempted"
    assert (server.exit_code, server.is_preempting) == (1, True)
    with serving(Server(known_step=2)) as server:
        run = train(tmp_path, model_folder, url=server.url)

    assert server.steps == [3, 4, 5, 6]
    written = {step["step"]: step["loss"] for step in metrics(run.directory)}
    assert (server.exit_code, server.is_preempting) == (0, False)
    assert {point["step"]: point["loss"] for point in server.points} == {step: written[step] for step in server.steps}
    # wandb drops a point that is not after the last one, by its own count.
    own = [point["_step"] for point in server.points]
    assert own == sorted(set(own))
    assert own[0] > 40


def test_without_a_key_an_online_run_is_refused_in_one_line_before_anything_is_loaded(
    tmp_path: Path, model_folder: Path
) -> None:
    run = train(tmp_path, model_folder, url=refusing(), environment={"WANDB_API_KEY": ""})

    assert run.ended.exit_code == 2
    assert run.ended.err.splitlines()[-1].startswith("logging.wandb.mode is online but there is no API key for it: run")
    assert not run.directory.exists()


# --- Faults ---

FAULTS: dict[str, Callable[[], Server]] = {
    "refuses": lambda: Server(),
    "hangs": lambda: Server("hangs"),
    "answers with errors": lambda: Server("errors"),
    "closes connections": lambda: Server("closes"),
    "hangs later": lambda: Server("hangs", only_once_begun=True),
    "answers with errors later": lambda: Server("errors", only_once_begun=True),
    "closes connections later": lambda: Server("closes", only_once_begun=True),
    "wandb is killed later": lambda: Server(),
}
FINISH_S = 8.0


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[dict[str, Run]]:
    """All at once, as they mostly wait."""

    def run(name: str) -> Run:
        with serving(FAULTS[name]()) as server:
            url = refusing() if name == "refuses" else server.url
            limits_s = (60, FINISH_S) if "later" in name else (2, 60)
            folder = tmp_path_factory.mktemp("faulty")
            return train(folder, model_folder, url=url, fault=name, limits_s=limits_s)

    with ThreadPoolExecutor(4) as pool:
        yield dict(zip(FAULTS, pool.map(run, FAULTS), strict=True))


@pytest.mark.parametrize("name", FAULTS)
def test_whatever_the_server_does_the_run_completes_with_every_step_in_the_file(
    faulty: dict[str, Run], name: str
) -> None:
    run = faulty[name]
    assert run.ended.exit_code == 0, run.ended.err
    assert run.result["status"] == "completed"
    assert [step["step"] for step in metrics(run.directory)] == list(range(1, NUM_STEPS + 1))
    assert KEY not in run.ended.out + run.ended.err
    assert "Traceback" not in run.ended.err


@pytest.mark.parametrize("name", [name for name in FAULTS if "killed" not in name])
def test_a_server_that_is_not_there_leaves_files_with_every_step_to_send_later(
    faulty: dict[str, Run], name: str
) -> None:
    found = faulty[name].offline
    assert list(range(1, NUM_STEPS + 1)) in [each.steps for each in found]
    assert len({each.run.run_id for each in found if each.run}) == 1
    if "later" not in name:
        assert "and the run goes on offline" in faulty[name].ended.out
        assert re.search(r"wandb      offline; `wandb sync \S+` sends it", faulty[name].ended.out)


@pytest.mark.parametrize("name", ["hangs later", "answers with errors later", "closes connections later"])
def test_the_end_waits_for_a_dead_server_for_as_long_as_it_may_and_says_what_remains(
    faulty: dict[str, Run], name: str
) -> None:
    assert "wandb      gets nothing more: it has not finished in 8 s" in faulty[name].ended.out


@pytest.mark.parametrize("name", FAULTS)
def test_nothing_of_it_runs_on_after_the_run(faulty: dict[str, Run], name: str) -> None:
    setting = f"WANDB_DATA_DIR={faulty[name].directory / 'wandb'}"
    wait_until(lambda: not processes_with(setting))
