"""The trained prompts against llama.cpp's own server: its template engine, its vocabulary, its protocol.

What differs is in the table DIFFERS, by template and cause; all else has to be equal.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from examples.quickstart.prepare_model import gguf_file, load_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from sftron.checks import served_turns
from sftron.checks.report import Report
from sftron.checks.served_prompts import LlamaServerPrompts
from sftron.checks.served_turns import compare_turns, open_rows_to_serve
from sftron.checks.served_weights import ServedTurn, check_weights
from sftron.commands import check
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.prepare import Preparation
from tests.checks.llama_cpp import llama_server, write_gguf
from tests.checks.test_served_turns import MORE, make_folder
from tests.data.family_conversations import CONVERSATIONS
from tests.data.test_families import FOLLOWED
from tests.train.runs import make_model_folder

CASES = [*CONVERSATIONS, *MORE]
DIFFERS = {
    # llama.cpp's filter format writes %s as it stands.
    "zephyr_like": {"template"},
    # The prompt opens a thought, and most answers have none. A row's own "<think>" is text in training.
    "qwen3_thinking_like": {"generation_prompt", "control_text"},
    "qwq_like": {"generation_prompt", "control_text"},
    # llama.cpp knows a template with these control tokens for Gemma 4's, and leaves its tool results out.
    "gemma4_like": {"generation_prompt", "template"},
    # The template writes its tools before the last question.
    "mistral_like": {"rewritten"},
}


def rows_of(folder: Path, cases: list[Any]) -> Preparation:
    rows = folder.parent / "rows.jsonl"
    lines = [json.dumps({"messages": each.messages, "tools": each.tools or None}) for each in cases]
    rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
    prepared = open_rows_to_serve(rows, folder)
    prepared.options = replace(prepared.options, on_bad_row="skip")
    return prepared


@pytest.fixture(autouse=True)
def _without_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the row `tokenizer` out, which knows no server."""
    monkeypatch.setattr(served_turns, "_readers_of", lambda folder: [])


def compared(folder: Path, url: str, cases: list[Any]) -> Report:
    prepared = rows_of(folder, cases)
    return compare_turns(folder, prepared, LlamaServerPrompts(url, prepared.chat_tokenizer, None, 30.0))


@pytest.mark.parametrize("name", FOLLOWED)
def test_llama_cpp_makes_the_trained_prompts_but_for_named_causes(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "model", name)
    with llama_server(write_gguf(folder, tmp_path / "model.gguf")) as url:
        report = compared(folder, url, CASES)
    assert report.facts["turns"] >= 18
    assert set(report.facts["causes"]) == DIFFERS.get(name, set()), report.checks[0].detail


def test_the_command_compares_with_a_llama_server_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path / "model", "qwen3_like")
    rows_of(folder, CASES[:3])
    options = ["--model", str(folder), "--data", str(tmp_path / "rows.jsonl"), "--against", "llama-server"]
    other = make_folder(tmp_path / "other", "qwen3_like", prefix="Other. ")
    for source, status in ((folder, 0), (other, 1)):
        with llama_server(write_gguf(folder, tmp_path / "m.gguf"), source / "chat_template.jinja") as url:
            assert check.main([*options, url]) == status
    assert "6 of 6 turns have the trained ids before them (/apply-template and /tokenize)" in capsys.readouterr().out


def test_a_date_that_only_llama_cpp_gives_is_named(tmp_path: Path) -> None:
    """Llama 3.1's template has a date of its own, unless a server gives one; llama.cpp gives today's."""
    prefix = "{% if date_string is not defined %}{% set date_string = '26 Jul 2024' %}{% endif %}{{ date_string }} "
    folder = make_folder(tmp_path / "model", "chatml_like", prefix=prefix)
    with llama_server(write_gguf(folder, tmp_path / "model.gguf")) as url:
        report = compared(folder, url, CASES[:2])
    assert set(report.facts["causes"]) == {"date"}


def test_a_conversation_that_llama_cpp_refuses_is_named(tmp_path: Path) -> None:
    prefix = "{% if messages[0].content == 'Who?' %}{{ raise_exception('no') }}{% endif %}"
    folder, other = make_folder(tmp_path / "model", "chatml_like"), make_folder(tmp_path / "b", "chatml_like", prefix)
    cases = [each for each in CASES if each.messages[0]["content"] == "Who?"][:2]
    with llama_server(write_gguf(folder, tmp_path / "model.gguf"), other / "chat_template.jinja") as url:
        report = compared(folder, url, cases)
    assert set(report.facts["causes"]) == {"refused"}


def test_a_tool_without_a_description_is_named(tmp_path: Path) -> None:
    """llama.cpp gives it an empty one."""
    folder = make_folder(tmp_path / "model", "qwen3_like")
    case = next(each for each in CASES if each.tools)
    functions = [dict(each["function"]) for each in case.tools]
    for function in functions:
        function.pop("description", None)
    bare = replace(case, tools=tuple({"type": "function", "function": each} for each in functions))
    described = replace(case, tools=tuple({"type": "function", "function": _described(each)} for each in functions))
    with llama_server(write_gguf(folder, tmp_path / "model.gguf")) as url:
        report = compared(folder, url, [bare])
        assert set(report.facts["causes"]) == {"tool_schema"}
        assert "give each a description" in report.checks[0].remedy
        assert compared(folder, url, [described]).facts["causes"] == {}


