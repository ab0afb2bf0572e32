"""Routers, experts and their balance, against the modules of transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.olmoe.configuration_olmoe import OlmoeConfig
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe
from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

from sftron.checks.parity import check_neighbors, native_logits, rounding_of_experts
from sftron.models import experts as native_experts
from sftron.models.experts import BiasedExperts, Experts, sort_by_expert
from sftron.models.mixtures import Mixture
from sftron.models.routing import CorrectedRouter, Router, Routing, ScaledRouter
from sftron.models.sdpa_attention import SdpaAttention
from tests.models.reference import FAMILIES, TINY, make_native, make_reference, pack

HIDDEN, NUM_EXPERTS, NUM_SELECTED, INNER = 48, 10, 3, 40
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": NUM_SELECTED, "experts_implementation": "eager"}

BLOCKS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: mixtral.MixtralSparseMoeBlock(
        MixtralConfig(**SIZES, num_local_experts=NUM_EXPERTS, intermediate_size=INNER)
    ),
    "qwen2_moe": lambda: qwen2_moe.Qwen2MoeSparseMoeBlock(
        Qwen2MoeConfig(**SIZES, num_experts=NUM_EXPERTS, moe_intermediate_size=INNER)
    ),
    "qwen3_moe": lambda: qwen3_moe.Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(**SIZES, num_experts=NUM_EXPERTS, moe_intermediate_size=INNER, norm_topk_prob=True)
    ),
    "olmoe": lambda: olmoe.OlmoeSparseMoeBlock(
        OlmoeConfig(**SIZES, num_experts=NUM_EXPERTS, intermediate_size=INNER, norm_topk_prob=False)
    ),
    "qwen3_moe, gelu": lambda: qwen3_moe.Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(
            **SIZES, num_experts=NUM_EXPERTS, moe_intermediate_size=INNER, norm_topk_prob=True, hidden_act="gelu_new"
        )
    ),
    "gpt_oss": lambda: gpt_oss.GptOssMLP(
        GptOssConfig(**SIZES, **CLAMP, num_local_experts=NUM_EXPERTS, intermediate_size=INNER)
    ),
}
CLAMP = {"swiglu_alpha": 1.3, "swiglu_limit": 2.0}
NORMALIZES = {"mixtral": True, "qwen2_moe": False, "qwen3_moe": True, "olmoe": False, "gpt_oss": True}
NORMALIZES |= {"qwen3_moe, gelu": True}


def make_mixture(**fields: Any) -> Mixture:
    usual = {"num_experts": NUM_EXPERTS, "num_selected": NUM_SELECTED, "intermediate_size": INNER, "normalizes": True}
    return Mixture(**usual | {"shared_size": None} | fields)


def make_pair(family: str) -> tuple[Any, Any, Router, Experts | BiasedExperts]:
    """Returns router and experts of transformers, in eager loops, and native ones with the same weights."""
    torch.manual_seed(0)
    block = BLOCKS[family]()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    options: dict[str, Any] = {"initializer_range": 0.02}
    router = Router(HIDDEN, make_mixture(normalizes=NORMALIZES[family]), **options)
    if family == "gpt_oss":
        block.gate, router.bias = block.router, torch.nn.Parameter(torch.zeros(NUM_EXPERTS))
        experts = BiasedExperts(HIDDEN, NUM_EXPERTS, INNER, alpha=1.3, limit=2.0, **options)
    else:
        activation = "gelu_new" if family.endswith("gelu") else "silu"
        experts = Experts(HIDDEN, NUM_EXPERTS, INNER, activation=activation, **options)
    router.load_state_dict(block.gate.state_dict())
    experts.load_state_dict(block.experts.state_dict())
    return block.gate, block.experts, router, experts


@pytest.mark.parametrize("family", BLOCKS)
def test_ten_thousand_tokens_choose_the_experts_of_transformers(family: str) -> None:
    their_router, _, router, _ = make_pair(family)
    x = torch.randn(10_000, HIDDEN)
    _, their_scores, their_choice = their_router(x)
    scores, choice = router(x)
    logits = x.double() @ router.weight.double().T + (0 if router.bias is None else router.bias.double())
    sorted_logits = logits.sort(dim=-1, descending=True).values[:, : NUM_SELECTED + 1]
    is_tie = (sorted_logits.diff(dim=-1).abs() < 1e-5).any(dim=-1)
    assert is_tie.sum() < 20
    assert choice[~is_tie].equal(their_choice[~is_tie])
    torch.testing.assert_close(scores[~is_tie], their_scores[~is_tie], atol=0, rtol=1e-5)
    assert len(choice.unique()) == NUM_EXPERTS


@pytest.mark.parametrize("family", BLOCKS)
@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_outputs_and_gradients_are_those_of_transformers_in_fp64(family: str, num_tokens: int) -> None:
    their_router, their_experts, router, experts = make_pair(family)
    x, grad = torch.randn(num_tokens, HIDDEN), torch.randn(num_tokens, HIDDEN)
    ours = x.clone().requires_grad_()
    output = experts(ours, *router(ours))
    output.backward(grad)
    theirs = x.double().requires_grad_()
    their_router, their_experts = their_router.double(), their_experts.double()
    # The choice is the native one, because fp64 breaks ties differently; another test compares the choices.
    logits, _, choice = their_router(theirs)
    assert choice.equal(router(x)[1])
    scores = logits.softmax(-1).gather(1, choice)
    scores = scores / scores.sum(-1, keepdim=True) if NORMALIZES[family] else scores
    expected = their_experts(theirs, choice, scores)
    expected.backward(grad.double())

    def require_close(found: Tensor | None, wanted: Tensor | None) -> None:
        assert found is not None
        assert wanted is not None
        assert wanted.norm() > 0
        assert (found.double() - wanted).norm() <= 3e-6 * wanted.norm()

    require_close(output, expected)
    require_close(ours.grad, theirs.grad)
    for name, parameter in router.named_parameters():
        require_close(parameter.grad, their_router.get_parameter(name).grad)
    for name, parameter in experts.named_parameters():
        require_close(parameter.grad, their_experts.get_parameter(name).grad)
        assert parameter.grad is not None
        # Experts without a token have no gradient at all; others may not be mixed up.
        for found, wanted in zip(parameter.grad, their_experts.get_parameter(name).grad, strict=True):
            assert (found.double() - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [6, 120])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_experts_that_others_choose_change_a_token_by_rounding_alone(
    family: str, num_tokens: int, dtype: torch.dtype
) -> None:
    _, _, router, experts = make_pair(family)
    x = torch.randn(num_tokens, HIDDEN).to(dtype)
    changed = x.clone()
    changed[::2] = torch.randn(len(x[::2]), HIDDEN).to(dtype)
    results = []
    for each in (x, changed):
        each.requires_grad_()
        output = experts(each, *router(each))
        output.backward(torch.ones_like(output))
        results.append((output.detach()[1::2], each.grad[1::2]))  # pyright: ignore[reportOptionalSubscript]
    assert not router(x)[1].equal(router(changed)[1])
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    for before, after in zip(*results, strict=True):
        torch.testing.assert_close(after, before, atol=tolerance * float(before.abs().max()), rtol=0)


MIXTURES = ["Mixtral", "Qwen 2 MoE", "Qwen 3 MoE", "OLMoE", "gpt-oss", "Qwen 3.5 MoE", "Qwen3-Next"]
MIXTURES += ["Granite 4 with experts", "Gemma 4 26B-A4B"]


@pytest.mark.parametrize("family", MIXTURES)
def test_changing_one_document_changes_others_by_rounding_alone(family: str) -> None:
    native, lengths = make_native(make_reference(**FAMILIES[family])), [7, 1, 30, 12]
    input_ids, *rest = pack(lengths)
    before = native(input_ids, *rest).detach().split(lengths)
    for changed in range(len(lengths)):
        documents = list(input_ids.split(lengths))
        documents[changed] = (documents[changed] + 1) % TINY["vocab_size"]
        after = native(torch.cat(documents), *rest).detach().split(lengths)
        differences = [float((a - b).abs().max()) for a, b in zip(before, after, strict=True)]
        assert [difference < 1e-4 for difference in differences] == [n != changed for n in range(len(lengths))]


@pytest.mark.parametrize("family", ["Mixtral", "gpt-oss", "Qwen 3"])
def test_a_check_allows_the_rounding_of_experts_and_no_leak(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    native, documents = make_native(make_reference(**FAMILIES[family])), [[5, 6, 7], [8, 9, 10, 11], [3, 4]]
    with torch.no_grad():
        alone = native_logits(native, documents[1:2])[0]
        limit = rounding_of_experts(native, lambda number: native_logits(native, documents[1:2] * number))
        assert (limit > 0) == (family != "Qwen 3")
        assert limit < 1e-4

        attend = SdpaAttention.__call__
        monkeypatch.setattr(SdpaAttention, "__call__", lambda *args: attend(*args) + 1e-2 * attend(*args).mean(0))
        leaking = [native_logits(native, [first, documents[1]])[1] for first in (documents[0], [50, 60, 70])]
    assert (leaking[0] - leaking[1]).abs().max() > 4 * limit
    assert not leaking[0].equal(alone)


def test_the_rounding_of_experts_is_the_largest_of_several_copies_at_all_places() -> None:
    native, sizes = make_native(make_reference(**FAMILIES["Mixtral"])), list[int]()

    def outputs(number: int) -> list[Tensor]:
        """The second copy rounds as the document alone does; a later one in a larger pack rounds otherwise."""
        sizes.append(number)
        return [torch.ones(3, 4) + 3e-6 * (number > 2 and place == number - 1) for place in range(number)]

    assert rounding_of_experts(native, outputs) == pytest.approx(3e-6, rel=0.1)
    assert sizes == [1, 2, 3, 5]


@pytest.mark.parametrize(("worst", "largest"), [(1.5e-7, 0.92), (1.2e-6, 3.4)])
def test_copies_that_round_alike_still_allow_what_neighbors_were_seen_to_round(worst: float, largest: float) -> None:
    """Two random granitemoeshared: the change of documents by their neighbors, and the largest logit."""
    native = make_native(make_reference(**FAMILIES["Mixtral"]))
    rounding = rounding_of_experts(native, lambda number: [torch.full((3, 4), largest)] * number)
    assert worst < 4 * rounding < 1e-5, "four times is the limit; a neighbor's token changes 1e-2"


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("num_seeds", [3, pytest.param(200, marks=pytest.mark.nightly)])
def test_no_seed_of_a_mixture_gives_a_false_alarm_and_a_leak_fails(
    family: str, num_seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[str] = []
    for seed in range(num_seeds):
        native = make_native(make_reference(**FAMILIES[family] | {"seed": seed})).eval()
        lengths = torch.randint(1, 90, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
        documents = [torch.randint(TINY["vocab_size"], (length,)).tolist() for length in lengths]
        with torch.no_grad():
            if not (found := check_neighbors(native, documents)).passed:
                failed.append(f"seed {seed}, {lengths}: {found.measured}, allowed {found.allowed}")
            with monkeypatch.context() as leaking:
                # The first token of a document sees one token of its neighbor, by a hundredth.
                attend = SdpaAttention.__call__
                leaking.setattr(
                    SdpaAttention, "__call__", lambda *args, a=attend: (own := a(*args)) + 1e-2 * own.roll(1, 0)
                )
                if check_neighbors(native, documents).passed:
                    failed.append(f"seed {seed}, {lengths}: the leak passed")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_grouped_products_gets_what_the_loop_gets(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has an implementation for CPUs too, with the arguments of the one for GPUs, which leaves the product of an
    expert without rows as it finds it."""
    grouped_mm = F.grouped_mm

    def kernel(*arguments: Tensor, offs: Tensor) -> Tensor:
        products = grouped_mm(*arguments, offs=offs)
        if products.dim() == 3:
            products[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return products

    monkeypatch.setattr(F, "grouped_mm", kernel)
    _, _, router, experts = make_pair(family)
    results = []
    for has_kernel in (False, True):
        monkeypatch.setattr(native_experts, "has_kernel", lambda *_, has_kernel=has_kernel: has_kernel)
        x = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        scores, choice = router(x)
        choice = torch.where(choice == 4, 5, choice)  # an expert without rows
        experts.zero_grad()
        experts(x, scores, choice).square().sum().backward()
        results.append([x.grad, *(parameter.grad for parameter in experts.parameters())])
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for loop, kernel in zip(*results, strict=True):
        torch.testing.assert_close(kernel, loop, atol=tolerance * float(loop.abs().max()), rtol=0)
    assert not results[1][1][4].any()


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "expected"),
    [
        ((7, 5), torch.bfloat16, 8, False),
        ((8, 0), torch.bfloat16, 8, False),
        ((8, 9), torch.bfloat16, 8, False),
        ((9, 0), torch.bfloat16, 8, True),
        ((9, 0), torch.float32, 8, False),
        ((9, 0), torch.bfloat16, 12, False),
        ((10, 0), torch.bfloat16, 8, True),
        ((10, 3), torch.bfloat16, 8, True),
        ((12, 0), torch.bfloat16, 8, False),
    ],
)
def test_grouped_products_have_a_kernel_on_hopper_and_datacenter_blackwell_alone(
    capability: tuple[int, int], dtype: torch.dtype, size: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For bf16 rows of whole 16 bytes; elsewhere torch has a loop, and checks allow for its rounding."""
    monkeypatch.setattr(native_experts, "is_gpu", lambda _: True)
    monkeypatch.setattr(native_experts, "compute_capability", lambda _: capability)
    rows, weight = (torch.empty(*shape, dtype=dtype) for shape in ((3, 8), (2, size, 8)))
    experts = Experts(8, 2, size, initializer_range=0.1)
    assert native_experts.has_kernel(rows, weight) is expected
    assert native_experts.rounds_with_neighbors(experts, dtype) is not expected


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_without_a_kernel_the_host_reads_the_rows_of_experts_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: reads.append(len(tensor)) or tolist(tensor))
    _, _, router, experts = make_pair(family)
    x = torch.randn(50, HIDDEN, requires_grad=True)
    experts(x, *router(x)).sum().backward()
    assert all(each.grad is not None for each in experts.parameters())
    assert reads == [NUM_EXPERTS]


def test_slots_are_sorted_by_expert_and_in_order() -> None:
    order, ranges = sort_by_expert(torch.tensor([[2, 0], [0, 3], [2, 3]]), 5)
    #   slots       0  1    2  3    4  5
    assert order.tolist() == [1, 2, 0, 4, 3, 5]
    assert ranges.ends_E.tolist() == [2, 2, 4, 6, 6]
    assert [(each.start, each.stop) for each in ranges.slices] == [(0, 2), (2, 2), (2, 4), (4, 6), (6, 6)]
    # Of as many slots as a long document has: sums in another order would be other bits.
    experts = torch.randint(0, 4, (10_000, 2), generator=torch.Generator().manual_seed(0))
    order, _ = sort_by_expert(experts, 4)
    assert order.tolist() == sorted(range(20_000), key=lambda slot: (int(experts.flatten()[slot]), slot))


# --- Routers with a fixed correction ---


@pytest.mark.parametrize(("num_groups", "num_selected_groups"), [(1, 1), (5, 5), (5, 2), (3, 1)])
@pytest.mark.parametrize("normalizes", [True, False])
def test_ten_thousand_tokens_choose_the_experts_of_transformers_from_the_best_groups(
    num_groups: int, num_selected_groups: int, normalizes: bool
) -> None:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=15,
        num_experts_per_tok=NUM_SELECTED,
        n_group=num_groups,
        topk_group=num_selected_groups,
        norm_topk_prob=normalizes,
        routed_scaling_factor=1.7,
    )
    theirs = deepseek_v3.DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(theirs.weight, std=0.3)
    torch.nn.init.normal_(theirs.e_score_correction_bias, std=0.3)
    groups = {"num_groups": num_groups, "num_selected_groups": num_selected_groups, "score_scale": 1.7}
    mixture = make_mixture(num_experts=15, router="corrected", normalizes=normalizes, **groups)
    router = CorrectedRouter(HIDDEN, mixture, initializer_range=0.02)
    without = CorrectedRouter(HIDDEN, mixture, initializer_range=0.02)
    router.load_state_dict(theirs.state_dict())
    without.load_state_dict({"weight": theirs.weight}, strict=False)

    x = torch.randn(10_000, HIDDEN)
    ours, grads = x.clone().requires_grad_(), torch.randn(10_000, 15)
    scores_TK, experts_TK = router(ours)
    x.requires_grad_()
    _, their_scores_TK, their_experts_TK = theirs(x)
    found_TE, expected_TE = (
        torch.zeros(10_000, 15).scatter(1, experts, scores)
        for scores, experts in ((scores_TK, experts_TK), (their_scores_TK, their_experts_TK))
    )
    is_same = (found_TE.detach() > 0).eq(expected_TE.detach() > 0).all(dim=1)
    assert is_same.sum() >= 9_995  # ties, of which rounding decides
    torch.testing.assert_close(found_TE[is_same], expected_TE[is_same], atol=0, rtol=1e-5)
    grads[~is_same] = 0
    (found_TE * grads).sum().backward()
    (expected_TE * grads).sum().backward()
    torch.testing.assert_close(ours.grad, x.grad, atol=1e-5, rtol=0)
    torch.testing.assert_close(router.weight.grad, theirs.weight.grad, atol=1e-3, rtol=1e-5)
    assert router.e_score_correction_bias.grad is None
    assert len(experts_TK.unique()) == 15
    assert without(x)[1].ne(experts_TK).any(dim=1).float().mean() > 0.3


def test_the_loads_of_a_router_with_a_correction_are_counted_and_an_auxiliary_loss_is_not_trained() -> None:
    torch.manual_seed(0)
    mixture = make_mixture(router="corrected", num_groups=5, num_selected_groups=2)
    model = torch.nn.ModuleList([CorrectedRouter(HIDDEN, mixture, initializer_range=0.3)])
    x = torch.randn(60, HIDDEN)
    with Routing(model) as routing, routing.forward_pass(50, counts=True):
        _, experts_TK = model[0](x)
    assert routing.table_L2E[0, 0].tolist() == experts_TK[:50].flatten().bincount(minlength=NUM_EXPERTS).tolist()
    assert routing.table_L2E[0, 1].sum() == pytest.approx(50)
    with pytest.raises(AssertionError):
        Routing(model, 0.1)


# --- A router with a norm of its own ---


def test_the_scores_of_a_router_that_norms_its_rows_and_all_gradients_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    options = {"num_experts": NUM_EXPERTS, "top_k_experts": NUM_SELECTED, "moe_intermediate_size": INNER}
    theirs = gemma4.Gemma4TextRouter(Gemma4TextConfig(hidden_size=HIDDEN, rms_norm_eps=0.5, **options))
    router = ScaledRouter(HIDDEN, make_mixture(), initializer_range=0.02, eps=0.5)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=1.0)
    router.load_state_dict({name.removeprefix("proj."): each for name, each in theirs.state_dict().items()})
    # Rows of all sizes: where they are small, eps is more than they are.
    x, grads = torch.randn(10_000, HIDDEN) * torch.rand(10_000, 1) * 3, torch.randn(10_000, NUM_EXPERTS)
    found = []
    for each in (router, theirs):
        rows = x.clone().requires_grad_()
        *_, scores, choice = each(rows)
        found.append((rows, torch.zeros(10_000, NUM_EXPERTS).scatter(1, choice, scores), choice.sort(dim=1).values))
    (ours, found_TE, choice), (wanted, expected_TE, their_choice) = found
    is_same = choice.eq(their_choice).all(dim=1)
    assert is_same.sum() >= 9_995  # ties, of which rounding decides
    assert len(choice.unique()) == NUM_EXPERTS
    torch.testing.assert_close(found_TE[is_same], expected_TE[is_same], atol=1e-6, rtol=1e-5)
    for table_TE in (found_TE, expected_TE):
        (table_TE * grads)[is_same].sum().backward()
    pairs = [(ours.grad, wanted.grad), (router.weight.grad, theirs.proj.weight.grad)]
    pairs += [(router.scale.grad, theirs.scale.grad), (router.per_expert_scale.grad, theirs.per_expert_scale.grad)]
    for gradient, expected in pairs:
        assert gradient is not None
        assert expected is not None
        assert (gradient - expected).norm() <= 1e-5 * expected.norm()


# --- The auxiliary loss ---


class _TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.routers = torch.nn.ModuleList(Router(HIDDEN, make_mixture(), initializer_range=0.2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([router(x)[0].sum() for router in self.routers]).sum() * 0


def test_the_loss_and_its_gradient_are_those_of_transformers_over_real_tokens_however_they_are_split() -> None:
    model = _TwoLayers()
    x, coefficient = torch.randn(60, HIDDEN) + 1, 0.7  # some experts are far more likely than others
    logits = tuple(x @ router.weight.T for router in model.routers)  # pyright: ignore[reportOperatorIssue, reportAttributeAccessIssue]
    expected = qwen3_moe.load_balancing_loss_func(logits, NUM_EXPERTS, NUM_SELECTED)  # pyright: ignore[reportArgumentType]
    assert isinstance(expected, Tensor)
    assert expected > 1.05 * NUM_SELECTED
    gradients = torch.autograd.grad(coefficient * expected, list(model.parameters()))
    for sizes in ([60], [10, 50], [1, 9, 30, 20]):
        model.zero_grad()
        with Routing(model, coefficient) as routing:
            # 5 rows of padding after each micro-batch
            micro_batches = [(size, F.pad(rows, (0, 0, 0, 5), value=1.0)) for size, rows in zip(sizes, x.split(sizes))]  # noqa: B905
            for size, rows in micro_batches[1:]:
                with torch.no_grad(), routing.forward_pass(size, counts=True):
                    model(rows)
            for number, (size, rows) in enumerate(micro_batches):
                with routing.forward_pass(size, counts=number == 0):
                    share = model(rows)
                if number == 0:
                    routing.before_backward(lambda tensor: tensor)
                share.backward()
            measured = routing.measures(routing.table_L2E)
        torch.testing.assert_close(measured[0].float(), expected, atol=0, rtol=1e-6)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-5 * float(gradient.abs().max()), rtol=0)
    choices = [router(x)[1] for router in model.routers]
    loads = torch.stack([F.one_hot(choice, NUM_EXPERTS).sum(dim=(0, 1)) for choice in choices])
    assert measured[1].item() == pytest.approx(loads.max().item() / (60 * NUM_SELECTED))
    assert all(router.routing is None for router in model.routers)


def test_a_model_without_experts_records_nothing() -> None:
    with Routing(torch.nn.Linear(2, 2), 0.5) as routing, routing.forward_pass(3, counts=True):
        routing.before_backward(lambda tensor: tensor)
    assert routing.measures(routing.table_L2E).numel() == 0
