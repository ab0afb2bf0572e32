"""What `from sftron import ...` gives, and the page that tells of it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sftron
from tests.conftest import ROOT
from tests.train.runs import make_model_folder, settings, write_config, write_rows

PAGE = ROOT / "docs" / "python.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def imports_of(statement: str) -> set[str]:
    """The modules that a fresh interpreter has after the statement."""
    code = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "src")
    return set(done.stdout.split())


def test_sftron_itself_imports_nothing() -> None:
    assert not {"torch", "numpy", "transformers", "yaml"} & imports_of("import sftron")


def test_every_name_is_there_on_the_page_and_as_a_type_checker_has_it() -> None:
    tree = ast.parse(Path(sftron.__file__).read_text(encoding="utf-8"))
    told = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sftron.")
        for alias in node.names
    }
    assert told == sftron._MODULES
    for name in sftron.__all__:
        assert getattr(sftron, name).__name__ == name
    assert set(sftron.__all__) <= set(dir(sftron))
    listed = re.findall(r"\w+", PAGE.read_text(encoding="utf-8").split("gives `")[1].split("`")[0])
    assert sorted(listed) == sorted(sftron.__all__)
    with pytest.raises(AttributeError, match="no attribute 'PackedDatset'; it has ChatTokenizer, Config"):
        sftron.PackedDatset  # noqa: B018


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_the_blocks_of_the_page_run_and_have_ten_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(BLOCKS) == 5
    (tmp_path / "models").mkdir()
    model_folder = make_model_folder(tmp_path / "models" / "SmolLM2-135M-Instruct", max_position_embeddings=2048)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    write_rows(tmp_path / "rows.jsonl")
    write_config(tmp_path / "sft.yaml", settings(tmp_path, model_folder))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__page__"}
    for block in BLOCKS:
        assert len([line for line in block.splitlines() if line.strip()]) <= 10
        exec(compile(block, str(PAGE), "exec"), names)
    said = capsys.readouterr().out
    assert "ASSISTANT  'Yo'" in said or "ASSISTANT  'Y'" in said
    assert "exit status 0" in said
