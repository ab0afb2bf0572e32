"""Each backend against the definition in fp64, and each document against its neighbors. Those of a GPU run on one."""

from collections.abc import Callable, Iterator
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from sftron.models import attention, sdpa_attention
from sftron.models.architecture import Layer
from sftron.models.attention import (
    BACKENDS,
    FlexAttention,
    attend_documents,
    pad_documents,
    reason_against,
    resolve_attention,
)
from sftron.models.attention_kernels import Scores, build_block_mask
from sftron.models.sdpa_attention import attend_causally
from tests.conftest import rest_nightly
from tests.models.conftest import bounds, random_heads, softmax_attention
from tests.models.memory import LiveMemory
from tests.models.reference import FAMILIES, make_native, make_reference, pack

CPU = torch.device("cpu")
LENGTHS = [130, 1, 0, 299, 70, 0]
"""Beyond a block of 128, a single token, one that bf16 on a CPU computes as bf16, and empty ones."""

WINDOWS = (1, 2, 69, 70, 71, 129, 130, 299, None)
"""Around the lengths of documents and blocks; 1 is the token itself."""
SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.1},
    "capped": {"softcap": 1.5},
    "capped and scaled": {"scale": 1.0, "softcap": 3.0},
}

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


@pytest.mark.parametrize(
    "layer", [Layer(window=70), Layer(window=130, scale=0.1), Layer(softcap=1.5), Layer(sinks=True)]
)
@pytest.mark.parametrize(("name", "device", "dtype"), [case for case in CASES if "cuda" in case.values])
def test_every_option_of_a_backend_on_a_gpu_is_that_of_the_definition(
    name: str, device: str, dtype: torch.dtype, layer: Layer
) -> None:
    if reason := reason_against(name, torch.device(device), dtype, 64, layer):
        pytest.skip(reason)
    options: dict[str, Any] = {"window": layer.window, "scale": layer.scale, "softcap": layer.softcap}
    inputs = _inputs(name, device, dtype)
    leaves = [*inputs, *([torch.linspace(-2, 3, 6, device=device, requires_grad=True)] if layer.sinks else [])]
    weights = torch.randn_like(inputs[0])
    attend = attend_documents(name, bounds(LENGTHS, device), max(LENGTHS), sum(LENGTHS))
    out = attend(*inputs, Scores(sinks_N=leaves[3] if layer.sinks else None, **options))
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    exact = softmax_attention(LENGTHS, *doubles[:3], sinks_N=doubles[3] if layer.sinks else None, **options)
    found = [out, *torch.autograd.grad(out, leaves, weights)]
    expected = [exact, *torch.autograd.grad(exact, doubles, weights.double())]
    assert all(_distance(*each) < 1.5e-2 for each in zip(found, expected, strict=True))


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


@pytest.mark.parametrize(
    ("window", "scores", "has_sinks"),
    [(None, "plain", False), (1, "scaled", True), (130, "plain", True), (70, "capped and scaled", True)],
)
def test_every_option_of_flex_is_that_of_the_definition(window: int | None, scores: str, has_sinks: bool) -> None:
    """Evaluated score by score, as on a CPU there is no kernel with a backward pass."""
    torch._dynamo.reset()
    inputs = [x.detach() for x in random_heads(sum(LENGTHS))]
    attend = FlexAttention.of(torch.compile(flex_attention, backend="eager"), bounds(LENGTHS), sum(LENGTHS))
    sinks_N = torch.linspace(-2, 3, 6) if has_sinks else None
    options: dict[str, Any] = {"window": window, "sinks_N": sinks_N, **SCORES[scores]}
    expected = softmax_attention(LENGTHS, *inputs, **options)
    torch.testing.assert_close(attend(*inputs, Scores(**options)).double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 2, 129, 130, 255, 256])
@pytest.mark.parametrize("lengths", [LENGTHS, [128] * 3, [1] * 130 + [510], [5], [127, 129, 384], [700, 0, 1]])
def test_the_blocks_that_flex_skips_or_takes_whole_are_those_of_the_mask_itself(
    lengths: list[int], window: int | None
) -> None:
    native = build_block_mask(bounds(lengths), sum(lengths), window)
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


def _distance(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected).norm() / expected.norm()).detach())


OF_SCORES = list(product(SCORES, (False, True)))
OPTIONS = list(product(WINDOWS, OF_SCORES))
FAST = list(zip(WINDOWS, cycle(OF_SCORES)))
"""Each window once, and each pair of scores and sinks; the other products are nightly."""


