"""The learning rates of models that people fine-tune, for `sftron init` and configs/recipes (tests/test_recipes.py)."""

from __future__ import annotations

from dataclasses import dataclass

from sftron.models.architecture import LlamaConfig


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model, told by its sizes, and the peaks of its learning rate; configs/recipes states where they are from."""

    name: str
    """The start of the names of its files in configs/recipes, NAME-full.yaml and NAME-lora.yaml."""
    model: str
    """The id on the Hub."""
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    learning_rate: float
    """Of full fine-tuning."""
    lora_rate: float


RECIPES = (
    Recipe("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "llama", 4096, 32, 2e-5, 3e-4),
    Recipe("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3", "mistral", 4096, 32, 1e-5, 6e-5),
    Recipe("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", "smollm3", 2048, 36, 2e-5, 2e-4),
    Recipe("phi-4-mini", "microsoft/Phi-4-mini-instruct", "phi3", 3072, 32, 5e-6, 5e-6),
    Recipe("olmo-3-7b", "allenai/Olmo-3-7B-Instruct", "olmo3", 4096, 32, 8e-5, 2e-4),
    Recipe("granite-3.3-2b", "ibm-granite/granite-3.3-2b-instruct", "granite", 2048, 40, 2e-5, 2e-4),
    Recipe("gpt-oss-20b", "openai/gpt-oss-20b", "gpt_oss", 2880, 24, 2e-5, 2e-4),
    Recipe("qwen-3.5-4b", "Qwen/Qwen3.5-4B", "qwen3_5_text", 2560, 32, 1e-5, 1e-4),
    Recipe("qwen-3.5-35b-a3b", "Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe_text", 2048, 40, 1e-5, 1e-4),
    Recipe("gemma-4-e4b", "google/gemma-4-E4B-it", "gemma4_text", 2560, 42, 1e-5, 5e-5),
    Recipe("gemma-4-31b", "google/gemma-4-31B-it", "gemma4_text", 5376, 60, 5e-6, 5e-5),
)


def recipe_of(architecture: LlamaConfig) -> Recipe | None:
    """Returns the recipe of a model with these sizes, whatever its name; None if there is none."""
    stated = (architecture.model_type, architecture.hidden_size, architecture.num_hidden_layers)
    sizes = {(each.model_type, each.hidden_size, each.num_hidden_layers): each for each in RECIPES}
    return sizes.get(stated)
