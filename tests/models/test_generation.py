import pytest
import torch
import torch.nn.functional as F

from sftron.models.generation import greedy_generate
from tests.models.reference import LLAMA3_ROPE, make_ours, make_theirs


@pytest.mark.parametrize("options", [{}, {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}])
def test_greedy_tokens_are_those_of_transformers(options: dict[str, object]) -> None:
    theirs = make_theirs(**options)
    ours = make_ours(theirs)
    prompt = torch.randint(0, 97, (40,)).tolist()
    inputs = torch.tensor([prompt])
    expected = theirs.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=30, eos_token_id=None
    )
    generation = greedy_generate(ours, prompt, 30, ())
    assert list(generation.token_ids) == expected[0, 40:].tolist()
    assert len(set(generation.token_ids)) > 3


def test_cached_steps_agree_with_the_whole_row_at_once() -> None:
    ours = make_ours(make_theirs())
    generation = greedy_generate(ours, [1, 2, 3], 20, ())
    row = torch.tensor([1, 2, 3, *generation.token_ids])
    with torch.no_grad():
        hidden = ours(row, torch.arange(23), torch.tensor([0, 23], dtype=torch.int32), 23)
    best = F.linear(hidden, ours.head_weight).topk(2)
    assert tuple(best.indices[2:-1, 0].tolist()) == generation.token_ids
    margins = (best.values[:, 0] - best.values[:, 1])[2:-1]
    torch.testing.assert_close(torch.tensor(generation.margins), margins, atol=1e-3, rtol=1e-3)


def test_a_stop_token_ends_the_generation_and_is_part_of_it() -> None:
    ours = make_ours(make_theirs())
    free = greedy_generate(ours, [1, 2, 3], 10, ())
    stop = free.token_ids[4]
    end = free.token_ids.index(stop) + 1
    stopped = greedy_generate(ours, [1, 2, 3], 10, {stop})
    assert stopped.token_ids == free.token_ids[:end]
    assert len(stopped.margins) == end < 10


def test_a_generation_that_cannot_fit_and_an_empty_prompt_are_refused() -> None:
    ours = make_ours(make_theirs())
    with pytest.raises(ValueError, match=r"130 tokens .* 128 positions"):
        greedy_generate(ours, [1] * 100, 30, ())
    with pytest.raises(ValueError, match="no token"):
        greedy_generate(ours, [], 30, ())
