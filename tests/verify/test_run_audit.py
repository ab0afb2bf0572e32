"""An audit passes where each row was trained once an epoch, across kills, and fails for each way to break that."""

import datetime
import json
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftron.commands.audit import main
from sftron.verify.ledger import OpenedRun, audit_run
from sftron.verify.named_step import name_step
from tests.train.killed_run import run_killed
from tests.train.runs import NUM_ROWS, chat_line, make_config, make_model_folder, metrics, run, write_rows

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
    """The folder of a run over two epochs that was killed three times, with and without workers, and then completed.

    Its folder `killed` is the run after the first kill.
    """
    folder = tmp_path_factory.mktemp("killed")
    with_drops(folder)
    config, path = make_config(folder, model_folder, **OPTIONS), folder / "config.yaml"
    run_killed(path, 4, "in the ledger's line")
    shutil.copytree(folder / "runs/run", folder / "killed")
    run_killed(path, 6, "after the checkpoint", "--data.num_workers=2")
    run_killed(path, 8, "in the step")
    run(config)
    return folder


@pytest.fixture
def finished(killed: Path, tmp_path: Path) -> Path:
    """A copy of its run directory, to break."""
    return Path(shutil.copytree(killed / "runs/run", tmp_path / "run"))


def failed(folder: Path) -> dict[str, str]:
    audit = audit_run(OpenedRun(folder))
    return {check.name: check.measured for check in audit.checks if not check.passed}


def edit_ledger(folder: Path, edit: Callable[[Lines], object]) -> None:
    path = folder / "ledger-rank-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edit(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def line_of_step(lines: Lines, step: int) -> dict[str, Any]:
    """The line of the last start that made the step."""
    return next(line for line in reversed(lines) if line.get("step") == step and "packs" in line)


def trained(lines: Lines, step: int, pack: int = 0) -> list[list[int]]:
    return line_of_step(lines, step)["packs"][pack]["trained"]


REPLAY, ONCE = "each pack is made again", "each row once an epoch"


# --- What holds ---


def test_a_run_killed_anywhere_is_proven_to_have_trained_each_row_once_an_epoch(killed: Path) -> None:
    audit = audit_run(OpenedRun(killed / "runs/run"))
    assert audit.passed, audit.as_text()
    assert [(each.epoch, each.rows, each.trained, each.verdict) for each in audit.epochs] == [
        (epoch, NUM_ROWS + 2, NUM_ROWS, "whole") for epoch in (0, 1)
    ]
    assert all(each.dropped == {"overlong": 1, "no_trained_token": 1} for each in audit.epochs)
    assert re.search(r" of 4 starts; [1-9]\d* more were lost in kills and made again", audit.checks[0].measured)


def test_a_killed_run_that_was_not_resumed_is_proven_up_to_its_last_checkpoint(killed: Path) -> None:
    audit = audit_run(OpenedRun(killed / "killed"))

    assert audit.passed, audit.as_text()
    assert audit.checks[0].measured.endswith("; cut off at the end: ledger-rank-0.jsonl")
    assert {each.verdict for each in audit.epochs} == {"unfinished"}
    result = json.loads((killed / "killed/result.json").read_text())
    assert result["status"] == "killed"
    assert audit.checks[-1].measured == f"killed: {result['error']}"


