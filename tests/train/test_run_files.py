"""Whatever lies in a run directory in place of one of its files, no command hangs, fills the memory or fails oddly."""

import io
import json
import os
import re
import resource
import shutil
import signal
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from sftron.commands import audit, compare, convert, generate, train
from tests.conftest import ROOT, rest_nightly
from tests.train.ranks import _SERVER
from tests.train.runs import chat_line, make_config, make_model_folder, on_each_step, run

SECONDS, BYTES = 60, 3 * 2**30
"""What each command may take, beyond the memory that it begins with."""
LOGGERS = ("wandb", "trackio", "mlflow")
LAST = 4
"""The steps of the run before any of its files is replaced."""


def make_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 * 2**30)  # a hole, which takes no disk


REPLACEMENTS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "10 GiB": make_sparse,
    "nested without end": lambda path: path.write_text('{"step": 1, "a": ' + "[" * 200_000 + "\n" + "[" * 200_000),
    "no UTF-8": lambda path: path.write_bytes(b'{"step": 1}\n{"step": 2, "a": "\xff\xfe"}\n\x00\n'),
    "null": lambda path: path.write_text("null\n"),
    "an empty object": lambda path: path.write_text("{}\n"),
    "a huge number": lambda path: path.write_text('{"step": 1, "loss": 1e999, "tokens": ' + "9" * 4000 + "}\n"),
}