def _described(function: dict[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "description": "Looks.", "parameters": function["parameters"]}


def test_a_turn_begins_behind_what_the_template_marks_after_the_stop_before(tmp_path: Path) -> None:
    """As LFM2.5's template, whose marks enclose the line end behind each stop."""
    folder = make_folder(tmp_path / "model", "chatml_like")
    (folder / "chat_template.jinja").write_text(
        "{% for each in messages %}{{ '<|im_start|>' + each.role + '\\n' }}{% if each.role == 'assistant' %}"
        "{% generation %}{{ each.content + '<|im_end|>\\n' }}{% endgeneration %}"
        "{% else %}{{ each.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    with llama_server(write_gguf(folder, tmp_path / "model.gguf")) as url:
        report = compared(folder, url, [each for each in CASES if each.name == "three rounds"])
    assert (report.facts["turns"], report.facts["causes"]) == (3, {})


# --- Weights ---


@pytest.mark.parametrize("changed", ["nothing", "the head"])
def test_the_served_log_probabilities_of_answers_are_those_of_the_weights(
    tmp_path: Path, changed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_model_folder(tmp_path / "model", hidden_size=64, head_dim=16)
    served = Path(shutil.copytree(folder, tmp_path / "served"))
    if changed == "the head":
        weights = load_file(served / "model.safetensors")
        weights["lm_head.weight"] *= 3
        save_file(weights, served / "model.safetensors")
    rows_of(folder, CASES[:8])  # with characters of several bytes
    options = ["--model", str(folder), "--data", str(tmp_path / "rows.jsonl"), "--weights", "14", "--limit", "8"]
    with llama_server(write_gguf(served, tmp_path / "m.gguf")) as url:
        status = check.main([*options, "--against", "llama-server", url])
    output = capsys.readouterr().out
    line = next(line for line in output.splitlines() if "weights " in line)
    assert (line.split()[0], status) == (("PASS", 0) if changed == "nothing" else ("FAIL", 1)), output
    with pytest.raises(SystemExit):
        check.main(["--model", str(folder), "--weights", "3"])
    assert "give --weights only with --data" in capsys.readouterr().err
    file = str(tmp_path / "m.gguf")
    assert check.main([*options, "--against", "gguf", file]) == 2
    assert "gguf gives no log-probabilities; serve with llama-server or vllm" in capsys.readouterr().err


def test_an_answer_beyond_the_context_of_the_server_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "chatml_like")
    chat = ChatTokenizer.from_pretrained(folder)
    with llama_server(write_gguf(folder, tmp_path / "model.gguf")) as url:
        served = LlamaServerPrompts(url, chat, None, 30.0)
        with pytest.raises(ValueError, match=r"ends at token 4100, and the context of .* holds 4096; start it with"):
            served.log_probabilities([5] * 4100, 4099)


class _Given:
    def __init__(self, value: float) -> None:
        self.value = value

    def log_probabilities(self, ids: list[int], start: int) -> list[float]:
        return [self.value] * (len(ids) - start)


@pytest.mark.parametrize("where", ["the weights", "the server"])
def test_log_probabilities_that_are_nan_are_named(tmp_path: Path, where: str) -> None:
    folder = make_model_folder(tmp_path / "model")
    if where == "the weights":
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"][0] = float("nan")
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    served = _Given(-1.0 if where == "the weights" else float("nan"))
    with pytest.raises(ValueError, match=f"--weights: {where} .* that are NaN"):
        check_weights(folder, [ServedTurn([5, 6, 7, 8], 2)], served)


# --- Vocabularies ---


TEXTS = (
    *("What is 12345?", "One:\n\n1. a\n\n22. b", "  42", "\t7\n\n", "x2y 3.14,15 (2024)", "1  2   3"),
    *("Crème brûlée – 你好 🙂", "can't WE'LL", "\r\n\r\n", "    indented\n        more", "a\n\n\nb", " "),
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of the quickstart's model, without weights."""
    folder = tmp_path_factory.mktemp("smollm2")
    load_tokenizer(gguf_file()).save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    return folder


def test_the_tokenizer_of_the_quickstart_is_that_of_its_file_in_llama_cpp(smollm2: Path) -> None:
    chat = ChatTokenizer.from_pretrained(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    with llama_server(gguf_file()) as url:
        served = LlamaServerPrompts(url, chat, None, 30.0)
        for text in TEXTS:
            ids = served._tokens({"content": text, "parse_special": True})
            assert ids == tokenizer(text, add_special_tokens=False).input_ids, text


def asked(question: str, answer: str) -> Any:
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return replace(CASES[0], messages=messages)


def test_a_text_that_is_divided_otherwise_is_named_tokenization(tmp_path: Path, smollm2: Path) -> None:
    """A file that was converted with another pre-tokenizer, which makes two tokens of the line ends before a digit."""
    with llama_server(write_gguf(smollm2, tmp_path / "model.gguf", pre="gpt-2")) as url:
        report = compared(smollm2, url, [asked("Say\n\n1.", "1."), asked("Say 1.", "1.")])
    assert {name: turns for name, (_, turns, _) in report.facts["causes"].items()} == {"tokenization": 1}
    assert "tokenizer.ggml.pre" in report.checks[0].remedy


def test_white_space_that_an_answer_begins_with_is_named_boundary(tmp_path: Path, smollm2: Path) -> None:
    cases = [asked("Who?", "\n\nPip."), asked("Who?", "  Pip."), asked("Who?", "Pip.")]
    with llama_server(write_gguf(smollm2, tmp_path / "model.gguf", pre="smollm")) as url:
        report = compared(smollm2, url, cases)
    assert {name: turns for name, (_, turns, _) in report.facts["causes"].items()} == {"boundary": 2}
    assert "Begin answers without white space" in report.checks[0].remedy
