"""tools/gpu.py goes on after every fault, and each stage sees one; on the stand-in, all that it can compute passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sftron.models import attention_kernels, sdpa_attention
from sftron.models.block import ResidualBlock
from tests.conftest import ROOT
from tests.models.reference import FAMILIES
from tests.pretended import PretendedTensor, pretended_gpu
from tools import bench_kernels, bench_step, gpu, gpu_speed, gpu_stages
from tools.gpu import FAILED, NOT_PRETENDED, PASSED, SKIPPED, Parts, Results, Stage

ABSENT = ["pydantic", "datasets", "torchdata", "bitsandbytes", "peft", "pytest", "hypothesis"]


@pytest.fixture
def fault_stages(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(*functions: str) -> None:
        stages = {name: Stage(function=f"tests.gpu_faults:{name}", limit=2.5) for name in functions}
        monkeypatch.setattr(gpu, "STAGES", stages)

    return put


def found_in(path: Path) -> dict[str, dict[str, Any]]:
    return {f"{stage} {part}": line for (stage, part), line in Results(path).read().items()}


def test_a_stage_that_raises_hangs_dies_or_does_not_start_is_named_and_the_rest_is_run(
    tmp_path: Path, fault_stages: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.jsonl"
    names = ("raises", "breaks_the_device", "hangs", "is_killed", "exits", "absent", "lacks_a_package", "passes")
    fault_stages(*names)
    assert gpu.main(["--out", str(path)]) == 1
    found = found_in(path)
    failed = {name: line["reason"] for name, line in found.items() if line["status"] == FAILED}
    reasons = {name: reason.partition(" (gpu_faults.py:")[0] for name, reason in failed.items()}
    assert failed["raises one"].endswith(" (gpu_faults.py:17)")
    assert reasons == {
        "raises one": "ValueError: the loss is 3, not 4",
        "breaks_the_device one": "AcceleratorError: CUDA error: an illegal memory access",
        "hangs one": "no result within 2.5 s",
        "is_killed one": "killed by SIGKILL",
        "exits the end": "exit status 1: no device is left",
        "absent the start": "exit status 1: AttributeError: module 'tests.gpu_faults' has no attribute 'absent'",
    }
    for name in ("raises two", "hangs two", "is_killed two", "exits one", "passes one"):
        assert found[name]["status"] == PASSED, name
    before, after = (found[f"breaks_the_device {part}"]["numbers"]["pid"] for part in ("zero", "two"))
    assert before != after
    assert found["lacks_a_package one"]["reason"] == "no_such_package not installed"
    printed = capsys.readouterr().out
    assert "| hangs | one | FAILED |  | no result within 2.5 s |" in printed
    assert f"torch {version('torch')}" in printed
    assert "tools/gpu.py --out" in printed

    numbers_of_lines = len(path.read_text().splitlines())
    assert gpu.main(["--out", str(path), "--only", *names[:6], "passes"]) == 1
    again = path.read_text().splitlines()[numbers_of_lines:]
    assert [json.loads(line)["stage"] for line in again] == [""], "what has a result is not run again"


def test_a_budget_cuts_a_stage_off_and_the_next_call_goes_on_with_the_part(
    tmp_path: Path, fault_stages: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu.jsonl"
    fault_stages("takes_its_time", "passes")
    monkeypatch.setattr(gpu, "_LEAST_TIME", 0.1)
    monkeypatch.setenv("SECONDS_OF_A_PART", "60")
    assert gpu.main(["--out", str(path), "--budget", "2"]) == 0
    first = found_in(path)
    assert first["takes_its_time one"]["status"] == PASSED
    assert first["takes_its_time two"]["status"] == "started"
    assert "passes one" not in first
    table = path.with_suffix(".md").read_text()
    assert "| passes | | cut off | | the budget is spent: run the same command again |" in table

    monkeypatch.setenv("SECONDS_OF_A_PART", "0")
    assert gpu.main(["--out", str(path)]) == 0
    second = found_in(path)
    assert second["takes_its_time one"] == first["takes_its_time one"]
    assert {second[name]["status"] for name in ("takes_its_time two", "passes one")} == {PASSED}


def test_results_of_a_gpu_and_of_the_stand_in_are_not_mixed(
    tmp_path: Path, fault_stages: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.jsonl"
    fault_stages("passes")
    assert gpu.main(["--out", str(path)]) == 0
    assert gpu.main(["--out", str(path), "--pretend"]) == 2
    assert "has results of a GPU, not of the stand-in: give another --out" in capsys.readouterr().err


def test_without_a_gpu_every_stage_says_so(tmp_path: Path) -> None:
    parts = Parts(Results(tmp_path / "gpu.jsonl"), "step", is_pretended=False)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="torch finds no GPU; --pretend runs without one"):
            gpu_stages.step(parts)


# --- On the stand-in ---


def test_on_the_stand_in_every_stage_passes_without_the_packages_of_training_and_runs_with_them(tmp_path: Path) -> None:
    path, bare = tmp_path / "gpu.jsonl", tmp_path / "bare"
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n")

    def run(*python_path: Path) -> dict[str, dict[str, Any]]:
        command = [sys.executable, "tools/gpu.py", "--pretend", "--out", str(path)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, python_path))}
        ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=600)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return found_in(path)

    first = run(bare)
    assert {first[f"{stage} "]["status"] for stage in ("apis", "step", "kernels", "nccl", "families")} == {"ended"}
    skipped = {name: line["reason"] for name, line in first.items() if line["status"] == SKIPPED}
    assert skipped["runs LoRA"] == "pydantic, datasets, torchdata not installed"
    assert skipped["apis NF4"] == "bitsandbytes not installed"
    second = run()
    assert second["step bf16 on varlen, activations: selective"] == first["step bf16 on varlen, activations: selective"]
    passed = {name for name, line in second.items() if line["status"] == PASSED}
    assert {"runs LoRA", "runs deterministic, twice; killed and resumed", "apis NF4"} <= passed
    assert {"nccl a sharded step", "families Qwen 3.5 MoE", "kernels RoPE, bfloat16"} <= passed
    assert {name for name, line in second.items() if line["status"] == NOT_PRETENDED} == {
        *("apis 8-bit AdamW", "apis flex, 4 and 2 heads", "apis flex, 4 and 4 heads", "compile the start"),
        *("kernels tests/kernels", "runs 8bit", "runs Gemma 4", "runs full", "runs hybrid", "runs mixture", "runs nf4"),
        *("speed the start", "tests the start"),
    }


# --- A fault in each stage ---


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    with pretended_gpu():
        yield Parts(Results(tmp_path / "gpu.jsonl"), "stage", is_pretended=True)


def failed_and_passed(tmp_path: Path) -> tuple[dict[str, str], list[str]]:
    lines = Results(tmp_path / "gpu.jsonl").of_stage("stage")
    failed = {line["part"]: line["reason"] for line in lines if line["status"] == FAILED}
    return failed, [line["part"] for line in lines if line["status"] == PASSED]


def of_gpu_times(factor: float, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose result on the device is wrong by a factor."""

    def wrong(*args: Any, **options: Any) -> Any:
        out = function(*args, **options)
        return out * factor if isinstance(out, PretendedTensor) else out

    return wrong


