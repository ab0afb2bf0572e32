"""check_isolation: whether another trainer's model isolates the conversations of a pack, and the remedy if not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import nn

from sftcheck.program.packed import packed_script
from sftron.checks.isolation import Isolation, documents_of, try_isolation
from sftron.checks.report import NotMeasuredError
from sftron.data.for_transformers import FlattenPacks
from sftron.data.types import Pack

POSITIONS_ALONE = FlattenPacks(return_flash_attn_kwargs=False, return_seq_idx=False)
"""Batches whose only key besides ids and labels is `position_ids`."""


class IsolationError(ValueError):
    """A model lets the conversations of a pack see each other."""

    def __init__(self, message: str, make_script: Callable[[], str]) -> None:
        super().__init__(message)
        self._make_script = make_script

    def script(self) -> str:
        """Returns a program without sftron that shows the leak: documents in one row, before and after others change.

        It builds the smallest model of the class, or loads the model's folder if that is needed, and has the fewest
        documents that show the leak. It exits with 1 if the leak shows, and with 0 if it does not.

        Raises ValueError if no such program shows it; the message says why.
        """
        return self._make_script()


def check_isolation(model: nn.Module, packs: Sequence[Pack], collator: FlattenPacks | None = None) -> Isolation:
    """Checks that conversations of these packs do not attend to each other if transformers' Trainer calls `model`.

    Runs the model several times on the output of the collator (by default `FlattenPacks()`) without its labels: in
    training mode, without gradients, and with the model's own `config.use_cache`, which transformers' Trainer sets to
    false when it is created. One or two packs are sufficient. The mode, buffers, gradients and random state of the
    model are preserved.

    Raises:
        IsolationError: Conversations attend to each other; the message has the model's type and the remedy.
        ValueError: The model rejects such a batch, with the same message. Or nothing can be measured: there is only one
            conversation, or the logits are not finite or do not depend on the tokens.
        DataError: The collator rejects the packs.
    """
    collator = collator or FlattenPacks()
    config, attention = getattr(model, "config", None), _attention_of(model)
    name = getattr(config, "model_type", None) or type(model).__name__
    batch = collator(packs)
    found = try_isolation(model, batch)
    if isinstance(found, NotMeasuredError):
        raise ValueError(f"{name}: {found}") from found
    if isinstance(found, Exception):
        problem = f"does not take packed conversations: {type(found).__name__}: {found}"
    elif found.isolated:
        return found
    else:
        what = "a token changes earlier logits" if found.shows_future else "a conversation changes others' logits"
        setting = repr(collator) + (f", attn_implementation={attention!r}" if attention else "")
        problem = (
            f"does not keep the conversations of a pack apart: with {setting}, use_cache="
            f"{getattr(config, 'use_cache', False)}, changing {what} "
            f"by up to {found.difference or found.past_difference:.2g}; rounding explains {found.rounding:.2g}"
        )
    message = f"{name} {problem}\nWhat keeps them apart: {'; or '.join(_remedies(model, packs, collator))}"
    if isinstance(found, Exception):
        raise ValueError(message) from found
    raise IsolationError(message, partial(_script, model, batch, collator, found))


def _script(model: nn.Module, batch: Mapping[str, Any], collator: FlattenPacks, found: Isolation) -> str:
    documents = [batch["input_ids"][0, each].tolist() for each in documents_of(batch)]
    return packed_script(model, documents, asdict(collator), is_future=found.shows_future)


# -- remedies --------------------------------------------------------------------------------------------------------


def _remedies(model: Any, packs: Sequence[Pack], collator: FlattenPacks) -> Iterator[str]:
    """Yields remedies: first the smallest change that a measurement confirms, then what always works.

    All changes are measured without a cache.
    """
    own, config = _attention_of(model), getattr(model, "config", None)
    changes = [(own, collator), (own, FlattenPacks()), (own, POSITIONS_ALONE)]
    changes += [(attention, collator) for attention in ("sdpa", "eager") if own]
    for attention, keys in changes:
        words = [repr(keys)] * (keys != collator) + [f'attn_implementation="{attention}"'] * (attention != own)
        if getattr(config, "use_cache", False):
            words.append("model.config.use_cache = False, which transformers' Trainer sets when it is made")
        if words and _serves(model, packs, attention, keys):
            yield f"{' and '.join(words)} (measured just now)"
            break
    yield "sftron's own model (`sftron train`, or load_model), where it has this type"
    yield (
        'one conversation a row: PackedDataset(..., packing="none"), per_device_train_batch_size=1 and '
        f"{POSITIONS_ALONE!r}"
    )


def _serves(model: Any, packs: Sequence[Pack], attention: str | None, collator: FlattenPacks) -> bool:
    """Returns whether this attention without a cache isolates conversations; the model's settings are restored."""
    own, use_cache = _attention_of(model), getattr(getattr(model, "config", None), "use_cache", None)
    try:
        if use_cache:
            model.config.use_cache = False
        if attention != own:
            model.set_attn_implementation(attention)
        found = try_isolation(model, collator(packs))
        return isinstance(found, Isolation) and found.isolated
    except ValueError:  # the model has no such attention
        return False
    finally:
        if use_cache:
            model.config.use_cache = use_cache
        if attention != own:
            model.set_attn_implementation(own)


def _attention_of(model: nn.Module) -> str | None:
    """Returns the attention implementation, or None if parts of the model differ, which one name could not restore."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    names = {getattr(config, "_attn_implementation", None) for config in configs}
    return names.pop() if len(names) == 1 else None
