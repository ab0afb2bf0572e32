"""Every command of the documentation runs unchanged, with a tiny model; tests/test_api.py runs its Python blocks."""

import contextlib
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.run import get_args_parser

from sftron.config import load_config
from sftron.data.child_process import STOP_SIGNALS
from tests.conftest import ROOT
from tests.docs_commands import PAGES, Command, commands_of, make_sandbox, parse_script, run_script

PARSED_ONLY = {
    "tools/bench_": "takes minutes; tests/test_benchmarks.py runs each with tiny shapes",
    "tools/gpu.py": "needs a GPU; tests/test_gpu_script.py runs its stages on a stand-in",
    "sftron verify-trainer": "checks a script of the reader's; tests/sftcheck/test_on_ranks.py runs it with torchrun",
    "sftron diff": "reads records of the reader's trainers; tests/sftcheck/test_record.py runs it",
    "sftron sweep": "starts a dozen processes; its own tests make small sweeps",
    "tools/isolation_table.py": "takes minutes; tests/sftcheck/test_isolation_table.py measures each row",
    "tools/family_card.py": "takes minutes; tests/checks/test_family_card.py measures tiny models",
}
"""Commands and scripts, by their beginning, whose arguments are parsed without a run, and why.

Of `make`, `pip`, `sbatch`, `launch.sh`, `wandb` and `tensorboard` too, only arguments and named files are checked: they
need a network, an account, SLURM, other nodes, or the time of all of this.
"""

INSTEAD = {
    # Other pages have a sft.yaml.
    "init my.csv path/to/model": "init my.csv path/to/model --out my.yaml",
    "step-1000": "step-4",
    "--step 1700": "--step 3",
    "TARGET [--runs N] [--corpus DIR]": "row --runs 20",
}
"""Replacements for parts of commands that cannot be the same in a run of 4 steps, or are placeholders."""

STATUS = {"--against": 2, "--logging.to='[wandb]'": 2}
"""Exit statuses other than 0, by a part of the command; the page mentions them."""

TYPED = {"sftron generate": "Hi\n\n"}
"""The input that somebody types, by command."""

TO_DO = """
Either the page is wrong, or this test needs an exception: names that the page assumes go into make_sandbox
(tests/docs_commands.py), the others into PARSED_ONLY, INSTEAD, STATUS or TYPED (tests/test_docs_commands.py)."""

