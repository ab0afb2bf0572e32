"""Law 8: the loss is one ratio over the step, so how conversations are spread over micro-batches changes nothing."""

import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sftron.data.loader import collate
from sftron.data.packing import lay_out
from sftron.data.types import IGNORE_INDEX, Batch, ConversationKey, LabeledConversation
from sftron.models.fusion import fuse_state_dict
from sftron.models.llama import ACTIVATION_CHECKPOINTING, LlamaForSFT
from sftron.train.flops import StepFlops
from sftron.train.objective import loss_of
from sftron.train.optimizer import make_by_name
from sftron.train.ranks import Ranks
from sftron.train.step import next_step_batches, peak_memory_bytes, train_step
from tests.models.reference import GPT_OSS, TINY, make_ours, make_theirs

LENGTHS = (9, 4, 14, 6)


def conversation(length: int, number: int, *, share_trained: float = 0.5) -> LabeledConversation:
    """Random ids; about half of the tokens trained, with weights of their own."""
    rng = np.random.default_rng(number)
    ids = rng.integers(0, TINY["vocab_size"], length).astype(np.int32)
    labels = np.append(ids[1:], IGNORE_INDEX)
    labels[rng.random(length) >= share_trained] = IGNORE_INDEX
    weights = np.where(labels != IGNORE_INDEX, rng.uniform(0.2, 2.0, length), 0).astype(np.float32)
    return LabeledConversation(ids, labels.astype(np.int32), weights, ids.astype(np.uint8), ConversationKey(0, number))


CONVERSATIONS = [conversation(length, number) for number, length in enumerate(LENGTHS)]


def batch_of(conversations: Sequence[LabeledConversation], *, keep_tail: bool = False) -> Batch:
    pack = lay_out(conversations, token_budget=40, remove_cross_attention=True, pad_id=0)
    return collate(pack, keep_tail=keep_tail)


class Recording(torch.optim.SGD):
    """Keeps the gradients that it is given, and changes nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.model, self.gradients = model, {}

    def step(self, closure: Any = None) -> None:
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}


def step_over(model: LlamaForSFT, batches: Sequence[Batch]) -> tuple[float, dict[str, Tensor], float]:
    recording = Recording(model)
    result = train_step(model, recording, batches, max_grad_norm=None)
    assert result.loss is not None
    assert result.grad_norm is not None
    return result.loss, recording.gradients, result.grad_norm


def single_conversations(dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    """transformers, one conversation after another without any packing, and torch's cross entropy."""
    reference = make_theirs().to(dtype)
    total = torch.zeros((), dtype=dtype)
    denominator = sum(c.loss_weights.astype(np.float64).sum() for c in CONVERSATIONS)
    for c in CONVERSATIONS:
        logits = reference(torch.from_numpy(c.input_ids.astype(np.int64))[None]).logits[0]
        losses = F.cross_entropy(
            logits, torch.from_numpy(c.labels.astype(np.int64)), reduction="none", ignore_index=IGNORE_INDEX
        )
        total = total + (losses * torch.from_numpy(c.loss_weights).to(dtype)).sum()
    loss = total / denominator
    loss.backward()
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    native = make_ours(reference)
    names = [name for name, _ in native.named_parameters()]
    return loss.item(), dict(fuse_state_dict(names, native.config, gradients.__getitem__))


LAYOUTS: dict[str, list[list[int]]] = {
    "1 pack of 4": [[0, 1, 2, 3]],
    "2 packs of 2": [[0, 1], [2, 3]],
    "2 packs, otherwise": [[2], [3, 0, 1]],
    "4 packs of 1": [[0], [1], [2], [3]],
    "with empty packs": [[0, 3], [], [2, 1], []],
}


@pytest.mark.parametrize("keep_tail", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_those_of_single_conversations_however_they_are_packed(
    layout: str, keep_tail: bool
) -> None:
    model = make_ours(make_theirs())
    batches = [batch_of([CONVERSATIONS[n] for n in numbers], keep_tail=keep_tail) for numbers in LAYOUTS[layout]]
    loss, gradients, norm = step_over(model, batches)
    expected_loss, expected = single_conversations(torch.float64)

    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            gradients[name].double(), gradient, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: n + m
        )
    assert norm == pytest.approx(torch.cat([g.flatten() for g in expected.values()]).norm().item(), rel=1e-4)


def test_a_mean_of_means_would_be_another_number() -> None:
    """Otherwise the tests above could not distinguish the two."""
    model = make_ours(make_theirs())
    means = [step_over(model, [batch_of([c])])[0] for c in CONVERSATIONS]
    whole, _, _ = step_over(model, [batch_of(CONVERSATIONS)])

    assert abs(sum(means) / 4 - whole) > 0.01 * whole


