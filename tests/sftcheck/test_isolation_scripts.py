"""A model that leaks has a program without sftron that shows it, and a sound model has none."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from sftcheck.program.packed import packed_script
from sftcheck.program.program import run_here
from sftron import FlattenPacks, IsolationError, check_isolation
from sftron.checks.isolation import documents_of
from tests.sftcheck.test_isolation import model_of
from tests.sftcheck.test_isolation_table import CELLS
from tests.sftcheck.test_scripts import RUN_FRESH, has_form, run_alone
from tools.isolation_table import CASES, Case, make_model, make_pack, measure

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about its own options


class Deaf(LlamaForCausalLM):
    """Loses the positions on the way, so that the mask is one of a single document."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **given: Any) -> Any:
        return super().forward(input_ids=input_ids, use_cache=given.get("use_cache"))


class Mixing(nn.Module):
    """Adds the logits of another token: of the one before, or with a negative shift of the one after."""

    def __init__(self, shift: int, leak: float = 0.5) -> None:
        super().__init__()
        self.table, self.shift, self.leak = nn.Parameter(torch.randn(96, 96)), shift, leak

    def forward(self, input_ids: Any, **_: Any) -> Any:
        logits = self.table[input_ids]
        return CausalLMOutput(logits=logits + self.leak * logits.roll(self.shift, 1))


def deaf() -> Any:
    model = model_of("llama")
    model.__class__ = Deaf
    return model


def with_cache() -> Any:
    model = model_of("llama")
    model.config.use_cache = True
    return model


LEAKS: dict[str, tuple[Any, str, str]] = {
    "a class that makes its mask without positions": (lambda: model_of("falcon", head_dim=None), "Falcon", "Llama"),
    "a state that goes on": (lambda: model_of("mamba", "eager"), "Mamba", "Llama"),
    "a cache": (with_cache, "use_cache=True", "use_cache=False"),
    "a class of the user's that is one of transformers'": (deaf, "Deaf(config)", "LlamaForCausalLM(config)"),
    "a module of the user's": (lambda: Mixing(1), "shift=1", "shift=0"),
    "a module that sees the next token": (lambda: Mixing(-1), "shift=-1", "shift=0"),
}
"""Models that leak; and what is written in their programs, with what takes its place in that of a sound model."""


def error_of(model: nn.Module) -> IsolationError:
    with pytest.raises(IsolationError) as caught:
        check_isolation(model, [make_pack()])
    return caught.value


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_has_a_program_and_the_same_program_of_a_sound_model_shows_none(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make, own, sound = LEAKS[name]
    monkeypatch.setattr(RUN_FRESH, run_here)
    text = error_of(make()).script()
    assert has_form(text, most=30), text
    assert "sftron" not in text
    (documents,) = re.findall(r"^documents = (.*)$", text, re.MULTILINE)
    assert documents.count("[") - 1 <= 2, "two documents suffice for each of these leaks"
    status, output = run_alone(text, tmp_path)
    assert status == 1
    pairs = re.findall(r"a logit .*is (\S+?)[ ;].*wanted (\S+?),", output)
    assert any(found != wanted for found, wanted in pairs), output
    mended = text.replace(own, sound)
    assert own in text
    if "LlamaForCausalLM(" in sound:
        mended = mended.replace("import DataCollator", "import LlamaForCausalLM, DataCollator")
    assert run_here(mended).status == 0, run_here(mended).output


class Gated(LlamaForCausalLM):
    """Leaks with its own weights alone."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, *args: Any, **given: Any) -> Any:
        found = super().forward(*args, **given)
        return CausalLMOutput(logits=found.logits + self.gate * found.logits.roll(1, 1))


def test_a_program_loads_the_folder_where_a_new_model_does_not_leak(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = Gated(model_of("llama").config)
    nn.init.ones_(model.gate)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(RUN_FRESH, run_here)
    text = error_of(Gated.from_pretrained(tmp_path, use_cache=False)).script()
    loaded = f"model=Gated.from_pretrained({str(tmp_path)!r},dtype=torch.float32"
    assert loaded in "".join(text.split()), text  # a long path is on a line of its own
    assert run_alone(text, tmp_path)[0] == 1


class Late(Mixing):
    """Its positions are those of the row, and a document sees the one before from its fourth token on."""

    def forward(self, input_ids: Any, position_ids: Any, **_: Any) -> Any:
        own = self.table[input_ids] + torch.arange(input_ids.shape[1])[None, :, None]
        return CausalLMOutput(logits=own + (position_ids >= 3)[..., None] * own.roll(4, 1))


def test_the_fewest_documents_still_change_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where documents are also computed otherwise in a row than alone; the model requires positions."""
    monkeypatch.setattr(RUN_FRESH, run_here)
    text = error_of(Late(4)).script()
    (documents,) = re.findall(r"^documents = (.*)$", text, re.MULTILINE)
    assert documents.count("[") - 1 == 2
    assert run_here(text).status == 1


class WithoutEmbeddings(Gated):
    """Says nothing of its vocabulary, and its configuration cannot be made without an argument."""

    class config_class(transformers.LlamaConfig):  # noqa: N801
        def __init__(self, shift: int, **given: Any) -> None:
            super().__init__(**given)
            self.shift = shift

    def get_input_embeddings(self) -> Any:
        raise NotImplementedError


def test_a_class_that_cannot_be_made_small_has_an_error_that_says_so() -> None:
    config = WithoutEmbeddings.config_class(1, **model_of("llama").config.to_dict())
    model = WithoutEmbeddings(config)
    nn.init.ones_(model.gate)
    with pytest.raises(ValueError, match="no program of the model's class shows it"):
        error_of(model).script()


def script_of(model: nn.Module) -> str:
    """Returns the program of a model, as if its documents were found to change each other."""
    batch = FlattenPacks()([make_pack()])
    documents = [batch["input_ids"][0, each].tolist() for each in documents_of(batch)]
    return packed_script(model, documents, asdict(FlattenPacks()), is_future=False)


@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe", "gpt2"])
def test_a_sound_model_has_no_program(model_type: str) -> None:
    with pytest.raises(ValueError, match=r"^no program of the model's class shows it$"):
        script_of(model_of(model_type))


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=str)
def test_of_all_types_those_that_leak_have_a_program_and_no_other_has_one(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RUN_FRESH, run_here)
    verdicts = {cells[-1] for cells in CELLS if cells[0] == str(case)}
    if not verdicts or case.model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("cannot be built; see docs/isolation.md")
    model = make_model(case, measure(case)[-1].attentions[-1])
    model.config.use_cache = False
    if "**leaks**" in verdicts:
        text = script_of(model)
        assert has_form(text, most=30), text
    else:
        with pytest.raises(ValueError, match=r"^no program of the model's class shows it"):
            script_of(model)


def test_why_there_is_no_program_is_told() -> None:
    with pytest.raises(ValueError, match="no program of the model's class shows it"):
        error_of(Mixing(1, leak=1e-5)).script()

    class Keyed(Mixing):
        def __init__(self, key: object) -> None:
            super().__init__(1)

    with pytest.raises(ValueError, match=r"no program .*; Keyed does not keep its argument key"):
        error_of(Keyed(object())).script()
