"""The gated delta rule and its convolution in packed documents, against a token-by-token computation in fp64."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sftron.models import delta
from sftron.models.causal_convolution import causal_convolution
from sftron.models.delta import CachedRecur, RecurInDocuments
from sftron.models.delta_rule import CHUNK_SIZE, Chunks, recurrent_gated_delta_rule, require_arguments
from sftron.models.generation import greedy_generate
from tests.conftest import rest_nightly
from tests.models.reference import QWEN_3_5, TINY, make_native, make_reference, pack, require_same_model

LENGTHS = [1, 2, 3, 4, 63, 64, 65, 130]
"""Around the taps of the convolution and the size of a chunk, and beyond two chunks."""


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def make_inputs(num_tokens: int, num_key_heads: int = 2, num_value_heads: int = 4, seed: int = 0) -> list[Tensor]:
    """Returns q, k, v, g and beta in fp64; decays from about 1 to 1e-4, and keys that are much alike."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (normal(num_tokens, num_key_heads, 6) + 0.5 for _ in range(2))
    v, a, b = normal(num_tokens, num_value_heads, 5), *(normal(num_tokens, num_value_heads) for _ in range(2))
    return [q, k, v, -F.softplus(3 * a - 3), b.sigmoid()]


def chunk_gated_delta_rule(*inputs: Tensor, chunk_size: int = CHUNK_SIZE) -> Tensor:
    """Returns the outputs for q, k, v, g, beta and cu_seqlens."""
    return Chunks(inputs[-1], chunk_size, inputs[0].device).rule(*inputs[:-1])


