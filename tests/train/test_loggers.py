"""Loggers that fail or hang change nothing of a run, and its numbers arrive once in those that work."""

import json
import shutil
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sftron.config import Logging
from sftron.train.logs import loggers as loggers_module
from sftron.train.logs import run_logs
from sftron.train.logs.loggers import Answers, Loggers, LoggerThread, Numbers, run_id
from sftron.train.logs.run_logs import require_loggers
from tests.train.runs import bits, make_config, metrics, on_each_step, result, run, stop_in

NUM_STEPS = 4


class Recorded:
    """A logger that keeps what it is given."""

    name = "recorded"
    replaces_steps = False

    def __init__(self) -> None:
        self.started: list[int] = []
        self.steps: list[int] = []
        self.numbers: list[Numbers] = []
        self.evaluated: list[int] = []
        self.ended: list[str] = []

    def start(self, step: int) -> None:
        self.started.append(step)

    def log(self, step: int, numbers: Numbers, answers: Answers | None = None) -> None:
        if answers is None:
            self.steps.append(step)
            self.numbers.append(numbers)
        else:
            self.evaluated.append(step)

    def finish(self, status: str) -> None:
        self.ended.append(status)


class Raising(Recorded):
    """Raises in every call."""

    name = "raising"

    def __getattribute__(self, name: str) -> Any:
        if name in ("start", "log", "finish"):
            raise SystemExit("no such service")
        return super().__getattribute__(name)


class Hanging(Recorded):
    """Never returns from its first call with numbers."""

    name = "hanging"

    def log(self, step: int, numbers: Numbers, answers: Answers | None = None) -> None:
        threading.Event().wait()


@pytest.fixture
def options(held_out: Path) -> dict[str, Any]:
    return {
        "tokens__train_steps": NUM_STEPS,
        "evaluation__datasets": [{"path": str(held_out)}],
        "evaluation__interval": 2,
        "checkpoints__export_hf": False,
    }


def use(monkeypatch: pytest.MonkeyPatch, *used: Any) -> None:
    monkeypatch.setattr("sftron.train.trainer.make_loggers", lambda *_, **__: Loggers(used))


