"""A sharded model trains as a whole one does: every mode, type and shape, with answers in between (laws 5 and 8)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sftron.models.llama import ACTIVATION_CHECKPOINTING
from sftron.train.ranks import Ranks
from tests.models.reference import FAMILIES, TINY
from tests.train.ranks import launch
from tests.train.sharded_steps import ODD, Case, save_steps, take_steps

NUM_LAYERS = TINY["num_hidden_layers"]
DTYPES = (torch.float32, torch.bfloat16)

# Of torch's own compiler, as in test_compilation.py.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
]


def compare(num_ranks: int, cases: Sequence[Case], tmp_path: Path) -> list[list[dict[str, Any]]]:
    """Holds what the ranks measure against one process; returns it, by rank."""
    for rank, ended in enumerate(launch(num_ranks, save_steps, list(cases), tmp_path / "measured", folder=tmp_path)):
        assert ended.exit_code == 0, f"rank {rank} of {num_ranks}: {ended.err[-3000:]}"
    measured = [torch.load(tmp_path / f"measured-{rank}.pt", weights_only=True) for rank in range(num_ranks)]
    alone = Ranks(device=torch.device("cpu"))
    for number, case in enumerate(cases):
        expected = take_steps(case, alone)
        # Clipping has something to do, and so it matters that all ranks know the whole norm.
        assert min(expected["norms"]) > 0.5
        for each in measured:
            # Of an answer of 6 tokens, whose blocks are gathered for each token, or once.
            gathers = [6 * NUM_LAYERS, NUM_LAYERS] if num_ranks > case.dp_replicate else [0, 0]
            assert each[number]["gathers"] == gathers, case.name
            _require_equal(each[number], expected, case)
    return measured


def _require_equal(sharded: dict[str, Any], whole: dict[str, Any], case: Case) -> None:
    """In bf16 a step is the same but for gradients rounded once; from then on rounding makes its own way."""
    is_exact = case.dtype == torch.float32
    assert sharded["losses"][0] == pytest.approx(whole["losses"][0], rel=1e-6), case.name
    assert sharded["losses"] == pytest.approx(whole["losses"], rel=2e-6 if is_exact else 5e-3), case.name
    assert sharded["norms"][0] == pytest.approx(whole["norms"][0], rel=1e-5 if is_exact else 1e-3), case.name
    if is_exact:
        assert sharded["answers"] == whole["answers"], case.name
    for kind, allowed in (("gradients", 5e-6 if is_exact else 3e-3), ("weights", 2e-6 if is_exact else 2e-3)):
        assert sharded[kind].keys() == whole[kind].keys()
        for name, expected in whole[kind].items():
            error = (sharded[kind][name] - expected).norm() / expected.norm()
            assert error < allowed, f"{case.name}: {kind} of {name} are off by {error:.1e}"


EVERY_CASE = [Case(mode, dtype) for mode in ACTIVATION_CHECKPOINTING for dtype in DTYPES]
EVERY_CASE += [Case(mode, torch.bfloat16, compiled=True) for mode in ("selective", "full")]
SOME_CASES = [Case("none", torch.bfloat16), Case("selective", torch.float32), Case("full", torch.bfloat16)]


@pytest.mark.parametrize(
    "cases", [SOME_CASES, pytest.param(EVERY_CASE, marks=pytest.mark.nightly)], ids=["some", "all"]
)
def test_every_way_to_keep_activations_survives_that_weights_are_freed_and_gathered_again(
    tmp_path: Path, cases: list[Case]
) -> None:
    """The backward pass uses weights that forward has saved, and that were freed and gathered again in between."""
    compare(2, cases, tmp_path)


def test_ranks_that_gather_weights_in_bf16_select_the_experts_of_corrections_in_fp32(tmp_path: Path) -> None:
    # Of larger weights, rounding selects other experts after a few steps in bf16.
    model = FAMILIES["GLM 4.5"] | {"initializer_range": 0.1}
    compare(2, [Case(dtype=dtype, model=model) for dtype in DTYPES], tmp_path)


def test_rows_that_the_ranks_do_not_divide_and_ranks_without_a_row(tmp_path: Path) -> None:
    """9 rows make 3, 3, 3 and 0; the 6 of qkv and of gate and up 2, 2, 2 and 0; copies of 2 ranks sum once a step."""
    tied = {"model_type": "qwen3", "attention_bias": True, "tie_word_embeddings": True, "head_dim": 12}
    odd = Case(model=ODD)
    measured = compare(
        4, [odd, Case("full", model=tied), Case(dp_replicate=2, model=ODD), Case(dp_replicate=4)], tmp_path
    )
    assert 0 in measured[3][0]["rows"]
    assert TINY["vocab_size"] % 4 != 0
