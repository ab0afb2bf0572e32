"""An audit passes where each row was trained once an epoch, across kills, and fails for whatever else it finds."""

import datetime
import json
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftron.train.ledger import Ledger, read_ledger
from sftron.verify.ledger import OpenedRun, RunAudit, audit_run
from sftron.verify.step_rows import name_step
from tests.train.killed_run import run_killed
from tests.train.runs import NUM_ROWS, chat_line, make_config, make_model_folder, metrics, run, write_rows
from tools.audit_run import main

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "tiny")


def with_drops(folder: Path) -> None:
    write_rows(folder / "rows.jsonl")
    with (folder / "rows.jsonl").open("a") as file:
        file.write(chat_line("too long", "word " * 200) + "\n" + chat_line("nobody answers") + "\n")


OPTIONS: dict[str, Any] = {
    "logging__ledger": True,
    "tokens__train_steps": None,
    "tokens__train_epochs": 2,
    "data__max_dropped_share": 0.1,
    "checkpoints__interval": 2,
    "checkpoints__export_hf": False,
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """The folder of a run over two epochs that was killed five times on its way, with and without workers."""
    folder = tmp_path_factory.mktemp("killed")
    with_drops(folder)
    config = make_config(folder, model_folder, **OPTIONS)
    path = folder / "config.yaml"
    run_killed(path, 1, "in the step")
    run_killed(path, 4, "in the ledger's line")
    run_killed(path, 5, "after the ledger's line", "--data.num_workers=2")
    run_killed(path, 6, "after the checkpoint")
    run_killed(path, 8, "in the step", "--data.num_workers=1")
    run(config)
    return folder


@pytest.fixture
def finished(killed: Path, tmp_path: Path) -> Path:
    """A copy of its run directory, to break."""
    return Path(shutil.copytree(killed / "runs/run", tmp_path / "run"))


def audit(folder: Path) -> RunAudit:
    return audit_run(OpenedRun(folder))


def failed(folder: Path) -> dict[str, str]:
    return {check.name: check.found for check in audit(folder).checks if not check.passed}


def change(folder: Path, edit: Callable[[Lines], object]) -> None:
    """Edit the lines of a run's ledger."""
    path = folder / "ledger-rank-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edit(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


REPLAY, ONCE = "each pack is made again", "each row once an epoch"


def line_of_step(lines: Lines, step: int) -> dict[str, Any]:
    """That of the last start that made it."""
    return next(line for line in reversed(lines) if line.get("step") == step and "packs" in line)


# --- What holds ---


def test_a_run_killed_anywhere_is_proven_to_have_trained_each_row_once_an_epoch(
    killed: Path, model_folder: Path, tmp_path: Path
) -> None:
    found = audit(killed / "runs/run")

    assert found.passed, found.as_text()
    assert [(e.epoch, e.rows, e.trained, e.verdict) for e in found.epochs] == [
        (epoch, NUM_ROWS + 2, NUM_ROWS, "whole") for epoch in (0, 1)
    ]
    assert [each.dropped for each in found.epochs] == [{"overlong": 1, "no_trained_token": 1}] * 2 or [
        each.dropped for each in found.epochs
    ] == [{"no_trained_token": 1, "overlong": 1}] * 2
    assert " of 6 starts; " in found.checks[0].found
    assert not found.checks[0].found.endswith(" 0 more were lost in kills and made again")

    # What counts of it is what the run that was never killed wrote.
    with_drops(tmp_path)
    whole = run(make_config(tmp_path, model_folder, **OPTIONS)).directory.folder
    consumed = rows_of(read_ledger(killed / "runs/run"))
    assert consumed == rows_of(read_ledger(whole))
    assert len(consumed) == 2 * (NUM_ROWS + 2)


def rows_of(ledger: Ledger) -> list[tuple[Any, ...]]:
    return [
        (pack.step, pack.index, *row, ledger.reasons[reason])
        for pack in ledger.packs
        for *row, reason in pack.rows.tolist()
    ]


def test_a_killed_run_that_did_not_go_on_is_proven_up_to_its_last_checkpoint(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_config(tmp_path, model_folder, **OPTIONS)
    run_killed(tmp_path / "config.yaml", 6, "in the ledger's line")
    found = audit(tmp_path / "runs/run")

    assert found.passed, found.as_text()
    assert found.checks[0].found.endswith("; cut off at the end: ledger-rank-0.jsonl")
    assert {each.verdict for each in found.epochs} == {"unfinished"}
    ended = json.loads((tmp_path / "runs/run/result.json").read_text())
    assert ended["status"] == "killed"
    assert found.checks[-1].found == f"killed: {ended['error']}"
    assert re.match(r"process \d+ on .* is gone, and wrote no result", ended["error"])


def test_the_rows_of_a_step_are_named_by_line_with_their_first_words(
    killed: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = killed / "runs/run"
    step = name_step(OpenedRun(folder), 3)
    logged = metrics(folder)[2]

    assert (step.loss, step.grad_norm) == (logged["loss"], logged["grad_norm"])
    assert sum(row.reason is None for row in step.rows) == logged["conversations"]
    rows = (killed / "rows.jsonl").read_text().splitlines()
    for row in step.rows:
        assert row.location == f"{killed}/rows.jsonl:{row.row + 1}"
        question = json.loads(rows[row.row])["messages"][0]["content"]
        assert f"user: {question}" in row.words
    assert main([str(folder), "--step", "3", "--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    assert all(f"{row.location} " in printed and row.words in printed for row in step.rows if not row.reason)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["passed"], found["step"]["step"], len(found["epochs"])) == (True, 3, 2)
    assert main([str(folder), "--step", "99"]) == 2
    assert "has no step 99; the last one is " in capsys.readouterr().err


WEIGHTS = {"mixture": (2, 1), "one stream": (None, None), "mixture with a stream": (1, 1)}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_mixtures_and_streams_are_proven_as_well_and_a_row_that_is_missing_is_found(
    tmp_path: Path, model_folder: Path, kind: str
) -> None:
    write_rows(tmp_path / "other.jsonl", 11)
    sets = [
        {"path": str(tmp_path / name), "streaming": "stream" in kind and not number}
        for number, name in enumerate(("rows.jsonl", "other.jsonl"))
    ]
    if kind == "one stream":
        del sets[1]
    else:
        sets = [each | {"weight": weight} for each, weight in zip(sets, WEIGHTS[kind], strict=True)]
    options = {**OPTIONS, "tokens__train_epochs": None, "tokens__train_steps": 14, "data__datasets": sets}
    config = make_config(tmp_path, model_folder, **options)
    run_killed(tmp_path / "config.yaml", 7, "in the step")
    folder = run(config).directory.folder
    found = audit(folder)

    assert found.passed, found.as_text()
    assert any(each.verdict == "whole" for each in found.epochs)
    first = name_step(OpenedRun(folder), 2).rows[0]
    change(folder, lambda lines: line_of_step(lines, 2)["packs"][0]["trained"].pop(0))
    assert f"{first.location} in epoch {first.epoch}, trained, is missing" in failed(folder)[REPLAY]


# --- What is broken on purpose ---


def test_a_row_trained_twice_is_found(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def twice(lines: Lines) -> None:
        trained = line_of_step(lines, 4)["packs"][0]["trained"]
        trained.append(line_of_step(lines, 2)["packs"][1]["trained"][0])

    change(finished, twice)
    problems = failed(finished)

    assert re.search(r"rows\.jsonl:\d+ in epoch 0: twice", problems[ONCE])
    assert re.search(r"pack 6: .*rows\.jsonl:\d+ in epoch 0, trained, does not belong there", problems[REPLAY])
    assert main([str(finished)]) == 1
    assert f"FAIL  {ONCE}" in capsys.readouterr().out


def test_a_row_in_place_of_another_is_found_though_all_counts_agree(finished: Path) -> None:
    def exchange(lines: Lines) -> None:
        line_of_step(lines, 4)["packs"][0]["trained"][0] = line_of_step(lines, 2)["packs"][1]["trained"][0]

    change(finished, exchange)
    problems = failed(finished)

    assert set(problems) == {ONCE, REPLAY}
    assert "is missing" in problems[REPLAY]
    assert "does not belong there" in problems[REPLAY]


def test_rows_of_two_packs_that_changed_places_are_found(finished: Path) -> None:
    """Each row is still there once an epoch: only the replay can know."""

    def exchange(lines: Lines) -> None:
        first, second = line_of_step(lines, 2)["packs"][0]["trained"], line_of_step(lines, 3)["packs"][0]["trained"]
        first[0], second[0] = second[0], first[0]

    change(finished, exchange)
    assert set(failed(finished)) == {REPLAY}


def test_a_pack_with_its_rows_in_another_order_is_found(finished: Path) -> None:
    change(finished, lambda lines: line_of_step(lines, 2)["packs"][0]["trained"].reverse())
    assert failed(finished) == {REPLAY: "pack 2 has its rows in another order"}


def test_a_row_that_is_missing_is_found(finished: Path) -> None:
    change(finished, lambda lines: line_of_step(lines, 5)["packs"][0]["trained"].pop())
    problems = failed(finished)

    assert "is missing" in problems[REPLAY]
    assert "is missing" in problems[ONCE]


def test_a_step_that_is_missing_is_found_by_its_packs(finished: Path) -> None:
    change(finished, lambda lines: lines.remove(line_of_step(lines, 3)))

    assert failed(finished)["each pack once"].startswith("pack 4 is missing, pack 5 is missing")


def test_a_last_line_that_was_cut_off_after_a_checkpoint_is_found(finished: Path) -> None:
    path = finished / "ledger-rank-0.jsonl"
    text = path.read_bytes()
    path.write_bytes(text[: text.rstrip().rfind(b"\n") + 40])
    found = audit(finished)

    assert "cut off at the end: ledger-rank-0.jsonl" in found.checks[0].found
    assert {check.name for check in found.checks if not check.passed} >= {"each pack once", ONCE}


def test_a_line_that_cannot_be_read_is_found(finished: Path) -> None:
    path = finished / "ledger-rank-0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], '{"start": 1, "st\n', *lines[2:]]))

    assert failed(finished)["the ledger can be read"].startswith("ledger-rank-0.jsonl:3: not a line of a ledger")


def test_a_row_dropped_for_another_reason_is_found(finished: Path) -> None:
    def other_reason(lines: Lines) -> None:
        for line in lines:
            for pack in line.get("packs", ()):
                for drop in pack["dropped"]:
                    drop[3] = "broken_json"

    change(finished, other_reason)
    problem = failed(finished)[REPLAY]

    assert "dropped as overlong, is missing" in problem
    assert "dropped as broken_json, does not belong there" in problem


def test_a_row_that_the_data_does_not_have_is_found(finished: Path) -> None:
    def beyond(lines: Lines) -> None:
        line_of_step(lines, 4)["packs"][0]["trained"][0][1] = 99

    change(finished, beyond)

    assert failed(finished)[ONCE].startswith("data set 0, row 99, which the data does not have")
    assert "data set 0, row 99, which the data does not have in epoch " in failed(finished)[REPLAY]


def test_data_that_changed_after_the_run_is_named(finished: Path, killed: Path) -> None:
    rows = killed / "rows.jsonl"
    before = rows.read_text()
    rows.write_text(before.replace("0 is", "0 was"))
    try:
        problems = failed(finished)
    finally:
        rows.write_text(before)

    assert problems["the data is what the run had"].startswith("data.datasets.0: ")


def test_a_ledger_that_began_late_is_replayed_from_there_and_fails_for_what_was_before(
    tmp_path: Path, model_folder: Path
) -> None:
    options = {**OPTIONS, "tokens__train_epochs": None}
    run(make_config(tmp_path, model_folder, **options | {"logging__ledger": False, "tokens__train_steps": 4}))
    folder = run(make_config(tmp_path, model_folder, **options | {"tokens__train_steps": 9})).directory.folder

    assert failed(folder) == {"each pack once": "packs 0 to 7 were trained before the ledger began"}
    change(folder, lambda lines: line_of_step(lines, 6)["packs"][0]["trained"].pop())
    assert "is missing" in failed(folder)[REPLAY]


def test_a_run_that_is_given_more_epochs_is_replayed_with_those_that_each_start_had(
    tmp_path: Path, model_folder: Path
) -> None:
    """The end of an epoch that is the last one is packed without rows of the next."""
    with_drops(tmp_path)
    for num_epochs in (1, 3):
        folder = run(make_config(tmp_path, model_folder, **OPTIONS | {"tokens__train_epochs": num_epochs}))
    found = audit(folder.directory.folder)

    assert found.passed, found.as_text()
    assert [each.verdict for each in found.epochs] == ["whole"] * 3


def test_a_folder_without_a_run_or_a_ledger_is_refused(
    tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
    (finished / "ledger-rank-0.jsonl").unlink()
    assert main([str(finished)]) == 2
    assert "a run writes one with logging.ledger: true" in capsys.readouterr().err
    (finished / "ledger-rank-0.jsonl").write_text('{"begins": 1, "st')
    assert main([str(finished)]) == 2
    assert "holds no start of the run" in capsys.readouterr().err


def test_a_run_whose_template_writes_the_date_is_audited_on_another_day(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = json.loads((model_folder / "tokenizer_config.json").read_text()).get("chat_template")
    own = own or (model_folder / "chat_template.jinja").read_text()
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%Y') }}" + own)
    options = OPTIONS | {"tokenizer__chat_template": str(tmp_path / "dated.jinja")}
    first = run(make_config(tmp_path, model_folder, **options))
    today = first.setup.data.chat_tokenizer.template.date
    assert today is not None

    class Later(datetime.date):
        @classmethod
        def today(cls) -> datetime.date:
            return today + datetime.timedelta(days=400)

    monkeypatch.setattr("sftron.data.chat.template.datetime", Namespace(date=Later))
    opened = OpenedRun(first.directory.folder)
    assert opened.config.tokenizer.date == today.isoformat()
    assert audit_run(opened).passed