def test_a_logger_that_raises_and_one_that_hangs_change_no_weight_and_no_line_and_silence_no_other(
    tmp_path: Path,
    model_folder: Path,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    alone = run(make_config(tmp_path, model_folder, general__run_name="alone", **options))
    recorded = Recorded()
    use(monkeypatch, Raising(), Hanging(), recorded)
    monkeypatch.setattr(loggers_module, "_TIME_TO_FINISH_S", 0.5)
    logged = run(make_config(tmp_path, model_folder, **options))

    assert bits(logged) == bits(alone)
    assert [step["loss"] for step in metrics(logged.directory.folder)] == [
        step["loss"] for step in metrics(alone.directory.folder)
    ]
    assert result(logged)["status"] == "completed"
    assert (recorded.started, recorded.steps, recorded.evaluated) == ([0], [1, 2, 3, 4], [0, 2, 4])
    assert recorded.ended == ["completed"]
    losses = [step["loss"] for step in metrics(logged.directory.folder)]
    assert [numbers["loss"] for numbers in recorded.numbers] == losses
    printed = capfd.readouterr().out
    assert printed.count("raising    failed: SystemExit: no such service. metrics.jsonl has every step") == 1
    assert printed.count("hanging    did not end in time") == 1


def test_steps_that_a_resumed_run_trains_again_are_logged_once_unless_the_logger_replaces_them(
    tmp_path: Path, model_folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, replacing = Recorded(), Recorded(), Recorded()
    replacing.replaces_steps = True
    options["checkpoints__interval"] = 2
    use(monkeypatch, first)
    on_each_step(monkeypatch, stop_in(3))
    folder = run(make_config(tmp_path, model_folder, **options)).directory.folder
    assert (first.steps, first.ended) == ([1, 2, 3], ["preempted"])
    (folder / "checkpoints/step-3").rename(folder / "lost")  # as if the run had been killed instead
    use(monkeypatch, second, replacing)
    run(make_config(tmp_path, model_folder, **options))
    assert (second.started, second.steps, second.evaluated) == ([2], [4], [4])
    assert (replacing.started, replacing.steps) == ([2], [3, 4])


def test_after_two_kills_a_logger_gets_no_step_a_second_time(
    tmp_path: Path, model_folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The starts are killed after steps 3 and 2, and resume from steps 0 and 1; the last one ends at step 4."""

    class Kept(Recorded):
        def start(self, step: int) -> None:
            run_id(self.name, folder)
            super().start(step)

    folder, starts = make_config(tmp_path, model_folder).run_dir, []
    for last, lost in ((3, "step-3"), (2, "step-2"), (None, None)):
        use(monkeypatch, logger := Kept())
        with monkeypatch.context() as of_this_start:
            if last:
                on_each_step(of_this_start, stop_in(last))
            run(make_config(tmp_path, model_folder, checkpoints__interval=1, **options))
        starts.append((logger.started[0], logger.steps, logger.evaluated))
        if lost:
            for checkpoint in (folder / "checkpoints").glob("step-*"):
                if int(checkpoint.name.removeprefix("step-")) > 1:
                    checkpoint.rename(tmp_path / f"{lost}-{checkpoint.name}")
    assert starts == [(0, [1, 2, 3], [0, 2]), (0, [], []), (1, [4], [4])]
    assert [step["step"] for step in metrics(folder)] == [1, 2, 3, 4]


def test_a_logger_that_is_behind_gets_what_fits_and_this_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loggers_module, "_MOST_CALLS_WAITING", 5)
    go_on = threading.Event()

    class Slow(Recorded):
        def start(self, step: int) -> None:
            go_on.wait()

    slow = Slow()
    thread = LoggerThread(slow)
    thread.start(0, folder=tmp_path, logged=-1, evaluated=-1)
    for step in range(1, 10):
        thread.log(step, {})
    thread.finish("completed")  # the end is never left out
    go_on.set()
    thread.wait(10)
    assert slow.steps == sorted(slow.steps)
    assert 0 < len(slow.steps) < 9
    assert slow.ended == ["completed"]
    assert capfd.readouterr().out.count("has 5 calls waiting; what does not fit is missing there") == 1


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "comet_ml", "wandb"])
def test_a_package_that_is_missing_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch, name: Any) -> None:
    monkeypatch.setattr(run_logs, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=f"logging.to has {name}, but accelerate, .* is not installed"):
        require_loggers(Logging(to=(name,)))
    require_loggers(Logging())


# --- The packages ---


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("trackio", "tensorboard", "mlflow", "sqlalchemy", "alembic", "accelerate"):
        if find_spec(name) is None:
            pytest.skip(f"not installed: {name}")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_PROJECT", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)


def test_another_tracker_of_accelerate_gets_the_configuration_and_every_number(
    tmp_path: Path, model_folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, services: None
) -> None:
    from accelerate import tracking

    calls: list[Any] = []

    class Aim(tracking.AimTracker):
        def start(self) -> None:
            calls.append((self.run_name, self.aim_repo_path))

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            calls.append(values["tokens.train_steps"])

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            calls.append((step, values.get("loss", values.get("eval/other/loss"))))

        def finish(self) -> None:
            calls.append("end")

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "aim", Aim)
    monkeypatch.setattr(run_logs, "find_spec", lambda _: True)
    folder = run(make_config(tmp_path, model_folder, logging__to=["aim"], **options)).directory.folder
    losses = {(step["step"], step["loss"]) for step in metrics(folder)}
    assert (calls[0], calls[1], calls[-1]) == (("sftron", str(folder)), NUM_STEPS, "end")
    assert losses < set(calls[2:-1])
    assert [step for step, _ in calls[2:-1]] == [0, 1, 2, 2, 3, 4, 4]


@pytest.mark.filterwarnings("default")  # of their own code
def test_numbers_of_a_resumed_run_are_read_back_once_from_each_package(
    tmp_path: Path, model_folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, services: None
) -> None:
    options |= {"checkpoints__interval": 2, "logging__to": ["trackio", "tensorboard", "mlflow"]}
    on_each_step(monkeypatch, stop_in(3))
    folder = run(make_config(tmp_path, model_folder, **options)).directory.folder
    (folder / "checkpoints/step-3").rename(folder / "lost")
    run(make_config(tmp_path, model_folder, **options))
    losses = {step["step"]: step["loss"] for step in metrics(folder)}
    evaluated = {
        each["step"]: each["sets"]["other"]["loss"]
        for each in map(json.loads, (folder / "evaluations.jsonl").read_text().splitlines())
    }
    wanted = {"loss": losses, "eval/other/loss": evaluated}
    assert (list(losses), list(evaluated)) == ([1, 2, 3, 4], [0, 2, 4])

    for name, values in wanted.items():
        for reader in (_in_tensorboard, _in_trackio, _in_mlflow):
            points = reader(folder, name)
            assert [step for step, _ in points] == list(values), reader
            assert [value for _, value in points] == pytest.approx(list(values.values()), rel=1e-6), reader


def test_a_run_that_begins_again_before_its_first_checkpoint_has_each_step_once_in_tensorboard(
    tmp_path: Path, model_folder: Path, options: dict[str, Any], services: None
) -> None:
    options |= {"logging__to": ["tensorboard"]}
    for _ in range(2):
        folder = run(make_config(tmp_path, model_folder, **options)).directory.folder
        shutil.rmtree(folder / "checkpoints")
        time.sleep(1.1)  # the names of event files have the second in which they were made
    assert [step for step, _ in _in_tensorboard(folder, "loss")] == [1, 2, 3, 4]


def _in_tensorboard(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def _in_trackio(folder: Path, name: str) -> list[tuple[int, float]]:
    from trackio.sqlite_storage import SQLiteStorage

    # trackio reads TRACKIO_DIR when it is imported, so the project may have runs of earlier imports.
    name_there = f"run-{json.loads((folder / 'trackio.json').read_text())['id']}"
    assert [record["name"] for record in SQLiteStorage.get_run_records("sftron")].count(name_there) == 1
    logs = SQLiteStorage.get_logs("sftron", name_there)
    return [(each["step"], each[name]) for each in logs if name in each]


def _in_mlflow(folder: Path, name: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (found,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert found.info.status == "FINISHED"
    assert found.data.params["tokens.train_steps"] == str(NUM_STEPS)
    return sorted((each.step, each.value) for each in client.get_metric_history(found.info.run_id, name))
