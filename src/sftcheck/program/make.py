"""The program for a failed row of the table, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sftcheck.program.evidence import EVIDENCE, Evidence
from sftcheck.program.program import Program, comment_of, confirmed
from sftcheck.program.quoting import literal
from sftcheck.program.rebuild import Materials, with_sizes
from sftcheck.program.seen import Suspect, rows_for
from sftcheck.program.shrink import Search, shrunk
from sftron.checks.report import EVALUATION, Check

_MOST_ALONE = 4
_PARTS = ("arguments", "options", "after", "model_lines", "model_options", "tokenizer", "config")
_OF_THE_MODEL = ("isolation", "positions", "loss", "gradients", "padding", "adapters")
"""The rows whose faults do not depend on the tokenizer; with another template, others would be other faults."""


@dataclass(frozen=True)
class Candidate:
    program: Program
    evidence: Evidence
    keeps_texts: bool


def make_script(materials: Materials, check: Check) -> str:
    """Returns the text of the smallest program that was found to show the fault of a row.

    Raises:
        ValueError: None was found; the message says why.
    """
    search, is_evaluation = Search(), check.part == EVALUATION
    parts = _PARTS if check.name in _OF_THE_MODEL else tuple(part for part in _PARTS if part != "tokenizer")
    found = _smallest(search, parts, candidates(materials, check.name, check.faults, is_evaluation=is_evaluation))
    if found is not None:
        return confirmed(found)
    reasons = [*materials.problems, *dict.fromkeys(search.errors)][:3]
    why = f"; {'; '.join(reasons)}" if reasons else ""
    raise ValueError(f"{check.name}: no program of the trainer's parts shows the fault{why}")


def _smallest(search: Search, parts: Sequence[str], candidates: Iterable[Candidate]) -> str | None:
    """Returns the text of the first candidate that shows its fault, made small; None if none does."""
    for candidate in candidates:
        if search.shows(candidate.program):
            kept = ("use_cpu", "bf16", *candidate.evidence.given)
            return shrunk(candidate.program, search, parts, keeps_texts=candidate.keeps_texts, kept=kept).text
    return None


def _kinds(name: str, faults: Collection[str]) -> list[Evidence]:
    return sorted(EVIDENCE[name], key=lambda each: each.order(faults))


def candidates(
    materials: Materials, name: str, faults: Collection[str] = (), *, is_evaluation: bool = False
) -> Iterator[Candidate]:
    """Yields the programs that may show the fault of a row, those with a small model and few rows first."""
    suspects = materials.suspects.get((name, is_evaluation), ())
    for is_reduced in (True, False):
        base = with_sizes(materials, is_small=is_reduced)
        for evidence in _kinds(name, faults):
            for way in _ways(materials, name, suspects):
                for chosen in _choices(suspects, evidence.num_rows):
                    candidate = _candidate(base, materials, evidence, way, chosen, is_evaluation)
                    if candidate is not None and (is_reduced or candidate.program.is_small):
                        yield candidate


def _ways(materials: Materials, name: str, suspects: Sequence[Suspect]) -> Sequence[str]:
    """Returns from what the rows of a program are made.

    TRL makes ids of texts and messages, and keeps these but for packed rows; their labels may be those of the user.
    """
    if not materials.is_trl:
        return ("ids",)
    if suspects and rows_for(suspects[:1], "columns", "", completion_only=False) is not None:
        return ("columns",)
    is_of_labels = name in ("trained tokens", "stop tokens", "forgery")
    return ("conversations", "ids") if materials.is_packing and not is_of_labels else ("ids",)


def _choices(suspects: Sequence[Suspect], numbers: Sequence[int]) -> Iterator[Sequence[Suspect]]:
    for number in numbers:
        if number == 1:
            yield from ([each] for each in suspects[:_MOST_ALONE])
        elif number <= len(suspects):
            yield suspects[:number]


def _candidate(
    base: Program, materials: Materials, evidence: Evidence, way: str, chosen: Sequence[Suspect], is_evaluation: bool
) -> Candidate | None:
    """Returns the program with these rows; None if it cannot be made, or if the evidence measures nothing in it."""
    completion_only, is_single = materials.completion_only, evidence.num_rows == (1,)
    if is_single and way == "conversations":  # of a pack, the first one
        chosen = [replace(chosen[0], contents=chosen[0].contents[:1])]
    rows = rows_for(chosen, way, "eval_" * is_evaluation, completion_only=completion_only)
    training = rows
    if is_evaluation:
        training = rows_for(materials.training_rows[:2], way, "", completion_only=completion_only)
    if rows is None or training is None:
        return None
    facts, extra = materials.facts, ()
    if not rows.is_ids and isinstance(completion := rows.rows[0].get("completion"), list):
        facts = replace(facts, num_answers=sum(each["role"] == "assistant" for each in completion))
    has_own = not rows.is_ids and bool({"messages", "completion"} & rows.columns) and not facts.is_text
    has_own &= way == "conversations" or not any(each.is_given for each in chosen)
    keeps_texts = evidence.compares and not has_own
    if keeps_texts:
        contents = [content for each in chosen for content in each.contents]
        if is_single and len(contents) > 1:
            return None
        if not all(isinstance(each, Mapping) for each in contents):
            if not (facts.is_text and not rows.is_ids):
                return None
        else:
            messages = [each["messages"] for each in contents if isinstance(each, Mapping)]
            extra = (f"conversations = {literal(messages)}",)
            facts = replace(facts, has_conversations=True)
    program = replace(
        base,
        comment=comment_of(evidence.sentence),
        rows=training,
        evaluation=rows if is_evaluation else None,
        arguments={**base.arguments, **evidence.given},
        extra=extra,
        evidence=partial(evidence.lines, facts=facts),
    )
    return Candidate(program, evidence, keeps_texts) if evidence.fits(program, facts) else None


def script_of(materials: Any, checks: Sequence[Check], name: str | None) -> str:
    """Returns the program for a failed row, by default the first one. Raises ValueError with the reason if none is."""
    failed = [each for each in checks if each.passed is False]
    chosen = [each for each in failed if name in (None, each.name)]
    if not chosen:
        names = ", ".join(each.name for each in failed) or "none"
        raise ValueError(f"no row {name!r} has failed; failed: {names}" if name else "no row has failed")
    if not isinstance(materials, Materials):
        raise ValueError(f"{chosen[0].name}: {materials}")
    return make_script(materials, chosen[0])
