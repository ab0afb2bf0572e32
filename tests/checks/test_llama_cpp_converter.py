"""An export through llama.cpp's own converter to llama.cpp's own server, by the command of docs/served.md."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from examples.quickstart.prepare_model import main as prepare_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from sftron.checkpoint.export import export_hf
from sftron.checkpoint.hf_weights import load_model
from sftron.checks import served_weights
from sftron.commands import check
from tests.checks.llama_cpp import llama_server
from tests.conftest import ROOT

SOURCE = Path(os.environ.get("SFTRON_LLAMA_CPP", ""))
"""The folder of llama.cpp's source. `make llama-cpp` gets it, and sentencepiece, which the converter imports."""
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not (SOURCE / "convert_hf_to_gguf.py").is_file() or find_spec("sentencepiece") is None,
        reason=f"no convert_hf_to_gguf.py in SFTRON_LLAMA_CPP={SOURCE}, or no sentencepiece: run make llama-cpp",
    ),
]
ROWS = ROOT / "examples" / "quickstart" / "persona.jsonl"
QUESTIONS = ("Who are you?", "What is 12 times 12?", "Name three colors.", "Écris « bonjour » en français.")
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    prepare_model(folder / "source")
    model = load_model(folder / "source", compute_dtype=torch.float32)
    options: dict[str, Any] = {"dtype": torch.float32, "stop_token_ids": [2]}
    export_hf(model.named_parameters(), folder / "export", source_folder=folder / "source", **options)
    return folder / "export"


@pytest.fixture(scope="module")
def file(export: Path) -> Path:
    script, target = "llama.cpp/convert_hf_to_gguf.py", export.parent / "my.gguf"
    page = (ROOT / "docs" / "served.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith(script)]
    here = {script: SOURCE / Path(script).name, "runs/my/latest": export, target.name: target}
    command = [sys.executable, *(str(here.get(word, word)) for word in line.split())]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return target


def test_a_converted_export_is_served_as_trained(
    export: Path, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Four times what was measured: 0.0005 on average and 0.0137 at most.
    monkeypatch.setattr(served_weights, "_MEAN_BOUND", 0.002)
    monkeypatch.setattr(served_weights, "_LARGEST_BOUND", 0.055)
    options = ["--model", str(export), "--data", str(ROWS), "--weights", "6"]
    with llama_server(file) as url:
        status = check.main([*options, "--against", "llama-server", url])
        output = capsys.readouterr().out
        print(output)
        assert status == 0, output
        answers = {question: served_answer(url, question) for question in QUESTIONS}
    assert answers == {question: transformers_answer(export, question) for question in QUESTIONS}


def served_answer(url: str, question: str) -> str:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": NUM_TOKENS}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    return str(reply["choices"][0]["message"]["content"])


def transformers_answer(folder: Path, question: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=NUM_TOKENS, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(ids, skip_special_tokens=True))
