"""Saving during the training, on full disks, of weights alone: no run is lost by it, and none is ended for nothing."""

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sftron.checkpoint import checkpoint as native
from sftron.checkpoint.checkpoint import CheckpointError, newest_checkpoint, read_state, verify_checkpoint
from sftron.data.dataset import PackedDataset
from sftron.data.types import DataError
from sftron.train import saving
from sftron.train.exports import RunExports
from sftron.train.run_directory import RunDirectory
from sftron.train.trainer import open_trainer
from tests.train.conftest import FinishedRun
from tests.train.ranks import launch, train
from tests.train.runs import (
    bits,
    make_config,
    metrics,
    on_each_step,
    opened,
    result,
    run,
    settings,
    stop_in,
    write_config,
    write_rows,
)

EVERY_2 = {"tokens__train_steps": 8, "checkpoints__interval": 2, "checkpoints__export_hf": False}


def state_of(checkpoint: Path, *other: str) -> dict[str, Any]:
    """The state of a checkpoint, without the name of its run and the settings `other`, each as section.key."""
    state = read_state(checkpoint)
    for setting in ("general.run_name", *other):
        section, key = setting.split(".")
        del state["settings"]["config"][section][key]
    return state


def files(root: Path) -> dict[str, Any]:
    """The sizes and hashes of each checkpoint's files, and its state."""
    found = {path.parent.name: json.loads(path.read_text()) for path in root.glob("step-*/MANIFEST.json")}
    for name, manifest in found.items():
        manifest["files"]["state.json"] = state_of(root / name, "checkpoints.async")
    return found


class Gate:
    """Stands before the writing of checkpoints, and lets it begin when `opens` says so, or a second has passed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, opens: Callable[[int], bool]) -> None:
        self.threads: list[str] = []
        self._opens = opens
        monkeypatch.setattr(saving, "write_checkpoint", self._write)

    def _write(self, folder: Path, step: int, *arguments: Any, **options: Any) -> Path:
        self.threads.append(threading.current_thread().name)
        until = time.monotonic() + 1
        while not self._opens(step) and time.monotonic() < until:
            time.sleep(0.001)
        return native.write_checkpoint(folder, step, *arguments, **options)


def test_what_is_saved_beside_the_training_is_the_state_of_its_step_to_the_bit(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is written only when the next step has changed all weights."""
    options = EVERY_2 | {"checkpoints__keep_last": 9, "tokens__train_steps": 7}
    expected = run(make_config(tmp_path, model_folder, **options, general__run_name="waiting"))
    run_beside = opened(make_config(tmp_path, model_folder, **options, checkpoints__async=True))
    gate = Gate(monkeypatch, lambda step: run_beside.progress.step > step or step == 7)
    assert run_beside.train() == 0

    assert gate.threads == ["checkpoint"] * 3 + ["MainThread"]
    assert files(run_beside.directory.checkpoints) == files(expected.directory.checkpoints)
    assert len(files(expected.directory.checkpoints)) == 4
    assert bits(run_beside) == bits(expected)
    again = opened(make_config(tmp_path, model_folder, **options | {"tokens__train_steps": 8}))
    assert bits(again) == bits(expected)


