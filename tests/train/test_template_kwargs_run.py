"""A run whose template gets values of its variables: said at the start, in inspect, and the defaults of the export."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sftron.checks.inspect_run import inspect
from sftron.checks.parity import read_prompts
from sftron.data.types import DataError
from sftron.train import evaluation
from sftron.train.trainer import open_setup, open_trainer
from tests.data.test_template_kwargs import TEMPLATE
from tests.train.runs import make_config, make_model_folder, run, write_rows


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def test_a_run_says_the_values_and_exports_them_as_defaults(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.jinja").write_text(TEMPLATE, encoding="utf-8")
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    rows = [
        {"messages": messages} | ({"chat_template_kwargs": {"enable_thinking": True}} if n % 3 == 0 else {})
        for n in range(9)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = {
        "tokenizer__chat_template": str(tmp_path / "t.jinja"),
        "tokenizer__template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"},
        "tokens__train_steps": 2,
    }
    config = make_config(tmp_path, model_folder, **options)
    trainer = run(config)
    printed = capsys.readouterr().out
    fixed = 'the template gets enable_thinking: false, reasoning_effort: "low" (tokenizer.template_kwargs)'
    assert fixed in printed
    assert "the template gets enable_thinking: true from 3 sampled rows (chat_template_kwargs)" in printed
    assert "not read: chat_template_kwargs" not in printed

    inspection = inspect(config)
    assert inspection.problems == []
    rows_with = r"rows with enable_thinking: true +3, the first is .*rows.jsonl:1\n"
    assert re.search(rows_with, inspection.as_text(color=False, max_tokens=None))
    assert inspection.audit.as_dict()["rows"]["chat_template_kwargs"] == {"enable_thinking: true": 3}

    exported = AutoTokenizer.from_pretrained(trainer.directory.folder / "latest")
    ours = trainer.setup.data.chat_tokenizer.encode_messages(messages).input_ids.tolist()
    assert exported.apply_chat_template(messages)["input_ids"] == ours
    text = exported.apply_chat_template(messages, tokenize=False, enable_thinking=True)
    assert "Reasoning: low" in text
    assert "No thought" not in text

    changed = options | {"tokenizer__template_kwargs": {"enable_thinking": True}, "tokens__train_steps": 4}
    with pytest.raises(ValueError, match=r"tokenizer.template_kwargs"):
        open_trainer(make_config(tmp_path, model_folder, **changed))
    unknown = options | {"tokenizer__template_kwargs": {"thinkin": True}, "general__run_name": "other"}
    with pytest.raises(ValueError, match=r"tokenizer.template_kwargs: .* does not read thinkin; the variables that it"):
        open_trainer(make_config(tmp_path, model_folder, **unknown))


def test_a_prompt_has_the_values_of_its_own_row_and_unknown_ones_are_refused_at_the_start(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.jinja").write_text(TEMPLATE, encoding="utf-8")
    question = [{"role": "user", "content": "Why?"}]
    rows = [{"messages": question, "chat_template_kwargs": {"enable_thinking": False}}, {"messages": question}]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_rows(tmp_path / "rows.jsonl")
    options = {
        "tokenizer__chat_template": str(tmp_path / "t.jinja"),
        "evaluation__prompts": str(prompts),
        "evaluation__max_new_tokens": 1,
        "tokens__train_steps": 1,
    }
    asked: list[list[int]] = []
    generated = evaluation.generate
    monkeypatch.setattr(
        evaluation, "generate", lambda model, ids, *args, **kw: asked.append(ids) or generated(model, ids, *args, **kw)
    )
    trainer = run(make_config(tmp_path, model_folder, **options))
    tokenizer = trainer.setup.data.chat_tokenizer
    expected = [
        tokenizer.tokenizer.apply_chat_template(
            question, chat_template=TEMPLATE, add_generation_prompt=True, **row.get("chat_template_kwargs", {})
        )["input_ids"]
        for row in rows
    ]
    assert expected[0] != expected[1]
    assert asked == expected * 2

    with pytest.raises(ValueError, match=r"prompts.jsonl:1: `chat_template_kwargs` are not read here; remove"):
        read_prompts(prompts)
    prompts.write_text(json.dumps({"messages": question, "chat_template_kwargs": {"thinkin": False}}) + "\n")
    with pytest.raises(DataError, match=r"prompts.jsonl:1: .* does not read thinkin; the variables that it reads"):
        open_setup(make_config(tmp_path, model_folder, **options))
