"""What a trainer declares of its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sftcheck.faults import library_of


@dataclass(frozen=True, slots=True)
class Declared:
    """What a trainer declares of its data; the defaults are those of transformers' Trainer."""

    library: str = ""
    text_column: str = "text"
    """The column of texts."""
    is_packed: bool | None = False
    """Whether rows are packed; None if nothing is declared."""
    is_wrapped: bool = False
    """Whether packs cut conversations."""
    is_completion_only: bool = False
    is_assistant_only: bool = False
    has_training_template: bool = False
    """Whether TRL renders the rows with a copy of the template, with marks around answers."""
    evaluation: tuple[Any, ...] = ()
    """The data sets of the evaluation."""

    @classmethod
    def of(cls, trainer: Any) -> Declared:
        args, data = trainer.args, trainer.eval_dataset
        is_packed = bool(getattr(args, "packing", False))
        return cls(
            library=library_of(trainer),
            text_column=getattr(args, "dataset_text_field", "text"),
            is_packed=is_packed,
            is_wrapped=is_packed and getattr(args, "packing_strategy", "") == "wrapped",
            is_completion_only=bool(getattr(trainer, "completion_only_loss", False)),
            is_assistant_only=bool(getattr(args, "assistant_only_loss", False)),
            has_training_template=bool(getattr(trainer, "chat_template", None)),
            evaluation=tuple(data.values() if isinstance(data, Mapping) else () if data is None else [data]),
        )


OF_A_LOOP = Declared(library="loop", is_packed=None)
"""A loop declares nothing: its rows may be packed, and nothing is evaluated."""
