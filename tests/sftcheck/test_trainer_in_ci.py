"""verify_trainer in the tests and the CI of others: a helper for pytest, a GitHub Action, and a card's line."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sftcheck.program.program import run_here
from sftron import verify_trainer
from sftron.testing import assert_trainer_is_sound
from tests.conftest import ROOT
from tests.sftcheck.small_trainers import ANSWERS, ROWS, encoded, of_features, plain, sft

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.filterwarnings("ignore")]


def test_the_helper_passes_a_sound_trainer_and_shows_the_rows_and_the_program_of_another(
    own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_trainer_is_sound(plain(own, tmp_path))
    monkeypatch.setattr("sftcheck.program.program.run_fresh", run_here)
    everything = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in encoded(own, ROWS)]
    with pytest.raises(AssertionError) as caught:
        assert_trainer_is_sound(of_features(own, tmp_path, everything))
    message = str(caught.value)
    assert message.startswith("Do not train yet: ")
    assert "\ntrained tokens: " in message
    assert "(allowed: as meant)\nThe loss trains the prompts." in message
    assert "A program without sftron that shows it:\n\n# torch " in message
    shown = [entry.name for entry in caught.traceback.filter(caught)]
    assert shown == ["test_the_helper_passes_a_sound_trainer_and_shows_the_rows_and_the_program_of_another"]
    assert_trainer_is_sound(of_features(own, tmp_path, everything), trained_roles="all")


def test_the_line_of_a_card_can_be_compared_with_its_report(own: Any, tmp_path: Path) -> None:
    report = verify_trainer(sft(own, tmp_path, ANSWERS))
    read = json.loads(json.dumps(report.as_dict()))
    rows = [[row["name"], row["status"], row["measured"], row["allowed"]] for row in read["checks"]]
    digest = hashlib.sha256(json.dumps([read["facts"], rows], sort_keys=True).encode()).hexdigest()[:12]
    num_passed = sum(row["status"] == "pass" for row in read["checks"])
    versions = read["facts"]["versions"]
    assert read["card_line"] == f"{read['title']}: {num_passed} of 12 checks passed ({versions}; {digest})"
    assert ", trl " in versions
    failed = verify_trainer(sft(own, tmp_path, ROWS))
    assert "; failed: trained tokens" in failed.card_line
    assert digest not in failed.card_line


SCRIPT = """
from pathlib import Path
from tests.sftcheck.small_trainers import ANSWERS, ROWS, sft
from transformers import AutoTokenizer

def made():
    return sft(AutoTokenizer.from_pretrained({folder!r}), Path({out!r}), {rows})
"""


@pytest.mark.parametrize(
    ("rows", "status", "words"), [("ANSWERS", 0, "checks passed in"), ("ROWS", 1, "FAIL  trained")]
)
def test_the_action_shows_the_table_in_the_summary_and_exits_as_the_command_does(
    tmp_path: Path, rows: str, status: int, words: str
) -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    assert action["runs"]["using"] == "composite"
    assert set(action["inputs"]) == {"target", "args", "python-version"}
    setup, install, check = action["runs"]["steps"]
    assert setup["uses"].startswith("actions/setup-python@")
    assert install["run"] == 'python -m pip install "$FOLDER"'
    script = tmp_path / "a_script.py"
    script.write_text(
        SCRIPT.format(folder=str(ROOT / "tests/assets/tokenizer"), out=str(tmp_path), rows=rows), encoding="utf-8"
    )
    values = {"${{ inputs.target }}": f"{script}:made", "${{ inputs.args }}": "--trained-roles assistant"}
    given = {name: values[value] for name, value in check["env"].items()}
    summary = tmp_path / "summary.md"
    paths = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "GITHUB_STEP_SUMMARY": str(summary),
        "RUNNER_TEMP": str(tmp_path),
    }
    done = subprocess.run(["bash", "-c", check["run"]], env={**os.environ, **paths, **given}, check=False, cwd=tmp_path)
    assert done.returncode == status
    shown = summary.read_text(encoding="utf-8")
    assert shown.startswith("````text\n")
    assert shown.endswith("````\n")
    assert words in shown
