"""A loop in the style of nanochat: a GPT written by hand, inputs and targets as a pair, and -1 for what is not trained.

python -m examples.loops.nanochat_style models/SmolLM2-135M-Instruct
"""

import sys
from typing import Any

import torch
from examples.loops.conversations import conversations, encoded, in_groups
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer

Pair = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        heads = self.qkv(F.rms_norm(x, x.shape[-1:])).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3)
        q, k, v = heads.unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(F.rms_norm(x, x.shape[-1:]))).square())


class GPT(nn.Module):
    """Learned positions, and logits that a tanh bounds."""

    def __init__(self, vocabulary: int, width: int = 64, num_layers: int = 2, longest: int = 2048) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(num_layers))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None, mask: Tensor | None = None,
                positions: Tensor | None = None) -> Tensor:  # fmt: skip
        positions = torch.arange(idx.shape[1], device=idx.device) if positions is None else positions
        x = self.wte(idx) + self.wpe(positions)
        for block in self.blocks:
            x = block(x, mask)
        logits = 15 * torch.tanh(self.lm_head(F.rms_norm(x, x.shape[-1:])) / 15)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")


def make_batches(tokenizer: Any, rows: list[list[dict[str, str]]]) -> list[Pair]:
    batches = []
    for group in in_groups([encoded(tokenizer, row) for row in rows], 4):
        longest = max(len(ids) for ids, _ in group)
        x = torch.full((len(group), longest - 1), tokenizer.pad_token_id)
        y = torch.full((len(group), longest - 1), -1)
        for n, (ids, is_answer) in enumerate(group):
            x[n, : len(ids) - 1] = torch.tensor(ids[:-1])
            y[n, : len(ids) - 1] = torch.tensor(ids[1:]).where(torch.tensor(is_answer[1:]), -1)
        batches.append((x, y))
    return batches


def make(tokenizer: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = GPT(len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(micro_batches: list[Pair]) -> None:
        num_targets = sum(int((y != -1).sum()) for _, y in micro_batches)
        for x, y in micro_batches:
            (model(x, y) / num_targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    rows = conversations()
    return {"model": model, "batches": make_batches(tokenizer, rows), "step": step, "conversations": rows}


if __name__ == "__main__":
    from sftron import verify_step

    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    report = verify_step(**make(tokenizer), tokenizer=tokenizer)
    print(report.as_text(), report.verdict, sep="\n\n")
