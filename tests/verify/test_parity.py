"""The parity check passes on a sound model, and fails on each kind of unsound one."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from sftron.checkpoint.hf_export import ExportSource, lacking_for_loaders
from sftron.checkpoint.hf_weights import read_json
from sftron.models import attention
from sftron.verify import parity
from sftron.verify.parity import check_parity
from sftron.verify.prompts import EXAMPLE_PROMPTS
from tests.models.reference import FAMILIES, make_theirs
from tools import check_sft

NAMES = ("max |ours", "max KL", "top-1", "ours packed vs ours alone", "neighbour", "greedy", "weights", "loaders")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    folder = tmp_path_factory.mktemp("model")
    theirs = make_theirs(vocab_size=len(tokenizer), max_position_embeddings=512, tie_word_embeddings=True)
    theirs.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads cost more than they give on a model this small."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def _failed(folder: Path, **options: object) -> list[str]:
    report = check_parity(folder, EXAMPLE_PROMPTS[-2:], max_new_tokens=8, **options)
    assert len(report.checks) == len(NAMES)
    assert report.passed == all(check.passed for check in report.checks)
    return [name for name, check in zip(NAMES, report.checks, strict=True) if name in check.name and not check.passed]


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["check_sft.py", *map(str, arguments)])
    return check_sft.main()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_model_passes_every_check(model_folder: Path, dtype: torch.dtype) -> None:
    report = check_parity(model_folder, EXAMPLE_PROMPTS, max_new_tokens=8, dtype=dtype)
    assert report.passed, report.table()
    for name, check in zip(NAMES, report.checks, strict=True):
        assert name in check.name
    if dtype == torch.float32:
        assert not report.divergences


@pytest.mark.parametrize("family", ["Mistral 0.3", "Qwen 2.5", "Qwen 3", "Granite code"])
def test_a_sound_model_of_each_family_passes_every_check(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    options = FAMILIES[family] | {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    make_theirs(**options).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for dtype in ("float32", "bfloat16"):
        assert _run(monkeypatch, "--model", tmp_path, "--limit", 2, "--max-new-tokens", 4, "--dtype", dtype) == 0


def test_a_prompt_longer_than_the_sliding_window_is_status_2_with_both_lengths(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_theirs(model_type="mistral", sliding_window=9, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert _run(monkeypatch, "--model", tmp_path, "--limit", 1, "--max-new-tokens", 2) == 2
    assert "exceeds the model's sliding window of 9" in capsys.readouterr().err


@pytest.mark.parametrize("value", [0.5, torch.nan])
def test_one_changed_weight_in_a_copy_fails(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_folder, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] += value
    save_file(tensors, copy / "model.safetensors")
    failed = _failed(model_folder, native_folder=copy)
    assert {"max |ours", "max KL", "weights"} <= set(failed)
    assert _run(monkeypatch, "--model", model_folder, "--native", copy, "--limit", 1, "--max-new-tokens", 2) == 1
    assert _run(monkeypatch, "--model", model_folder, "--native", model_folder, "--limit", 1) == 0


def test_weights_that_are_no_numbers_fail_every_check_that_computes(model_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = torch.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    assert _failed(broken) == [name for name in NAMES if name not in ("weights", "loaders")]


def test_attention_across_documents_fails_packing_and_isolation(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_one_document(documents: attention.SdpaAttention, *qkv: torch.Tensor) -> torch.Tensor:
        assert documents.lengths
        return attention.attend_causally(*qkv)

    monkeypatch.setattr(attention.SdpaAttention, "__call__", as_one_document)
    assert _failed(model_folder) == ["top-1", "ours packed vs ours alone", "neighbour"]


def test_a_wrong_continuation_fails_and_its_first_divergence_is_named(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = parity.greedy_generate

    def wrong_at_step_2(*arguments: object) -> object:
        generation = right(*arguments)
        ids = list(generation.token_ids)
        ids[2] += 1
        return parity.Generation(tuple(ids), (*generation.margins[:2], 0.5, *generation.margins[3:]))

    monkeypatch.setattr(parity, "greedy_generate", wrong_at_step_2)
    report = check_parity(model_folder, EXAMPLE_PROMPTS[:2], max_new_tokens=8)
    assert [check.passed for check in report.checks] == [True, True, True, True, True, False, True, True]
    assert [(d.prompt, d.step, d.is_tie) for d in report.divergences] == [(0, 2, False), (1, 2, False)]
    assert "prompt 0, step 2: native" in report.table()


def test_an_export_that_lacks_what_loaders_need_fails_and_a_source_that_lacks_it_does_not(
    model_folder: Path, tmp_path: Path
) -> None:
    """An export of the source has it all."""
    native = shutil.copytree(model_folder, tmp_path / "native")
    assert lacking_for_loaders(read_json(model_folder / "config.json")) == ["torch_dtype", "rope_theta", "rope_scaling"]
    assert _failed(model_folder, native_folder=native) == ["loaders"]
    exported = ExportSource.read(model_folder).exported_config(torch.float32)
    (native / "config.json").write_text(json.dumps(exported))
    assert _failed(model_folder, native_folder=native) == []


def test_the_report_is_an_aligned_table_and_json(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert _run(monkeypatch, "--model", model_folder, "--limit", 2, "--max-new-tokens", 3, "--json", file) == 0
    lines = capsys.readouterr().out.splitlines()
    header = lines[2]
    assert len(lines) == 3 + len(NAMES)
    for line in lines[3:]:
        assert line.startswith("PASS")
        for title in ("check", "measured", "allowed"):
            column = header.index(title)
            assert line[column - 1] == " " != line[column]
    report = json.loads(file.read_text())
    assert (report["passed"], report["num_prompts"], len(report["checks"])) == (True, 2, len(NAMES))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "prompts.jsonl:2: not valid JSON"),
        ("[]", "prompts.jsonl:2: expected an object with a non-empty list `messages`"),
        ('{"messages": ["hi"]}', r"prompts.jsonl:2: messages[0] is 'hi'"),
        (
            '{"messages": [{"role": "assistant", "content": "x"}]}',
            "prompts.jsonl:2: the last message has role 'assistant'",
        ),
    ],
)
def test_a_bad_prompt_is_named_by_file_and_line_with_status_2(
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    message: str,
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n' + line + "\n")
    assert _run(monkeypatch, "--model", model_folder, "--prompts", file) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_model_is_status_2_and_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, "--model", tmp_path / "absent") == 2
    assert "config.json: cannot be read" in capsys.readouterr().err
