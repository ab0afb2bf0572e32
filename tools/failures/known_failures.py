"""The failures that were found, each with its fault, the program that shows it without sftron, and what is known."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sftcheck.faults import Fault


@dataclass(frozen=True)
class Failure:
    """A reason for which rows of configurations fail.

    Attributes:
        fault: What the report finds in one of `rows`.
        program: The name of its program in tools/failures/programs, which exits with 1 if the fault shows, and its
            argument, if it takes one.
        library: The library whose configurations have it.
        configurations: Their names.
        rows: The rows that fail because of it.
        what: What happens.
        avoid: How to avoid it.
        threads: Threads upstream that were read, as repository#number.
        is_documented: Whether the library's own documentation or log says so.
    """

    fault: Fault
    program: str
    library: str
    configurations: tuple[str, ...]
    rows: tuple[str, ...]
    what: str
    avoid: str
    threads: tuple[str, ...] = ()
    is_documented: bool = False


_FORGED = Failure(
    Fault.FORGED, "", "", ("control_text",), ("forgery",),
    "The text becomes control tokens, and so a turn that nobody wrote.",
    "Refuse or escape such texts where the rows are made.",
    ("huggingface/transformers#29279",),
)  # fmt: skip
_CUT = Failure(
    Fault.ROWS_CUT, "", "", ("truncation",), ("truncation",),
    "Answers end where the limit is, without a stop token.",
    "`max_length` above the longest conversation.",
    is_documented=True,
)  # fmt: skip
_THOUGHTS = Failure(
    Fault.OTHER_FORMAT, "", "", ("thoughts",), ("ids",),
    "The thoughts of earlier answers are kept, and the template that is saved with the model leaves them out.",
    "Rows whose thought is in the last answer alone.",
)  # fmt: skip
_TOOLS = Failure(
    Fault.OTHER_FORMAT, "", "", ("tool_calls",), ("ids",),
    "Without a system prompt, two line breaks are in front of `# Tools`, and Qwen 3's own template writes none.",
    "A system prompt in rows with tools.",
)  # fmt: skip
"""Those above are failures of several libraries."""

_TRL = (
    Failure(
        Fault.PROMPTS_TRAINED, "trl_default_trains_prompts", "TRL", ("default",), ("trained tokens",),
        "Rows of messages train every token, questions and system prompts too.",
        "Rows of prompt and completion, or `assistant_only_loss=True` where the template has generation marks.",
        ("huggingface/trl#3315",),
        is_documented=True,
    ),
    Failure(
        Fault.CUT_BY_PACKING, "trl_packing_cuts bfd_split", "TRL", ("packing_split",), ("ids", "truncation"),
        "A conversation longer than `max_length` goes on in another document, without its beginning.",
        "`max_length` above the longest conversation.",
        ("huggingface/trl#5075",),
        is_documented=True,
    ),
    Failure(
        Fault.CUT_BY_PACKING, "trl_packing_cuts wrapped", "TRL", ("packing_wrapped",), ("ids", "truncation"),
        "The stream of all conversations is cut each `max_length` tokens.",
        '`packing_strategy="bfd"` with `max_length` above the longest conversation.',
        ("huggingface/trl#3067",),
        is_documented=True,
    ),
    Failure(
        Fault.NO_POSITIONS, "trl_wrapped_leaks", "TRL", ("packing_wrapped",), ("isolation", "positions"),
        "The rows have no positions, so each conversation attends to those before it.",
        '`packing_strategy="bfd"`.',
        ("huggingface/trl#3067",),
    ),
    Failure(
        Fault.TRAINING_TEMPLATE, "trl_thoughts", "TRL", ("thoughts",), ("ids",),
        "TRL renders its own copy of Qwen 3's template, which keeps the thought of every answer; the tokenizer's own, "
        "with which the model is saved, leaves out those of earlier answers.",
        "Rows of prompt and completion, one for each answer.",
        ("huggingface/trl#5824",),
        is_documented=True,
    ),
    replace(_CUT, program="trl_max_length_cuts", library="TRL"),
    replace(_FORGED, program="trl_control_text", library="TRL"),
)  # fmt: skip

_TRANSFORMERS = (
    Failure(
        Fault.OTHER_COUNT, "transformers_counts_first_tokens", "transformers", ("default", "whole_texts"), ("loss",),
        "To 5.10.0, `num_items_in_batch` counts the first token of each row if it has a label, although no label is "
        "predicted for it: the loss of each step is too small.",
        "transformers 5.10.1 (its source was read), or a label of -100 for the first token of each row.",
        ("huggingface/transformers#46204",),
    ),
    Failure(
        Fault.EVERY_TOKEN, "transformers_masks_stops", "transformers", ("default",), ("trained tokens", "stop tokens"),
        "The collator masks every padding token, and here that is the stop token: no answer learns to end.",
        "Another `pad_token`, or labels of one's own with `DataCollatorForSeq2Seq`.",
        ("huggingface/transformers#23530",),
    ),
    replace(_CUT, program="transformers_cuts", library="transformers"),
    Failure(
        Fault.FORGED, "transformers_control_text", "transformers", ("control_text",), ("forgery",),
        "The text becomes control tokens, and so a turn that nobody wrote.",
        "From 5.23, `sanitize_control_tokens=True`, with which no mask of the answers is returned; else refuse or "
        "escape such texts.",
        ("huggingface/transformers#29279", "huggingface/transformers#47386"),
    ),
)  # fmt: skip

_AXOLOTL = (
    Failure(
        Fault.NO_LOSS_KWARGS, "axolotl_faults accumulation", "axolotl", ("accumulation",), ("loss",),
        "The trainer looks for `num_items_in_batch` among the parameters of the decoder's `forward`, finds none, and "
        "averages each micro-batch by itself: a token among few labels counts for more.",
        "`trainer.model_accepts_loss_kwargs = True`.",
        ("axolotl-ai-cloud/axolotl#3982",),
    ),
    Failure(
        Fault.ANSWERS_LEFT_OUT, "axolotl_faults thoughts", "axolotl", ("thoughts",), ("trained tokens",),
        "`<think>`, with which the last answer begins in Qwen 3's format, has no label, and the generation prompt does "
        "not write it.",
        "None is known.",
        ("axolotl-ai-cloud/axolotl#3088",),
    ),
    Failure(
        Fault.ANSWERS_LEFT_OUT, "axolotl_faults empty_thought", "axolotl", ("tool_calls",), ("trained tokens",),
        "The empty thought that Qwen 3's template writes in front of the last answer has no label. It is no fault if "
        "the model is served with `enable_thinking=False`, whose prompt writes it.",
        "None is known.",
        ("axolotl-ai-cloud/axolotl#3088",),
    ),
    Failure(
        Fault.EVERY_TOKEN, "axolotl_faults whole_texts", "axolotl", ("whole_texts",), ("trained tokens",),
        "Of the text of the template, only stop tokens have labels: `labels` are set from the first to the last "
        "character of each message, found by its content, and headers are outside of all.",
        "None is known.",
    ),
    Failure(
        Fault.ROWS_CUT,
        "axolotl_faults truncation", "axolotl", ("truncation",), ("truncation", "ids", "stop tokens", "trained tokens"),
        "Answers end where the limit is, without a stop token.",
        "`sequence_len` above the longest conversation.",
        is_documented=True,
    ),
    Failure(
        Fault.ROWS_DROPPED, "axolotl_faults dropped", "axolotl", ("dropped",), ("truncation",),
        "Conversations longer than `sequence_len` are dropped, which the log says.",
        "`sequence_len` above the longest conversation.",
        is_documented=True,
    ),
    replace(_FORGED, program="axolotl_faults control_text", library="axolotl"),
)  # fmt: skip

_LLAMA_FACTORY = (
    Failure(
        Fault.OTHER_FORMAT, "llamafactory_faults named_template", "LLaMA-Factory", ("named_template",), ("ids",),
        "Its `smollm2` ends the default system prompt with a period, and the template that is saved with the model "
        "does not: such rows are trained with another prompt than they are served with.",
        "Leave `template:` out, and the tokenizer's own is taken.",
    ),
    Failure(
        Fault.MASK_OF_ONES, "llamafactory_faults packing", "LLaMA-Factory", ("packing",), ("isolation",),
        "An attention mask of ones is passed with the positions, so transformers sees no border "
        "between conversations.",
        "`neat_packing: true`.",
        ("hiyouga/LlamaFactory#2289", "huggingface/transformers#46634"),
    ),
    Failure(
        Fault.OTHER_COUNT, "llamafactory_faults first_tokens", "LLaMA-Factory", ("whole_texts",), ("loss",),
        "The fault of transformers to 5.10.0: the first token of each row is counted, and not predicted.",
        "A release that admits transformers 5.10.1 (its source was read).",
        ("huggingface/transformers#46204",),
    ),
    replace(
        _THOUGHTS, program="llamafactory_faults thoughts", library="LLaMA-Factory",
        threads=("hiyouga/LlamaFactory#10773",),
    ),
    replace(_TOOLS, program="llamafactory_faults tools", library="LLaMA-Factory"),
    Failure(
        Fault.ROWS_CUT, "llamafactory_faults truncation", "LLaMA-Factory", ("truncation",),
        ("ids", "trained tokens", "stop tokens", "truncation"),
        "The question and the answer are cut each by itself, and the header between them is lost.",
        "`cutoff_len` above the longest conversation.",
    ),
    replace(_FORGED, program="llamafactory_faults control_text", library="LLaMA-Factory"),
)  # fmt: skip

_SWIFT = (
    Failure(
        Fault.ROWS_CUT, "swift_faults named_template", "ms-swift", ("named_template",), ("ids", "truncation"),
        "Its `chatml`, chosen here for a model with SmolLM2's template, leaves out the default system prompt, which "
        "the template that is saved with the model writes.",
        "A `template` that writes what the tokenizer's own writes.",
    ),
    Failure(
        Fault.PROMPTS_TRAINED, "swift_faults jinja", "ms-swift", ("jinja",), ("trained tokens",),
        "This backend masks nothing: prompts are trained.",
        "`template_backend: swift`, the default.",
        ("modelscope/ms-swift#9277",),
    ),
    replace(_THOUGHTS, program="swift_faults thoughts", library="ms-swift"),
    replace(_TOOLS, program="swift_faults tools", library="ms-swift"),
    Failure(
        Fault.ROWS_CUT, "swift_faults truncation", "ms-swift", ("truncation",), ("truncation",),
        "Answers end where the limit is, without a stop token; the default drops such rows.",
        "`max_length` above the longest conversation.",
        is_documented=True,
    ),
    replace(_FORGED, program="swift_faults control_text", library="ms-swift"),
)  # fmt: skip

KNOWN_FAILURES = (*_TRL, *_TRANSFORMERS, *_AXOLOTL, *_LLAMA_FACTORY, *_SWIFT)
