"""check_sft compares an adapter with peft: it passes on a sound one, and fails or refuses each kind of unsound one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from sftron.checks import round_trip
from sftron.checks.parity import EXAMPLE_PROMPTS, check_parity
from sftron.commands import check as check_sft
from sftron.models.adapters import LoraSpec
from tests.checks.test_parity import make_folder
from tests.conftest import LazyModule
from tests.models.reference import FAMILIES, make_theirs

peft = LazyModule("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft

ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ranks and alphas": ("SmolLM2", {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"down_proj": 20}}),
    "dora, rslora": ("Qwen 3", {"use_dora": True, "use_rslora": True}),
    "embeddings": ("Llama 3", {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
}


def make_adapter(folder: Path, tokenizer: PreTrainedTokenizerBase, family: str, **options: Any) -> tuple[Path, Path]:
    """Returns a base, and an adapter of it that peft wrote, whose B is not zero."""
    base, adapter = make_folder(folder / "base", tokenizer, **FAMILIES[family]), folder / "adapter"
    reference = make_theirs(**FAMILIES[family] | {"vocab_size": len(tokenizer), "max_position_embeddings": 512})
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", "target_modules": "all-linear"} | options
    )
    model = peft.get_peft_model(reference, config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    model.save_pretrained(adapter)
    return base, adapter


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> tuple[Path, Path]:
    return make_adapter(tmp_path_factory.mktemp("adapted"), tokenizer, *ADAPTERS["ranks and alphas"][:1])


def failed(folders: tuple[Path, Path]) -> list[str]:
    base, adapter = folders
    report = check_parity(base, EXAMPLE_PROMPTS[-2:], max_new_tokens=6, adapter=adapter)
    assert report.facts["model"] == f"{base} with the adapter {adapter}"
    return [check.name for check in report.checks if not check.passed]


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_of_peft_passes_every_check(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    family, options = ADAPTERS[name]
    assert failed(make_adapter(tmp_path, tokenizer, family, **options)) == []


def test_a_wrong_scale_fails_what_is_computed_and_not_the_files(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoraSpec, "scale", lambda self, projection: self.alphas[projection])
    names = failed(folders)
    assert any("max |native" in name for name in names)
    assert not any(name.startswith(("weights", "adapter")) for name in names)


def test_a_tensor_that_is_lost_on_the_way_through_the_model_fails_the_round_trip(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = round_trip.adapter_tensors

    def wrong(model: Any) -> Mapping[str, torch.Tensor]:
        tensors = right(model)
        tensors["model.layers.1.mlp.up_proj.lora_B.weight"] = torch.zeros_like(
            tensors["model.layers.1.mlp.up_proj.lora_B.weight"]
        )
        return tensors

    monkeypatch.setattr(round_trip, "adapter_tensors", wrong)
    assert failed(folders) == ["adapter, peft -> native -> peft"]


def test_an_adapter_of_another_base_is_refused_and_named(
    folders: tuple[Path, Path],
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base, adapter = folders
    other = make_folder(tmp_path / "other", tokenizer, **FAMILIES["SmolLM2"] | {"intermediate_size": 40})
    partial = tmp_path / "partial"
    partial.mkdir()
    (partial / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors.pop(lost := next(name for name in tensors if "gate_proj.lora_B" in name))
    save_file(tensors, partial / "adapter_model.safetensors")
    for arguments, message in {
        ("--model", other, "--adapter", adapter): "gate_proj",
        ("--model", base, "--adapter", partial): lost.removeprefix("base_model.model."),
        ("--model", base, "--adapter", tmp_path): "adapter_model.safetensors",
    }.items():
        assert check_sft.main([*map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
