"""Label smoothing (arXiv 1512.00567): trains (1 - share) * cross entropy + share * the mean over the vocabulary.

    sftron train --config sft.yaml --extend.setup=examples.extend.label_smoothing:setup --extend.options.share=0.1

measures.uniform in metrics.jsonl is the mean cross entropy against the uniform distribution, in nats.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sftron import Batch, Extension, LlamaForSFT, TokenLoss, hidden_states, label_log_probabilities


class SmoothedLoss(TokenLoss):
    names = ("uniform",)

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def loss_sum(self, model: LlamaForSFT, batch: Batch, measures: Any) -> Tensor:
        hidden = hidden_states(model, batch)
        uniform = -label_log_probabilities(model, batch, hidden).mean(dim=-1)
        uniform_sum = (uniform * batch.loss_weights.to(uniform.device)).sum()
        measures.add_measure("uniform", uniform_sum)
        return (1 - self.share) * self.token_loss(model, batch, measures, hidden) + self.share * uniform_sum


def setup(options: Mapping[str, Any]) -> Extension:
    return Extension(objective=SmoothedLoss(float(options.get("share", 0.1))))
