"""examples/first_hour.ipynb runs from its first cell to its last, with a tiny model under the quickstart's name."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, LazyModule
from tests.train.runs import make_model_folder

nbclient, nbformat = LazyModule("nbclient"), LazyModule("nbformat")
NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")  # of the notebook's libraries
def test_every_cell_of_the_first_hour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model_folder(tmp_path / "models" / "SmolLM2-135M-Instruct", max_position_embeddings=2048)
    (tmp_path / "bin").mkdir()
    for name, arguments in (("sftron", "-m sftron"), ("python", "")):
        script = tmp_path / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=400, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises for a cell that fails; a command that fails makes its cell fail

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    for line in ("written    sft.yaml", "dry run    all checks passed", "completed  after step 20", "isolation True"):
        assert line in text
    bars = [output["data"]["text/plain"] for output in outputs if output["output_type"] == "display_data"]
    assert any(line.startswith("━" * 30 + " 100% | step   20/20") for line in bars), bars
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert json.loads((tmp_path / "runs/my/result.json").read_text())["status"] == "completed"
