"""The loss on an evaluation set: one ratio over all of its tokens, whatever rows and ranks they are spread over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sftron.data.dataloader import collate
from sftron.data.packing import PoolPacking, lay_out
from sftron.data.types import IGNORE_INDEX, Batch, Role
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import token_losses
from sftron.train.distributed import Ranks
from sftron.train.evaluation_sets import EvaluationSet

_POOL_SIZE = 256
_LOSS, _TOKENS, _CORRECT = range(3)


@dataclass(frozen=True, slots=True)
class SetLoss:
    """Means over single tokens, each counted once: message weights, but for 0, are not applied.

    loss, token_accuracy, tokens: of the completions, what data.train_on_roles and train_on_turns name. roles: {role:
    {"loss", "tokens"}}, of all tokens but a conversation's first, by the role of the token that is said. datasets: the
    completions of each. A mean of no tokens, or one that is not finite, is None.
    """

    loss: float | None
    token_accuracy: float | None
    tokens: int
    conversations: int
    roles: dict[str, dict[str, Any]]
    datasets: dict[str, dict[str, Any]]


def measure_set(
    model: LlamaForSFT,
    evaluation_set: EvaluationSet,
    *,
    token_budget: int,
    ranks: Ranks,
    should_stop: Callable[[], bool] = lambda: False,
) -> SetLoss | None:
    """All ranks have to call it; each computes its share of the rows, without gradients, and all get the whole.

    Documents are always kept apart, also where training does not (law 7), so that a conversation's loss does not depend
    on its neighbours. token_budget: of a row; at least the longest conversation.
    should_stop: asked before every row, and to be answered alike on all ranks; None where it said so.
    """
    conversations = evaluation_set.conversations
    num_datasets = len(evaluation_set.preparation.datasets)
    device = model.head_weight.device
    # Summed in fp64: another order of the same losses changes nothing that fp32 could show.
    sums = torch.zeros(num_datasets * len(Role) * 2, 3, dtype=torch.float64, device=device)
    rows = list(rows_of([len(each) for each in conversations], token_budget))
    for start in range(0, len(rows), ranks.dp_world_size):
        if should_stop():
            return None
        own = rows[start:][ranks.dp_rank : ranks.dp_rank + 1] or [[]]  # sharded weights need every rank
        pack = lay_out(
            [conversations[number] for number in own[0]],
            token_budget=token_budget,
            remove_cross_attention=True,
            pad_id=evaluation_set.preparation.chat_tokenizer.pad_id,
        )
        _add_losses(sums, model, collate(pack, keep_tail=device.type == "cuda"))
    table = ranks.sum(sums).cpu().view(num_datasets, len(Role), 2, 3).numpy()
    return _set_loss(table, evaluation_set)


def rows_of(lengths: Sequence[int], token_budget: int) -> Iterator[list[int]]:
    """Which conversations share a row, packed as for training."""
    packing, pending = PoolPacking(_POOL_SIZE), list(range(len(lengths)))
    while pending:
        pool = pending[:_POOL_SIZE]
        chosen = packing.choose([lengths[number] for number in pool], token_budget)
        yield [pool[place] for place in chosen]
        for place in reversed(chosen):
            del pending[place]


@torch.no_grad()
def _add_losses(sums: torch.Tensor, model: LlamaForSFT, batch: Batch) -> None:
    device = sums.device
    cu_seqlens = batch.cu_seqlens if model.attention == "sdpa" else batch.cu_seqlens.to(device)
    hidden_TH = model(batch.input_ids.to(device), batch.position_ids.to(device), cu_seqlens, batch.max_seqlen)
    says, labels, kinds = (torch.from_numpy(each).to(device) for each in _said(batch))
    losses, is_correct = token_losses(hidden_TH[says], model.head_weight, labels)
    columns = (losses, torch.ones_like(losses), is_correct)
    sums.index_add_(0, kinds, torch.stack([column.double() for column in columns], dim=1))


def _said(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every token but a conversation's first: the position that has to say it, its id, and its kind, which is the
    number (data set, role, whether it is of a completion) as digits."""
    pack = batch.pack
    is_said = np.ones(pack.num_tokens, dtype=bool)
    is_said[pack.conversation_bounds[:-1]] = False
    says = np.flatnonzero(is_said) - 1
    sources = np.repeat([key.source for key in pack.keys], np.diff(pack.conversation_bounds)).astype(np.int64)
    roles = pack.role_ids[says + 1].astype(np.int64)
    kinds = (sources[says] * len(Role) + roles) * 2 + (pack.labels[says] != IGNORE_INDEX)
    return says, pack.input_ids[says + 1].astype(np.int64), kinds


def _set_loss(table: np.ndarray, evaluation_set: EvaluationSet) -> SetLoss:
    """table: float64 [data sets, roles, in a completion or not, 3], sums of losses, tokens and correct ones."""
    completions = table[:, :, 1].sum(axis=1)
    by_role, total = table.sum(axis=(0, 2)), completions.sum(axis=0)
    names = [dataset.name for dataset in evaluation_set.preparation.datasets]
    return SetLoss(
        loss=_mean(total, _LOSS),
        token_accuracy=_mean(total, _CORRECT),
        tokens=int(total[_TOKENS]),
        conversations=len(evaluation_set.conversations),
        roles={role.name.lower(): _loss_and_tokens(by_role[role]) for role in Role if by_role[role, _TOKENS]},
        datasets={name: _loss_and_tokens(sums) for name, sums in zip(names, completions, strict=True)},
    )


def _loss_and_tokens(sums: np.ndarray) -> dict[str, Any]:
    return {"loss": _mean(sums, _LOSS), "tokens": int(sums[_TOKENS])}


def _mean(sums: np.ndarray, what: int) -> float | None:
    mean = sums[what] / sums[_TOKENS] if sums[_TOKENS] else np.nan
    return float(mean) if np.isfinite(mean) else None
