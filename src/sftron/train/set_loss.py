"""The loss on an evaluation set: one ratio over all of its tokens, whatever rows and ranks they are spread over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import torch

from sftron.data.loader import collate
from sftron.data.packing import PoolPacking, lay_out
from sftron.data.types import IGNORE_INDEX, Batch, Pack
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import weighted_loss_sum
from sftron.train.ranks import Ranks
from sftron.train.run_data import EvaluationSet
from sftron.train.token_losses import NO_SOURCE, MeanLoss, TokenLosses, TokenSums

_POOL_SIZE = 256


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
    device = model.head_weight.device
    # In fp64: another order of the same losses changes nothing that fp32 could show.
    sums = TokenSums(len(evaluation_set.preparation.datasets), device)
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
    losses = TokenLosses.of(ranks.sum(sums.table_G4).flatten().tolist())
    names = [dataset.name for dataset in evaluation_set.preparation.datasets]
    return SetLoss(
        loss=_finite(losses.all.loss),
        token_accuracy=losses.token_accuracy,
        tokens=losses.all.tokens,
        conversations=len(conversations),
        roles={name: _as_record(mean) for name, mean in losses.roles.items()},
        datasets={name: _as_record(mean) for name, mean in zip(names, losses.datasets, strict=True)},
    )


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
def _add_losses(sums: TokenSums, model: LlamaForSFT, batch: Batch) -> None:
    device = model.head_weight.device
    cu_seqlens = batch.cu_seqlens if model.attention == "sdpa" else batch.cu_seqlens.to(device)
    hidden_TH = model(batch.input_ids.to(device), batch.position_ids.to(device), cu_seqlens, batch.max_seqlen)
    rows, labels, roles, sources = (torch.from_numpy(each).to(device) for each in _said(batch.pack))
    ones = torch.ones_like(labels, dtype=torch.float32)
    _, measures = weighted_loss_sum(hidden_TH, model.head_weight, rows, labels, ones)
    sums.add(measures, roles, sources)


def _said(pack: Pack) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Every token but a conversation's first: the row that has to say it, its id, its role, and its data set, which
    only those of a completion have."""
    is_said = np.ones(pack.num_tokens, dtype=bool)
    is_said[pack.conversation_bounds[:-1]] = False
    rows = np.flatnonzero(is_said) - 1
    sources = np.repeat([key.source for key in pack.keys], np.diff(pack.conversation_bounds)).astype(np.int32)
    is_completion = pack.labels[rows] != IGNORE_INDEX
    return (
        rows,
        pack.input_ids[rows + 1].astype(np.int64),
        pack.role_ids[rows + 1],
        np.where(is_completion, sources[rows], np.int32(NO_SOURCE)),
    )


def _as_record(mean: MeanLoss) -> dict[str, Any]:
    return {"loss": _finite(mean.loss), "tokens": mean.tokens}


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
