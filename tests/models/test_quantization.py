"""Matrices in NF4: bitsandbytes' own values, and a model that computes with them and never keeps others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sftron.checkpoint import hf_weights
from sftron.checkpoint.adapter import model_projections
from sftron.checkpoint.hf_weights import load_model
from sftron.checkpoint.model_folder import read_config
from sftron.models import quantization
from sftron.models.adapters import AdapterStart, LoraSpec, match_targets
from sftron.models.linear import LowRank, linear
from sftron.models.llama import ACTIVATION_CHECKPOINTING, LlamaForSFT
from sftron.models.loss import weighted_loss_sum
from sftron.models.quantization import NF4, from_stored, to_stored
from sftron.models.sharding import shard_model, whole
from sftron.train.ranks import end_ranks, start_ranks
from tests.conftest import LazyModule
from tests.models.reference import QWEN_3_5, make_reference
from tests.pretended import pretended_gpu
from tests.train.ranks import launch

functional = LazyModule("bitsandbytes.functional")

DTYPES = (torch.float32, torch.bfloat16)
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
DOCUMENT = torch.arange(12) % 7 + 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_of_bitsandbytes_to_the_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight_OI = torch.randn(30, 192).to(dtype)
    weight_OI[3] = 0
    codes, state = functional.quantize_4bit(weight_OI, blocksize=64, quant_type="nf4")
    monkeypatch.setattr(quantization, "_ROWS_BYTES", 7 * 4 * 192)  # the rows in five parts
    stored = to_stored(weight_OI, NF4)

    assert stored.nbytes == 0.5625 * weight_OI.numel()
    for wanted in DTYPES:
        state.dtype = wanted
        values = from_stored(stored, wanted)
        assert values.equal(functional.dequantize_4bit(codes, state))
        # The rows of a rank, whichever they are.
        assert from_stored(stored[11:17], wanted).equal(values[11:17])
    assert 0.05 < (from_stored(stored, dtype) - weight_OI).norm() / weight_OI.norm() < 0.15


def test_weights_between_two_values_have_the_codes_of_bitsandbytes() -> None:
    table = functional.get_4bit_type("nf4", device="cpu")
    between = (table[:-1] + table[1:]) / 2
    near = torch.cat([between, between.nextafter(torch.tensor(1.0)), between.nextafter(torch.tensor(-1.0))])
    scales = torch.tensor([1.0, 3.7, 1e-30, 1e-39, 1e30]).repeat_interleave(2)
    weight_OI = torch.zeros(10, 64)
    weight_OI[:, :45], weight_OI[:, 45] = near * scales[:, None], scales * torch.tensor([1.0, -1.0]).repeat(5)
    codes, state = functional.quantize_4bit(weight_OI, blocksize=64, quant_type="nf4")
    stored = to_stored(weight_OI, NF4)
    assert stored[:, :32].equal(codes.view(10, 32))
    assert stored[:, 32:].contiguous().view(torch.float32).flatten().equal(state.absmax)


def test_a_matrix_is_quantized_on_the_device_that_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_reference(**SIZES).save_pretrained(tmp_path)
    projections = model_projections(read_config(tmp_path))
    names = match_targets("all-linear", projections)
    adapters = AdapterStart(spec=LoraSpec(ranks=dict.fromkeys(names, 2), alphas=dict.fromkeys(names, 4.0)))
    options: dict[str, Any] = {"adapters": adapters, "frozen_dtype": NF4}
    on_cpu = [each.detach() for each in load_model(tmp_path, **options).parameters()]
    devices: list[str] = []

    def noted(weight: Tensor, dtype: torch.dtype) -> Tensor:
        devices.append(weight.device.type)
        return to_stored(weight, dtype)

    monkeypatch.setattr(hf_weights, "to_stored", noted)
    with pretended_gpu() as gpu:
        model = load_model(tmp_path, device=gpu.device, **options)
        on_gpu = [each.detach().cpu() for each in model.parameters()]
    assert devices == ["gpu"] * sum(each.dtype == NF4 for each in on_gpu)
    assert len(devices) == 8
    assert all(ours.equal(theirs) for ours, theirs in zip(on_gpu, on_cpu, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["linear", "normed", "gated"])
def test_a_layer_computes_with_the_dequantized_weight_and_keeps_the_stored_one(
    kind: str, dtype: torch.dtype, recompute: bool
) -> None:
    torch.manual_seed(0)
    stored = to_stored(torch.randn(10, 64), NF4)
    kept: list[torch.Size] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    def run(weight: Tensor) -> list[Tensor | None]:
        torch.manual_seed(1)
        x, norm = torch.randn(5, 128 if kind == "gated" else 64, requires_grad=True), torch.ones(64)
        a, b = torch.randn(3, 64, requires_grad=True), torch.randn(4, 3, requires_grad=True)
        options: dict[str, Any] = {"recompute": recompute, "adapters": [LowRank(2, 0.5, a, b)]}
        options |= {"norm_weight_H": norm, "eps": 1e-5} if kind == "normed" else {}
        options |= {"activation": "silu", "is_gated": True} if kind == "gated" else {}
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            output = linear(x.to(dtype), weight, None, **options)
        output.float().square().sum().backward()
        return [output.detach(), x.grad, a.grad, b.grad]

    expected = run(from_stored(stored, dtype))
    assert torch.Size([10, 64]) in kept
    kept.clear()
    for found, value in zip(run(stored), expected, strict=True):
        assert found is not None
        assert value is not None
        assert found.equal(value)
    assert torch.Size([10, 36]) in kept
    assert torch.Size([10, 64]) not in kept


# --- A whole model ---


def save_base(folder: Path, **sizes: Any) -> Path:
    make_reference(**(SIZES | sizes)).save_pretrained(folder)
    return folder


def load(folder: Path, mode: str = "none", *, dora: bool = False, **options: Any) -> LlamaForSFT:
    names = ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
    ranks = {f"model.layers.{layer}.{name}": 4 for layer in range(2) for name in names}
    spec = LoraSpec(ranks=ranks, alphas=dict.fromkeys(ranks, 8.0), dora=dora)
    start = AdapterStart(spec=spec, seed=3)
    return load_model(
        folder,
        "sdpa",
        torch.float32,
        activation_checkpointing=mode,
        adapters=start,
        **options,
    )


def train(model: LlamaForSFT, num_steps: int = 3) -> dict[str, Tensor]:
    """Returns the losses, and what is trained."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses, bounds = [], torch.tensor([0, len(DOCUMENT)], dtype=torch.int32)
    for _ in range(num_steps):
        positions = torch.arange(len(DOCUMENT))
        hidden = model(DOCUMENT, positions, bounds, len(DOCUMENT))
        loss, _ = weighted_loss_sum(hidden, model.head, positions, DOCUMENT.roll(1), torch.ones(len(DOCUMENT)))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.stack(losses)} | {name: whole(each.detach()).clone() for name, each in trained.items()}


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("mode", ACTIVATION_CHECKPOINTING)
def test_a_model_in_nf4_trains_as_one_with_the_dequantized_weights(tmp_path: Path, mode: str, dora: bool) -> None:
    folder = save_base(tmp_path)
    model, reference = load(folder, mode, dora=dora, frozen_dtype=NF4), load(folder, mode, dora=dora)
    in_nf4 = {name for name, each in model.named_parameters() if each.dtype == NF4}
    assert in_nf4 == {n for n, each in reference.named_parameters() if ".layers." in n and n.endswith("_proj.weight")}
    before = {name: each.detach().clone() for name, each in model.named_parameters() if not each.requires_grad}
    for name, parameter in reference.named_parameters():
        stored = model.get_parameter(name).detach()
        if name.endswith("lora_magnitude_vector"):
            assert not stored.equal(parameter)  # the norms of the rows as they are rounded
        parameter.data = from_stored(stored, torch.float32).clone()

    result, expected = train(model), train(reference)

    assert result["losses"][-1] < result["losses"][0]
    assert result.keys() == expected.keys()
    assert all(value.equal(expected[name]) for name, value in result.items())
    assert all(model.get_parameter(name).equal(value) for name, value in before.items())


