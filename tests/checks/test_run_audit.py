"""An audit passes where each row was trained once an epoch, across kills, and fails for each way to break that."""

import datetime
import json
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sftron.checks import replay as replay_module
from sftron.checks.replay import OpenedRun, Replay, audit_run
from sftron.commands.audit import main
from sftron.data import dataset
from sftron.data.digest import digest_of
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
    run_killed(path, 4, "in the step's line")
    shutil.copytree(folder / "runs/run", folder / "killed")
    run_killed(path, 6, "after the checkpoint", "--data.num_workers=2")
    run_killed(path, 8, "in the step")
    run(config)
    return folder


@pytest.fixture
def finished(killed: Path, tmp_path: Path) -> Path:
    """A copy of its run directory, to break."""
    return Path(shutil.copytree(killed / "runs/run", tmp_path / "run"))


def failed(folder: Path, *overrides: str) -> dict[str, str]:
    return {check.name: check.measured for check in audit_run(OpenedRun(folder, overrides)).failed}


def edit_steps(folder: Path, edit: Callable[[Lines], object]) -> None:
    path = folder / "metrics.jsonl"
    lines = metrics(folder)
    edit(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


REPLAY, ONCE, RECORDED = "each step is made again", "each row once an epoch", "each step is recorded"


# --- What holds ---


def test_a_run_killed_anywhere_is_proven_to_have_trained_each_row_once_an_epoch(killed: Path) -> None:
    audit = audit_run(OpenedRun(killed / "runs/run"))
    assert audit.passed, audit.as_text()
    assert [(each.epoch, each.rows, each.trained, each.verdict) for each in audit.epochs] == [
        (epoch, NUM_ROWS + 2, NUM_ROWS, "whole") for epoch in (0, 1)
    ]
    assert all(each.dropped == {"overlong": 1, "no_trained_token": 1} for each in audit.epochs)
    assert audit.checks[2].measured.startswith(f"{len(metrics(killed / 'runs/run'))} steps have the same rows")


def test_a_killed_run_that_was_not_resumed_is_proven_up_to_its_last_line(killed: Path) -> None:
    folder = killed / "killed"
    assert not (folder / "metrics.jsonl").read_text().endswith("\n"), "the line was not cut off"
    audit = audit_run(OpenedRun(folder))

    assert audit.passed, audit.as_text()
    assert audit.checks[0].measured == "3 steps, 6 packs"
    assert {each.verdict for each in audit.epochs} == {"unfinished"}
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "killed"
    assert audit.checks[-1].measured == f"killed: {result['error']}"


def test_the_rows_of_a_step_are_named_by_line_with_their_first_words(
    killed: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, report = killed / "runs/run", tmp_path / "report.json"
    step = audit_run(OpenedRun(folder), 3).step
    logged = metrics(folder)[2]

    assert step is not None
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


def test_a_mixture_with_a_stream_is_proven_as_well_and_other_weights_of_its_sets_are_found(
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
    audit = audit_run(OpenedRun(folder), 2)

    assert audit.passed, audit.as_text()
    assert any(each.verdict == "whole" for each in audit.epochs)
    assert audit.step is not None
    assert {row.dataset for row in audit.step.rows} <= {each.dataset for each in audit.epochs}
    sets[1]["weight"] = 3
    changed = failed(folder, f"--data.datasets={json.dumps(sets)}")
    assert "weight" in changed["the data is what the run had"]
    as_the_run_says = digest_of(OpenedRun(folder, [f"--data.datasets={json.dumps(sets)}"]).fingerprint)
    edit_steps(folder, lambda lines: [line["rows"].update(data=as_the_run_says) for line in lines])
    assert "trained rows that differ" in failed(folder, f"--data.datasets={json.dumps(sets)}")[REPLAY]


# --- What is broken on purpose ---


def exchange(lines: Lines, step: int, other: int, *names: str) -> None:
    """Gives two steps the digests of each other."""
    one, two = lines[step - 1]["rows"], lines[other - 1]["rows"]
    for name in names:
        one[name], two[name] = two[name], one[name]


@pytest.mark.parametrize(
    ("edit", "red", "problem"),
    [
        (lambda lines: exchange(lines, 2, 3, "keys", "tokens"), {REPLAY}, r"^step 2 \(packs 2 to 3\) trained"),
        (lambda lines: exchange(lines, 2, 3, "tokens"), {REPLAY}, "^step 2 .* with different tokens or weights"),
        (lambda lines: lines.pop(2), {RECORDED, REPLAY}, "step 3 has no record(?s:.*)packs 4 to 5 .* belong to no"),
        (lambda lines: lines.pop(), {RECORDED, ONCE}, r"step \d+ has no record(?s:.*)in epoch 1: is missing"),
        (lambda lines: lines.append({**lines[2], "step": len(lines) + 1}), {REPLAY}, "but the next one is pack"),
        (lambda lines: lines.append(lines[2]), {RECORDED, ONCE}, "step 4 has no record .*, step 5 has no record"),
        (lambda lines: lines[3].pop("rows"), {RECORDED, REPLAY}, "step 4 has no record"),
        (lambda lines: lines[3]["rows"].update(packs=[6, 2**40]), {RECORDED, REPLAY}, "step 4 has no record"),
        (lambda lines: lines[3]["rows"].update(epochs=[0, 1]), {REPLAY}, "trained rows that differ"),
    ],
)  # fmt: skip
def test_a_line_that_was_changed_is_found_and_the_step_is_named(
    finished: Path, edit: Callable[[Lines], object], red: set[str], problem: str
) -> None:
    edit_steps(finished, edit)
    found = failed(finished)
    assert red <= found.keys() <= red | {ONCE}
    assert re.search(problem, "\n".join(found.values()), re.MULTILINE), found


def test_a_step_that_was_made_twice_counts_as_it_was_made_last(finished: Path) -> None:
    """As after a resume that could not remove the lines of lost steps."""

    def make_twice(lines: Lines) -> None:
        lost = [{**line, "rows": line["rows"] | {"keys": "0"}} for line in lines[3:6]]
        lines[3:3] = lost

    edit_steps(finished, make_twice)
    assert not failed(finished)


def test_other_loss_weights_of_the_tokens_are_found(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out = dataset.lay_out

    def with_other_weights(*arguments: Any, **options: Any) -> Any:
        pack = lay_out(*arguments, **options)
        return replace(pack, loss_weights=pack.loss_weights * 2)

    monkeypatch.setattr(dataset, "lay_out", with_other_weights)
    assert "step 1 (packs 0 to 1) trained its rows with different tokens or weights" in failed(finished)[REPLAY]


def test_a_row_that_is_packed_twice_and_one_that_is_left_out_are_named(finished: Path) -> None:
    run, problems = OpenedRun(finished), list[str]()
    replay = Replay(run)
    rows = replay.counts[0][0, 0].rows
    del rows[3]
    rows[2] += 1
    counts = list(replay_module._count_epochs(run, replay, problems))
    assert counts[0].verdict == "FAIL"
    assert sorted(problem.split(": ")[-1] for problem in problems) == ["is missing", "twice"]
    assert all(re.search(r"rows\.jsonl:\d+ in epoch \d", problem) for problem in problems)


def test_data_that_changed_after_the_run_is_named(finished: Path, killed: Path) -> None:
    rows = killed / "rows.jsonl"
    before = rows.read_text()
    rows.write_text(before.replace("0 is", "0 was"))
    try:
        problems = failed(finished)
        with pytest.raises(ValueError, match=r"step 2 of .* cannot be rebuilt: the data has changed since"):
            audit_run(OpenedRun(finished), 2)
    finally:
        rows.write_text(before)
    assert problems["the data is what the run had"].startswith("data.datasets.0: ")


def test_a_run_whose_first_steps_have_no_digest_fails_for_them_and_the_others_are_replayed(finished: Path) -> None:
    edit_steps(finished, lambda lines: [line.pop("rows") for line in lines[:4]])
    assert failed(finished) == {
        RECORDED: ", ".join(f"step {n} has no record with a digest of its rows" for n in range(1, 5))
    }
    edit_steps(finished, lambda lines: exchange(lines, 6, 7, "keys"))
    assert "step 6 " in failed(finished)[REPLAY]


def test_a_lengthened_run_is_replayed_with_the_epochs_of_each_start(tmp_path: Path, model_folder: Path) -> None:
    """The end of an epoch that is the last one is packed without rows of the next."""
    with_drops(tmp_path)
    for num_epochs in (1, 3):
        run(make_config(tmp_path, model_folder, **OPTIONS | {"tokens__train_epochs": num_epochs}))
    audit = audit_run(OpenedRun(tmp_path / "runs/run"))

    assert audit.passed, audit.as_text()
    assert [each.verdict for each in audit.epochs] == ["whole"] * 3


def test_a_folder_without_a_run_or_without_digests_is_refused(
    tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    edit_steps(finished, lambda lines: [line.pop("rows") for line in lines])
    assert main([str(finished)]) == 2
    assert "no step in metrics.jsonl has a digest of its rows" in capsys.readouterr().err


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
