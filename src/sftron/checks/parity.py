"""Comparison of LlamaForSFT with transformers on equal weights: logits, packing, generation, export (laws 7 and 9).

The reference is transformers' own class in fp32 with eager attention: plain matrix products and a softmax, which share
no attention kernel with LlamaForSFT.

    shape suffixes: T tokens, V vocab_size
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sftron.checkpoint.adapter import read_adapter
from sftron.checkpoint.hf_weights import load_model
from sftron.checkpoint.merge import kl_divergences
from sftron.checkpoint.model_folder import read_config, read_json, stop_ids_of
from sftron.checkpoint.source import ExportSource, lacking_for_loaders
from sftron.checks.isolation import isolation_of_pack
from sftron.checks.reference import load_reference
from sftron.checks.report import Check, Report
from sftron.checks.round_trip import check_adapter_round_trip, check_round_trip
from sftron.models.adapters import AdapterStart
from sftron.models.attention import describe_backends
from sftron.models.experts import rounds_with_neighbors
from sftron.models.generation import greedy_generate
from sftron.models.llama import LlamaForSFT, attention_of_layers
from sftron.models.quantization import dtype_name
from sftron.train.build_data import read_questions
from sftron.visible_text import counted

Ids = list[int]

Prompt = Sequence[dict[str, str]]
"""Messages ({"role", "content"}) for `tokenizer.apply_chat_template`; the last one is from the user."""

EXAMPLE_PROMPTS: tuple[Prompt, ...] = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write one sentence about the sea."}],
    [{"role": "user", "content": "What is 17 + 25? Think step by step."}],
    [{"role": "user", "content": "Translate to German: good morning, my friend."}],
    [
        {"role": "user", "content": "Which planet is the largest?"},
        {"role": "assistant", "content": "Jupiter"},
        {"role": "user", "content": "And the smallest?"},
    ],
)


def read_prompts(path: Path) -> list[Prompt]:
    """Reads prompts from a file, as `evaluation.prompts` does. Raises ValueError with the line of an invalid one."""
    if not path.is_file():
        raise ValueError(f"{path}: is not a regular file, or does not exist; give a JSONL file of prompts")
    if not (questions := read_questions(str(path))):
        raise ValueError(f'{path}: holds no prompt; write lines such as {{"messages": [{{"role": "user", ...}}]}}')
    if with_kwargs := next((question for question in questions if question.template_kwargs), None):
        raise ValueError(f"{with_kwargs.location}: `chat_template_kwargs` are not read here; remove the column")
    return [
        [{"role": message.role.name.lower(), "content": message.content or ""} for message in question.messages]
        for question in questions
    ]


def parity_report(
    model: str, num_prompts: int, dtype: torch.dtype, backends: Sequence[str], checks: Sequence[Check]
) -> Report:
    attention = describe_backends(backends)
    title = f"{model}: {num_prompts} prompts, LlamaForSFT in {dtype_name(dtype)} with attention {attention}"
    facts = {"model": model, "attention": attention, "dtype": dtype_name(dtype), "prompts": num_prompts}
    return Report(title, facts, tuple(checks))


class Distance(NamedTuple):
    """The maximum |a - b| over all logits, and the maximum KL(a | b) over all tokens, in nats."""

    logits: float
    kl: float


FP32_TOLERANCE = Distance(logits=2e-4, kl=2e-8)
"""The bounds for fp32 rounding, given logits of order 10 and dozens of layers; actual mistakes cause larger distances.
If logits differ by at most e, their KL is at most e^2 / 2 (Hoeffding)."""

BF16_SLACK = 1.5
"""In bf16, the tolerance is this multiple of transformers' own bf16 error on the same prompts."""


