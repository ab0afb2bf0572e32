"""The card of a verified run says what was checked and of what, and the run's exports carry and link it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sftron import __version__
from sftron.commands import verify
from sftron.config import load_config
from sftron.local_paths import without_folders
from sftron.train.model_card import _verified, config_digest
from tests.checks.test_verify_run import let_text_write_control_tokens
from tests.train.runs import run, settings, write_config

CHECKS = ["--only", "forgery", "--only", "masks", "--only", "packed in its type"]


def config_file(home: Path, folder: Path, **overrides: Any) -> Path:
    tree = settings(home, home / "model", tokens__train_steps=2, checkpoints__interval=2, **overrides)
    tree["general"]["output_dir"] = str(folder / "runs")
    return write_config(folder / "config.yaml", tree)


def test_the_card_has_every_row_and_hashes_of_what_was_checked_and_no_folder_or_secret(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    let_text_write_control_tokens(monkeypatch)
    file, card, report = config_file(home, tmp_path), tmp_path / "cards" / "card.yaml", tmp_path / "report.json"
    arguments = ["--config", str(file), *CHECKS, "--card", str(card), "--json", str(report)]
    assert verify.main([*arguments, "--html", str(tmp_path / "correct-horse-battery.html")]) == 1
    assert f"written: {card}" in capsys.readouterr().out
    text = card.read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    assert str(home) not in text
    assert "correct-horse-battery" not in text
    found = yaml.safe_load(text)
    assert (found["schema"], found["passed"]) == ("sftron-verify-1", False)
    rows = {each["name"]: each for each in json.loads(report.read_text())["checks"]}
    for check in found["checks"]:
        row = rows.pop(check["name"])
        assert (check["measured"], check["allowed"]) == (row["measured"], row["allowed"])
        assert check["status"].lower() == row["status"]
    assert rows == {}
    assert {each["name"]: each["status"] for each in found["checks"]} == {
        "masks": "PASS",
        "forgery": "FAIL",
        "packed in its type": "SKIP",
    }
    assert [each["name"] for each in found["checks"] if "remedy" in each] == ["forgery"]
    assert found["versions"]["sftron"] == __version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["command"].startswith("sftron verify --config config.yaml --only forgery")
    weights = (home / "model" / "model.safetensors").read_bytes()
    assert found["hashes"]["weights"] == {"model.safetensors": hashlib.sha256(weights).hexdigest()}
    assert found["partial"] == ["--only"]


def test_a_changed_file_of_the_data_the_template_or_the_weights_changes_its_own_hash(
    home: Path, tmp_path: Path
) -> None:
    def hashes(**overrides: Any) -> dict[str, Any]:
        file, card = config_file(home, tmp_path, **overrides), tmp_path / "card.yaml"
        assert verify.main(["--config", str(file), "--only", "template", "--card", str(card)]) == 0
        return yaml.safe_load(card.read_text())["hashes"]

    before = hashes()
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes((home / "rows.jsonl").read_bytes().replace(b"What is 3?", b"What is 4?"))
    after = hashes(data__datasets=[{"path": str(rows)}])
    assert {name for name in before["data"] if before["data"][name] != after["data"][name]} == {"data.datasets.0"}
    assert (before["weights"], before["chat_template"]) == (after["weights"], after["chat_template"])
    (template := tmp_path / "template.jinja").write_text(
        (home / "model" / "chat_template.jinja").read_text() + "{# another #}"
    )
    after = hashes(tokenizer__chat_template=str(template))
    assert before["chat_template"] != after["chat_template"]


def test_an_export_carries_and_links_the_card_of_its_run_directory(home: Path, tmp_path: Path) -> None:
    file = config_file(home, tmp_path)
    assert verify.main(["--config", str(file), *CHECKS, "--card"]) == 0
    card = tmp_path / "runs" / "run" / "verify.yaml"
    export = run(load_config(file)).directory.hf(2)
    assert (export / "verify.yaml").read_bytes() == card.read_bytes()
    sentence = (
        "Of 3 checks before the run, 2 passed, 0 failed and 1 was not measured. They were only some of the checks"
    )
    sentence += " (--only)"
    assert f"{sentence}: [verify.yaml](verify.yaml)." in (export / "README.md").read_text(encoding="utf-8")

    found = yaml.safe_load(card.read_text())
    config_file_of_run = (card.parent / "config.yaml").read_bytes()
    assert found["hashes"]["config"] == hashlib.sha256(config_file_of_run).hexdigest()
    found["hashes"]["data"]["data.datasets.0"] = "of other rows"
    found["hashes"]["weights"]["model.safetensors"] = "of other weights"
    (folder := tmp_path / "runs" / "other").mkdir()
    (folder / "verify.yaml").write_text(yaml.safe_dump(found))
    other = load_config(file, ["--general.run_name=other"])
    text = (run(other).directory.hf(2) / "README.md").read_text(encoding="utf-8")
    differences = [
        "The data, template or tokenizer differed from the run's",
        "The weights differed from the run's initial weights",
        "The configuration differed from the run's",
    ]
    assert f"{'. '.join([sentence, *differences])}: [verify.yaml]" in text


@pytest.mark.parametrize("content", ["", "[", "a: 1", "schema: sftron-verify-1", "\x00", "schema: 2\nchecks: []"])
def test_a_run_directory_without_a_whole_card_links_none(home: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "verify.yaml").write_text(content)
    assert _verified(tmp_path, {}, home / "model") == ""


def test_the_configuration_hash_covers_the_file_with_its_date_and_without_its_comment(
    home: Path, tmp_path: Path
) -> None:
    template = tmp_path / "dated.jinja"
    dated = "{% set year = strftime_now('%Y') %}"
    template.write_text(dated + (home / "model" / "chat_template.jinja").read_text())
    file = config_file(home, tmp_path, tokenizer__chat_template=str(template))
    assert verify.main(["--config", str(file), "--only", "template", "--card"]) == 0
    folder = run(load_config(file)).directory.folder
    assert yaml.safe_load((folder / "config.yaml").read_text())["tokenizer"]["date"] is not None
    assert load_config(file).tokenizer.date is None
    held = (folder / "config.yaml").read_text()
    known = yaml.safe_load((folder / "verify.yaml").read_text())["hashes"]["config"]
    assert known == hashlib.sha256(held.encode()).hexdigest()
    assert known == config_digest(f"# Settings that changed during the run:\n#   a: 1 in step 1\n{held}")
    assert "configuration differed" not in (folder / "hf/step-2/README.md").read_text()


def test_paths_with_spaces_and_in_urls_have_no_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = tmp_path / "jane doe"
    (folder := user / "my data").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(user))
    (rows := folder / "rows of today.jsonl").write_bytes((home / "rows.jsonl").read_bytes())
    file, card = config_file(home, folder, data__datasets=[{"path": str(rows)}]), folder / "card.yaml"
    assert verify.main(["--config", str(file), "--only", "template", "--layers=1", f"--card={card}"]) == 0
    text = card.read_text()
    assert "jane" not in text
    assert "my data" not in text
    found = yaml.safe_load(text)
    assert found["command"] == "sftron verify --config 'config.yaml' --only template --layers=1 '--card=card.yaml'"
    assert found["scope"]["data"].endswith("rows of today.jsonl")
    assert found["partial"] == ["--only", "--layers"]


def test_every_kind_of_path_is_shortened_and_addresses_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/jane doe")
    for text, expected in {
        "of /srv/of all/x and /home/jane/deeper/x.": "of x and x.",
        "/home/jane doe, /home/jane doe/y ~/y": "~, y y",
        "file:///srv/of all/x file:///home/jane/x": "file://x file://x",
        "https://host/jane/x org/name data/x 1/2": "https://host/jane/x org/name data/x 1/2",
    }.items():
        assert without_folders({"a": [text]}, ["/srv/of all"]) == {"a": [expected]}
