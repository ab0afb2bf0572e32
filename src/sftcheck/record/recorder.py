"""Records the first steps of a trainer or of a loop, at its first weights, and leaves it as it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from sftcheck.batches import Step
from sftcheck.documents.declared import OF_A_LOOP, Declared
from sftcheck.documents.document import Document
from sftcheck.documents.finder import Finder
from sftcheck.documents.truth import Encoder
from sftcheck.loop.loop_batches import LoopBatch
from sftcheck.loop.loop_model import LoopModel
from sftcheck.loop.loop_state import restore_loop_after
from sftcheck.record.passes import Passes, ReadCall, facts_of_gradients
from sftcheck.record.reference import Reference
from sftcheck.restore import restore_after
from sftcheck.trainer.called_model import new_optimizer
from sftcheck.trainer.recording import TrainerBatches, own_callbacks, require_checkable
from sftcheck.trainer.schedule import num_steps_of, rates_of
from sftron.data.types import IGNORE_INDEX, SeekablePacks
from sftron.report.token_record import (
    UNKNOWN_ROLE,
    TokenArrays,
    TokenRecord,
    groups_of,
    installed_versions,
    not_finite,
    prefix_digests,
    sketch_of,
)
from sftron.visible_text import counted

_SAME_LOSS = 1e-5
"""Relative, of the loss that a step returns from the loss whose gradient it leaves: sums of the same numbers."""
_NUM_RATES = 5
_NO_NUMBER_REMEDY = "look for NaN or infinity in the model's weights before you record it"


def record_trainer(
    trainer: Any,
    conversations: Sequence[Any] | None = None,
    trained_roles: str = "assistant",
    *,
    steps: int = 1,
    with_text: bool = False,
) -> TokenRecord:
    """Records what the first steps of a trainer train, all of them at its first weights, and leaves it as it was.

    Args:
        trainer: A `transformers.Trainer`, or one of its subclasses, in one process.
        conversations: The conversations of its data set, if its rows hold ids alone; they give the roles of tokens.
        trained_roles: "assistant", if answers are meant to be trained; "all" for a loss over everything.
        with_text: Whether the record holds the text of its tokens.

    Raises:
        ValueError: The trainer cannot be recorded; the message has the remedy.
    """
    tokenizer = require_checkable(trainer, trained_roles)
    if trainer.args.world_size > 1:
        raise ValueError(f"found {trainer.args.world_size} ranks; record the trainer in one process")
    with restore_after(trainer):
        data = trainer.train_dataset
        batches = TrainerBatches(trainer, 0 if isinstance(data, SeekablePacks) else len(data))
        found = list(islice(batches.accumulations(data), steps))
        step = _TrainerStep(batches)
        recorder = _Recorder(LoopModel(batches.model.module, step, len(tokenizer)), tokenizer, with_text=with_text)
        finder = Finder(Declared.of(trainer), recorder.encoder, [], trained_roles, conversations)
        for each in found:
            step.begin(each)
            features = [batch.features for batch in each.batches]
            inputs = [dict(batch.inputs) for batch in each.batches]
            passes = Passes(
                recorder.model, inputs, lambda: step.number, step.scale, lambda: new_optimizer(trainer),
                trainer.args.max_grad_norm,
            )  # fmt: skip
            recorder.add(passes, features, finder, step.returned)
        return recorder.finish(_facts_of(trainer, batches, found))


def record_step(
    model: nn.Module,
    batches: Iterable[Any],
    step: Callable[[list[Any]], Any],
    tokenizer: Any,
    conversations: Sequence[Any] | None = None,
    trained_roles: str = "assistant",
    *,
    optimizer: Optimizer | None = None,
    num_micro_batches: int = 2,
    steps: int = 1,
    with_text: bool = False,
) -> TokenRecord:
    """Records what the first steps of a training loop train, and leaves it as it was.

    Args:
        model, batches, step, tokenizer, optimizer, num_micro_batches: As in `verify_step`.
        conversations, trained_roles, steps, with_text: As in `record_trainer`.

    Raises:
        ValueError: The loop cannot be recorded.
    """
    given = iter(batches)
    with restore_loop_after(model, step, optimizer):
        recorder = _Recorder(LoopModel(model, step, len(tokenizer)), tokenizer, with_text=with_text)
        finder = Finder(OF_A_LOOP, recorder.encoder, [], trained_roles, conversations)
        for _ in range(steps):
            chosen = list(islice(given, num_micro_batches))
            if not chosen:
                break
            passes = Passes(recorder.model, chosen, None, optimizer=lambda: optimizer)
            recorder.add(passes, [()] * len(chosen), finder, _number, optimizer)
        facts: dict[str, Any] = {"trainer": "a loop", "library": "loop", "num_micro_batches": num_micro_batches}
        if optimizer is not None:
            facts["optimizer"] = {"name": type(optimizer).__name__, "groups": groups_of(optimizer)}
        return recorder.finish(facts)


class _TrainerStep:
    """The micro-batches of a trainer's step, one after another, as `train()` computes them."""

    def __init__(self, batches: TrainerBatches) -> None:
        self.trainer, self._called, self.number, self._num_items = batches.trainer, batches.model, 0, None
        self.scale = batches.model.scale

    def begin(self, step: Step) -> None:
        self._num_items = step.num_items
        self.trainer.current_gradient_accumulation_steps = len(step.batches)  # TRL divides by it

    def __call__(self, batches: Sequence[Any]) -> list[float]:
        trainer, returned = self.trainer, list[float]()
        for self.number, batch in enumerate(batches):
            trainer.accelerator.gradient_state._set_sync_gradients(self.number == len(batches) - 1)
            with self._called.auxiliary_losses() as auxiliary:
                loss = float(trainer.training_step(self._called.module, dict(batch), self._num_items))
            if auxiliary:
                loss -= self._called.share_of_auxiliary(len(batches), self._num_items) * auxiliary[0]
            returned.append(loss)
        return returned

    def returned(self, result: Any) -> float | None:
        return None if result is None else math.fsum(result)


