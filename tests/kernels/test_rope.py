from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from sftron.kernels.rope import rotate_heads
from tests.kernels.rope_cases import SHAPES, Case, gradients, make_case, turned

CASE = (3, 1, 8)


def weights(like: Tensor) -> Tensor:
    return torch.arange(1, like.numel() + 1, dtype=torch.float64).view(like.shape).sin()


def weigh(heads: tuple[Tensor, ...]) -> Tensor:
    """A scalar with another gradient for every number."""
    return torch.stack([(head * weights(head)).sum() for head in heads]).sum()


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_queries_and_keys_are_rotated_in_place_and_values_left_alone(
    shape: tuple[int, int, int], num_tokens: int
) -> None:
    case = make_case(*shape, num_tokens)
    expected, before = turned(case), case.qkv.clone()
    heads = rotate_heads(*case)
    torch.testing.assert_close(case.qkv.double(), expected, rtol=0, atol=1e-6)
    assert torch.cat(heads, dim=1).flatten(1).equal(case.qkv)
    assert {head.untyped_storage().data_ptr() for head in heads} == {case.qkv.untyped_storage().data_ptr()}
    assert heads[2].flatten(1).equal(before[:, -shape[1] * shape[2] :])
    assert num_tokens == 0 or num_tokens == 1 or not case.qkv.equal(before)  # position 0 is not rotated


def test_the_rotation_is_that_of_transformers_to_the_bit() -> None:
    case = make_case(3, 1, 64)
    q, k, v = (x.clone() for x in case.qkv.unflatten(-1, (-1, 64)).split([3, 1, 1], dim=1))
    cos, sin = (x.repeat(1, 2) for x in case.table[case.position_ids].chunk(2, dim=-1))
    for ours, theirs in zip(rotate_heads(*case), (*apply_rotary_pos_emb(q, k, cos, sin), v), strict=True):
        assert ours.equal(theirs)


def test_bf16_is_rounded_once_from_fp32_arithmetic() -> None:
    case = make_case(3, 1, 64, dtype=torch.bfloat16)
    exact = rotate_heads(*case._replace(qkv=case.qkv.float()))
    for ours, theirs in zip(rotate_heads(*case), exact, strict=True):
        assert ours.equal(theirs.bfloat16())


@pytest.mark.parametrize("position", [-1, 41])
def test_a_position_outside_the_table_is_an_error(position: int) -> None:
    case = make_case(*CASE)
    case.position_ids[3] = position
    with pytest.raises(ValueError, match=rf"position_ids reach from .*{position}.*from 0 to 40"):
        rotate_heads(*case)


def test_shapes_that_do_not_fit_are_an_error() -> None:
    case = make_case(*CASE)
    for wrong in (case._replace(num_kv_heads=2), case._replace(position_ids=case.position_ids[1:])):
        with pytest.raises(ValueError, match="qkv_TW has shape"):
            rotate_heads(*wrong)


def test_the_gradient_is_the_numerical_one() -> None:
    case = make_case(2, 1, 4, 3)
    table = case.table.double()
    rotated = lambda x: rotate_heads(x * 1, case.position_ids, table, 2, 1)  # noqa: E731
    assert torch.autograd.gradcheck(rotated, [case.qkv.double().requires_grad_()])


@pytest.mark.parametrize("layout", gradients(make_case(*CASE)))
@pytest.mark.parametrize("missing", [(), (0,), (1, 2)])
def test_gradients_of_any_strides_and_missing_ones_are_rotated_back(layout: str, missing: tuple[int, ...]) -> None:
    case = make_case(*CASE)
    grads, leaf = gradients(case)[layout], case.qkv.clone().requires_grad_()
    kept, heads = [i for i in range(3) if i not in missing], rotate_heads(leaf * 1, *case[1:])
    (ours,) = torch.autograd.grad([heads[i] for i in kept], leaf, [grads[i] for i in kept])
    dense = [torch.zeros_like(grad) if i in missing else grad for i, grad in enumerate(grads)]
    expected = turned(case._replace(qkv=torch.cat(dense, dim=1).flatten(1)), inverse=True)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-6)


def reference(case: Case, function: Callable[[Tensor, tuple[Tensor, ...]], Tensor]) -> Tensor:
    """The gradient of function(rotated qkv, its heads) by qkv, by plain operations in fp64."""
    qkv = case.qkv.double().requires_grad_()
    rotated = turned(case._replace(qkv=qkv))
    heads = rotated.unflatten(-1, (-1, case.table.shape[1])).split([case.num_heads, *[case.num_kv_heads] * 2], dim=1)
    return torch.autograd.grad(function(rotated, heads), qkv)[0]


