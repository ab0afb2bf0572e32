"""The checker runs where torch and transformers run: a system without fcntl, fork, resource and /proc has all of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SYSTEM = """
import os, sys
from pathlib import Path

import peft, torch, transformers, trl  # which decide by the platform's name

for name in ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty"):
    sys.modules[name] = None
for name in ("fork", "pread", "sched_getaffinity", "getuid", "O_NOFOLLOW"):
    delattr(os, name)
OURS = tuple(str(Path({root!r}) / "src" / package) for package in ("sftron", "sftcheck"))
LIBRARY = str(Path(os.__file__).parent)

def refuse(event, arguments):
    if event == "os.fork" or (event == "open" and str(arguments[0]).startswith("/proc")):
        frame = sys._getframe(1)
        while frame and frame.f_code.co_filename.startswith((LIBRARY + os.sep, "<")):
            if "site-packages" in frame.f_code.co_filename:
                return
            frame = frame.f_back
        if frame and frame.f_code.co_filename.startswith(OURS):
            raise FileNotFoundError(f"{{event}} {{arguments[:1]}} of {{frame.f_code.co_filename}}")

sys.addaudithook(refuse)
"""
"""A system as the checker sees it. The libraries have chosen their own ways by then, and may look at /proc."""

CHECKS = """
from transformers import AutoTokenizer
from tests.sftcheck.small_trainers import failed, plain, sft, ROWS
from sftron import check_isolation, verify_step, verify_trainer
from sftron.testing import assert_trainer_is_sound
import sftron.commands.verify_trainer

tokenizer = AutoTokenizer.from_pretrained({assets!r})
print(verify_trainer(plain(tokenizer, Path({folder!r}))).passed)
print(failed(verify_trainer(sft(tokenizer, Path({folder!r}), ROWS))))
"""


def test_the_checker_needs_nothing_that_only_linux_has(tmp_path: Path) -> None:
    program = SYSTEM.format(root=str(ROOT)) + CHECKS.format(
        assets=str(ROOT / "tests/assets/tokenizer"), folder=str(tmp_path)
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ended.stdout.splitlines() == ["True", "['trained tokens']"], ended.stderr[-2000:]


@pytest.mark.parametrize("line", ["open('/proc/self/status')", "Path('/proc/meminfo').read_text()", "import fcntl"])
def test_what_the_system_lacks_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "src/sftron").mkdir(parents=True)
    (tmp_path / "src/sftron/reads.py").write_text(f"from pathlib import Path\n{line}\n")
    run = f"\nimport runpy; runpy.run_path({str(tmp_path / 'src/sftron/reads.py')!r})"
    program = SYSTEM.format(root=str(tmp_path)) + run
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(("FileNotFoundError", "ModuleNotFoundError"))
