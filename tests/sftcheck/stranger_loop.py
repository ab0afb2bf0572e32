"""A loop as a stranger writes it, in a shape that is common in course work: its batches are texts, which are tokenized
within the step; log-probabilities are gathered, summed under a mask of the response, and divided by a constant.

It knows nothing of sftron. test_verify_step.py checks it, in four lines.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

Texts = tuple[list[str], list[str]]


def tokenize(prompts: list[str], outputs: list[str], tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
    """Returns ids, the id behind each, and a mask that is 1 where that one is of an output."""
    rows, masks = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        output_ids = tokenizer.encode(output, add_special_tokens=False)
        rows.append(prompt_ids + output_ids)
        masks.append([0] * len(prompt_ids) + [1] * len(output_ids))
    width = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    mask = torch.tensor([own + [0] * (width - len(own)) for own in masks])
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:]}


def response_log_probs(model: PreTrainedModel, input_ids: Tensor, labels: Tensor) -> Tensor:
    log_probs = torch.log_softmax(model(input_ids).logits, dim=-1)
    return log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def masked_normalize(values: Tensor, mask: Tensor, constant: float) -> Tensor:
    return (values * mask).sum(-1) / constant


def microbatch_step(log_probs: Tensor, mask: Tensor, num_accumulated: int, constant: float = 1.0) -> Tensor:
    loss = -masked_normalize(log_probs, mask, constant).mean() / num_accumulated
    loss.backward()
    return loss.detach()


class Training:
    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, constant: float = 1.0) -> None:
        self.model, self.tokenizer, self.constant = model, tokenizer, constant
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def texts(self, rows: list[list[dict[str, str]]], size: int = 4) -> list[Texts]:
        """Returns micro-batches of prompts and of what is to follow each."""
        prompts = [
            self.tokenizer.apply_chat_template(row[:-1], tokenize=False, add_generation_prompt=True) for row in rows
        ]
        outputs = [row[-1]["content"] + str(self.tokenizer.eos_token) for row in rows]
        return [(prompts[at : at + size], outputs[at : at + size]) for at in range(0, len(rows), size)]

    def train(self, micro_batches: list[Texts]) -> float:
        total = 0.0
        for prompts, outputs in micro_batches:
            batch: dict[str, Any] = tokenize(prompts, outputs, self.tokenizer)
            log_probs = response_log_probs(self.model, batch["input_ids"], batch["labels"])
            total += float(microbatch_step(log_probs, batch["response_mask"], len(micro_batches), self.constant))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total
