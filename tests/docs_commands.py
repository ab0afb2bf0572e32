"""The commands of the documentation, and a folder in which they run unchanged.

The folder looks like the repository after a quickstart, but its model is tiny and its runs have a few steps.
"""

import argparse
import contextlib
import io
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from sftron.__main__ import entry_point
from sftron.config import load_config
from tests.conftest import ROOT
from tests.train.runs import make_model_folder, write_rows

PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")], key=lambda page: str(page)
)
FIRST_WORDS = ("sftron", "python", "torchrun", "sbatch", "make", "pip", "wandb", "printf", "examples/slurm/launch.sh")
_ASSIGNMENT = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True)
class Command:
    """One command of a page. `shown` has the lines of output that the page prints below it."""

    page: Path
    text: str
    shown: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text}"

    def words(self) -> tuple[dict[str, str], list[str]]:
        """Returns the variables that the command sets, and its words without a comment."""
        words = shlex.split(self.text, comments=True)
        number = next(n for n, word in enumerate(words) if not _ASSIGNMENT.match(word))
        words[number] = words[number].removeprefix(".venv/bin/")
        return dict(word.split("=", 1) for word in words[:number]), words[number:]


def blocks(page: Path, *languages: str) -> Iterator[tuple[int, str]]:
    """Yields the number of the first line and the text of each fenced block in one of the languages."""
    text = page.read_text(encoding="utf-8")
    for block in re.finditer(r"^ *```(.*)\n((?:.*\n)*?) *```$", text, re.MULTILINE):
        if block[1] in languages:
            yield text.count("\n", 0, block.start(2)) + 1, block[2]


def commands_of(page: Path) -> Iterator[Command]:
    """Yields the lines of blocks that begin with a command or, in blocks that begin with `$ `, the lines after it."""
    for _, text in blocks(page, "", "bash", "sh", "console"):
        text = re.sub(r"\\\n\s*", " ", text)
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        if lines and lines[0].startswith("$ "):
            for part in re.split(r"^\$ ", "\n".join(lines), flags=re.MULTILINE)[1:]:
                command, *shown = part.splitlines()
                yield Command(page, command, tuple(shown))
        elif lines and _begins_with_a_command(lines[0]):
            yield from (Command(page, line) for line in lines)


def _begins_with_a_command(line: str) -> bool:
    words = [word.removeprefix(".venv/bin/") for word in line.split() if not _ASSIGNMENT.match(word)]
    return len(words) > 1 and words[0] in FIRST_WORDS and not words[1].startswith(("is", "has"))


# --- The folder ---


def make_sandbox(folder: Path) -> Path:
    for name in ("examples", "tests", "tools", "src", "run_train.py", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("configs", "docs/images", "docs/benchmarks", "runs", "models", "path/to", "exported"):
        (folder / name).mkdir(parents=True)
    model = make_model_folder(folder / "models" / "SmolLM2-135M-Instruct", max_position_embeddings=2048)
    (folder / "path" / "to" / "model").symlink_to(model)
    for source in (ROOT / "configs").glob("*.yaml"):
        (folder / "configs" / source.name).write_text(shortened(source.read_text(encoding="utf-8")), encoding="utf-8")
    quickstart = (folder / "configs" / "quickstart.yaml").read_text(encoding="utf-8")
    (folder / "sft.yaml").write_text(quickstart.replace("run_name: quickstart", "run_name: sft"), encoding="utf-8")
    write_rows(folder / "rows.jsonl")
    pairs = "".join(f"What is {n}?,It is {n}.\n" for n in range(30))
    (folder / "my.csv").write_text(f"prompt,completion\n{pairs}", encoding="utf-8")
    with contextlib.chdir(folder):
        more = ["--checkpoints.interval=2"]
        status, output = run_script("sftron train", ["--config", "configs/quickstart.yaml", *more])
        assert status == 0, output
    for name in ("my-run", "my", "a", "b", "c", "sweep_toggles/a", "sweep_toggles/b"):
        shutil.copytree(folder / "runs" / "quickstart", folder / "runs" / name, symlinks=True)
    return folder


def shortened(config: str) -> str:
    """Sets 4 steps or one epoch, and 1,024 tokens per conversation, because the tests' tokenizer makes many tokens."""
    shorter = {"train_steps": 4, "train_epochs": 1, "warmup_steps": 1, "sequence_length": 1024, "max_new_tokens": 4}
    for key, value in shorter.items():
        config = re.sub(rf"(?m)^(\s+{key}:) \d+", rf"\1 {value}", config)
    return config


# --- Running ---


def run_script(script: str, arguments: list[str], typed: str = "") -> tuple[int, str]:
    """Returns the exit status and output of a script or a command of sftron.

    It runs in this process, because importing torch takes seconds.
    """
    output = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [*script.split(), *arguments]),
        mock.patch.object(sys, "stdin", io.StringIO(typed)),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            if script.startswith("sftron "):
                entry_point()
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code)
            return (end.code if isinstance(end.code, int) else int(end.code is not None)), output.getvalue()
    return 0, output.getvalue()


class _ParsedError(BaseException):
    """Raised instead of running a script whose arguments were parsed."""


def parse_script(script: str, arguments: list[str]) -> None:
    """Lets the script parse its arguments and nothing else. Raises ValueError with its output if it refuses them."""
    parse_known = argparse.ArgumentParser.parse_known_args

    def parse(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> NoReturn:
        _, rest = parse_known(parser, args, namespace)
        if unknown := [word for word in rest if not re.match(r"--[a-z_]+\.[\w.]+=", word)]:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        load_config("configs/quickstart.yaml", rest)
        raise _ParsedError

    with mock.patch.multiple(argparse.ArgumentParser, parse_args=parse, parse_known_args=parse):
        try:
            status, output = run_script(script, arguments)
        except _ParsedError:
            return
    raise ValueError(f"ended with {status} before its arguments were read:\n{output}")
