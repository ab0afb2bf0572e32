"""Fine-tunes without the trainer: tokenizer, dataset, loader, model, step and export in one short loop.

    python examples/plain_loop.py --model models/SmolLM2-135M-Instruct --data examples/quickstart/product.jsonl \
        --out runs/plain --steps 20

The losses are those of `sftron train` on the same data (tests/test_examples.py). The trainer adds several ranks,
checkpoints, schedules, evaluation, metrics, and checks of the data before the first step.
"""

import argparse
from itertools import islice
from pathlib import Path

import torch

from sftron import ChatTokenizer, PackedDataset, PackLoader, export_hf, load_model, weighted_loss_sum
from sftron.data.types import Batch
from sftron.models.llama import LlamaForSFT


def main(arguments: list[str] | None = None) -> list[float]:
    """Returns the losses of the steps."""
    options = parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # Conversations to packs. Roles are recorded as tokens are made; labels are shifted already.
    tokenizer = ChatTokenizer.from_pretrained(options.model)
    dataset = PackedDataset.from_path(
        options.data, tokenizer, sequence_length=options.sequence_length, seed=options.seed
    )
    batches = iter(PackLoader(dataset, num_workers=0, keep_tail=False))

    # fp32 weights; each layer computes in compute_dtype.
    model = load_model(options.model, compute_dtype=getattr(torch, options.dtype), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    losses = []
    for step in range(1, options.steps + 1):
        losses.append(train_step(model, optimizer, list(islice(batches, options.packs_per_step))))
        print(f"step {step}/{options.steps}: loss {losses[-1]:.4f}")

    # This folder loads in transformers and vLLM; its generation_config.json has the ids that end a turn.
    export_hf(
        model.named_parameters(),
        options.out,
        source_folder=options.model,
        dtype=torch.bfloat16,
        stop_token_ids=tokenizer.stop_ids,
    )
    print(f"the model is in {options.out}")
    return losses


def train_step(model: LlamaForSFT, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> float:
    """Updates the model once from all batches. The loss is one ratio: a sum over the step, divided once."""
    weight_sum = sum(batch.weight_sum for batch in batches)
    loss = 0.0
    for batch in batches:
        batch_loss = loss_sum(model, batch) / weight_sum
        batch_loss.backward()
        loss += batch_loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def loss_sum(model: LlamaForSFT, batch: Batch) -> torch.Tensor:
    """Returns the sum of the weighted token losses of a batch in fp32."""
    device = model.head_weight.device
    # The bounds of the documents stay on the CPU, where attention "sdpa" loops over them.
    hidden = model(batch.input_ids.to(device), batch.position_ids.to(device), batch.cu_seqlens, batch.max_seqlen)
    rows, labels, weights = (each.to(device) for each in (batch.label_positions, batch.labels, batch.loss_weights))
    return weighted_loss_sum(hidden, model.head, rows, labels, weights)[0]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder in Hugging Face format")
    parser.add_argument("--data", required=True, help="a file of conversations")
    parser.add_argument("--out", type=Path, required=True, help="the folder for the trained model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--packs-per-step", type=int, default=1)
    parser.add_argument(
        "--sequence-length", type=int, default=512, help="tokens of the longest conversation, and a pack"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the computation")
    parser.add_argument("--seed", type=int, default=42, help="fixes the order of the data")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