def test_a_stop_waits_for_what_is_being_written_and_saves_the_step_it_came_in(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Gate(monkeypatch, lambda step: step != 2)
    stopped = opened(make_config(tmp_path, model_folder, **EVERY_2, checkpoints__async=True))
    on_each_step(monkeypatch, stop_in(3))
    assert stopped.train() == 0
    assert result(stopped) == {"status": "preempted", "step": 3, "exported": None}
    assert sorted(files(stopped.directory.checkpoints)) == ["step-2", "step-3"]


def test_a_run_that_fails_waits_for_what_is_being_written(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed_at: list[float] = []
    Gate(monkeypatch, lambda _: bool(failed_at) and time.monotonic() > failed_at[0] + 0.3)
    trainer = opened(make_config(tmp_path, model_folder, **EVERY_2, checkpoints__async=True))

    def fail(number: int) -> None:
        if number == 3:
            failed_at.append(time.monotonic())
            raise RuntimeError("a fault of the third step")

    on_each_step(monkeypatch, fail)
    with pytest.raises(RuntimeError, match="third step"):
        trainer.train()
    assert sorted(files(trainer.directory.checkpoints)) == ["step-2"]


# --- How much a failure costs ---


def make_row_bad(monkeypatch: pytest.MonkeyPatch, bad_pack: int) -> None:
    give = PackedDataset._pack

    def pack(dataset: PackedDataset, index: int) -> Any:
        if index == bad_pack:
            raise DataError("rows.jsonl:5: no row")
        return give(dataset, index)

    monkeypatch.setattr(PackedDataset, "_pack", pack)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_row_late_in_a_run_costs_no_step_and_a_resume_from_there_is_exact(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    """It stands in the second of the fourth step's two packs: the first of them was handed out, and is not trained."""
    options = {"data__num_workers": num_workers, "checkpoints__export_hf": False, "optimizer__schedule": "constant"}
    options |= {"tokens__batch_accumulation_per_replica": 2, "tokens__train_steps": 6, "checkpoints__keep_last": 9}
    whole = run(make_config(tmp_path, model_folder, **options, checkpoints__interval=3, general__run_name="whole"))
    config = make_config(tmp_path, model_folder, **options)
    with monkeypatch.context() as patch:
        make_row_bad(patch, 7)
        failing = opened(config)
        with pytest.raises(DataError, match="no row"):
            failing.train()

    assert result(failing) == {"status": "failed", "step": 3, "error": "DataError: rows.jsonl:5: no row"}
    assert [path.name for path in failing.directory.checkpoints.iterdir()] == ["step-3"]
    states = [state_of(each.directory.checkpoints / "step-3", "checkpoints.interval") for each in (failing, whole)]
    assert states[0] == states[1]
    assert bits(run(config)) == bits(whole)


def test_a_bad_row_ends_a_run_by_its_own_name_also_where_nothing_can_be_saved(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_row_bad(monkeypatch, 7)
    FullDisk(monkeypatch, lambda _: True)
    failing = opened(make_config(tmp_path, model_folder, tokens__batch_accumulation_per_replica=2))
    with pytest.raises(DataError, match="no row"):
        failing.train()
    assert "WARNING    could not save step 3: [Errno 28] No space left on device" in capsys.readouterr().out


class Clock:
    """Time as the saves see it: every step takes `step_seconds`, and every save `save_seconds`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_seconds: float, save_seconds: float) -> None:
        self.now, self.saved = 0.0, list[int]()
        write = saving.write_checkpoint

        def pass_time(_step: int) -> None:
            self.now += step_seconds

        def write_checkpoint(folder: Path, step: int, *arguments: Any, **options: Any) -> Path:
            self.now += save_seconds
            self.saved.append(step)
            return write(folder, step, *arguments, **options)

        time_of_saves = SimpleNamespace(monotonic=lambda: self.now, perf_counter=time.perf_counter)
        monkeypatch.setattr(saving, "time", time_of_saves)
        monkeypatch.setattr(saving, "write_checkpoint", write_checkpoint)
        on_each_step(monkeypatch, pass_time)


@pytest.mark.parametrize(
    ("step_seconds", "save_seconds", "expected"),
    [(310, 1, [4, 7, 10]), (400, 100, [4, 9, 10])],
    ids=["every 15 minutes", "a twentieth of the time at most"],
)
def test_by_default_a_kill_costs_15_minutes_of_training_or_20_times_what_a_save_takes(
    tmp_path: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    step_seconds: int,
    save_seconds: int,
    expected: list[int],
) -> None:
    clock = Clock(monkeypatch, step_seconds, save_seconds)
    run(make_config(tmp_path, model_folder, tokens__train_steps=10, checkpoints__export_hf=False))
    assert clock.saved == expected


# --- Full disks ---


class FullDisk:
    """Checkpoints of some steps meet a full disk in the midst of their files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_full: Callable[[int], bool]) -> None:
        self.tried: list[int] = []
        monkeypatch.setattr(native, "write_shards", self._write_rows)
        monkeypatch.setattr(saving, "write_checkpoint", self._write)
        self._is_full, self._write_rows_then = is_full, native_write_shards

    def _write(self, folder: Path, step: int, *arguments: Any, **options: Any) -> Path:
        self.tried.append(step)
        return native.write_checkpoint(folder, step, *arguments, **options)

    def _write_rows(self, path: Path, named: Any) -> Any:
        if path.name.startswith("optimizer") and self._is_full(self.tried[-1]):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return self._write_rows_then(path, named)


native_write_shards = native.write_shards


@pytest.mark.parametrize("beside", [False, True])
def test_two_misses_end_no_run_the_next_checkpoint_forgets_them_and_the_third_in_a_row_ends_it(
    tmp_path: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    beside: bool,
) -> None:
    disk = FullDisk(monkeypatch, lambda step: step in (4, 6) or step > 8)
    options = EVERY_2 | {"tokens__train_steps": 99}
    failing = opened(make_config(tmp_path, model_folder, **options, checkpoints__async=beside))
    with pytest.raises(OSError, match=r"3 checkpoints in a row failed: \[Errno 28\]"):
        failing.train()

    assert disk.tried == [2, 4, 6, 8, 10, 12, 14]
    said = capsys.readouterr().out
    for step, newest in ((4, 2), (6, 2), (10, 8), (12, 8)):
        assert f"WARNING    could not save the checkpoint of step {step}: [Errno 28] No space left" in said
        assert f"newest checkpoint is step-{newest}. Free space in {tmp_path}" in said
    assert said.count("WARNING    could not save the checkpoint of step") == 4
    assert result(failing)["status"] == "failed"
    assert result(failing)["error"].startswith("OSError: 3 checkpoints in a row failed")
    assert newest_checkpoint(failing.directory.checkpoints).folder == failing.directory.checkpoints / "step-8"
    assert sorted(path.name for path in failing.directory.checkpoints.iterdir()) == ["step-2", "step-8"]


def test_a_run_whose_last_checkpoint_cannot_be_saved_exports_its_model_and_fails(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FullDisk(monkeypatch, lambda step: step == 8)
    failing = opened(make_config(tmp_path, model_folder, **EVERY_2 | {"checkpoints__export_hf": True}))
    with pytest.raises(OSError, match="No space left"):
        failing.train()

    assert result(failing)["status"] == "failed"
    assert load_file(failing.directory.hf(8) / "model.safetensors")
    assert newest_checkpoint(failing.directory.checkpoints).folder == failing.directory.checkpoints / "step-6"


def test_a_report_that_meets_a_full_disk_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, write_text = RunDirectory(tmp_path), Path.write_text
    directory.write("mix_report.json", {"step": 1})

    def full_text(path: Path, text: str, **options: Any) -> int:
        write_text(path, text[:9], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_text)
    directory.write("mix_report.json", {"step": 2})
    assert json.loads((tmp_path / "mix_report.json").read_text()) == {"step": 1}
    assert "mix_report.json cannot be written (No space left on device); it stays as it was" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["mix_report.json"]


# --- Weights alone ---


def test_weights_alone_begin_a_run_of_its_own_that_then_goes_on_from_its_own_checkpoints(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other run had other data."""
    first = run(make_config(tmp_path, model_folder, **EVERY_2, general__run_name="first"))
    write_rows(tmp_path / "rows.jsonl", 50)
    begun = {
        "checkpoints__load": "weights",
        "checkpoints__resume": str(first.directory.checkpoints / "step-8"),
        "general__seed": 11,
    }
    second = opened(make_config(tmp_path, model_folder, **EVERY_2, **begun))

    assert f"weights    loaded from {first.directory.checkpoints / 'step-8'}" in capsys.readouterr().out
    assert (second.progress.step, second.loader.state_dict()["next_pack"]) == (0, 0)
    for ours, theirs in zip(second.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not second.optimizer.state
    assert second.train() == 0
    assert [line["step"] for line in metrics(second.directory.folder)] == list(range(1, 9))
    again = opened(make_config(tmp_path, model_folder, **EVERY_2 | {"tokens__train_steps": 9}, **begun))
    assert again.progress.step == 8
    assert bits(again) == bits(second)


def test_weights_of_another_architecture_are_refused_though_they_have_the_same_shapes(
    tmp_path: Path, model_folder: Path, finished: FinishedRun
) -> None:
    state = read_state(finished.folder / "checkpoints/step-6")
    state["fingerprint"]["the model's rms_norm_eps"] = "5.0"
    shards = native.shards_to_store(finished.trainer.model, finished.trainer.optimizer, is_main=True)
    native.write_checkpoint(tmp_path / "step-6", 6, shards, state=native.state_text(6, state))
    options = {"checkpoints__load": "weights", "checkpoints__resume": str(tmp_path / "step-6")}
    with pytest.raises(
        CheckpointError, match=r"does not fit the model in model\.path.*\n +the model's rms_norm_eps: 5\.0 in the check"
    ):
        open_trainer(make_config(tmp_path, model_folder, **options))


# --- Exports on the way ---


def test_the_model_is_exported_every_k_steps_also_after_a_stop_and_a_full_disk_is_no_reason_to_stop(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = {"optimizer__schedule": "constant"}
    options = EVERY_2 | schedule | {"checkpoints__export_hf": True, "checkpoints__export_interval": 3}
    stopped = opened(make_config(tmp_path, model_folder, **options))
    with monkeypatch.context() as patch:
        on_each_step(patch, stop_in(3))
        assert stopped.train() == 0
    assert not stopped.directory.hf(3).exists()

    trained, export = opened(make_config(tmp_path, model_folder, **options)), RunExports.export

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def export_to_a_disk_full_at_6(exports: RunExports, **options: Any) -> Path:
        with monkeypatch.context() as patch:
            if trained.progress.step == 6:
                patch.setattr(os, "write", full)
            return export(exports, **options)

    monkeypatch.setattr(RunExports, "export", export_to_a_disk_full_at_6)
    assert trained.train() == 0

    assert sorted(path.name for path in (trained.directory.folder / "hf").iterdir()) == ["step-3", "step-8"]
    assert (trained.directory.folder / "latest").resolve() == trained.directory.hf(8).resolve()
    assert "WARNING    could not write the export of step 6: [Errno 28] No space left" in capsys.readouterr().out
    at_3 = run(make_config(tmp_path, model_folder, **schedule, general__run_name="short", tokens__train_steps=3))
    files = [(each.directory.hf(3) / "model.safetensors").read_bytes() for each in (trained, at_3)]
    assert files[0] == files[1]


# --- Two ranks ---


def _train_with_faults(config: Path, full_from: int, dies_at: int) -> int:
    """rank 1's disk is full from a step on; or it is killed in the midst of its file."""
    rank_write, write_checkpoint, steps = os.write, native.write_checkpoint, [0]

    def note(folder: Path, step: int, *arguments: Any, **options: Any) -> Path:
        steps.append(step)
        return write_checkpoint(folder, step, *arguments, **options)

    def write(file: int, data: Any) -> int:
        if threading.current_thread().name == "checkpoint":
            if steps[-1] >= full_from:
                raise OSError(errno.ENOSPC, "No space left on device")
            if steps[-1] == dies_at:
                rank_write(file, data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
        return rank_write(file, data)

    if os.environ["RANK"] == "1":
        os.write = write  # pyright: ignore[reportAttributeAccessIssue]
    saving.write_checkpoint = note  # pyright: ignore[reportPrivateImportUsage]
    return train(config)


def test_two_ranks_agree_on_misses_and_survive_the_kill_of_one_that_writes(tmp_path: Path, model_folder: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 200)
    options = EVERY_2 | {
        "checkpoints__async": True,
        "optimizer__schedule": "constant",
        "parallelism__timeout_seconds": 20,
    }
    options |= {"tokens__batch_accumulation_per_replica": 1}

    def go(name: str, last: int, full_from: int = 99, dies_at: int = 99) -> tuple[list[Any], Path]:
        tree = settings(tmp_path, model_folder, **options | {"general__run_name": name, "tokens__train_steps": last})
        path = write_config(tmp_path / "config.yaml", tree)
        return launch(2, _train_with_faults, path, full_from, dies_at, folder=tmp_path), tmp_path / "runs" / name

    whole, whole_folder = go("whole", 8)
    assert [each.exit_code for each in whole] == [0, 0], whole[0].err

    full, folder = go("full", 99, full_from=4)
    assert [each.exit_code for each in full] == [1, 1], full
    assert "could not save the checkpoint of step 4: rank 1: OSError: [Errno 28] No space left" in full[0].out
    assert json.loads((folder / "result.json").read_text())["status"] == "failed"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-2"]

    died, folder = go("died", 8, dies_at=6)
    assert died[1].exit_code == -signal.SIGKILL
    assert died[0].exit_code not in (0, None)
    assert newest_checkpoint(folder / "checkpoints").folder == folder / "checkpoints" / "step-4"
    continued, folder = go("died", 8)
    assert [each.exit_code for each in continued] == [0, 0], continued[0].err
    assert "resumed" in continued[0].out
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-6", "step-8"]
    assert verify_checkpoint(folder / "checkpoints" / "step-8") is None
    for step in ("step-6", "step-8"):
        ours, theirs = (each / "checkpoints" / step for each in (folder, whole_folder))
        assert state_of(ours) == state_of(theirs)
        for path in theirs.glob("*.safetensors"):
            assert (ours / path.name).read_bytes() == path.read_bytes(), path
