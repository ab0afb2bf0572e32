"""`sftron`, and the scripts that call it."""

import ast
import subprocess
import sys
from importlib import import_module, metadata
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from sftron import __version__
from sftron.__main__ import COMMANDS, main
from tests.conftest import ROOT

SCRIPTS = {"run_train.py": "train", "tools/check_sft.py": "check"}
"""Scripts of a checkout, and the commands that they are."""


def test_help_lists_every_command_without_an_import_that_takes_time() -> None:
    script = "import sys; from sftron.__main__ import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    for name, text in COMMANDS.items():
        assert f"  {name}  " in ended.stdout
        assert text in ended.stdout
    slow = {"torch", "transformers", "datasets", "pydantic", "numpy", "yaml", "rich"}
    assert not slow & set(ended.stderr.split())


def test_help_of_every_command_needs_no_import_of_torch() -> None:
    script = f"""
import contextlib, sys
from sftron.__main__ import main
for name in {[*COMMANDS]}:
    with contextlib.suppress(SystemExit):
        main([name, "--help"])
    assert not {{"torch", "transformers", "datasets"}} & set(sys.modules), name
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("usage: sftron ") == len(COMMANDS)


def test_words_that_are_no_command_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "--config", "x"]) == 2
    assert "unknown command 'trian'; choose from init, train, inspect" in capsys.readouterr().err
    assert (main([]), main(["help"])) == (2, 0)


@pytest.mark.parametrize(
    ("word", "command"),
    [("trian", "train"), ("chat", "generate"), ("merge", "convert"), ("export", "convert"), ("eval", "check")],
)
def test_the_command_of_another_trainer_is_answered_with_its_counterpart(
    word: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err.endswith(f"; `sftron {command}` can {COMMANDS[command]}\n")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sftron {__version__}\n"


def test_the_package_installs_the_command() -> None:
    (script,) = entry_points(group="console_scripts", name="sftron")
    assert script.load() is import_module("sftron.__main__").entry_point


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_a_checkout_is_a_command_and_nothing_else(script: str) -> None:
    text = (ROOT / script).read_text(encoding="utf-8")
    assert f'exit_with(lambda: main(["{SCRIPTS[script]}", *sys.argv[1:]]))' in text
    assert len(ast.parse(text).body) == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *(
            (
                f"{command} --model m --device {kind}",
                f"--device: torch {metadata.version('torch')} cannot use a device '{kind}' here; give ",
            )
            for command, kind in (("check", "gpu"), ("check", "cuda:99"), ("generate", "mps"), ("generate", "xpu:1"))
        ),
        ("generate --model m --device meta", "cannot use a device 'meta' here"),
        ("convert a b --stop-token-ids 1;2", "argument --stop-token-ids: '1;2' is not a list of whole numbers"),
        ("generate --model m --max-new-tokens 0", "argument --max-new-tokens: invalid positive value: '0'"),
    ],
)
def test_a_value_that_cannot_be_parsed_is_refused_by_its_argument(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_tilde_in_quotes_or_behind_an_equals_sign_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "script.py").touch()
    for words in (
        "audit ~/run",
        "compare ~/run",
        "sweep ~/run.yaml",
        "inspect --config=~/run.yaml",
        "verify --config=~/run.yaml",
        "train --config=~/run.yaml",
        "generate --model=~/run --prompt=hi",
        "check --model=~/run",
        "convert ~/run ~/target",
        "init ~/run.jsonl ~/model",
        "verify-trainer ~/script.py:make",
    ):
        assert main(words.split()) == 2, words
        assert str(tmp_path) in capsys.readouterr().err, words


def test_the_completion_of_bash_has_every_command_and_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    asked = (
        'COMP_WORDS=(sftron {words}); COMP_CWORD={at}; compopt() {{ :; }}; _sftron; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )

    def completed(*words: str) -> list[str]:
        command = script + asked.format(words=" ".join(words), at=len(words))
        return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.split()

    assert completed("verify") == ["verify", "verify-trainer"]
    assert completed("train", "--optimizer.learning") == ["--optimizer.learning_rate="]
    assert {"--lora.rank=", "--config", "--checkpoints.async="} < set(completed("train", "--"))


def test_the_help_of_a_section_has_its_keys_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "optimizer"]) == 0
    assert capsys.readouterr().out.startswith("optimizer: The optimizer and its learning rate.\n  name (default adamw)")
    assert main(["train", "--help", "optimiser"]) == 2
    assert capsys.readouterr().err == "--help: unknown section 'optimiser'; did you mean optimizer?\n"
