"""Some steps on as many ranks as there are, and all that they measure: losses, gradients, weights, answers."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sftron.models.generation import greedy_generate
from sftron.models.sharding import local_shard, shard_model, whole, whole_head
from sftron.train.optimizer import make_adamw
from sftron.train.ranks import Ranks, end_ranks, make_mesh, start_ranks
from sftron.train.step import train_step
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


def take_steps(case: Case, ranks: Ranks) -> dict[str, Any]:
    """NUM_STEPS steps of NUM_BATCHES micro-batches, and what the model answers before the first two of them."""
    model = make_ours(make_theirs(**case.model), compute_dtype=case.dtype, activation_checkpointing=case.mode)
    # As those of a published model are: several ranks round the weights of norms, too, when they compute.
    model.load_state_dict({name: weight.to(case.dtype) for name, weight in model.state_dict().items()})
    num_ranks = ranks.dp_world_size
    if num_ranks > 1:
        shard_model(model, make_mesh("cpu", case.dp_replicate, num_ranks // case.dp_replicate))
    if case.compiled:
        torch._dynamo.reset()
        for block in model.model.layers:
            block.compile(backend="aot_eager")
    # A large eps: where a gradient is all but zero, its sign and with it Adam's update would be rounding's.
    optimizer = make_adamw(model.named_parameters(), learning_rate=1e-2, betas=(0.9, 0.95), eps=0.1, weight_decay=0.1)
    measured: dict[str, Any] = {"losses": [], "norms": [], "answers": []}
    gradients: dict[str, torch.Tensor] = {}
    optimizer.register_step_pre_hook(
        lambda *_: gradients.update({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
    )
    for step in range(NUM_STEPS):
        if step < 2:
            with whole_head(model):
                measured["answers"].append(greedy_generate(model, [1, 2, 3], 6, stop_ids=()).token_ids)
            # Or a checkpoint would be made of whole weights, and their update be missed by whoever reads them next.
            assert num_ranks == 1 or all(isinstance(parameter, DTensor) for parameter in model.parameters())
        # The second batch of each step has nothing to train.
        conversations = [
            conversation(5 + 3 * n, 100 * step + n, share_trained=0.6 * (n != 1)) for n in range(NUM_BATCHES)
        ]
        batches = [batch_of([each]) for each in conversations]
        result = train_step(
            model,
            optimizer,
            batches[ranks.dp_rank :: num_ranks],
            max_grad_norm=0.5,
            weight_sum=sum(batch.weight_sum for batch in batches),
            sum_over_ranks=ranks.sum,
        )
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
