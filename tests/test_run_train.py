"""run_train.py as people meet it: help, and everything that is wrong, in one message before a weight is loaded."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sftron.commands.train import run as main
from sftron.config import describe_config
from tests.conftest import ROOT
from tests.train.runs import chat_line, make_model_folder, settings, write_config, write_rows


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are not finite: whoever loads them fails in another way than these tests expect."""
    folder = make_model_folder(tmp_path_factory.mktemp("models") / "tiny")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: torch.full_like(weight, torch.nan) for name, weight in weights.items()}, folder / "model.safetensors"
    )
    return folder


def run_process(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_prints_the_whole_configuration_without_loading_torch() -> None:
    script = "import runpy, sys; sys.argv[1:] = ['--help']; runpy.run_path('run_train.py', run_name='__main__')"
    ended = run_process("-X", "importtime", "-c", script)

    assert ended.returncode == 0
    assert describe_config() in ended.stdout
    assert "usage: sftron train --config FILE" in ended.stdout
    assert not re.search(r"\| +torch$", ended.stderr, re.MULTILINE)
    assert (main([]), main(["--help"])) == (2, 0)


Change = Callable[[dict[str, Any], Path], None]


def overwrite(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def rows(*lines: str) -> Change:
    return lambda tree, folder: overwrite(folder / "rows.jsonl", "\n".join(lines) + "\n")


def put(**overrides: Any) -> Change:
    """Overrides as {"section__key": value}; None removes a key, and "{tmp}" is the test's folder."""

    def change(tree: dict[str, Any], folder: Path) -> None:
        for name, value in overrides.items():
            section, key = name.split("__", 1)
            tree.setdefault(section, {})[key] = value.format(tmp=folder) if isinstance(value, str) else value
            if value is None:
                del tree[section][key]

    return change


def both(*changes: Change) -> Change:
    def change(tree: dict[str, Any], folder: Path) -> None:
        for each in changes:
            each(tree, folder)

    return change


def template(text: str) -> Change:
    write: Change = lambda tree, folder: overwrite(folder / "own.jinja", text)  # noqa: E731
    return both(write, put(tokenizer__chat_template="{tmp}/own.jinja"))


def own_model(**changes: Any) -> Change:
    """A copy of the model's folder, with files replaced, or removed where None, and config.json's keys changed."""

    def change(tree: dict[str, Any], folder: Path) -> None:
        source, target = Path(tree["model"]["path"]), folder / "model"
        target.mkdir()
        for path in source.iterdir():
            (target / path.name).write_bytes(path.read_bytes())
        config = json.loads((target / "config.json").read_text())
        overwrite(target / "config.json", json.dumps(config | changes.pop("config", {})))
        for name, text in changes.items():
            path = target / name.replace("__", ".")
            path.unlink() if text is None else overwrite(path, text)
        tree["model"]["path"] = str(target)

    return change


GOOD = chat_line("Hi", "Yo")
CASES: dict[str, tuple[Change, list[str]]] = {
    "data that is not there": (
        put(data__datasets=[{"path": "absent.jsonl"}]),
        ["absent.jsonl: no such file or folder in {tmp}, nor a Hub id"],
    ),
    "a broken line": (rows(GOOD, '{"messages": ['), ["rows.jsonl:2: is not JSON", "write one JSON object"]),
    "nothing to train on": (
        rows(chat_line("Who answers?"), chat_line("Nobody?")),
        ["None of 2 rows was kept", "2 no_trained_token; the first: ", "rows.jsonl:1"],
    ),
    "more positions than the model has": (
        put(tokens__sequence_length=1000),
        ["documents may have 1000 tokens", "has 256 positions", "lower tokens.sequence_length"],
    ),
    "a tokenizer of another model": (
        own_model(config={"vocab_size": 500}),
        ["the tokenizer has ids up to 76", "embeds ids up to 499 (vocab_size 500)", "use this model's tokenizer"],
    ),
    "a broken tokenizer": (
        own_model(tokenizer__json="{"),
        ["no tokenizer can be loaded from", "; check its tokenizer.json"],
    ),
    "a model that is not there": (
        lambda tree, folder: put(tokenizer__path=tree["model"]["path"], model__path="no/such")(tree, folder),
        ["model.path: no/such is not a local folder in {tmp}, and it cannot be downloaded"],
    ),
    "a template that is not there": (
        put(tokenizer__chat_template="absent.jinja"),
        ["tokenizer.chat_template: absent.jinja is neither a file in {tmp} nor one of chatml"],
    ),
    "a template that fails": (
        template("{{ tools | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"),
        ["rows.jsonl:1: the chat template {tmp}/own.jinja, line 1, fails on this conversation: TypeError"],
    ),
    "prompts that end in an answer": (
        both(
            lambda tree, folder: overwrite(folder / "prompts.jsonl", GOOD + "\n"),
            put(evaluation__prompts="{tmp}/prompts.jsonl"),
        ),
        ["prompts.jsonl:1: a prompt must end in a user turn, but this one ends in assistant"],
    ),
    "an attention that cannot run here": (
        put(model__attention="flash_attn"),
        ["attention: 'flash_attn' cannot run here: ", "Choose 'auto', or 'sdpa', which runs anywhere"],
    ),
    "wandb that is not installed": (
        put(logging__wandb={"mode": "offline"}),
        ["pip install 'sftron[wandb]'", "logging.wandb.mode"],
    ),
    "an output folder that cannot be made": (
        put(general__output_dir="{tmp}/rows.jsonl"),
        ["rows.jsonl/run cannot be written (Not a directory)", "choose another general.output_dir"],
    ),
    "a checkpoint that is not there": (
        put(checkpoints__resume="absent/step-3"),
        ["checkpoints.resume: absent/step-3: MANIFEST.json cannot be read", " in {tmp}; name another"],
    ),
    # The messages above came before any weight was read: with nothing else wrong, it is the weights that are refused.
    "weights that are not finite": (put(), ["holds weights that are not finite"]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_reported_in_a_message_with_status_2_before_any_weight_is_loaded(
    tmp_path: Path, model_folder: Path, case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change, wanted = CASES[case]
    write_rows(tmp_path / "rows.jsonl")
    tree = settings(tmp_path, model_folder)
    change(tree, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)

    status = main(["--config", str(write_config(tmp_path / "config.yaml", tree))])
    message = capsys.readouterr().err

    assert status == 2, message
    for words in wanted:
        assert words.replace("{tmp}", str(tmp_path)) in message
    assert "Traceback" not in message
    assert len(message.strip().splitlines()) <= 6
    assert "safetensors" not in message


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--optimizer.learning_rate=1"], "give exactly one --config FILE, not 0"),
        (["--config", "a.yaml", "--config=b.yaml"], "give exactly one --config FILE, not 2"),
        (["--config"], "give exactly one --config FILE, not --config without a file"),
        (["--config", "absent.yaml"], "absent.yaml: cannot be read: No such file or directory"),
        (["--config", "CONFIG", "--tokens.train_step=3"], "tokens.train_step: unknown key; did you mean train_steps"),
        (["--config", "CONFIG", "--dryrun"], "override --dryrun: wanted --section.key=value"),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, model_folder: Path, arguments: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "config.yaml", settings(tmp_path, model_folder))

    assert main([argument.replace("CONFIG", str(config)) for argument in arguments]) == 2
    assert wanted in capsys.readouterr().err


def test_the_process_ends_with_the_status_and_only_the_message(tmp_path: Path, model_folder: Path) -> None:
    write_rows(tmp_path / "rows.jsonl")
    overwrite(tmp_path / "rows.jsonl", "not json\n" + GOOD + "\n")
    config = write_config(tmp_path / "config.yaml", settings(tmp_path, model_folder))
    ended = run_process("run_train.py", "--config", str(config))

    assert ended.returncode == 2
    assert ended.stderr.startswith(f"{tmp_path}/rows.jsonl:1: is not JSON")
    assert len(ended.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()
