"""The parity check passes on a sound model, and fails on each kind of unsound one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from sftron.checkpoint.model_folder import read_json
from sftron.checkpoint.source import ExportSource, lacking_for_loaders
from sftron.checks import parity
from sftron.checks.parity import EXAMPLE_PROMPTS, check_parity
from sftron.commands import check as check_sft
from sftron.models.generation import Generation
from sftron.models.sdpa_attention import SdpaAttention, attend_causally
from tests.models.reference import FAMILIES, make_theirs

NAMES = ("max |native", "max KL", "top-1", "native packed", "neighbor", "greedy", "weights", "loaders")


def make_folder(folder: Path, tokenizer: PreTrainedTokenizerBase, **options: object) -> Path:
    make_theirs(**{"vocab_size": len(tokenizer), "max_position_embeddings": 512} | options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), tokenizer, tie_word_embeddings=True)


def failed(folder: Path, **options: object) -> list[str]:
    report = check_parity(folder, EXAMPLE_PROMPTS[-2:], max_new_tokens=8, **options)
    assert report.passed == all(check.passed for check in report.checks)
    pairs = list(zip(NAMES, report.checks, strict=True))
    assert all(name in check.name for name, check in pairs)
    return [name for name, check in pairs if not check.passed]


def copy_with(folder: Path, to: Path, added: float) -> Path:
    """A copy in which one number of a weight is another one."""
    tensors = load_file(shutil.copytree(folder, to) / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] += added
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.fixture
def run():
    def run(*arguments: object) -> int:
        return check_sft.main([*map(str, arguments)])

    return run


@pytest.mark.parametrize("family", ["SmolLM2", "Mistral 0.3", "Qwen 2.5", "Qwen 3", "Granite code", "gpt-oss"])
def test_a_sound_model_of_each_family_passes_every_check_in_both_types(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, run, family: str
) -> None:
    make_folder(tmp_path, tokenizer, **FAMILIES[family])
    for dtype in ("float32", "bfloat16"):
        assert run("--model", tmp_path, "--limit", 2, "--max-new-tokens", 4, "--dtype", dtype) == 0


def test_one_changed_weight_in_an_export_fails(model_folder: Path, tmp_path: Path, run) -> None:
    copy = copy_with(model_folder, tmp_path / "copy", 0.5)
    assert {"max |native", "max KL", "weights"} <= set(failed(model_folder, native_folder=copy))
    assert run("--model", model_folder, "--native", copy, "--limit", 1, "--max-new-tokens", 2) == 1


def test_weights_that_are_no_numbers_fail_every_check_that_computes(model_folder: Path, tmp_path: Path) -> None:
    broken = copy_with(model_folder, tmp_path / "broken", torch.nan)
    assert failed(broken) == [name for name in NAMES if name not in ("weights", "loaders")]


def test_attention_across_documents_fails_packing_and_isolation(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SdpaAttention, "__call__", lambda _, *qkv, **options: attend_causally(*qkv, **options))
    assert failed(model_folder) == ["top-1", "native packed", "neighbor"]


def test_a_wrong_continuation_fails_and_its_first_divergence_is_named(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = parity.greedy_generate

    def wrong_at_step_2(*arguments: object) -> Generation:
        generation = right(*arguments)
        ids = list(generation.token_ids)
        ids[2] += 1
        return Generation(tuple(ids), (*generation.margins[:2], 0.5, *generation.margins[3:]))

    monkeypatch.setattr(parity, "greedy_generate", wrong_at_step_2)
    assert failed(model_folder) == ["greedy"]
    report = check_parity(model_folder, EXAMPLE_PROMPTS[:2], max_new_tokens=8)
    (greedy,) = report.failed
    assert [line.split(": native")[0] for line in greedy.detail] == ["prompt 0, step 2", "prompt 1, step 2"]
    assert not any("tie" in line for line in greedy.detail)
    assert "prompt 0, step 2: native" in report.as_text()


def test_an_export_that_lacks_what_loaders_need_fails_and_a_source_that_lacks_it_does_not(
    model_folder: Path, tmp_path: Path
) -> None:
    native = shutil.copytree(model_folder, tmp_path / "native")
    assert lacking_for_loaders(read_json(model_folder / "config.json")) == ["torch_dtype", "rope_theta", "rope_scaling"]
    assert failed(model_folder) == []
    assert failed(model_folder, native_folder=native) == ["loaders"]
    exported = ExportSource.read(model_folder).exported_config(torch.float32)
    (native / "config.json").write_text(json.dumps(exported))
    assert failed(model_folder, native_folder=native) == []


def test_the_report_is_a_table_and_json_and_one_prompt_alone_shows_no_isolation(
    model_folder: Path, tmp_path: Path, run, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert run("--model", model_folder, "--limit", 1, "--max-new-tokens", 3, "--json", file) == 0
    lines = capsys.readouterr().out.splitlines()[3:]
    assert [line[:4] for line in lines] == ["PASS"] * 4 + ["SKIP"] + ["PASS"] * 3
    report = json.loads(file.read_text())
    assert (report["passed"], report["facts"]["prompts"], len(report["checks"])) == (True, 1, len(NAMES))


def test_what_cannot_be_used_is_status_2_and_a_message(
    model_folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, run, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    # A line separator of Unicode is text, and ends no line.
    first = '{"messages": [{"role": "user", "content": "Hi\u2028you"}]}\n'
    prompts.write_text(first + '{"messages": [{"role": "assistant", "content": "x"}]}\n', encoding="utf-8")
    short = make_folder(tmp_path / "short", tokenizer, max_position_embeddings=9)
    for arguments, message in {
        ("--model", tmp_path / "absent"): "config.json: cannot be read",
        ("--model", short, "--limit", 1): "does not fit the RoPE table of 9 positions",
        ("--model", model_folder, "--prompts", prompts): "prompts.jsonl:2: ",
        ("--model", model_folder, "--prompts", tmp_path / "none.jsonl"): "none.jsonl: ",
    }.items():
        assert run(*arguments) == 2
        assert message in capsys.readouterr().err
