"""The learning rate at the points where everyone knows it, and which parameters decay."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sftron.train.optimizer import learning_rate_factor, make_by_name, set_learning_rate
from sftron.train.progress import DataSetCount, Progress
from sftron.train.run import schedule_progress


def factor(schedule: str, decay: float, **options: float) -> float:
    return learning_rate_factor(
        schedule, decay=decay, **{"warm_up": 1.0, "min_ratio": 0.1, "decay_share": 0.2} | options
    )


def rates(
    num_steps: int,
    *,
    warmup_steps: float,
    rows_per_step: int = 4,
    by_rows: bool = False,
    schedule: str = "cosine",
    min_ratio: float = 0.0,
) -> list[float]:
    """The factors of a run's steps, whose length is given in steps or in rows."""
    progress, found = Progress([DataSetCount()]), []
    for step in range(num_steps):
        progress.step, progress.datasets[0].conversations = step, step * rows_per_step
        if step == warmup_steps:
            progress.rows_at_peak = progress.rows
        warm_up, decay = schedule_progress(
            progress,
            warmup_steps=warmup_steps,
            train_steps=None if by_rows else num_steps,
            num_rows=num_steps * rows_per_step if by_rows else None,
            step_rows=rows_per_step,
        )
        found.append(factor(schedule, decay, warm_up=warm_up, min_ratio=min_ratio))
    return found


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


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("warmup_steps", [4, 4 / 20])
def test_the_warm_up_rises_in_equal_steps_from_above_zero_to_the_peak(warmup_steps: float, by_rows: bool) -> None:
    assert rates(20, warmup_steps=warmup_steps, by_rows=by_rows)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates(20, warmup_steps=type(warmup_steps)(0), by_rows=by_rows)[0] == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup_steps", [10, 0.1])
def test_a_run_counted_in_steps_never_rises_again_and_nearly_reaches_its_end(
    schedule: str, warmup_steps: float
) -> None:
    found = rates(100, warmup_steps=warmup_steps, schedule=schedule)
    assert found[10] == 1.0
    assert all(later <= earlier for earlier, later in itertools.pairwise(found[10:]))
    assert 0 < found[-1] < 0.06


@pytest.mark.parametrize("warmup_steps", [30, 0.3, 0.037, 0.999])
def test_a_run_counted_in_rows_has_the_rates_of_one_counted_in_steps(warmup_steps: float) -> None:
    expected = rates(100, warmup_steps=warmup_steps)
    assert rates(100, warmup_steps=warmup_steps, by_rows=True) == pytest.approx(expected)
    assert max(expected) > 0.9


@pytest.mark.parametrize("num_steps", [1, 2, 3, 10])
def test_a_short_run_warms_up_for_a_share_of_it_and_comes_near_its_peak(num_steps: int) -> None:
    found = rates(num_steps, warmup_steps=0.05)
    assert found[0] == pytest.approx(1 / (1 + 0.05 * num_steps))
    assert max(found) > 0.85
    assert all(0 < rate <= 1 for rate in found)


def test_a_run_counted_in_rows_decays_from_the_row_at_which_the_warm_up_ended() -> None:
    def share(rows: int) -> float:
        progress = Progress([DataSetCount(conversations=rows)], rows_at_peak=20)
        return schedule_progress(progress, warmup_steps=3, train_steps=None, num_rows=120, step_rows=5)[1]

    assert [share(20), share(70), share(120)] == [0.0, 0.5, 1.0]


def test_matrices_decay_norms_and_biases_do_not_and_what_requires_no_gradient_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 4), nn.Linear(4, 5))
    model[3].requires_grad_(False)
    optimizer = make_by_name(model.named_parameters(), learning_rate=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
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


def test_each_group_has_the_rate_of_the_schedule_times_its_factor() -> None:
    optimizer = make_by_name(
        nn.Linear(3, 4).named_parameters(), learning_rate=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1
    )
    optimizer.param_groups[1]["learning_rate_factor"] = 3.0
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.75]


def test_an_update_is_one_kernel_a_group_in_fp32_and_reads_no_value() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    optimizer = make_by_name(model.named_parameters(), learning_rate=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
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
    optimizer = make_by_name(model.named_parameters(), learning_rate=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
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
