"""The releases that the index runs, with the versions of the packages that it installs for each."""

from __future__ import annotations

from dataclasses import dataclass

_BESIDE = ("safetensors==0.8.0", "accelerate==1.15.0", "datasets==5.2.0", "peft==0.21.2")
_OLD = ("tokenizers==0.22.2", "huggingface-hub==1.33.0")
_HUBS = {  # the newest tokenizers and huggingface-hub that each transformers admits
    "5.0.0": (*_OLD, "typer-slim==0.24.0"),
    "5.9.0": _OLD,
    "5.10.0": _OLD,
    "5.23.0": ("tokenizers==0.23.3", "huggingface-hub==2.4.0"),
}


def _transformers(version: str) -> tuple[str, ...]:
    hub = _HUBS.get(version, ("tokenizers==0.23.3", "huggingface-hub==1.33.0"))
    return (f"transformers=={version}", *hub, *_BESIDE)


@dataclass(frozen=True)
class Release:
    """One environment.

    Attributes:
        library: The name that the page has for it.
        module: The module of this folder with its configurations.
        version: Its version, by which the releases of a library are in order.
        beside: The versions of the libraries that decide about the results, as the page prints them.
        pins: Everything that is installed; torch and all other packages are those of the environment of the tool.
        empty: The modules that the library imports and never calls here, for which an empty one stands.
    """

    library: str
    module: str
    version: str
    beside: str
    pins: tuple[str, ...]
    empty: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.library}-{self.version}".lower().replace(" ", "-")


def _trl(version: str, transformers: str) -> Release:
    pins = (f"trl=={version}", *_transformers(transformers))
    return Release("TRL", "of_trl", version, f"transformers {transformers}", pins)


RELEASES = (
    _trl("1.9.0", "5.16.1"),
    _trl("1.11.0", "5.18.0"),
    _trl("1.13.0", "5.19.0"),
    _trl("1.14.1", "5.20.1"),
    _trl("1.16.0", "5.23.0"),
    *(
        Release("transformers", "of_transformers", version, "peft 0.21.2", _transformers(version))
        for version in ("5.0.0", "5.9.0", "5.10.0", "5.16.1", "5.23.0")
    ),
)

NOT_RUN = {
    "unsloth 2026.10": "imports only where it finds a GPU",
    "verl 0.9.1": "its trainers are no `transformers.Trainer`, and need a GPU",
    "prime-rl": "its trainer is no `transformers.Trainer`, and needs a GPU",
}
"""The libraries that are not run, with the reason."""

CONFIGURATIONS = {
    "default": "messages, the library's defaults",
    "answers": "messages, a loss over all answers of a conversation",
    "named_template": "messages, the library's own template",
    "jinja": "messages, the tokenizer's template by another backend",
    "prompt_completion": "prompt and completion",
    "whole_texts": "whole texts, a loss over everything",
    "packing": "packing",
    "packing_neat": "packing, conversations kept apart by an option",
    "packing_split": "packing, long conversations are split",
    "packing_wrapped": "packing, a stream that is cut",
    "padding_free": "padding-free",
    "thoughts": "thoughts in the answers",
    "tool_calls": "tool calls",
    "control_text": "a text spells control tokens",
    "sanitized": "a text spells control tokens, the library's own remedy",
    "truncation": "a limit shorter than some conversations",
    "dropped": "a limit that drops conversations",
    "accumulation": "accumulation of micro-batches with unequal numbers of labels",
    "lora": "LoRA",
    "resume": "a resumed run",
    "evaluation": "an evaluation",
}
"""What each configuration is about, in the order of the page."""
