"""A step on ranks that share packs, and on one: what the ranks of tests/train/test_context_runs.py compute."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from sftron.data.loader import collate
from sftron.data.packing import lay_out
from sftron.data.types import (
    IGNORE_INDEX,
    WHOLE_ROW,
    Batch,
    ContextRank,
    ConversationKey,
    DataError,
    LabeledConversation,
    Pack,
    Role,
)
from sftron.models.sharding import shard_model, whole
from sftron.train.flops import step_flops
from sftron.train.objective import TokenLoss
from sftron.train.ranks import Ranks, end_ranks, start_ranks
from sftron.train.step import StepBatches, next_step_batches, train_step
from tests.models.reference import EXPERTS, GPT_OSS, QWEN_3_5, TINY, make_native, make_reference
from tests.train.test_step import Recording

UNTRAINED = frozenset({Role.TEMPLATE, Role.USER, Role.SYSTEM})
KINDS: dict[str, tuple[dict[str, Any], float]] = {
    "tied": ({"tie_word_embeddings": True, "num_attention_heads": 6, "hidden_size": 48}, 0.0),
    "experts": ({"model_type": "qwen3_moe", **EXPERTS}, 0.3),
    "sinks": (GPT_OSS, 0.3),
    "states": (QWEN_3_5, 0.0),
}
"""Options of a model, and the factor of its auxiliary loss."""


def conversation(number: int, length: int, *, is_trained: bool = True) -> LabeledConversation:
    """Random ids and roles, of which the assistant's are trained, with weights other than 1; of data set 0 or 1.

    In one of 41 tokens, the labels of the last tokens before the borders of 2 and of 4 ranks are trained.
    """
    rng = np.random.default_rng(number)
    ids = rng.integers(0, TINY["vocab_size"], length).astype(np.int32)
    roles = rng.integers(0, 4, length).astype(np.uint8)
    if length == 41:
        roles[[11, 21, 31]] = Role.ASSISTANT
    has_label = np.append(roles[1:] == Role.ASSISTANT, False) & is_trained
    labels = np.where(has_label, np.append(ids[1:], 0), IGNORE_INDEX).astype(np.int32)
    weights = np.where(has_label, rng.uniform(0.2, 2.0, length), 0).astype(np.float32)
    return LabeledConversation(ids, labels, weights, roles, ConversationKey(number % 2, number))


def packs(*, isolated: bool = True) -> list[Pack]:
    """Four packs of 41 tokens, which no number of ranks divides: documents over borders, one over all ranks, one
    without a label, and padding alone."""
    rows = [
        [conversation(0, 9), conversation(1, 1), conversation(2, 12), conversation(3, 5)],
        [conversation(4, 41)],
        [],
        [conversation(5, 15, is_trained=False), conversation(6, 7), conversation(8, 19)],
    ]
    return [
        replace(
            lay_out(row, token_budget=41, remove_cross_attention=isolated, pad_id=0),
            index=number,
        )
        for number, row in enumerate(rows)
    ]


def batch_of(pack: Pack, context: ContextRank = WHOLE_ROW) -> Batch:
    return collate(pack, keep_tail=True, measured_roles=UNTRAINED, context=context)


def fetch(ranks: Ranks, batches: list[Batch], model: Any) -> StepBatches:
    return next_step_batches(
        iter(batches),
        len(batches),
        ranks=ranks,
        num_datasets=2,
        flops_of=lambda own: step_flops(model.config, own, "none"),
    )


def measure(
    model: Any, ranks: Ranks, coefficient: float, *, isolated: bool, objective: TokenLoss | None = None
) -> dict[str, Any]:
    """Returns all that a step over `packs` measures, and every gradient."""

    class WholeRecording(Recording):
        def step(self, closure: object = None) -> None:
            self.gradients = {n: whole(p.grad).clone() for n, p in self.model.named_parameters() if p.grad is not None}

    own = [batch_of(pack, ranks.context) for pack in packs(isolated=isolated)[ranks.dp_rank :: ranks.dp_world_size]]
    with patch("sftron.train.step.peak_memory_bytes", return_value=ranks.rank):
        fetched = fetch(ranks, own, model)
    recording = WholeRecording(model)
    result = train_step(
        model,
        recording,
        fetched.batches,
        objective or TokenLoss(),
        max_grad_norm=None,
        num_datasets=2,
        with_untrained=objective is None,
        denominator=fetched.counts.weight_sum,
        router_aux_loss_coef=coefficient,
        sum_over_ranks=ranks.sum,
    )
    assert result.token_losses is not None
    counts = asdict(fetched.counts)
    return {
        "counts": {name: value for name, value in counts.items() if name != "weight_sum"},
        "packs": sorted(fetched.packs),
        "flops": [each * ranks.world_size for each in (fetched.flops.model, fetched.flops.hardware)],
        "peak_memory": fetched.peak_memory_bytes,
        "numbers": {
            "loss": result.loss,
            "norm": result.grad_norm,
            "weight_sum": fetched.counts.weight_sum,
            "tokens": asdict(result.token_losses),
            "experts": {} if result.expert_load is None else asdict(result.expert_load),
        },
        "gradients": recording.gradients,
    }


def save_steps(layouts: list[tuple[int, int]], kinds: list[str], path: Path, isolated: bool = True) -> None:
    """Saves what one rank measures, and what all do by each layout (copies, ranks that share a pack)."""
    alone, found = Ranks(device=torch.device("cpu")), {}
    started = start_ranks()
    for kind in kinds:
        options, coefficient = KINDS[kind]
        reference = make_reference(**options)
        found[kind, (1, 1)] = measure(make_native(reference), alone, coefficient, isolated=isolated)
        for dp_replicate, context in layouts:
            ranks = lay_out_ranks(started, dp_replicate, context)
            model = make_native(reference)
            assert ranks.mesh is not None
            shard_model(model, ranks.mesh, ranks.context_group)
            found[kind, (dp_replicate, context)] = measure(model, ranks, coefficient, isolated=isolated)
    if started.is_main:
        torch.save(found, path)
    end_ranks()


def lay_out_ranks(started: Ranks, dp_replicate: int, context: int) -> Ranks:
    """Returns the ranks of a process group in another layout."""
    with patch("torch.distributed.init_process_group"), patch("sftron.train.ranks._open_store"):
        return replace(start_ranks(dp_replicate, None, 60, context), phases=None)


# --- Mistakes that others have made, each of which has to change the loss ---


@contextmanager
def _labels_shifted_after_the_cut() -> Iterator[None]:
    """The last token of a part does not know the next rank's first one."""
    original = collate

    def mutated(pack: Pack, **options: Any) -> Batch:
        batch = original(pack, **options)
        kept = batch.label_positions < len(batch.input_ids) - 1
        names = ("label_positions", "labels", "loss_weights", "label_roles", "label_sources")
        return replace(batch, **{name: getattr(batch, name)[kept] for name in names})

    with patch(f"{__name__}.collate", mutated):
        yield