def test_tf32_is_stated_with_the_device(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    numbers = gpu_stages.facts_of(gpu_stages.gpu_of(parts))
    assert numbers["precision of fp32 products"] == "high"


def test_the_calls_and_the_steps_see_an_attention_that_is_wrong_on_the_gpu(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels, "varlen_attn", of_gpu_times(1.1, attention_kernels.varlen_attn))
    for backend in ("varlen", "sdpa"):
        parts.run(backend, partial(gpu_stages._attention, backend, (4, 2), gpu_stages.gpu_of(parts)))
    gpu_stages.step(parts)
    failed, passed = failed_and_passed(tmp_path)
    assert list(failed) == ["varlen", "bf16 on varlen, activations: selective"]
    assert "and rounding gives at most 0.02" in failed["varlen"]
    assert passed == ["sdpa"]


def test_the_families_see_an_attention_that_is_wrong_on_the_gpu(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = of_gpu_times(1.01, sdpa_attention.attend_causally)
    monkeypatch.setattr(sdpa_attention, "attend_causally", wrong)
    parts.run("Llama 3.1", lambda: gpu_stages._family(FAMILIES["Llama 3.1"], gpu_stages.gpu_of(parts)))
    failed, _ = failed_and_passed(tmp_path)
    assert "the difference of the" in failed["Llama 3.1"]


def test_the_kernels_see_a_kernel_that_is_wrong_on_the_gpu(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sftron.kernels import rms_norm

    monkeypatch.setattr(rms_norm, "rms_norm", of_gpu_times(1.02, rms_norm.rms_norm))
    gpu_stages.kernels(parts)
    failed, passed = failed_and_passed(tmp_path)
    assert list(failed) == ["RMSNorm, float32", "RMSNorm, bfloat16"]
    assert len(passed) == 2 * (len(gpu_stages.KERNELS) - 1)


def test_a_collective_that_adds_twice_is_seen(parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(2))
    parts.run("collectives", lambda: gpu_stages._collectives(gpu_stages.gpu_of(parts)))
    failed, _ = failed_and_passed(tmp_path)
    assert failed["collectives"].startswith("ValueError: the sum of one rank in torch.float32 on cpu is not its own")


def test_a_run_that_fails_or_has_other_bits_is_seen(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(_: Any, folder: Path, name: str, __: Any, *, kill_in_step: int | None = None) -> int:
        if name == "run":
            return 3
        run = folder / "runs" / name
        (run / "latest").mkdir(parents=True, exist_ok=True)
        (run / "checkpoints/step-4").mkdir(parents=True, exist_ok=True)
        (run / "latest/model.safetensors").write_bytes(b"other" if name == "second" else b"same")
        lines = [json.dumps({"step": n, "loss": 9 - n, "grad_norm": 1.0}) for n in range(1, 9)]
        (run / "metrics.jsonl").write_text("\n".join(lines))
        (run / "result.json").write_text(json.dumps({"status": "completed"}))
        return -9 if kill_in_step else 0

    monkeypatch.setattr(gpu_stages, "_train", train)
    gpu_stages.runs(parts)
    failed, _ = failed_and_passed(tmp_path)
    assert failed["LoRA"].startswith("ValueError: sftron train ended with 3")
    expected = "ValueError: the weights of the run 'second' differ from those of the first"
    assert failed["deterministic, twice; killed and resumed"].startswith(expected)


def test_a_way_that_does_not_fit_is_named_and_the_next_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(names: list[str], options: Any, expected: Any) -> tuple[Any, Any]:
        if names == ["transformers, flattened"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")
        return {names[0]: {"tokens/s": 1e4, "mfu": None}}, torch.ones(1)

    monkeypatch.setattr(gpu_speed, "gpu_of", lambda _: torch.device("cpu"))
    monkeypatch.setattr(bench_step, "read_rows", lambda _: None)
    monkeypatch.setattr(bench_step, "measure", measure)
    # The shapes for a GPU take hours and all memory on a CPU.
    monkeypatch.setattr(bench_kernels, "Sizes", lambda: bench_kernels.QUICK)
    gpu_speed.speed(Parts(Results(tmp_path / "gpu.jsonl"), "stage", is_pretended=False))
    failed, passed = failed_and_passed(tmp_path)
    assert list(failed) == ["1B: transformers, flattened"]
    assert "OutOfMemoryError: CUDA out of memory" in failed["1B: transformers, flattened"]
    assert {"1B: sftron, minibatch", "1B: transformers, padded", "8B: sftron, LoRA", "8B: peft, flattened"} <= {*passed}
    monkeypatch.setattr(bench_step, "find_spec", lambda _: True)
    known = bench_step.ways_of(SimpleNamespace(gpu=True))  # pyright: ignore[reportArgumentType]
    assert {way for _, ways in gpu_speed.SHAPES.values() for way in ways} <= known.keys()


def test_a_compiled_block_that_computes_something_else_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_wrongly(block: torch.nn.Module) -> None:
        forward = block.forward
        block.forward = lambda *args: 1.3 * forward(*args)

    monkeypatch.setattr(gpu_speed, "gpu_of", lambda _: torch.device("cpu"))
    monkeypatch.setattr(ResidualBlock, "compile", compile_wrongly)
    monkeypatch.setattr(gpu_speed, "COMPILED", ("Llama 3.1",))
    gpu_speed.compiled(Parts(Results(tmp_path / "gpu.jsonl"), "stage", is_pretended=False))
    failed, _ = failed_and_passed(tmp_path)
    assert failed["Llama 3.1"].startswith("ValueError: the difference of the ")
