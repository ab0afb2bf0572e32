"""A loop in the style of torchtitan: packed inputs and labels as a pair, positions and the bounds of documents beside
them, and cross-entropies that are summed and divided by the targets of the whole step.

python -m examples.loops.torchtitan_style models/SmolLM2-135M-Instruct
"""

import sys
from typing import Any

import torch
from examples.loops.conversations import conversations, encoded, in_groups
from examples.loops.nanochat_style import GPT
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

IGNORE_INDEX = -100
Batch = tuple[dict[str, Tensor], Tensor]


class Decoder(GPT):
    """Takes positions and cumulative lengths, and makes a mask of blocks from them."""

    def forward(self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Tensor:  # pyright: ignore
        document = torch.searchsorted(cu_seqlens, torch.arange(tokens.shape[1]), right=True)
        mask = (document[:, None] == document[None]).tril()
        return super().forward(tokens, mask=mask, positions=positions)


def make_batches(tokenizer: Any, rows: list[list[dict[str, str]]], num_packed: int = 3) -> list[Batch]:
    batches = []
    for group in in_groups([encoded(tokenizer, row) for row in rows], num_packed):
        tokens = torch.tensor([token for ids, _ in group for token in ids])
        is_answer = torch.tensor([flag for _, flags in group for flag in flags])
        labels = torch.where(is_answer, tokens, IGNORE_INDEX)[1:]  # of the next token
        lengths = torch.tensor([len(ids) for ids, _ in group])
        inputs = {
            "tokens": tokens[None, :-1],
            "positions": torch.cat([torch.arange(int(n)) for n in lengths])[None, :-1],
            "cu_seqlens": F.pad(lengths.cumsum(0), (1, 0)).clamp(max=len(tokens) - 1),
        }
        batches.append((inputs, labels[None]))
    return batches


def make(tokenizer: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Decoder(len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(micro_batches: list[Batch]) -> Tensor:
        optimizer.zero_grad()
        num_valid = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in micro_batches)
        losses = []
        for inputs, labels in micro_batches:
            logits = model(**inputs).flatten(0, 1).float()
            loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum") / num_valid
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return torch.stack(losses).sum()

    rows = conversations()
    return {"model": model, "batches": make_batches(tokenizer, rows), "step": step, "conversations": rows}


if __name__ == "__main__":
    from sftron import verify_step

    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    report = verify_step(**make(tokenizer), tokenizer=tokenizer)
    print(report.as_text(), report.verdict, sep="\n\n")
