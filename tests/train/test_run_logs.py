"""Files of lines lose none to a full disk or a kill, and the ledger none to a change of the number of ranks."""

import copy
import errno
import io
import json
import os
import sys
from collections.abc import Sequence
from functools import reduce
from itertools import islice
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.loader import PackLoader
from sftron.data.types import Batch
from sftron.train import loop, resume
from sftron.train.logs import run_logs
from sftron.train.logs.ledger import Ledger, ledger_file, read_ledger, start_line, step_line
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
    assert f"WARNING    loss.png could not be drawn: {config.run_dir}/metrics.jsonl:1: is damaged" in printed


# --- The ledger ---


@pytest.fixture
def batches(chat_tokenizer: ChatTokenizer) -> list[Batch]:
    dataset = make_dataset(mixed_rows(40), chat_tokenizer, num_epochs=1)
    return list(islice(PackLoader(dataset, num_workers=0, keep_tail=False), 8))


def write(
    folder: Path, batches: Sequence[Batch], *, rank: int = 0, start: int = 1, step: int = 0, state: Any = None
) -> None:
    """Writes a start, with a step for each batch."""
    file = LineFile(ledger_file(folder, rank))
    state = state or {"next_pack": step, "lanes": {}, "first_epoch": 0}
    file.append(start_line(start, step=step, state=state, data={"fingerprint": "f", "datasets": [], "num_epochs": 1}))
    for batch in batches:
        file.append(step_line(start, batch.pack.index + 1, [batch]))
    file.close()


def numbers(ledger: Ledger) -> list[tuple[int, int, int]]:
    return [(pack.start, pack.step, pack.index) for pack in ledger.packs]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ledger_file(folder, 0).read_text().splitlines()]


def test_a_line_holds_what_was_trained_and_dropped(tmp_path: Path, batches: list[Batch]) -> None:
    write(tmp_path, batches)
    ledger = read_ledger(tmp_path)

    expected = [(n, key.source, key.row, key.epoch, "") for n, b in enumerate(batches) for key in b.pack.keys]
    expected += [
        (n, d.key.source, d.key.row, d.key.epoch, d.reason) for n, b in enumerate(batches) for d in b.pack.dropped_rows
    ]
    found = [
        (pack.index, *values, ledger.reasons[reason]) for pack in ledger.packs for *values, reason in pack.rows.tolist()
    ]
    assert sorted(found) == sorted(expected)
    assert {reason for *_, reason in expected} == {"", "overlong", "no_trained_token"}
    assert numbers(ledger) == [(1, n + 1, n) for n in range(8)]
    assert json.loads(step_line(1, 9, [], skipped="why"))["skipped"] == "why"


def test_a_run_that_is_resumed_has_a_line_for_each_start_and_step(finished: FinishedRun) -> None:
    found = [("start", line["begins"]) if "begins" in line else line["step"] for line in lines(finished.folder)]
    assert found == [("start", 1), 1, 2, 3, 4, ("start", 2), 5, 6]
    rows = sum(len(pack.rows) for pack in read_ledger(finished.folder).packs)
    assert rows == sum(data["rows"] for data in finished.steps[-1]["datasets"].values())


def test_a_start_with_values_that_no_run_writes_is_named_by_its_line(tmp_path: Path, batches: list[Batch]) -> None:
    """Each key in turn; without its start, the ledger proves nothing."""
    write(tmp_path, batches)
    path, (start, *steps) = ledger_file(tmp_path, 0), lines(tmp_path)
    start["data"]["datasets"] = [{"name": "a", "rows": 5}]
    places = [(), ("state",), ("data",), ("data", "datasets", 0)]
    for place in places:
        for key in reduce(getitem, place, start):
            for value in ("x", -1, 2**62, 10**400, float("inf"), 1.5, True, [3], {"y": 1}):
                damaged = copy.deepcopy(start)
                reduce(getitem, place, damaged)[key] = value
                if (key, value) in (("fingerprint", "x"), ("name", "x")) or key == "step":  # a step is not read
                    continue
                path.write_text("".join(f"{json.dumps(each)}\n" for each in (damaged, *steps)))
                with pytest.raises(ValueError, match="the ledger holds no start of the run, so it proves nothing"):
                    read_ledger(tmp_path)
                write(tmp_path, [], start=2, step=8)
                assert any(
                    each.startswith("ledger-rank-0.jsonl:1: not a line") for each in read_ledger(tmp_path).problems
                )


