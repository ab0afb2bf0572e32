"""The ledger loses no line that counts: neither by a kill nor by a change of the number of ranks."""

import json
import os
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.loader import PackLoader
from sftron.data.types import Batch
from sftron.train import line_file, outputs, resume
from sftron.train.ledger import Ledger, LedgerWriter, next_start, read_ledger
from tests.data.streams import make_dataset, mixed_rows, take
from tests.train.conftest import FinishedRun
from tests.train.runs import make_config, run


@pytest.fixture
def batches(chat_tokenizer: ChatTokenizer) -> list[Batch]:
    dataset = make_dataset(mixed_rows(40), chat_tokenizer, num_epochs=1)
    return list(islice(PackLoader(dataset, num_workers=0, keep_tail=False), 8))


def begin(folder: Path, *, rank: int = 0, start: int = 1, step: int = 0, state: Any = None) -> LedgerWriter:
    writer = LedgerWriter(folder, start=start, dp_rank=rank)
    state = state or {"next_pack": step, "lanes": {}, "first_epoch": 0}
    writer.begin(step=step, state=state, data={"fingerprint": "f"})
    return writer


def write(writer: LedgerWriter, batches: Sequence[Batch]) -> None:
    """A step a pack."""
    for batch in batches:
        writer.write(batch.pack.index + 1, [batch], skipped=None)


def numbers(ledger: Ledger) -> list[tuple[int, int, int]]:
    return [(pack.start, pack.step, pack.index) for pack in ledger.packs]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger-rank-0.jsonl").read_text().splitlines()]


def test_a_line_holds_what_was_trained_and_dropped(tmp_path: Path, batches: list[Batch]) -> None:
    writer = begin(tmp_path)
    write(writer, batches)
    writer.write(9, [], skipped="why")
    writer.close()
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
    assert lines(tmp_path)[-1]["skipped"] == "why"


def test_a_run_that_is_resumed_has_a_line_for_each_start_and_step(finished: FinishedRun) -> None:
    found = [("start", line["begins"]) if "begins" in line else line["step"] for line in lines(finished.folder)]
    assert found == [("start", 1), 1, 2, 3, 4, ("start", 2), 5, 6]
    rows = sum(len(pack.rows) for pack in read_ledger(finished.folder).packs)
    assert rows == sum(data["rows"] for data in finished.steps[-1]["datasets"].values())


def test_a_line_that_was_cut_off_is_removed_when_the_run_resumes(tmp_path: Path, batches: list[Batch]) -> None:
    writer = begin(tmp_path)
    write(writer, batches[:3])
    writer.close()
    path = tmp_path / "ledger-rank-0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"start": 1xxx')
    assert read_ledger(tmp_path).torn == ("ledger-rank-0.jsonl",)
    assert next_start(tmp_path) == 2
    writer = begin(tmp_path, start=2, step=2)
    write(writer, batches[2:4])
    writer.close()

    assert path.read_bytes().startswith(whole)
    assert [line.get("step") for line in lines(tmp_path)] == [0, 1, 2, 3, 2, 3, 4]
    ledger = read_ledger(tmp_path)
    assert (ledger.torn, ledger.problems, ledger.num_lost_steps) == ((), (), 1)
    assert numbers(ledger) == [(1, 1, 0), (1, 2, 1), (2, 3, 2), (2, 4, 3)]


def test_packs_that_a_later_start_trains_again_do_not_count(tmp_path: Path, batches: list[Batch]) -> None:
    """Start 2 loses all that it made; start 3 goes back behind start 2's beginning."""
    for start, step, number in ((1, 0, 6), (2, 5, 3), (3, 4, 1), (4, 4, 4)):
        writer = begin(tmp_path, start=start, step=step)
        write(writer, batches[step : step + number])
        writer.close()
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
            writer = begin(tmp_path, rank=rank, start=start, state=loader.state_dict())
            batches = iter(loader)
            write(writer, list(islice(batches, num_kept)))
            states.append(loader.state_dict())
            write(writer, list(islice(batches, num_lost)))
            writer.close()
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

    monkeypatch.setattr(line_file.os, "fsync", fsync_and_count)
    monkeypatch.setattr(outputs, "run_state", state_at_a_save)
    run(config)
    assert saved == {2: 2, 4: 4}