def check_parity(
    folder: Path,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 24,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    native_folder: Path | None = None,
    adapter: Path | None = None,
) -> Report:
    """Compares LlamaForSFT with transformers on the model in `folder`. Both models are held in memory in fp32.

    Args:
        prompts: The prompts; the model's own chat template renders them.
        max_new_tokens: The maximum length of each greedy generation.
        dtype: The compute type of LlamaForSFT; the reference always computes in fp32.
        device: The device, by default the CPU.
        native_folder: Where LlamaForSFT reads its weights, if not in `folder`; for example, an export.
        adapter: The folder of an adapter in peft's format for both models; peft loads it into transformers' model.

    Raises:
        ValueError: The folder, a prompt or the template cannot be used, the adapter does not fit the model, or peft is
            not installed.
    """
    from transformers import AutoTokenizer

    device = device or torch.device("cpu")
    native_folder = native_folder or folder
    architecture = read_config(native_folder)
    found = None if adapter is None else read_adapter(adapter, architecture)
    start = None if found is None else AdapterStart(spec=found.spec, tensors=found.tensors)
    attention = attention_of_layers("auto", architecture, device, dtype)
    native = load_model(native_folder, attention=attention, compute_dtype=dtype, adapters=start).eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    options = {"add_generation_prompt": True, "return_dict": False}
    prompt_ids: list[Ids] = [tokenizer.apply_chat_template(list(prompt), **options) for prompt in prompts]
    stop_ids = stop_ids_of(folder)
    native.check_positions(max(map(len, prompt_ids)) + max_new_tokens, is_generated=True)
    reference = load_reference(folder, torch.float32, device, adapter)
    tolerance = FP32_TOLERANCE if dtype == torch.float32 else _own_error(folder, adapter, reference, prompt_ids, dtype)
    with torch.inference_mode():
        greedy, answers = check_generation(native, reference, prompt_ids, max_new_tokens, stop_ids, tolerance.logits)
        documents = [ids + answer for ids, answer in zip(prompt_ids, answers, strict=True)]
        checks = [
            *check_logits(native, reference, prompt_ids, tolerance),
            *_check_packing(native, reference, documents, tolerance.logits),
            check_neighbors(native, documents),
            greedy,
            check_round_trip(native, folder, () if found is None else found.tensors),
        ]
        if adapter is None:
            checks.append(_check_loader_keys(folder, native_folder))
        else:
            checks.append(check_adapter_round_trip(native, adapter, folder))
    name = str(folder) if adapter is None else f"{folder} with the adapter {adapter}"
    if found is not None and found.in_nf4:
        name += " (trained on the base in NF4, compared on its unrounded weights)"
    return parity_report(name, len(prompts), dtype, native.attention, checks)


# -- logits ----------------------------------------------------------------------------------------------------------


def _reference_logits(reference: Any, ids: Ids) -> Tensor:
    return reference(torch.tensor([ids], device=reference.device), use_cache=False).logits[0].float()


def native_logits(native: LlamaForSFT, documents: Sequence[Ids]) -> list[Tensor]:
    """Returns the fp32 logits [T, V] of each document, computed on all documents packed into one row."""
    device = native.head_weight.device
    lengths = [len(ids) for ids in documents]
    input_ids = torch.tensor([token_id for ids in documents for token_id in ids], device=device)
    position_ids = torch.cat([torch.arange(length) for length in lengths]).to(device)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    hidden = native(input_ids, position_ids, cu_seqlens, max(lengths))
    head = native.head.to(hidden.dtype)
    return [head.logits(document).float() for document in hidden.split(lengths)]


def _distance(reference_TV: Tensor, other_TV: Tensor) -> Distance:
    kl_T = kl_divergences(reference_TV, other_TV)
    return Distance((other_TV - reference_TV).abs().max().item(), kl_T.max().item())


def _own_error(
    folder: Path, adapter: Path | None, reference: Any, prompt_ids: Sequence[Ids], dtype: torch.dtype
) -> Distance:
    """Returns the distance of transformers in `dtype` from transformers in fp32, times BF16_SLACK."""
    rounded = load_reference(folder, dtype, reference.device, adapter)
    with torch.inference_mode():
        errors = [_distance(_reference_logits(reference, ids), _reference_logits(rounded, ids)) for ids in prompt_ids]
    return Distance(*(BF16_SLACK * torch.tensor(errors, dtype=torch.float64).amax(0)).tolist())