def test_the_rows_of_a_step_are_named_by_line_with_their_first_words(
    killed: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, report = killed / "runs/run", tmp_path / "report.json"
    step = name_step(OpenedRun(folder), 3)
    logged = metrics(folder)[2]

    assert (step.loss, step.grad_norm) == (logged["loss"], logged["grad_norm"])
    assert sum(row.reason is None for row in step.rows) == logged["conversations"]
    rows = (killed / "rows.jsonl").read_text().splitlines()
    for row in step.rows:
        assert row.location == f"{killed}/rows.jsonl:{row.row + 1}"
        assert f"user: {json.loads(rows[row.row])['messages'][0]['content']}" in row.words
    assert main([str(folder), "--step", "3", "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    assert all(f"{row.location} " in printed and row.words in printed for row in step.rows if not row.reason)
    written = json.loads(report.read_text())
    assert (written["passed"], written["step"]["step"], len(written["epochs"])) == (True, 3, 2)
    assert main([str(folder), "--step", "99"]) == 2
    assert "has no step 99; the last one is " in capsys.readouterr().err


def test_a_mixture_with_a_stream_is_proven_as_well_and_a_row_that_is_missing_is_found(
    tmp_path: Path, model_folder: Path
) -> None:
    write_rows(tmp_path / "other.jsonl", 11)
    sets = [
        {"path": str(tmp_path / "rows.jsonl"), "streaming": True, "weight": 1},
        {"path": str(tmp_path / "other.jsonl"), "weight": 1},
    ]
    options = {**OPTIONS, "tokens__train_epochs": None, "tokens__train_steps": 14, "data__datasets": sets}
    config = make_config(tmp_path, model_folder, **options)
    run_killed(tmp_path / "config.yaml", 7, "in the step")
    folder = run(config).directory.folder
    audit = audit_run(OpenedRun(folder))

    assert audit.passed, audit.as_text()
    assert any(each.verdict == "whole" for each in audit.epochs)
    first = name_step(OpenedRun(folder), 2).rows[0]
    edit_ledger(folder, lambda lines: trained(lines, 2).pop(0))
    assert f"{first.location} in epoch {first.epoch}, trained, is missing" in failed(folder)[REPLAY]


# --- What is broken on purpose ---


def train_a_row_twice(lines: Lines) -> None:
    trained(lines, 4).append(trained(lines, 2, 1)[0])


def replace_a_row_by_another(lines: Lines) -> None:
    trained(lines, 4)[0] = trained(lines, 2, 1)[0]


def exchange_two_rows(lines: Lines) -> None:
    """Each row is still there once an epoch: only the replay can find it."""
    first, second = trained(lines, 2), trained(lines, 3)
    first[0], second[0] = second[0], first[0]


def drop_for_another_reason(lines: Lines) -> None:
    for drop in (drop for line in lines for pack in line.get("packs", ()) for drop in pack["dropped"]):
        drop[3] = "broken_json"


@pytest.mark.parametrize(
    ("edit", "red", "problem"),
    [
        (train_a_row_twice, {ONCE, REPLAY}, r"pack 6: .*rows\.jsonl:\d+ in epoch 0, trained, does not(?s:.*): twice"),
        (replace_a_row_by_another, {ONCE, REPLAY}, "is missing.*does not belong there"),
        (exchange_two_rows, {REPLAY}, "is missing.*does not belong there"),
        (lambda lines: trained(lines, 2).reverse(), {REPLAY}, "pack 2 has its rows in another order"),
        (lambda lines: trained(lines, 5).pop(), {ONCE, REPLAY}, r"rows\.jsonl:\d+ in epoch \d: is missing"),
        (lambda lines: lines.remove(line_of_step(lines, 3)), {ONCE, "each pack once"}, "pack 4 is missing, pack 5 is"),
        (drop_for_another_reason, {REPLAY}, "as overlong, is missing.*as broken_json, does not belong there"),
        (lambda lines: trained(lines, 4)[0].__setitem__(1, 99), {ONCE, REPLAY}, "row 99, which the data does not have"),
    ],
)
def test_a_ledger_that_was_changed_is_found_and_the_row_is_named(
    finished: Path, edit: Callable[[Lines], object], red: set[str], problem: str
) -> None:
    edit_ledger(finished, edit)
    found = failed(finished)
    assert found.keys() == red
    assert re.search(problem, "\n".join(found.values())), found


def test_a_line_that_was_cut_off_after_a_checkpoint_and_one_that_cannot_be_read_are_found(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = finished / "ledger-rank-0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines)[: -len(lines[-1]) + 40])
    assert main([str(finished)]) == 1
    printed = capsys.readouterr().out
    assert "cut off at the end: ledger-rank-0.jsonl" in printed
    assert "FAIL  each pack once" in printed
    assert f"FAIL  {ONCE}" in printed
    path.write_text("".join([*lines[:2], '{"start": 1, "st\n', *lines[2:]]))
    assert failed(finished)["the ledger can be read"].startswith("ledger-rank-0.jsonl:3: not a line of a ledger")


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
    edit_ledger(folder, lambda lines: trained(lines, 6).pop())
    assert "is missing" in failed(folder)[REPLAY]


def test_a_run_that_is_given_more_epochs_is_replayed_with_those_that_each_start_had(
    tmp_path: Path, model_folder: Path
) -> None:
    """The end of an epoch that is the last one is packed without rows of the next."""
    with_drops(tmp_path)
    for num_epochs in (1, 3):
        run(make_config(tmp_path, model_folder, **OPTIONS | {"tokens__train_epochs": num_epochs}))
    audit = audit_run(OpenedRun(tmp_path / "runs/run"))

    assert audit.passed, audit.as_text()
    assert [each.verdict for each in audit.epochs] == ["whole"] * 3


def test_a_folder_without_a_run_or_a_ledger_is_refused(
    tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    (finished / "ledger-rank-0.jsonl").unlink()
    assert main([str(finished)]) == 2
    assert "a run writes one with logging.ledger: true" in capsys.readouterr().err
    (finished / "ledger-rank-0.jsonl").write_text('{"begins": 1, "st')
    assert main([str(finished)]) == 2
    assert "holds no start of the run" in capsys.readouterr().err


def test_a_run_whose_template_writes_the_date_is_audited_on_another_day(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ strftime_now('%Y') }}" + (model_folder / "chat_template.jinja").read_text()
    (tmp_path / "dated.jinja").write_text(template)
    options = {"tokenizer__chat_template": str(tmp_path / "dated.jinja"), "tokens__train_epochs": 1}
    folder = run(make_config(tmp_path, model_folder, **OPTIONS | options)).directory.folder
    later = datetime.date.today() + datetime.timedelta(days=400)
    date = type("Later", (datetime.date,), {"today": classmethod(lambda _: later)})
    monkeypatch.setattr("sftron.data.chat.template.datetime", Namespace(date=date))
    assert audit_run(OpenedRun(folder)).passed
