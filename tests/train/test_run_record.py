"""What a run directory holds of its run is true, whatever was started in it since."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sftron.checkpoint.checkpoint import read_state, shards_to_store, write_checkpoint
from sftron.config import load_config
from sftron.data.types import DataError
from sftron.train import run_directory
from sftron.train.outputs import RunOutputs
from sftron.train.run_directory import RunDirectory, is_gone, read_result, this_process
from sftron.train.trainer import Trainer
from tests.conftest import ROOT
from tests.train.runs import chat_line, make_config, metrics, on_each_step, run


def files(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every file of a folder, and what would not stay if it were written."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.lstat()
        found[str(path.relative_to(folder))] = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    return found


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("train_steps", [3, 1])
def test_a_run_with_nothing_left_to_do_names_what_is_not_used_and_touches_no_file(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], train_steps: int
) -> None:
    (tmp_path / "prompts.jsonl").write_text(chat_line("What is 3?") + "\n")
    prompts = {"evaluation__prompts": str(tmp_path / "prompts.jsonl"), "evaluation__max_new_tokens": 2}
    folder = run(make_config(tmp_path, model_folder, tokens__train_steps=3, **prompts)).directory.folder
    before = files(folder)
    assert "answers ended by themselves" in said(capsys)
    other = prompts | {"optimizer__learning_rate": 0.05, "tokens__batch_accumulation_per_replica": 1}
    again = run(make_config(tmp_path, model_folder, **other, tokens__train_steps=train_steps))

    assert files(folder) == before
    assert again.progress.step == 3
    words = said(capsys)
    assert "completed before, after step 3; nothing is left to do, and no file is touched" in words
    assert "optimizer.learning_rate: 0.01 -> 0.05" in words
    assert "tokens.batch_accumulation_per_replica: 2 -> 1" in words
    assert ("tokens.train_steps: 3 -> 1" in words) == (train_steps == 1)
    assert "raise tokens.train_steps above 3" in words
    assert "answers ended" not in words  # they stand in evaluations.jsonl
    # It is the same run, which still goes on where there is more to do.
    assert run(make_config(tmp_path, model_folder, tokens__train_steps=4)).progress.step == 4


def test_what_a_completed_run_still_lacks_is_made_and_its_settings_stay_those_of_its_steps(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(
        make_config(tmp_path, model_folder, tokens__train_steps=2, checkpoints__export_hf=False)
    ).directory.folder
    config = (folder / "config.yaml").read_bytes()
    run(make_config(tmp_path, model_folder, tokens__train_steps=1, optimizer__learning_rate=0.071))

    assert "no step is left that could be made with them: tokens.train_steps: 2 -> 1 optimizer.learning" in said(capsys)
    assert (folder / "config.yaml").read_bytes() == config
    card = (folder / "hf/step-2/README.md").read_text()
    assert "peak learning rate 0.01," in card
    assert "0.071" not in card


def test_every_setting_that_changes_on_the_way_is_named_and_kept_with_the_steps_it_held_for(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def go_on(steps: int, **options: Any) -> Trainer:
        return run(make_config(tmp_path, model_folder, tokens__train_steps=steps, **options))

    go_on(1, optimizer__learning_rate=0.001)
    go_on(3, optimizer__learning_rate=0.05)
    words = said(capsys)
    trainer = go_on(4, optimizer__learning_rate=0.05, tokens__batch_accumulation_per_replica=1)

    assert "settings have changed since the checkpoint; from step 2 on:" in words
    assert "optimizer.learning_rate: 0.001 -> 0.05" in words
    assert "settings have changed since the checkpoint; from step 4 on:" in said(capsys)
    folder = trainer.directory.folder
    lines = metrics(folder)
    assert [sorted(line["changed_settings"]) for line in lines] == [
        [],
        ["optimizer.learning_rate", "tokens.train_steps"],
        [],
        ["tokens.batch_accumulation_per_replica", "tokens.train_steps"],
    ]
    assert lines[1]["changed_settings"]["optimizer.learning_rate"] == [0.001, 0.05]
    head = (folder / "config.yaml").read_text().splitlines()
    assert "#   optimizer.learning_rate: 0.001 in step 1, 0.05 from step 2 on" in head
    assert "#   tokens.batch_accumulation_per_replica: 2 in steps 1 to 3, 1 from step 4 on" in head
    assert load_config(folder / "config.yaml") == trainer.setup.resolved_config
    card = (folder / "hf/step-4/README.md").read_text()
    assert "| optimizer.learning_rate | 1 | 0.001 |" in card.replace("`", "").replace("\\", "")
    assert "| optimizer.learning_rate | 2 to 4 | 0.05 |" in card.replace("`", "").replace("\\", "")
    assert "peak learning rate 0.001 in step 1, 0.05 from step 2 on" in card


def test_settings_of_steps_that_a_kill_took_are_not_in_the_history(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(make_config(tmp_path, model_folder, tokens__train_steps=1))

    def fail(*_: Any) -> None:
        raise RuntimeError("killed before anything was saved")

    with monkeypatch.context() as patch:
        patch.setattr(RunOutputs, "_save", fail)
        lost = make_config(tmp_path, model_folder, tokens__train_steps=2, optimizer__learning_rate=0.5)
        with pytest.raises(RuntimeError, match="killed before"):
            run(lost)
    trainer = run(make_config(tmp_path, model_folder, tokens__train_steps=2))

    changes = read_state(trainer.directory.checkpoints / "step-2")["settings"]["changes"]
    assert changes == [{"step": 2, "key": "tokens.train_steps", "old": 1, "new": 2}]
    assert "0.5" not in (trainer.directory.folder / "config.yaml").read_text()
    assert [sorted(line["changed_settings"]) for line in metrics(trainer.directory.folder)] == [
        [],
        ["tokens.train_steps"],
    ]


def test_a_start_that_is_refused_leaves_the_result_of_the_run_as_it_was(tmp_path: Path, model_folder: Path) -> None:
    folder = run(make_config(tmp_path, model_folder, tokens__train_steps=1)).directory.folder
    before = (folder / "result.json").read_bytes()
    for options in ({"general__seed": 8}, {"checkpoints__resume": "never"}):
        with pytest.raises(ValueError, match=r"general\.seed|resume is never"):
            Trainer(make_config(tmp_path, model_folder, tokens__train_steps=2, **options)).build()
        assert (folder / "result.json").read_bytes() == before


# --- A run whose process is gone ---


@cache
def ended_process() -> dict[str, Any]:
    """A process that has ended, as it has described itself."""
    code = "import json; from sftron.train.run_directory import this_process; print(json.dumps(this_process()))"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    return json.loads(done.stdout)


def test_a_process_is_distinguished_from_every_other_one() -> None:
    gone, here = ended_process(), this_process()
    assert is_gone(gone) is True
    assert is_gone(here) is False
    # A later process has the number of an earlier one.
    assert is_gone({**here, "start": gone["start"]}) is True
    # Of another machine, or of this one before it was started again, nothing can be known.
    assert is_gone({**gone, "machine": "another"}) is None
    assert is_gone(None) is None
    assert is_gone({**here, "pid": "1"}) is None


def test_a_process_that_has_ended_and_that_nobody_has_waited_for_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    try:
        end = time.monotonic() + 30
        while run_directory._start_of(process.pid) is not None and time.monotonic() < end:
            time.sleep(0.01)
        assert run_directory._start_of(process.pid) is None
    finally:
        process.wait()


@pytest.mark.parametrize("machine", ["this one", "another"])
def test_the_next_start_finds_that_the_one_before_was_killed(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], machine: str
) -> None:
    folder = run(make_config(tmp_path, model_folder, tokens__train_steps=1)).directory.folder
    # In containers a run often has the same number at every start.
    elsewhere = {"machine": machine, "host": "node-3", "pid": os.getpid()}
    process = ended_process() | (elsewhere if machine == "another" else {})
    (folder / "result.json").write_text(json.dumps({"status": "running", "process": process}))
    capsys.readouterr()
    # Its lock is free, so it has ended, on whatever machine.
    with pytest.raises(ValueError, match="resume is never"):
        Trainer(make_config(tmp_path, model_folder, tokens__train_steps=2, checkpoints__resume="never")).build()

    words = said(capsys)
    assert f"killed process {process['pid']} on {process['host']}, started {process['started']} is gone" in words
    found = json.loads((folder / "result.json").read_text())
    assert found["status"] == "killed"
    assert f"process {process['pid']} on {process['host']}" in found["error"]
    assert run(make_config(tmp_path, model_folder, tokens__train_steps=2)).progress.step == 2
    assert read_result(folder)["status"] == "completed"


def test_a_running_result_names_its_process_and_a_reader_knows_whether_it_still_runs(
    tmp_path: Path, model_folder: Path
) -> None:
    trainer = Trainer(make_config(tmp_path, model_folder, tokens__train_steps=1))
    trainer.build()
    folder = trainer.directory.folder
    result = json.loads((folder / "result.json").read_text())
    assert result["process"]["pid"] == os.getpid()
    assert read_result(folder)["status"] == "running"
    (folder / "result.json").write_text(json.dumps({**result, "process": ended_process()}))
    assert read_result(folder)["status"] == "killed"
    (folder / "result.json").write_text(json.dumps({**result, "process": {**result["process"], "machine": "another"}}))
    assert read_result(folder)["status"] == "running"


# --- What a killed start has left ---


def test_half_exports_of_a_killed_run_are_removed_by_the_next_start(tmp_path: Path, model_folder: Path) -> None:
    folder = run(make_config(tmp_path, model_folder, tokens__train_steps=1)).directory.folder
    whole = (folder / "hf/step-1/model.safetensors").read_bytes()
    for half in (folder / "hf/step-1.tmp-0123abcd", folder / "checkpoints/step-2.tmp-4567abcd"):
        half.mkdir()
        (half / "model.safetensors").write_bytes(b"half")
    (folder / "hf/step-1").rename(folder / "hf/step-1.replaced-89abcdef")  # it was about to be replaced
    run(make_config(tmp_path, model_folder, tokens__train_steps=2))

    assert sorted(path.name for path in (folder / "hf").iterdir()) == ["step-1", "step-2"]
    assert (folder / "hf/step-1/model.safetensors").read_bytes() == whole
    assert not list((folder / "checkpoints").glob("*.tmp-*"))


@pytest.mark.parametrize(
    ("num_datasets", "problem"),
    [(0, r"state\.json: .*datasets is empty"), (2, "progress.datasets counts 2 data sets, and data.datasets has 1")],
)
def test_a_state_that_counts_no_data_sets_or_others_than_the_run_has_is_refused_by_name(
    tmp_path: Path, model_folder: Path, num_datasets: int, problem: str
) -> None:
    first = run(make_config(tmp_path, model_folder, tokens__train_steps=1))
    folder = first.directory.checkpoints / "step-1"
    state = read_state(folder)
    state["progress"]["datasets"] *= num_datasets
    rows = shards_to_store(first.model, first.optimizer, is_main=True)
    write_checkpoint(folder, 1, rows, state=json.dumps(state).encode())
    with pytest.raises(ValueError, match=problem):
        Trainer(make_config(tmp_path, model_folder, tokens__train_steps=2)).build()


# --- Data that changes while a run reads it ---


@pytest.mark.parametrize("change", ["another text", "the same text"])
def test_data_overwritten_in_place_is_noticed_at_the_next_checkpoint_though_size_and_time_are_the_same(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    config = make_config(tmp_path, model_folder, tokens__train_steps=4, checkpoints__interval=2)

    def overwrite(step: int) -> None:
        if step == 3:
            before, text = rows.stat(), rows.read_text()
            rows.write_text(text.replace("What is 0?", "What is 9?") if change == "another text" else text)
            os.utime(rows, ns=(before.st_atime_ns, before.st_mtime_ns))
            assert (rows.stat().st_size, rows.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)

    on_each_step(monkeypatch, overwrite)
    trainer = Trainer(config)
    trainer.build()
    if change == "the same text":
        assert trainer.train() == 0
        return
    with pytest.raises(DataError, match=r"rows\.jsonl was changed while the run reads it, .* nothing is saved"):
        trainer.train()
    assert [path.name for path in trainer.directory.checkpoints.iterdir()] == ["step-2"]
    assert "was changed while the run" in read_result(trainer.directory.folder)["error"]


# --- File systems that lack something, and what a person has put there ---


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_said_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def lockf(*_: Any) -> None:
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    RunDirectory(tmp_path / "run").acquire()
    assert f"WARNING    {tmp_path / 'run'} cannot be locked (no locks here): " in capsys.readouterr().out
    assert (tmp_path / "run/lock").read_text().startswith("process ")


@pytest.mark.parametrize("name", ["latest", "best"])
def test_a_real_folder_in_the_place_of_a_link_is_refused_before_training(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"{name} is not a symbolic link, .*; move it away"):
        RunDirectory(tmp_path).acquire()


def test_a_link_that_cannot_be_made_at_the_end_is_said_and_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path)
    directory.hf(3).mkdir(parents=True)
    (tmp_path / "latest").mkdir()
    directory.point("latest", directory.hf(3))
    assert f"WARNING    {tmp_path / 'latest'} cannot name {directory.hf(3)}" in capsys.readouterr().out
