"""The benchmarks run, and a way that computes something else is never timed. Nothing here looks at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sftron.train.measured_memory import LiveMemory
from tests.conftest import ROOT
from tools import bench_kernels, bench_step

OF_PEFT = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def test_every_kernel_case_is_timed(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert bench_kernels.main(["--device=cpu", "--quick", f"--json={path}"]) == 0
    cases = json.loads(path.read_text(encoding="utf-8"))
    titles = {case["title"].split(":")[0].split(",")[0] for case in cases}
    assert titles == {"RoPE", "Attention", "Loss and its gradients", "RMSNorm", "SwiGLU"}
    assert all(way["ms"] > 0 for case in cases for way in case["ways"].values())


@pytest.mark.parametrize("value", [1.001, 1.03, float("nan")])
def test_a_wrong_kernel_is_not_timed(value: float) -> None:
    exact = torch.ones(8)
    ways = {"sftron": lambda: [exact * value]}
    case = bench_kernels.Case(title="a case", unit="GB/s", work=1, reference=lambda: [exact], ways=ways)
    if value == 1.001:
        assert bench_kernels.measure(case, 2, torch.device("cpu"))["ways"].keys() == {"sftron"}
    else:
        with pytest.raises(bench_kernels.WrongResultError, match="a case: sftron: output 0 differs"):
            bench_kernels.measure(case, 2, torch.device("cpu"))


def test_what_does_not_fit_the_device_is_named_and_the_next_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, path = torch.ones(8), tmp_path / "report.json"
    written: list[str] = []

    def too_large() -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has 24 GiB.")

    def case(title: str, reference: bench_kernels.Run = lambda: [exact], **ways: bench_kernels.Run) -> Any:
        every: dict[str, bench_kernels.Run] = {"ours": lambda: [exact], **ways}
        return bench_kernels.Case(title=title, unit="GB/s", work=1, reference=reference, ways=every)

    def cases(*_: object) -> Iterator[bench_kernels.Case]:
        yield case("first", theirs=too_large)
        written.append(path.read_text(encoding="utf-8"))
        yield case("second", too_large)
        too_large()

    monkeypatch.setattr(bench_kernels, "CASES", {"rope": cases, "norm": lambda *_: iter([case("last")])})
    assert bench_kernels.main(["--device=cpu", "--quick", "--cases", "rope", "norm", f"--json={path}"]) == 1
    assert [each["title"] for each in json.loads(written[0])] == ["first"]
    found = {each["title"]: (list(each["ways"]), each["left out"]) for each in json.loads(path.read_text())}
    assert found == {
        "first": (["ours"], ["theirs, CUDA out of memory"]),
        "second": ([], ["the case, CUDA out of memory"]),
        "The inputs of rope": ([], ["the case, CUDA out of memory"]),
        "last": (["ours"], []),
    }


def test_the_reference_of_the_loss_needs_no_logits_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = replace(bench_kernels.QUICK, num_tokens=512, hidden=(8,))
    case = next(bench_kernels.loss_cases(sizes, torch.device("cpu")))
    expected, peaks = case.ways["F.cross_entropy on full logits"](), list[int]()
    for rows_at_once in (8, 512):
        monkeypatch.setattr(bench_kernels, "_ROWS_AT_ONCE", rows_at_once)
        with LiveMemory() as memory:
            found = case.reference()
        bench_kernels.check("the reference", found, expected)
        peaks.append(memory.peak)
    assert peaks[0] < peaks[1] / 2


def test_the_benchmarks_need_no_package_but_torch_triton_and_transformers() -> None:
    absent = ["pydantic", "datasets", "torchdata", "bitsandbytes", "peft", "pytest", "hypothesis"]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import tools.bench_step, tools.bench_kernels"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


@OF_PEFT
def test_every_way_to_train_is_timed(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert bench_step.main(["--quick", f"--json={path}"]) == 0
    results = json.loads(path.read_text(encoding="utf-8"))
    names = ["transformers, padded", "transformers, flattened", "sftron, minibatch", "sftron, pool"]
    names += ["peft, flattened", "sftron, LoRA", "sftron, LoRA, streamed"]
    assert list(results) == names
    assert all(each["tokens/s"] > 0 and each["computed / real"] >= 1 for each in results.values())
    waited = {
        name: each["s a step waited for weights"]
        for name, each in results.items()
        if len(each) > len(results[names[0]])
    }
    assert waited.keys() == {"sftron, LoRA, streamed"}
    assert waited[names[-1]] > 0


@OF_PEFT
def test_a_way_to_train_that_computes_something_else_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = bench_step.lay_out

    def leaking(*arguments: object, **options: object) -> object:
        return whole(*arguments, **{**options, "remove_cross_attention": False})  # pyright: ignore

    monkeypatch.setattr(bench_step, "lay_out", leaking)
    assert bench_step.main(["--quick"]) == 1
    assert "sftron, minibatch does not compute what transformers, padded does" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape=huge"], "shape 'huge' is not one of tiny"),
        (["--conversations=rows.jsonl"], "--conversations needs --model"),
        (["--quick", "--ways=none"], "--ways 'none' is not one of: transformers, padded"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_step.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "per_step"),
    [([], 8), (["--gpu"], 32), (["--gpu", "--per-step=16"], 16), (["--per-step=16"], 16), (["--quick"], 4)],
)
def test_conversations_a_step_are_as_given(arguments: list[str], per_step: int) -> None:
    assert bench_step.parse_arguments(arguments).per_step == per_step
