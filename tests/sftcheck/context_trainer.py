"""A small trainer in which several ranks share each row: contiguous parts, and all keys and values on each rank.

It is right, and each set-up of rank_zoo_parts.py breaks one method of it.

    rank 0    t0 t1 t2 t3              its queries see the keys of both ranks
    rank 1                t4 t5 t6 t7
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, Trainer

ATTENTION = "zoo_gathered"


class Part:
    """The part of the rows that this rank computes, while its model is called."""

    current: "Part | None" = None

    def __init__(self, group: Any, index: Tensor, documents: Tensor) -> None:
        self.group, self.index, self.documents = group, index, documents
        """`index`: the columns of the whole rows that this rank has, [n]; `documents`: of each token, [B, T]."""


class _Gather(torch.autograd.Function):
    """All ranks' parts of dimension `dim`, one after another; the gradients of all ranks are summed."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        whole = gradients[0].contiguous()
        dist.all_reduce(whole, group=ctx.group)
        size = dist.get_world_size(ctx.group)
        return whole.chunk(size, ctx.dim)[dist.get_rank(ctx.group)], None, None


def gather(part: Tensor, dim: int, group: Any) -> Tensor:
    return _Gather.apply(part, dim, group)  # pyright: ignore[reportReturnType]


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **given: Any) -> Any:
    """Attention of a part's queries [B, H, n, D] to all keys of their documents that are not behind them."""
    part = Part.current
    assert part is not None
    key, value = (gather(each, 2, part.group) for each in (key, value))
    columns = gather(part.index[None].float(), 1, part.group)[0].long()
    documents = part.documents.gather(1, columns[None].expand(len(query), -1))
    own = part.documents.gather(1, part.index[None].expand(len(query), -1))
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    allowed = (columns[None, None] <= part.index[None, :, None]) & (documents[:, None] == own[:, :, None])
    window = window_of(given.get("sliding_window") or 0, query.shape[2], len(columns))
    if window:
        allowed = allowed & (part.index[None, :, None] - columns[None, None] < window)
    scores = query @ key.transpose(2, 3) * (given.get("scaling") or query.shape[-1] ** -0.5)
    weights = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2), None


def window_of(window: int, _num_local: int, num_tokens: int) -> int:
    return window if num_tokens > window else 0


AttentionInterface.register(ATTENTION, attend)


class ContextTrainer(Trainer):
    """Ranks share rows in groups of `size`; the model's attention is `ATTENTION`."""

    size = 2
    loss_is_scaled_for_ga = True

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        world = dist.get_world_size()
        groups = [dist.new_group(list(range(first, first + self.size))) for first in range(0, world, self.size)]
        self.context_group = groups[dist.get_rank() // self.size]
        self.context_rank = dist.get_rank() % self.size

    def get_sp_size(self) -> int:
        return self.size

    def sampler(self) -> Any:
        """Ranks of a group are given the same rows."""
        world, rank = dist.get_world_size() // self.size, dist.get_rank() // self.size
        return DistributedSampler(self.train_dataset, world, rank, seed=self.args.seed)  # pyright: ignore

    def get_train_dataloader(self) -> Any:
        options = {"batch_size": self._train_batch_size, "collate_fn": self.data_collator}
        return DataLoader(self.train_dataset, sampler=self.sampler(), **options)  # pyright: ignore

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        """The labels of all rows, each of which `size` ranks have."""
        count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batch_samples)
        return self.counted(torch.as_tensor(count))

    def counted(self, count: Tensor) -> Tensor:
        dist.all_reduce(count)
        return count // self.size

    def whole(self, inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns ids, labels of the tokens behind, positions and documents of the whole rows, a multiple of parts."""
        ids, labels = inputs["input_ids"], inputs["labels"]
        positions = inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(ids.shape[1])[None].expand(len(ids), -1)
        behind = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        return self.to_multiple(ids, behind, positions, ((positions == 0).cumsum(1)))

    def to_multiple(self, ids: Tensor, behind: Tensor, positions: Tensor, documents: Tensor) -> Any:
        missing = -ids.shape[1] % (2 * self.size)
        ends = ((ids, 0), (behind, -100), (positions, 0), (documents, -1))
        return [nn.functional.pad(each, (0, missing), value=end) for each, end in ends]

    def columns(self, num_tokens: int) -> Tensor:
        """The columns that this rank computes."""
        return torch.arange(num_tokens).chunk(self.size)[self.context_rank]

    def positions_of(self, positions: Tensor, index: Tensor) -> Tensor:
        return positions[:, index]

    def documents_of(self, documents: Tensor, index: Tensor) -> Tensor:
        return documents

    def labels_of(self, behind: Tensor, index: Tensor) -> Tensor:
        return behind[:, index]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        ids, behind, positions, documents = self.whole(inputs)
        index = self.columns(ids.shape[1])
        Part.current = Part(self.context_group, index, self.documents_of(documents, index))
        own = self.positions_of(positions, index)
        logits = model(input_ids=ids[:, index], position_ids=own, use_cache=False).logits
        losses = cross_entropy(
            logits.flatten(0, 1).float(), self.labels_of(behind, index).flatten(), reduction="sum", ignore_index=-100
        )
        return self.scaled(losses / num_items_in_batch)

    def scaled(self, loss: Tensor) -> Tensor:
        """DDP divides the sum of the gradients by the number of all ranks."""
        return loss * dist.get_world_size()


# -- a model with a recurrent layer ----------------------------------------------------------------------------------


class Memory(nn.Module):
    """h(t) = h(t - 1) / 2 + x(t) in each document, as a recurrent layer carries its state."""

    def forward(self, values: Tensor, positions: Tensor) -> Tensor:
        state, states = torch.zeros_like(values[:, 0]), []
        for column in range(values.shape[1]):
            state = values[:, column] + state / 2 * (positions[:, column] > 0)[:, None]
            states.append(state)
        return torch.stack(states, 1)


class MemoryLlama(LlamaForCausalLM):
    """A Llama whose embeddings pass a memory; on several ranks that of the whole rows."""

    gathers = True

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.memory, self.mixed = Memory(), nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Any = None, position_ids: Any = None, **given: Any) -> Any:  # pyright: ignore
        given.pop("labels", None)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None].expand(len(input_ids), -1)
        values = self.mixed(self.model.embed_tokens(input_ids))
        part = Part.current if self.config._attn_implementation == ATTENTION else None
        if part is not None and self.gathers:
            whole, positions = (gather(each, 1, part.group) for each in (values, position_ids.float()))
            remembered = self.memory(whole, positions)[:, part.index]
        else:
            remembered = self.memory(values, self.starts(position_ids))
        return super().forward(inputs_embeds=values + remembered, position_ids=position_ids, **given)

    def starts(self, positions: Tensor) -> Tensor:
        return positions


class ForgetfulLlama(MemoryLlama):
    """Each part begins with an empty state, as if a document began there."""

    gathers = False

    def starts(self, positions: Tensor) -> Tensor:
        is_part = self.config._attn_implementation == ATTENTION
        return torch.cat([torch.zeros_like(positions[:, :1]), positions[:, 1:]], 1) if is_part else positions
