"""The table of docs/isolation.md, measured again: each model type, and what check_isolation makes of it."""

import re
from pathlib import Path

import pytest
import transformers

from sftron import check_isolation
from tests.conftest import rest_nightly
from tools.isolation_table import BEGIN, CASES, END, PAGE, Case, Row, as_cells, make_model, make_pack, measure

TEXT = PAGE.read_text(encoding="utf-8")
TABLE = TEXT.partition(BEGIN)[2].partition(END)[0]
LINES = re.sub(r"\n  +", " ", TABLE).splitlines()  # with each item of a list on a line
USUAL_CELLS = ["0", "0", "9", "", "isolated"]
CELLS = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in LINES if line.startswith("| `")]
CELLS += [
    [case, attention, *USUAL_CELLS]
    for attention, cases in (line[2:].split(": ", 1) for line in LINES if line.startswith(("- eager", "- sdpa")))
    for case in cases.split("; ")
]
MADE_WITH = re.search(r"transformers (\S+) and torch", TABLE)

MUST_BE_ISOLATED = (
    "llama mistral qwen2 qwen3 qwen2_moe qwen3_moe mixtral gemma gemma2 gemma3_text phi phi3 olmo olmo2 olmo3 smollm3 "
    "granite starcoder2 stablelm cohere gpt2 gpt_neox gptj codegen ministral3"
)
MUST_NOT_PASS = (
    "falcon opt bloom mpt gpt_oss qwen3_5_text qwen3_next lfm2 bamba granitemoehybrid nemotron_h falcon_h1 mamba2"
)

# A type of each cause. Isolated: plain, windows, experts, learned positions, latent attention. Leaks: masks and biases
# made without position_ids, one attention of two, a state. Refuses: gated delta rule, convolution, and both with Mamba.
FAST = ["llama", "gemma2", "mixtral", "gpt2", "deepseek_v3", "falcon", "bloom", "gpt_oss", "mamba2"]
FAST += ["qwen3_5_text", "lfm2", "bamba"]


def kinds_of(cells: list[str]) -> tuple[str, ...]:
    return tuple({"refuses": "refuses", "0": "isolated"}.get(cell, "leaks") for cell in cells[2:5])


@pytest.mark.parametrize("case", rest_nightly(CASES, [case for case in CASES if case.model_type in FAST]), ids=str)
@pytest.mark.filterwarnings("default")  # transformers' own warnings
def test_the_row_is_what_is_measured_and_the_check_passes_only_where_it_is_isolated(case: Case) -> None:
    if f"- {case}: " in TABLE:
        pytest.skip("cannot be built; see the page")
    if case.model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {case.model_type}")
    rows = measure(case)
    assert rows
    for row in rows:
        # An oracle of its own: what is isolated is the same alone.
        assert (row.verdict == "isolated") <= (row.from_alone < 1e-4)
        assert (row.from_alone < 1e-4) <= (row.kinds[0] == "isolated")
        expect_of_check(row, row.attentions[-1])
    if MADE_WITH and MADE_WITH[1] == transformers.__version__:
        found = [(as_cells(row)[:2], row.kinds, as_cells(row)[-1]) for row in rows]
        written = [(cells[:2], kinds_of(cells), cells[-1]) for cells in CELLS if cells[0] == str(case)]
        assert found == written, "make the table again: python tools/isolation_table.py"


def expect_of_check(row: Row, attention: str) -> None:
    """check_isolation on the model as transformers' Trainer leaves it."""
    model = make_model(row.case, attention)
    model.config.use_cache = False
    packs = [make_pack()]
    if row.verdict == "isolated":
        found = check_isolation(model, packs)
        # Its experts multiply other shapes beside other neighbors.
        assert found.difference <= (found.rounding if row.case.model_type == "ernie4_5_moe" else 0.0)
    else:
        problem = {"leaks": "does not keep the conversations of a pack apart", "refuses": "does not take packed"}
        with pytest.raises(ValueError, match=f"^{row.case.model_type} {problem[row.verdict]}"):
            check_isolation(model, packs)


def test_the_page_has_a_row_for_each_case() -> None:
    assert MADE_WITH, "make the table: python tools/isolation_table.py"
    not_built = [case for case in CASES if f"- {case}: " in TABLE]
    assert {cells[0] for cells in CELLS} == {str(case) for case in CASES if case not in not_built}
    assert len({case.model_type for case in CASES} - {case.model_type for case in not_built}) >= 60


def test_no_model_type_that_is_known_to_leak_passes_and_none_that_is_isolated_is_refused() -> None:
    verdicts: dict[str, set[str]] = {}
    for cells in CELLS:
        verdicts.setdefault(cells[0].split("`")[1], set()).add(cells[-1])
    assert all(verdicts[model_type] == {"isolated"} for model_type in MUST_BE_ISOLATED.split()), verdicts
    assert all(verdicts[model_type] <= {"**leaks**", "**refuses**"} for model_type in MUST_NOT_PASS.split()), verdicts
    assert Path(__file__).name in TEXT
