"""check_isolation: whether another trainer's model keeps the conversations of a pack apart."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from sftcheck.check_isolation import POSITIONS_ALONE
from sftron import FlattenPacks, check_isolation
from sftron.checks.isolation import compare_documents, measure_isolation, separating_sets
from sftron.data.types import DataError, Pack
from tools.isolation_table import CASES, LENGTHS, Case, make_model, make_pack


def model_of(model_type: str, attention: str = "sdpa", **settings: Any) -> Any:
    """A tiny random model as transformers' Trainer leaves its configuration."""
    (case, *_) = [case for case in CASES if case.model_type == model_type]
    model = make_model(Case(model_type, settings={**case.settings, **settings}), attention)
    model.config.use_cache = False
    return model


@pytest.fixture(scope="module")
def pack() -> Pack:
    return make_pack()


def problem_of(model: nn.Module, packs: list[Pack], *collator: FlattenPacks) -> str:
    with pytest.raises(ValueError, match=r"^\w+") as caught:
        check_isolation(model, packs, *collator)
    return str(caught.value)


def test_a_model_that_keeps_conversations_apart_passes_to_the_bit_and_a_cache_is_named_as_the_cause(pack: Pack) -> None:
    model = model_of("llama")
    found = check_isolation(model, [pack, pack])
    assert (found.num_conversations, found.isolated, found.difference) == (2 * len(LENGTHS), True, 0.0)
    assert found.own_difference > 1
    model.config.use_cache = True  # as a model is loaded
    problem = problem_of(model, [pack])
    assert "use_cache=True" in problem
    assert "model.config.use_cache = False, which transformers' Trainer sets when it is made (measured" in problem
    assert "sftron's own model (`sftron train`, or load_model)" in problem
    assert model.config.use_cache is True


def test_a_model_that_leaks_is_named_with_the_difference_and_what_always_serves(pack: Pack) -> None:
    problem = problem_of(model_of("gpt_oss", "eager"), [pack])
    difference = measure_isolation(model_of("gpt_oss", "eager"), FlattenPacks()([pack])).difference
    assert difference > 1
    assert problem.startswith("gpt_oss does not keep the conversations of a pack apart")
    assert f"by up to {difference:.2g}; rounding" in problem
    assert "seq_idx=True), attn_implementation='eager', use_cache=False" in problem
    assert "measured just now" not in problem
    assert 'one conversation a row: PackedDataset(..., packing="none")' in problem


def test_keys_that_a_forward_does_not_know_are_named_and_those_that_serve_too(pack: Pack) -> None:
    """As in models of the Hub's own code, whose forward has no **kwargs."""

    class Strict(transformers.LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, labels: Any = None) -> Any:
            return super().forward(input_ids=input_ids, position_ids=position_ids, labels=labels)

    model = model_of("llama")
    model.__class__ = Strict
    problem = problem_of(model, [pack])
    assert "unexpected keyword argument" in problem
    assert "apart: FlattenPacks(return_flash_attn_kwargs=False, return_seq_idx=False) (measured" in problem
    assert check_isolation(model, [pack], POSITIONS_ALONE).isolated


def test_another_attention_that_serves_is_named_and_not_left_in_place(pack: Pack) -> None:
    """An attention that somebody registered, and that is given no mask."""

    def causal(
        module: nn.Module, query: Any, key: Any, value: Any, *_: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        group = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return found.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("no_mask", causal)
    model = model_of("llama", "no_mask")
    problem = problem_of(model, [pack])
    assert "attn_implementation='no_mask'" in problem
    assert 'What keeps them apart: attn_implementation="sdpa" (measured' in problem
    assert model.config._attn_implementation == "no_mask"


class _Toy(nn.Module):
    """Logits of a table, plus what a test adds: `leak` of the token before, `scale` for all."""

    def __init__(self, leak: float = 0.0, scale: float = 1.0, shift: int = 1) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(96, 96, generator=torch.Generator().manual_seed(0)) * scale)
        self.leak, self.shift = leak, shift

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        logits = self.table[input_ids]
        return transformers.modeling_outputs.CausalLMOutput(logits=logits + self.leak * logits.roll(self.shift, dims=1))


def test_the_smallest_leak_is_found_in_either_direction(pack: Pack) -> None:
    assert check_isolation(_Toy(), [pack]).isolated
    for shift in (1, -1):
        assert "_Toy does not keep" in problem_of(_Toy(leak=1e-5, shift=shift), [pack])


LEAKS = [(a, b) for a in range(5) for b in range(5) if a != b]


