"""One rank dies, stalls, fails or is asked to stop: all end in order and in time, and say why (laws 8, 10 and 12)."""

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sftron.checkpoint.checkpoint import newest_checkpoint
from sftron.checks.replay import OpenedRun, audit_run
from tests.conftest import chosen, rest_nightly
from tests.train.chaos import alive, below
from tests.train.faults import Fault, train_noting_updates, train_with
from tests.train.ranks import launch, start_forked, train
from tests.train.runs import chat_line, make_model_folder, metrics, settings, write_config, write_rows

TIMEOUT_S = 3


def configure(folder: Path, model_folder: Path, **overrides: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "rows.jsonl").exists():
        write_rows(folder / "rows.jsonl", 200)
    options: dict[str, Any] = {
        "tokens__batch_accumulation_per_replica": 1,
        "checkpoints__export_hf": False,
        "parallelism__timeout_seconds": TIMEOUT_S,
        "logging__interval": 1,
    }
    return write_config(folder / "config.yaml", settings(folder, model_folder, **options | overrides))


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "runs/run/result.json").read_text())


def rows_of(folder: Path, step: int) -> set[int]:
    """The rows that a run trained in a step, counted from 1."""
    named = audit_run(OpenedRun(folder), step).step
    assert named is not None
    return {row.row + 1 for row in named.rows if row.reason is None}


# --- A failure of one rank ---

FAILURES = {
    "a killed rank": (Fault("SIGKILL"), r'ranks in "step 3": 1'),
    "the main rank killed": (Fault("SIGKILL", rank=0), r'ranks in "step 3": 0'),
    "a stalled rank": (Fault("sleep"), r'ranks waiting in "step 3": 0; ranks in "step 3": 1'),
    "a rank stalled at its data": (Fault("sleep", "data"), r'ranks in "the data of step 4": 1'),
    "a rank stalled in a save": (Fault("sleep", "save", rank=0), r'ranks in "saving step 3": 0'),
    "a rank killed while it loads": (Fault("SIGKILL", "load", step=0), r'ranks in "loading": 1'),
    "a rank without memory": (
        Fault("no memory"),
        r"rank 1: OutOfMemory: step 3 on packs of .* Change, in this order: ",
    ),
    "a rank that fails": (Fault("raise"), r"rank 1: RuntimeError: out of luck"),
    "a killed worker": (
        Fault("SIGKILL", "worker"),
        r"rank 1: \w+Error: .*DataLoader worker .*(killed|exited)|worker died",
    ),
    "a hung worker": (Fault("sleep", "worker"), r"rank 1: WorkerError: a loader worker sent nothing for 3 s"),
}


FAST_FAILURES = [
    "a killed rank",
    "the main rank killed",
    "a rank stalled in a save",
    "a rank that fails",
    "a rank without memory",
    "a hung worker",
]
"""Each way to fail once, in different phases; the others are nightly."""


@dataclass(frozen=True)
class Failed:
    folder: Path
    exit_codes: list[int]
    err: list[str]


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Failed]:
    """All at once, as most of them wait."""
    folder = tmp_path_factory.mktemp("failures")
    model_folder = make_model_folder(folder / "model")

    def fail(name: str) -> Failed:
        fault, own = FAILURES[name][0], folder / name.replace(" ", "-")
        options = {"checkpoints__interval": 3, "data__num_workers": int(fault.at == "worker")}
        config = configure(own, model_folder, **options)
        status = start_forked(config, 2, own, train_with, fault).wait(120)
        err = [(own / f"err-{rank}").read_text() for rank in range(2)]
        assert status == 1, err
        return Failed(own, json.loads((own / "exit-codes").read_text()), err)

    with ThreadPoolExecutor(5) as pool:
        names = chosen(FAILURES, request)
        return dict(zip(names, pool.map(fail, names), strict=True))


