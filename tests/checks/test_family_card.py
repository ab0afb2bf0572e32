"""The table of the families: what a row measures, and that each family has one."""

from pathlib import Path

import pytest
import torch

from sftron.models.architecture import FAMILIES
from sftron.models.llama import LlamaForSFT
from tests.conftest import rest_nightly
from tools import family_card

pytestmark = pytest.mark.filterwarnings("default")  # transformers' own warnings


CARDS = ["qwen3", "gemma3_text", "qwen3_moe", "gpt_oss", "qwen3_5_text"]


def row_of(page: Path, family: str) -> list[str]:
    (row,) = (line for line in page.read_text().splitlines() if line.startswith(f"| {family}"))
    return row.strip("| ").split(" | ")


@pytest.mark.parametrize("family", rest_nightly(CARDS, ["qwen3_5_text"]))
def test_a_row_states_its_measurements_and_keeps_the_rows_of_other_families(family: str, tmp_path: Path) -> None:
    page = tmp_path / "index.md"
    page.write_text("| llama | a row |\n| olmoe | a row |\n")
    assert family_card.main([family, "--quick", f"--out={page}"]) == 0
    row = row_of(page, family)
    # Experts of a CPU may round with their neighbors; whether they do depends on the processor.
    assert row[3] in (("bitwise", "rounding") if family in ("gpt_oss", "qwen3_moe") else ("bitwise",))
    assert row[5] == "3 of 3 equal (72 tokens)"
    assert len(set(row[4].split(" of "))) == 1
    # transformers' linear attention continues its state from one conversation of a flat row to the next, and its eager
    # attention with sinks knows no bounds of conversations.
    assert ("(alone)" in row[6]) == (family in ("qwen3_5_text", "gpt_oss"))
    names = [line.split()[1] for line in page.read_text().splitlines() if line.startswith("| ")][2:]
    assert names == sorted(["llama", family, "olmoe"], key=[*FAMILIES].index)


def test_a_family_that_differs_fails_and_its_row_states_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_other(folder: Path) -> LlamaForSFT:
        native = load(folder)
        with torch.no_grad():
            native.model.norm.weight.mul_(1.001)
        return native

    load, page = family_card.load_native, tmp_path / "index.md"
    monkeypatch.setattr(family_card, "load_native", load_other)
    assert family_card.main(["llama", "--quick", f"--out={page}"]) == 1
    row = row_of(page, "llama")
    assert (row[0], row[4]) == ("llama **differs**", "38 of 39")


def test_every_family_has_a_row_within_rounding() -> None:
    for family in FAMILIES:
        assert row_of(family_card.PAGE, f"{family} ")[0] == family, f"python tools/family_card.py {family}"
