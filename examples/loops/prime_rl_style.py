"""A loop in the style of prime-rl: packed rows with position_ids and a loss_mask, and the model of transformers.

python -m examples.loops.prime_rl_style models/SmolLM2-135M-Instruct
"""

import sys
from typing import Any

import torch
from examples.loops.conversations import conversations, encoded, in_groups
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

Batch = dict[str, Tensor]


def make_batches(tokenizer: Any, rows: list[list[dict[str, str]]], num_packed: int = 3) -> list[Batch]:
    batches = []
    for group in in_groups([encoded(tokenizer, row) for row in rows], num_packed):
        packed: dict[str, list[int]] = {"input_ids": [], "target_ids": [], "position_ids": [], "loss_mask": []}
        for ids, is_answer in group:
            packed["input_ids"] += ids[:-1]
            packed["target_ids"] += ids[1:]
            packed["position_ids"] += range(len(ids) - 1)
            packed["loss_mask"] += is_answer[1:]
        batches.append({name: torch.tensor(values)[None] for name, values in packed.items()})
    return batches


def tiny(tokenizer: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=4, use_cache=False, **sizes))


def make(tokenizer: Any) -> dict[str, Any]:
    model = tiny(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(micro_batches: list[Batch]) -> None:
        num_tokens = sum(batch["loss_mask"].sum() for batch in micro_batches)
        for batch in micro_batches:
            logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
            losses = F.cross_entropy(logits.flatten(0, 1), batch["target_ids"].flatten(), reduction="none")
            loss = (losses * batch["loss_mask"].flatten()).sum() / num_tokens
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    rows = conversations()
    return {"model": model, "batches": make_batches(tokenizer, rows), "step": step, "conversations": rows}


if __name__ == "__main__":
    from sftron import verify_step

    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    report = verify_step(**make(tokenizer), tokenizer=tokenizer)
    print(report.as_text(), report.verdict, sep="\n\n")