def documented_files() -> list[str]:
    """Returns the names in the table of docs/architecture.md, as they are called in the run of these tests."""
    section = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("\n## The run directory\n")[2]
    rows = re.findall(r"^\| (`.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    names = [name.rstrip("/") for row in rows for name in re.findall(r"`([^`]+)`", row)]
    return [name.replace("step-N", f"step-{LAST}").replace("rank-R", "rank-0") for name in names]


PARTS = [f"checkpoints/step-{LAST}/{name}" for name in ("MANIFEST.json", "state.json")]
PARTS += ["checkpoints", "hf", f"hf/step-{LAST}/config.json", f"hf/step-{LAST}/README.md"]
PARTS += ["result.json.tmp", "config.yaml.tmp"]
NAMES = documented_files() + PARTS


GONE: dict[str, Callable[[Path], object]] = {
    "the folder removed": shutil.rmtree,
    "the folder renamed": lambda folder: folder.rename(folder.with_name("aside")),
    "metrics.jsonl removed": lambda folder: (folder / "metrics.jsonl").unlink(),
    "metrics.jsonl replaced": lambda folder: (
        shutil.copy(folder / "metrics.jsonl", folder / "copy") and (folder / "copy").rename(folder / "metrics.jsonl")
    ),
    "the folder restored from a copy": lambda folder: [
        shutil.copytree(folder, folder.with_name("copy")),
        shutil.rmtree(folder),
        folder.with_name("copy").rename(folder),
    ],
}


@pytest.mark.parametrize("change", GONE)
def test_a_run_whose_records_are_no_longer_there_does_not_end_as_completed(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, make_model_folder(tmp_path / "model"), tokens__train_steps=3)
    folder = tmp_path / "runs/run"
    on_each_step(monkeypatch, lambda number: GONE[change](folder) if number == 2 else None)
    with pytest.raises(
        FileNotFoundError, match=r"metrics\.jsonl: removed, moved or replaced while the run wrote to it"
    ):
        run(config)
    if folder.exists():
        status = json.loads((folder / "result.json").read_text())["status"]
        assert status == "failed"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all that one run can have, and the files that only other runs have, written by hand."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "others.jsonl").write_text(chat_line("Is 3 even?", "No.") + "\n", encoding="utf-8")
    (folder / "prompts.jsonl").write_text(chat_line("What is 3?") + "\n", encoding="utf-8")
    options: dict[str, Any] = {
        "data__num_lanes": "auto",
        "checkpoints__interval": 2,
        "checkpoints__keep_best": "eval/others/loss",
        "evaluation__datasets": [{"path": str(folder / "others.jsonl"), "name": "others"}],
        "evaluation__interval": 2,
        "evaluation__prompts": str(folder / "prompts.jsonl"),
        "evaluation__max_new_tokens": 4,
        "tokens__train_steps": LAST,
    }
    run(make_config(folder, make_model_folder(folder / "model"), **options))
    directory = folder / "runs/run"
    by_hand = ["output.log", "verify.yaml", "merge_report.json", "revisions.json", "mlflow.db"]
    by_hand += ["frozen-nf4.safetensors", "frozen-nf4.json"]
    for name in [*by_hand, *map("{}.json".format, LOGGERS)]:
        (directory / name).write_text("{}\n", encoding="utf-8")
    for name in (f"adapter/step-{LAST}", "wandb", "tensorboard"):
        (directory / name).mkdir(parents=True)
    assert not [name for name in documented_files() if not (directory / name).exists()]
    return folder


def run_commands(folder: Path, results: Path) -> None:
    """Runs the commands that read a run directory in this process, of which each has its time and memory."""
    directory, out = folder / "runs/run", folder / "out"
    moved = f"--general.output_dir={folder / 'runs'}"
    more = f"--tokens.train_steps={LAST + 1}"
    commands: dict[str, Callable[[], int]] = {
        "audit": lambda: audit.main([str(directory), "--step", "2", moved]),
        "compare": lambda: compare.main([str(directory), "--out", str(out / "compare")]),
        "convert": lambda: convert.main([str(directory / f"checkpoints/step-{LAST}"), str(out / "hf")]),
        "generate": lambda: generate.main(
            ["--model", str(directory), "--prompt", "Hi", "--max-new-tokens", "2", "--device", "cpu"]
        ),
        "resume": lambda: train.run(["--config", str(folder / "config.yaml"), moved, more]),
    }
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, resource.RLIM_INFINITY))

    class TakesTooLong(BaseException): ...

    def end(*_: object) -> None:
        raise TakesTooLong

    signal.signal(signal.SIGALRM, end)
    found = {}
    for name, command in commands.items():
        printed = io.StringIO()
        signal.alarm(SECONDS)
        with redirect_stdout(io.StringIO()), redirect_stderr(printed):
            try:
                status: int | str = command()
            except SystemExit as error:
                status = f"exit {error.code}"
            except OSError:
                status = 1  # the process prints one line and ends with 1: tests/test_tools.py
            except BaseException as error:
                status = "".join(traceback.format_exception(error)[-3:])
        signal.alarm(0)
        found[name] = (status, printed.getvalue())
        results.write_text(json.dumps(found))


def results_with(recorded: Path, name: str, replacement: str, folder: Path) -> dict[str, tuple[int | str, str]]:
    """Returns the exit status, or the traceback, and the standard error of each command."""
    shutil.copytree(recorded, folder, symlinks=True)
    path = folder / "runs/run" / name
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    REPLACEMENTS[replacement](path)
    process = _SERVER.Process(target=run_commands, args=(folder, folder / "results.json"))
    process.start()
    process.join(6 * SECONDS)
    is_over = process.exitcode == 0
    process.kill()
    process.join()
    found = json.loads((folder / "results.json").read_text())
    return found if is_over else {**found, "the next command": ("hangs", "")}


# One that blocks, one that fills the memory and one without an end, each in place of another file.
FAST = [("metrics.jsonl", "a pipe"), ("evaluations.jsonl", "10 GiB"), ("result.json", "an endless device")]


@pytest.mark.parametrize(
    "replaced", rest_nightly([(name, each) for name in NAMES for each in REPLACEMENTS], FAST), ids=" is ".join
)
def test_whatever_a_file_of_a_run_is_replaced_by_no_command_hangs_or_ends_oddly(
    replaced: tuple[str, str], recorded: Path, tmp_path: Path
) -> None:
    found = results_with(recorded, *replaced, tmp_path / "copy")
    assert len(found) == 5
    odd = {command: each for command, each in found.items() if each[0] not in (0, 1, 2)}
    assert not odd, "\n".join(f"{command}: {status}" for command, (status, _) in odd.items())
    most = 12 if replaced[0] == "config.yaml" else 3  # all problems of a configuration are listed
    long = {command: said for command, (status, said) in found.items() if status == 2 and said.count("\n") > most}
    assert not long
