"""Unlikelihood (arXiv 1908.04319): makes marked tokens less likely wherever the model writes and they are not meant.

    sftron train --config sft.yaml --extend.setup=examples.extend.unlikelihood:setup \
        '--extend.options={token_ids: [1234, 5678], weight: 0.5}'

Adds weight * the sum of -log(1 - p) over the marked tokens at each trained position whose label is another token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sftron import Batch, Extension, LlamaForSFT, TokenLoss, hidden_states, label_log_probabilities


class Unlikelihood(TokenLoss):
    names = ("unlikelihood",)

    def __init__(self, token_ids: Sequence[int], weight: float) -> None:
        super().__init__()
        self.token_ids, self.weight = list(token_ids), weight

    def loss_sum(self, model: LlamaForSFT, batch: Batch, measures: Any) -> Tensor:
        hidden = hidden_states(model, batch)
        marked = torch.tensor(self.token_ids, device=hidden.device)
        share = label_log_probabilities(model, batch, hidden)[:, marked].exp().clamp(max=1 - 1e-6)
        is_other = marked[None] != batch.labels.to(hidden.device)[:, None]
        term = (-torch.log1p(-share) * is_other).sum(dim=-1)
        term_sum = (term * batch.loss_weights.to(term.device)).sum()
        measures.add_measure("unlikelihood", term_sum)
        return self.token_loss(model, batch, measures, hidden) + self.weight * term_sum


def setup(options: Mapping[str, Any]) -> Extension:
    return Extension(objective=Unlikelihood(options["token_ids"], float(options.get("weight", 1.0))))
