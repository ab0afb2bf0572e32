"""Each backend against the definition in fp64, and each document against its neighbors. Those of a GPU run on one."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from sftron.models import attention
from sftron.models.attention import (
    BACKENDS,
    FlexAttention,
    attend_documents,
    pad_documents,
    reason_against,
    resolve_attention,
)
from sftron.models.attention_kernels import build_block_mask
from tests.models.conftest import bounds, random_heads, softmax_attention
from tests.models.memory import LiveMemory

CPU = torch.device("cpu")
LENGTHS = [130, 1, 0, 299, 70, 0]
"""Beyond a block of 128, a single token, one that bf16 on a CPU computes as bf16, and empty ones."""

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = [
    pytest.param("sdpa", "cpu", torch.float32),
    pytest.param("sdpa", "cpu", torch.bfloat16),
    pytest.param("varlen", "cpu", torch.float32, id="varlen-around-the-kernel"),
    *(pytest.param(name, "cuda", torch.bfloat16, marks=ON_GPU) for name in BACKENDS),
]


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Flash attention adds up gradients in any order otherwise."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def _inputs(name: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    if device == "cuda" and (reason := reason_against(name, torch.device(device), dtype, 64)):
        pytest.skip(reason)
    return random_heads(sum(LENGTHS), head_dim=64 if device == "cuda" else 16, dtype=dtype, device=device)


def _outputs_and_gradients(name: str, inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    attend = attend_documents(name, bounds(LENGTHS, str(inputs[0].device)), max(LENGTHS), sum(LENGTHS))
    out = attend(*inputs)
    return [out, *torch.autograd.grad(out, inputs, weights)]


@pytest.mark.parametrize(("name", "device", "dtype"), CASES)
def test_a_backend_and_its_gradients_are_those_of_softmax_over_the_documents_past(
    name: str, device: str, dtype: torch.dtype, varlen_on_cpu: None
) -> None:
    inputs = _inputs(name, device, dtype)
    weights = torch.randn_like(inputs[0])
    found = _outputs_and_gradients(name, inputs, weights)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    out = softmax_attention(LENGTHS, *doubles)
    exact = [out, *torch.autograd.grad(out, doubles, weights.double())]
    for native, expected in zip(found, exact, strict=True):
        assert native.shape == expected.shape
        assert native.dtype == dtype
        distance = (native.double() - expected).norm() / expected.norm()
        assert distance < (1e-6 if dtype == torch.float32 else 1e-2), distance


@pytest.mark.parametrize(("name", "device", "dtype"), CASES)
@pytest.mark.parametrize("changed", [0, 3, 4])
def test_what_happens_in_a_document_changes_no_bit_of_another_on_either_side(
    name: str, device: str, dtype: torch.dtype, changed: int, deterministic: None, varlen_on_cpu: None
) -> None:
    inputs = _inputs(name, device, dtype)
    weights = torch.randn_like(inputs[0])
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(device) == changed
    before = _outputs_and_gradients(name, inputs, weights)
    # Kernels weigh the rows next to a document by 0, and 0 x NaN is NaN; a step with a NaN is left out as a whole.
    for change in (1.0, torch.nan) if name == "sdpa" else (1.0,):
        changed_inputs = [torch.where(document[:, None, None], x + change, x).detach().requires_grad_() for x in inputs]
        after = _outputs_and_gradients(name, changed_inputs, weights)
        for old, new in zip(before, after, strict=True):
            assert old[~document].equal(new[~document])
            assert not old[document].equal(new[document])


def _flex(cu_seqlens: Tensor, num_tokens: int) -> FlexAttention:
    """Its mask, evaluated score by score, as on a CPU there is no kernel with a backward pass."""
    return FlexAttention(torch.compile(flex_attention, backend="eager"), build_block_mask(cu_seqlens, num_tokens))


def test_the_mask_of_flex_is_softmax_over_the_documents_past() -> None:
    inputs = [x.detach() for x in random_heads(sum(LENGTHS))]
    found = _flex(bounds(LENGTHS), sum(LENGTHS))(*inputs)
    torch.testing.assert_close(found.double(), softmax_attention(LENGTHS, *inputs), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("lengths", [LENGTHS, [128] * 3, [1] * 130 + [510], [5], [127, 129, 384], [700, 0, 1]])
def test_the_blocks_that_flex_skips_or_takes_whole_are_those_of_the_mask_itself(lengths: list[int]) -> None:
    native = build_block_mask(bounds(lengths), sum(lengths))
    # Evaluates the mask at every pair of tokens.
    reference = create_block_mask(native.mask_mod, None, None, sum(lengths), sum(lengths), device="cpu")
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, expected_counts = (getattr(mask, f"{kind}_num_blocks")[0, 0].tolist() for mask in (native, reference))
        assert counts == expected_counts, kind
        listed, expected_listed = (getattr(mask, f"{kind}_indices")[0, 0].tolist() for mask in (native, reference))
        for count, row, expected_row in zip(counts, listed, expected_listed, strict=True):
            assert row[:count] == expected_row[:count], kind


def test_a_flex_mask_of_32768_tokens_is_made_without_looking_at_pairs_of_tokens() -> None:
    with LiveMemory() as memory:
        mask = build_block_mask(bounds([20000, 12768]), 32768)
    assert memory.largest <= 256 * 257 * 8
    assert mask.shape[-2:] == (32768, 32768)


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, 2), (torch.float32, 130), (torch.bfloat16, 40)])
def test_through_a_window_a_token_sees_that_many_of_its_document(dtype: torch.dtype, window: int) -> None:
    inputs = random_heads(sum(LENGTHS), dtype=dtype)
    weights = torch.randn_like(inputs[0])
    out = attend_documents("sdpa", bounds(LENGTHS), max(LENGTHS), sum(LENGTHS))(*inputs, window=window)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    exact = softmax_attention(LENGTHS, *doubles, window=window)
    found = [out, *torch.autograd.grad(out, inputs, weights)]
    for native, expected in zip(found, [exact, *torch.autograd.grad(exact, doubles, weights.double())], strict=True):
        assert (native.double() - expected).norm() < (1e-6 if dtype == torch.float32 else 1e-2) * expected.norm()


@pytest.mark.parametrize("name", ["sdpa", "varlen", "flex", "flash_attn_2"])
def test_a_backend_refuses_a_window_or_sinks_that_it_does_not_implement(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "flash_attn_function", lambda version: _flash_on_cpu)
    monkeypatch.setattr(attention, "compiled_flex_attention", lambda: flex_attention)
    attend = attend_documents(name, bounds([6]), 6, 6)
    backend = name.removesuffix("_2")
    if name != "sdpa":
        with pytest.raises(ValueError, match=f"'{backend}' has no sliding windows, but one of 3 tokens"):
            attend(*random_heads(6), window=3)
    with pytest.raises(ValueError, match=f"'{backend}' has no attention sinks, but 6 were given"):
        attend(*random_heads(6), sinks_N=torch.zeros(6))


def _flash_on_cpu(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, **_: Any) -> Tensor:
    """The package's flash_attn_varlen_func."""
    return attention.SdpaAttention(tuple(length for length in cu_seqlens_q.diff().tolist() if length))(q, k, v)


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 8 * 16), torch.nn.Linear(4 * 16, 32)

    def forward(self, x_TH: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        q, k, v = self.qkv(x_TH).unflatten(-1, (8, 16)).split([4, 2, 2], dim=1)
        return x_TH + self.out(attend(q, k, v).flatten(1))


# torch's own look at a tensor between two graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("name", "device", "compiler", "num_graphs"),
    [
        ("sdpa", "cpu", "eager", 2),
        ("flash_attn_2", "cpu", "eager", 2),
        ("varlen", "cpu", "eager", 1),
        ("flex", "cpu", "eager", 1),
        *(pytest.param(name, "cuda", "inductor", 1, marks=ON_GPU) for name in ("varlen", "flex")),
    ],
)
def test_a_compiled_block_is_not_compiled_again_for_batches_packed_otherwise(
    name: str, device: str, compiler: str, num_graphs: int, varlen_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(attention, "compiled_flex_attention", lambda: flex_attention)
    monkeypatch.setattr(attention, "flash_attn_function", lambda version: _flash_on_cpu)
    counter = CompileCounterWithBackend(compiler)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    block = _Block().to(device, dtype).requires_grad_((name, device) != ("flex", "cpu"))
    compiled = torch.compile(block, backend=counter)
    x_TH = torch.randn(256, 32, device=device, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    shapes = set()
    for batch in range(50):
        # From about 3 to 60 documents, so that both buckets vary.
        cuts = torch.randint(1, 256, (2 ** (1 + batch % 6),), generator=generator).unique().tolist()
        cu_seqlens = torch.tensor([0, *cuts, 256], dtype=torch.int32, device=device)
        longest = int(cu_seqlens.diff().max())
        shapes.add((len(pad_documents(cu_seqlens)), longest > 128))
        found = compiled(x_TH, attend_documents(name, cu_seqlens, longest, 256))
        assert counter.frame_count == num_graphs, batch
        if batch % 10 == 0:
            expected = block(x_TH, attend_documents("sdpa", cu_seqlens, longest, 256))
            tolerance = 1e-5 if device == "cpu" else 2e-2
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
            if found.requires_grad:
                found.sum().backward()
    assert len(shapes) > 3


def test_bounds_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_seqlen is 3, .* 4 tokens"):
        attend_documents("sdpa", bounds([2, 4]), 3, 6)
    for name in BACKENDS:
        with pytest.raises(ValueError, match=r"cu_seqlens is int64, .* int32: call cu_seqlens.int\(\)"):
            attend_documents(name, bounds([2, 4]).long(), 4, 6)


def test_auto_is_sdpa_where_nothing_faster_is_correct_and_a_backend_that_cannot_run_is_an_error() -> None:
    assert resolve_attention("auto", CPU, torch.bfloat16, 64) == "sdpa"
    assert resolve_attention("sdpa", CPU, torch.float32, 64) == "sdpa"
    for name in ("varlen", "flash_attn", "flex"):
        message = f"'{name}' cannot run here: it needs a CUDA device, this is 'cpu'.*. Choose 'auto', or 'sdpa'"
        with pytest.raises(ValueError, match=message):
            resolve_attention(name, CPU, torch.bfloat16, 64)
    with pytest.raises(ValueError, match="'flash' is not one of auto, sdpa, varlen, flash_attn, flex"):
        resolve_attention("flash", CPU, torch.bfloat16, 64)
