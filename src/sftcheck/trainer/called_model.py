"""The model of a trainer, called as its training step calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sftcheck.batches import SeenBatch, Step
from sftcheck.interception import end_forward, intercepted
from sftcheck.restore import restore_after
from sftcheck.subject import MovedTensors
from sftron.checks.isolation import rounding_of
from sftron.checks.report import NotMeasuredError
from sftron.data.types import IGNORE_INDEX


@dataclass(frozen=True, slots=True)
class StepLosses:
    """One accumulation of the trainer's own training steps."""

    returned: list[float]
    """The results of `training_step` by micro-batch, without the auxiliary loss of a mixture of experts."""
    sums: list[float]
    """The sum of the cross-entropies of each micro-batch, in the same passes of the decoder."""
    auxiliary: float
    gradients: dict[str, Tensor | None]
    """Those that the steps leave, without the scale of a GradScaler."""
    share: float = 0.0
    """The factor of each micro-batch's auxiliary loss."""


@contextmanager
def _outputs(module: nn.Module | None) -> Iterator[list[Any]]:
    """Yields a list that receives what the module returns in each of its calls; it stays empty without a module."""
    found = list[Any]()
    with intercepted([] if module is None else [module], on_output=lambda _, output: found.append(output)):
        yield found


class CalledModel:
    """The model of a trainer.

    Args:
        trainer: A `transformers.Trainer`, within `restore_after`.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    @cached_property
    def module(self) -> nn.Module:
        """The model as `train()` prepares it: autocast, recomputed activations, and noise on the embeddings."""
        trainer, args = self.trainer, self.trainer.args
        for name in ("activation_checkpointing", "gradient_checkpointing"):  # the older name of the same
            enable = getattr(trainer.model, f"{name}_enable", None)
            if getattr(args, name, False) and enable is not None:
                options = dict(getattr(args, f"{name}_kwargs", None) or {})
                options = {key: value for key, value in options.items() if key not in ("every_n_layers", "offload")}
                enable(**{f"{name}_kwargs": options or None})
                break
        if not args.torch_compile:
            trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model, device_placement=False)
            return trainer.model_wrapped
        return trainer.model

    @property
    def trained(self) -> nn.Module:
        return self.trainer.model

    @property
    def unwrapped(self) -> Any:
        """The model itself, without wrappers of accelerate and peft."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model, keep_fp32_wrapper=True)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    @property
    def decoder(self) -> nn.Module | None:
        """The part before the head; None if it cannot be found."""
        model = self.unwrapped
        found = model.get_decoder() if hasattr(model, "get_decoder") else None
        return found if isinstance(found, nn.Module) and found is not model else None

    @property
    def config(self) -> Any:
        return getattr(self.unwrapped, "config", None)

    @property
    def is_rounded(self) -> bool:
        """Whether it computes in another type than float32."""
        return next(self.unwrapped.parameters()).dtype != torch.float32 or bool(self.trainer.accelerator.native_amp)

    def arguments(self, call: Callable[[], Any]) -> dict[str, Any]:
        """Returns the arguments of the model's call, which is ended there, so nothing is computed."""
        caught: dict[str, Any] = {}

        def catch(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught.update({"input_ids": args[0], **kwargs} if args else kwargs)
            end_forward()

        with intercepted([self.module], on_call=catch):
            call()
        return caught

    def loss_of(self, inputs: Mapping[str, Any], num_items: Any, *, training: bool = True) -> Tensor:
        """Returns what the trainer's `compute_loss` gives for a batch, with its own contexts."""
        inputs = self.trainer._prepare_inputs(dict(inputs))
        torch.manual_seed(0)  # the same dropout in every pass
        self.module.train(training)
        with self.trainer.compute_loss_context_manager():
            return self.trainer.compute_loss(self.module, inputs, num_items_in_batch=num_items)

    def hidden(self, batch: SeenBatch, ids: Tensor) -> Tensor:
        """Returns the last hidden states [B, T, H] of the batch with these ids, within the trainer's `compute_loss`.

        Returns logits [B, T, V] instead if the decoder cannot be found.
        """
        found = self._hidden(lambda: self.loss_of({**batch.inputs, "input_ids": ids}, 1))[:, -ids.shape[1] :]
        if found.shape[1] < ids.shape[1]:
            raise NotMeasuredError("the check finds no decoder, and the model's logits cover only some tokens")
        return found

    def hidden_alone(self, ids: Tensor) -> Tensor:
        """Returns the last hidden states [B, n, H] of ids [B, n] without any other argument, and without dropout."""
        self.module.eval()
        return self._hidden(lambda: self.module(input_ids=ids.to(self.trainer.args.device), use_cache=False))

    def rounding(self, ids: Tensor) -> float:
        return rounding_of(self.module, self.hidden_alone, ids)

    @torch.no_grad()
    def _hidden(self, call: Callable[[], Any], *, is_all: bool = True) -> Tensor:
        """Returns the last hidden states of a call of the model, and ends the call there if `is_all`."""
        found: list[Tensor] = []

        def keep(_module: nn.Module, output: Any) -> None:
            if (value := shown_of(output)) is not None:
                found.append(value.detach())
                if is_all:
                    end_forward()

        torch.manual_seed(0)
        with intercepted([each for each in (self.decoder, self.module) if each is not None], on_output=keep):
            call()
        if not found:
            raise NotMeasuredError("the model shows neither hidden states nor logits")
        return found[0]

    def evaluate_batch(self, batch: SeenBatch) -> tuple[float, Tensor]:
        """Returns the sum of the cross-entropies of a batch and its last hidden states [B, T, H], without dropout."""
        sums = list[float]()
        hidden = self._hidden(lambda: sums.append(self.loss_sum(batch, training=False)), is_all=False)
        return sums[0], hidden[:, -batch.ids.shape[1] :]

    def hidden_in_batch(self, batch: SeenBatch) -> Tensor:
        """Returns the last hidden states [B, T, H] of the batch, without dropout."""
        return self.evaluate_batch(batch)[1]

    def gradient_positions(self, batch: SeenBatch, num_items: Any) -> tuple[int, int]:
        """Counts the labels whose predicting token has no gradient, and the other tokens that have one.

        The gradient is taken at the last hidden states: each predicts the next token.
        """
        if self.decoder is None:
            raise NotMeasuredError("the check finds no decoder, so it cannot tell which tokens the loss trains")
        leaves = list[Tensor]()

        def cut(_module: nn.Module, output: Any) -> Any:
            leaves.append(output.last_hidden_state.detach().requires_grad_())
            output.last_hidden_state = leaves[-1]
            return output

        with intercepted([self.decoder], on_output=cut), torch.enable_grad():
            # In float16, the gradient at a token that is predicted well would be 0 without the factor.
            loss = 1024 * self.loss_of(batch.inputs, num_items, training=False)
            (gradient,) = torch.autograd.grad(loss, leaves[-1])
        has_gradient = (gradient != 0).any(dim=-1)[:, -batch.labels.shape[1] :].cpu().numpy()
        has_label = np.pad(batch.labels[:, 1:] != IGNORE_INDEX, ((0, 0), (0, 1)))
        return int((has_label & ~has_gradient).sum()), int((has_gradient & ~has_label).sum())

    def train(self, step: Step) -> StepLosses:
        """Computes the trainer's own steps of one accumulation, with gradients, together with the cross-entropies."""
        trainer, returned, sums, auxiliary = self.trainer, list[float](), list[float](), list[float]()
        trainer.current_gradient_accumulation_steps = len(step.batches)  # TRL divides by it
        for batch in step.batches:
            trainer.accelerator.gradient_state._set_sync_gradients(batch is step.batches[-1])
            torch.manual_seed(0)
            with self.auxiliary_losses() as found, _outputs(self.decoder) as decoded:
                returned.append(float(trainer.training_step(self.module, dict(batch.inputs), step.num_items)))
            auxiliary += found
            sums.append(self.loss_sum(batch, decoded[-1] if decoded else None))
        gradients = {
            name: None if each.grad is None else self._unscaled(each.grad)
            for name, each in trainer.model.named_parameters()
        }
        trainer.model.zero_grad(set_to_none=True)
        if len(auxiliary) != len(returned):
            return StepLosses(returned, sums, 0.0, gradients)
        share = self.share_of_auxiliary(len(returned), step.num_items)
        returned = [loss - share * each for loss, each in zip(returned, auxiliary, strict=True)]
        return StepLosses(returned, sums, share * max(auxiliary), gradients, share)

    @contextmanager
    def auxiliary_losses(self) -> Iterator[list[float]]:
        """Yields a list that receives the auxiliary loss of a mixture of experts in each call of the model."""
        found = list[float]()
        with _outputs(self.module) as outputs:
            yield found
            losses = [getattr(each, "aux_loss", None) for each in outputs]
        found += [float(each) for each in losses if isinstance(each, Tensor)]

    def share_of_auxiliary(self, num_micro_batches: int, num_items: Any) -> float:
        """Returns the factor of each micro-batch's auxiliary loss in what `training_step` returns."""
        share = getattr(self.trainer, "router_aux_loss_coef", None)
        share = share or getattr(self.config.get_text_config(), "router_aux_loss_coef", 0.0)
        if hasattr(self.trainer, "router_aux_loss_coef") and num_items is not None:
            share /= num_micro_batches  # TRL averages it over the accumulation
        return share

    def expected_gradients(self, step: Step, losses: StepLosses, *, of_entropies: bool) -> dict[str, Tensor]:
        """Computes the gradients of the trained tensors for a step without the trainer's `training_step`.

        Args:
            of_entropies: Whether they are those of the cross-entropies by the number of labels; else they are those of
                the trainer's `compute_loss`, in the size that the step has returned.
        """
        trainer, num_trained = self.trainer, sum(batch.num_trained for batch in step.batches)
        trainer.model.zero_grad(set_to_none=True)
        for batch, returned in zip(step.batches, losses.returned, strict=True):
            with torch.enable_grad(), _outputs(self.module) as outputs:
                loss = self._loss_sum(batch) if of_entropies else self.loss_of(batch.inputs, step.num_items)
                auxiliary = losses.share * outputs[-1].aux_loss if losses.share else 0.0
                if of_entropies:
                    loss = loss / num_trained + auxiliary
                elif size := float(loss.detach()):
                    loss = loss * ((returned + float(auxiliary)) / size)
            (self.scale * loss).backward()
        gradients = {
            name: self._unscaled(torch.zeros_like(each) if each.grad is None else each.grad)
            for name, each in trainer.model.named_parameters()
            if each.requires_grad
        }
        trainer.model.zero_grad(set_to_none=True)
        return gradients

    @property
    def scale(self) -> float:
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    def _unscaled(self, gradient: Tensor) -> Tensor:
        return gradient if self.scale == 1 else gradient / self.scale

    def moves(
        self, named: Mapping[str, nn.Parameter], step: Step, gradients: Mapping[str, Tensor | None]
    ) -> MovedTensors:
        """Takes one or two steps with the trainer's own optimizer, the first with these gradients."""
        trainer = self.trainer
        trainable = {name for name, each in named.items() if each.requires_grad}

        def with_gradient() -> set[str]:
            return {name for name in trainable if (grad := named[name].grad) is not None and bool(grad.any())}

        with restore_after(trainer):
            before = {name: each.detach().clone() for name, each in named.items()}
            optimizer = new_optimizer(trainer)
            held = {id(each) for group in optimizer.param_groups for each in group["params"]}
            for name, gradient in gradients.items():
                named[name].grad = gradient
            found, num_steps = with_gradient(), 1
            optimizer.step()
            if found != trainable:  # as an adapter's A, while its B is zero
                num_steps = 2
                trainer.model.zero_grad(set_to_none=True)
                batch = min(step.batches, key=lambda each: (not each.num_trained, each.ids.size))
                trainer.training_step(self.module, dict(batch.inputs), step.num_items)
                found |= with_gradient()
                optimizer.step()
            moved = {name for name, each in named.items() if not each.equal(before[name])}
        return MovedTensors(num_steps, {name for name, each in named.items() if id(each) in held}, found, moved)

    @torch.no_grad()
    def loss_sum(self, batch: SeenBatch, decoded: Any = None, *, training: bool = True) -> float:
        """Returns the sum of the cross-entropies of all labels of a batch, in fp32, from the model's own logits.

        Args:
            decoded: What the decoder has returned for the batch; by default it is computed.
        """
        return float(self._loss_sum(batch, decoded, training=training))

    def _loss_sum(self, batch: SeenBatch, decoded: Any = None, *, training: bool = True) -> Tensor:
        torch.manual_seed(0)
        self.module.train(training)
        with ExitStack() as stack:
            if decoded is not None:
                attributes = vars(self.decoder)
                stack.callback(attributes.update, dict(attributes))
                stack.callback(attributes.pop, "forward")
                attributes["forward"] = lambda *_args, **_options: decoded
            stack.enter_context(self.trainer.compute_loss_context_manager())
            output = self.module(**batch.without_labels)
        return cross_entropies(output, batch.labels).double().sum()


def cross_entropies(output: Any, labels: np.ndarray) -> Tensor:
    """Returns the cross-entropy of each label, fp32 [n], from what a model returns.

    Args:
        labels: int [B, T], of the tokens at the same index; the last T logits are theirs.
    """
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise NotMeasuredError("the model gives no logits")
    targets = torch.from_numpy(labels[:, 1:].astype(np.int64)).to(logits.device)
    logits, is_trained = logits[:, -labels.shape[1] : -1], targets != IGNORE_INDEX
    return nn.functional.cross_entropy(logits[is_trained].float(), targets[is_trained], reduction="none")


def shown_of(output: Any) -> Tensor | None:
    """Returns the last hidden states, or else the logits, [B, T, any] that a module has returned; None without them."""
    value = getattr(output, "last_hidden_state", None)
    value = getattr(output, "logits", None) if value is None else value
    return value if isinstance(value, Tensor) and value.ndim == 3 else None


def new_optimizer(trainer: Any) -> Any:
    """Returns an optimizer as the trainer makes it, with no state."""
    if trainer.optimizer is None:
        return trainer.create_optimizer()
    given = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    groups = [{**group, "lr": group.get("initial_lr", group["lr"])} for group in given.param_groups]
    names = inspect.signature(type(given).__init__).parameters
    return type(given)(groups, **{name: value for name, value in given.defaults.items() if name in names})
