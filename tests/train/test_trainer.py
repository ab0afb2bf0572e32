"""A run that is stopped and continued is the run that never stopped, bit for bit (laws 6, 10 and 12)."""

import json
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sftron.commands.train import run as main
from sftron.data.types import Batch
from sftron.train import loop, objective, step
from sftron.train.run import RunLength
from sftron.train.step import StepResult
from sftron.train.trainer import open_trainer
from tests.conftest import children_of
from tests.train.ranks import start_forked
from tests.train.runs import (
    NUM_ROWS,
    bits,
    chat_line,
    make_config,
    metrics,
    opened,
    result,
    run,
    settings,
    write_config,
    write_rows,
)


@dataclass
class Recorder:
    """Stands between the loop and the training step: what came in, what came out; and a signal after some step."""

    stop_after: int | None = None
    steps: list[tuple[Any, float | None, float | None]] = field(default_factory=list)

    def __call__(self, model: Any, optimizer: Any, batches: Sequence[Batch], *rest: Any, **options: Any) -> StepResult:
        given = step.train_step(model, optimizer, batches, *rest, **options)
        keys = [(batch.pack.index, batch.pack.keys) for batch in batches]
        self.steps.append((keys, given.loss, given.grad_norm))
        if len(self.steps) == self.stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return given


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(loop, "train_step", made)
    return made


def test_20_steps_are_10_steps_a_stop_and_10_steps_bit_for_bit(
    tmp_path: Path, model_folder: Path, recorder: Recorder
) -> None:
    options = {"data__num_workers": 2, "optimizer__warmup_steps": 3}
    whole = run(make_config(tmp_path, model_folder, **options, general__run_name="whole"))
    expected, recorder.steps, recorder.stop_after = recorder.steps, [], 10
    config = make_config(tmp_path, model_folder, **options)
    stopped = run(config)
    assert len(recorder.steps) == 10
    assert result(stopped) == {"status": "preempted", "step": 10, "exported": None}
    assert bits(stopped) != bits(whole)
    recorder.stop_after = None
    continued = run(config)

    assert recorder.steps == expected
    assert len(expected) == 20
    assert bits(continued) == bits(whole)
    assert continued.progress == whole.progress
    assert result(continued)["status"] == "completed"
    assert [line["step"] for line in metrics(continued.directory.folder)] == list(range(1, 21))
    # The losses move, and an epoch was crossed: nothing was compared that stands still.
    assert expected[-1][1] < expected[0][1]
    assert continued.progress.rows > NUM_ROWS


def test_training_by_epochs_ends_after_every_row_once_per_epoch(
    tmp_path: Path, model_folder: Path, recorder: Recorder
) -> None:
    num_epochs = 2
    write_rows(tmp_path / "rows.jsonl")
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(chat_line("too long", "word " * 200) + "\n" + chat_line("nobody answers") + "\n")
    config = make_config(
        tmp_path, model_folder, tokens__train_steps=None, tokens__train_epochs=num_epochs, data__max_dropped_share=0.1
    )
    recorder.stop_after = 3
    run(config)
    recorder.stop_after = None
    ended = run(config)

    consumed = Counter((key.row, key.epoch) for packs, _, _ in recorder.steps for _, keys in packs for key in keys)
    assert consumed == Counter((row, epoch) for row in range(NUM_ROWS) for epoch in range(num_epochs))
    assert ended.progress.rows == (NUM_ROWS + 2) * num_epochs
    assert ended.progress.total.dropped == {"overlong": num_epochs, "no_trained_token": num_epochs}
    assert metrics(ended.directory.folder)[-1]["epoch"] == num_epochs
    # The rate has come down to its end with the last rows, though no number of steps was known.
    assert metrics(ended.directory.folder)[-1]["learning_rate"] < 0.2 * 1e-2


CHANGES: dict[str, dict[str, Any]] = {
    "data.datasets.0": {},
    "chat_template": {"tokenizer__chat_template": "{tmp}/other.jinja"},
    "general.seed": {"general__seed": 8},
    "data.packing.strategy": {"data__packing": {"strategy": "none"}},
    "data.overlong": {"data__overlong": "truncate_turns"},
    "the model's norm_eps": {"model__path": "{tmp}/other_model"},
}


@pytest.fixture(scope="session")
def stopped_run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """The folder of a run with one checkpoint."""
    folder = tmp_path_factory.mktemp("stopped")
    run(make_config(folder, model_folder, tokens__train_steps=1, checkpoints__export_hf=False))
    return folder


