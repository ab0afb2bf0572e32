"""Every command and every Python block in the documentation is run: as it stands, beside a tiny model."""

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

from sftron.data.child_process import STOP_SIGNALS
from tests.conftest import ROOT
from tests.docs_commands import (
    PAGES,
    Command,
    blocks,
    commands_of,
    load_overrides,
    make_sandbox,
    parse_script,
    run_script,
    working_in,
)

PARSED_ONLY = {
    "tools/bench_": "takes minutes; tests/test_benchmarks.py tries each with tiny shapes",
    "tools/sweep.py": "makes a dozen runs in processes of their own; tests of its own make small ones",
    "tools/isolation_table.py": "takes minutes; tests/verify/test_isolation_table.py makes it row by row",
    "tools/chaos.py": "takes six minutes; tests/train/test_chaos.py kills a few times",
}
"""Scripts, by the beginning of their path, whose arguments are read and which are not run, and why."""

NOT_RUN = {
    "make": "installs, or runs all of this; that the target is there is looked at",
    "pip": "needs a network; that the extras are there is looked at",
    "sbatch": "needs SLURM; its options are not ours, what comes after the script is read by run_train.py's reader",
    "examples/slurm/launch.sh": "waits for other nodes; tests/train/test_launch.py starts two",
    "wandb": "needs an account; that the files which it names are there is looked at",
}
"""First words of commands that are looked at and not run, and why."""

INSTEAD = {
    "step-1000": "step-4",
    "--step 1700": "--step 3",
    "TARGET [--runs N] [--corpus DIR]": "row --runs 20",
}
"""What cannot be the same in a run of 4 steps, and what stands for something."""

STATUS = {"--data.datasets='[{path: chats.jsonl}]' -n 0": 2, "--logging.wandb.mode=online": 2}
"""Exit statuses other than 0, by a part of the command; the page has to speak of them."""

ANSWERS = {"tools/generate.py": "Hi\n\n"}
"""What somebody types, by script."""

TO_DO = """
The page is wrong, or this test has to learn something: names that the page takes for granted go into make_sandbox
(tests/docs_commands.py); into tests/test_docs_commands.py what cannot be run here, and why (PARSED_ONLY, NOT_RUN),
what cannot be the same in 4 steps (INSTEAD), another exit status (STATUS), what somebody types (ANSWERS)."""

COMMANDS = [command for page in PAGES for command in commands_of(page)]


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
    for ours, theirs in INSTEAD.items():
        text = text.replace(ours, theirs)
    variables, words = Command(command.page, command.line, text).words()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with working_in(sandbox):
        try:
            status, said = run(words, tmp_path)
        except (ValueError, OSError, AssertionError) as problem:
            pytest.fail(f"{command}\n{problem}\n{TO_DO}", pytrace=False)
        finally:
            _as_before(sandbox)
    expected = next((number for part, number in STATUS.items() if part in text), 0)
    if status != expected:
        pytest.fail(f"{command}\nended with {status}, not {expected}:\n{said[-3000:]}\n{TO_DO}", pytrace=False)
    for line in command.shown:
        pattern = re.escape(line.strip()).replace(re.escape("..."), ".*").replace(r"\ ", r"\s+")
        assert re.search(pattern, said), f"{command}\ndoes not print what the page shows: {line}\nbut\n{said[-3000:]}"


def run(words: list[str], folder: Path) -> tuple[int, str]:
    """The exit status and what was said. Raises ValueError or AssertionError where a command cannot be right.

    folder: where runs go that name no folder of their own, so that each begins anew.
    """
    match words:
        case ["python", "-c", code]:
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
            return done.returncode, done.stdout + done.stderr
        case ["python", script, *arguments]:
            return run_python(script, arguments, folder)
        case ["torchrun", *arguments]:
            options = get_args_parser().parse_args(arguments)
            return run_python(options.training_script, options.training_script_args, folder)
        case ["printf", *_]:
            done = subprocess.run(["bash", "-c", shlex.join(words).replace("'>'", ">")], capture_output=True, text=True)
            return done.returncode, done.stderr
        case ["make", target, *_]:
            assert re.search(rf"(?m)^{target}:", Path("Makefile").read_text()), f"the Makefile has no {target}"
        case ["pip", "install", *packages]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            named = ",".join(re.findall(r"sftron\[(.*?)\]", " ".join(packages))).split(",")
            named = [name for name in named if name]
            assert set(named) <= set(extras), f"{named}: the extras are {sorted(extras)}"
        case ["sbatch" | "examples/slurm/launch.sh", *rest]:
            script = next(word for word in words if word.endswith((".sbatch", ".sh")))
            subprocess.run(["bash", "-n", script], check=True)
            if "--config" in rest:
                at = rest.index("--config")
                load_overrides(rest[at + 2 :], rest[at + 1])
            require_files(rest)
        case ["wandb", *rest]:
            require_files(rest)
        case _:
            raise ValueError(f"{words[0]}: nobody has said how this is run")
    return 0, ""


