import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerBase


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads cost more than they give on models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves out what TRL and transformers report of their own options."""
    monkeypatch.setenv("CI", "1")  # no telemetry
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity_warning()


@pytest.fixture
def own(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer that a test may change."""
    return copy.deepcopy(tokenizer)