def _bounded(name: str, value: float, bound: float, note: str = "") -> Check:
    return Check(name, value <= bound, f"{value:.2e}{note}", f"<= {bound:.2e}", value=value)


def check_logits(
    native: LlamaForSFT, reference: Any, prompt_ids: Sequence[Ids], tolerance: Distance
) -> tuple[Check, Check]:
    """Compares the logits of each prompt separately."""
    distances = [_distance(_reference_logits(reference, ids), native_logits(native, [ids])[0]) for ids in prompt_ids]
    # The maximum of a tensor with NaN is NaN; the built-in max might ignore it.
    (logits, kl), (worst, _) = (each.tolist() for each in torch.tensor(distances, dtype=torch.float64).max(0))
    return (
        _bounded("logits, alone: max |native - reference|", logits, tolerance.logits, f" (prompt {worst})"),
        _bounded("logits, alone: max KL(reference | native), nats", kl, tolerance.kl),
    )


def _check_packing(
    native: LlamaForSFT, reference: Any, documents: Sequence[Ids], tolerance: float
) -> tuple[Check, Check]:
    """Compares packed documents with separate ones, in transformers (best token) and in the native model (logits)."""
    num_tokens = num_ties = num_wrong = 0
    difference = torch.zeros(())
    for ids, packed_TV in zip(documents, native_logits(native, documents), strict=True):
        (alone_TV,) = native_logits(native, [ids])
        difference = torch.maximum(difference, (packed_TV - alone_TV).abs().max().cpu())
        wanted = _reference_logits(reference, ids).argmax(-1)
        best, chosen = packed_TV.max(-1)
        margin = best - packed_TV.gather(1, wanted[:, None]).squeeze(1)
        # The argmax of NaN logits is meaningless, even if both models return the same token.
        is_sound = packed_TV.isfinite().all(-1)
        is_tie = margin <= 2 * tolerance
        num_tokens += len(ids)
        num_ties += int((is_sound & (chosen != wanted) & is_tie).sum())
        num_wrong += int((~is_sound | (chosen != wanted) & ~is_tie).sum())
    ties = f", {num_ties} ties" if num_ties else ""
    return (
        Check(
            f"top-1, {len(documents)} documents packed vs reference alone",
            num_wrong == 0,
            f"{num_tokens - num_ties - num_wrong} of {num_tokens} tokens{ties}",
            "all, ties aside",
        ),
        _bounded("logits, native packed vs native alone: max difference", difference.item(), tolerance),
    )


def check_neighbors(native: LlamaForSFT, documents: Sequence[Ids]) -> Check:
    """Changes some documents in turn, then all second halves. No bit of the logits of others may change; with experts,
    they may change by four times the rounding."""
    name = "logits when a packed neighbor changes"
    if len(documents) == 1:
        return Check(name, None, "not measured: a single prompt has no neighbor", "0, to the bit")
    lengths, longest = [len(ids) for ids in documents], max(documents, key=len)
    found = isolation_of_pack(
        lambda ids: torch.cat(native_logits(native, [each.tolist() for each in ids.split(lengths)])),
        torch.tensor([token_id for ids in documents for token_id in ids]),
        lengths,
        lambda: rounding_of_experts(native, lambda number: native_logits(native, [longest] * number)),
    )
    return Check(name, found.passed, found.measured, found.allowed)


_NUM_COPIES = (2, 3, 5)


