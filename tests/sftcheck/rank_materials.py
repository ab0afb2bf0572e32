"""What the trainers of rank_zoo.py are made of, and the proof that each is what it claims, without code of sftron.

The proof is one real step: `train()` with SGD at a learning rate of 1 moves each weight by its gradient, and one
process computes the gradient of the mean over all labels of the rows that the step has consumed.
"""

import copy
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerBase, Trainer, TrainingArguments

from tests.sftcheck.set_up import Zoo
from tests.sftcheck.small_trainers import QUIET, encoded, tiny
from tests.sftcheck.zoo_materials import tok

Rows = list[dict[str, list[int]]]
SCRATCH = tempfile.mkdtemp(prefix="rank-zoo-")


RANK_ZOO = Zoo()
broken, sound = partial(RANK_ZOO.broken, ranks=2), partial(RANK_ZOO.sound, ranks=2)


# -- rows and trainers -----------------------------------------------------------------------------------------------


def conversations(count: int = 24) -> list[list[dict[str, str]]]:
    """Conversations of unlike lengths; the answer of each names its number, so no two are equal."""
    return [
        [
            {"role": "user", "content": f"What is {number} plus {number % 3}?"},
            {"role": "assistant", "content": f"{number} is " + "one more than " * (number % 5) + f"{number}."},
        ]
        for number in range(count)
    ]


def features(tokenizer: PreTrainedTokenizerBase, count: int = 24) -> Rows:
    rows = encoded(tokenizer, [{"messages": each} for each in conversations(count)])
    return [{name: list(values) for name, values in row.items()} for row in rows]


def arguments(kind: type[TrainingArguments] = TrainingArguments, **given: Any) -> Any:
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.0}
    return kind(SCRATCH, **{**QUIET, **options, "logging_strategy": "no", **given})


def plain(kind: type[Trainer] = Trainer, model: Any = None, rows: Rows | None = None, **given: Any) -> Trainer:
    """A Trainer of rows with labels, padded on the right."""
    tokenizer = tok("chatml")
    options = given.pop("args", None) or arguments(**given)
    return kind(
        model or tiny(tokenizer),
        options,
        train_dataset=features(tokenizer) if rows is None else rows,  # pyright: ignore[reportArgumentType]
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


# -- proofs ----------------------------------------------------------------------------------------------------------


class _Recording:
    """A collator that keeps the rows that it is given."""

    def __init__(self, collator: Any) -> None:
        self.collator, self.rows = collator, list[Any]()

    def __call__(self, rows: Any, *args: Any) -> Any:
        self.rows.append(copy.deepcopy([dict(each) for each in rows]))
        return self.collator(rows, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collator, name)


@dataclass(frozen=True)
class RealStep:
    """One step of `train()` on all ranks."""

    apart: list[float]
    """By rank, the norm of the difference of its weights' movement from the reference's, by that of the reference."""
    factors: list[float]
    """By rank, the factor of the reference's movement that is nearest."""
    are_alike: bool
    """Whether all ranks hold the same weights afterwards."""

    @property
    def is_right(self) -> bool:
        return max(self.apart) < 2e-3 and self.are_alike

    def is_factor(self, factor: float) -> bool:
        return all(abs(each / factor - 1) < 1e-3 for each in self.factors)


def real_step(trainer: Trainer, forward: Callable[..., Any] | None = None) -> RealStep:
    """Trains one step with SGD at a rate of 1.

    Args:
        forward: Returns the logits of a copy of the model for ids [1, T] of one row, in one process.
    """
    model = trainer.model
    state = gathered({name: each.detach().clone() for name, each in model.named_parameters()})[0]
    trainable = [name for name, each in model.named_parameters() if each.requires_grad]
    alone = copy.deepcopy(model)
    alone.load_state_dict(state, strict=False)
    for module in alone.modules():  # TRL's own forward holds the model of which this is a copy
        vars(module).pop("forward", None)
    recording = trainer.data_collator = _Recording(trainer.data_collator)
    trainer.args.max_steps, trainer.args.learning_rate, trainer.args.lr_scheduler_type = 1, 1.0, "constant"
    trainer.optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1.0)
    trainer.train()
    consumed = gathered(recording.rows[: trainer.args.gradient_accumulation_steps])
    unique = {repr(row): row for rank in consumed for batch in rank for row in batch}
    expected = _gradient(alone, list(unique.values()), trainable, forward)
    named = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
    moved = {name: state[name] - _whole(named[name]) for name in trainable}
    own = torch.cat([moved[name].flatten() for name in trainable])
    norm = float(expected.norm())
    alike = gathered([_whole(named[name]) for name in trainable])
    return RealStep(
        gathered(float((own - expected).norm()) / norm),
        gathered(float(own @ expected) / norm**2),
        all(torch.equal(one, two) for one, two in zip(alike[0], alike[-1], strict=True)),
    )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach().clone()


def _gradient(model: Any, rows: Rows, names: list[str], forward: Callable[..., Any] | None) -> torch.Tensor:
    """Returns the gradient of the mean of the losses of all labels of the rows, each computed alone."""
    model.train()
    config = model.config
    if config._attn_implementation not in ("sdpa", "eager"):
        config._attn_implementation = "eager"
    total = sum(label != -100 for row in rows for label in row["labels"][1:])
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        logits = model(input_ids=ids).logits if forward is None else forward(model, row)
        targets = torch.tensor(row["labels"][1:])
        (cross_entropy(logits[0, :-1].float(), targets, reduction="sum") / total).backward()
    named = dict(model.named_parameters())
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in map(named.get, names)])  # pyright: ignore


def step_is_right(trainer: Trainer) -> bool:
    return real_step(trainer).is_right


def step_is_wrong(trainer: Trainer) -> bool:
    return min(real_step(trainer).apart) > 5e-3


def step_has_factor(factor: float) -> Callable[[Trainer], bool]:
    return lambda trainer: real_step(trainer).is_factor(factor)


def ranks_drift(trainer: Trainer) -> bool:
    return not real_step(trainer).are_alike


def epoch(trainer: Trainer) -> Counter[str]:
    """Returns how often the rows of one epoch are computed, over all ranks."""
    recording = trainer.data_collator = _Recording(trainer.data_collator)
    for _ in trainer.get_train_dataloader():
        pass
    own = [repr(row["input_ids"]) for batch in recording.rows for row in batch]
    return Counter(key for rank in gathered(own) for key in rank)


def rows_are_repeated(trainer: Trainer) -> bool:
    return set(epoch(trainer).values()) == {dist.get_world_size()}


def rows_are_lost(count: int) -> Callable[[Trainer], bool]:
    return lambda trainer: len(epoch(trainer)) == count


def scratch(name: str) -> Path:
    return Path(SCRATCH) / name
