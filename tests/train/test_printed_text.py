"""Whatever a name or an error from outside holds, a terminal obeys none of it, on the screen and in console.log."""

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sftron.commands.train import run as main
from sftron.train.logs import console
from sftron.visible_text import visible_text
from tests.conftest import ROOT
from tests.train.runs import chat_line, settings, write_config, write_rows

HOSTILE = "\x1b]0;owned\x07\x1b[8m\x9b2J\u202e\r\x7f"
"""A window's title, hidden text, a C1 control that clears the screen, a bidirectional override, an overwritten line."""


def _started(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str, **options: Any
) -> tuple[int, str]:
    """The exit status of a run of one step, and all that it prints and logs."""
    if not (tmp_path / "rows.jsonl").exists():
        write_rows(tmp_path / "rows.jsonl")
    tree = settings(tmp_path, model_folder, **{"tokens__train_steps": 1, "checkpoints__export_hf": False} | options)
    status = main(["--config", str(write_config(tmp_path / "config.yaml", tree)), *arguments])
    captured = capsys.readouterr()
    log = tmp_path / "runs/run/console.log"
    return status, captured.out + captured.err + (log.read_text(encoding="utf-8") if log.exists() else "")


def _require_seen_and_not_obeyed(text: str) -> None:
    assert "␛[8m<U+009B>2J<U+202E>␍␡" in text
    assert visible_text(text) == text


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_a_data_sets_name_is_seen_and_not_obeyed(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    data = [{"path": str(tmp_path / "rows.jsonl"), "name": f"set{HOSTILE}"}]
    status, text = _started(tmp_path, model_folder, capsys, *arguments, data__datasets=data)
    assert status == 0, text
    _require_seen_and_not_obeyed(text)


def test_the_names_of_a_model_folder_and_a_run_folder_are_seen_and_not_obeyed(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / f"model{HOSTILE}")
    write_rows(tmp_path / "rows.jsonl")
    status, text = _started(tmp_path, folder, capsys)
    assert status == 0, text
    _require_seen_and_not_obeyed(text)
    (folder / "config.json").write_text("{}")
    status, text = _started(tmp_path, folder, capsys)
    assert status == 2, text
    _require_seen_and_not_obeyed(text)


def test_the_name_of_a_data_file_and_of_its_columns_is_seen_and_not_obeyed(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / f"data{HOSTILE}"
    folder.mkdir()
    rows = [json.loads(chat_line("q", f"a {n}")) | {f"column{HOSTILE}": n} for n in range(9)]
    rows[0]["messages"][1]["content"] = "word " * 500  # over-long: dropped by file and line
    (folder / f"rows{HOSTILE}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    data = [{"path": str(folder)}]
    status, text = _started(tmp_path, model_folder, capsys, data__datasets=data, data__max_dropped_share=0.5)
    assert status == 0, text
    _require_seen_and_not_obeyed(text)
    (folder / f"rows{HOSTILE}.jsonl").write_text('{"messages": [}\n')
    status, text = _started(tmp_path, model_folder, capsys, data__datasets=data)
    assert status == 2, text
    _require_seen_and_not_obeyed(text)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no: ' ~ messages[0]['content']) }}",
        f"{{{{ raise_exception('{HOSTILE}') }}}}",
        f"{{{{ messages['{HOSTILE}'] }}}}{{{{ messages[0]['{HOSTILE}']['x'] }}}}",
    ],
)
def test_what_a_template_raises_is_seen_and_not_obeyed(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], template: str
) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(chat_line(f"q{HOSTILE}", "a") for _ in range(9)) + "\n")
    path = tmp_path / "template.jinja"
    path.write_text(template)
    status, text = _started(tmp_path, model_folder, capsys, tokenizer__chat_template=str(path))
    assert status == 2, text
    assert visible_text(text) == text
    assert "the chat template" in text


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
def test_what_libraries_warn_of_in_a_model_folder_is_not_obeyed(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    content = json.loads((folder / name).read_text())
    content |= dict.fromkeys(("tokenizer_class", "model_type", "transformers_version", HOSTILE), f"x{HOSTILE}")
    (folder / name).write_text(json.dumps(content))
    _, text = _started(tmp_path, folder, capsys)
    assert visible_text(text) == text


def test_a_line_end_in_a_name_makes_no_line_that_passes_for_the_runs_own(capsys: pytest.CaptureFixture[str]) -> None:
    console.start(True)
    console.write("data       rows\ncompleted  after step 9")
    assert capsys.readouterr().out == "data       rows\n           completed  after step 9\n"


def test_all_that_is_printed_goes_through_show_or_the_console() -> None:
    allowed = {"errors.py: show", "console.py: write", "generate.py: show_answer"}
    found = set()
    own = [
        path
        for path in (ROOT / "tools").glob("*.py")
        if not path.stem.startswith(("bench", "chaos", "gpu", "isolation"))
    ]
    for path in [*(ROOT / "src").rglob("*.py"), *own, ROOT / "run_train.py"]:
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                calls = [ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)]
                if {"print", "sys.stdout.write", "sys.stderr.write", "sys.__stderr__.write"} & {*calls}:
                    found.add(f"{path.name}: {function.name}")
    assert found == allowed
