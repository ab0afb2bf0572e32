"""Steps of mixtures of experts: the auxiliary loss is one number over the real tokens of the whole step."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from sftron.data.types import IGNORE_INDEX
from sftron.models.fusion import fuse_state_dict
from sftron.models.llama import ACTIVATION_CHECKPOINTING
from sftron.train.step import train_step
from tests.models.reference import EXPERTS, GPT_OSS, QWEN_3_5_MOE, make_native, make_reference
from tests.models.reference import FAMILIES as ALL_FAMILIES
from tests.train.test_step import CONVERSATIONS, LAYOUTS, Recording, batch_of

COEFFICIENT = 2.0
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "gpt_oss": GPT_OSS | {"num_experts_per_tok": 2},
    # Smaller values, with which its loss is not balanced by chance.
    "qwen3_5_moe_text": QWEN_3_5_MOE
    | {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "initializer_range": 0.15},
    "gemma4_text": ALL_FAMILIES["Gemma 4 26B-A4B"]
    | {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2},
}


def single_conversations(coefficient: float, family: str) -> tuple[float, float, dict[str, Tensor]]:
    """Returns the token loss, the auxiliary loss and the gradients of transformers, one conversation after another."""
    reference = make_reference(**FAMILIES[family])
    total, router_logits = torch.zeros(()), []
    for c in CONVERSATIONS:
        output = reference(torch.from_numpy(c.input_ids.astype(np.int64))[None], output_router_logits=True)
        # Those of Gemma 4, which has no such loss, are probabilities.
        of_layers = [each.log() if family == "gemma4_text" else each for each in output.router_logits]
        router_logits.append(of_layers)
        labels = torch.from_numpy(c.labels.astype(np.int64))
        losses = F.cross_entropy(output.logits[0], labels, reduction="none", ignore_index=IGNORE_INDEX)
        total = total + (losses * torch.from_numpy(c.loss_weights)).sum()
    loss = total / float(sum(c.loss_weights.astype(np.float64).sum() for c in CONVERSATIONS))
    by_layer = tuple(torch.cat(each) for each in zip(*router_logits, strict=True))
    balance: Any = load_balancing_loss_func(by_layer, 6, 2)  # pyright: ignore[reportArgumentType]
    assert len(by_layer) == 2
    (loss + coefficient * balance).backward()
    gradients: dict[str, Any] = {name: p.grad for name, p in reference.named_parameters()}
    native = make_native(reference)
    names = [name for name, parameter in native.named_parameters() if parameter.requires_grad]
    return loss.item(), balance.item(), dict(fuse_state_dict(names, native.config, gradients.__getitem__))


@pytest.mark.parametrize("keep_tail", [False, True])
@pytest.mark.parametrize("coefficient", [0.0, COEFFICIENT])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_losses_and_their_gradients_are_those_of_single_conversations_however_they_are_packed(
    family: str, layout: str, coefficient: float, keep_tail: bool
) -> None:
    model = make_native(make_reference(**FAMILIES[family]))
    batches = [batch_of([CONVERSATIONS[n] for n in numbers], keep_tail=keep_tail) for numbers in LAYOUTS[layout]]
    recording = Recording(model)
    given = {"router_aux_loss_coef": coefficient} if coefficient else {}  # none by default
    result = train_step(model, recording, batches, max_grad_norm=None, **given)
    expected_loss, expected_balance, expected = single_conversations(coefficient, family)

    assert result.loss == pytest.approx(expected_loss, rel=1e-5)
    assert result.expert_load is not None
    assert result.expert_load.aux_loss == pytest.approx(expected_balance, rel=1e-5)
    assert expected_balance > 1.03 * 2
    assert 1 / 6 < result.expert_load.largest_share <= 1 / 2
    assert recording.gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (recording.gradients[name] - gradient).norm()
        assert difference <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_auxiliary_loss_changes_the_gradients_by_far_more_than_the_bounds_of_the_tests(family: str) -> None:
    without, with_loss = (single_conversations(coefficient, family)[2] for coefficient in (0.0, COEFFICIENT))
    for name in without:
        if ".gate.weight" in name:
            assert (with_loss[name] - without[name]).norm() > 0.1 * without[name].norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_activation_checkpointing_changes_no_bit_of_gradients_and_loads(family: str) -> None:
    reference = make_reference(**FAMILIES[family])
    results = []
    for mode in ACTIVATION_CHECKPOINTING:
        model = make_native(reference, activation_checkpointing=mode)
        recording = Recording(model)
        batches = [batch_of(CONVERSATIONS[:3]), batch_of(CONVERSATIONS[3:])]
        result = train_step(model, recording, batches, max_grad_norm=None, router_aux_loss_coef=COEFFICIENT)
        results.append((result.expert_load, recording.gradients))
    for load, gradients in results[1:]:
        assert load == results[0][0]
        assert all(gradients[name].equal(gradient) for name, gradient in results[0][1].items())
