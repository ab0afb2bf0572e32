"""What a run directory holds of its run is true, whatever was started in it since."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sftron.checkpoint.checkpoint import read_state, shards_to_store, write_checkpoint
from sftron.config import Config, load_config
from sftron.data.types import DataError
from sftron.train.run_directory import RunDirectory, read_result
from sftron.train.saving import Saver
from tests.conftest import ROOT
from tests.train.conftest import FinishedRun
from tests.train.runs import make_config, metrics, on_each_step, opened, run


def files(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every file of a folder, and what would not stay if it were written."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.lstat()
        found[str(path.relative_to(folder))] = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    return found


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def copied(finished: FinishedRun, tmp_path: Path) -> Path:
    """Returns the directory of a copy of the finished run, for `config_of`."""
    return shutil.copytree(finished.folder, tmp_path / "runs/run", symlinks=True)


def config_of(finished: FinishedRun, tmp_path: Path, **overrides: Any) -> Config:
    """The configuration of the finished run, in `tmp_path`; `overrides` as in `runs.settings`."""
    tree = finished.trainer.config.model_dump(mode="json", by_alias=True)
    for name, value in {"general__output_dir": str(tmp_path / "runs"), **overrides}.items():
        section, key = name.split("__")
        tree[section][key] = value
    return Config.model_validate(tree)


@pytest.mark.parametrize("train_steps", [6, 1])
def test_a_run_with_nothing_left_to_do_names_what_is_not_used_and_touches_no_file(
    tmp_path: Path, finished: FinishedRun, capsys: pytest.CaptureFixture[str], train_steps: int
) -> None:
    folder = copied(finished, tmp_path)
    before = files(folder)
    other = {"optimizer__learning_rate": 0.05, "tokens__train_steps": train_steps}
    again = run(config_of(finished, tmp_path, **other))

    assert files(folder) == before
    assert again.progress.step == 6
    words = said(capsys)
    assert "completed before, after step 6; nothing is left to do, and " in words
    assert "optimizer.learning_rate: 0.005 -> 0.05" in words
    assert ("tokens.train_steps: 6 -> 1" in words) == (train_steps == 1)
    assert "raise tokens.train_steps, " in words
    assert "answers ended" not in words  # they stand in evaluations.jsonl
    # It is the same run, which still goes on where there is more to do.
    assert opened(config_of(finished, tmp_path, tokens__train_steps=7)).progress.step == 6
    assert read_result(folder)["status"] == "running"


def test_what_a_completed_run_still_lacks_is_made_and_its_settings_stay_those_of_its_steps(
    tmp_path: Path, finished: FinishedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(finished, tmp_path)
    shutil.rmtree(folder / "hf")
    run(config_of(finished, tmp_path, tokens__train_steps=1, optimizer__learning_rate=0.071))

    words = said(capsys)
    assert "the run is complete, so they change no step:" in words
    assert "tokens.train_steps: 6 -> 1 optimizer.learning_rate: 0.005 -> 0.071" in words
    for name in ("config.yaml", "hf/step-6/README.md", "hf/step-6/model.safetensors"):
        assert (folder / name).read_bytes() == (finished.folder / name).read_bytes(), name


def test_every_setting_that_changes_on_the_way_is_named_and_kept_with_the_steps_it_held_for(
    finished: FinishedRun,
) -> None:
    words = " ".join("\n".join(finished.console).split())
    assert "settings have changed since the checkpoint; from step 5 on:" in words
    assert "optimizer.learning_rate: 0.01 -> 0.005" in words
    changed = {"optimizer.learning_rate": [0.01, 0.005], "tokens.train_steps": [4, 6]}
    assert [line["changed_settings"] for line in finished.steps] == [{}, {}, {}, {}, changed, {}]
    head = (finished.folder / "config.yaml").read_text().splitlines()
    assert "#   optimizer.learning_rate: 0.01 in steps 1 to 4, 0.005 from step 5 on" in head
    assert load_config(finished.folder / "config.yaml") == finished.trainer.setup.resolved_config


def test_settings_of_steps_that_a_kill_took_are_not_in_the_history(
    tmp_path: Path, finished: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("killed before anything was saved")

    folder = copied(finished, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Saver, "save", fail)
        with pytest.raises(RuntimeError, match="killed before"):
            run(config_of(finished, tmp_path, tokens__train_steps=7, optimizer__learning_rate=0.5))
    run(config_of(finished, tmp_path, tokens__train_steps=7))

    changes = read_state(folder / "checkpoints" / "step-7")["settings"]["changes"]
    new = ["general.output_dir", "tokens.train_steps"]
    assert [each["key"] for each in changes if each["step"] == 7] == new
    assert changes[-1] == {"step": 7, "key": "tokens.train_steps", "old": 6, "new": 7}
    assert "learning_rate: 0.5" not in (folder / "config.yaml").read_text()
    assert sorted(metrics(folder)[-1]["changed_settings"]) == new


def test_a_start_that_is_refused_leaves_the_result_of_the_run_as_it_was(tmp_path: Path, finished: FinishedRun) -> None:
    folder = copied(finished, tmp_path)
    before = (folder / "result.json").read_bytes()
    for options in ({"general__seed": 8}, {"checkpoints__resume": "never"}):
        with pytest.raises(ValueError, match=r"general\.seed|resume is never"):
            opened(config_of(finished, tmp_path, tokens__train_steps=7, **options))
        assert (folder / "result.json").read_bytes() == before


# --- A run whose process is gone ---

PROCESS = {"pid": 4711, "host": "node-3", "started": "2026-01-01T12:00:00+00:00"}


def test_the_next_start_finds_that_the_one_before_was_killed(
    tmp_path: Path, finished: FinishedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lock is free, so it has ended, on whatever machine."""
    folder = copied(finished, tmp_path)
    (folder / "result.json").write_text(json.dumps({"status": "running", "process": PROCESS}))
    with pytest.raises(ValueError, match="resume is never"):
        opened(config_of(finished, tmp_path, tokens__train_steps=7, checkpoints__resume="never"))

    name = "process 4711 on node-3, started 2026-01-01T12:00:00+00:00"
    assert f"killed {name} ended without a result" in said(capsys)
    found = json.loads((folder / "result.json").read_text())
    assert found["status"] == "killed"
    assert name in found["error"]