def test_packs_that_a_later_start_trains_again_do_not_count(tmp_path: Path, batches: list[Batch]) -> None:
    """Start 2 loses all that it made; start 3 goes back behind start 2's beginning."""
    for start, step, number in ((1, 0, 6), (2, 5, 3), (3, 4, 1), (4, 4, 4)):
        write(tmp_path, batches[step : step + number], start=start, step=step)
    ledger = read_ledger(tmp_path)

    assert numbers(ledger) == [(1, n + 1, n) for n in range(4)] + [(4, n + 1, n) for n in range(4, 8)]
    assert ledger.num_lost_steps == 2 + 3 + 1
    assert [(start.number, end) for start, end in ledger.spans()] == [(1, 4), (4, sys.maxsize)]
    assert [len(pack.rows) for pack in ledger.packs] == [batch.pack.num_rows for batch in batches]


def test_the_ledgers_of_all_ranks_are_one_though_their_number_changes(
    tmp_path: Path, chat_tokenizer: ChatTokenizer
) -> None:
    """Three ranks, then two, of which one pack was lost, then one; rank 2's file ends early, and counts."""
    state: dict[str, Any] | None = None
    for start, (num_ranks, num_kept, num_lost) in enumerate(((3, 2, 1), (2, 3, 2), (1, 12, 0)), 1):
        states = []
        for rank in range(num_ranks):
            dataset = make_dataset(mixed_rows(40), chat_tokenizer, dp_rank=rank, dp_world_size=num_ranks)
            loader = PackLoader(dataset, num_workers=0, keep_tail=False)
            if state is not None:
                loader.load_state_dict(state)
            before, batches = loader.state_dict(), iter(loader)
            kept = list(islice(batches, num_kept))
            states.append(loader.state_dict())
            write(tmp_path, [*kept, *islice(batches, num_lost)], rank=rank, start=start, state=before)
        state = states[0] | {"lanes": {lane: text for each in states for lane, text in each["lanes"].items()}}
    ledger = read_ledger(tmp_path)
    expected = take(make_dataset(mixed_rows(40), chat_tokenizer), 24)

    assert [pack.index for pack in ledger.packs] == list(range(24))
    for found, pack in zip(ledger.packs, expected, strict=True):
        keys = [*pack.keys, *(drop.key for drop in pack.dropped_rows)]
        assert found.rows[:, :3].tolist() == [[key.source, key.row, key.epoch] for key in keys]
    assert ledger.num_lost_steps == 3 + 4
    assert [len(start.state["lanes"]) for start in ledger.starts] == [0, 6, 6]


def test_the_ledger_is_on_the_disk_before_a_checkpoint_that_knows_its_steps(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses its power keeps what was synced, and perhaps no more."""
    options = {"checkpoints__interval": 2, "checkpoints__export_hf": False, "logging__ledger": True}
    config = make_config(tmp_path, model_folder, tokens__train_steps=4, **options)
    fsync, state, on_disk, saved = os.fsync, resume.run_state, [0], {}

    def fsync_and_count(file: int) -> None:
        fsync(file)
        if Path(f"/proc/self/fd/{file}").readlink().name == "ledger-rank-0.jsonl":
            on_disk.append(sum("packs" in line for line in lines(config.run_dir)))

    def state_at_a_save(*arguments: Any) -> dict[str, Any]:
        saved[arguments[2].step] = on_disk[-1]
        return state(*arguments)

    monkeypatch.setattr(run_logs.os, "fsync", fsync_and_count)
    monkeypatch.setattr(loop, "run_state", state_at_a_save)
    run(config)
    assert saved == {2: 2, 4: 4}
