"""The model of a trainer on several ranks: as `train()` prepares it, and as one process computes the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sftcheck.batches import SeenBatch
from sftcheck.interception import end_forward, intercepted
from sftcheck.trainer.called_model import CalledModel, cross_entropies, shown_of

_OWN_ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
"""The implementations of transformers in which no rank waits for another."""


class ModelOfOneProcess(CalledModel):
    """The trainer's model before it is wrapped, called on whole rows without the trainer's code around it.

    No call waits for another rank, so each rank may call it as often as it likes.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        model = self.unwrapped
        if getattr(self.config, "_attn_implementation", "sdpa") not in _OWN_ATTENTION:
            model.set_attn_implementation("sdpa")

    @cached_property
    def module(self) -> nn.Module:
        return self.trainer.model

    def first_rotations(self, call: Callable[[], Any]) -> list[np.ndarray]:
        """Returns the cosines and sines, float [B or 1, T, D], of the first rotary embedding of each kind that a call
        of the model computes; the call is ended there. Empty if it computes none.
        """
        found = list[np.ndarray]()

        def keep(_module: nn.Module, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            if all(isinstance(each, Tensor) for each in parts):
                found.append(_joined(parts))
                end_forward()

        rotary = [each for each in self.module.modules() if "Rotary" in type(each).__name__]
        with intercepted(rotary, on_output=keep), torch.no_grad():
            call()
        return found

    def hidden(self, batch: SeenBatch, ids: Tensor) -> Tensor:
        self.module.train()
        with self.trainer.compute_loss_context_manager():
            return self._hidden(lambda: self.module(**{**batch.without_labels, "input_ids": ids}))[:, -ids.shape[1] :]


class WrappedModel:
    """A copy of the trainer's model, wrapped as `train()` wraps it; FSDP and context parallelism change it in place.

    This is a collective: every rank has to create it.

    Args:
        trainer: A `transformers.Trainer`, within `restore_after`.
        model: The model to wrap.
    """

    def __init__(self, trainer: Any, model: Any) -> None:
        self.trainer, args = trainer, trainer.args
        prepare = getattr(trainer, "_prepare_for_training", None)
        if prepare is None:
            raise ValueError(
                f"checks on several ranks need transformers 5.9, but {version('transformers')} is installed; install a "
                "newer one, or check the trainer in one process"
            )
        trainer.model = trainer.model_wrapped = model
        trainer.optimizer = trainer.lr_scheduler = None
        if getattr(args, "gradient_checkpointing", False):
            options = getattr(args, "gradient_checkpointing_kwargs", None)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        self.module, _ = prepare(1, None, None)
        self.model, self.optimizer = trainer.model, trainer.optimizer

    @property
    def inner(self) -> Any:
        """The model itself, without wrappers of torch, accelerate and peft."""
        model = self.trainer.accelerator.unwrap_model(self.module, keep_fp32_wrapper=True)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """The parameters by the names that they have without wrappers."""
        model = self.trainer.accelerator.unwrap_model(self.module, keep_fp32_wrapper=True)
        return dict(model.named_parameters())

    @contextmanager
    def in_place(self) -> Iterator[nn.Module]:
        """Gives the trainer this model."""
        names = ("model", "model_wrapped", "optimizer")
        before = [getattr(self.trainer, name) for name in names]
        self.trainer.model, self.trainer.model_wrapped, self.trainer.optimizer = (
            self.model,
            self.module,
            self.optimizer,
        )
        try:
            yield self.module
        finally:
            for name, value in zip(names, before, strict=True):
                setattr(self.trainer, name, value)


def without_dropout(model: nn.Module) -> None:
    """Sets all dropout to 0, because masks differ between a whole row and its parts."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def without_auxiliary_loss(model: Any) -> None:
    """Switches off the loss that balances a mixture's experts: each rank takes its own mean of it."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False


def copy_model(model: nn.Module) -> nn.Module:
    """Returns a copy with weights of its own. Raises ValueError if the device has no room for it."""
    parameters = list(model.parameters())
    needed = sum(each.numel() * each.element_size() for each in parameters)
    needed += sum(4 * each.numel() for each in parameters if each.requires_grad)
    device = next(iter(parameters)).device
    if device.type == "cuda" and needed > (free := torch.cuda.mem_get_info(device)[0]):
        raise ValueError(
            f"the checks compare the wrapped model with a copy, which needs {needed / 1e9:.1f} GB, and {device} has "
            f"{free / 1e9:.1f} GB; check a model of the same kind with fewer layers"
        )
    return copy.deepcopy(model)


def whole(tensor: Tensor) -> Tensor:
    """Returns the whole of a sharded tensor, on the CPU. This is a collective."""
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach().cpu()


# -- what is watched in a step ---------------------------------------------------------------------------------------


def _joined(parts: Sequence[Tensor]) -> np.ndarray:
    real = [torch.view_as_real(each).flatten(-2) if each.is_complex() else each for each in parts]
    values = torch.cat([each.detach().float().cpu() for each in real], dim=-1)
    return (values if values.ndim == 3 else values[None]).numpy()


def _decoder(model: Any) -> nn.Module | None:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return decoder if isinstance(decoder, nn.Module) and decoder is not model else None


@contextmanager
def gradient_places(model: Any) -> Iterator[list[np.ndarray]]:
    """Yields a list that receives, in a backward pass, whether the loss has a gradient in each last hidden state.

    Each is bool [B, T]. The list stays empty if the decoder is not found.
    """
    found = list[np.ndarray]()

    def keep(_module: nn.Module, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda each: found.append((each.abs().amax(dim=-1) > 0).cpu().numpy()))

    decoder = _decoder(model)
    with intercepted([] if decoder is None else [decoder], on_output=keep):
        yield found


@contextmanager
def kept_outputs(model: Any) -> Iterator[list[Tensor]]:
    """Yields a list that receives the last hidden states [B, T, H] of each call; without a decoder, the logits."""
    found = list[Tensor]()

    def keep(_module: nn.Module, output: Any) -> None:
        if (value := shown_of(output)) is not None:
            found.append(value.detach().float())

    with intercepted([_decoder(model) or model], on_output=keep):
        yield found


def loss_sum(model: Any, arguments: Mapping[str, Any], labels: np.ndarray, factor: float, context: Any) -> float:
    """Computes the gradient of the sum of all cross-entropies times a factor. Returns the sum, in fp32.

    Args:
        labels: int [B, T], of the tokens at the same index.
        context: Within it the trainer calls its model, as for autocast.
    """
    model.train()
    with torch.enable_grad():
        with context():
            output = model(**arguments)
        losses = cross_entropies(output, labels)
        (losses.sum() * factor).backward()
    return float(losses.detach().double().sum())


def gradients_of(named: Mapping[str, nn.Parameter], names: Sequence[str]) -> dict[str, Tensor | None]:
    """Returns the gradients as whole fp32 CPU tensors, in the order of the names."""
    return {name: None if (each := named[name].grad) is None else whole(each).float() for name in names}