EVERY_COMMAND = [command for page in PAGES for command in commands_of(page)]
COMMANDS = list({(*command.words()[1], *command.shown): command for command in EVERY_COMMAND}.values())


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads, handlers = torch.get_num_threads(), [signal.getsignal(number) for number in STOP_SIGNALS]
    torch.set_num_threads(1)
    yield make_sandbox(tmp_path_factory.mktemp("sandbox"))
    torch.set_num_threads(threads)
    for number, handler in zip(STOP_SIGNALS, handlers, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_the_command_runs(command: Command, sandbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = command.text
    for part, replacement in INSTEAD.items():
        text = text.replace(part, replacement)
    variables, words = Command(command.page, text).words()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with contextlib.chdir(sandbox):
        try:
            status, output = run(words, tmp_path)
        except (ValueError, OSError, AssertionError) as problem:
            pytest.fail(f"{command}\n{problem}\n{TO_DO}", pytrace=False)
        finally:
            subprocess.run(["rm", "-rf", "checkpoints", "exported"], check=True)  # the next command creates them
    expected = next((number for part, number in STATUS.items() if part in text), 0)
    if status != expected:
        pytest.fail(f"{command}\nended with {status}, not {expected}:\n{output[-3000:]}\n{TO_DO}", pytrace=False)
    for line in command.shown:
        pattern = re.escape(line.strip()).replace(re.escape("..."), ".*").replace(r"\ ", r"\s+")
        assert re.search(pattern, output), f"{command}\ndoes not print the page's line: {line}\nbut\n{output[-3000:]}"


def run(words: list[str], folder: Path) -> tuple[int, str]:
    """Returns the exit status and the output. Raises ValueError or AssertionError if the command cannot be right.

    Runs that name no folder of their own are made in `folder`, so that each starts over.
    """
    match words:
        case ["python", "-c", code]:
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
            return done.returncode, done.stdout + done.stderr
        case ["sftron", command, *arguments]:
            return run_python(f"sftron {command}", arguments, folder)
        case ["python", "-m", module]:  # tests/sftcheck/test_zoo_proofs.py runs what this does, by night
            assert importlib.util.find_spec(module) is not None, f"no module is named {module}"
        case ["python", script, *arguments]:
            return run_python(script, arguments, folder)
        case ["torchrun", *arguments]:
            options = get_args_parser().parse_args(arguments)
            rest = options.training_script_args
            return run([*(["sftron"] if options.module else ["python", options.training_script]), *rest], folder)
        case ["printf", *_]:
            done = subprocess.run(["bash", "-c", shlex.join(words).replace("'>'", ">")], capture_output=True, text=True)
            return done.returncode, done.stderr
        case ["make", target, *_]:
            assert re.search(rf"(?m)^{target}:", Path("Makefile").read_text()), f"the Makefile has no {target}"
        case ["pip", "install", *packages]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            named = re.findall(r"sftron\[(.*?)\]", " ".join(packages))
            assert {name for names in named for name in names.split(",")} <= extras.keys(), sorted(extras)
        case ["sbatch" | "examples/slurm/launch.sh" | "wandb" | "tensorboard", *rest]:
            for script in (word for word in words if word.endswith((".sbatch", ".sh"))):
                subprocess.run(["bash", "-n", script], check=True)
            files = [word for word in rest if word.endswith((".yaml", ".sbatch", ".py"))]
            assert all(map(os.path.exists, files)), f"one of {files} does not exist"
            if "--config" in rest:
                config, *overrides = rest[rest.index("--config") + 1 :]
                load_config(config, overrides)
        case _:
            raise ValueError(f"{words[0]}: no case of this test runs it")
    return 0, ""


def run_python(script: str, arguments: list[str], folder: Path) -> tuple[int, str]:
    arguments = [
        each for word in arguments for each in (sorted(map(str, Path().glob(word))) if "*" in word else [word])
    ]
    if any(script.startswith(beginning) for beginning in PARSED_ONLY):
        parse_script(script, arguments)
        return 0, ""
    if script in ("run_train.py", "sftron train") and not any(
        word.startswith("--general.output_dir") for word in arguments
    ):
        arguments = [*arguments, f"--general.output_dir={folder}"]
    return run_script(script, arguments, TYPED.get(script, ""))


def test_every_exception_is_needed() -> None:
    texts = "\n".join(command.text for command in COMMANDS)
    assert [part for part in [*PARSED_ONLY, *INSTEAD, *STATUS, *TYPED] if part not in texts] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_in_the_running_text_is_one_of_its_tool(page: Path) -> None:
    pattern = r"`(?:python )?(sftron [\w-]+|(?:tools|examples)/[\w/]+\.py) ([^`]*)`"
    for script, text in re.findall(pattern, page.read_text(encoding="utf-8")):
        command = script.removeprefix("sftron ").replace("-", "_")
        path = script if script.endswith(".py") else f"src/sftron/commands/{command}.py"
        source, words = (ROOT / path).read_text(encoding="utf-8") + '"--config"', text.split()
        options = [word.partition("=")[0] for word in words if word.startswith("-") and "." not in word]
        assert [option for option in options if f'"{option}"' not in source] == [], f"{page.name}: `{script} {text}`"


def test_a_wrong_option_and_a_wrong_key_are_found(sandbox: Path, tmp_path: Path) -> None:
    with contextlib.chdir(sandbox):
        assert run(["sftron", "inspect", "--config", "sft.yaml", "--htm", "x.html"], tmp_path)[0] == 2
        for words in (
            ["python", "tools/bench_step.py", "--modle", "x"],
            ["sbatch", "examples/slurm/train.sbatch", "--config", "sft.yaml", "--tokens.train_step=5"],
            ["make", "absent"],
        ):
            with pytest.raises((ValueError, AssertionError)):
                run(words, tmp_path)
