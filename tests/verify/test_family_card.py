"""The cards of the families: what a card measures, and that each family has one."""

from pathlib import Path

import pytest
import torch

from sftron.models.architecture import FAMILIES
from sftron.models.llama import LlamaForSFT
from tests.conftest import rest_nightly
from tools import family_card

pytestmark = pytest.mark.filterwarnings("default")  # transformers' own warnings


CARDS = ["qwen3", "gemma3_text", "qwen3_moe", "gpt_oss", "qwen3_5_text"]


@pytest.mark.parametrize("family", rest_nightly(CARDS, ["qwen3_5_text"]))
def test_a_card_states_what_is_measured_and_keeps_those_of_other_families(family: str, tmp_path: Path) -> None:
    (tmp_path / "index.md").write_text("| [llama](llama.md) | a row |\n| [olmoe](olmoe.md) | a row |\n")
    assert family_card.main([family, "--quick", f"--out={tmp_path}"]) == 0
    page = (tmp_path / f"{family}.md").read_text()
    assert FAMILIES[family].architecture in page
    assert "Isolation: 0 of 12 pairs" in page
    assert "keys: 0 missing, 0 unexpected" in page
    assert "3 of 3 equal (72 tokens)" in page
    # transformers' linear attention continues its state from one conversation of a flat row to the next, and its eager
    # attention with sinks knows no bounds of conversations.
    assert ("since those of a flat row are not isolated" in page) == (family in ("qwen3_5_text", "gpt_oss"))
    rows = [line for line in (tmp_path / "index.md").read_text().splitlines() if line.startswith("| [")]
    assert [row.split("]")[0].removeprefix("| [") for row in rows] == sorted(
        ["llama", family, "olmoe"], key=[*FAMILIES].index
    )


def test_a_family_that_differs_fails_and_its_card_states_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_other(folder: Path) -> LlamaForSFT:
        native = load(folder)
        with torch.no_grad():
            native.model.norm.weight.mul_(1.001)
        return native

    load = family_card.load_native
    monkeypatch.setattr(family_card, "load_native", load_other)
    assert family_card.main(["llama", "--quick", f"--out={tmp_path}"]) == 1
    page = (tmp_path / "llama.md").read_text()
    assert "This family differs from transformers" in page
    assert "Export: 38 of 39 tensors bitwise equal" in page
    assert "since those of a flat row are not isolated" not in page


def test_a_name_that_is_no_family_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        family_card.main(["lama"])
    assert ended.value.code == 2
    assert "'lama' is no family; choose from llama," in capsys.readouterr().err


def test_every_family_has_a_card_within_rounding() -> None:
    index = (family_card.FOLDER / "index.md").read_text()
    for family in FAMILIES:
        assert f"| [{family}]({family}.md) | " in index, f"python tools/family_card.py {family}"
        assert "differs from transformers by more" not in (family_card.FOLDER / f"{family}.md").read_text()