@pytest.mark.parametrize("name", CHANGES)
def test_a_resume_with_other_data_is_refused_by_name_and_leaves_the_run_as_it_is(
    tmp_path: Path, model_folder: Path, stopped_run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    )
    other_model = Path(shutil.copytree(model_folder, tmp_path / "other_model"))
    config = json.loads((other_model / "config.json").read_text())
    (other_model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.01}))
    overrides = {
        key: value.format(tmp=tmp_path) if isinstance(value, str) else value for key, value in CHANGES[name].items()
    }
    tree = settings(stopped_run, model_folder, **overrides)
    rows = stopped_run / "rows.jsonl"
    before, config_before = rows.read_text(), (stopped_run / "runs/run/config.yaml").read_bytes()
    if name.startswith("data.datasets"):
        rows.write_text(before.replace("0 is", "0 was"))
    try:
        status = main(["--config", str(write_config(tmp_path / "config.yaml", tree))])
    finally:
        rows.write_text(before)
    message = capsys.readouterr().err

    assert status == 2
    what = "another model" if name.startswith("the model's") else "other data settings"
    assert f"was made with {what}, " in message
    assert f"\n  {name}" in message
    assert " in the checkpoint, " in message
    assert (stopped_run / "runs/run/config.yaml").read_bytes() == config_before


def test_the_toggles_may_change_on_the_way(tmp_path: Path, model_folder: Path) -> None:
    run(make_config(tmp_path, model_folder, tokens__train_steps=1))
    both = {"data__train_on_completions_only": False, "data__remove_cross_attention": False}

    assert run(make_config(tmp_path, model_folder, tokens__train_steps=2, **both)).progress.step == 2


def test_a_broken_checkpoint_makes_way_and_its_step_is_saved_again(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, model_folder, tokens__train_steps=4, checkpoints__interval=2)
    first = run(config)
    broken = first.directory.checkpoints / "step-4" / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-8])
    again = run(config)

    said = capsys.readouterr().out
    assert f"broken     {broken.parent}: model.safetensors has" in said
    assert f"set aside  {broken.parent}.aside" in said
    assert bits(again) == bits(first)
    assert sorted(path.name for path in again.directory.checkpoints.iterdir()) == ["step-2", "step-4", "step-4.aside"]
    assert run(config).progress.step == 4


def test_resume_never_and_resume_from_a_path_do_what_they_say(
    tmp_path: Path, model_folder: Path, recorder: Recorder
) -> None:
    config = make_config(tmp_path, model_folder, tokens__train_steps=4, checkpoints__interval=2)
    first = run(config)
    with pytest.raises(ValueError, match=r"resume is never, but .* holds checkpoints of an earlier run"):
        open_trainer(make_config(tmp_path, model_folder, checkpoints__resume="never"))
    shutil.copytree(first.directory.folder, tmp_path / "runs" / "broken", symlinks=True)
    for weights in (tmp_path / "runs" / "broken" / "checkpoints").glob("*/*.safetensors"):
        weights.unlink()
    for resume, message in (("auto", "choose another general.run_name"), ("never", "resume is never, but")):
        with pytest.raises(ValueError, match=message):
            open_trainer(make_config(tmp_path, model_folder, general__run_name="broken", checkpoints__resume=resume))
    path = str(first.directory.checkpoints / "step-2")
    branch = run(
        make_config(
            tmp_path, model_folder, tokens__train_steps=4, checkpoints__resume=path, optimizer__learning_rate=1e-3
        )
    )

    assert branch.progress.step == 4
    assert bits(branch) != bits(first)
    assert [line["step"] for line in metrics(branch.directory.folder)] == [1, 2, 3, 4]
    # The branch's own step 4 is the one that a next resume takes.
    longer = opened(make_config(tmp_path, model_folder, tokens__train_steps=5, checkpoints__interval=2))
    assert bits(longer) == bits(branch)


# --- The whole process group ---


def test_sigterm_to_the_process_group_saves_ends_well_and_loses_nothing(
    tmp_path: Path, model_folder: Path, recorder: Recorder
) -> None:
    """Meanwhile a second run in the same directory is refused; after a kill the lock is free at once."""
    options: dict[str, Any] = {"tokens__train_steps": 400, "checkpoints__export_hf": False, "logging__interval": 1}
    config = make_config(tmp_path, model_folder, **options, data__num_workers=2)
    launcher = start_forked(tmp_path / "config.yaml", 1, tmp_path)
    while not ((tmp_path / "out-0").exists() and "step    2/" in (tmp_path / "out-0").read_text()):
        assert launcher.wait(0.05) is None, (tmp_path / "err-0").read_text()
    (rank,) = children_of(launcher.pid)
    with pytest.raises(ValueError, match=rf"another run is still using .* \(process {rank} on"):
        open_trainer(config)
    os.killpg(launcher.pid, signal.SIGTERM)

    assert launcher.wait(60) == 0, (tmp_path / "err-0").read_text()
    said = (tmp_path / "out-0").read_text()
    assert "received SIGTERM: saving after this step" in said
    recorded = json.loads((tmp_path / "runs/run/result.json").read_text())
    assert recorded["status"] == "preempted"
    assert 2 <= recorded["step"] < 400
    (folder,) = (tmp_path / "runs/run/checkpoints").iterdir()
    assert folder.name == f"step-{recorded['step']}"

    # The process computed with as many threads as this one, so that the same bits can be asked for.
    recorder.stop_after = recorded["step"]
    whole = run(make_config(tmp_path, model_folder, **options, general__run_name="whole"))
    resumed = opened(make_config(tmp_path, model_folder, **options))
    assert resumed.progress == whole.progress
    assert bits(resumed) == bits(whole)
    assert resumed.loader.state_dict() == whole.loader.state_dict()