def test_a_later_consumer_sees_rotated_heads_and_adds_its_gradient() -> None:
    case = make_case(*CASE, dtype=torch.float64)
    leaf = case.qkv.clone().requires_grad_()
    qkv = leaf * 1
    heads = rotate_heads(qkv, *case[1:])
    (weigh(heads) + qkv.square().sum()).backward()
    expected = reference(case, lambda rotated, heads: weigh(heads) + rotated.square().sum())
    torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=1e-6)


def test_only_a_later_consumer_gets_the_gradient_through_the_rotation() -> None:
    case = make_case(*CASE, dtype=torch.float64)
    leaf = case.qkv.clone().requires_grad_()
    qkv = leaf * 1
    rotate_heads(qkv, *case[1:])
    weigh((qkv,)).backward()
    torch.testing.assert_close(leaf.grad, reference(case, lambda rotated, _: weigh((rotated,))), rtol=0, atol=1e-6)


def test_an_earlier_consumer_is_right_or_refused() -> None:
    case = make_case(*CASE, dtype=torch.float64)
    leaf = case.qkv.clone().requires_grad_()
    qkv = leaf * 1
    earlier = qkv * 3  # its gradient needs no value of qkv
    (weigh(rotate_heads(qkv, *case[1:])) + weigh((earlier,))).backward()
    expected = (
        reference(case, lambda _, heads: weigh(heads)) + 3 * torch.arange(1, leaf.numel() + 1).view(leaf.shape).sin()
    )
    torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=1e-6)
    qkv = leaf * 1
    earlier = qkv.square()  # its gradient does
    loss = weigh(rotate_heads(qkv, *case[1:])) + earlier.sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_changing_the_buffer_after_its_heads_were_used_is_found_out() -> None:
    case = make_case(*CASE)
    qkv = case.qkv.clone().requires_grad_() * 1
    loss = rotate_heads(qkv, *case[1:])[0].square().sum()
    with torch.no_grad():
        qkv.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_leaf_or_a_view_that_requires_a_gradient_is_refused_before_it_is_changed() -> None:
    case = make_case(*CASE)
    leaf = case.qkv.clone().requires_grad_()
    for qkv, kind in ((leaf, "leaf"), ((leaf * 1)[:], "view")):
        with pytest.raises(ValueError, match=f"is a {kind} that requires a gradient"):
            rotate_heads(qkv, *case[1:])
        assert qkv.equal(case.qkv)
    with torch.no_grad():
        rotate_heads(leaf, *case[1:])
        rotate_heads((leaf * 1)[:], *case[1:])


def test_a_graph_that_is_kept_gives_the_same_gradient_twice() -> None:
    case = make_case(*CASE)
    leaf = case.qkv.clone().requires_grad_()
    loss = weigh(rotate_heads(leaf * 1, *case[1:]))
    once, twice = torch.autograd.grad(loss, leaf, retain_graph=True), torch.autograd.grad(loss, leaf)
    assert once[0].equal(twice[0])
    assert once[0].count_nonzero()


def _attention(x: Tensor, weight: Tensor, case: Case) -> Tensor:
    """A block's use: a projection, rotated, and consumers that keep the heads."""
    q, k, v = rotate_heads(x @ weight, *case[1:])
    return (q.square() * k * v).sum()


def _block(run: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    case = make_case(*CASE)
    x, weight = torch.randn(7, 5), torch.randn(5, case.qkv.shape[1], requires_grad=True)
    loss = run(x, weight, case)
    return loss.detach(), torch.autograd.grad(loss, weight)[0]


def test_recomputed_activations_give_the_same_gradient() -> None:
    plain = _block(_attention)
    recomputed = _block(lambda *inputs: checkpoint(_attention, *inputs, use_reentrant=False))
    assert all(a.equal(b) for a, b in zip(plain, recomputed, strict=True))


def test_compiled_as_one_graph_it_is_the_same() -> None:
    compiled = torch.compile(_attention, fullgraph=True, backend="aot_eager")
    assert all(a.equal(b) for a, b in zip(_block(_attention), _block(compiled), strict=True))


def test_it_is_traced_without_values() -> None:
    """As on a GPU: nothing of forward or backward may need a number on the host."""
    for mode in (torch.no_grad(), FakeTensorMode()):
        with mode, torch.enable_grad():
            qkv = torch.empty(5, 40, device="meta", dtype=torch.bfloat16, requires_grad=True)
            heads = rotate_heads(qkv * 1, torch.empty(5, device="meta").int(), torch.empty(9, 8, device="meta"), 3, 1)
            (grad,) = torch.autograd.grad([head.sum() for head in heads], qkv)
    assert [head.shape for head in heads] == [(5, 3, 8), (5, 1, 8), (5, 1, 8)]
    assert (grad.shape, grad.dtype) == (qkv.shape, qkv.dtype)
