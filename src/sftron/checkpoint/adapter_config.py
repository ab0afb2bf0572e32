"""The file adapter_config.json of an adapter in peft's format: ranks, scaling and targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from sftron.checkpoint.model_folder import read_json
from sftron.models.adapters import SAVED_MODULES, LoraSpec
from sftron.models.architecture import LlamaConfig
from sftron.models.wrappers import TEXT_MODEL
from sftron.name_patterns import NamePatterns

CONFIG = "adapter_config.json"
_IRRELEVANT = frozenset(
    {
        # Which layers are adapted follows from the tensors.
        *("layers_to_transform", "layers_pattern", "exclude_modules"),
        *("inference_mode", "lora_dropout", "peft_version", "auto_mapping", "megatron_core", "qalora_group_size"),
    }
)


def _expression(text: str) -> str:
    NamePatterns([text], is_end=True)
    return text


def _other_than_0(value: int | float) -> int | float:
    if value == 0:
        raise ValueError("give a value other than 0, which would scale the adapter to nothing")
    return value


_Rank = Annotated[int, Field(gt=0, le=2**16)]
_Alpha = Annotated[int | float, Field(gt=-1e12, lt=1e12), AfterValidator(_other_than_0)]
_Expression = Annotated[str, AfterValidator(_expression)]


class AdapterConfig(BaseModel):
    """The keys of adapter_config.json that are read, with peft's defaults and the values that are implemented."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    peft_type: Literal["LORA"] = "LORA"
    task_type: Literal["CAUSAL_LM"] = "CAUSAL_LM"
    bias: Literal["none"] = "none"
    # Every other initialization changes the base weights, or needs data.
    init_lora_weights: Literal[True, False, "gaussian", "orthogonal"] = True
    r: _Rank = 8
    lora_alpha: _Alpha = 8
    rank_pattern: dict[_Expression, _Rank] = {}
    alpha_pattern: dict[_Expression, _Alpha] = {}
    use_rslora: bool = False
    use_dora: bool = False
    ensure_weight_tying: bool = False
    target_modules: list[str] | _Expression | None = None
    modules_to_save: list[str] | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Reads adapter_config.json; null is the default, where peft has it so.

    Raises:
        ValueError: A value is not implemented; the message lists all of them.
    """
    stated, never_null = read_json(folder / CONFIG), ("peft_type", "bias", "init_lora_weights")
    problems: list[str] = []
    config = AdapterConfig()
    try:
        config = AdapterConfig.model_validate(
            {key: value for key, value in stated.items() if value is not None or key in never_null}
        )
    except ValidationError as error:
        problems += [f"{problem['loc'][0]}: {problem['input']!r}: {problem['msg']}" for problem in error.errors()]
    # Every other key that peft has is off by default: null, false or empty.
    unknown = sorted(stated.keys() - AdapterConfig.model_fields.keys() - _IRRELEVANT)
    problems += [f"{key}: {stated[key]!r}; sftron supports only null or false" for key in unknown if stated[key]]
    if problems:
        raise ValueError(f"{folder / CONFIG}: not implemented:\n  " + "\n  ".join(problems))
    return config


def renamed(name: str, old: str, new: str) -> str:
    """Returns the name with another prefix. The head's name has neither prefix and stays."""
    return new + name.removeprefix(old) if name.startswith(old) else name


