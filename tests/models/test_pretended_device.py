"""The pretended GPU itself: it refuses and counts what it says, and a fault that is put back into a step shows."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sftron.kernels.rms_norm import launch_normalize, rms_norm
from sftron.kernels.rope import launch_rotate
from sftron.models import routing
from sftron.train import step
from tests.models.reference import FAMILIES, make_native, make_reference
from tests.models.test_pretended_families import _batch, _step
from tests.pretended import PretendedGpu, pretended_gpu


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as gpu:
        yield gpu


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, cpu: x + cpu,
        lambda x, cpu: x.add_(cpu),
        lambda x, cpu: x @ cpu,
        lambda x, cpu: torch.cat([x, cpu]),
        lambda x, cpu: torch.cat([x, cpu[:0]]),
        lambda x, cpu: torch.where(x > 0, x, cpu),
        lambda x, cpu: torch.stack([x[0, 0], cpu[0, 0]]),
        lambda x, cpu: torch.mm(x, x, out=cpu),
        lambda x, cpu: x.index_select(0, torch.arange(2)),
        lambda x, cpu: rms_norm(x, cpu[0], 1e-6),
    ],
    ids=range(10),
)
def test_tensors_of_both_devices_are_refused(operation: Callable[..., Any], gpu: PretendedGpu) -> None:
    x, cpu = torch.ones(3, 3, device=gpu.device), torch.ones(3, 3)
    with pytest.raises(RuntimeError, match="same device"):
        operation(x, cpu)


def test_numbers_of_the_cpu_are_taken(gpu: PretendedGpu) -> None:
    x = torch.ones(3, device=gpu.device)
    assert (x * torch.tensor(2.0) + torch.ones(())).tolist() == [3, 3, 3]


def test_its_tensors_are_no_arrays(gpu: PretendedGpu) -> None:
    with pytest.raises(RuntimeError, match="numpy"):
        torch.ones(3, device=gpu.device).numpy()


def test_a_kernel_takes_no_pointer_to_a_tensor_of_the_cpu() -> None:
    with pretended_gpu(launches_kernels=True) as gpu:
        x, weight = torch.ones(3, 8, device=gpu.device), torch.ones(8, device=gpu.device)
        launch_normalize(x, weight, 1e-6)
        assert gpu.launches == {"normalize_kernel": 1}
        with pytest.raises(ValueError, match="cannot be accessed from Triton"):
            launch_normalize(x, weight.cpu(), 1e-6)
        heads = [torch.ones(3, 2, 8, device=gpu.device) for _ in range(3)]
        with pytest.raises(ValueError, match="cannot be accessed from Triton"):
            launch_rotate(heads, heads, torch.arange(3), torch.ones(4, 8, device=gpu.device), inverse=False)


WAITS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], bool]] = {
    "a value": (lambda x, cpu, pinned: x[0].item(), True),
    "a bool": (lambda x, cpu, pinned: bool(x[0] > 0), True),
    "a list": (lambda x, cpu, pinned: x.tolist(), True),
    "a copy to the CPU": (lambda x, cpu, pinned: x.cpu(), True),
    "a copy into memory that is not pinned": (lambda x, cpu, pinned: cpu.copy_(x, non_blocking=True), True),
    "a copy into pinned memory": (lambda x, cpu, pinned: pinned.copy_(x, non_blocking=True), False),
    "a blocking copy into pinned memory": (lambda x, cpu, pinned: pinned.copy_(x), True),
    "a copy from memory that is not pinned": (lambda x, cpu, pinned: cpu.to(x.device, non_blocking=True), True),
    "a copy from pinned memory": (lambda x, cpu, pinned: pinned.to(x.device, non_blocking=True), False),
    "a blocking copy from pinned memory": (lambda x, cpu, pinned: pinned.to(x.device), True),
    "a new tensor with values": (lambda x, cpu, pinned: torch.tensor([1, 2], device=x.device), True),
    "a new tensor of zeros": (lambda x, cpu, pinned: torch.zeros(3, device=x.device), False),
    "a boolean index": (lambda x, cpu, pinned: x[x > 0], True),
    "an index of the CPU": (lambda x, cpu, pinned: x[torch.tensor([0, 1])], True),
    "an index": (lambda x, cpu, pinned: x[torch.zeros(2, dtype=torch.long, device=x.device)], False),
    "the indices that are not zero": (lambda x, cpu, pinned: x.nonzero(), True),
    "repeats": (lambda x, cpu, pinned: x.repeat_interleave((x > 0).long()), True),
    "repeats to a known size": (lambda x, cpu, pinned: x.repeat_interleave((x > 0).long(), output_size=3), False),
    "a product": (lambda x, cpu, pinned: x * x, False),
    "another type": (lambda x, cpu, pinned: x.to(torch.bfloat16), False),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_for_the_device_is_counted(name: str, gpu: PretendedGpu) -> None:
    operation, waits = WAITS[name]
    x = torch.ones(3, device=gpu.device)
    gpu.reset()
    operation(x, torch.ones(3), torch.ones(3).pin_memory())
    assert sum(gpu.waits.values()) == waits, gpu.waits


# --- Faults that are put back ---


def _waits_of_step(gpu: PretendedGpu, family: str = "Llama 3", *, pinned: bool = True) -> int:
    """Returns the number of waits in a step after the first."""
    model = make_native(make_reference(**FAMILIES[family]), compute_dtype=torch.bfloat16).to(gpu.device)
    batch = _batch(model)
    batch = batch.pin_memory() if pinned else batch
    _step(model, batch)
    gpu.reset()
    _step(model, batch)
    return gpu.waits.total()


def test_a_step_waits_once(gpu: PretendedGpu) -> None:
    assert _waits_of_step(gpu) == 1


@pytest.mark.parametrize(("capability", "num_reads"), [((9, 0), 0), ((8, 9), 1)])
def test_each_layer_of_a_mixture_waits_once_more_where_grouped_products_have_no_kernel(
    capability: tuple[int, int], num_reads: int, gpu: PretendedGpu
) -> None:
    gpu.capability = capability
    num_layers, num_batches = 2, 2
    assert _waits_of_step(gpu, "Mixtral") == 1 + num_reads * num_layers * num_batches


def test_an_empty_table_of_routers_on_the_cpu_ends_the_step(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    init = routing.Routing.__init__

    def on_cpu(self: routing.Routing, *args: Any) -> None:
        init(self, *args)
        self.table_L2E = self.table_L2E.cpu()

    monkeypatch.setattr(routing.Routing, "__init__", on_cpu)
    with pytest.raises(RuntimeError, match="same device"):
        _waits_of_step(gpu)


def test_batches_that_are_not_pinned_are_counted(gpu: PretendedGpu) -> None:
    assert _waits_of_step(gpu, pinned=False) > 10


def test_reading_a_value_in_the_step_is_counted(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = step.whole

    def read(tensor: Tensor) -> Tensor:
        assert tensor.item() > 0
        return whole(tensor)

    monkeypatch.setattr(step, "whole", read)
    assert _waits_of_step(gpu) == 2


# numpy's, of the interpreter, which computes the padding between rows too
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_steps_by_the_kernels_themselves_are_those_of_the_expressions() -> None:
    batch = _batch(make_native(make_reference(**FAMILIES["Llama 3"])))
    results = []
    for launches_kernels in (False, True):
        with pretended_gpu(launches_kernels=launches_kernels) as gpu:
            on_gpu = make_native(make_reference(**FAMILIES["Llama 3"])).to(gpu.device)
            results.append(_step(on_gpu, batch))
            assert bool(gpu.launches) == launches_kernels
    assert {"normalize_kernel", "rotate_kernel", "swiglu_kernel", "cross_entropy_gradient_kernel"} <= {*gpu.launches}
    assert (results[0].loss, results[0].grad_norm) == pytest.approx((results[1].loss, results[1].grad_norm), rel=1e-5)
