"""Checks of a run with adapters: it trains nothing else, and its merge and export compute what was trained."""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from sftron.checkpoint.adapter import WEIGHTS, write_adapter
from sftron.checkpoint.hf_weights import SafetensorsFolder, load_model
from sftron.checkpoint.merge import MOST_KL, MergeReport, largest_kl, logits_of, merged_weights
from sftron.checkpoint.source import ExportSource
from sftron.checks.parity import FP32_TOLERANCE, check_logits
from sftron.checks.reference import attach_adapter, load_rounded_reference
from sftron.checks.report import Finding, NotMeasuredError
from sftron.checks.round_trip import check_adapter_round_trip, digest
from sftron.checks.subject import Subject
from sftron.models.adapters import (
    ALL_LINEAR,
    MAGNITUDE,
    SAVED_MODULES,
    A,
    AdapterStart,
    B,
    LoraSpec,
    peft_name,
    selected_names,
)
from sftron.models.llama import LlamaForSFT
from sftron.models.quantization import as_computed, dtype_name
from sftron.models.wrappers import TEXT_MODEL, WRAPPED
from sftron.train.build_model import adapter_tensors, make_optimizer
from sftron.train.objective import TokenLoss
from sftron.train.run import frozen_dtype
from sftron.train.step import train_step

_NUM_STEPS, _NUM_DOCUMENTS = 3, 4
"""A fresh lora_A has no gradient in the first step, because lora_B is zero."""

_SAME_LOGITS = 2 * FP32_TOLERANCE.logits
"""A merge rounds every weight once more."""


def _spec(subject: Subject) -> LoraSpec:
    adapters = subject.setup.model.adapters
    assert adapters is not None
    return adapters.start.spec


# --- Steps of the optimizer ---


def base_unchanged(subject: Subject) -> Finding:
    steps = _take_steps(subject)
    wrong = sorted(name for name, digest in steps.base_before.items() if steps.base_after[name] != digest)
    measured = f"{_NUM_STEPS} steps change {len(wrong) or 'none'} of {len(steps.base_before)} tensors"
    return Finding(not wrong, measured, "none, to the bit", tuple(wrong[:5]))


def adapters_move(subject: Subject) -> Finding:
    steps, expected = _take_steps(subject), configured_shapes(subject)
    wrong = [f"{name} {list(expected[name])} is configured but not trained" for name in expected.keys() - steps.trained]
    wrong += [f"{name} is trained but not configured" for name in steps.trained.keys() - expected.keys()]
    for name in sorted(steps.trained.keys() & expected.keys()):
        if steps.trained[name] != expected[name]:
            wrong.append(f"{name} has {list(steps.trained[name])}, but {list(expected[name])} is configured")
        elif name not in steps.moved or name not in steps.reached:
            wrong.append(
                f"{name} {'has a gradient' if name in steps.reached else 'has no gradient'} and does not change"
            )
    num_moved = len(steps.moved & steps.reached & expected.keys())
    numbers = sum(shape.numel() for shape in expected.values())
    measured = f"{num_moved} of {len(expected)} tensors ({numbers:,} numbers)"
    return Finding(not wrong, measured, "all, and no others", tuple(sorted(wrong)[:5]))


@dataclass(frozen=True, slots=True)
class _Steps:
    """The changes of some training steps. Trained tensors are named by `peft_name`, all others by their native name."""

    base_before: dict[str, str]
    base_after: dict[str, str]
    trained: dict[str, torch.Size]
    moved: set[str]
    reached: set[str]
    """The tensors with a gradient other than zero."""


@lru_cache(maxsize=1)
def _take_steps(subject: Subject) -> _Steps:
    """Trains a few steps from the start of the run, then undoes them."""
    batch, expected = subject.batch(subject.require_documents(1)), configured_shapes(subject)
    with subject.at_start() as model:
        base = {name: each for name, each in model.named_parameters() if peft_name(name) not in expected}
        base = {name: each for name, each in base.items() if ".adapters." not in name}
        trained = {peft_name(name): each for name, each in model.named_parameters() if each.requires_grad}
        start = {name: each.detach().clone() for name, each in trained.items()}
        before = {name: digest(each) for name, each in base.items()}
        reached: set[str] = set()
        hooks = [_note_gradient(name, each, reached) for name, each in trained.items()]
        optimizer = make_optimizer(subject.config, model.train())
        for _ in range(_NUM_STEPS):
            bound = subject.config.optimizer.max_grad_norm
            train_step(model, optimizer, [batch], TokenLoss(subject.loss), max_grad_norm=bound)
        for hook in hooks:
            hook.remove()
        moved = {name for name, each in trained.items() if not each.detach().equal(start[name])}
        shapes = {name: each.shape for name, each in trained.items()}
        after = {name: digest(each) for name, each in base.items()}
        return _Steps(before, after, shapes, moved, reached)


def _note_gradient(name: str, parameter: nn.Parameter, reached: set[str]) -> torch.utils.hooks.RemovableHandle:
    def note(each: Tensor) -> None:
        if each.grad is not None and each.grad.any():
            reached.add(name)

    return parameter.register_post_accumulate_grad_hook(note)


