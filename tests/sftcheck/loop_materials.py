"""What the loops of loop_zoo.py are made of: conversations, padded and packed batches, losses, and steps."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from examples.loops.nanochat_style import GPT
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from tests.sftcheck.set_up import Zoo
from tests.sftcheck.zoo_materials import ROWS, encoded, model, tok

TOKENIZER = tok("chatml")
SHORT = [row for row in ROWS if 40 < len(TOKENIZER.apply_chat_template(row["messages"], return_dict=False)) < 150][:16]
FEATURES = encoded(TOKENIZER, SHORT)
"""input_ids and labels of the same length, which are -100 for all but what the model writes."""
CONVERSATIONS = [row["messages"] for row in SHORT]
ANSWER = CONVERSATIONS[0][-1]["content"]
IGNORE = -100
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Loop:
    """The arguments of verify_step."""

    model: nn.Module
    batches: list[Any]
    step: Callable[[list[Any]], Any]
    options: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = TOKENIZER

    def arguments(self) -> dict[str, Any]:
        given = {"model": self.model, "batches": self.batches, "step": self.step, "tokenizer": self.tokenizer}
        return {**given, "conversations": CONVERSATIONS, **self.options}


ZOO = Zoo()
broken, sound = ZOO.broken, ZOO.sound


# ── What the loops are made of ────────────────────────────────────────────────────────────────────────────────────────


def padded(size: int = 4, *, fill: int = IGNORE) -> list[Batch]:
    """Rows padded on the right, with labels at the index of their own token."""
    batches = []
    for at in range(0, len(FEATURES), size):
        rows = FEATURES[at : at + size]
        ids, labels, ones = (
            [torch.tensor(each) for each in values]
            for values in (
                [row["input_ids"] for row in rows],
                [row["labels"] for row in rows],
                [[1] * len(row["input_ids"]) for row in rows],
            )
        )
        batches.append({
            "input_ids": pad_sequence(ids, True, TOKENIZER.pad_token_id),
            "labels": pad_sequence(labels, True, fill),
            "attention_mask": pad_sequence(ones, True, 0),
        })  # fmt: skip
    return batches


def packed(size: int = 3) -> list[Batch]:
    """Rows of whole conversations one behind the other, with the number of each and positions that begin at 0."""
    batches = []
    for at in range(0, len(FEATURES) - size + 1, size):
        rows = FEATURES[at : at + size]
        batch = {name: torch.tensor([[n for row in rows for n in row[name]]]) for name in ("input_ids", "labels")}
        lengths = [len(row["input_ids"]) for row in rows]
        batch["document_ids"] = torch.tensor([[n for n, length in enumerate(lengths) for _ in range(length)]])
        batch["position_ids"] = torch.tensor([[n for length in lengths for n in range(length)]])
        batches.append(batch)
    return batches


def token_losses(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """[B, T], 0 where a target is ignored."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none", **options).view_as(
        targets
    )


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return token_losses(logits[:, :-1], labels[:, 1:])


Losses = Callable[[Any], Tensor]
"""Returns the losses of the tokens of one micro-batch, [B, T]."""


def ratio(losses: Losses, count: Callable[[Any], Any] = lambda batch: (batch["labels"][:, 1:] != IGNORE).sum()) -> Any:
    """The step that most loops here share: one ratio over all micro-batches."""

    def step(micro_batches: list[Any]) -> Tensor:
        total = sum(count(batch) for batch in micro_batches)
        loss = sum(losses(batch).sum() / total for batch in micro_batches)
        loss.backward()
        return loss.detach()

    return step


def logits_of(llama: nn.Module, batch: Batch) -> Tensor:
    return llama(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def of_rows(losses: Callable[[nn.Module, Batch], Tensor], batches: list[Batch] | None = None, **options: Any) -> Loop:
    """A loop over padded rows with a tiny Llama of transformers."""
    llama = model(TOKENIZER)
    options = {"optimizer": torch.optim.AdamW(llama.parameters(), lr=1e-3), **options}
    return Loop(llama, batches or padded(), ratio(lambda batch: losses(llama, batch)), options)


def of_means(mean: Callable[[nn.Module, list[Batch]], None]) -> Loop:
    """The same with a step of its own, which calls backward."""
    llama = model(TOKENIZER)
    step = lambda micro_batches: mean(llama, micro_batches)  # noqa: E731
    return Loop(llama, padded(), step, {"optimizer": torch.optim.AdamW(llama.parameters(), lr=1e-3)})


def blocks(document_ids: Tensor) -> Tensor:
    """Returns the mask [B, 1, T, T] in which a token attends to those before it in its own document."""
    return (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril()


def of_packs(arguments: Callable[[Batch], dict[str, Any]]) -> Loop:
    """A loop over packs with a GPT of its own, which has learned positions."""
    torch.manual_seed(0)
    gpt = GPT(len(TOKENIZER))
    losses = lambda batch: shifted(gpt(batch["input_ids"], **arguments(batch)), batch["labels"])  # noqa: E731
    return Loop(gpt, packed(), ratio(losses), {"optimizer": torch.optim.AdamW(gpt.parameters(), lr=1e-3)})
