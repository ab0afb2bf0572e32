"""Records what the first steps of a run train, token by token, for `sftron diff`, before the run makes them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch

from sftron.data.loader import PackLoader, collate
from sftron.data.packing import lay_out
from sftron.data.types import IGNORE_INDEX, Batch, LabeledConversation
from sftron.models.llama import LlamaForSFT
from sftron.report.first_update import FirstUpdate
from sftron.report.token_record import (
    NO_TARGET,
    TokenArrays,
    TokenRecord,
    groups_of,
    installed_versions,
    prefix_digests,
    sketch_of,
)
from sftron.train.loop import objective_of
from sftron.train.objective import hidden_states, label_log_probabilities
from sftron.train.run import Setup
from sftron.train.step import train_step
from sftron.train.trainer import Trainer

FILE = "record.safetensors"
"""The name of the record in the run directory."""


def record_run(trainer: Trainer, num_steps: int) -> TokenRecord:
    """Returns a record of the next steps, all of them at the run's present weights. Changes nothing in the run.

    Raises ValueError if several ranks train, of which each would see a part.
    """
    setup, model = trainer.setup, trainer.model
    if setup.ranks.world_size > 1:
        raise ValueError(f"--record: found {setup.ranks.world_size} ranks; record the run on one")
    accumulation = setup.config.tokens.batch_accumulation_per_replica
    loader = PackLoader(setup.data.dataset, num_workers=0, keep_tail=False)
    loader.load_state_dict(trainer.loader.state_dict())
    recorder = FirstSteps(setup, model, trainer.optimizer)
    with torch.random.fork_rng():
        batches = iter(loader)
        for _ in range(num_steps):
            if own := [each for each in islice(batches, accumulation) if len(each.pack.keys)]:
                recorder.add(own)
    return recorder.finish(trainer)


class _Norms:
    """Stands for an optimizer: keeps the norms of the gradients, and changes no weight.

    Args:
        optimizer: Whose first update of clipped gradients is measured, and taken back. Only AdamW keeps all of its
            state in the optimizer; the update of another one is not measured.
    """

    def __init__(self, model: LlamaForSFT, optimizer: Any, max_norm: float | None) -> None:
        self._model, self._optimizer, self._max_norm = model, optimizer, max_norm
        self.norms, self.update = dict[str, float](), dict[str, Any]()

    def step(self) -> None:
        named = self._model.named_parameters()
        self.norms = {name: float(each.grad.double().norm()) for name, each in named if each.grad is not None}
        if not isinstance(self._optimizer, torch.optim.AdamW):
            return
        new = object.__new__(type(self._optimizer))  # with no state, as it is before a run's first step
        new.__dict__.update(self._optimizer.__dict__, state=defaultdict(dict))
        parameters = list(self._model.parameters())
        before = FirstUpdate(parameters)
        try:
            if self._max_norm:
                torch.nn.utils.clip_grad_norm_(parameters, self._max_norm)
            new.step()
            self.update = before.measure(new)
        finally:
            before.restore()


class FirstSteps:
    """Collects the tokens of steps."""

    def __init__(self, setup: Setup, model: LlamaForSFT, optimizer: Any = None) -> None:
        self._setup, self._model, self._optimizer, self._update = setup, model, optimizer, dict[str, Any]()
        self._tokens, self._sketches = TokenArrays(), list[np.ndarray]()
        self._losses, self._items, self._norms = list[float](), list[float](), dict[str, float]()

    def add(self, batches: list[Batch]) -> None:
        """Adds the micro-batches of one step."""
        objective, is_first = objective_of(self._setup), not self._losses
        max_norm = self._setup.config.optimizer.max_grad_norm
        norms = _Norms(self._model, self._optimizer if is_first else None, max_norm)
        denominator = math.fsum(map(objective.denominator, batches))
        stand_in: Any = norms
        num_datasets = len(self._setup.data.preparation.datasets)
        result = train_step(
            self._model, stand_in, batches, objective, max_grad_norm=None, denominator=denominator,
            num_datasets=num_datasets,
        )  # fmt: skip
        self._norms, self._update = self._norms or norms.norms, self._update or norms.update
        self._losses.append(result.loss or 0.0)
        self._items.append(denominator)
        for number, batch in enumerate(batches):
            self._add_batch(number, batch, denominator)

    def _add_batch(self, number: int, batch: Batch, denominator: float) -> None:
        pack, places = batch.pack, batch.label_positions.numpy() + 1
        size = len(pack.input_ids)
        target, weight = np.full(size, NO_TARGET), np.zeros(size)
        target[places], weight[places] = batch.labels.numpy(), batch.loss_weights.double().numpy() / (denominator or 1)
        target[weight == 0] = NO_TARGET
        own, context = np.zeros(size), np.zeros(size)
        own[places] = _log_probabilities(self._model, batch)
        with _as_reference(self._model):
            context[places] = _log_probabilities(self._model, batch)
        starts = np.repeat(pack.cu_seqlens[:-1], np.diff(pack.cu_seqlens)).astype(np.int64)
        digests = prefix_digests(pack.input_ids, starts)
        sees = np.concatenate([[np.uint64(0)], digests[:-1]])
        sees[starts == np.arange(size)] = 0
        is_trained = weight != 0
        for begin, end in zip(pack.conversation_bounds[:-1], pack.conversation_bounds[1:], strict=True):
            at = slice(int(begin), int(end))
            self._tokens.add(
                int(end - begin), document=len(self._sketches), step=len(self._losses) - 1, micro_batch=number, row=0,
                id=pack.input_ids[at], role=pack.role_ids[at], target=target[at], weight=weight[at],
                position=pack.position_ids[at], sees=sees[at], own=np.where(is_trained, own, 0)[at],
                context=np.where(is_trained, context, 0)[at], reference=self._alone(pack, at),
            )  # fmt: skip
            text = self._setup.data.chat_tokenizer.tokenizer.decode(pack.input_ids[at], skip_special_tokens=True)
            self._sketches.append(sketch_of(str(text)))

    def _alone(self, pack: Any, at: slice) -> np.ndarray:
        """Returns the log-probability of each token after those before it in its conversation, by the reference."""
        ids = pack.input_ids[at]
        labels = np.append(ids[1:], IGNORE_INDEX).astype(np.int32)
        alone = LabeledConversation(
            input_ids=ids, labels=labels, loss_weights=(labels != IGNORE_INDEX).astype(np.float32),
            role_ids=pack.role_ids[at], key=pack.keys[0],
        )  # fmt: skip
        one = lay_out([alone], token_budget=len(ids), remove_cross_attention=True, pad_id=0)
        with _as_reference(self._model):
            return np.concatenate([[np.nan], _log_probabilities(self._model, collate(one, keep_tail=True))])

    def finish(self, trainer: Trainer) -> TokenRecord:
        if not self._sketches:
            remedy = "choose another general.run_name to start a new run"
            raise ValueError(f"--record: this run has no steps left to record; {remedy}")
        config, model, named = self._setup.config, self._model, list(self._model.named_parameters())
        optimizer: Any = trainer.optimizer
        facts = {
            "losses": self._losses,
            "num_items": self._items,
            "gradient_of_loss": 1.0,
            "gradient_norms": self._norms,
            "trainer": "sftron Trainer",
            "library": "sftron",
            "model": type(model).__name__,
            "model_type": self._setup.model.architecture.model_type,
            "attention": model.attention,
            "dtypes": [str(model.compute_dtype).removeprefix("torch.")],
            "autocast": "none" if model.compute_dtype == named[0][1].dtype else str(model.compute_dtype)[6:],
            "dropout": 0.0,
            "trainable": sum(each.numel() for _, each in named if each.requires_grad),
            "optimizer": {"name": type(optimizer).__name__, "groups": groups_of(optimizer)},
            "max_grad_norm": config.optimizer.max_grad_norm,
            "rates": {"num_steps": config.tokens.train_steps, "highest": config.optimizer.learning_rate},
            "seeds": {"seed": config.general.seed},
            "versions": installed_versions(),
        }
        facts |= {"update": self._update} if self._update else {}
        return TokenRecord(self._tokens.joined(), np.stack(self._sketches), facts)


@torch.no_grad()
def _log_probabilities(model: LlamaForSFT, batch: Batch) -> np.ndarray:
    """Returns the log-probabilities of the labels, float64 [R]."""
    found = label_log_probabilities(model, batch, hidden_states(model, batch))
    return found.gather(1, batch.labels.to(found.device)[:, None])[:, 0].double().cpu().numpy()


@contextmanager
def _as_reference(model: LlamaForSFT) -> Iterator[None]:
    """Makes the model compute in float32, without dropout, with the attention backend that runs on every device."""
    before = model.compute_dtype, model.attention, model.training
    model.eval()
    if model.compute_dtype != torch.float32:
        model.compute_dtype, model.attention = torch.float32, "sdpa"
    try:
        yield
    finally:
        model.compute_dtype, model.attention, _ = before
        model.train(before[2])
