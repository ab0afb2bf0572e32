"""model.compile: blocks compile around attention, once, and the whole step runs without waiting for the device."""

import copy
import pickle
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from sftron.models.architecture import LlamaConfig
from sftron.models.llama import ACTIVATION_CHECKPOINTING, LlamaForSFT
from sftron.models.loss import weighted_loss_sum
from tests.conftest import rest_nightly
from tests.models.inductor_code import compile_for_cuda, gradients_in_python
from tests.models.memory import attend
from tests.models.reference import FAMILIES, TINY, make_native, make_reference, pack

T = 60

# Of torch's own compiler: it looks at the gradient of every tensor that it is given, and makes a Function to trace it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", rest_nightly(ACTIVATION_CHECKPOINTING, ["selective"]))
def test_differently_packed_batches_of_one_size_compile_once(mode: str) -> None:
    compiled = _compile(make_native(make_reference(num_hidden_layers=3), activation_checkpointing=mode), "eager")
    for seed in range(20):
        _step(compiled, _batch(seed), seed)
        # One graph before attention and one after it, for all layers.
        assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("mode", rest_nightly(ACTIVATION_CHECKPOINTING, ["full"]))
def test_graphs_traced_with_their_gradients_give_the_same_bits(mode: str) -> None:
    reference = make_reference(attention_bias=True, mlp_bias=True)
    plain = make_native(reference, activation_checkpointing=mode, compute_dtype=torch.bfloat16)
    compiled = _compile(plain, "aot_eager")
    assert _step(compiled, _batch(0), 0).equal(_step(plain, _batch(0), 0))
    for (name, found), expected in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert found.grad.equal(expected.grad), name


@pytest.mark.nightly
@pytest.mark.parametrize(
    "family",
    ["Mistral 0.1", "Gemma 2", "Cohere 2", "OLMo 3", "Phi 4 mini", "Apertus", "Qwen 3.5", "Gemma 4 E2B", "LFM2"],
)
def test_compiled_blocks_with_windows_and_of_hybrids_give_the_same_bits(family: str) -> None:
    plain = make_native(make_reference(**FAMILIES[family]))
    compiled = _compile(plain, "aot_eager")
    for seed in (0, 1):
        assert _step(compiled, _batch(seed), seed).equal(_step(plain, _batch(seed), seed))
    for (name, found), expected in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        if found.requires_grad:
            assert found.grad is not None
            assert found.grad.equal(expected.grad), name


# Sizes for which inductor tiles reductions as it does for real models.
WIDE: dict[str, Any] = {
    **TINY,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 1024,
    "initializer_range": 0.02,
}

# One of each kind of block, of attention and of MLP. Mixtures of experts are refused (train/build_model.py).
KINDS = ["Llama 3.1", "Qwen 3.5", "LFM2", "Gemma 2", "Gemma 4 E2B", "OLMo 2", "Cohere", "Apertus"]
KINDS += ["DeepSeek V3 without experts"]


@pytest.mark.parametrize("family", rest_nightly(["Llama 3.1", "Qwen 3.5"], ["Llama 3.1"]))
def test_gradients_in_python_are_those_of_the_engine(family: str) -> None:
    """With them, graphs for CUDA are traced without a GPU."""
    model = make_native(make_reference(**FAMILIES[family]))
    total = model(*_batch(0)).square().sum()
    parameters = [*model.model.parameters()]
    expected = torch.autograd.grad([total], parameters, retain_graph=True)
    found = gradients_in_python([total], parameters)
    assert all(each.equal(wanted) for each, wanted in zip(found, expected, strict=True))


