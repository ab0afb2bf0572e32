"""The faults that were found, each with the program that shows it without sftron, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A reason for which rows of configurations fail.

    Attributes:
        program: The name of its program in tools/failures/programs, which exits with 1 if the fault shows, and its
            argument, if it takes one.
        library: The library whose configurations have it.
        configurations: Their names.
        rows: The rows that fail because of it.
        what: What happens, and whether the library documents it.
        avoid: How to avoid it.
        threads: Threads upstream that were read, as repository#number.
    """

    program: str
    library: str
    configurations: tuple[str, ...]
    rows: tuple[str, ...]
    what: str
    avoid: str
    threads: tuple[str, ...] = ()


_TRL = (
    Fault(
        "trl_default_trains_prompts", "TRL", ("default",), ("trained tokens",),
        "Rows of messages train every token, questions and system prompts too. Documented.",
        "Rows of prompt and completion, or `assistant_only_loss=True`.",
        ("huggingface/trl#3315",),
    ),
    Fault(
        "trl_packing_cuts bfd_split", "TRL", ("packing_split",), ("ids", "truncation"),
        "A conversation longer than `max_length` goes on in another document, without its beginning. Documented.",
        "`max_length` above the longest conversation.",
        ("huggingface/trl#5075",),
    ),
    Fault(
        "trl_packing_cuts wrapped", "TRL", ("packing_wrapped",), ("ids", "truncation"),
        "The stream of all conversations is cut each `max_length` tokens. Documented.",
        '`packing_strategy="bfd"` with `max_length` above the longest conversation.',
        ("huggingface/trl#3067",),
    ),
    Fault(
        "trl_wrapped_leaks", "TRL", ("packing_wrapped",), ("isolation", "positions"),
        "The rows have no positions, so each conversation attends to those before it. Documented.",
        '`packing_strategy="bfd"`.',
        ("huggingface/trl#3067",),
    ),
    Fault(
        "trl_thoughts", "TRL", ("thoughts",), ("ids",),
        "TRL renders its own copy of Qwen 3's template, which keeps the thought of every answer; the tokenizer's own, "
        "with which the model is saved, leaves out those of earlier answers. Documented.",
        "Rows of prompt and completion, one for each answer.",
        ("huggingface/trl#5824",),
    ),
    Fault(
        "trl_max_length_cuts", "TRL", ("truncation",), ("truncation",),
        "Answers end where the limit is, without a stop token. Documented.",
        "`max_length` above the longest conversation.",
    ),
    Fault(
        "trl_control_text", "TRL", ("control_text",), ("forgery",),
        "The text becomes control tokens, and so a turn that nobody wrote.",
        "Refuse or escape such texts where the rows are made.",
        ("huggingface/transformers#29279",),
    ),
)  # fmt: skip

_TRANSFORMERS = (
    Fault(
        "transformers_counts_first_tokens", "transformers", ("default", "whole_texts"), ("loss",),
        "Before 5.10, `num_items_in_batch` counts the first token of each row if it has a label, although no label is "
        "predicted for it: the loss of each step is too small.",
        "transformers 5.10, or a label of -100 for the first token of each row.",
        ("huggingface/transformers#46204",),
    ),
    Fault(
        "transformers_masks_stops", "transformers", ("default",), ("trained tokens", "stop tokens"),
        "The collator masks every padding token, and here that is the stop token: no answer learns to end.",
        "Another `pad_token`, or labels of one's own with `DataCollatorForSeq2Seq`.",
        ("huggingface/transformers#23530",),
    ),
    Fault(
        "transformers_cuts", "transformers", ("truncation",), ("truncation",),
        "Answers end where the limit is, without a stop token. Documented.",
        "`max_length` above the longest conversation.",
    ),
    Fault(
        "transformers_control_text", "transformers", ("control_text",), ("forgery",),
        "The text becomes control tokens, and so a turn that nobody wrote.",
        "From 5.23, `sanitize_control_tokens=True`, with which no mask of the answers is returned; else refuse or "
        "escape such texts.",
        ("huggingface/transformers#29279", "huggingface/transformers#47386"),
    ),
)  # fmt: skip

FAULTS = (*_TRL, *_TRANSFORMERS)
