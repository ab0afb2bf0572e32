"""Shared by all tests: no network, a small tokenizer, and conversations to encode."""

import importlib
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tests.marked_gpu import wants_gpus

if "PYTEST_XDIST_WORKER" not in os.environ and not wants_gpus(sys.argv[1:]):
    # The tests expect the bits of a CPU and start more ranks than there are GPUs. Set before torch looks for GPUs;
    # workers and subprocesses inherit it.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch

if not torch.cuda.is_available():
    # Triton's own switch, by which its kernels are interpreted. Read when a function is defined, tl.sum and tl.max
    # among them, so before anything imports triton, as transformers does.
    os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import settings
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.child_process import STOP_SIGNALS
from sftron.data.types import Conversation, ConversationKey, Message, Role

ASSETS = Path(__file__).parent / "assets"
ROOT = Path(__file__).parents[1]
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# Beside another worker of pytest-xdist, two threads each would wait for one another.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
# Where a result decides whether something lands it must not depend on luck; elsewhere every run looks somewhere new.
settings.register_profile("sftron", deadline=None, derandomize=bool(os.environ.get("CI")), max_examples=25)
settings.register_profile("nightly", deadline=None, max_examples=200)
settings.load_profile("sftron")


_HANDLERS: dict[signal.Signals, Any] = {}


def pytest_configure() -> None:
    """Undoes nohup and a shell's `&`, which have SIGHUP and SIGINT ignored: a run respects that, and the tests of
    signals need the default."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _HANDLERS.update((number, signal.getsignal(number)) for number in STOP_SIGNALS)


def pytest_itemcollected(item: pytest.Item) -> None:
    """On a GPU, warnings of compilers, drivers and NCCL are shown and end no test."""
    if item.get_closest_marker("gpu"):
        item.add_marker(pytest.mark.filterwarnings("default"), append=False)


def pytest_xdist_auto_num_workers() -> int:
    """Returns half as many workers again as there are cores, as a third of the tests' time is waiting for processes."""
    return (os.cpu_count() or 1) * 3 // 2


def chosen(names: Iterable[str], request: pytest.FixtureRequest) -> list[str]:
    """Returns the names that a test of this session has as its parameter `name`, for a fixture that serves them all."""
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    found = [spec.params.get("name") for spec in specs if spec is not None]
    return [name for name in names if name in found]


class LazyModule:
    """A module that is imported at its first use, as each worker collects every file and runs few of them.

    Without the module's package, the file that creates this is skipped.
    """

    def __init__(self, name: str) -> None:
        if find_spec(name.partition(".")[0]) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("__", "_mock")):  # pytest looks for them in whatever a file has
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def rest_nightly(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Returns the values for `parametrize`; those that are not in `fast` run by make nightly alone."""
    values = list(values)
    assert not (absent := [each for each in fast if each not in values]), f"{absent} are none of the parameters"
    return [each if each in fast else pytest.param(each, marks=pytest.mark.nightly) for each in values]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(ASSETS / "tokenizer")


@pytest.fixture(scope="session")
def chat_tokenizer(tokenizer: PreTrainedTokenizerBase) -> ChatTokenizer:
    return ChatTokenizer(tokenizer)


@pytest.fixture(scope="session")
def conversation() -> Callable[..., Conversation]:
    """conversation("user: Hi", "assistant: Yo") -> Conversation."""

    def make(*turns: str, row: int = 0) -> Conversation:
        pairs = [turn.split(": ", 1) for turn in turns]
        messages = tuple(Message(Role[name.upper()], content) for name, content in pairs)
        return Conversation(messages, ConversationKey(0, row), f"test.jsonl:{row + 1}")

    return make


@pytest.fixture(autouse=True)
def _handlers_as_at_the_start() -> Iterator[None]:
    """A run listens to signals, also one of a module's fixture; what a later test forks would inherit that, and not end
    by the SIGTERM of its Pool."""
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)
    yield
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)


def children_of(process: int) -> list[int]:
    """Returns the process ids of a process's children, on Linux; elsewhere none."""
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended in the meantime
            # The file is "pid (name) state parent ...", and the name may contain any character.
            if int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1]) == process:
                children.append(int(folder.name))
    return children
