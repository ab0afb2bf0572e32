"""Keeps adapters close to their base: adds weight * KL(model || base) at the trained tokens to the loss.

    sftron train --config sft.yaml --lora={} --extend.setup=examples.extend.kl:setup --extend.options.weight=0.1

metrics.jsonl has the mean KL of each step as measures.kl, in nats. The base is the model without its adapters, so no
second copy is in memory; a step costs one more forward pass.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sftron import (
    Batch,
    Extension,
    LlamaForSFT,
    TokenLoss,
    base_hidden_states,
    hidden_states,
    label_log_probabilities,
)


class KLToBase(TokenLoss):
    names = ("kl",)

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def loss_sum(self, model: LlamaForSFT, batch: Batch, measures: Any) -> Tensor:
        with torch.no_grad():
            base = label_log_probabilities(model, batch, base_hidden_states(model, batch))
        hidden = hidden_states(model, batch)
        own = label_log_probabilities(model, batch, hidden)
        kl = (own.exp() * (own - base)).sum(dim=-1)
        kl_sum = (kl * batch.loss_weights.to(kl.device)).sum()
        measures.add_measure("kl", kl_sum)
        return self.token_loss(model, batch, measures, hidden) + self.weight * kl_sum


def setup(options: Mapping[str, Any]) -> Extension:
    return Extension(objective=KLToBase(float(options.get("weight", 0.1))))