def configured_shapes(subject: Subject) -> dict[str, torch.Size]:
    """Returns the shapes of the tensors that `lora` configures, by `peft_name`.

    They follow from the configuration and the shapes in the model's files, not from the modules of the model.
    """
    options, spec = subject.config.lora, _spec(subject)
    assert options is not None
    with SafetensorsFolder(subject.setup.model.folder) as base:
        stored = {name.removesuffix(".weight"): base.shape(name) for name in base.names() if name.endswith(".weight")}
    # Experts, routers, embeddings and the head have no adapters.
    matrices = {
        name: shape
        for name, shape in stored.items()
        if len(shape) == 2
        and not re.search(r"\.experts\.\d+\.|\.(gate|router(\.proj)?|embed_tokens(_per_layer)?)$|^lm_head$", name)
    }
    if options.adapter is not None:
        chosen = _adapted_in(Path(options.adapter))
    elif options.targets == ALL_LINEAR:
        chosen = set(matrices)
    elif isinstance(options.targets, str):
        chosen = set(selected_names(options.targets, matrices))
    else:
        chosen = {name for name in matrices for end in options.targets if f".{name}".endswith(f".{end}")}
    shapes: dict[str, torch.Size] = {}
    for name in sorted(chosen):
        num_rows, width = matrices[name]
        rank = spec.ranks.get(name, options.rank or 0)
        shapes |= {f"{name}.{A}.weight": torch.Size([rank, width]), f"{name}.{B}.weight": torch.Size([num_rows, rank])}
        if spec.dora:
            shapes[f"{name}.{MAGNITUDE}"] = torch.Size([num_rows])
    architecture = subject.setup.model.architecture
    whole = torch.Size([architecture.vocab_size, architecture.hidden_size])
    return shapes | {f"{SAVED_MODULES[name]}.weight": whole for name in spec.modules_to_save}


def _adapted_in(folder: Path) -> set[str]:
    ending = f".{A}.weight"
    with SafetensorsFolder(folder, WEIGHTS) as source:
        return {
            name.removeprefix("base_model.model.").removesuffix(ending).replace(WRAPPED, TEXT_MODEL)
            for name in source.names()
            if name.endswith(ending)
        }


# --- What the adapters compute ---


def _documents(subject: Subject) -> list[list[int]]:
    return [each.input_ids.tolist() for each in subject.require_documents(1)[:_NUM_DOCUMENTS]]


def exported_is_trained(subject: Subject) -> Finding:
    documents, folder = _documents(subject), subject.scratch / "exported-adapter"
    source = ExportSource.read(subject.setup.model.folder)
    write_adapter(folder, adapter_tensors(subject.model), _spec(subject), source=source, base_model="base")
    reference = load_rounded_reference(subject.setup)
    wrong = attach_adapter(reference, folder)
    with subject.in_fp32() as native, torch.inference_mode():
        logits, kl = check_logits(native.eval(), reference, documents, FP32_TOLERANCE)
        again = check_adapter_round_trip(native, folder, source.folder)
    del reference
    gc.collect()
    checks = (logits, kl, again)
    measured = f"logits {logits.value:.2e} apart, {len(wrong)} wrong keys"
    detail = (*wrong[:5], *(f"{each.name}: {each.measured}, allowed {each.allowed}" for each in checks))
    is_right = not wrong and all(each.passed for each in checks)
    return Finding(is_right, measured, f"<= {FP32_TOLERANCE.logits:.0e}, none", detail)


def adapter_is_merged(subject: Subject) -> Finding:
    options, dtype = subject.config.lora, subject.setup.model.compute_dtype
    assert options is not None
    if not options.merge:
        raise NotMeasuredError("lora.merge is false: no merged model is exported")
    documents, tensors = _documents(subject), adapter_tensors(subject.model)
    with subject.in_fp32() as native:
        trained = logits_of(native.eval(), documents)
    adapted = logits_of(_adapted(subject, tensors), documents)
    merged = logits_of(_merged(subject, tensors, torch.float32), documents)
    rounded = logits_of(_merged(subject, tensors, dtype), documents)
    # The maximum of a tensor with NaN is NaN; the built-in max might ignore it.
    apart = torch.stack([(a - b).abs().max() for a, b in zip(adapted, merged, strict=True)]).max().item()
    kl = largest_kl(trained, rounded)
    measured = f"logits {apart:.1e} apart; in {dtype_name(dtype)}, KL {kl:.1e}"
    allowed = f"<= {_SAME_LOGITS:.0e}; {MOST_KL:g} nats"
    return Finding(apart <= _SAME_LOGITS and kl <= MOST_KL, measured, allowed)


def _adapted(subject: Subject, tensors: Mapping[str, Tensor]) -> LlamaForSFT:
    """Returns the base as training uses it, with the adapters, in fp32."""
    model = subject.setup.model
    return load_model(
        model.folder,
        compute_dtype=torch.float32,
        num_positions=subject.model.rope_tables.num_positions,
        vocab_size=model.architecture.vocab_size,
        initialize_ids=model.initialize_ids,
        device=subject.ranks.device,
        adapters=AdapterStart(spec=_spec(subject), tensors=tensors),
        frozen_dtype=frozen_dtype(subject.config),
    ).eval()


def _merged(subject: Subject, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> LlamaForSFT:
    """Returns the merged model in fp32, with its weights rounded as an export in `dtype` rounds them."""
    planned = subject.setup.model
    with torch.device("meta"):
        model = LlamaForSFT(
            planned.architecture,
            compute_dtype=torch.float32,
            num_positions=subject.model.rope_tables.num_positions,
        )
    model.to_empty(device=subject.ranks.device)
    weights = merged_weights(
        planned.folder,
        tensors,
        _spec(subject),
        MergeReport(dtype),
        read_base=partial(as_computed, dtype=frozen_dtype(subject.config)),
    )
    with torch.no_grad():
        for name, value in weights:
            model.get_parameter(name).copy_(value.to(dtype))
    return model.eval()
