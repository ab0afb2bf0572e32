"""The memory of a training step on a GPU, predicted at the sizes of published models."""

import torch

from sftron.checkpoint.adapter import model_projections
from sftron.models.adapters import LoraSpec
from sftron.models.architecture import LlamaConfig
from sftron.train.memory import StepMemory, make_unloaded, predict


def backends_on_gpu(config: LlamaConfig) -> list[str]:
    """Returns the attention backend of each layer that `auto` chooses where torch's varlen is the fastest."""
    needs_flex = any(layer.sinks or layer.softcap is not None for layer in config.layers)
    sizes = [config.of_layer(layer).head_dim for layer in config.layers]
    return ["flex" if needs_flex else "varlen" if size <= 256 else "sdpa" for size in sizes]


def predict_on_gpu(
    config: LlamaConfig,
    *,
    rank: int | None,
    frozen: torch.dtype,
    mode: str,
    num_tokens: int,
    length: int,
    optimizer: str = "adamw",
    accumulates: bool = False,
    num_gpus: int = 1,
    targets: tuple[str, ...] = (),
) -> StepMemory:
    """Returns the memory of each GPU with adapters of `rank` on projections of these names, or all; None trains all
    weights. `length` is that of a document."""
    spec = None
    if rank is not None:
        names = [each for each in model_projections(config) if not targets or each.rpartition(".")[2] in targets]
        spec = LoraSpec(ranks=dict.fromkeys(names, rank), alphas=dict.fromkeys(names, 2.0 * rank))
    return predict(
        make_unloaded(config, spec, frozen, torch.bfloat16, mode),
        attention=backends_on_gpu(config),
        num_tokens=num_tokens,
        longest_document=length,
        optimizer=optimizer,
        accumulates=accumulates,
        num_shards=num_gpus,
        on_gpu=True,
    )