def naive_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Equation 10 of the paper for one document, one token after the other; S is [N, E, D] there."""
    num_served, scale = v.shape[1] // q.shape[1], q.shape[-1] ** -0.5
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x[:, torch.arange(v.shape[1]) // num_served] for x in (q, k))
    state, outputs = v.new_zeros(v.shape[1], v.shape[-1], q.shape[-1]), []
    for t in range(len(q)):
        rate, key, value = beta[t, :, None, None], k[t, :, None, :], v[t, :, :, None]
        forget = torch.eye(q.shape[-1], dtype=v.dtype) - rate * key.mT * key
        state = g[t].exp()[:, None, None] * state @ forget + rate * value * key
        outputs.append(scale * (state @ q[t, :, :, None]).squeeze(-1))
    return torch.stack(outputs)


def naive_convolution(x: Tensor, weight: Tensor, *, activates: bool = True) -> Tensor:
    num_taps = weight.shape[1]
    rows = [
        sum((weight[:, j] * x[t - num_taps + 1 + j] for j in range(num_taps) if t - num_taps + 1 + j >= 0), 0 * x[0])
        for t in range(len(x))
    ]
    return F.silu(torch.stack(rows)) if activates else torch.stack(rows)


def results(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Returns the output and the gradients of all inputs, for one fixed gradient of the output."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (output * weights).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def by_document(function: Callable[..., Tensor], lengths: list[int], num_packed: int) -> Callable[..., Tensor]:
    """Applies a function to each document; its first `num_packed` arguments are packed."""

    def call(*inputs: Tensor) -> Tensor:
        parts = zip(*(x.split(lengths) for x in inputs[:num_packed]), strict=True)
        return torch.cat([function(*each, *inputs[num_packed:]) for each in parts])

    return call


def require_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(found) == len(expected) > 2
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 0.01
        torch.testing.assert_close(ours.double(), theirs, atol=tolerance * theirs.abs().max().item(), rtol=0)


@pytest.mark.parametrize("lengths", [LENGTHS, [130, 1, 64], [65], [1, 2]], ids=str)
@pytest.mark.parametrize("heads", [(2, 4), (3, 3)], ids=str)
def test_outputs_and_gradients_are_those_of_one_token_after_another(lengths: list[int], heads: tuple[int, int]) -> None:
    inputs = make_inputs(sum(lengths), *heads)
    expected = results(by_document(naive_delta_rule, lengths, 5), inputs)
    cu_seqlens = bounds(lengths)
    for chunk_size in (64, 16):
        found = results(lambda *x, size=chunk_size: chunk_gated_delta_rule(*x, cu_seqlens, chunk_size=size), inputs)
        require_close(found, expected, 1e-9)
    narrow = results(lambda *x: chunk_gated_delta_rule(*x, cu_seqlens), [x.float() for x in inputs])
    assert {x.dtype for x in narrow} == {torch.float32}
    require_close(narrow, expected, 2e-5)


@pytest.mark.parametrize("activates", [True, False])
@pytest.mark.parametrize("lengths", [LENGTHS, [2], [1, 1, 1]], ids=str)
def test_the_convolution_starts_again_in_each_document(lengths: list[int], activates: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).double() for shape in ((sum(lengths), 5), (5, 4)))
    naive = partial(naive_convolution, activates=activates)
    ours = partial(causal_convolution, cu_seqlens=bounds(lengths), activates=activates)
    expected = results(by_document(naive, lengths, 1), [x, weight])
    require_close(results(ours, [x, weight]), expected, 1e-12)
    require_close(results(ours, [x.float(), weight.float()]), expected, 1e-5)


def test_what_happens_in_a_document_even_nan_changes_no_bit_of_another_on_either_side() -> None:
    lengths = [3, 1, 64, 65, 2]
    inputs, cu_seqlens = [x.float() for x in make_inputs(sum(lengths))], bounds(lengths)
    x, weight = torch.randn(sum(lengths), 5), torch.randn(5, 4)
    functions: list[tuple[Callable[..., Tensor], list[Tensor], int]] = [
        (lambda *inputs: chunk_gated_delta_rule(*inputs, cu_seqlens), inputs, 5),
        (lambda x: causal_convolution(x, weight, cu_seqlens), [x], 1),
        (lambda x: causal_convolution(x, weight, cu_seqlens, activates=False), [x], 1),
    ]
    for function, packed, num_packed in functions:
        before = [each.split(lengths) for each in results(function, packed)]
        for changed, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            for value in (0.7, float("nan")):
                after = [each.clone() for each in packed]
                for each in after[:num_packed]:
                    each[start:end] *= value
                found = [each.split(lengths) for each in results(function, after)]
                assert not before[0][changed].equal(found[0][changed])
                for old, new in zip(before, found, strict=True):
                    others = [number for number in range(len(lengths)) if number != changed]
                    assert all(old[number].equal(new[number]) for number in others)


def test_empty_documents_are_allowed_and_the_order_of_documents_does_not_matter() -> None:
    inputs = [x.float() for x in make_inputs(70)]
    without = chunk_gated_delta_rule(*inputs, bounds([5, 65]))
    assert chunk_gated_delta_rule(*inputs, bounds([0, 5, 0, 65, 0])).equal(without)
    swapped = [torch.cat([x[5:], x[:5]]) for x in inputs]
    found = chunk_gated_delta_rule(*swapped, bounds([65, 5]))
    torch.testing.assert_close(torch.cat([found[65:], found[:65]]), without, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("num_first", [1, 3, 64, 65])
def test_a_cache_continues_what_the_chunks_begin(num_first: int) -> None:
    num_tokens = num_first + 5
    inputs, x, weight = make_inputs(num_tokens), torch.randn(num_tokens, 5), torch.randn(5, 4)
    expected = chunk_gated_delta_rule(*inputs, bounds([num_tokens]))
    recur = CachedRecur()
    parts = list(zip(*(each.split([num_first, *[1] * 5]) for each in [x, *inputs]), strict=True))
    found = [(recur.convolve(part, weight), recur(*rest)) for part, *rest in parts]
    torch.testing.assert_close(torch.cat([b for _, b in found]), expected, atol=1e-12, rtol=1e-9)
    convolved = causal_convolution(x, weight, bounds([num_tokens]))
    torch.testing.assert_close(torch.cat([a for a, _ in found]), convolved, atol=1e-6, rtol=1e-6)
    zero = torch.zeros(4, 6, 5, dtype=torch.float64)
    torch.testing.assert_close(recurrent_gated_delta_rule(*inputs, zero)[0], expected, atol=1e-12, rtol=1e-9)


def test_recomputing_the_rule_changes_no_bit_and_bfloat16_is_computed_in_fp32() -> None:
    inputs = [x.bfloat16() for x in make_inputs(sum(LENGTHS))]
    modes = [RecurInDocuments(bounds(LENGTHS), bounds(LENGTHS), recompute=recompute) for recompute in (False, True)]
    found = [results(recur, inputs) for recur in modes]
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    assert {x.dtype for x in found[0]} == {torch.bfloat16}
    wide = chunk_gated_delta_rule(*(x.float() for x in inputs), bounds(LENGTHS))
    assert found[0][0].equal(wide.bfloat16())


def test_nothing_of_a_batch_is_kept_once_its_pass_is_over() -> None:
    recur, inputs = RecurInDocuments(bounds([70, 5]), bounds([70, 5])), make_inputs(75)
    results(recur, inputs)
    assert recur._chunks is not None
    chunks = weakref.ref(recur._chunks)  # its indices take two numbers a token and head
    del recur
    gc.collect()
    assert chunks() is None


def test_the_rule_uses_no_operation_that_cuda_refuses_to_compute_deterministically() -> None:
    """Those of the list of torch.use_deterministic_algorithms that sum along a dimension."""
    names: set[str] = set()

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(func._schema.name.partition("::")[2])
            return func(*args, **kwargs or {})

    cu_seqlens, inputs = bounds(LENGTHS), [x.float() for x in make_inputs(sum(LENGTHS))]
    with Operations():
        results(RecurInDocuments(cu_seqlens, cu_seqlens), inputs)
    assert {"bmm", "baddbmm", "exp"} <= names
    assert not names & {"cumsum", "cumsum_", "logcumsumexp", "histc", "bincount", "put_", "scatter_reduce", "kthvalue"}


def test_fla_gets_the_bounds_on_the_device_and_the_chunks_get_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, given = make_inputs(sum(LENGTHS)), []

    def chunks(cu_seqlens: Tensor, *rest: Any) -> Chunks:
        given.append(cu_seqlens)
        return Chunks(cu_seqlens, *rest)

    on_cpu, on_device = bounds(LENGTHS), bounds(LENGTHS)
    recur = RecurInDocuments(on_cpu, on_device)
    monkeypatch.setattr(
        delta, "Chunks", lambda cu_seqlens, *rest: given.append(cu_seqlens) or Chunks(cu_seqlens, *rest)
    )
    recur(*inputs)
    monkeypatch.setattr(delta, "uses_fla", lambda *_: True)
    monkeypatch.setattr(delta, "fla_rule", lambda *given_to_fla: given.append(given_to_fla[-1]))
    for _ in range(2):
        recur(*inputs)
    # One object, for which fla finds its chunks once.
    assert [id(each) for each in given] == [id(on_cpu), id(on_device), id(on_device)]


def test_a_version_of_fla_with_other_arguments_is_refused_with_their_names() -> None:
    def older(q: Any, k: Any, v: Any, g: Any, beta: Any, offsets: Any = None) -> None: ...

    with pytest.raises(ImportError, match=r"no argument use_qk_l2norm_in_kernel, cu_seqlens, only q, k, v,"):
        require_arguments(older)


# --- The layer in a model ---


@pytest.mark.parametrize("dtype", rest_nightly([torch.float32, torch.bfloat16], [torch.float32]))
@pytest.mark.parametrize("layer_type", ["linear_attention", "full_attention"])
def test_changing_one_document_of_a_hybrid_changes_no_bit_of_another(layer_type: str, dtype: torch.dtype) -> None:
    lengths = [3, 1, 64, 2, 63, 4, 65]
    native = make_native(make_reference(**QWEN_3_5 | {"layer_types": [layer_type] * 3}), compute_dtype=dtype)
    input_ids, *rest = pack(lengths)
    before = native(input_ids, *rest).split(lengths)
    for changed in range(len(lengths)):
        documents = list(input_ids.split(lengths))
        documents[changed] = (documents[changed] + 1) % TINY["vocab_size"]
        after = native(torch.cat(documents), *rest).split(lengths)
        is_equal = [a.equal(b) for a, b in zip(before, after, strict=True)]
        assert is_equal == [index != changed for index in range(len(lengths))]


def test_a_document_of_each_length_has_the_logits_and_gradients_of_transformers() -> None:
    reference = make_reference(**QWEN_3_5)
    require_same_model(make_native(reference), reference, [3, 2, 64, 63, 4, 65])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_gives_the_same_output_and_gradients_to_the_bit(mode: str, dtype: torch.dtype) -> None:
    reference, found = make_reference(**QWEN_3_5), []
    for activation_checkpointing in ("none", mode):
        native = make_native(reference, activation_checkpointing=activation_checkpointing, compute_dtype=dtype)
        hidden = native(*pack([70, 5]))
        hidden.float().square().sum().backward()
        found.append([hidden, *(p.grad for p in native.model.parameters())])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


def test_autocast_changes_no_bit() -> None:
    native, found = make_native(make_reference(**QWEN_3_5)), []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(native(*pack([30, 12])))
    assert found[0].equal(found[1])


@pytest.mark.parametrize("num_prompt", [1, 2, 5, 64, 66])
def test_generation_with_a_cache_has_the_logits_of_whole_documents(num_prompt: int) -> None:
    native = make_native(make_reference(**QWEN_3_5))
    input_ids = pack([num_prompt])[0]
    generation = greedy_generate(native, input_ids.tolist(), 6, ())
    for number, token_id in enumerate(generation.token_ids):
        ids = torch.cat([input_ids, torch.tensor(generation.token_ids[:number], dtype=torch.long)])
        _, *rest = pack([len(ids)])
        logits = F.linear(native(ids, *rest)[-1], native.head_weight)
        assert logits.argmax() == token_id
        best, second = logits.topk(2).values
        torch.testing.assert_close(torch.tensor(generation.margins[number]), best - second, atol=1e-3, rtol=1e-3)
