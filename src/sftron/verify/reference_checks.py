"""Checks of the model against transformers on the user's own rows: weights, logits, greedy answers (law 9)."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

from sftron.checkpoint.hf_export import stop_ids_of
from sftron.data.types import Role
from sftron.models.generation import greedy_generate
from sftron.verify.model_checks import unless_refused
from sftron.verify.parity import (
    FP32_TOLERANCE,
    check_generation,
    check_logits,
    check_round_trip,
    find_divergences,
    load_reference,
    reference_greedy,
)
from sftron.verify.subject import Subject
from sftron.verify.table import Finding, skipped

_NUM_DOCUMENTS, _NUM_PROMPTS, _LONGEST_PROMPT, _NUM_NEW_TOKENS = 4, 3, 256, 12


def check_weights(subject: Subject) -> Finding:
    """Compares every tensor of the model's files with the native one, split again and cast back."""
    if finding := _unless_same_rows(subject):
        return finding
    check = check_round_trip(subject.model, subject.plan.model.folder)
    return Finding(check.passed, check.measured, "every bit", (subject.depth,))


def check_reference(subject: Subject) -> Finding:
    """Compares fp32 logits on the rows' own tokens, and greedy answers to their own prompts."""
    if finding := _unless_same_rows(subject):
        return finding
    folder, documents = (
        subject.plan.model.folder,
        [each.input_ids.tolist() for each in subject.documents[:_NUM_DOCUMENTS]],
    )
    prompts, stop_ids = list(_prompts(subject)), stop_ids_of(folder)
    reference = load_reference(folder, torch.float32, subject.ranks.device)
    try:
        with subject.in_fp32() as model, torch.inference_mode():
            model.eval()
            checks = list(check_logits(model, reference, documents, FP32_TOLERANCE))
            references = [reference_greedy(reference, ids, _NUM_NEW_TOKENS, stop_ids) for ids in prompts]
            generations = [greedy_generate(model, ids, _NUM_NEW_TOKENS, stop_ids) for ids in prompts]
    finally:
        del reference
        gc.collect()
    logits = f"logits {checks[0].measured.split()[0]} apart"
    notes = [f"{check.name}: {check.measured}, allowed {check.allowed}" for check in checks]
    if prompts:
        divergences = find_divergences(generations, references, FP32_TOLERANCE.logits)
        checks.append(check_generation(divergences, generations, references))
        notes.append(f"{checks[-1].name}: {checks[-1].measured}")
        notes += [
            f"prompt {each.prompt} parts at its new token {each.step}, margin {each.margin:.1e}"
            f"{': a tie' * each.is_tie}"
            for each in divergences
        ]
        decode = subject.chat_tokenizer.decode
        notes += [f"answers begin {decode(ids)!r}" for ids in references[:1]]
        equal = f"{len(prompts) - len(divergences)} of {len(prompts)} answers equal"
    else:
        equal = "no prompt short enough to answer"
    detail = (f"{len(documents)} conversations of the rows", *notes, subject.depth)
    return Finding(
        all(check.passed for check in checks), f"{logits}, {equal}", f"<= {FP32_TOLERANCE.logits:.0e}, all", detail
    )


def _unless_same_rows(subject: Subject) -> Finding | None:
    if refused := unless_refused(subject):
        return refused
    if subject.config.tokenizer.add_tokens:
        return skipped("tokenizer.add_tokens changes rows of the embeddings: the model's files are another model")
    if not subject.documents:
        return skipped("no conversation fits into --tokens")
    return None


def _prompts(subject: Subject) -> Iterator[list[int]]:
    """Returns the ids before the first answer of some rows, as they are trained; only short ones, for speed."""
    found = 0
    for row in subject.rows:
        turns = [turn for turn in row.tokenized.turns if turn.role is Role.ASSISTANT and turn.start < turn.end]
        if turns and found < _NUM_PROMPTS and 0 < turns[0].start <= _LONGEST_PROMPT:
            found += 1
            yield row.tokenized.input_ids[: turns[0].start].tolist()