@pytest.mark.parametrize("option", rest_nightly(OPTIONS, FAST), ids=str)
def test_every_option_of_sdpa_is_that_of_the_definition_with_all_gradients(
    option: tuple[int | None, tuple[str, bool]],
) -> None:
    window, (scores, has_sinks) = option
    options: dict[str, Any] = {"window": window, **SCORES[scores]}
    sinks_N = torch.linspace(-2, 3, 6, requires_grad=True) if has_sinks else None
    for dtype in (torch.float32, torch.bfloat16):
        inputs = random_heads(sum(LENGTHS), dtype=dtype)
        weights = torch.randn_like(inputs[0])
        attend = attend_documents("sdpa", bounds(LENGTHS), max(LENGTHS), sum(LENGTHS))
        out = attend(*inputs, Scores(sinks_N=sinks_N, **options))
        leaves = inputs + ([] if sinks_N is None else [sinks_N])
        found = [out, *torch.autograd.grad(out, leaves, weights)]
        doubles = [x.detach().double().requires_grad_() for x in leaves]
        exact = softmax_attention(LENGTHS, *doubles[:3], sinks_N=doubles[3] if has_sinks else None, **options)
        expected = [exact, *torch.autograd.grad(exact, doubles, weights.double())]
        assert [x.dtype for x in found[:4]] == [dtype] * 4
        if window == 1 and not has_sinks:
            # A token that attends to itself alone has no other weight than 1.
            assert not any(x.any() for x in expected[1:3])
            found, expected = found[::3], expected[::3]
        distances = [_distance(*each) for each in zip(found, expected, strict=True)]
        assert max(distances) < (3e-6 if dtype == torch.float32 else 1.5e-2), distances


@pytest.mark.parametrize("options", [{"window": 1}, {"window": 70}, {"window": 299}, {"scale": 0.1}])
def test_varlen_is_given_the_window_and_the_scale(options: dict[str, Any], varlen_on_cpu: None) -> None:
    inputs = random_heads(sum(LENGTHS))
    weights = torch.randn_like(inputs[0])
    results = []
    for name in ("sdpa", "varlen"):
        out = attend_documents(name, bounds(LENGTHS), max(LENGTHS), sum(LENGTHS))(*inputs, Scores(**options))
        results.append([out, *torch.autograd.grad(out, inputs, weights)])
    assert all(found.equal(expected) for found, expected in zip(*results, strict=True))


@pytest.mark.parametrize("options", [{"window": 40}, {"window": 40, "softcap": 2.0}, {"sinks_N": torch.ones(6)}])
def test_no_option_of_sdpa_lets_a_document_change_a_bit_of_another(options: dict[str, Any]) -> None:
    inputs = random_heads(sum(LENGTHS))
    weights = torch.randn_like(inputs[0])
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)) == 3
    results = []
    for change in (0.0, 1.0, torch.nan):
        changed = [torch.where(document[:, None, None], x + change, x).detach().requires_grad_() for x in inputs]
        out = attend_documents("sdpa", bounds(LENGTHS), max(LENGTHS), sum(LENGTHS))(*changed, Scores(**options))
        results.append([out, *torch.autograd.grad(out, changed, weights)])
    for before, *others in zip(*results, strict=True):
        for after in others:
            assert after[~document].equal(before[~document])
            assert not after[document].equal(before[document])


@pytest.mark.parametrize("window", [1, 7, 130, 299, None])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks_N": torch.ones(6)}])
def test_one_query_with_cached_keys_attends_as_the_last_of_its_document(
    window: int | None, options: dict[str, Any]
) -> None:
    q, k, v = (x.detach() for x in random_heads(299))
    whole, last = (attend_causally(each, k, v, Scores(window, **options)) for each in (q, q[-1:]))
    torch.testing.assert_close(last, whole[-1:], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("length", "window"), [(1100, 512), (640, 130)])
def test_several_blocks_of_a_long_document_are_those_of_the_definition(length: int, window: int) -> None:
    inputs = random_heads(length, heads=(2, 1))
    weights = torch.randn_like(inputs[0])
    out, exact = attend_causally(*inputs, Scores(window)), softmax_attention([length], *inputs, window=window)
    gradients = (torch.autograd.grad(x, inputs, weights.to(x.dtype)) for x in (out, exact))
    for native, expected in [(out, exact), *zip(*gradients, strict=True)]:
        assert _distance(native, expected) < 3e-6