@pytest.mark.parametrize("part", ["whole", "reader's last token", "second token that is read"])
@pytest.mark.parametrize("across_rows", [False, True])
@pytest.mark.parametrize("leak", [*LEAKS, "future", None])
def test_a_leak_between_any_two_conversations_is_found_and_is_not_called_the_future(
    leak: tuple[int, int] | str | None, *, across_rows: bool, part: str
) -> None:
    lengths = [4, 6, 1, 7, 3]
    bounds = [slice(end - length, end) for length, end in zip(lengths, np.cumsum(lengths).tolist(), strict=True)]
    rows = range(5) if across_rows else [0] * 5
    of = torch.full((max(rows) + 1, sum(lengths)), -1)
    for number, (row, each) in enumerate(zip(rows, bounds, strict=True)):
        of[row, each] = number
    place, flat = torch.arange(of.shape[1]).repeat(len(of)), of.flatten()
    sees = (flat[:, None] == flat) & (flat[:, None] >= 0)
    if leak != "future":
        sees &= place[:, None] >= place
    if isinstance(leak, tuple):
        reads, is_read = flat[:, None] == leak[1], flat == leak[0]
        if part == "reader's last token":
            reads &= (place == bounds[leak[1]].stop - 1)[:, None]
        elif part != "whole":
            is_read &= place == bounds[leak[0]].start + (lengths[leak[0]] > 1)
        sees |= reads & is_read
    ids = torch.randint(0, 50, of.shape, generator=torch.Generator().manual_seed(0))
    found = compare_documents(
        lambda given: (sees.double() @ given.flatten().double()).reshape(*of.shape, 1),
        ids, list(zip(rows, bounds, strict=True)), lambda _: 0.0,
    )  # fmt: skip
    assert found.isolated == (leak is None)
    assert found.shows_future == (leak == "future")
    assert (found.difference > 0) == isinstance(leak, tuple)


def test_rounding_that_depends_on_the_batch_alone_is_no_leak(pack: Pack) -> None:
    """As in a mixture of experts on a GPU, where an expert multiplies as many rows as there are tokens for it."""

    class Rounding(_Toy):
        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            logits = super().forward(input_ids).logits
            return transformers.modeling_outputs.CausalLMOutput(logits=logits * (1 + 1e-7 * (input_ids.sum() % 7 + 1)))

    found = check_isolation(Rounding(), [pack])
    assert found.isolated
    assert 0 < found.difference <= found.rounding < 1e-4


def test_what_shows_nothing_is_no_pass(pack: Pack) -> None:
    bounds, positions = np.array([0, sum(LENGTHS)], dtype=np.int32), np.arange(sum(LENGTHS), dtype=np.int32)
    joined = replace(pack, cu_seqlens=bounds, position_ids=positions)  # as with remove_cross_attention=False
    assert "_Toy: the packs hold 1 attention document" in problem_of(_Toy(), [joined])
    assert "_Toy: its logits do not depend on the tokens" in problem_of(_Toy(scale=0.0), [pack])
    assert "_Toy: its logits are not finite" in problem_of(_Toy(scale=float("nan")), [pack])
    pack = make_pack()
    pack.input_ids[:] = 5
    assert "_Toy: all tokens of the packs are 5" in problem_of(_Toy(), [pack])
    pack.loss_weights[0] = 0.5
    with pytest.raises(DataError, match=r"weight 0\.5"):
        check_isolation(_Toy(), [pack])


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_oss"])
def test_the_model_is_left_as_it_was(pack: Pack, model_type: str) -> None:
    """gpt2 has dropout of 0.1, with which it is isolated to the bit all the same; gpt_oss leaks."""
    model = model_of(model_type, "eager")
    model.train()
    model.lm_head.eval()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    model.register_buffer("counted", torch.zeros(1))

    def count(module: Any, *_: Any) -> None:
        module.counted.add_(1)

    model.register_forward_hook(count)
    torch.manual_seed(3)

    def state() -> Iterator[Any]:
        yield from ((name, module.training) for name, module in model.named_modules())
        yield from ((name, tensor.tolist()) for name, tensor in [*model.named_parameters(), *model.named_buffers()])
        yield from ((name, None if p.grad is None else p.grad.tolist()) for name, p in model.named_parameters())
        yield torch.get_rng_state().tolist(), torch.is_grad_enabled(), model.config.to_dict()

    before = list(state())
    if model_type == "gpt2":
        assert check_isolation(model, [pack]).difference == 0.0
    else:
        assert "gpt_oss does not keep" in problem_of(model, [pack])
    assert list(state()) == before


def test_a_model_without_logits_is_told_so() -> None:
    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(96, 8))

        def forward(self, input_ids: Any, **_: Any) -> torch.Tensor:
            return self.table[input_ids]

    with pytest.raises(ValueError, match=r"^Bare: its forward method returns a Tensor, which has no \.logits$"):
        check_isolation(Bare(), [make_pack()])


@pytest.mark.parametrize("number", [2, 3, 4, 6, 7, 20, 33])
def test_for_any_two_numbers_a_set_has_the_first_and_not_the_second(number: int) -> None:
    sets = separating_sets(number)
    assert len(sets) <= 2 + number.bit_length()
    assert all(
        any(one in each and other not in each for each in sets)
        for one in range(number) for other in range(number) if one != other
    )  # fmt: skip