@pytest.mark.parametrize("name", rest_nightly(FAILURES, FAST_FAILURES))
def test_all_ranks_end_in_time_with_their_phase_and_the_failure_that_came_first(
    failures: dict[str, Failed], name: str
) -> None:
    fault, first = FAILURES[name]
    failed = failures[name]
    # A rank that hangs is killed by the launcher, as torchrun does it.
    is_killed = fault.what in ("SIGKILL", "sleep") and fault.at != "worker"

    for rank, exit_code in enumerate(failed.exit_codes):
        if rank == fault.rank and is_killed:
            assert exit_code == -signal.SIGKILL, failed.err
            continue
        assert exit_code == 1, failed.err
        assert re.search(first.replace("rank 1: ", ""), failed.err[rank]), failed.err
        assert re.search(
            rf"^rank {rank} was in: (loading|(the data of step|step|saving step) \d)$", failed.err[rank], re.M
        )
        assert re.search(r"File \".*/trainer\.py\"", failed.err[rank]), failed.err
    if fault.rank != 0:
        assert result(failed.folder)["status"] == "failed"
        assert re.search(first, result(failed.folder)["error"])


# --- A request to stop ---

STOPS = {
    "one rank in a step": (Fault("SIGTERM"), 0, 3),
    "the group in a step": (Fault("SIGTERM", to="group"), 2, 3),
    "the group in a save": (Fault("SIGTERM", "save", to="group"), 2, 4),
    "the group while it loads": (Fault("SIGUSR1", "load", step=0, to="group"), 2, 0),
    "the launcher in the first answers": (Fault("SIGTERM", "answers", step=0, to="launcher"), 2, 0),
}


@pytest.fixture(scope="module")
def stops(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, tuple[Path, int | None]]:
    folder = tmp_path_factory.mktemp("stops")
    model_folder = make_model_folder(folder / "model")
    (folder / "prompts.jsonl").write_text(chat_line("What is 3?") + "\n")

    def stop(name: str) -> tuple[Path, int | None]:
        (fault, num_workers, _), own = STOPS[name], folder / name.replace(" ", "-")
        options: dict[str, Any] = {"data__num_workers": num_workers, "checkpoints__interval": 3}
        options |= {"evaluation__prompts": str(folder / "prompts.jsonl"), "evaluation__max_new_tokens": 4}
        config = configure(own, model_folder, parallelism__timeout_seconds=60, **options)
        return own, start_forked(config, 2, own, train_with, fault).wait(90)

    with ThreadPoolExecutor(4) as pool:
        names = chosen(STOPS, request)
        return dict(zip(names, pool.map(stop, names), strict=True))


FAST_STOPS = ["one rank in a step", "the group in a save", "the launcher in the first answers"]


@pytest.mark.parametrize("name", rest_nightly(STOPS, FAST_STOPS))
def test_a_signal_to_any_of_them_at_any_time_ends_the_run_saved_and_in_order(
    stops: dict[str, tuple[Path, int | None]], name: str
) -> None:
    folder, status = stops[name]
    said = [(folder / f"err-{rank}").read_text() for rank in range(2)]

    assert status == 0, said
    assert not any("Traceback" in each for each in said)
    last_step = STOPS[name][2]
    assert result(folder)["status"] == "preempted"
    assert result(folder)["step"] == last_step
    checkpoints = folder / "runs/run/checkpoints"
    assert not last_step or (checkpoints / f"step-{last_step}" / "MANIFEST.json").exists()


# --- Numbers, rows and the end of the data ---


def test_not_a_number_on_one_rank_changes_no_bit_on_any_and_names_the_rows_of_all(
    tmp_path: Path, model_folder: Path
) -> None:
    fault = Fault("nan", rank=1, step=3, num_steps=3)
    config = configure(tmp_path, model_folder, parallelism__timeout_seconds=60)
    ended = launch(2, train_noting_updates, config, fault, folder=tmp_path)

    assert [each.exit_code for each in ended] == [3, 3], ended
    for rank in range(2):
        assert (tmp_path / f"updates-{rank}").read_text().split() == ["1", "1", "0", "0", "0"]
    said = [line for line in ended[0].out.splitlines() if "no update" in line]
    named = [set(map(int, re.findall(r"rows\.jsonl:(\d+)", line))) for line in said]
    assert named == [rows_of(tmp_path / "runs/run", step) for step in (3, 4, 5)]
    assert result(tmp_path)["status"] == "failed"


