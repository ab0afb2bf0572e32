"""The commands in the documentation, and a folder in which they can be run as they stand.

The folder is made like a copy of the repository after a quickstart: the pages' names are there, but a tiny model stands
at the place of the real one, and runs have a few steps.
"""

import argparse
import contextlib
import io
import os
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

from sftron.config import load_config
from tests.conftest import ROOT
from tests.train.runs import make_model_folder, write_rows

PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")], key=lambda page: str(page)
)
FIRST_WORDS = ("python", "torchrun", "sbatch", "make", "pip", "wandb", "printf", "examples/slurm/launch.sh")
_ASSIGNMENT = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True)
class Command:
    """One command of a page, continued lines joined. `shown`: what it prints, says the page, if `$ ` is before it."""

    page: Path
    line: int
    text: str
    shown: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.text}"

    def words(self) -> tuple[dict[str, str], list[str]]:
        """The variables that are set for it, and its words, without the comment."""
        words = shlex.split(self.text, comments=True)
        number = next((n for n, word in enumerate(words) if not _ASSIGNMENT.match(word)), len(words))
        words[number] = words[number].removeprefix(".venv/bin/")
        return dict(word.split("=", 1) for word in words[:number]), words[number:]


def blocks(page: Path, *languages: str) -> Iterator[tuple[int, list[str]]]:
    """The fenced blocks of these languages (the whole of the word after the fence): number of the first line, lines."""
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        if (fence := re.fullmatch(r" *```(.*)", lines[at])) is not None:
            end = next(n for n in range(at + 1, len(lines)) if lines[n].strip() == "```")
            if fence[1] in languages:
                yield at + 2, lines[at + 1 : end]
            at = end
        at += 1


def commands_of(page: Path) -> Iterator[Command]:
    """Those of blocks that begin with one: each of their lines is a command, or, where there are `$ `, those are."""
    for start, lines in blocks(page, "", "bash", "sh", "console"):
        joined: list[tuple[int, str]] = []
        continues = False
        for number, line in enumerate(lines, start):
            if continues:
                joined[-1] = joined[-1][0], joined[-1][1].removesuffix("\\") + " " + line.strip()
            else:
                joined.append((number, line))
            continues = line.endswith("\\")
        told = [(number, line) for number, line in joined if line.strip() and not line.startswith("#")]
        if told and told[0][1].startswith("$ "):
            yield from _with_shown(page, told)
        elif told and _begins_with_a_command(told[0][1]):
            for number, line in told:
                yield Command(page, number, line)


def _with_shown(page: Path, lines: list[tuple[int, str]]) -> Iterator[Command]:
    starts = [n for n, (_, line) in enumerate(lines) if line.startswith("$ ")]
    for begin, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        number, line = lines[begin]
        yield Command(page, number, line.removeprefix("$ "), tuple(text for _, text in lines[begin + 1 : end]))


def _begins_with_a_command(line: str) -> bool:
    words = [word.removeprefix(".venv/bin/") for word in line.split() if not _ASSIGNMENT.match(word)]
    return bool(words) and words[0] in FIRST_WORDS and len(words) > 1 and not words[1].startswith(("is", "has"))


# The folder


def make_sandbox(folder: Path) -> Path:
    for name in ("examples", "tests", "tools", "src", "run_train.py", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("configs", "docs/images", "docs/benchmarks", "runs", "models", "path/to", "exported"):
        (folder / name).mkdir(parents=True)
    model = make_model_folder(folder / "models" / "SmolLM2-135M-Instruct", max_position_embeddings=2048)
    (folder / "path" / "to" / "model").symlink_to(model)
    for source in (ROOT / "configs").iterdir():
        (folder / "configs" / source.name).write_text(shortened(source.read_text(encoding="utf-8")), encoding="utf-8")
    quickstart = (folder / "configs" / "quickstart.yaml").read_text(encoding="utf-8")
    (folder / "sft.yaml").write_text(quickstart.replace("run_name: quickstart", "run_name: sft"), encoding="utf-8")
    write_rows(folder / "rows.jsonl")
    with working_in(folder):
        more = ["--logging.ledger=true", "--checkpoints.interval=2"]
        status, said = run_script("run_train.py", ["--config", "configs/quickstart.yaml", *more])
        assert status == 0, said
    for name in ("my-run", "a", "b", "c", "sweep_toggles/a", "sweep_toggles/b"):
        shutil.copytree(folder / "runs" / "quickstart", folder / "runs" / name, symlinks=True)
    return folder


def shortened(config: str) -> str:
    """4 steps, or one epoch; 1,024 tokens a conversation, since the tests' tokenizer makes many tokens of a text."""
    shorter = {"train_steps": 4, "train_epochs": 1, "warmup_steps": 1, "sequence_length": 1024, "max_new_tokens": 4}
    for key, value in shorter.items():
        config = re.sub(rf"(?m)^(\s+{key}:) \d+", rf"\1 {value}", config)
    return config


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# Running


def run_script(script: str, arguments: list[str], answers: str = "") -> tuple[int, str]:
    """The script's exit status and all that it said. In this process, as importing torch takes seconds.

    answers: what somebody types.
    """
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [script, *arguments]),
        mock.patch.object(sys, "stdin", io.StringIO(answers)),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code)
            return (end.code if isinstance(end.code, int) else int(end.code is not None)), said.getvalue()
    return 0, said.getvalue()


class _ParsedError(BaseException):
    """Thrown in place of running a script whose arguments were understood."""


def parse_script(script: str, arguments: list[str]) -> None:
    """Only let the script read its arguments. Raises ValueError with what it said where it refuses them."""
    parse_known = argparse.ArgumentParser.parse_known_args

    def parse(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> NoReturn:
        _, rest = parse_known(parser, args, namespace)
        if unknown := [word for word in rest if not re.match(r"--[a-z_]+\.[\w.]+=", word)]:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        load_overrides(rest)
        raise _ParsedError

    with mock.patch.multiple(argparse.ArgumentParser, parse_args=parse, parse_known_args=parse):
        try:
            status, said = run_script(script, arguments)
        except _ParsedError:
            return
    raise ValueError(f"ended with {status} before its arguments were read:\n{said}")


def load_overrides(overrides: list[str], config: str = "configs/quickstart.yaml") -> None:
    load_config(config, overrides)
