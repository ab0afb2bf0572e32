"""A run that made the model worse ends as diverged; no healthy run does, however short, noisy or sorted."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sftron.commands.train import run as main
from sftron.train.divergence import divergence
from tests.train.runs import make_config, metrics, on_each_step, stop_in

SMOLLM2 = [1.4, 9.0, 9.7, 11.8, 10.9, 10.0, 10.3, 9.2, 8.4, 8.0, 7.6, 5.9, 6.0, 6.0, 6.6]
SMOLLM2 += [4.9, 5.7, 6.8, 5.3, 6.9, 4.9, 4.9, 5.0, 4.4, 5.2, 5.1, 4.5, 4.0, 5.6, 4.5]
"""SmolLM2-135M-Instruct on GSM8K, one row a step, a rate of 5e-3 after one step of warm-up, cosine schedule."""


def verdict(losses: Sequence[float | None], vocab_size: int = 49152, tokens: Sequence[int] = ()) -> str | None:
    records = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    for record, count in zip(records, tokens, strict=False):
        record["trained_tokens"] = count
    return divergence(records, vocab_size)


def with_noise(chance: random.Random, level: float, spread: float, kind: str) -> float:
    """A positive number with the mean `level` and the relative deviation `spread`."""
    if kind == "gamma":
        return chance.gammavariate(spread**-2, level * spread**2)
    deviation = math.sqrt(math.log(1 + spread**2))
    value = level * math.exp(chance.gauss(-(deviation**2) / 2, deviation))
    return value + (chance.random() < 0.05) * chance.uniform(0, 3) * level * (kind == "outliers")


def healthy(chance: random.Random) -> tuple[list[float], int, list[int]]:
    """Losses that fall or stay, or rise to five times as much because the rows are sorted by difficulty."""
    vocab_size, num_steps = chance.choice([300, 32000, 151936]), chance.choice([6, 7, 10, 15, 30, 100, 300])
    is_tuned, gain = chance.random() < 0.75, chance.choice([0, 0.1, 0.95])
    highest = math.log(vocab_size) * (chance.uniform(0.02, 0.4) if is_tuned else chance.uniform(1, 1.05))
    spread, kind = chance.choice([0.02, 0.3, 0.6] if is_tuned else [0.005, 0.03]), chance.choice(["gamma", "log"])
    if is_tuned and chance.random() < 0.3:
        kind = "outliers"
    is_sorted = is_tuned and chance.random() < 0.4
    losses = []
    for step in range(num_steps):
        share = step / num_steps
        level = highest * ((0.2 + 0.8 * share) if is_sorted else 1 - gain * (1 - math.exp(-3 * share)))
        losses.append(with_noise(chance, level, spread, kind))
    return losses, vocab_size, [int(chance.lognormvariate(5, 1)) + 1 for _ in losses]


def broken(chance: random.Random) -> tuple[list[float], int, list[int]]:
    """A rate that is too high breaks a tuned model in a step of the first half; it learns a part of it again."""
    vocab_size, num_steps = chance.choice([300, 32000, 151936]), chance.choice([20, 50, 200])
    guess, last_good = math.log(vocab_size), chance.choice([0, chance.randrange(num_steps // 2)])
    begin, peak, end = chance.uniform(0.02, 0.3), chance.uniform(0.9, 100), chance.uniform(0.6, 2)
    levels = [
        begin if step <= last_good else end + (peak - end) * math.exp(-8 * (step - last_good) / num_steps)
        for step in range(num_steps)
    ]
    losses = [with_noise(chance, guess * level, chance.choice([0.02, 0.15]), "log") for level in levels]
    return losses, vocab_size, [int(chance.lognormvariate(5, 0.7)) + 1 for _ in losses]


def test_of_healthy_runs_none_in_a_thousand_is_called_diverged_and_of_broken_ones_nine_in_ten_are() -> None:
    chance = random.Random(0)
    assert sum(verdict(*healthy(chance)) is not None for _ in range(1000)) <= 1
    assert sum(verdict(*broken(chance)) is not None for _ in range(200)) >= 180


@pytest.mark.parametrize(
    ("losses", "begin", "end"),
    [
        (SMOLLM2, 1.4, 4.74),
        ([10.97, 2205, 1830, 1502, 1201, 1100, 980, 900, 850, 802, 780, 765], 10.97, 819.4),
        ([10.97, *[400.0, 1000.0] * 50], 10.97, 700),  # one step before the break, and more noise than that rise
        ([2.0] * 30 + [12.0 + 0.1 * (step % 3) for step in range(30)], 2.0, 12.1),
    ],
)
def test_a_broken_model_is_found_and_its_losses_are_stated(losses: list[float], begin: float, end: float) -> None:
    assert verdict(losses) == (
        f"the mean loss of the last {max(5, len(losses) // 10)} steps is {end:.4g}; it began at {begin:.4g}, and a "
        "uniform guess over 49,152 tokens has 10.8"
    )


@pytest.mark.parametrize(
    "losses",
    [
        [],
        [1.4, 2000.0, 2000.0, 2000.0, 2000.0],  # too few steps
        [1.4 + 0.01 * step for step in range(20)],
        [10.7, 10.9, 10.8, 10.9, 10.7, 10.95, 10.9, 11.0, 10.8, 10.9],  # learns nothing, about ln V
        [0.1, 1.4, 2.0, 1.1, 1.7, 0.9, 1.6, 1.3, 2.2, 1.2],  # one row a step; the first is an easy one
        [1.5] * 20 + [60.0] + [1.5] * 4,  # a spike
        [1.5] * 10 + [11.5] * 10 + [1.4] * 20,  # broken and mended
    ],
)
def test_what_is_short_noisy_flat_or_over_is_not_called_diverged(losses: list[float]) -> None:
    assert verdict(losses) is None


def test_steps_without_a_finite_loss_are_left_out_and_damaged_counts_weigh_as_one_token() -> None:
    odd: list[Any] = [None, float("nan"), "5", True, [], 1e400]
    assert verdict([*SMOLLM2[:10], *odd, *SMOLLM2[10:]]) == verdict(SMOLLM2)
    records: list[dict[str, Any]] = [{"step": step, "loss": loss} for step, loss in enumerate(SMOLLM2)]
    for record, tokens in zip(records, [None, -3, "x", 0, 1.5] * 6, strict=True):
        record["trained_tokens"] = tokens
    assert divergence(records, 49152) == verdict(SMOLLM2)
    # Steps weigh as much as they have trained tokens.
    losses = [1.5] + [1.4] * 179 + [12.0] * 10 + [1.4] * 10
    assert verdict(losses) is not None
    assert verdict(losses, tokens=[100] * 180 + [1] * 10 + [100] * 10) is None


# --- Runs ---

BROKEN = {"optimizer__learning_rate": 5.0, "optimizer__schedule": "constant", "logging__interval": 1}


def start(tmp_path: Path, model_folder: Path, **options: Any) -> int:
    make_config(tmp_path, model_folder, **options)
    return main(["--config", str(tmp_path / "config.yaml")])


def result_of(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "runs/run/result.json").read_text())


def test_a_diverged_run_says_so_on_the_console_in_result_json_in_the_card_and_by_its_exit_status(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is stopped after nine of its steps: the losses of both starts decide."""
    folder = tmp_path / "runs/run"
    on_each_step(monkeypatch, stop_in(9))
    assert start(tmp_path, model_folder, **BROKEN, tokens__train_steps=14) == 0
    assert result_of(tmp_path)["status"] == "preempted"
    # A record without its tokens costs neither the verdict nor the export.
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    record = json.loads(lines[3])
    del record["tokens"], record["trained_tokens"]
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:3], json.dumps(record), "{damaged", *lines[4:]]) + "\n")
    monkeypatch.undo()
    capsys.readouterr()

    assert start(tmp_path, model_folder, **BROKEN, tokens__train_steps=14) == 3
    said, result = capsys.readouterr().out, result_of(tmp_path)
    assert (result["status"], result["step"]) == ("diverged", 14)
    assert result["error"].startswith("the mean loss of the last 5 steps is ")
    assert "WARNING    optimizer.learning_rate 5 is above 0.01" in said
    assert "diverged   after step 14" in said
    assert f"WARNING    {result['error']}. The weights are worse" in said
    assert "metrics.jsonl:5: is damaged" in said
    card = (folder / "hf/step-14/README.md").read_text()
    assert f"**The run diverged:** {result['error']}." in card
    assert Path(result["exported"]) == folder / "hf/step-14"

    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert start(tmp_path, model_folder, **BROKEN, tokens__train_steps=14) == 3
    assert "diverged   before, after step 14; nothing is left to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_run_that_learns_is_completed_and_no_rate_is_warned_of(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(tmp_path, model_folder, optimizer__learning_rate=1e-2, tokens__train_steps=14) == 0
    said = capsys.readouterr().out
    assert "diverged" not in said
    assert "learning_rate" not in said
    assert result_of(tmp_path)["status"] == "completed"
    assert len(metrics(tmp_path / "runs/run")) == 14
    assert "diverged" not in (tmp_path / "runs/run/hf/step-14/README.md").read_text()
