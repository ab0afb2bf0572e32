"""Some steps on as many ranks as there are, and all that they measure: losses, gradients, weights, answers."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from sftron.checkpoint.hf_weights import load_model
from sftron.checkpoint.model_folder import read_config
from sftron.models.adapters import AdapterStart, LoraSpec, projections_of
from sftron.models.architecture import LlamaConfig
from sftron.models.generation import greedy_generate
from sftron.models.llama import LlamaForSFT
from sftron.models.routing import is_correction
from sftron.models.sharding import gathered_blocks, local_shard, shard_model, whole, whole_head
from sftron.train.optimizer import make_by_name
from sftron.train.ranks import Dimensions, Ranks, end_ranks, start_ranks
from sftron.train.step import StepResult, train_step
from tests.models.reference import make_ours, make_theirs
from tests.train.test_step import batch_of, conversation

NUM_STEPS, NUM_BATCHES = 3, 8
ODD = {"hidden_size": 9, "intermediate_size": 3, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
"""Sizes of which the last of four ranks has no row."""


@dataclass(frozen=True)
class Case:
    """What is trained, and how; model: overrides of TINY."""

    mode: str = "none"
    dtype: torch.dtype = torch.float32
    compiled: bool = False
    dp_replicate: int = 1
    model: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.mode}, {self.dtype}, compiled {self.compiled}, copies {self.dp_replicate}, {self.model}"


def one_step(model: Any, optimizer: Any, ranks: Ranks, num_ranks: int, step: int, num_batches: int) -> StepResult:
    """A step of this rank's batches, of which the second one has nothing to train."""
    conversations = [conversation(5 + 3 * n, 100 * step + n, share_trained=0.6 * (n != 1)) for n in range(num_batches)]
    batches = [batch_of([each]) for each in conversations]
    return train_step(
        model,
        optimizer,
        batches[ranks.dp_rank :: num_ranks],
        max_grad_norm=0.5,
        denominator=sum(batch.weight_sum for batch in batches),
        sum_over_ranks=ranks.sum,
    )


