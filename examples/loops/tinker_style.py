"""A loop in the style of tinker: datums with a weight for each target, and forward_backward and optim_step as calls.

python -m examples.loops.tinker_style models/SmolLM2-135M-Instruct
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from examples.loops.conversations import conversations, encoded, in_groups
from examples.loops.prime_rl_style import tiny
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer


@dataclass
class Datum:
    """A sequence, the token that is to follow each of its own, and the weight of that in the sum of the losses."""

    model_input: Tensor
    target_tokens: Tensor
    weights: Tensor


class Client:
    """What a service does for the loop: forward_backward adds gradients, and optim_step uses them."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def forward_backward(self, datums: list[Datum]) -> float:
        tokens, targets, weights = (
            pad_sequence([getattr(datum, name) for datum in datums], batch_first=True)
            for name in ("model_input", "target_tokens", "weights")
        )
        logprobs = self.model(tokens).logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        loss = -(logprobs * weights).sum()
        loss.backward()
        return float(loss.detach())

    def optim_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_datums(tokenizer: Any, rows: list[list[dict[str, str]]]) -> list[list[Datum]]:
    datums = []
    for row in rows:
        ids, is_answer = encoded(tokenizer, row)
        weights = torch.tensor(is_answer[1:], dtype=torch.float32)
        datums.append(Datum(torch.tensor(ids[:-1]), torch.tensor(ids[1:]), weights))
    return list(in_groups(datums, 4))


def make(tokenizer: Any) -> dict[str, Any]:
    client = Client(tiny(tokenizer))

    def step(micro_batches: list[list[Datum]]) -> None:
        total = sum(float(datum.weights.sum()) for datums in micro_batches for datum in datums)
        for datums in micro_batches:  # the service sums, so the weights of a step are divided by their sum here
            client.forward_backward([Datum(d.model_input, d.target_tokens, d.weights / total) for d in datums])
        client.optim_step()

    rows = conversations()
    return {"model": client.model, "batches": make_datums(tokenizer, rows), "step": step, "conversations": rows}


if __name__ == "__main__":
    from sftron import verify_step

    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    report = verify_step(**make(tokenizer), tokenizer=tokenizer)
    print(report.as_text(), report.verdict, sep="\n\n")
