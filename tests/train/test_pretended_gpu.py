"""Whole runs on the pretended GPU (tests/pretended.py): nothing that CUDA refuses, and one wait in a step (law 11)."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sftron.commands import check, verify
from sftron.train import loop
from sftron.train.trainer import Trainer
from tests.models.reference import FAMILIES
from tests.pretended import PretendedGpu, pretended_gpu
from tests.train.runs import (
    chat_line,
    make_config,
    make_model_folder,
    metrics,
    on_each_step,
    opened,
    result,
    settings,
    stop_in,
    write_config,
    write_rows,
)

LORA = {"lora__rank": 4, "optimizer__learning_rate": 1e-2}
WHOLE_BLOCKS = {"hidden_size": 64, "intermediate_size": 128}
"""NF4 rounds blocks of 64 weights."""

DEEP = {"num_hidden_layers": 5}
STREAM = {"model__frozen_base": "stream", "model__activation_checkpointing": "full"}

RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "selective": ({}, {"model__activation_checkpointing": "selective", "model__compute_dtype": "float32"}),
    "accumulation": ({}, {"tokens__batch_accumulation_per_replica": 3, "model__activation_checkpointing": "full"}),
    "LoRA": ({}, LORA),
    "DoRA": ({}, LORA | {"lora__dora": True}),
    "NF4": (WHOLE_BLOCKS, LORA | {"model__frozen_dtype": "nf4"}),
    "stream": (DEEP | {"tie_word_embeddings": True}, LORA | STREAM),
    "stream, NF4": (DEEP | WHOLE_BLOCKS, LORA | STREAM | {"model__frozen_dtype": "nf4"}),
    "deterministic": ({}, {"general__deterministic": True}),
    "layout": ({}, {"general__deterministic": "layout"}),
    "mixture": (FAMILIES["OLMoE"], {}),
    "hybrid": (FAMILIES["Qwen 3.5"], {}),
}
"""The model and the settings of each run."""


class WaitsOfSteps:
    """The waits within train_step, by step."""

    def __init__(self, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[Counter[str]] = []
        train_step = loop.train_step

        def counted(*args: Any, **options: Any) -> Any:
            before = gpu.waits.copy()
            try:
                return train_step(*args, **options)
            finally:
                self.steps.append(gpu.waits - before)

        monkeypatch.setattr(loop, "train_step", counted)


def _start(folder: Path, model: Path, settings: dict[str, Any], **more: Any) -> Trainer:
    """Starts a run of 4 steps with all that a run can do: it evaluates, answers, saves in the background, exports."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text(chat_line("What is 3?") + "\n", encoding="utf-8")
    every_second = {"evaluation__interval": 2, "checkpoints__interval": 2, "checkpoints__export_interval": 2}
    evaluated = {"evaluation__share": 0.2, "evaluation__prompts": str(prompts), "evaluation__max_new_tokens": 4}
    computed = {"model__attention": "auto", "model__compute_dtype": "bfloat16", "checkpoints__async": True}
    steps = {"tokens__train_steps": 4, "tokens__batch_accumulation_per_replica": 1}
    options = every_second | evaluated | computed | steps | settings | more
    return opened(make_config(folder, model, **options))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_gpu_stops_resumes_and_ends_as_on_a_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_options, settings = RUNS[name]
    model = make_model_folder(tmp_path / "tiny", **model_options)
    (tmp_path / "cpu").mkdir()
    on_cpu = _start(tmp_path / "cpu", model, settings)
    assert on_cpu.train() == 0
    expected = metrics(on_cpu.directory.folder)

    with pretended_gpu() as gpu:
        waits = WaitsOfSteps(gpu, monkeypatch)
        stopped = _start(tmp_path, model, settings)
        assert stopped.ranks.device.type == "gpu"
        with monkeypatch.context() as patch:
            on_each_step(patch, stop_in(3))
            assert stopped.train() == 0
        assert result(stopped)["status"] == "preempted"
        resumed = _start(tmp_path, model, settings)
        assert resumed.train() == 0

    assert result(resumed)["status"] == "completed"
    assert (Path(result(resumed)["exported"]) / "config.json").exists()
    lines = metrics(resumed.directory.folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for key in ("loss", "grad_norm"):
        # The backends of attention round otherwise in bfloat16.
        assert [each[key] for each in lines] == pytest.approx([each[key] for each in expected], rel=3e-2)
    answers = (resumed.directory.folder / "evaluations.jsonl").read_text().splitlines()
    assert [len(json.loads(each)["answers"]) for each in answers] == [1, 1, 1]
    # The first step of a start copies the table of rotations.
    expected_waits = {"device to host train/step.py": 1}
    if "model__frozen_base" in settings and not model_options.get("tie_word_embeddings"):
        # The rows of streamed embeddings are looked up by the host.
        expected_waits |= {f"{way} models/weight_stream.py": 1 for way in ("device to host", "host to device")}
    for step in waits.steps[1:3]:
        assert {place.rpartition(":")[0]: count for place, count in step.items()} == expected_waits


def test_verify_and_check_pass_on_a_gpu(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "tiny")
    write_rows(tmp_path / "rows.jsonl")
    options = {"model__attention": "auto", "model__compute_dtype": "bfloat16"}
    config = write_config(tmp_path / "config.yaml", settings(tmp_path, model, **options))
    report, served = tmp_path / "verify.json", tmp_path / "check.json"
    with pretended_gpu():
        assert verify.main(["--config", str(config), "--json", str(report)]) == 0
        few = ["--limit", "1", "--max-new-tokens", "4"]
        assert check.main(["--model", str(model), "--device", "gpu", *few, "--json", str(served)]) == 0
    (on,) = [line for line in json.loads(report.read_text())["facts"].items() if line[0] == "device"]
    assert on == ("device", "Pretended GPU")


@pytest.mark.nightly  # the interpreter takes its time
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_a_run_by_the_kernels_themselves(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "tiny")
    runs = []
    for launches_kernels in (False, True):
        folder = tmp_path / str(launches_kernels)
        folder.mkdir()
        with pretended_gpu(launches_kernels=launches_kernels) as gpu:
            few = {"tokens__train_steps": 2, "evaluation__max_new_tokens": 1}
            trainer = _start(folder, model, few, model__compute_dtype="float32")
            assert trainer.train() == 0
        runs.append([line["loss"] for line in metrics(trainer.directory.folder)])
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)
    backward = {"normalize_backward_kernel", "swiglu_backward_kernel"}
    assert backward | {"rotate_kernel", "cross_entropy_gradient_kernel"} <= {*gpu.launches}
