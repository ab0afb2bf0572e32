"""Files of lines lose none to a full disk or a kill, and digests of steps do not depend on the number of ranks."""

import errno
import io
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.digest import pack_digest, step_rows
from sftron.data.types import Pack
from sftron.train import resume, trainer
from sftron.train.logs import run_logs
from sftron.train.logs.run_logs import LineFile
from sftron.train.run_directory import read_records
from tests.data.streams import make_dataset, mixed_rows, take
from tests.train.conftest import FinishedRun
from tests.train.runs import make_config, on_each_step, result, run

# --- Files of lines ---


def test_on_a_full_disk_lines_wait_are_written_later_and_whole_and_lost_ones_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, room = LineFile(tmp_path / "lines"), 25
    lines = [b"%d: ten bytes" % number for number in range(9)]

    class SmallDisk(io.FileIO):
        def write(self, data: Any) -> int:
            nonlocal room
            if not room:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = super().write(bytes(data)[: min(room, 7)])
            room -= written
            return written

    file._file.close()
    file._file = io.BufferedWriter(SmallDisk(tmp_path / "lines", "ab"))
    for line in lines[:6]:
        file.append(line)
    file.sync()
    assert capsys.readouterr().out.count("cannot be written (No space left on device); its lines wait in memory") == 1
    room = 10_000
    file.append(lines[6])
    assert (tmp_path / "lines").read_bytes().splitlines() == lines[:7]
    assert capsys.readouterr().out == ""
    room = 0
    for line in lines[7:]:
        file.append(line)
    file.close()
    assert "cannot be written (No space left on device); it lacks its last lines" in capsys.readouterr().out


def test_what_a_kill_left_in_the_middle_of_a_line_is_removed_and_later_steps_are_made_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    assert [record["step"] for record in read_records(path)] == [1, 2, 3]
    file = LineFile(path, last_step=2)
    file.append(b'{"step": 3}')
    file.close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_finished_run_has_a_picture_of_its_loss_and_names_it_at_the_end(finished: FinishedRun) -> None:
    picture = finished.folder / "loss.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    (completed,) = (n for n, line in enumerate(finished.console) if line.startswith("completed  after step 6"))
    assert f"picture    {picture} has the loss of every step and evaluation" in finished.console[completed:]


def test_damaged_lines_are_reported_and_end_nothing(
    tmp_path: Path,
    model_folder: Path,
    held_out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = {"evaluation__datasets": [{"path": str(held_out)}], "evaluation__interval": 2}
    config = make_config(tmp_path, model_folder, tokens__train_steps=4, **options)

    def damage(step: int) -> None:
        for name in ("metrics.jsonl", "evaluations.jsonl") if step == 3 else ():
            with (config.run_dir / name).open("r+b") as file:
                file.write(b"?")

    on_each_step(monkeypatch, damage)
    trainer = run(config)
    ended, printed = result(trainer), capsys.readouterr().out
    assert (ended["status"], ended["exported"]) == ("completed", str(config.run_dir / "hf/step-4"))
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert f"WARNING    {config.run_dir / name}:1: is damaged" in printed
    assert f"WARNING    could not draw loss.png: {config.run_dir}/metrics.jsonl:1: is damaged" in printed


# --- Digests of steps ---


def test_the_digest_of_a_step_does_not_depend_on_the_number_of_ranks(chat_tokenizer: ChatTokenizer) -> None:
    """Nor on the order in which ranks are asked; it does on each key, drop, token and weight of a pack."""
    packs = {n: take(make_dataset(mixed_rows(40), chat_tokenizer, dp_rank=n // 2, dp_world_size=2), 3) for n in (0, 2)}
    of_ranks = [pack_digest(pack) for n in (2, 0) for pack in packs[n]]
    alone = take(make_dataset(mixed_rows(40), chat_tokenizer), 6)

    def digests(packs: Sequence[Pack]) -> dict[str, Any]:
        return step_rows([*map(pack_digest, packs)], first_epoch=0, num_epochs=None, data={})

    assert step_rows(of_ranks, first_epoch=0, num_epochs=None, data={}) == digests(alone)
    assert digests(alone)["packs"] == [0, 6]
    number = next(n for n, pack in enumerate(alone) if pack.dropped_rows and pack.keys)
    pack = alone[number]
    for change, differs in {
        "keys": {"keys": pack.keys[::-1]},
        "dropped": {"dropped_rows": (replace(pack.dropped_rows[0], reason="another"), *pack.dropped_rows[1:])},
        "tokens": {"input_ids": pack.input_ids + 1},
        "labels": {"labels": pack.labels + 1},
        "weights": {"loss_weights": pack.loss_weights * 2},
        "documents": {"cu_seqlens": pack.cu_seqlens[::2]},
    }.items():
        other = digests([*alone[:number], replace(pack, **differs), *alone[number + 1 :]])
        unlike = {name for name, value in digests(alone).items() if other[name] != value}
        assert unlike == ({"keys"} if change in ("keys", "dropped") else {"tokens"}), change


def test_lines_are_on_the_disk_before_a_checkpoint_that_knows_their_steps_and_evaluations(
    tmp_path: Path, model_folder: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses its power keeps what was synced, and perhaps no more."""
    options = {"checkpoints__interval": 2, "checkpoints__export_hf": False}
    options |= {"evaluation__datasets": [{"path": str(held_out)}], "evaluation__interval": 1}
    config = make_config(tmp_path, model_folder, tokens__train_steps=4, **options)
    fsync, state, saved = os.fsync, resume.run_state, {}
    in_files = {"metrics.jsonl": 0, "evaluations.jsonl": 0}
    on_disk = dict(in_files)  # the lines of a file that its folder names for good

    def fsync_and_count(file: int) -> None:
        fsync(file)
        if (path := Path(f"/proc/self/fd/{file}").readlink()).name in in_files:
            in_files[path.name] = len(path.read_bytes().splitlines())
        elif path == config.run_dir:
            on_disk.update(in_files)

    def state_at_a_save(*arguments: Any) -> dict[str, Any]:
        saved[arguments[2].step] = (*on_disk.values(),)
        return state(*arguments)

    monkeypatch.setattr(run_logs.os, "fsync", fsync_and_count)
    monkeypatch.setattr(trainer, "run_state", state_at_a_save)
    run(config)
    assert saved == {2: (2, 3), 4: (4, 5)}  # one evaluation is before the first step
