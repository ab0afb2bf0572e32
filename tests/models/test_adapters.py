"""Adapters of the fused linear layers against peft, on equal weights and equal A, B and magnitudes, in fp32."""

import json
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sftron.models.adapters import (
    ALL_LINEAR,
    LoraSpec,
    add_adapters,
    initial_value,
    match_targets,
    merge,
    peft_name,
    projections_of,
)
from sftron.models.llama import LlamaForSFT
from tests.conftest import LazyModule, rest_nightly
from tests.models.reference import FAMILIES, FIRST_OF_TYPE, make_native, make_reference, pack

peft = LazyModule("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft

QV = ["q_proj", "v_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all layers": ("Llama 3", {"target_modules": ALL_LINEAR}),
    "q and v": ("Llama 3", {"target_modules": QV}),
    "Qwen 3": ("Qwen 3", {"target_modules": ALL_LINEAR}),
    "biases": ("Granite code", {"target_modules": ALL_LINEAR}),
    "qkv biases": ("Qwen 2", {"target_modules": QV}),
    "one layer": ("Llama 3", {"target_modules": r"model\.layers\.1\..*proj"}),
    # The same scale as with rank 4; with 6, rounding alone makes errors near the bound on some processors.
    "rank 1": ("Llama 3", {"target_modules": ALL_LINEAR, "r": 1, "lora_alpha": 1.5}),
    "rank above alpha": ("Llama 3", {"target_modules": ALL_LINEAR, "r": 12, "lora_alpha": 3}),
    "ranks and alphas": (
        "Llama 3",
        {
            "target_modules": ALL_LINEAR,
            "rank_pattern": {"k_proj": 2, "layers.1.mlp.up_proj": 7},
            "alpha_pattern": {"q_proj": 1, "down_proj": 20},
        },
    ),
    "rslora": ("Qwen 3", {"target_modules": ALL_LINEAR, "use_rslora": True}),
    "dora": ("Llama 3", {"target_modules": ALL_LINEAR, "use_dora": True}),
    "dora of q and v": ("Qwen 3", {"target_modules": QV, "use_dora": True}),
    "dora with biases": ("Granite code", {"target_modules": ["q_proj", "gate_proj", "o_proj"], "use_dora": True}),
    "rslora and dora": ("Llama 3", {"target_modules": ALL_LINEAR, "use_rslora": True, "use_dora": True}),
    "plain MLP": ("Phi 1.5, 2", {"target_modules": ALL_LINEAR}),
    "already fused": ("Phi 3", {"target_modules": ALL_LINEAR}),
    "embeddings": ("Llama 3", {"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied embeddings": (
        "Qwen 3",
        {"target_modules": QV, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
}
_ATTENTION = [*QV, "k_proj", "o_proj"]
_LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "dots1", "solar_open")
LINEAR_OF_MIXTURES = {
    **dict.fromkeys((*_MIXTURES, "granitemoe"), _ATTENTION),
    **dict.fromkeys(("glm4_moe_lite", "deepseek_v3"), _LATENT),
    **{key: [*_ATTENTION, "input_linear", "output_linear"] for key in ("granitemoeshared", "granitemoehybrid")},
    "qwen3_next": [*_ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate"],
    "qwen3_5_moe_text": [*_ATTENTION, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "up_proj"],
}
FAMILY_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # Of mixtures, peft adapts experts and routers as well if it is asked for all linear layers.
    model_type: (family, {"target_modules": LINEAR_OF_MIXTURES.get(model_type, ALL_LINEAR)})
    for model_type, family in FIRST_OF_TYPE.items()
}
FAMILY_CASES["beside experts"] = ("Gemma 4 26B-A4B", {"target_modules": [*_ATTENTION, "gate_proj", "down_proj"]})
"""Each model type, for tests of folders."""


def make_peft(family: str, seed: int = 0, **options: Any) -> Any:
    """Returns a random model with a random adapter, whose B is not zero."""
    config = peft.LoraConfig(**({"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | options))
    model = peft.get_peft_model(make_reference(**FAMILIES[family]), config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
        elif parameter.requires_grad:
            with torch.no_grad():
                parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def trained(model: Any) -> dict[str, torch.nn.Parameter]:
    """Returns the trained parameters of a model of peft, by their names in a file of peft without the prefix."""

    def in_file(name: str) -> str:
        name = name.replace(".modules_to_save.default", "").replace(".default", "").removeprefix("base_model.model.")
        return name.removesuffix(".weight") if "lora_magnitude_vector" in name else name

    return {in_file(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def spec_of(model: Any) -> LoraSpec:
    """Returns the adapters that peft's own modules hold."""
    config = model.peft_config["default"]
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    saved = {name.rpartition(".")[2] for name in config.modules_to_save or ()}
    return LoraSpec(
        ranks={name: layer.r["default"] for name, layer in layers.items()},
        alphas={name: layer.lora_alpha["default"] for name, layer in layers.items()},
        rslora=config.use_rslora,
        dora=config.use_dora,
        modules_to_save=tuple(sorted(saved)),
    )


def make_adapted(family: str, model: Any, **options: Any) -> LlamaForSFT:
    """Returns the native model with the weights of peft's base and the values of its adapter."""
    native = make_native(make_reference(**FAMILIES[family]), **options)
    add_adapters(native, native.config, spec_of(model))
    values = trained(model)
    names = {peft_name(name) for name, parameter in native.named_parameters() if parameter.requires_grad}
    assert names == values.keys()
    with torch.no_grad():
        for name, parameter in native.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(values[peft_name(name)])
    return native


LENGTHS = [23, 1, 16]


def logits_of(model: LlamaForSFT, seed: int = 0) -> Tensor:
    return model.head.logits(model(*pack(LENGTHS, seed)))


def expected_logits_of(model: Any, seed: int = 0) -> Tensor:
    documents = pack(LENGTHS, seed)[0].split(LENGTHS)
    return torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in documents])


def loss_of(logits: Tensor, seed: int = 0) -> Tensor:
    targets = torch.randint(0, logits.shape[1], (len(logits),), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(logits, targets)


def trained_natively(model: LlamaForSFT) -> dict[str, torch.nn.Parameter]:
    return {peft_name(name): each for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.parametrize(
    ("case", "recompute"),
    [*((case, "none") for case in CASES), *product(["all layers", "dora", "q and v", "biases"], ["selective", "full"])],
)
def test_logits_and_gradients_are_those_of_peft_and_no_other_parameter_has_one(case: str, recompute: str) -> None:
    family, options = CASES[case]
    reference = make_peft(family, **options)
    native = make_adapted(family, reference, activation_checkpointing=recompute)
    logits, expected_logits = logits_of(native), expected_logits_of(reference)
    base_logits = logits_of(make_native(make_reference(**FAMILIES[family])))
    assert (expected_logits - base_logits).abs().max() > 0.1 * base_logits.abs().max()
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-5 * expected_logits.abs().max().item())

    loss_of(logits).backward()
    loss_of(expected_logits).backward()
    gradients: dict[str, Any] = {peft_name(n): p.grad for n, p in native.named_parameters() if p.grad is not None}
    expected: dict[str, Any] = {name: parameter.grad for name, parameter in trained(reference).items()}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


STEPPED = ["all layers", "q and v", "Qwen 3", "ranks and alphas", "rslora", "dora with biases", "tied embeddings"]


@pytest.mark.parametrize("case", rest_nightly(STEPPED, ["all layers", "ranks and alphas", "dora with biases"]))
def test_five_steps_of_adamw_update_the_adapters_as_in_peft_and_leave_the_base_to_the_bit(case: str) -> None:
    family, options = CASES[case]
    reference = make_peft(family, **options)
    native = make_adapted(family, reference)
    frozen = {n: p.detach().clone() for n, p in native.named_parameters() if not p.requires_grad}
    ours, theirs = trained_natively(native), trained(reference)
    before = {name: parameter.detach().clone() for name, parameter in theirs.items()}
    optimizers = [torch.optim.AdamW(each.values(), lr=1e-3, weight_decay=0.1) for each in (ours, theirs)]
    for step in range(5):
        loss_of(logits_of(native, step), step).backward()
        loss_of(expected_logits_of(reference, step), step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in theirs.items():
        update = parameter.detach() - before[name]
        assert update.norm() > 0, name
        assert (ours[name].detach() - before[name] - update).norm() <= 1e-3 * update.norm(), name
    assert all(dict(native.named_parameters())[name].equal(tensor) for name, tensor in frozen.items())


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_those_that_peft_merges(case: str) -> None:
    family, options = CASES[case]
    reference = make_peft(family, **options)
    values, spec = trained(reference), spec_of(reference)
    base = make_reference(**FAMILIES[family]).state_dict()
    merged = reference.merge_and_unload().state_dict()
    for name in spec.ranks:
        a, b = (values[f"{name}.{each}.weight"] for each in ("lora_A", "lora_B"))
        magnitude = values.get(f"{name}.lora_magnitude_vector")
        found = merge(base[f"{name}.weight"], a, b, spec.scale(name), magnitude)
        torch.testing.assert_close(found, merged[f"{name}.weight"], rtol=1e-5, atol=1e-5)
        assert (found - base[f"{name}.weight"]).norm() > 0


@pytest.mark.parametrize(
    "targets",
    [
        ALL_LINEAR,
        QV,
        ["layers.1.self_attn.q_proj"],
        ["proj"],
        ["model.layers.0.mlp.up_proj", "o_proj"],
        r".*\.1\..*_proj",
    ],
)
def test_targets_select_the_layers_that_peft_selects(targets: str | list[str]) -> None:
    reference = make_reference()
    names = list(projections_of(native := make_native(reference), native.config))
    try:
        found = set(match_targets(targets, names))
    except ValueError:
        found = set()
    try:
        model = peft.get_peft_model(reference, peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))
        expected = spec_of(model).ranks.keys()
    except ValueError:
        expected = set()
    assert found == expected
    assert bool(found) == (targets != ["proj"])


@pytest.mark.parametrize(("init", "pefts"), [("default", True), ("gaussian", "gaussian")])
def test_initial_values_have_the_distribution_of_pefts(init: str, pefts: str | bool) -> None:
    options = {"r": 64, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "use_dora": True}
    base = make_reference(hidden_size=512, intermediate_size=64, num_hidden_layers=1)
    weight = base.model.layers[0].self_attn.q_proj.weight.detach()
    reference = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=pefts, **options))
    for name, value in trained(reference).items():
        native = name.replace(".q_proj.", ".qkv_proj.adapters.q_proj.").removesuffix(".weight")
        found, other = (
            initial_value(native, value.shape, seed=seed, init=init, row_norms=lambda _: weight.norm(dim=1))
            for seed in (0, 1)
        )
        if "lora_A" in name:
            assert not found.equal(other)
            assert found.mean() == pytest.approx(0, abs=0.02 * value.std().item())
            assert found.std() == pytest.approx(value.std().item(), rel=0.02)
            assert found.abs().max() == pytest.approx(value.abs().max().item(), rel=0.3)
        else:
            torch.testing.assert_close(found, value.detach())


@pytest.mark.parametrize(
    ("ranks", "saved", "tied", "message"),
    [
        ({"lm_head": 4}, (), False, "no linear layer lm_head"),
        ({"model.layers.9.self_attn.q_proj": 4}, (), False, "no linear layer model.layers.9"),
        ({}, ("lm_head",), True, "lm_head is tied to the embeddings"),
    ],
)
def test_an_adapter_that_a_model_cannot_have_is_refused(
    ranks: dict[str, int], saved: tuple[str, ...], tied: bool, message: str
) -> None:
    native = make_native(make_reference(tie_word_embeddings=tied))
    with pytest.raises(ValueError, match=message):
        add_adapters(native, native.config, LoraSpec(ranks=ranks, alphas=ranks, modules_to_save=saved))


def test_a_spec_comes_back_from_json() -> None:
    spec = LoraSpec(ranks={"a": 2}, alphas={"a": 0.5}, rslora=True, dora=True, modules_to_save=("lm_head",))
    assert LoraSpec.from_dict(json.loads(json.dumps(spec.as_dict()))) == spec


def test_adapters_have_the_names_by_which_checkpoints_of_other_versions_hold_them() -> None:
    reference = make_reference(num_hidden_layers=1)
    native, names = make_native(reference), ["self_attn.q_proj", "mlp.up_proj"]
    ranks = {f"model.layers.0.{name}": 4 for name in names}
    add_adapters(native, native.config, LoraSpec(ranks=ranks, alphas=ranks))
    found = {name for name, _ in native.named_parameters() if ".adapters." in name}
    fused = ["self_attn.qkv_proj.adapters.q_proj", "mlp.gate_up_proj.adapters.up_proj"]
    assert found == {f"model.layers.0.{name}.lora_{factor}" for name in fused for factor in "AB"}
