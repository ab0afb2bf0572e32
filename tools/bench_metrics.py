"""What a step's metrics cost: steps with and without them in turns, in process time.

    python tools/bench_metrics.py [--model DIR] [--pairs 20] [--tokens 512] [--trained-share 0.42]

Three kinds of the same step: `plain`, whose loss makes no entropy and no accuracy and is summed by nothing; `metrics`,
as steps are; `untrained`, which also measures the roles that are not trained. Medians of process time, which other
processes disturb less than the wall's. What metrics add to every step is less than what two steps differ by, so that is
taken within the steps, where it happens: in the softmax of the logits, in the sums, and, of roles that are not trained,
in all of their loss. On a CPU, whatever else there is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from sftron.checkpoint.hf import load_model
from sftron.data.dataloader import collate
from sftron.data.packing import lay_out
from sftron.data.types import IGNORE_INDEX, Batch, ConversationKey, LabeledConversation, Role
from sftron.kernels import cross_entropy
from sftron.models.loss import weighted_loss_sum
from sftron.train import step as step_module
from sftron.train.optimizer import make_adamw
from sftron.train.step import train_step
from sftron.train.token_losses import TokenSums

INTERVAL = 20
"""Of logging.untrained_roles_interval."""
PLACES: dict[str, Any] = {"_gradient_of_rows_": cross_entropy, "add": TokenSums, "weighted_loss_sum": step_module}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--trained-share", type=float, default=0.42)
    options = parser.parse_args()
    device = torch.device("cpu")  # a GPU's own time is not the process's
    model = load_model(options.model, "sdpa", torch.bfloat16, options.tokens, device=device)
    optimizer = make_adamw(model.named_parameters(), learning_rate=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    batch = make_batch(options.tokens, options.trained_share, model.config.vocab_size)

    spent = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal spent
            started = time.process_time()
            result = function(*arguments)
            spent += time.process_time() - started
            return result

        return run

    def step(with_untrained: bool = False, **timed_parts: Callable[..., Any]) -> tuple[float, float]:
        """Seconds of the step, and of them those in what metrics take part in."""
        nonlocal spent
        spent = 0.0
        with ExitStack() as patches:
            for name, part in timed_parts.items():
                patches.enter_context(patch.object(PLACES[name], name, timed(part)))
            started = time.process_time()
            train_step(model, optimizer, [batch], max_grad_norm=1.0, with_untrained=with_untrained)
            return time.process_time() - started, spent

    gradient, add = cross_entropy._gradient_of_rows_, TokenSums.add
    kinds = {
        "plain": lambda: step(_gradient_of_rows_=plain_gradient_of_rows_, add=lambda *_: None),
        "metrics": lambda: step(_gradient_of_rows_=gradient, add=add),
        # The step's own loss has its function by another name.
        "untrained": lambda: step(with_untrained=True, weighted_loss_sum=weighted_loss_sum, add=add),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for kind in kinds.values():
        kind()
    for _ in range(options.pairs):
        for name, kind in kinds.items():
            seconds[name].append(kind())
    whole = {name: median(total for total, _ in each) for name, each in seconds.items()}
    part = {name: median(part for _, part in each) for name, each in seconds.items()}

    print(f"{options.tokens} tokens, {len(batch.labels)} trained, {len(batch.untrained_rows)} not; {device}")
    for name in kinds:
        print(f"{name:<10} step {whole[name]:7.3f} s, of it in the parts compared {part[name]:.4f} s")
    every_step = (part["metrics"] - part["plain"]) / whole["plain"]
    now_and_then = part["untrained"] / whole["plain"]
    print(f"every step {every_step:+.2%}; a step that measures the untrained roles {now_and_then:+.2%} more")
    print(f"with these every {INTERVAL} steps: {every_step + now_and_then / INTERVAL:+.2%} of a step")


def make_batch(num_tokens: int, trained_share: float, vocab_size: int) -> Batch:
    """Four conversations of equal length, whose last part is the assistant's."""
    rng, length = np.random.default_rng(0), num_tokens // 4
    num_trained = round(trained_share * length)
    conversations = []
    for number in range(4):
        ids = rng.integers(0, vocab_size, length).astype(np.int32)
        is_trained = np.arange(length) >= length - 1 - num_trained
        is_trained[-1] = False
        conversations.append(
            LabeledConversation(
                input_ids=ids,
                labels=np.where(is_trained, np.append(ids[1:], 0), IGNORE_INDEX).astype(np.int32),
                loss_weights=is_trained.astype(np.float32),
                role_ids=np.where(np.append(False, is_trained[:-1]), Role.ASSISTANT, Role.USER).astype(np.uint8),
                key=ConversationKey(0, number),
            )
        )
    pack = lay_out(conversations, token_budget=num_tokens, remove_cross_attention=True, pad_id=0)
    return collate(pack, keep_tail=False, measured_roles=frozenset({Role.USER}))


def plain_gradient_of_rows_(logits_CV: Tensor, label_C1: Tensor, weight_C1: Tensor) -> Tensor:
    """The loss and the gradient, and nothing else."""
    x_CV = logits_CV.float()
    x_CV.sub_(x_CV.amax(dim=1, keepdim=True))
    x_label_C1 = x_CV.gather(1, label_C1)
    sum_C1 = x_CV.exp_().sum(dim=1, keepdim=True)
    x_CV.mul_(weight_C1 / sum_C1).scatter_add_(1, label_C1, -weight_C1)
    if logits_CV.dtype != torch.float32:
        logits_CV.copy_(x_CV)
    return (sum_C1.log() - x_label_C1).T.expand(3, -1)


if __name__ == "__main__":
    main()
