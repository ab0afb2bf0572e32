"""What `from sftron import ...` gives, and the page that tells of it."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sftron
from sftron.__main__ import main
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
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("sftron.", "sftcheck."))
        for alias in node.names
    }
    assert told == sftron._MODULES
    for name in sftron.__all__:
        assert getattr(sftron, name).__name__ == name
    assert set(sftron.__all__) <= set(dir(sftron))
    listed = re.findall(r"\w+", PAGE.read_text(encoding="utf-8").split("gives `")[1].split("`")[0])
    assert sorted(listed) == sorted(sftron.__all__)
    with pytest.raises(AttributeError, match="no attribute 'PackedDatset'; it has Batch, ChatTokenizer"):
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
    assert "no problem found" in said
    assert "All 2 checks passed in" in said
    assert "exit status 0" in said


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run of four steps that was trained."""
    folder = tmp_path_factory.mktemp("api")
    model_folder = make_model_folder(folder / "model", max_position_embeddings=2048)
    write_rows(folder / "rows.jsonl")
    path = folder / "sft.yaml"
    write_config(path, settings(folder, model_folder, tokens__train_steps=4))
    assert sftron.open_trainer(sftron.load_config(path)).train() == 0
    return path


def test_inspect_returns_what_the_command_writes(config_file: Path, tmp_path: Path) -> None:
    inspection = sftron.inspect(sftron.load_config(config_file), num_packs=5, num_rows=7)
    written = tmp_path / "audit.json"
    assert main(["inspect", "--config", str(config_file), "--packs", "5", "--rows", "7", "--json", str(written)]) == 0
    assert inspection.audit.as_dict() == json.loads(written.read_text())
    assert inspection.problems == []
    assert [type(pack) for pack in inspection.packs] == [sftron.Pack]
    assert repr(inspection) == "Inspection('run: what is trained', 1 pack shown, 0 problems)"


def test_verify_run_returns_what_the_command_writes(config_file: Path, tmp_path: Path) -> None:
    only = ["template", "masks", "start-up"]
    seen: list[str] = []
    report = sftron.verify_run(
        sftron.load_config(config_file), only=only, num_rows=5, on_check=lambda check: seen.append(check.name)
    )
    written = tmp_path / "report.json"
    options = [*(word for name in only for word in ("--only", name)), "--rows", "5", "--json", str(written)]
    assert main(["verify", "--config", str(config_file), *options, "--html", str(tmp_path / "page.html")]) == 0
    found, expected = report.as_dict(), json.loads(written.read_text())
    for each in (*found["checks"], *expected["checks"]):
        del each["seconds"]
    for facts in (found["facts"], expected["facts"]):
        del facts["date"]
    assert found == json.loads(json.dumps(expected)) | {"checks": found["checks"]}
    assert json.loads(json.dumps(found["checks"])) == expected["checks"]
    assert report.passed
    # Only a card is written into the run directory.
    folder = sftron.load_config(config_file).run_dir
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    main(["verify", "--config", str(config_file), "--only", "template", "--rows", "5"])
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    main(["verify", "--config", str(config_file), "--only", "template", "--rows", "5", "--card"])
    assert {*folder.rglob("*")} - before.keys() == {folder / "verify.yaml"}
    assert seen == [check.name for check in report.checks] == ["template", "masks", "start-up"]
    with pytest.raises(ValueError, match="unknown check nothing"):
        sftron.verify_run(sftron.load_config(config_file), only=["nothing"])


def test_generate_returns_what_the_command_writes(config_file: Path, tmp_path: Path) -> None:
    folder = sftron.load_config(config_file).run_dir
    found = sftron.generate(folder, ["What is 3?", "And 4?"], system="Be brief.", max_new_tokens=6)
    written = tmp_path / "chat.json"
    options = ["--prompt", "What is 3?", "--prompt", "And 4?", "--system", "Be brief.", "--max-new-tokens", "6"]
    assert main(["generate", "--model", str(folder), *options, "--json", str(written)]) == 0
    expected = json.loads(written.read_text())
    assert str(found.folder) == expected["model"]
    assert [(each.role.name.lower(), each.content) for each in found.messages] == [
        (each["role"], each["content"]) for each in expected["messages"]
    ]
    assert found.text == found.texts[-1]
    assert len(found.texts) == len(found.have_stopped) == 2
    first = sftron.generate(
        folder, "What is 3?", system="Be brief.", max_new_tokens=6, dtype=torch.float32, device="cpu"
    )
    assert first.text == found.texts[0]
    sampled = [sftron.generate(folder, "Hi", temperature=3.0, seed=seed, max_new_tokens=8).text for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    for options, problem in (
        ({"prompts": []}, "there is no prompt"),
        ({"prompts": " "}, "the question is empty"),
        ({"prompts": "Hi", "temperature": -1.0}, "temperature is -1.0"),
        ({"prompts": "Hi", "top_p": 0.0}, "top_p is 0.0"),
    ):
        with pytest.raises(ValueError, match=problem):
            sftron.generate(folder, **options)
    with pytest.raises(ValueError, match="is not a folder"):
        sftron.generate(tmp_path / "absent", "Hi")


def test_errors_of_users_are_values_errors_and_public(tmp_path: Path) -> None:
    for error in (sftron.ConfigError, sftron.DataError, sftron.CheckpointError):
        assert issubclass(error, ValueError)
    with pytest.raises(sftron.ConfigError) as caught:
        sftron.load_config(tmp_path / "absent.yaml")
    assert caught.value.problems == (f"{tmp_path / 'absent.yaml'}: cannot be read: No such file or directory",)
