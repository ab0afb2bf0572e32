"""What is said of evaluations: the sets before any weight is loaded, then a line for each set each time."""

from __future__ import annotations

from collections.abc import Iterator

from sftron.data.overlap import Overlap, overlaps
from sftron.train import console
from sftron.train.evaluation import Evaluation
from sftron.train.plan import RunPlan


def describe_sets(plan: RunPlan) -> None:
    """The evaluation sets, and which of their rows are also trained on: the loss of those says nothing."""
    sets = plan.evaluation_sets
    found, num_compared = overlaps([each.preparation for each in sets], plan.preparation) if sets else ([], 0)
    for each, overlap in zip(sets, found, strict=True):
        num_tokens = sum(len(conversation) for conversation in each.conversations)
        dropped = "".join(f"; {count} rows dropped: {reason}" for reason, count in sorted(each.dropped.items()))
        console.say(
            f"evaluation {each.name}: {len(each.conversations):,} conversations, {num_tokens:,} tokens"
            f"{dropped}{'' if num_compared else '; not compared with the training data, which is streamed'}"
        )
        if overlap.places:
            console.say(f"WARNING    {_overlap_words(each.name, overlap, num_compared, plan.preparation.num_rows)}")


def _overlap_words(name: str, overlap: Overlap, num_compared: int, num_rows: int | None) -> str:
    assert overlap.places is not None
    there, here = overlap.places
    part = "" if num_compared == num_rows else f", of which {num_compared:,} of {num_rows:,} were compared"
    return (
        f"{overlap.num_rows:,} rows of {name} are also in the training data{part}; the first: {there} is {here}. "
        "Their loss tells nothing about new data"
    )


def announce_evaluation(plan: RunPlan) -> None:
    """Before the first one: minutes may pass without another line."""
    sizes = [f"{each.name}, {len(each.conversations):,} conversations" for each in plan.evaluation_sets]
    sizes += [f"prompts to answer: {len(plan.questions)}"] * bool(plan.questions)
    console.say(f"evaluation begins, which may take minutes: {'; '.join(sizes)}")


def say_evaluation(evaluation: Evaluation) -> None:
    for line in _lines(evaluation):
        console.say(line)


def _lines(evaluation: Evaluation) -> Iterator[str]:
    """The numbers of evaluations.jsonl, rounded."""
    for name, each in evaluation.sets.items():
        roles = ", ".join(f"{role} {_number(found['loss'])}" for role, found in each.roles.items())
        accuracy = "none" if each.token_accuracy is None else f"{each.token_accuracy:.1%}"
        yield (
            f"eval {evaluation.step:>4} | {name} loss {_number(each.loss)} | accuracy {accuracy} "
            f"| {each.tokens:,} tokens of {each.conversations:,} conversations | by role: {roles}"
        )
    stopped = sum(each.stopped for each in evaluation.answers)
    of_answers = f" | {stopped} of {len(evaluation.answers)} answers ended by themselves" * bool(evaluation.answers)
    yield f"eval {evaluation.step:>4} | {evaluation.seconds:.1f} s{of_answers}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