def take_steps(case: Case, ranks: Ranks) -> dict[str, Any]:
    """NUM_STEPS steps of NUM_BATCHES micro-batches, and what the model answers before the first two of them."""
    model = make_ours(make_theirs(**case.model), compute_dtype=case.dtype, activation_checkpointing=case.mode)
    # As those of a published model are: several ranks round the weights of norms, too, when they compute.
    model.load_state_dict(
        {name: weight if is_correction(name) else weight.to(case.dtype) for name, weight in model.state_dict().items()}
    )
    num_ranks = ranks.dp_world_size
    if num_ranks > 1:
        shard_model(model, Dimensions(replicate=case.dp_replicate, shard=num_ranks // case.dp_replicate).mesh("cpu"))
    if case.compiled:
        torch._dynamo.reset()
        for block in model.model.layers:
            block.compile(backend="aot_eager")
    # A large eps: where a gradient is all but zero, its sign and with it Adam's update would be rounding's.
    optimizer = make_by_name(model.named_parameters(), learning_rate=1e-2, betas=(0.9, 0.95), eps=0.1, weight_decay=0.1)
    measured: dict[str, Any] = {"losses": [], "norms": [], "answers": [], "gathers": []}
    gather = _fsdp_param_group.foreach_all_gather
    gradients: dict[str, torch.Tensor] = {}
    optimizer.register_step_pre_hook(
        lambda *_: gradients.update({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
    )
    for step in range(NUM_STEPS):
        if step < 2:
            # The second one with all blocks gathered throughout.
            with whole_head(model), gathered_blocks(model, lambda num_bytes, step=step: step == 1 and num_bytes > 0):
                with mock.patch.object(_fsdp_param_group, "foreach_all_gather", wraps=gather) as counted:
                    measured["answers"].append(greedy_generate(model, [1, 2, 3], 6, stop_ids=()).token_ids)
                measured["gathers"].append(counted.call_count)
            # Or a checkpoint would be made of whole weights, and their update be missed by whoever reads them next.
            weights = {name: each for name, each in model.named_parameters() if not is_correction(name)}
            assert num_ranks == 1 or all(isinstance(each, DTensor) for each in weights.values())
        result = one_step(model, optimizer, ranks, num_ranks, step, NUM_BATCHES)
        measured["losses"].append(result.loss)
        measured["norms"].append(result.grad_norm)
        if step == 0:
            measured["gradients"] = dict(gradients)
    measured["weights"] = {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
    measured["rows"] = [len(local_shard(parameter)[0]) for parameter in model.parameters()]
    return measured


def save_steps(cases: list[Case], path: Path) -> None:
    """Saves what `take_steps` measures of each case, on every rank, under `path` with the rank's number."""
    ranks = start_ranks()
    torch.save([take_steps(case, ranks) for case in cases], f"{path}-{ranks.dp_rank}.pt")
    end_ranks()


# --- Adapters ---

RANKS = {"q_proj": 3, "k_proj": 1, "v_proj": 2, "o_proj": 5, "gate_proj": 4, "up_proj": 2, "down_proj": 3}
"""Ranks that differ within a fused layer, of which some have fewer rows than there are ranks of the run."""


@dataclass(frozen=True)
class LoraCase:
    """Which adapters are trained, and how."""

    folder: Path
    dtype: torch.dtype = torch.float32
    frozen_dtype: torch.dtype = torch.float32
    mode: str = "none"
    dp_replicate: int = 1
    dora: bool = False
    modules_to_save: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return (
            f"{self.folder.name}, {self.dtype} on {self.frozen_dtype}, {self.mode}, copies {self.dp_replicate}, "
            f"dora {self.dora}, {self.modules_to_save}"
        )


def lora_spec(config: LlamaConfig, ranks: dict[str, int] = RANKS, **options: Any) -> LoraSpec:
    """Adapters of these ranks, each with an alpha of its own, on every layer that has such a projection."""
    with torch.device("meta"):
        projections = projections_of(LlamaForSFT(config), config)
    found = {name: ranks[at.name] for name, at in projections.items() if at.name in ranks}
    alphas = {name: 3.0 + number for number, name in enumerate(found)}
    return LoraSpec(ranks=found, alphas=alphas, **options)


def take_lora_steps(case: LoraCase, ranks: Ranks, num_batches: int = 4) -> dict[str, Any]:
    """NUM_STEPS steps of the trained tensors alone; how they change, and that no other tensor does."""
    num_ranks = ranks.dp_world_size
    spec = lora_spec(read_config(case.folder), dora=case.dora, modules_to_save=case.modules_to_save)

    def shard(model: LlamaForSFT) -> None:
        if num_ranks > 1:
            shard_model(
                model, Dimensions(replicate=case.dp_replicate, shard=num_ranks // case.dp_replicate).mesh("cpu")
            )

    model = load_model(
        case.folder,
        compute_dtype=case.dtype,
        activation_checkpointing=case.mode,
        shard=shard,
        adapters=AdapterStart(spec=spec, seed=3),
        frozen_dtype=case.frozen_dtype,
    )
    before, starts = digests_of_frozen(model), whole_trained(model)
    optimizer = make_by_name(
        model.named_parameters(), learning_rate=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1
    )
    measured: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    optimizer.register_step_pre_hook(
        lambda *_: measured["gradients"].append(
            {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        )
    )
    for step in range(NUM_STEPS):
        result = one_step(model, optimizer, ranks, num_ranks, step, num_batches)
        measured["losses"].append(result.loss)
        measured["norms"].append(result.grad_norm)
    with whole_head(model):
        measured["answer"] = greedy_generate(model, [1, 2, 3], 6, stop_ids=()).token_ids
    measured |= {"starts": starts, "trained": whole_trained(model), "is_frozen": digests_of_frozen(model) == before}
    measured["is_sharded"] = all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return measured


def whole_trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the whole trained tensors, by name. A collective."""
    return {n: whole(p.detach()).clone() for n, p in model.named_parameters() if p.requires_grad}


def digests_of_frozen(model: nn.Module) -> dict[str, str]:
    """The SHA-256 of each frozen tensor, of this rank's rows, by name."""
    frozen = {n: local_shard(p.detach())[0] for n, p in model.named_parameters() if not p.requires_grad}
    return {n: hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest() for n, rows in frozen.items()}


def save_lora_steps(cases: list[LoraCase], path: Path) -> None:
    """Saves what `take_lora_steps` measures of each case, on every rank, under `path` with the rank's number."""
    ranks = start_ranks()
    torch.save([take_lora_steps(case, ranks) for case in cases], f"{path}-{ranks.dp_rank}.pt")
    end_ranks()