def test_a_running_result_holds_as_long_as_its_lock_and_a_reader_does_not_release_it(tmp_path: Path) -> None:
    """The owner's own reads, and those of another process, which a copy of the folder without a lock is to."""
    owner = RunDirectory(tmp_path / "run")
    owner.acquire()
    owner.write_result("running")
    assert json.loads((owner.folder / "result.json").read_text())["process"]["pid"] == os.getpid()
    code = """
import sys
from pathlib import Path
from sftron.train.run_directory import RunDirectory, read_result
print(read_result(Path(sys.argv[1]))["status"])
RunDirectory(Path(sys.argv[1])).acquire()
"""

    def another_process(folder: Path) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        return subprocess.run(
            [sys.executable, "-c", code, str(folder)], env=environment, capture_output=True, text=True
        )

    assert read_result(owner.folder)["status"] == "running"
    refused = another_process(owner.folder)
    assert refused.stdout == "running\n"
    assert f"(process {os.getpid()} on" in refused.stderr
    shutil.copytree(owner.folder, tmp_path / "copy")
    assert another_process(tmp_path / "copy").stdout.startswith("killed\n")


# --- What a killed start has left ---


def test_half_exports_of_a_killed_run_are_removed_by_the_next_start(tmp_path: Path, finished: FinishedRun) -> None:
    folder = copied(finished, tmp_path)
    for half in (folder / "hf/step-6.tmp-0123abcd", folder / "checkpoints/step-7.tmp-4567abcd"):
        half.mkdir()
        (half / "model.safetensors").write_bytes(b"half")
    (folder / "hf/step-6").rename(folder / "hf/step-6.replaced-89abcdef")  # it was about to be replaced
    opened(config_of(finished, tmp_path, tokens__train_steps=7))

    assert sorted(path.name for path in (folder / "hf").iterdir()) == ["step-2", "step-4", "step-6"]
    whole = finished.folder / "hf/step-6/model.safetensors"
    assert (folder / "hf/step-6/model.safetensors").read_bytes() == whole.read_bytes()
    assert not list((folder / "checkpoints").glob("*.tmp-*"))


def test_a_state_that_counts_no_data_sets_is_refused_by_name(tmp_path: Path, finished: FinishedRun) -> None:
    checkpoint = copied(finished, tmp_path) / "checkpoints/step-6"
    state = read_state(checkpoint)
    state["progress"]["datasets"] = []
    shards = shards_to_store(finished.trainer.model, finished.trainer.optimizer, is_main=True)
    write_checkpoint(checkpoint, 6, shards, state=json.dumps(state).encode())
    with pytest.raises(ValueError, match=r"state\.json: .*datasets is empty"):
        opened(config_of(finished, tmp_path, tokens__train_steps=7))


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
    trainer = opened(config)
    if change == "the same text":
        assert trainer.train() == 0
        return
    with pytest.raises(DataError, match=r"rows\.jsonl changed while the run was reading it, .* saves nothing"):
        trainer.train()
    assert [path.name for path in trainer.directory.checkpoints.iterdir()] == ["step-2"]
    assert "changed while the run" in read_result(trainer.directory.folder)["error"]


# --- File systems that lack something, and what a person has put there ---


def test_a_file_system_without_locks_is_said_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lockf(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    RunDirectory(tmp_path / "run").acquire()
    assert f"WARNING    the file system cannot lock {tmp_path / 'run'} (no locks here), " in capsys.readouterr().out
    assert (tmp_path / "run/lock").read_text().startswith("process ")


def test_a_link_that_cannot_be_made_at_the_end_is_said_and_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path)
    directory.hf(3).mkdir(parents=True)
    (tmp_path / "latest").mkdir()
    directory.point("latest", directory.hf(3))
    assert f"WARNING    {tmp_path / 'latest'} cannot name {directory.hf(3)}" in capsys.readouterr().out


def test_a_link_that_cannot_be_moved_to_a_newer_export_is_removed_and_does_not_name_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path)
    for step in (2, 3):
        directory.hf(step).mkdir(parents=True)
    directory.point("latest", directory.hf(2))

    def symlink_to(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(Path, "symlink_to", symlink_to)
    directory.point("latest", directory.hf(2))
    assert directory.names("latest", directory.hf(2))
    directory.point("latest", directory.hf(3))
    assert not (tmp_path / "latest").is_symlink()
    same, other = capsys.readouterr().out.splitlines()
    assert same.endswith(f"latest cannot name {directory.hf(2)} (the disk is full)")
    assert other.endswith("hf/step-3 (the disk is full); the link to another export is removed")


def test_a_link_to_an_older_export_that_cannot_be_removed_either_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path)
    (tmp_path / "latest").symlink_to("latest")  # a link that leads nowhere is no error of its own

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "read-only")

    for name in ("symlink_to", "unlink"):
        monkeypatch.setattr(Path, name, fail)
    directory.point("latest", directory.hf(3))
    assert "hf/step-3 (read-only); it still names latest: remove it" in capsys.readouterr().out