class MeanOfRanks(TokenLoss):
    """The mean over the ranks of the mean of each."""

    def loss_sum(self, model: Any, batch: Batch, measures: Any) -> torch.Tensor:
        own, num_ranks = batch.loss_weights.sum().item(), len(batch.part.counts)
        share = batch.weight_sum / (own * num_ranks) if own else 0.0
        return super().loss_sum(model, batch, measures) * share


@contextmanager
def _counts_of_every_rank() -> Iterator[None]:
    original = next_step_batches

    def mutated(batches: Any, number: int, *, ranks: Ranks, **options: Any) -> StepBatches:
        return original(batches, number, ranks=replace(ranks, context=WHOLE_ROW), **options)

    with patch(f"{__name__}.next_step_batches", mutated):
        yield


MUTANTS: dict[str, Callable[[], Any]] = {
    "": nullcontext,
    "labels shifted after the cut": _labels_shifted_after_the_cut,
    "a mean per rank": nullcontext,
    "counts of every rank": _counts_of_every_rank,
}


def save_mutants(path: Path) -> None:
    """Saves the loss of one rank, and by mistake that of two that share each pack; and the error for unequal packs."""
    ranks = start_ranks(context=2)
    reference, found = make_reference(), {}
    for mutant, applied in {"alone": nullcontext, **MUTANTS}.items():
        model, its_ranks = make_native(reference), Ranks(device=ranks.device) if mutant == "alone" else ranks
        if mutant != "alone":
            assert ranks.mesh is not None
            shard_model(model, ranks.mesh, ranks.context_group)
        objective = MeanOfRanks() if mutant == "a mean per rank" else None
        with applied():
            found[mutant] = measure(model, its_ranks, 0.0, isolated=True, objective=objective)["numbers"]["loss"]
    try:
        fetch(ranks, [batch_of(packs()[ranks.rank], ranks.context)], make_native(reference))
    except DataError as error:
        found["one rank with another pack"] = str(error)
    torch.save(found, path.with_name(f"{path.name}-{ranks.rank}"))
    end_ranks()
