import pytest
import torch

from sftron.models.attention import attend_documents, resolve_attention

CPU = torch.device("cpu")


def _heads(total: int, num: int, seed: int) -> torch.Tensor:
    return torch.randn(total, num, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_attention_is_softmax_over_the_documents_past(num_kv_heads: int) -> None:
    lengths = [5, 1, 9]
    q, k, v = _heads(15, 4, 0), _heads(15, num_kv_heads, 1), _heads(15, num_kv_heads, 2)
    ours = attend_documents("sdpa", torch.tensor([0, 5, 6, 15], dtype=torch.int32), 9)(q, k, v)

    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    token = torch.arange(15)
    visible = (document[:, None] == document) & (token[:, None] >= token)
    full_k, full_v = (x.double().repeat_interleave(4 // num_kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("tnd,snd->nts", q.double(), full_k) / 8**0.5
    theirs = torch.einsum("nts,snd->tnd", scores.masked_fill(~visible, -torch.inf).softmax(-1), full_v)
    torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-5)


def test_a_document_of_nan_harms_no_other_in_either_direction() -> None:
    tensors = [_heads(12, num, seed) for num, seed in ((4, 0), (2, 1), (2, 2))]
    attend = attend_documents("sdpa", torch.tensor([0, 4, 12], dtype=torch.int32), 8)

    def outputs_and_gradients(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        out = attend(*inputs)
        return [out, *torch.autograd.grad(out[4:].sum(), inputs)]

    clean = outputs_and_gradients(tensors)
    spoiled_inputs = [tensor.detach().clone() for tensor in tensors]
    for tensor in spoiled_inputs:
        tensor[:4] = torch.nan
        tensor.requires_grad_()
    spoiled = outputs_and_gradients(spoiled_inputs)
    assert spoiled[0][:4].isnan().all()
    assert all(a[4:].equal(b[4:]) for a, b in zip(clean, spoiled, strict=True))


def test_empty_documents_change_nothing() -> None:
    # cu_seqlens may be padded to a fixed length by repeating its end, for torch.compile.
    q, k, v = _heads(6, 4, 0), _heads(6, 2, 1), _heads(6, 2, 2)
    plain = attend_documents("sdpa", torch.tensor([0, 2, 6], dtype=torch.int32), 4)(q, k, v)
    padded = attend_documents("sdpa", torch.tensor([0, 2, 6, 6, 6], dtype=torch.int32), 4)(q, k, v)
    assert padded.equal(plain)


def test_a_document_longer_than_max_seqlen_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_seqlen is 3, .* 4 tokens"):
        attend_documents("sdpa", torch.tensor([0, 2, 6], dtype=torch.int32), 3)


def test_auto_is_sdpa_where_nothing_faster_is_correct() -> None:
    assert resolve_attention("auto", CPU, torch.bfloat16) == "sdpa"
    assert resolve_attention("sdpa", CPU, torch.float32) == "sdpa"


@pytest.mark.parametrize("name", ["varlen", "flash_attn"])
def test_a_backend_that_cannot_run_here_is_an_error_and_no_fallback(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' cannot run here: it needs a CUDA device, this is 'cpu'.*'sdpa'"):
        resolve_attention(name, CPU, torch.bfloat16)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'flash' is not one of auto, sdpa, varlen, flash_attn"):
        resolve_attention("flash", CPU, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["varlen", "flash_attn"])
def test_on_a_gpu_a_backend_agrees_with_sdpa_and_isolates_to_the_bit(name: str) -> None:
    device = torch.device("cuda")
    if name == "flash_attn":
        pytest.importorskip("flash_attn")
    lengths = [200, 1, 300]
    tensors = [torch.randn(501, num, 64, device=device, dtype=torch.bfloat16) for num in (9, 3, 3)]
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    attend = attend_documents(resolve_attention(name, device, torch.bfloat16), cu_seqlens, 300)
    before = attend(*tensors)
    torch.testing.assert_close(before, attend_documents("sdpa", cu_seqlens, 300)(*tensors), atol=2e-2, rtol=2e-2)
    for tensor in tensors:
        tensor[:200] += 1
    after = attend(*tensors)
    assert after[200:].equal(before[200:])
    assert not after[:200].equal(before[:200])