@pytest.mark.parametrize(("num_tokens", "options"), [(32768, {}), (1024, {"softcap": 2.0})])
def test_a_window_takes_memory_in_proportion_to_the_length(num_tokens: int, options: dict[str, Any]) -> None:
    with FakeTensorMode():
        inputs = [torch.empty(num_tokens, n, 16, requires_grad=True) for n in (4, 2, 2)]
        with LiveMemory() as memory:
            attend_causally(*inputs, Scores(512, **options)).sum().backward()
    # The gradients of k or v in all blocks: 256 queries attend to 767 keys.
    assert memory.largest <= 3 * inputs[1].nbytes


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("varlen", {"sinks_N": torch.zeros(6)}, "varlen cannot train attention sinks, which this model has"),
        ("flash_attn_2", {"sinks_N": torch.zeros(6)}, "flash_attn_2 cannot train .* Choose 'flex' or 'sdpa'"),
        ("varlen", {"softcap": 30.0}, "varlen cannot train with a soft cap of scores, and this model's is 30"),
        ("flash_attn_4", {"softcap": 30.0}, "flash_attn_4 cannot train with a soft cap .* Choose 'flex' or 'sdpa'"),
    ],
)
def test_a_backend_refuses_what_it_does_not_implement(
    name: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "flash_attn_function", lambda version: _flash_on_cpu)
    with pytest.raises(ValueError, match=message):
        attend_documents(name, bounds([6]), 6, 6)(*random_heads(6), Scores(**options))


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
        ("flex", "cpu", "eager", 1),
        pytest.param("flash_attn_2", "cpu", "eager", 2, marks=pytest.mark.nightly),
        pytest.param("varlen", "cpu", "eager", 1, marks=pytest.mark.nightly),
        *(pytest.param(name, "cuda", "inductor", 1, marks=ON_GPU) for name in ("varlen", "flex")),
    ],
)
def test_a_compiled_block_is_not_compiled_again_for_batches_packed_otherwise(
    name: str, device: str, compiler: str, num_graphs: int, varlen_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # imports for a second

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


@pytest.mark.parametrize(("num_documents", "padded"), [(1, 16), (16, 16), (17, 32), (33, 48), (130, 144)])
def test_documents_are_padded_by_empty_ones_to_a_multiple_of_16(num_documents: int, padded: int) -> None:
    """The backward pass of flash attention has 128 more rows of fp32 for each."""
    cu_seqlens = bounds([3] * num_documents)
    found = pad_documents(cu_seqlens)
    assert found.diff().tolist() == [3] * num_documents + [0] * (padded - num_documents)
    assert found.dtype == torch.int32


@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_sdpa_gets_as_many_key_heads_as_query_heads(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them, torch's memory-efficient kernel refuses, and its other one makes all T x T scores."""
    native = make_native(make_reference(**FAMILIES[family]))
    input_ids, *rest = pack([30, 1, 25])
    heads: list[tuple[int, int, int]] = []
    compute = F.scaled_dot_product_attention

    def recorded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        heads.append((q.shape[1], k.shape[1], v.shape[1]))
        return compute(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    results = []
    for is_on_gpu in (False, True):
        monkeypatch.setattr(sdpa_attention, "is_gpu", lambda _, is_on_gpu=is_on_gpu: is_on_gpu)
        heads.clear()
        native.zero_grad()
        hidden = native(input_ids, *rest)
        hidden.square().sum().backward()
        results.append([hidden.detach(), *(each.grad for each in native.parameters() if each.grad is not None)])
        if is_on_gpu:
            assert all(q == k == v for q, k, v in heads)
        elif native.config.num_key_value_heads < native.config.num_attention_heads:
            assert all(k == v == native.config.num_key_value_heads for _, k, v in heads) or family.startswith("Gemma 4")
    assert heads or family in ("Gemma 2", "gpt-oss")
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, atol=1e-4 * float(on_cpu.abs().max()), rtol=0)


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
        message = f"'{name}' cannot run here: it needs a CUDA device, but .* 'cpu'.*. Choose 'auto', or 'sdpa'"
        with pytest.raises(ValueError, match=message):
            resolve_attention(name, CPU, torch.bfloat16, 64)
    with pytest.raises(ValueError, match="'flash' is not one of auto, sdpa, varlen, flash_attn, flex"):
        resolve_attention("flash", CPU, torch.bfloat16, 64)
