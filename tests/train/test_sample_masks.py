"""At each start, masks of the sampled rows are compared with transformers' own renderings."""

import json
from pathlib import Path

import pytest

from sftron.commands.train import run as main
from sftron.data.chat import check
from sftron.data.chat.template import ChatTemplate
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.train import sample as sample_module
from sftron.train.build_data import make_dataset, open_data
from sftron.train.sample import Sample, check_sample
from sftron.train.text.description import describe_data
from tests.conftest import ASSETS
from tests.train.runs import make_config, write_rows


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_a_wrong_mask_ends_a_start_with_its_row_both_masks_and_the_remedy(
    tmp_path: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    """The header of every prompt is here wrongly taken to be that after a plain question."""
    monkeypatch.setattr(ChatTemplate, "has_constant_header", True)
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Yo"}]
    rows = [{"messages": [{"role": "system", "content": text}, *chat]} for text in ("Be kind.", "/no_think")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    template = str(ASSETS / "templates" / "smollm3_like.jinja")
    make_config(tmp_path, model_folder, tokenizer__chat_template=template)

    assert main(["--config", str(tmp_path / "config.yaml"), *arguments]) == 2
    error = capsys.readouterr().err
    assert "1 of 2 masks differ; the first: " in error
    assert "rows.jsonl:2: token " in error
    assert r"is trained, but is part of the prompt: trained '" in error
    assert r"<|im_start|>assistant\n⟦<think>\n\n</think>\nYo<|im_end|>⟧\n', generated '" in error
    assert r"<|im_start|>assistant\n<think>\n\n</think>\n⟦Yo<|im_end|>⟧\n'. Give a template that marks" in error
    assert "(tokenizer.chat_template: FILE)" in error
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


def sample_of(tmp_path: Path, model_folder: Path, chat_tokenizer: ChatTokenizer) -> tuple[Sample, str]:
    config = make_config(tmp_path, model_folder)
    preparation = open_data(config, chat_tokenizer)
    sample = check_sample(preparation, max_dropped_share=0.0)
    describe_data(config, make_dataset(config, preparation), sample)
    return sample, " compared masks train exactly what follows the generation prompt"


def test_as_many_masks_are_compared_as_the_time_allows_and_one_in_any_case(
    tmp_path: Path,
    model_folder: Path,
    chat_tokenizer: ChatTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_rows(tmp_path / "rows.jsonl", 60)
    for most, fewest, largest in ((1_000_000, 60, 60), (800, 8, 59), (0, 1, 1)):
        monkeypatch.setattr(sample_module, "_MOST_TOKENS_COMPARED", most)
        sample, line = sample_of(tmp_path, model_folder, chat_tokenizer)
        number = sample.masks.num_compared
        assert fewest <= number <= largest
        assert f"           {number} of {number}{line}\n" in capsys.readouterr().out


def test_masks_that_cannot_be_compared_are_counted_and_end_no_start(
    tmp_path: Path,
    model_folder: Path,
    chat_tokenizer: ChatTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_rows(tmp_path / "rows.jsonl", 10)

    def refuse(*_: object) -> None:
        raise check.CannotCompareError("the template moves")

    monkeypatch.setattr(check, "generated_tokens", refuse)
    _, line = sample_of(tmp_path, model_folder, chat_tokenizer)
    assert f"0 of 0{line}; 10 could not be compared: 10 as the template moves\n" in capsys.readouterr().out
