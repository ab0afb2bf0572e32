"""The learning rate at the points where everyone knows it, and which parameters decay."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sftron.train.optimizer import learning_rate_factor, make_adamw, set_learning_rate
from sftron.train.progress import DataSetCount, Progress, decay_progress


def factor(schedule: str, decay_progress: float, **options: float) -> float:
    options = {"step": 100, "warmup_steps": 10, "min_ratio": 0.1, "decay_share": 0.2} | options
    return learning_rate_factor(schedule, decay_progress=decay_progress, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        ("cosine", {0.0: 1.0, 0.25: 0.1 + 0.9 * (2 + math.sqrt(2)) / 4, 0.5: 0.55, 1.0: 0.1}),
        ("linear", {0.0: 1.0, 0.25: 0.775, 0.5: 0.55, 1.0: 0.1}),
        ("constant", {0.0: 1.0, 0.5: 1.0, 1.0: 1.0}),
        ("wsd", {0.0: 1.0, 0.5: 1.0, 0.8: 1.0, 0.9: 0.55, 1.0: 0.1}),
    ],
)
def test_a_schedule_passes_through_its_known_points_and_stays_at_its_end(
    schedule: str, points: dict[float, float]
) -> None:
    for progress, expected in points.items():
        assert factor(schedule, progress) == pytest.approx(expected), progress
    # Rows may be consumed beyond the last step's share, and a resume may lengthen a run.
    assert factor(schedule, 1.7) == factor(schedule, 1.0)
    assert factor(schedule, -0.1) == 1.0


def test_the_warm_up_rises_in_equal_steps_from_above_zero_to_the_peak() -> None:
    rates = [factor("cosine", 0.0, step=step, warmup_steps=4) for step in range(5)]

    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factor("cosine", 0.0, step=0, warmup_steps=0) == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_run_counted_in_steps_never_rises_again_and_nearly_reaches_its_end(schedule: str) -> None:
    progress, rates = Progress([]), []
    for step in range(100):
        progress.step = step
        share = decay_progress(progress, warmup_steps=10, train_steps=100, num_rows=None)
        rates.append(factor(schedule, share, step=step, min_ratio=0.0))

    assert rates[10] == 1.0
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[10:]))
    assert 0 < rates[-1] < 0.06


def test_a_run_counted_in_rows_decays_from_the_row_at_which_the_warm_up_ended() -> None:
    def share(rows: int) -> float:
        progress = Progress([DataSetCount(conversations=rows)], rows_at_peak=20)
        return decay_progress(progress, warmup_steps=3, train_steps=None, num_rows=120)

    assert [share(20), share(70), share(120)] == [0.0, 0.5, 1.0]


def test_matrices_decay_norms_and_biases_do_not_and_what_requires_no_gradient_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 4), nn.Linear(4, 5))
    model[3].requires_grad_(False)
    optimizer = make_adamw(model.named_parameters(), learning_rate=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    decayed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert decayed == {"0.weight", "2.weight"}
    for name, parameter in model.named_parameters():
        expected = before[name] * (1 - 0.5 * 0.1) if name in decayed else before[name]
        torch.testing.assert_close(parameter.detach(), expected)
    assert {(group["betas"], group["eps"]) for group in optimizer.param_groups} == {((0.8, 0.9), 1e-6)}


def test_an_update_is_one_kernel_a_group_in_fp32_and_reads_no_value() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    optimizer = make_adamw(model.named_parameters(), learning_rate=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()  # makes the state
    set_learning_rate(optimizer, 0.25)
    with _Recording() as recording:
        optimizer.step()
    assert recording.names.count("aten::_fused_adamw_") == len(optimizer.param_groups) == 2
    assert "aten::_local_scalar_dense" not in recording.names
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_update_never_waits_for_the_gpu() -> None:
    model = nn.Linear(3, 4).cuda()
    optimizer = make_adamw(model.named_parameters(), learning_rate=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    model(torch.ones(2, 3, device="cuda")).sum().backward()
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        set_learning_rate(optimizer, 0.25)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))
