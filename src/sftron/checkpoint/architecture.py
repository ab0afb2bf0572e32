"""What a checkpoint's fingerprint says of the model: what its weights mean nothing without, whatever their data."""

from __future__ import annotations

from dataclasses import asdict

from sftron.models.architecture import LlamaConfig

_OF_THE_MODEL = "the model's "


def architecture_facts(config: LlamaConfig) -> dict[str, str]:
    return {f"{_OF_THE_MODEL}{name}": str(value) for name, value in asdict(config).items()}


def is_of_the_model(name: str) -> bool:
    """Whether a name of a fingerprint is of these facts."""
    return name.startswith(_OF_THE_MODEL)
