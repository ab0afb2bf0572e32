import pytest
import torch

from sftron.models.generation import greedy_generate
from tests.models.reference import make_native, make_reference


def test_cached_steps_agree_with_the_whole_row_at_once() -> None:
    native = make_native(make_reference())
    generation = greedy_generate(native, [1, 2, 3], 20, ())
    row = torch.tensor([1, 2, 3, *generation.token_ids])
    with torch.no_grad():
        hidden = native(row, torch.arange(23), torch.tensor([0, 23], dtype=torch.int32), 23)
    best = native.head.logits(hidden).topk(2)
    assert tuple(best.indices[2:-1, 0].tolist()) == generation.token_ids
    margins = (best.values[:, 0] - best.values[:, 1])[2:-1]
    torch.testing.assert_close(torch.tensor(generation.margins), margins, atol=1e-3, rtol=1e-3)


def test_a_stop_token_ends_the_generation_and_is_part_of_it() -> None:
    native = make_native(make_reference())
    free = greedy_generate(native, [1, 2, 3], 10, ())
    stop = free.token_ids[4]
    end = free.token_ids.index(stop) + 1
    stopped = greedy_generate(native, [1, 2, 3], 10, {stop})
    assert stopped.token_ids == free.token_ids[:end]
    assert len(stopped.margins) == end < 10


def test_a_generation_that_cannot_fit_and_an_empty_prompt_are_refused() -> None:
    native = make_native(make_reference())
    with pytest.raises(ValueError, match=r"130 tokens .* 128 positions"):
        greedy_generate(native, [1] * 100, 30, ())
    with pytest.raises(ValueError, match="no token"):
        greedy_generate(native, [], 30, ())
