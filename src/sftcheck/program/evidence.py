"""The kinds of failure of each row of the table, and how a program measures them (measurements.py).

A measurement may use `trainer`, `tokenizer`, `rows`, and for conversations and ids `documents`, the ids of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sftcheck.faults import Fault
from sftcheck.program import measurements as texts
from sftcheck.program.rows import Rows


@dataclass(frozen=True)
class Facts:
    """What the check has seen of the trainer, its batches and its template."""

    header: str
    """What the template writes before an answer; "" for nothing."""
    stop: str
    """The token that ends an answer, or should."""
    has_stop: bool
    beginning: str
    """What every conversation begins with."""
    twice: str = ""
    """What a question begins with if the template is applied to what it has written."""
    is_everything: bool = False
    is_text: bool = False
    """Whether the rows are texts without a template."""
    is_marked_by_trl: bool = False
    has_positions: bool = False
    has_mask: bool = False
    is_packed: bool = False
    is_adapter: bool = False
    pads_with_stop: bool = False


@dataclass(frozen=True)
class Evidence:
    """One kind of failure.

    Attributes:
        sentence: What is wrong if the program exits with 1.
        text: The measurement.
        num_rows: The numbers of rows that are tried.
        fits: Whether it measures anything in such a trainer, with such rows.
        given: The arguments that the measurement needs.
        compares: Whether it compares the rows with their conversations.
        faults: The faults that it shows; a kind without faults may show any.
    """

    sentence: str
    text: str
    num_rows: tuple[int, ...] = (1,)
    fits: Callable[[Facts, Rows], bool] = lambda _facts, _rows: True
    given: Mapping[str, str] = field(default_factory=dict)
    compares: bool = False
    faults: tuple[Fault, ...] = ()


_FEW, _PAIRS = (1, 2, 4, 8, 16, 32), (2, 3, 4, 8, 16, 32)


def _is_rendered(facts: Facts, rows: Rows) -> bool:
    is_of_texts = facts.is_text and facts.is_everything  # which have no template
    return bool(facts.header) and not is_of_texts and (rows.is_ids or "text" in rows.columns)


def _has_answers(facts: Facts, _: Rows) -> bool:
    return bool(facts.header and facts.stop) and not facts.is_text and not facts.is_everything


def _is_packed(facts: Facts, _: Rows) -> bool:
    return facts.is_packed


def _is_padded(facts: Facts, _: Rows) -> bool:
    return not facts.is_packed


EVIDENCE: dict[str, tuple[Evidence, ...]] = {
    "ids": (
        Evidence("A row has other ids than the tokenizer's chat template writes.", texts.IDS_DIFFER, compares=True),
        Evidence("A row goes on behind its conversation.", texts.TEXT_AFTER, compares=True),
        Evidence("The chat template is applied twice.", texts.APPLIED_TWICE, fits=lambda facts, _: bool(facts.twice)),
        Evidence("A row does not have the form of the tokenizer's chat template.", texts.NO_HEADER,
                 fits=_is_rendered, faults=(Fault.OTHER_TURNS,)),
        Evidence("The saved tokenizer has no chat template, and the rows were rendered with one.", texts.NO_TEMPLATE,
                 fits=lambda facts, _: not facts.header, faults=(Fault.TEMPLATE_UNSET,)),
    ),
    "trained tokens": (
        Evidence("Labels are other tokens than those at their place.", texts.LABELS_OTHER,
                 faults=(Fault.MASKED_IDS, Fault.SHIFTED_LABELS, Fault.UNSHIFTED_LABELS)),
        Evidence("More is trained than what the model has to write.", texts.TOO_MUCH, fits=_has_answers,
                 faults=(Fault.PROMPTS_TRAINED, Fault.HEADERS_TRAINED)),
        Evidence("What is trained does not begin where an answer does.", texts.PROMPT, fits=_has_answers,
                 faults=(Fault.PROMPTS_TRAINED,)),
        Evidence("Not all is trained that the model has to write.", texts.TOO_LITTLE, fits=_has_answers),
        Evidence("What is trained is not the completion.", texts.COMPLETION,
                 fits=lambda facts, rows: facts.is_text and "completion" in rows.columns),
        Evidence("Tokens are left out of a loss over everything.", texts.EVERYTHING,
                 fits=lambda facts, _: facts.is_everything),
    ),
    "stop tokens": (
        Evidence("The token that ends an answer is not trained.", texts.STOPS,
                 fits=lambda facts, _: bool(facts.stop) and (bool(facts.header) or facts.is_text)),
    ),
    "isolation": (
        Evidence("A conversation of a packed row changes another one.", texts.IN_ONE_ROW, _PAIRS, _is_packed,
                 faults=(Fault.OWN_MASK, Fault.NO_POSITIONS, Fault.CACHE, Fault.MASK_OF_ONES, Fault.NOT_ISOLATED)),
        Evidence("A token is predicted from those after it.", texts.FUTURE, faults=(Fault.FUTURE,)),
        Evidence("A row of a batch changes another one.", texts.IN_OTHER_ROWS, _PAIRS, _is_padded),
    ),
    "positions": (
        Evidence("A conversation is predicted from the one before it.", texts.LABELS_CROSS, _PAIRS, _is_packed,
                 faults=(Fault.LABELS_CROSS,)),
        Evidence("A conversation is computed differently in a packed row than alone.", texts.ALONE_IN_PACK, _PAIRS,
                 _is_packed, faults=(Fault.POSITIONS_RUN_ON,)),
        Evidence("A conversation is computed differently in a batch than alone.", texts.ALONE_IN_BATCH, _FEW,
                 _is_padded),
    ),
    "truncation": (
        Evidence("Conversations are not whole in the batches.", texts.WHOLE, _FEW, compares=True),
        Evidence("Rows have nothing to train.", texts.EMPTY, _FEW, faults=(Fault.ROWS_EMPTY,)),
        Evidence("A row ends before its answer does.", texts.ENDS, _FEW, lambda facts, _: facts.has_stop),
        Evidence("A row begins within a conversation.", texts.BEGINS,
                 fits=lambda facts, _: bool(facts.beginning) and not facts.is_text),
    ),
    "loss": (
        Evidence("A micro-batch has another loss than its token losses, divided by all labels of the step.",
                 texts.MICRO_BATCHES, _PAIRS,
                 faults=(Fault.MEAN_OF_MEANS, Fault.NO_LOSS_KWARGS, Fault.UNDIVIDED, Fault.OTHER_COUNT)),
        Evidence("The loss is over other tokens than the labels.", texts.AT_OTHER_PLACES, _FEW,
                 faults=(Fault.OTHER_LABELS,)),
        Evidence("The loss of a row depends on the rows beside it.", texts.ONE_BY_ONE, _PAIRS,
                 faults=(Fault.BATCH_DEPENDENT,)),
    ),
    "gradients": (
        Evidence("The gradients of a step are not those of its loss.", texts.GRADIENTS, _PAIRS),
    ),
    "padding": (
        Evidence("Padding is trained.", texts.PADDING_TRAINED, _PAIRS, faults=(Fault.PADDING_TRAINED,),
                 fits=lambda facts, _: facts.has_mask or not facts.pads_with_stop),
        Evidence("The attention mask hides text.", texts.TEXT_HIDDEN, faults=(Fault.TEXT_MASKED,),
                 fits=lambda facts, _: facts.has_mask),
        Evidence("Padding is attended to.", texts.ALONE_IN_BATCH, _PAIRS, _is_padded, faults=(Fault.PADDING_ATTENDED,)),
    ),
    "forgery": (
        Evidence("A text's control tokens became control tokens.", texts.CONTROL_TOKENS,
                 fits=lambda facts, rows: rows.has_conversations and not facts.is_text),
        Evidence("A text's control tokens became control tokens.", texts.LONE_ANSWERS,
                 fits=lambda facts, rows: _has_answers(facts, rows) and rows.is_ids),
    ),
    "adapters": (
        Evidence("Trainable tensors are not in the optimizer.", texts.NOT_IN_OPTIMIZER,
                 faults=(Fault.NOT_OPTIMIZED,)),
        Evidence("Trainable tensors are not saved with the adapter.", texts.NOT_SAVED, faults=(Fault.NOT_SAVED,),
                 fits=lambda facts, _: facts.is_adapter),
        Evidence("New tokens are frozen.", texts.UNTRAINED_TOKENS, faults=(Fault.TOKENS_FROZEN,),
                 fits=lambda facts, _: facts.is_adapter),
    ),
    "generation": (
        Evidence("The saved model does not end where it is trained to end.", texts.ENDS_OF_FOLDER,
                 given={"max_steps": "1", "save_strategy": "'no'"}, fits=lambda facts, _: bool(facts.stop)),
    ),
}  # fmt: skip
"""For each row of the table, the kinds of its failure."""