def rounding_of_experts(model: LlamaForSFT, outputs: Callable[[int], Sequence[Tensor]]) -> float:
    """Returns how much neighbors may change outputs by rounding: 0.0, except for experts that are computed in a loop.

    The products of an expert have more rows if the pack has copies of a document, from which nothing leaks. Rounding
    depends on a product's number of rows and on a row's place in it, so several numbers and all places are measured.

    Args:
        outputs: Returns the outputs of each of this number of copies in a pack.
    """
    if not rounds_with_neighbors(model, model.compute_dtype):
        return 0.0
    (alone,) = outputs(1)
    largest = max((alone - copy).abs().max().item() for number in _NUM_COPIES for copy in outputs(number))
    # Copies may round alike by chance where neighbors do not; fp32 sums then differ by a few units in the last place.
    least = max(torch.finfo(model.compute_dtype).eps / 4, 2 * torch.finfo(torch.float32).eps)
    return max(largest, least * alone.abs().max().item())


# -- generation ------------------------------------------------------------------------------------------------------


def check_generation(
    native: LlamaForSFT,
    reference: Any,
    prompt_ids: Sequence[Ids],
    max_new_tokens: int,
    stop_ids: dict[int, None],
    tolerance: float,
) -> tuple[Check, list[Ids]]:
    """Compares greedy generations token by token. They may diverge at a tie, where the two best logits differ by at
    most twice the tolerance.

    Returns the check, whose details are the divergences, and transformers' new tokens for each prompt.
    """
    expected = [_reference_greedy(reference, ids, max_new_tokens, stop_ids) for ids in prompt_ids]
    generations = [greedy_generate(native, ids, max_new_tokens, stop_ids) for ids in prompt_ids]
    divergences, num_ties = [], 0
    for prompt, (generation, reference_ids) in enumerate(zip(generations, expected, strict=True)):
        for step, (token_id, reference_id) in enumerate(zip_longest(generation.token_ids, reference_ids)):
            if token_id != reference_id:
                # The native model's logit of its own token minus its second-best logit; None is after the end.
                margin = math.inf if token_id is None else generation.margins[step]
                is_tie = margin <= 2 * tolerance
                num_ties += is_tie
                divergences.append(
                    f"prompt {prompt}, step {step}: native {token_id}, transformers {reference_id}, "
                    f"native margin {margin:.2e}{' (a tie: rounding decides)' * is_tie}"
                )
                break
    # The argmax of NaN logits is an ordinary id, which the reference may choose as well.
    num_unsound = sum(not all(map(math.isfinite, generation.margins)) for generation in generations)
    measured = f"{len(expected) - len(divergences)} of {len(expected)} equal"
    measured += f", {num_ties} diverge at a tie" if num_ties else ""
    measured += f", {num_unsound} with logits that are not finite" if num_unsound else ""
    measured += f" ({counted(sum(map(len, expected)), 'tokens')})"
    passed = num_ties == len(divergences) and not num_unsound
    name = "greedy generation vs generate(do_sample=False)"
    return Check(name, passed, measured, "all, ties aside", tuple(divergences)), expected


def _reference_greedy(reference: Any, prompt_ids: Ids, max_new_tokens: int, stop_ids: dict[int, None]) -> Ids:
    """Returns the new tokens of transformers' greedy generation."""
    inputs = torch.tensor([prompt_ids], device=reference.device)
    output = reference.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=next(iter(stop_ids), 0),
    )
    return output[0, len(prompt_ids) :].tolist()


def _check_loader_keys(folder: Path, native_folder: Path) -> Check:
    """Checks the export in `native_folder` or, if that is `folder`, the export that it would get."""
    source, is_export = ExportSource.read(folder), native_folder != folder
    config = read_json(native_folder / "config.json") if is_export else source.exported_config(torch.float32)
    measured = "all in config.json"
    if lacking := lacking_for_loaders(config):
        measured = f"config.json lacks {', '.join(lacking)}"
    elif not is_export and (added := lacking_for_loaders(source.config)):
        measured = f"an export adds {', '.join(added)}"
    return Check("what loaders need, in an export", not lacking, measured, "nothing missing")