def test_the_spread_of_attention_work_is_what_the_busiest_rank_has_above_the_mean() -> None:
    ranks = Ranks(device=torch.device("cpu"))
    lengths = [list(LENGTHS), [5, 5], []]
    batches = [[batch_of([conversation(length, 0) for length in own])] for own in lengths]

    def spread(own: Sequence[int]) -> float:
        of_others: list[Any] = []
        with patch.object(Ranks, "gather", lambda _, facts: (of_others.append(facts), list(of_others))[1]):
            for number in own:
                given = iter(batches[number])
                fetched = next_step_batches(given, 1, ranks=ranks, num_datasets=1, flops_of=lambda _: StepFlops(0, 0))
        return fetched.sum_squared_lengths_spread  # of the last rank, to which all have given their facts

    work = [sum(length**2 for length in own) for own in lengths]
    assert spread([0]) == spread([0, 0]) == 0
    assert spread([2, 2]) == 0  # no rank has any
    assert spread([0, 1, 2]) == pytest.approx(max(work) / (sum(work) / 3) - 1)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux states a process's memory here")
def test_the_peak_memory_of_a_process_is_in_bytes() -> None:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    assert 0.9 * resident < peak_memory_bytes(torch.device("cpu")) < 100 * resident


def test_gradients_are_clipped_to_the_norm_and_the_unclipped_norm_is_reported() -> None:
    model = make_ours(make_theirs())
    _, unclipped, norm = step_over(model, [batch_of(CONVERSATIONS)])
    recording = Recording(model)
    result = train_step(model, recording, [batch_of(CONVERSATIONS)], max_grad_norm=norm / 4)

    assert result.grad_norm == pytest.approx(norm)
    for name, gradient in unclipped.items():
        torch.testing.assert_close(recording.gradients[name], gradient / 4, rtol=1e-3, atol=1e-7)


def state_bits(model: LlamaForSFT, optimizer: torch.optim.Optimizer) -> list[bytes]:
    tensors = [*model.parameters(), *(v for p in model.parameters() for _, v in sorted(optimizer.state[p].items()))]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def make_trained() -> tuple[LlamaForSFT, torch.optim.AdamW]:
    model = make_ours(make_theirs())
    optimizer = make_by_name(
        model.named_parameters(), learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    assert train_step(model, optimizer, [batch_of(CONVERSATIONS)], max_grad_norm=1.0).skipped is None
    return model, optimizer


def test_weight_decay_is_of_matrices_and_not_of_the_biases_of_experts() -> None:
    named = dict(make_ours(make_theirs(**GPT_OSS)).named_parameters())
    options = {"learning_rate": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    (matrices,) = (
        each["params"] for each in make_by_name(named.items(), **options).param_groups if each["weight_decay"]
    )
    decays = {name for name, parameter in named.items() if any(parameter is each for each in matrices)}
    assert {name.rpartition(".")[2] for name in decays} == {"weight", "gate_up_proj", "down_proj"}
    ends = ("norm.weight", "bias", "sinks")
    assert {name for name in named if not name.endswith(ends)} == decays


def test_a_step_without_any_target_is_skipped_with_the_reason() -> None:
    model, optimizer = make_trained()
    before = state_bits(model, optimizer)
    untrained = conversation(8, 5, share_trained=0.0)
    result = train_step(model, optimizer, [batch_of([untrained]), batch_of([])], max_grad_norm=1.0)

    assert (result.loss, result.grad_norm, result.skipped) == (None, None, "no token to train on")
    assert result.is_finite
    assert state_bits(model, optimizer) == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("origin", ["loss", "one gradient"])
def test_a_number_that_is_not_finite_leaves_weights_and_optimizer_bitwise_as_they_were(
    bad: float, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make_trained()
    before = state_bits(model, optimizer)
    with monkeypatch.context() as patch:
        if origin == "loss":
            patch.setattr("sftron.train.objective.loss_of", lambda *args: loss_of(*args) * bad)
        hook = model.model.norm.weight.register_hook(lambda gradient: gradient * (bad if origin != "loss" else 1.0))
        result = train_step(model, optimizer, [batch_of(CONVERSATIONS)], max_grad_norm=1.0)
        hook.remove()

    assert not result.is_finite
    assert result.skipped is not None
    assert state_bits(model, optimizer) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    # Nothing of the bad step is left that the next one could feel.
    twin, twins_optimizer = make_trained()
    for each, its_optimizer in ((model, optimizer), (twin, twins_optimizer)):
        assert train_step(each, its_optimizer, [batch_of(CONVERSATIONS)], max_grad_norm=1.0).is_finite
    assert state_bits(model, optimizer) == state_bits(twin, twins_optimizer)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
@pytest.mark.parametrize("mode", ACTIVATION_CHECKPOINTING)
def test_in_deterministic_mode_the_same_steps_give_the_same_weights_to_the_bit(
    mode: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    options = {"compute_dtype": torch.bfloat16, "activation_checkpointing": mode}
    batches = [batch_of(CONVERSATIONS[:2]), batch_of(CONVERSATIONS[2:])]
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            model = make_ours(make_theirs(tie_word_embeddings=True), **options).to(device)
            before = {name: parameter.clone() for name, parameter in model.named_parameters()}
            optimizer = make_by_name(
                model.named_parameters(), learning_rate=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
            )
            for _ in range(3):
                assert train_step(model, optimizer, batches, max_grad_norm=1.0).skipped is None
            assert not any(parameter.equal(before[name]) for name, parameter in model.named_parameters())
            runs.append([*model.parameters(), *(state["exp_avg_sq"] for state in optimizer.state.values())])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(first.equal(again) for first, again in zip(*runs, strict=True))