@pytest.mark.nightly
@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a CUDA build of torch; see make versions-torch")
@pytest.mark.parametrize("family", KINDS)
def test_inductor_generates_code_for_cuda_that_compiles_to_machine_code(family: str, tmp_path: Path) -> None:
    """It calls our operators where there are any, and all weights of the blocks have gradients."""
    own = {"head_dim": 128} if "head_dim" in FAMILIES[family] else {}
    code = compile_for_cuda({"model_type": "llama"} | WIDE | FAMILIES[family] | own, "selective", tmp_path)
    # Before attention and after it, forward and backward; layers of one kind share them.
    assert len(code.graphs) >= 4
    assert len(code.graphs) % 2 == 0
    for operator in ("rotate_heads", "rotate_heads_backward"):
        assert any(f"torch.ops.sftron.{operator}.default(" in graph for graph in code.graphs), operator
    assert len(code.kernels) > 5
    assert min(code.kernels.values()) > 1000
    assert code.without_gradient == []


def test_generation_runs_the_blocks_as_they_are() -> None:
    compiled = _compile(make_native(make_reference()), "eager")
    with torch.inference_mode():
        compiled(*_batch(0))
    assert not counters["stats"]


def test_a_copy_of_a_compiled_model_computes_with_its_own_weights_and_can_be_pickled() -> None:
    plain = make_native(make_reference())
    compiled = _compile(plain, "eager")
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    expected = _step(compiled, _batch(0), 0)
    copies = [copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))]
    with torch.no_grad():
        for parameter in compiled.model.layers.parameters():
            parameter.mul_(3)
    assert not _step(compiled, _batch(0), 0).equal(expected)
    for each in copies:
        each.zero_grad()
        assert _step(each, _batch(0), 0).equal(expected)
        assert all(parameter.grad is not None for parameter in each.parameters())


# The tensors have no data, so whatever asks for a value raises.
@pytest.mark.parametrize("mode", ACTIVATION_CHECKPOINTING)
def test_forward_backward_and_loss_never_ask_for_a_value(mode: str) -> None:
    with FakeTensorMode():
        model = LlamaForSFT(LlamaConfig.from_hf({"model_type": "llama", **TINY}), activation_checkpointing=mode)
        _fake_loss(model).backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ACTIVATION_CHECKPOINTING)
def test_forward_and_backward_never_wait_for_the_gpu(mode: str) -> None:
    options = {"attention": "varlen", "compute_dtype": torch.bfloat16, "activation_checkpointing": mode}
    model = make_native(make_reference(hidden_size=256, num_attention_heads=4), **options).cuda()
    *tensors, max_seqlen = _batch(0)
    tensors = [tensor.cuda() for tensor in tensors]
    rows, labels, weights = (x.cuda() for x in _targets(tensors[0].cpu(), 0))
    for sync_debug_mode in ("default", "error"):  # the first step compiles kernels and makes the RoPE table
        torch.cuda.set_sync_debug_mode(sync_debug_mode)
        try:
            hidden = model(*tensors, max_seqlen)
            weighted_loss_sum(hidden, model.head, rows, labels, weights)[0].backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _compile(model: LlamaForSFT, backend: str) -> LlamaForSFT:
    model = copy.deepcopy(model)
    for block in model.model.layers:
        block.compile(backend=backend)
    return model


def _batch(seed: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """T tokens; number and lengths of documents vary."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (1 + seed % 5,), generator=generator).tolist()
    return pack([*lengths, T - sum(lengths)], seed)


def _targets(input_ids: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.arange(0, len(input_ids), 1 + seed % 3)
    return rows, input_ids[rows], torch.ones(len(rows))


def _step(model: LlamaForSFT, batch: tuple[Tensor, Tensor, Tensor, int], seed: int) -> Tensor:
    loss, _ = weighted_loss_sum(model(*batch), model.head, *_targets(batch[0], seed))
    loss.backward()
    return loss.detach()


def _fake_loss(model: LlamaForSFT) -> Tensor:
    ids, rows = (torch.zeros(n, dtype=torch.int64) for n in (T, 20))
    hidden = model.attend_with(repeat(attend), ids, ids, torch.bfloat16)
    return weighted_loss_sum(hidden, model.head, rows, rows, torch.ones(20))[0]
