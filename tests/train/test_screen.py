"""A run's lines are on the terminal above its bar, plain where there is none, and in console.log in any case."""

import errno
import io
import itertools
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sftron.commands.train import run as main
from sftron.errors import print_any_text
from sftron.train import loop
from sftron.train.logs import console
from sftron.train.logs.run_logs import LineFile
from tests.train.conftest import FinishedRun
from tests.train.runs import chat_line, make_config, make_model_folder, run

ESCAPE = "\x1b"


class Screen(io.StringIO):
    """A terminal of 80 columns, as standard output."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Screen()


def test_the_bar_stands_below_the_lines_and_the_cursor_stays_visible(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", screen)
    now = 0.0
    progress = console.RunProgress(lambda: now)
    progress.update(0.25, "step 1/4")
    console.write("[/b] [red] :smile:")
    now = 10.0
    progress.update(0.5, "step 2/4")
    console.hide_progress()
    first, _, rest = screen.getvalue().partition("[/b] [red] :smile:\n")
    assert " 25% | step 1/4" in first
    assert re.search(r"━ *\S* 50% \| step 2/4 \| 0:20 left", re.sub(r"\x1b\[[\d;]*m", "", rest))
    assert "\x1b[?25l" not in screen.getvalue()


def test_in_a_notebook_the_bar_is_one_line_of_the_cell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = list[str]()

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> SimpleNamespace:
        assert raw
        assert display_id
        return SimpleNamespace(update=lambda data, raw: shown.append(data["text/plain"]))

    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    now = 0.0
    progress = console.RunProgress(lambda: now)
    progress.update(0.25, "step 1/4")
    now = 10.0
    progress.update(0.5, f"step 2/4 {ESCAPE}[2J")
    assert shown == [
        f"{'━' * 8}{'·' * 22}  25% | step 1/4",
        f"{'━' * 15}{'·' * 15}  50% | step 2/4 ␛[2J | 0:20 left",
    ]
    assert capsys.readouterr().out == ""
    console.be_quiet(True)
    try:
        console.RunProgress().update(1.0, "step 4/4")
    finally:
        console.be_quiet(False)
    assert len(shown) == 2


def test_on_a_terminal_a_line_in_short_never_wraps_and_the_log_has_all_of_it(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", screen)
    logged: list[bytes] = []
    line, short = "all " * 100, "short " * 20
    console.log_to(logged.append)
    console.write_short(line, short)
    console.log_to(None)
    assert screen.getvalue() == short[:79] + "\n"
    assert logged == [line.encode()]


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0:01"), (724.6, "12:05"), (172799.6, "48:00:00")])
def test_the_time_left_follows_the_pace_of_the_last_steps(seconds: float, words: str) -> None:
    """100 slow steps, and then 1,000 at a pace that leaves `seconds` for the other half of the run."""
    now = 0.0
    progress = console.RunProgress(lambda: now)
    progress.update(0.001, "")
    assert progress.time_left is None
    for number in range(2, 101):
        now += 1000
        progress.update(0.001 * number, "")
    for number in range(1, 1001):
        now += seconds / 1250
        progress.update(0.1 + 0.0004 * number, "")
    assert progress.time_left == words


def test_without_a_terminal_there_is_no_bar_and_the_whole_line(capsys: pytest.CaptureFixture[str]) -> None:
    console.RunProgress().update(0.5, "the bar")
    console.write_short("the whole line", "short")
    console.start(False)  # as on all ranks but the main one
    console.write("nothing")
    assert capsys.readouterr().out == "the whole line\n"


def test_console_log_has_every_line_of_every_start_plain(finished: FinishedRun) -> None:
    text = "\n".join(finished.console)
    assert ESCAPE not in text
    assert text.count("⟦") > 1  # the pack, where a terminal has colors
    assert sum(line.startswith("sftron ") for line in finished.console) == 2
    assert [line for line in finished.console if line.startswith("completed")]
    losses = [float(loss) for loss in re.findall(r"(?m)^step .*?\| loss +([\d.]+)", text)]
    assert losses == [round(line["loss"], 4) for line in finished.steps]


def test_a_log_has_what_was_printed_before_it_existed_and_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    logged: list[bytes] = []
    console.write("early")
    console.log_to(logged.append)
    console.write("see https://user:hunter2@example.org/x")
    console.log_to(None)
    console.write("after")
    assert logged == [b"early", b"see https://***@example.org/x"]
    assert capsys.readouterr().out == "early\nsee https://***@example.org/x\nafter\n"


def test_a_console_log_that_cannot_be_written_is_reported_once_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, is_full = LineFile(tmp_path / "console.log"), True
    console.log_to(log.append)

    class Disk(io.FileIO):
        def write(self, data: bytes) -> int:
            if is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    log._file.close()
    log._file = io.BufferedWriter(Disk(log.path, "ab"))
    console.write("one")
    console.write("two")
    is_full = False
    console.write("three")
    console.log_to(None)
    log.close()

    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if "WARNING" not in line] == ["one", "two", "three"]
    assert len(printed) == 4
    assert sorted(log.path.read_text().splitlines()) == sorted(printed)


def test_a_terminal_that_lacks_the_datas_letters_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="latin-1"))
    print_any_text()
    console.write("日本")
    assert shown.getvalue() == b"\\u65e5\\u672c\n"


def test_a_dry_run_says_what_it_is_doing_before_it_does_it(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_config(tmp_path, model_folder)
    assert main(["--config", str(tmp_path / "config.yaml"), "--dry-run"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("dry run", "model ", "memory"))]
    assert [line.split()[:3] for line in lines] == [
        ["dry", "run", "checking"],
        ["model", f"{model_folder}:", "2"],
        ["dry", "run", "loading"],
        ["dry", "run", "making"],
        ["memory", "predicted", "for"],
        ["dry", "run", "all"],
    ]


def test_a_long_first_pack_is_printed_without_its_middle_and_whole_on_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(chat_line("Hi", "".join(f"{n}\n" for n in range(120))) + "\n")
    options = {"tokens__sequence_length": 512, "tokens__train_steps": 1, "checkpoints__export_hf": False}
    folder = make_model_folder(tmp_path / "model", max_position_embeddings=512)
    make_config(tmp_path, folder, **options)
    page = tmp_path / "runs" / "run" / "samples.html"
    for arguments, whole_in in ((["--dry-run"], "sftron inspect"), ([], str(page))):
        assert main(["--config", str(tmp_path / "config.yaml"), *arguments]) == 0
        lines = capsys.readouterr().out.splitlines()
        begin = next(n for n, line in enumerate(lines) if line.startswith("━━ pack 0 "))
        shown = lines[begin : begin + 120]
        (counted,) = (line for line in shown if "lines more" in line)
        assert counted.endswith(f" lines more; {whole_in} has all …]")
        assert any(line.endswith("│ 119↵") for line in shown)
    text = re.sub("<[^>]+>", "", page.read_text(encoding="utf-8"))
    assert [int(number) for number in re.findall(r"^\d+$", text, re.MULTILINE)] == [*range(120)]


@pytest.mark.parametrize(
    ("wall", "processor", "threads", "is_busy"), [(6.0, 3.0, 2, True), (4.0, 3.9, 2, False), (6.0, 3.0, 1, False)]
)
def test_a_first_step_that_waits_for_cores_names_the_remedy(
    wall: float,
    processor: float,
    threads: int,
    is_busy: bool,
    tmp_path: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clocks = {
        "perf_counter": itertools.count(0.0, wall).__next__,
        "process_time": itertools.count(0.0, processor).__next__,
    }
    monkeypatch.setattr(loop, "time", SimpleNamespace(**clocks))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    run(make_config(tmp_path, model_folder, tokens__train_steps=2, checkpoints__export_hf=False))
    warned = capsys.readouterr().out.count(f"with {processor:.1f} s of processor time: ")
    assert warned == is_busy