def spec_of(folder: Path, stated: AdapterConfig, adapted: Sequence[str], config: LlamaConfig, prefix: str) -> LoraSpec:
    saved = {_last(name) for name in stated.modules_to_save or ()}
    if unknown := sorted(saved - SAVED_MODULES.keys()):
        raise ValueError(
            f"{folder / CONFIG}: modules_to_save: {unknown[0]!r}; sftron supports only {', '.join(SAVED_MODULES)}"
        )
    if config.tie_word_embeddings and saved:
        if saved != SAVED_MODULES.keys() and not stated.ensure_weight_tying:
            raise ValueError(
                f"{folder / CONFIG}: modules_to_save: {', '.join(sorted(saved))} alone, but the base ties the head to "
                "the embeddings (tie_word_embeddings: true), so peft trained two different matrices. Merge the adapter "
                "with peft into a model with tie_word_embeddings: false, and train that."
            )
        saved = {"embed_tokens"}
    named = {name: renamed(name, TEXT_MODEL, prefix) for name in adapted}
    try:
        ranks = _by_pattern(stated.rank_pattern, named, stated.r)
        alphas = _by_pattern(stated.alpha_pattern, named, stated.lora_alpha)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    return LoraSpec(
        ranks=ranks,
        alphas={name: float(alpha) for name, alpha in alphas.items()},
        rslora=stated.use_rslora,
        dora=stated.use_dora,
        modules_to_save=tuple(name for name in SAVED_MODULES if name in saved),
    )


def _by_pattern(patterns: Mapping[str, Any], names: Mapping[str, str], default: Any) -> dict[str, Any]:
    """Returns each name's value: that of the first pattern that matches the end of its name in `names`, or the default.

    peft's get_pattern_key does the same with `(.*\\.)?(PATTERN)$`.
    """
    compiled = NamePatterns(patterns, is_end=True)
    first = {name: compiled.first(there) for name, there in names.items()}
    return {name: default if pattern is None else patterns[pattern] for name, pattern in first.items()}


def adapter_config(spec: LoraSpec, projections: Collection[str], config: LlamaConfig, prefix: str) -> dict[str, Any]:
    """Returns adapter_config.json without the names of the base. Keys that are absent have peft's defaults.

    Inside a wrapper, names are given in full, because image layers share the last parts of some names.
    """
    rank, rank_pattern = _as_pattern({renamed(name, TEXT_MODEL, prefix): each for name, each in spec.ranks.items()})
    alpha, alpha_pattern = _as_pattern({renamed(name, TEXT_MODEL, prefix): each for name, each in spec.alphas.items()})
    complete = _last_parts(projections)
    targets = {_last(name) if complete[_last(name)] <= spec.ranks.keys() else name for name in spec.ranks}
    if prefix != TEXT_MODEL:
        targets = {renamed(name, TEXT_MODEL, prefix) for name in spec.ranks}
    is_tied = config.tie_word_embeddings and bool(spec.modules_to_save)
    stated = {
        "r": rank or 1,
        "lora_alpha": alpha or 1,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "target_modules": sorted(targets),
        "modules_to_save": sorted(SAVED_MODULES if is_tied else spec.modules_to_save) or None,
        "ensure_weight_tying": is_tied,
        "use_rslora": spec.rslora,
        "use_dora": spec.dora,
    }
    off = {"fan_in_fan_out": False, "lora_dropout": 0.0, "inference_mode": True}
    return AdapterConfig.model_validate(stated).model_dump() | off


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _last_parts(names: Collection[str]) -> dict[str, set[str]]:
    """Returns the names by their last parts."""
    by_last_part: dict[str, set[str]] = {}
    for name in names:
        by_last_part.setdefault(_last(name), set()).add(name)
    return by_last_part


def _as_pattern(values: Mapping[str, float]) -> tuple[float | None, dict[str, float]]:
    """Returns the most frequent value, and the exceptions by the last part of a name, or by the whole name if layers
    differ."""
    exact = {name: int(value) if value == int(value) else value for name, value in values.items()}
    default = max(Counter(exact.values()).items(), key=lambda item: (item[1], item[0]), default=(None, 0))[0]
    pattern: dict[str, float] = {}
    for last, names in _last_parts(exact).items():
        distinct = {exact[name] for name in names}
        keys = {last: distinct.pop()} if len(distinct) == 1 else {name: exact[name] for name in sorted(names)}
        pattern |= {key: value for key, value in keys.items() if value != default}
    return default, pattern