def require_files(words: list[str]) -> None:
    missing = [word for word in words if word.endswith((".yaml", ".sbatch", ".py")) and not Path(word).exists()]
    assert not missing, f"no such file: {missing}"


def run_python(script: str, arguments: list[str], folder: Path) -> tuple[int, str]:
    arguments = [
        each for word in arguments for each in (sorted(map(str, Path().glob(word))) if "*" in word else [word])
    ]
    if any(script.startswith(beginning) for beginning in PARSED_ONLY):
        parse_script(script, arguments)
        return 0, ""
    if script == "run_train.py" and not any(word.startswith("--general.output_dir") for word in arguments):
        arguments = [*arguments, f"--general.output_dir={folder}"]
    return run_script(script, arguments, ANSWERS.get(script, ""))


def _as_before(sandbox: Path) -> None:
    """Remove what a command has written where the next one wants nothing."""
    for path in (sandbox / "checkpoints", sandbox / "exported"):
        if path.is_dir():
            subprocess.run(["rm", "-r", str(path)], check=True)


PYTHON = [page for page in PAGES if any(True for _ in blocks(page, "python"))]


@pytest.mark.filterwarnings("default")  # what libraries warn of is not the page's
@pytest.mark.parametrize("page", PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_the_page_runs(page: Path, sandbox: Path) -> None:
    """All blocks of a page, one after another, share their names."""
    names: dict[str, object] = {"__name__": "__page__"}
    with working_in(sandbox):
        for line, code in blocks(page, "python"):
            exec(compile("\n" * (line - 1) + "\n".join(code), str(page), "exec"), names)


def test_every_exception_is_needed() -> None:
    texts = "\n".join(command.text for command in COMMANDS)
    assert [part for part in [*INSTEAD, *STATUS] if part not in texts] == []


@pytest.mark.skipif(not (ROOT / "models/SmolLM2-135M-Instruct").exists(), reason="make quickstart brings its tokenizer")
def test_the_picture_of_the_masks_is_what_the_tool_draws(tmp_path: Path) -> None:
    drawn, picture = tmp_path / "pack.svg", ROOT / "docs" / "images" / "pack.svg"
    options = ["--config", "configs/quickstart.yaml", "-n", "0", "--packs", "1", "--rows", "1", "--picture", str(drawn)]
    with working_in(ROOT):
        assert run_script("tools/inspect_data.py", options)[0] == 0
    assert drawn.read_text() == picture.read_text(), "draw it anew; docs/masks.md has the command"


OPTIONS = re.compile(r"`((?:python )?(?:tools|examples)/[\w/]+\.py [^`]*)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_in_the_running_text_is_one_of_its_tool(page: Path) -> None:
    for text in OPTIONS.findall(page.read_text(encoding="utf-8")):
        script, *words = text.removeprefix("python ").split()
        source = (ROOT / script).read_text(encoding="utf-8")
        options = [word.partition("=")[0] for word in words if word.startswith("-") and "." not in word]
        assert [option for option in options if f'"{option}"' not in source] == [], f"{page.name}: `{text}`"


def test_a_wrong_option_and_a_wrong_key_are_found(sandbox: Path, tmp_path: Path) -> None:
    with working_in(sandbox):
        for words in (
            ["python", "tools/inspect_data.py", "--config", "sft.yaml", "--pictures", "x.svg"],
            ["python", "run_train.py", "--config", "sft.yaml", "--tokens.train_step=5"],
            ["torchrun", "--nproc_per_node=2", "run_train.py", "--config", "absent.yaml"],
        ):
            assert run(words, tmp_path)[0] == 2
        for words in (
            ["python", "tools/bench_step.py", "--modle", "x"],
            ["sbatch", "examples/slurm/train.sbatch", "--config", "sft.yaml", "--tokens.train_step=5"],
            ["make", "absent"],
            ["frobnicate", "x"],
        ):
            with pytest.raises((ValueError, AssertionError)):
                run(words, tmp_path)