def save_trained(folder: Path, result: Path) -> None:
    ranks = start_ranks()
    model = load(folder, frozen_dtype=NF4, shard=lambda made: shard_model(made, ranks.mesh))  # pyright: ignore[reportArgumentType]
    frozen = {name: whole(each.detach()) for name, each in model.named_parameters() if not each.requires_grad}
    trained = train(model, 1)
    if ranks.is_main:
        torch.save({"frozen": frozen, "trained": trained}, result)
    end_ranks()


def test_two_ranks_hold_the_same_bytes_and_train_the_same(tmp_path: Path) -> None:
    """Each rank trains on the same document: doubled gradients change the first step of AdamW by rounding alone."""
    folder = save_base(tmp_path / "base", tie_word_embeddings=True)
    for ended in launch(2, save_trained, folder, tmp_path / "result.pt", folder=tmp_path):
        assert ended.exit_code == 0, ended.err
    found = torch.load(tmp_path / "result.pt", weights_only=True)
    model = load(folder, frozen_dtype=NF4)
    assert any(each.dtype == NF4 for each in found["frozen"].values())
    assert all(value.equal(model.get_parameter(name)) for name, value in found["frozen"].items())
    for name, value in train(model, 1).items():
        torch.testing.assert_close(found["trained"][name], value, rtol=0, atol=1e-5, msg=lambda m, n=name: n + m)


def test_rows_that_are_not_whole_blocks_and_broken_weights_are_refused(tmp_path: Path) -> None:
    narrow = save_base(tmp_path / "narrow", intermediate_size=48)
    with pytest.raises(ValueError, match=r"nf4 rounds blocks of 64.*down_proj\.weight has 48; set it to bfloat16"):
        load(narrow, frozen_dtype=NF4)
    with pytest.raises(ValueError, match="not finite"):
        to_stored(torch.full((2, 64), torch.nan), NF4)


def test_a_hybrid_is_rounded_to_nf4_but_for_its_convolutions(tmp_path: Path) -> None:
    pytest.importorskip("transformers.models.qwen3_5")  # which the oldest admitted version lacks
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    make_reference(**(QWEN_3_5 | SIZES | heads | {"linear_value_head_dim": 16, "head_dim": 16})).save_pretrained(
        tmp_path
    )
    config = read_config(tmp_path)
    names = match_targets("all-linear", list(model_projections(config)))
    spec = LoraSpec(ranks=dict.fromkeys(names, 4), alphas=dict.fromkeys(names, 8.0))
    model = load_model(tmp_path, "sdpa", torch.float32, adapters=AdapterStart(spec=spec), frozen_dtype=NF4)
    types = {name: each.dtype for name, each in model.named_parameters() if ".layers." in name and each.ndim > 1}
    assert {name for name, dtype in types.items() if dtype == NF4} == {name for name in types if "_proj.weight" in name}
    assert any("conv1d" in name for name in types)
    result = train(model)
    assert result["losses"][-1] < result["losses"][0]
