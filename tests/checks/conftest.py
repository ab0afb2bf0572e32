from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest
import torch

from sftron.checks import rank_checks
from tests.train.ranks import launch, run_script
from tests.train.runs import chat_line, make_model_folder


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads cost more than they give on models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers, and two dozen conversations of unlike lengths."""
    home = tmp_path_factory.mktemp("verified")
    make_model_folder(home / "model")
    lines = [chat_line(f"What is {n}?", f"{n} is " + "one more than " * (n % 4) + f"{n}.") for n in range(24)]
    (home / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return home


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks the ranks of the check of ranks, as torchrun and its ranks import torch for 15 seconds."""

    def run(command: list[str], **_: object) -> CompletedProcess[str]:
        *_, num_ranks, script, file = command
        ended = launch(int(num_ranks.partition("=")[2]), run_script, script, file, folder=Path(script).parent)
        status = max(abs(each.exit_code or 0) for each in ended)
        out, err = "".join(each.out for each in ended), "".join(each.err for each in ended)
        return CompletedProcess(command, status, out, err)

    monkeypatch.setattr(rank_checks, "subprocess", SimpleNamespace(run=run))