def _number(result: Any) -> float | None:
    """Returns the loss that a loop's step returns, if it does."""
    parts = list(result.values()) if isinstance(result, Mapping) else result
    for each in parts if isinstance(parts, (tuple, list)) else [parts]:
        if isinstance(each, (int, float)) or (isinstance(each, Tensor) and each.numel() == 1):
            return float(each)
    return None


class _Recorder:
    """Collects the tokens of steps.

    Args:
        model: The model, called by its step.
    """

    def __init__(self, model: LoopModel, tokenizer: Any, *, with_text: bool) -> None:
        self.model, self.tokenizer, self.encoder = model, tokenizer, Encoder(tokenizer)
        self._reference: Reference | None = None
        self._tokens, self._sketches, self._with_text = TokenArrays(), list[np.ndarray](), with_text
        self._losses, self._facts, self._factors = list[float](), dict[str, Any](), list[float]()
        self._num_skipped = 0

    def add(
        self,
        passes: Passes,
        features: Sequence[Sequence[Any]],
        finder: Finder,
        returned: Callable[[Any], float | None],
        optimizer: Optimizer | None = None,
    ) -> None:
        """Adds one step.

        Args:
            features: The rows from which each micro-batch was made.
            returned: Returns the loss of the step from what it returns; None if it returns none.
        """
        with restore_loop_after(self.model.module, self.model.step, optimizer):
            own = passes.own(updates=not self._facts)
        loss = returned(own.result)
        read = passes.read(own)
        total = _loss_of(read)
        if loss and not (total and _is_simple(loss / total)):
            # A loss whose weights depend on probabilities has others where all logits are equal.
            with suppress(ValueError):  # of one with several targets
                again = passes.read(own, lambda logits: logits)
                if _is_near(_loss_of(again), loss):
                    read, total = again, _loss_of(again)
        is_trained = any((each.reading.weights != 0).any() for each in read)  # else a loss may be 0 / 0
        self._factors.append(1.0 if loss is None or not total else loss / total)
        if passes.micro_batch is not None:
            self._num_skipped += len(passes.batches) - len(read)
        self._losses.append(total if loss is None or not is_trained else loss)
        if not self._facts:
            self._facts = {"gradient_norms": own.norms, "gradient": facts_of_gradients(own)}
            self._facts |= {"autocast": own.autocast, "dropout": own.dropout}
            self._facts |= {"update": own.update} if own.update else {}
            self._facts |= {"optimizer": own.optimizer} if own.optimizer else {}
        self._add_tokens(passes, read, features, finder)

    def _add_tokens(self, passes: Passes, read: Sequence[ReadCall], features: Any, finder: Finder) -> None:
        self._reference = self._reference or Reference(self.model)
        batches = [
            LoopBatch(
                features[each.micro_batch], passes.batches[each.micro_batch], each.reading.call.seen, each.reading,
                self.tokenizer,
            )
            for each in read
        ]  # fmt: skip
        documents = list(self._without_empty(finder.documents_of(batches), batches))
        for n, (each, batch) in enumerate(zip(read, batches, strict=True)):
            context = self._reference.beside_neighbors(each.reading.call, each.reading.targets)
            values = {
                "target": batch.labels,
                "weight": batch.at_labels(each.reading.weights, 0),
                "own": batch.at_labels(each.own, 0),
                "context": batch.at_labels(context, 0),
            }
            rows = {name: value.copy() for name, value in values.items()}
            self._add_batch(n, each, batch, [one for one in documents if one.batch == n and len(one)], rows)
            self._add_unplaced(each, values, context)

    def _without_empty(self, documents: Sequence[Document], batches: Sequence[LoopBatch]) -> Iterator[Document]:
        """Yields the documents; control tokens alone are the beginning of the one behind them."""
        begin: Document | None = None
        for each in documents:
            follows = begin is not None and (begin.batch, begin.row) == (each.batch, each.row)
            if begin is not None and not follows:
                yield begin
            elif begin is not None:
                ids, labels = (np.concatenate(both) for both in ((begin.ids, each.ids), (begin.labels, each.labels)))
                each = replace(begin, ids=ids, labels=labels)
            is_claimed = each.start + len(each) in set(batches[each.batch].claimed_starts(each.row))
            begin = each if not self._text(each.ids).strip() and not is_claimed else None
            if begin is None:
                yield each
        if begin is not None:
            yield begin

    def _text(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)

    def _add_batch(
        self, n: int, read: ReadCall, batch: LoopBatch, documents: Sequence[Document], rows: dict[str, np.ndarray]
    ) -> None:
        assert self._reference is not None
        width, is_free = batch.ids.shape[1], np.ones(batch.ids.shape, dtype=bool)
        positions = batch.positions
        positions = np.broadcast_to(np.arange(width), batch.ids.shape) if positions is None else positions
        sees = np.stack([self._seen_before(batch, row) for row in range(len(batch.ids))])
        step, micro = len(self._losses) - 1, read.micro_batch
        for each in documents:
            at = each.index
            is_free[at] = False
            target = np.where(rows["target"][at] == IGNORE_INDEX, each.ids, rows["target"][at])
            reference = self._reference.alone(read.reading.call, each.ids, target)
            role = UNKNOWN_ROLE if each.tokens is None else each.tokens.role_ids
            self._tokens.add(
                len(each), document=len(self._sketches), step=step, micro_batch=micro, row=each.row, id=each.ids,
                role=role, position=positions[at], sees=sees[at], reference=reference,
                **{name: value[at] for name, value in rows.items()},
            )  # fmt: skip
            self._sketches.append(sketch_of(self._text(each.ids)))
        at = np.nonzero(is_free & (rows["weight"] != 0))
        self._tokens.add(
            len(at[0]), document=-1, step=step, micro_batch=micro, row=at[0], id=batch.ids[at], role=UNKNOWN_ROLE,
            position=positions[at], sees=sees[at], reference=rows["context"][at],
            **{name: value[at] for name, value in rows.items()},
        )  # fmt: skip

    def _add_unplaced(self, read: ReadCall, placed: Mapping[str, np.ndarray], context: np.ndarray) -> None:
        """Adds the targets behind the last tokens of rows, which are no token of the batch."""
        reading = read.reading
        if (reading.weights != 0).sum() == (placed["weight"] != 0).sum():
            return
        at = np.nonzero((reading.weights != 0) & (np.arange(reading.weights.shape[1]) == reading.weights.shape[1] - 1))
        self._tokens.add(
            len(at[0]), document=-1, step=len(self._losses) - 1, micro_batch=read.micro_batch, row=at[0],
            id=reading.targets[at], role=UNKNOWN_ROLE, position=at[1] + 1, sees=0, reference=context[at],
            target=reading.targets[at], weight=reading.weights[at], own=read.own[at], context=context[at],
        )  # fmt: skip

    def _seen_before(self, batch: LoopBatch, row: int) -> np.ndarray:
        """Returns a digest of what the prediction of each token of a row may attend to, as the arguments say."""
        ids, attended = batch.ids[row], batch.attended[row] != 0
        if isinstance(mask := batch.seen.get("attention_mask"), Tensor) and mask.ndim > 2:
            return np.zeros(len(ids), dtype=np.uint64)
        starts = np.zeros(len(ids), dtype=np.int64)
        for start in sorted(set(batch.claimed_starts(row))):
            starts[start:] = start
        is_given = isinstance(mask, Tensor)
        digests = prefix_digests(ids, starts, attended if is_given else None)
        before = np.concatenate([[np.uint64(0)], digests[:-1]])
        return np.where(starts == np.arange(len(ids)), np.uint64(0), before)

    def _require_numbers(self) -> None:
        """Raises ValueError if a loss, or a number of a token, is NaN or infinite."""
        for n, loss in enumerate(self._losses, 1):
            if not math.isfinite(loss):
                raise ValueError(f"the loss of step {n} is {loss}; {_NO_NUMBER_REMEDY}")
        for name, number in not_finite(self._tokens.joined()).items():
            raise ValueError(f"the {name} of {counted(number, 'tokens')} is no finite number; {_NO_NUMBER_REMEDY}")

    def finish(self, facts: Mapping[str, Any]) -> TokenRecord:
        """Returns the record of the steps that were added."""
        if not self._losses:
            raise ValueError("the trainer makes no batch")
        self._require_numbers()
        tokens, factor = self._tokens.joined(), self._factors[0]
        is_scaled = all(_is_near(each, factor) for each in self._factors) and _is_simple(factor)
        factor = factor if is_scaled and not _is_near(factor, 1.0) else 1.0
        tokens["weight"] = tokens["weight"] * factor  # those of the loss, whose gradient has another size
        module = self.model.module
        named = list(module.named_parameters())
        texts = {str(n): self.tokenizer.decode([int(n)]) for n in np.unique(tokens["id"])} if self._with_text else {}
        special = {name: getattr(self.tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        own = {
            "losses": self._losses,
            "gradient_of_loss": 1 / factor,
            "num_skipped": self._num_skipped,
            "model": type(self.model.unwrapped).__name__,
            "model_type": getattr(self.model.config, "model_type", ""),
            "attention": str(getattr(self.model.config, "_attn_implementation", "")),
            "dtypes": sorted({str(each.dtype).removeprefix("torch.") for _, each in named}),
            "is_rounded": self.model.is_rounded,
            "weight_norms": {
                name: float(each.detach().double().norm()) for name, each in named if each.is_floating_point()
            },
            "trainable": sum(each.numel() for _, each in named if each.requires_grad),
            "special_ids": special,
            "texts": texts,
            "versions": installed_versions(),
        }
        sketches = np.stack(self._sketches) if self._sketches else np.zeros((0, 0), dtype=np.uint64)
        return TokenRecord(tokens, sketches, {**self._facts, **own, **facts})


def _loss_of(read: Sequence[ReadCall]) -> float:
    return math.fsum(each.loss for each in read)


def _is_near(value: float, other: float) -> bool:
    return abs(value - other) <= _SAME_LOSS * max(abs(value), abs(other))


def _is_simple(factor: float) -> bool:
    """Returns whether a factor is a small whole number, or one divided by it, as of a division that is made twice."""
    whole = max(factor, 1 / factor) if factor > 0 else 0.5
    return abs(whole - round(whole)) <= _SAME_LOSS * whole


def _facts_of(trainer: Any, batches: TrainerBatches, steps: Sequence[Step]) -> dict[str, Any]:
    """Returns the facts of a trainer's run: its optimizer, its schedule, its batches and its seeds."""
    args, data, declared = trainer.args, trainer.train_dataset, Declared.of(trainer)
    optimizer = new_optimizer(trainer)
    num_rows = len(data) if hasattr(data, "__len__") else 0
    num_steps = num_steps_of(trainer, num_rows) if num_rows or args.max_steps > 0 else 0
    rates = list[float]()
    with suppress(Exception):  # of a schedule that needs more than steps
        rates = list(islice(rates_of(trainer, num_steps), max(1, num_steps)))
    return {
        "trainer": f"{type(trainer).__module__.partition('.')[0]} {type(trainer).__name__}",
        "library": declared.library,
        "columns": list(getattr(data, "column_names", None) or ()),
        "is_assistant_only": declared.is_assistant_only,
        "is_wrapped": declared.is_wrapped,
        "is_completion_only": declared.is_completion_only,
        "arguments": sorted(steps[0].batches[0].seen) if steps else [],
        "num_items": [None if each.num_items is None else int(each.num_items) for each in steps],
        "optimizer": {"name": type(optimizer).__name__, "groups": groups_of(optimizer)},
        "max_grad_norm": args.max_grad_norm,
        "rates": {"num_steps": num_steps, "first": rates[:_NUM_RATES], "last": rates[-_NUM_RATES:],
                  "highest": max(rates, default=None)},
        "batching": {"rows": trainer._train_batch_size, "micro_batches": args.gradient_accumulation_steps},
        "num_rows": num_rows,
        "callbacks": own_callbacks(trainer),
        "seeds": {"seed": args.seed, "data_seed": args.data_seed},
    }  # fmt: skip