def test_a_bad_row_that_one_rank_meets_while_training_ends_all_with_one_message(
    tmp_path: Path, model_folder: Path
) -> None:
    """Of 802 rows every second one is sampled at the start; the audit shows which rank trains which of the others."""
    options = {"data__packing": {"pool_size": 8}, "data__num_lanes": 2, "tokens__train_steps": 30}
    options |= {"parallelism__timeout_seconds": 60}
    rows = write_rows(tmp_path / "rows.jsonl", 802).read_text().splitlines()
    launch(2, train, configure(tmp_path, model_folder, **options), folder=tmp_path)
    late = audit_run(OpenedRun(tmp_path / "runs/run"), 20).step
    assert late is not None
    bad = next(row.row for row in late.rows if row.pack % 2 and row.row % 2)  # rank 1 has the odd packs
    rows[bad] = '{"messages": 5}'
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    ended = launch(2, train, configure(tmp_path, model_folder, **options, general__run_name="bad"), folder=tmp_path)

    assert [each.exit_code for each in ended] == [2, 2]
    problem = f"{tmp_path}/rows.jsonl:{bad + 1}: `messages` is the number 5; wanted a list"
    assert ended[0].err.splitlines()[-1] == f"rank 1: {problem}"
    assert problem not in ended[1].err
    assert not any("Traceback" in each.err for each in ended)
    num_steps = len(metrics(tmp_path / "runs/bad"))
    assert num_steps > 1, "it was found before the loop"
    assert newest_checkpoint(tmp_path / "runs/bad/checkpoints").folder == (
        tmp_path / f"runs/bad/checkpoints/step-{num_steps}"
    )


def test_an_epoch_on_two_ranks_whose_lanes_drain_apart_is_the_epoch_on_one(tmp_path: Path, model_folder: Path) -> None:
    """Short rows fill few packs of a lane and long ones many; rank 1 has the lanes 1 and 3."""
    lines = [chat_line(f"Hi {n}", "Yo " * (20 if n < 8 else 1)) for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for num_ranks in (1, 2):
        config = configure(
            tmp_path,
            model_folder,
            general__run_name=f"on-{num_ranks}",
            tokens__train_steps=None,
            tokens__train_epochs=2,
            tokens__batch_accumulation_per_replica=2 // num_ranks,
            parallelism__timeout_seconds=60,
        )
        for ended in launch(num_ranks, train, config, folder=tmp_path):
            assert ended.exit_code == 0, ended.err
    alone, ours = metrics(tmp_path / "runs/on-1"), metrics(tmp_path / "runs/on-2")
    assert len(alone) == len(ours) > 3
    for one, two in zip(alone, ours, strict=True):
        for key in ("tokens", "trained_tokens", "total_tokens", "conversations", "epoch", "learning_rate"):
            assert two[key] == one[key]
        for ours_of, alone_of in zip(two["datasets"].values(), one["datasets"].values(), strict=True):
            assert ours_of == alone_of | {"loss": pytest.approx(alone_of["loss"], rel=1e-6)}
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert two["rows"] == one["rows"]
    assert [count["conversations"] for count in ours[-1]["datasets"].values()] == [120]
    audit = audit_run(OpenedRun(tmp_path / "runs/on-2"), ours[-1]["step"])
    assert audit.passed, audit.as_text()
    assert audit.step is not None
    assert {row.pack for row in audit.step.rows} < {*range(*ours[-1]["rows"]["packs"])}, "no lane has drained first"


# --- A second run ---


def test_a_second_run_of_two_ranks_is_refused_at_once_by_the_owners_name_and_the_owner_dies_with_its_launcher(
    tmp_path: Path, model_folder: Path
) -> None:
    config = configure(tmp_path, model_folder, parallelism__timeout_seconds=60, data__num_workers=1)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    owner = start_forked(config, 2, first, train_with, Fault("sleep", rank=1))
    while not (tmp_path / "config-came").exists():
        time.sleep(0.05)
    ended = launch(2, train, config, folder=second)
    assert owner.wait(0) is None, "the owner has ended, so nothing was refused because of it"
    # Nobody is left of it, though one of its ranks sleeps and the other waits.
    own = below(owner.pid)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait(10)
    deadline = time.monotonic() + 10
    while alive(own) and time.monotonic() < deadline:
        time.sleep(0.1)

    assert len(own) == 5  # launcher, 2 ranks, 2 workers
    assert not alive(own)
    assert [each.exit_code for each in ended] == [2, 2]
    assert re.search(r"another run is still using .* \(process \d+ on ", ended[0].err)
    assert ended[1].err == ""
