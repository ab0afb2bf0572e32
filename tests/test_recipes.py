"""configs/recipes: each agrees with the table of `sftron init`, states the memory it needs, and passes a dry run."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sftron.__main__ import main
from sftron.config import Config, load_config
from sftron.models.architecture import LlamaConfig
from sftron.train.memory import with_reserve
from sftron.train.run import frozen_dtype
from sftron.train.text.first_config import RECIPES, recipe_of
from tests.conftest import ASSETS, ROOT, rest_nightly
from tests.models.reference import FAMILIES, FIRST_OF_TYPE
from tests.train.gpu_memory import predict_on_gpu
from tests.train.runs import make_model_folder, write_rows

PUBLISHED = json.loads((ASSETS / "published_configs.json").read_text(encoding="utf-8"))["implemented"]
# Its entry is that of the base model, whose sizes are the same.
PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"] = PUBLISHED["meta-llama/Llama-3.1-8B"]
PUBLISHED |= {name.removesuffix(" (text_config)"): config for name, config in PUBLISHED.items()}
FILES = {path.name: path for path in sorted((ROOT / "configs" / "recipes").glob("*.yaml"))}
BY_NAME = {f"{recipe.name}-{way}.yaml": recipe for recipe in RECIPES for way in ("full", "lora")}


def memory_of(config: Config, num_gpus: int) -> float:
    """Returns the predicted memory of each GPU in GB, with its reserve, at the published sizes."""
    step = predict_on_gpu(
        LlamaConfig.from_hf(PUBLISHED[config.model.path]),
        rank=None if config.lora is None else config.lora.rank or 16,
        frozen=frozen_dtype(config),
        mode=config.model.activation_checkpointing,
        num_tokens=config.tokens.sequence_length * config.tokens.micro_batch_size,
        length=config.tokens.sequence_length,
        optimizer=config.optimizer.name,
        accumulates=config.tokens.batch_accumulation_per_replica > 1,
        num_gpus=num_gpus,
    )
    return with_reserve(step.peak, on_gpu=True) / 1e9


def test_every_recipe_has_a_file_for_each_way_and_the_rates_that_init_takes() -> None:
    assert FILES.keys() == BY_NAME.keys()
    for name, recipe in BY_NAME.items():
        config = load_config(FILES[name])
        assert config.model.path == recipe.model
        assert (config.lora is not None) == name.endswith("-lora.yaml")
        assert config.optimizer.learning_rate == (recipe.lora_rate if config.lora else recipe.learning_rate), name
        assert recipe_of(LlamaConfig.from_hf(PUBLISHED[recipe.model])) == recipe


@pytest.mark.parametrize("name", rest_nightly(BY_NAME, fast=["smollm3-3b-lora.yaml", "gpt-oss-20b-lora.yaml"]))
def test_a_recipe_states_the_memory_that_is_predicted(name: str) -> None:
    stated = re.search(r"^# Memory: (\d+) GPUs? with ([\d.]+) GB", FILES[name].read_text(encoding="utf-8"), re.M)
    assert stated, "there is no line '# Memory: N GPUs with G GB'"
    memory = memory_of(load_config(FILES[name]), int(stated[1]))
    assert float(stated[2]) == pytest.approx(memory, rel=0.02), f"it is {memory:.1f} GB"
    assert memory < 80


NOT_THE_FIRST = {"phi-4-mini": "Phi 4 mini", "gemma-4-31b": "Gemma 4 31B", "gemma-4-26b-a4b": "Gemma 4 26B-A4B"}
"""Tiny models that are not the first of their type."""
# One with all weights, one with adapters, one with matrices in NF4, and a mixture.
FAST = ["olmo-3-7b-full.yaml", "granite-3.3-2b-lora.yaml", "llama-3.1-8b-lora.yaml", "gpt-oss-20b-lora.yaml"]


@pytest.mark.parametrize("name", rest_nightly(BY_NAME, FAST))
def test_a_recipe_passes_a_dry_run_with_the_tiny_model_of_its_family(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = BY_NAME[name]
    family = NOT_THE_FIRST.get(recipe.name, FIRST_OF_TYPE[recipe.model_type])
    # NF4 rounds blocks of 64 weights of a row.
    has_nf4 = load_config(FILES[name]).model.frozen_dtype == "nf4"
    wide = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16} if has_nf4 else {}
    if has_nf4 and FAMILIES[family].get("hidden_size_per_layer_input"):
        wide["hidden_size_per_layer_input"] = 64
    folder = make_model_folder(tmp_path / "model", **FAMILIES[family] | wide)
    # Of some model types, transformers replaces pieces of any tokenizer; a published tokenizer.json has them.
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    data = {"path": str(write_rows(tmp_path / "rows.jsonl"))}
    tiny = {"general.output_dir": tmp_path / "runs", "model.path": folder, "data.datasets": json.dumps([data])}
    tiny |= {"tokens.sequence_length": 96, "model.compute_dtype": "float32", "data.num_workers": 0}
    arguments = [f"--{key}={value}" for key, value in tiny.items()]
    assert main(["train", "--config", str(FILES[name]), "--dry-run", *arguments]) == 0, capfd.readouterr().err


def test_the_commented_replay_and_kept_set_of_a_recipe_load(tmp_path: Path) -> None:
    assert all(text.count("# - {path: old.jsonl") == text.count("# keep: [") == 1 for text in texts_of_recipes())
    for number, text in enumerate(texts_of_recipes()):
        text = re.sub(r"# (- \{path: old|interval:|keep:)", r"\1", text)
        text = text.replace("- path: my.jsonl ", "- weight: 99\n      path: my.jsonl ")
        path = tmp_path / f"{number}.yaml"
        path.write_text(re.sub(r"train_epochs: \d+", "train_steps: 100", text), encoding="utf-8")
        config = load_config(path)
        assert [each.weight for each in config.data.datasets] == [99, 1]
        assert [(each.format, each.max_rise) for each in config.evaluation.keep] == [("text", 0.02)]


def texts_of_recipes() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in FILES.values()]