# --- Numbers that are not finite ---


def test_three_steps_in_a_row_without_a_finite_loss_end_the_run_and_name_their_conversations(
    tmp_path: Path, model_folder: Path, recorder: Recorder, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    bad_steps = {2, 3, 5, 6, 7}
    original = objective.loss_of

    def loss_of(model: Any, batch: Batch, *options: Any) -> torch.Tensor:
        return original(model, batch, *options) * (float("nan") if len(recorder.steps) + 1 in bad_steps else 1.0)

    monkeypatch.setattr(objective, "loss_of", loss_of)
    make_config(tmp_path, model_folder)

    assert main(["--config", str(tmp_path / "config.yaml")]) == 3
    assert len(recorder.steps) == 7  # two in a row, and then a good one, were not enough
    said = capsys.readouterr().out
    named = [set(re.findall(r"rows\.jsonl:(\d+)", line)) for line in said.splitlines() if "no update was made" in line]
    expected = [
        {str(key.row + 1) for _, keys in recorder.steps[number - 1][0] for key in keys} for number in sorted(bad_steps)
    ]
    assert named == expected
    assert len(expected[0]) > 2
    lines = metrics(tmp_path / "runs/run")
    assert [line["step"] for line in lines if line["skipped"]] == sorted(bad_steps)
    assert lines[1]["loss"] is None
    assert json.loads((tmp_path / "runs/run/result.json").read_text())["status"] == "failed"
    assert not (tmp_path / "runs/run/checkpoints").exists()


def test_a_bad_row_deep_in_the_data_ends_the_run_with_its_line(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 802 rows every second one is sampled at the start; this one is met while training."""
    rows = write_rows(tmp_path / "rows.jsonl", 802).read_text().splitlines()
    rows[601] = '{"messages": 5}'
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    for num_workers in (0, 2):
        tree = settings(tmp_path, model_folder, data__num_workers=num_workers, tokens__micro_batch_size=40)
        assert main(["--config", str(write_config(tmp_path / "config.yaml", tree))]) == 2
        said = capsys.readouterr().err.strip()
        assert said == f"{tmp_path}/rows.jsonl:602: `messages` is the number 5; wanted a list"


def test_a_dry_run_writes_nothing_trains_nothing_and_refuses_broken_weights(
    tmp_path: Path, model_folder: Path, recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    def state() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    make_config(tmp_path, folder)
    before = state()
    assert main(["--config", str(tmp_path / "config.yaml"), "--dry-run"]) == 0
    assert state() == before
    assert not recorder.steps
    assert "nothing was trained or written" in capsys.readouterr().out

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][:] = 8e37  # finite, as its loss is not
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["--config", str(tmp_path / "config.yaml"), "--dry-run"]) == 2
    assert "holds broken weights" in capsys.readouterr().err


def test_packs_without_a_conversation_at_the_end_of_the_data_are_no_steps(tmp_path: Path, model_folder: Path) -> None:
    """Short rows fill few packs of a lane and long ones many, so that lanes drain at different times."""
    lines = [chat_line("Hi", "Yo " * (20 if n < 8 else 1)) for n in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    trainer = run(
        make_config(
            tmp_path,
            model_folder,
            tokens__train_steps=None,
            tokens__train_epochs=1,
            tokens__batch_accumulation_per_replica=1,
        )
    )

    steps = [json.loads(line) for line in trainer.directory.metrics.read_text().splitlines()]
    assert trainer.loader.state_dict()["next_pack"] > len(steps), "no lane has drained before another"
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert all(step["conversations"] > 0 and step["skipped"] is None for step in steps)
    assert sum(step["conversations"] for step in steps) == 24


def test_a_finished_run_by_epochs_keeps_its_newest_checkpoints_and_stays_as_it_is(
    tmp_path: Path, model_folder: Path
) -> None:
    options = {"tokens__train_steps": None, "tokens__train_epochs": 1, "checkpoints__export_hf": False}
    config = make_config(tmp_path, model_folder, **options, checkpoints__interval=1, checkpoints__keep_last=2)
    trainer = run(config)
    folder, last = trainer.directory.folder, trainer.progress.step
    kept = {path.name for path in trainer.directory.checkpoints.glob("step-*")}
    assert last > 2
    assert kept == {f"step-{last - 1}", f"step-{last}"}
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    run(config)
    assert files == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_data_that_ends_before_its_rows_were_counted_is_an_error_and_no_endless_loop(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunLength, "rows_of_run", lambda length, progress: NUM_ROWS + 1)
    with pytest.raises(
        RuntimeError, match=rf"ended at {NUM_ROWS} of {NUM_ROWS + 1} rows: \d packs in a row had no conv"
    ):
        run(make_config(tmp_path, model_folder, tokens__train_steps=None, tokens__train_epochs=1))
