"""metrics.jsonl holds a step's numbers, each step once; the console rounds them, docs/metrics.md describes them."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.loader import collate
from sftron.data.types import IGNORE_INDEX, ConversationKey, DataError, Dropped, LabeledConversation
from sftron.train.flops import StepFlops
from sftron.train.logs.run_logs import RunLogs
from sftron.train.metrics import MeanLoss, StepMetrics, TokenLosses
from sftron.train.progress import DataSetCount, Progress, StepCounts
from sftron.train.ranks import Ranks
from sftron.train.run import Setup
from sftron.train.run_directory import RunDirectory
from sftron.train.step import StepBatches, StepResult, measure_step
from tests.conftest import ROOT
from tests.data.streams import Rows, as_dataset, chat, make_mixture, mixed_rows, take
from tests.train.conftest import FinishedRun
from tests.train.runs import make_config, run


@pytest.fixture
def step(finished: FinishedRun) -> StepMetrics:
    """The fourth step of a run, in which untrained roles are measured."""
    return replace(StepMetrics(**finished.steps[3]), dropped={"overlong": 2, "no_trained_token": 1})


def write(folder: Path, *steps: StepMetrics, resumed_step: int = 0) -> list[dict[str, Any]]:
    data = SimpleNamespace(is_evaluated=False)
    setup = SimpleNamespace(ranks=SimpleNamespace(is_main=True), data=data)
    logs = RunLogs(cast(Setup, setup), RunDirectory(folder))
    logs.open(step=resumed_step, evaluated_step=None)
    for step in steps:
        logs.write_step(step)
    logs.close("completed")
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def test_the_line_of_console_log_rounds_what_the_file_holds(tmp_path: Path, step: StepMetrics) -> None:
    step = replace(step, tokens_per_second_per_gpu=step.tokens_per_second / 2)
    (record,) = write(tmp_path, step)

    assert record == asdict(step)
    assert len(step.roles) == 3
    form = (
        "step {step:>4}/20 | loss {loss:7.4f} | accuracy {token_accuracy:.1%} | lr {learning_rate:.2e} "
        "| grad norm {grad_norm:6.2f} | {tokens} tokens, {trained_share:.0%} trained | fill {fill:.1%} "
        "| {tokens_per_second:,.0f} tokens/s ({tokens_per_second_per_gpu:,.0f} a GPU), {tflops:.3g} TFLOP/s, "
        "mfu {mfu:.1%} | epoch {epoch:.2f} | data wait {data_seconds:.2f} s | dropped 3 | by role: "
    )
    roles = ", ".join(f"{name} {role['loss']:.4f}" for name, role in record["roles"].items())
    assert step.as_line(20) == form.format(**record) + roles


def test_the_terminals_line_has_what_one_watches_and_what_must_not_be_missed_in_80_columns(step: StepMetrics) -> None:
    line = replace(step, dropped={}).for_terminal(100_000, "3:12:05")
    speed = f"{step.tokens_per_second:,.0f} tokens/s"

    for part in (f"loss {step.loss:7.4f}", f"lr {step.learning_rate:.2e}", speed, "3:12:05 left"):
        assert f"| {part}" in line
    assert len(line) < 80
    assert step.for_terminal(None, None).endswith(f"{speed} | dropped 3")
    skipped = replace(step, loss=None, skipped="no token to train on").for_terminal(100_000, "3:12:05")
    assert "SKIPPED: no token to train on" in skipped[:79]


def test_a_terminal_shows_a_short_line(step: StepMetrics) -> None:
    numbers: dict[str, Any] = {"step": 3, "loss": 2.9577, "learning_rate": 0.00024, "tokens_per_second": 81.0}
    line = replace(step, **numbers, dropped={}).for_terminal(72, "9:36")
    assert line == "step    3/72 | loss  2.9577 | lr 2.40e-04 | 81 tokens/s | 9:36 left"


def test_what_is_not_known_or_not_finite_is_left_out_of_the_line_or_null_in_the_file(
    tmp_path: Path, step: StepMetrics
) -> None:
    none = replace(step, loss=None, grad_norm=None, skipped="no token to train on")
    nan = replace(step, step=8, loss=float("nan"), grad_norm=float("inf"), skipped="the loss is not finite")
    records = write(tmp_path, none, nan)

    assert [(r["loss"], r["grad_norm"], r["skipped"]) for r in records] == [
        (None, None, "no token to train on"),
        (None, None, "the loss is not finite"),
    ]
    assert "loss    none" in none.as_line(None)
    assert none.as_line(None).endswith("| SKIPPED: no token to train on")
    assert "nan" in nan.as_line(None)
    assert "reserved" not in none.as_line(None)  # on a CPU
    assert "TFLOP/s |" in replace(step, mfu=None, hfu=None, peak_tflops=None).as_line(20)
    epochs = {name: {"epoch": epoch} for name, epoch in (("a", 0.25), ("b", 3.125))}
    assert "| epoch 0.25 to 3.12 |" in replace(step, epoch=None, datasets=epochs).as_line(20)


def test_steps_after_the_resumed_one_are_dropped_and_so_is_a_line_that_was_cut_off(
    tmp_path: Path, step: StepMetrics
) -> None:
    write(tmp_path, *(replace(step, step=number, loss=1.0) for number in range(1, 8)))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(asdict(step))[:40])
    records = write(tmp_path, *(replace(step, step=number, loss=2.0) for number in (6, 7, 8)), resumed_step=5)

    assert [record["step"] for record in records] == list(range(1, 9))
    assert [record["loss"] for record in records] == [1.0] * 5 + [2.0] * 3


def test_rows_are_counted_for_each_data_set(chat_tokenizer: ChatTokenizer) -> None:
    """Against the rows themselves, in two epochs."""
    rows = [mixed_rows(40), [chat(f"q {n}", "a") for n in range(9)]]
    datasets = [as_dataset(Rows(own, name)) for own, name in zip(rows, ("a.jsonl", "b.jsonl"), strict=True)]
    dataset = make_mixture(datasets, chat_tokenizer, num_epochs=2)
    packs = take(dataset, 60)
    progress = Progress([DataSetCount(), DataSetCount()])
    step_counts = StepCounts.of([collate(pack, keep_tail=True) for pack in packs], len(progress.datasets))
    progress.add(step_counts)
    assert step_counts.weight_sum == sum(float(pack.loss_weights.sum()) for pack in packs)
    assert progress.truncated == sum(pack.num_truncated for pack in packs)
    losses = TokenLosses({}, [MeanLoss(2.0, 3), MeanLoss(None, 0)], MeanLoss(2.0, 3), 0.5, 1.5)
    metrics = measure_step(
        progress,
        StepBatches(
            [],
            StepCounts.of([collate(pack, keep_tail=False) for pack in packs[:2]], 2),
            StepFlops(model=3 * 10**12, hardware=4 * 10**12),
            sum_squared_lengths_spread=0.25,
            data_seconds=0.5,
            peak_memory_bytes=10**15,
            peak_reserved_bytes=2 * 10**15,
            packs=[],
            denominator=1.0,
        ),
        StepResult(1.0, 1.0, None, token_losses=losses),
        learning_rate=1.0,
        preparation=dataset.preparation,
        step_seconds=0.5,
        checkpoint_seconds=0.125,
        evaluation_seconds=0.0,
        peak_tflops=50.0,
        ranks=Ranks(device=torch.device("cpu"), world_size=4),
        changed_settings={"optimizer.learning_rate": [1, 2.0]},
        rows={},
    )

    for source, name in enumerate(("a.jsonl", "b.jsonl")):
        items = [dataset.preparation.read(ConversationKey(source, row)) for row in range(len(rows[source]))]
        kept = [item for item in items if isinstance(item, LabeledConversation)]
        gone = Counter(item.reason for item in items if isinstance(item, Dropped))
        assert metrics.datasets[name] == {
            "loss": losses.datasets[source].loss,
            "rows": 2 * len(items),
            "conversations": 2 * len(kept),
            "tokens": 2 * sum(map(len, kept)),
            "trained_tokens": 2 * sum(int((item.labels != IGNORE_INDEX).sum()) for item in kept),
            "epoch": 2.0,
            "dropped": {reason: 2 * count for reason, count in gone.items()},
        }
    assert (metrics.tflops, metrics.mfu, metrics.hfu) == (6.0, 0.12, 0.16)
    assert metrics.tokens_per_second_per_gpu == metrics.tokens * 2 / 4
    assert metrics.trained_tokens_per_second == metrics.trained_tokens * 2
    assert metrics.trained_tokens_per_second_per_gpu == metrics.trained_tokens * 2 / 4
    assert metrics.conversations_per_pack == sum(len(pack.keys) for pack in packs[:2]) / 2
    assert metrics.sum_squared_lengths == sum(
        int(length) ** 2 for pack in packs[:2] for length in np.diff(pack.conversation_bounds)
    )
    assert metrics.peak_memory_gb == 1e6
    assert metrics.peak_reserved_gb == 2e6
    assert "| memory 1000000.0 GB, 2000000.0 reserved |" in metrics.as_line(None)
    assert metrics.epoch == 2.0
    assert len(metrics.dropped) == 2
    assert metrics.dropped == metrics.datasets["a.jsonl"]["dropped"]
    assert metrics.total_tokens == sum(count["tokens"] for count in metrics.datasets.values())


def test_the_share_of_dropped_rows_stops_the_run_above_its_limit_and_names_the_reasons() -> None:
    first, second = DataSetCount(conversations=450, dropped={"overlong": 30}), DataSetCount(conversations=499)
    second.dropped.update(overlong=1, no_trained_token=20)
    progress = Progress([first, second])

    progress.require_few_dropped(0.051)
    with pytest.raises(
        DataError, match=r"51 of 1000 rows .*\(31 overlong, 20 no_trained_token\), more .* 0\.05 allows"
    ):
        progress.require_few_dropped(0.05)
    first.conversations, second.conversations = 0, 148
    progress.require_few_dropped(0.05)  # too few rows to judge by, unless these are all of the run
    with pytest.raises(DataError, match="51 of 199 rows"):
        progress.require_few_dropped(0.05, num_rows=199)


def test_progress_comes_back_from_a_checkpoint_as_it_was() -> None:
    counts = [DataSetCount(40, 500, 200, {"overlong": 2}), DataSetCount(1, 2, 3)]
    progress = Progress(counts, step=3, rows_at_peak=7, truncated=5, non_finite_in_a_row=1)
    again = Progress.from_state(json.loads(json.dumps(asdict(progress))))

    assert again == progress
    total = again.total
    assert (total.rows, total.tokens, total.trained_tokens, total.dropped) == (43, 502, 203, {"overlong": 2})
    again.datasets[0].dropped["overlong"] += 1
    assert progress.total.dropped["overlong"] == 2


# --- docs/metrics.md and wandb ---

PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
DESCRIBED = re.findall(r"^\| `([\w.]+)` \|", PAGE.partition("## Losses by role")[0], re.MULTILINE)


def leaves(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def as_described(key: str) -> str:
    key = re.sub(r"^roles/\w+", "roles/ROLE", key)
    key = re.sub(r"^changed_settings/.*", "changed_settings/KEY", key)
    key = re.sub(r"^datasets/(.*?)/(?=\w+$|dropped/)", "datasets/NAME/", key)
    return re.sub(r"dropped/\w+$", "dropped/REASON", key).replace("/", ".")


def test_every_number_of_a_step_is_described_and_every_described_one_is_there(finished: FinishedRun) -> None:
    keys = {as_described(key) for line in finished.steps for key, _ in leaves(line)}

    assert len(DESCRIBED) == len(set(DESCRIBED)) > 40
    of_mixtures = {key for key in DESCRIBED if key.startswith("experts.")}  # see test_expert_runs.py
    assert keys == set(DESCRIBED) - of_mixtures


def test_wandb_gets_the_numbers_of_metrics_jsonl_to_the_last_digit(finished: FinishedRun) -> None:
    logged = finished.loggers.steps

    assert [line["step"] for line in finished.steps] == sorted(logged) == [1, 2, 3, 4, 5, 6]
    for line in finished.steps:
        numbers = {key: value for key, value in leaves(line) if isinstance(value, (int, float))}
        assert json.loads(json.dumps(logged[line["step"]])) == numbers


def test_names_of_other_trainers_stand_next_to_names_of_sftron() -> None:
    table = PAGE.partition("## The same in other trainers")[2]
    names = re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE)

    assert len(names) > 10
    assert set(names) <= set(DESCRIBED)


def test_a_log_has_the_total_and_the_time_left_also_where_only_epochs_are_known(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    epochs = {"tokens__train_steps": None, "tokens__train_epochs": 2, "checkpoints__export_hf": False}
    trainer = run(make_config(tmp_path, model_folder, **epochs, logging__interval=1))
    said, num_steps = capsys.readouterr().out, trainer.progress.step
    lines = [line for line in said.splitlines() if line.startswith("step ")]
    totals = [int(total) for total in re.findall(r"(?m)^step +\d+/~(\d+) \|", said)]
    assert len(lines) == num_steps == totals[-1]
    assert all(abs(total - num_steps) <= 2 for total in totals[num_steps // 2 :])
    assert [bool(re.search(r"\| \d+:\d\d left", line)) for line in lines[1:]] == [True] * (num_steps - 1)
