"""Faults of trainers and of loops: what each means for training, and what mends it in each library.

A check finds a fault, which is a value; the sentences about it are here alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, unique
from typing import Any


@dataclass(frozen=True)
class Entry:
    """What is known of a fault.

    A place such as {pad} in a text is filled with a value of the finding; {padding} and {of_trl} may be missing.

    Attributes:
        rows: The rows of the report that find it.
        meaning: The meaning for training.
        option: What mends it in transformers' Trainer, and in libraries without another option.
        loop: What mends it in a loop of one's own.
        note: What else to say, for every library.
    """

    rows: tuple[str, ...]
    meaning: str
    option: str = ""
    trl: str = ""
    axolotl: str = ""
    llamafactory: str = ""
    swift: str = ""
    loop: str = ""
    note: str = ""


_PAIRS = (
    "Give rows of prompt and completion, one for each answer ({{'prompt': the messages before it, 'completion': [the "
    "answer]}}), and TRL trains the completion alone"
)
_MASK = Entry(
    ("trained tokens",),
    "",
    "Give labels of -100 to all but the answers. An answer begins behind apply_chat_template(..., "
    "add_generation_prompt=True) and ends with its stop token, which has its label too.",
    trl="{of_trl}",
    axolotl="Set train_on_inputs: false with roles_to_train: [assistant] and train_on_eos: turn.",
    llamafactory="Set train_on_prompt: false and mask_history: false.",
    swift="Set --loss_scale default, and --template_backend swift: the other backend masks nothing.",
    loop="Give the loss a target in the answers, and nowhere else. An answer begins behind "
    "apply_chat_template(..., add_generation_prompt=True) and ends with its stop token, which is "
    "trained too.",
)
_LIMIT = "raise {} above the longest conversation; else keep every message when you make the rows."
_OF_STEP = (
    "Do not override training_step. If you do, call accelerator.backward(loss) once for each micro-batch, with the "
    "loss that it returns, and do not divide, clip or zero gradients there: max_grad_norm clips once a step."
)


@unique
class Fault(Enum):
    """One way in which a run is wrong."""

    # -- masks ---------------------------------------------------------------------------------------------------------
    EVERY_TOKEN = Entry(
        ("trained tokens", "stop tokens"),
        "The loss leaves out tokens.",
        "Label each token with its own id, except padding.",
        note="{padding}",
    )
    PROMPTS_TRAINED = replace(
        _MASK,
        meaning="The loss trains the prompts.",
        note=" If you mean a loss over everything, pass trained_roles='all'.",
    )
    HEADERS_TRAINED = replace(_MASK, meaning="The labels begin before the answer does.")
    WEIGHTS_IGNORED = Entry(
        ("trained tokens",),
        "The rows give some answers the weight 0, but the loss trains them.",
        "Set the labels of those answers and of their stop tokens to -100.",
        trl=f"TRL does not read `weight`. {_PAIRS}.",
        loop="Give the tokens of those answers and their stop tokens no target, or the weight 0.",
    )
    ANSWERS_LEFT_OUT = replace(_MASK, meaning="The loss leaves out answers, or parts of them.")
    NOTHING_TRAINED = replace(
        _MASK,
        meaning="The loss trains no answer.",
        loop=f"{_MASK.loop} The check sets the logits to 0: switch off what skips or clamps large losses.",
    )
    STOP_MASKED = replace(
        _MASK,
        rows=("stop tokens",),
        meaning="The labels mask the stop token, so the model does not learn to stop.",
        note="{padding}",
    )
    SHIFTED_LABELS = Entry(
        ("trained tokens", "stop tokens"),
        "The batch shifts the labels, and the model shifts them again.",
        "Give labels that equal input_ids at the same index. If you pass shift_labels, give the token after each.",
        loop="targets[:, t] is input_ids[:, t + 1]: shift once, in the batch or in the loss.",
    )
    UNSHIFTED_LABELS = Entry(
        ("trained tokens", "stop tokens"),
        "The loss trains each token to predict itself, which the input already shows.",
        "Compare logits[:, :-1] with labels[:, 1:]: a token's logits predict the next token.",
    )
    MASKED_IDS = Entry(
        ("trained tokens", "stop tokens"),
        "The labels are other tokens: the collator replaces ids (masked language modeling), or the "
        "labels belong to other rows.",
        "Set DataCollatorForLanguageModeling(mlm=False), or give each row its own labels.",
        loop="Make targets[:, t] equal to input_ids[:, t + 1] at each trained token.",
    )
    ANSWERS_UNTRAINED = Entry(("stop tokens",), "The answers themselves have no label; see trained tokens.")
    PAD_IS_STOP = Entry(
        ("stop tokens",),
        "The padding token is the stop token, {pad}, so a collator that masks padding by its id masks both.",
        "Set tokenizer.pad_token to another token, or use DataCollatorForSeq2Seq: it pads labels by position.",
        trl="Leave data_collator out: TRL's own pads labels by position.",
    )
    NO_STOP = Entry(
        ("stop tokens",),
        "No stop token follows the answers.",
        "Give a chat template that writes one, such as the eos_token, after each answer.",
        trl="Give a chat template (chat_template_path=) that writes one, such as the eos_token, after each answer.",
    )
    # -- ids and bounds ------------------------------------------------------------------------------------------------
    OTHER_FORMAT = Entry(
        ("ids",),
        "The rows have another format than the tokenizer's template, with which the model is served.",
        "Tokenize the messages with apply_chat_template(tokenize=True); or set tokenizer.chat_template "
        "to the template of the rows, so that the model is saved with it.",
        trl="Give rows of messages, or of prompt and completion, which TRL renders with the tokenizer's template.",
        llamafactory="Remove `template:`; LLaMA-Factory then uses the tokenizer's own.",
        swift="Use the --template of ms-swift that writes the same text as the tokenizer's own.",
    )
    OTHER_TURNS = replace(
        OTHER_FORMAT, meaning="The rows hold no turn of the template, so the model learns another format."
    )
    NO_BEGINNING = replace(OTHER_FORMAT, meaning="The batch lacks the beginning that the template writes.")
    TRAINING_TEMPLATE = Entry(
        ("ids",),
        "For assistant_only_loss, TRL renders its own copy of the template. The copy writes these rows "
        f"differently, and the model is saved with the tokenizer's template. {_PAIRS}; leave "
        "assistant_only_loss out.",
    )
    APPLIED_TWICE = Entry(
        ("ids",),
        "The chat template is applied twice: a message's text is itself a rendered conversation.",
        "Render the messages once: give the tokenizing code either rendered text or messages.",
        trl="Give TRL the messages as they are, not rendered.",
    )
    TOOLS_LEFT_OUT = Entry(
        ("ids",),
        "The rows have tools, but the prompts do not show them: the model learns to call undeclared tools.",
        "Pass the tools of each row to the template: apply_chat_template(messages, tools=row['tools']).",
        trl="Give each row its column `tools`, as JSON schemas, with its messages.",
        axolotl="Set field_tools to the column of the tools.",
        llamafactory="Set columns: tools in dataset_info.json to the column of the tools.",
    )
    DOUBLED_BOS = Entry(
        ("ids",),
        "The template writes a beginning-of-text token, and the tokenizer adds another.",
        "Tokenize rendered text with add_special_tokens=False.",
        trl="Give rows of messages: TRL renders and tokenizes them in one step.",
    )
    TEMPLATE_UNSET = Entry(
        ("ids",),
        "A server would have no template for its prompts.",
        "Set tokenizer.chat_template to the template that rendered the rows, so that the model is saved with it.",
    )
    ROWS_CUT = Entry(
        ("ids", "trained tokens", "truncation"),
        "The rows hold parts of conversations. If a limit cuts them (the longest document here has {longest:,} "
        "tokens),",
        _LIMIT.format("it"),
        trl=_LIMIT.format("SFTConfig(max_length=...)"),
        axolotl=_LIMIT.format("sequence_len"),
        llamafactory=_LIMIT.format("cutoff_len"),
        swift=_LIMIT.format("--max_length"),
        loop=_LIMIT.format("it"),
    )
    ROWS_DROPPED = Entry(
        ("truncation",),
        "The preparation of the data drops rows.",
        "Remove the filter that drops them.",
        trl="Raise SFTConfig(max_length=...) above the longest conversation, or remove the filter that drops them.",
    )
    ROWS_SKIPPED = Entry(
        ("truncation",),
        "training_step leaves out some micro-batches: their rows teach nothing, but num_items_in_batch counts their "
        "labels.",
        "Do not override training_step; remove such rows from the data set.",
    )
    ROWS_EMPTY = Entry(("truncation",), "These rows train nothing: their answers are masked; see trained tokens.")
    # -- packing -------------------------------------------------------------------------------------------------------
    CUT_BY_PACKING = Entry(
        ("truncation",),
        "Packing cuts conversations where a pack is full.",
        "Make each conversation a row, and use DataCollatorWithFlattening(), which passes position_ids.",
        trl="Set packing_strategy='bfd' and a max_length above the longest conversation.",
        axolotl="Set sample_packing: true with flash attention.",
        llamafactory="Set neat_packing: true.",
        loop="Fill packs with whole conversations. Restart positions at 0 with each, and pass the bounds "
        "(cu_seqlens, document ids, or a block mask) to attention.",
    )
    POSITIONS_RUN_ON = replace(
        CUT_BY_PACKING,
        rows=("positions",),
        meaning="Positions continue from one conversation to the next, but a server starts each conversation "
        "at position 0.",
    )
    POSITIONS_OUT_OF_ORDER = Entry(
        ("positions",),
        "The positions of a conversation are not consecutive, so the model sees its tokens in another "
        "order than a server gives.",
        "Leave position_ids out if each row is one conversation; else count 0, 1, 2, ... from each "
        "conversation's first token.",
    )
    NO_POSITIONS = replace(
        CUT_BY_PACKING,
        rows=("isolation",),
        meaning="The packed row has no position_ids, so each conversation attends to all earlier ones.",
    )
    LABELS_CROSS = replace(
        CUT_BY_PACKING,
        rows=("positions",),
        meaning="The last token of a packed document predicts the first token of the next.",
        option="Set the label of each document's first token to -100, as DataCollatorWithFlattening() does.",
        loop="Ignore the target of each document's last token: it is the first token of the next document.",
    )
    MASK_OF_ONES = Entry(
        ("isolation",),
        "transformers reads the borders of conversations from position_ids only if no attention_mask is passed.",
        "Leave the mask out of the batch, as DataCollatorWithFlattening() does, for a model type that supports packed "
        "rows; docs/isolation.md lists the types.",
        llamafactory="Set neat_packing: true.",
    )
    OWN_MASK = Entry(
        ("isolation",),
        "The batch's own attention_mask lets conversations see each other.",
        "Fix the mask, or pass position_ids alone: transformers builds the mask from them.",
    )
    FUTURE = Entry(
        ("isolation",),
        "The attention mask lets a token see the later tokens that it should predict.",
        "Make the mask causal within each conversation, or pass none and let the model make it.",
    )
    CACHE = Entry(
        ("isolation",),
        "The cache joins the documents of a row.",
        "Set TrainingArguments(use_cache=False); if your own compute_loss calls the model, pass it there too.",
        trl="Set SFTConfig(use_cache=False).",
        loop="Pass use_cache=False to the model, or set model.config.use_cache = False.",
    )
    NOT_ISOLATED = Entry(
        ("isolation",),
        "{name} with attention {attention!r} does not keep packed conversations apart; docs/isolation.md lists the "
        "types that do.",
        "Put one conversation in each row, as DataCollatorForSeq2Seq does.",
        trl="Set packing=False and padding_free=False.",
        axolotl="Set sample_packing: false.",
        llamafactory="Set packing: false.",
        swift="Set --packing false and --padding_free false.",
        loop="Pass the bounds of the conversations (cu_seqlens, document ids, or a block mask) to "
        "attention, or put one conversation in each row.",
    )
    ROWS_MIXED = Entry(
        ("isolation",),
        "Rows of one batch affect each other.",
        "Remove what mixes them (batch statistics), or use batches of one row.",
    )
    NOT_AS_ALONE = Entry(
        ("positions",),
        "The model computes a conversation differently in this batch than when it is served alone.",
        "Pass position_ids that begin at 0 with each conversation, or pad on the right "
        "(tokenizer.padding_side = 'right'). Pass no token_type_ids or masks that a server does not "
        "pass.",
    )
    # -- loss and padding ----------------------------------------------------------------------------------------------
    NOT_FINITE = Entry(
        ("loss", "gradients"),
        "The loss or a gradient is NaN or infinite.",
        "Look for NaN or infinity in the model's weights.",
    )
    UNDIVIDED = Entry(
        ("loss",),
        "The gradient grows with the number of labels of a step.",
        "Divide the sum of the token losses by num_items_in_batch, or do not override compute_loss.",
        loop="Divide the sum of the token losses by the number of targets of the whole step: of all its micro-batches.",
    )
    OTHER_LABELS = Entry(
        ("loss",),
        "The loss uses other tokens than the labels.",
        "Compare logits[:, :-1] with labels[:, 1:], and use all labels; or do not override compute_loss.",
    )
    MEAN_OF_MEANS = Entry(
        ("loss",),
        "The weight of a token depends on the other conversations in its micro-batch.",
        "Do not override compute_loss; or accept num_items_in_batch in it (or in compute_loss_func), divide the sum of "
        "the token losses by it, and set loss_is_scaled_for_ga accordingly.",
        loop="Divide the sum of the token losses of each micro-batch by the number of targets of the whole step, and "
        "do not average again.",
    )
    NO_LOSS_KWARGS = replace(
        MEAN_OF_MEANS,
        rows=("loss",),
        option="Set trainer.model_accepts_loss_kwargs = True, so that the model is given num_items_in_batch.",
    )
    EVALUATED_BY_BATCHES = Entry(
        ("loss",),
        "eval_loss depends on per_device_eval_batch_size: the mean of a batch with few labels counts "
        "as much as any other. The training loss is not affected.",
        "Weight the loss of each batch by its number of labels in an evaluate() of your own; or raise "
        "per_device_eval_batch_size to the number of rows, so that there is one batch.",
    )
    MEAN_BY_SEQUENCE = Entry(
        ("loss",),
        "A token of a short answer counts more than a token of a long one.",
        "Divide the sum of the token losses of all rows by the number of their targets; do not divide "
        "each row by its own number.",
    )
    GRADIENT_LOST = Entry(
        ("loss",),
        "The step computes some micro-batches and discards their gradients.",
        "Call backward for each micro-batch, and zero_grad once a step, not between micro-batches.",
    )
    GRADIENT_SCALED = Entry(
        ("gradients",),
        "Every gradient is the gradient of the loss times one factor, which acts like a wrong learning "
        "rate or clipping norm.",
        _OF_STEP,
    )
    GRADIENT_CHANGED = Entry(
        ("gradients", "loss"),
        "The optimizer does not get the gradients of the step's loss.",
        _OF_STEP,
        loop="Clip, scale and zero gradients once a step, after the last backward pass.",
    )
    OTHER_COUNT = Entry(
        ("loss",),
        "The step divides the loss by a number that differs from the number of its labels.",
        "Mask padding and the first token of each row with -100, and do not override get_batch_samples or "
        "_get_num_items_in_batch.",
        loop="Divide by the number of targets that are not ignored, over all micro-batches of the step.",
    )
    BATCH_DEPENDENT = Entry(
        ("loss",), "What is learned from a row depends on its neighbors: see isolation, positions and padding."
    )
    PADDING_TRAINED = Entry(
        ("padding",),
        "The loss trains padding and counts it as labels.",
        "Pad labels with -100, as DataCollatorForSeq2Seq does, or set labels[attention_mask == 0] = -100.",
        loop="Give padding the target that the loss ignores (ignore_index, by default -100), or the weight 0.",
    )
    TEXT_MASKED = Entry(
        ("padding",),
        "The attention mask hides tokens of the conversations.",
        "Make it from their lengths, not from input_ids != pad_token_id, or give the tokenizer a padding token of its "
        "own.",
    )
    PADDING_ATTENDED = Entry(
        ("padding",),
        "The conversations attend to padding.",
        "Pass the attention_mask of the tokenizer on to the model, or pad on the right (tokenizer.padding_side = "
        "'right').",
    )
    # -- what is trained and saved -------------------------------------------------------------------------------------
    NOT_LEARNING = Entry(
        ("adapters",),
        "Parts that should learn do not.",
        "Check requires_grad and the optimizer's parameters; with peft, target_modules and modules_to_save.",
    )
    FROZEN_MOVED = Entry(
        ("adapters",),
        "Steps change tensors that are frozen.",
        "Give the optimizer only tensors whose requires_grad is True, and let no frozen tensor share "
        "memory with a trained one.",
    )
    NOT_OPTIMIZED = replace(NOT_LEARNING, meaning="Parts that should learn are not in the optimizer.")
    NOT_SAVED = Entry(
        ("adapters",),
        "save_model writes the adapter alone, so the saved folder is not the trained model.",
        "Leave the base frozen, or name what is trained in addition to the adapters in "
        "LoraConfig(modules_to_save=[...]).",
    )
    TOKENS_FROZEN = Entry(
        ("adapters",),
        "The adapter cannot teach tokens whose embeddings are frozen.",
        "Set LoraConfig(modules_to_save=['embed_tokens', 'lm_head']), or use a chat template whose "
        "tokens the model knows.",
        axolotl="Set lora_modules_to_save: [embed_tokens, lm_head].",
        llamafactory="Set additional_target: embed_tokens,lm_head.",
        swift="Set --modules_to_save embed_tokens lm_head.",
    )
    NO_END = Entry(
        ("generation",),
        "A server would generate beyond the answer.",
        "Set tokenizer.eos_token = {stop!r}.",
        trl="Set SFTConfig(eos_token={stop!r}).",
        axolotl="Set special_tokens: eos_token: {stop!r}.",
    )
    OTHER_TOKENIZER = Entry(
        ("generation",),
        "The saved tokenizer gives other ids than the batches hold.",
        "Pass the tokenizer that made the data as processing_class. If it is that one already, the folder's "
        "config.json makes transformers load another class.",
    )
    OTHER_CLASS = Entry(
        ("generation",),
        "transformers builds another tokenizer than tokenizer.json describes.",
        'Set "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json, or install another version of '
        "transformers.",
    )
    FORGED = Entry(
        ("forgery",),
        "A text of the data ends a turn or begins another one.",
        "Remove the control tokens from the texts before training (no trainer encodes them as text), or tokenize with "
        "split_special_tokens=True.",
    )
    NOTHING_TRAINABLE = Entry(
        ("adapters",), "No tensor is trained.", "Set requires_grad, or give a peft_config.", loop="Set requires_grad."
    )
    ROWS_REPEATED = Entry(
        ("rows",),
        "The ranks train some rows several times, or never.",
        "Give every rank the whole data set and the same seed. accelerate's dataloader shards it, and "
        "gives the same rows to ranks that share them; your own sampler or shard would divide it a "
        "second time.",
    )
    BATCHES_UNEQUAL = Entry(
        ("rows",),
        "The ranks have unequal numbers of batches, so one finishes early and the others wait for it forever.",
        "Give every rank the same number of batches: let accelerate shard the data set, or cut every rank's shard to "
        "the shortest.",
    )
    OTHER_DENOMINATOR = Entry(
        ("denominators",),
        "The weight of a token depends on the number of ranks, or on its neighbors.",
        "Keep average_tokens_across_devices=True, and do not override get_batch_samples or "
        "_get_num_items_in_batch. If you count yourself, sum once over all ranks with different rows, "
        "and do not divide in whole numbers.",
    )
    MEAN_OF_RANKS = Entry(
        ("loss",),
        "The step averages the ranks' own means, or divides by another number than the labels of all ranks.",
        "Divide the sum of a rank's token losses by the labels of all ranks, times the number of ranks whose gradients "
        "are averaged, as transformers' compute_loss does.",
    )
    GRADIENT_FACTOR = Entry(
        ("gradients",),
        "The gradient is too large or too small by one factor, which acts like a wrong learning rate or clipping norm.",
        "Multiply the loss by the number of ranks exactly where their gradients are averaged (DDP and FSDP average), "
        "and divide by it once.",
    )
    GRADIENTS_NOT_SUMMED = Entry(
        ("gradients",),
        "The ranks do not add up their gradients, so their weights drift apart.",
        "Wrap the model in DDP or FSDP over all ranks, including those that share rows, and do not "
        "call no_sync in the last micro-batch.",
    )
    GRADIENTS_OF_RANKS = Entry(
        ("gradients",),
        "The ranks together compute another gradient than one process does.",
        "Read the rows above and below to see what differs: rows, denominators, rotations, borders, "
        "across ranks. If none fails, look for attention or recurrent layers that see only a part of "
        "the row.",
    )
    RANK_NOT_FINITE = Entry(
        ("loss", "gradients"),
        "A rank without a label divides by zero, or its weights are not finite.",
        "Divide by the labels of all ranks.",
    )
    OTHER_ROTATIONS = Entry(
        ("rotations",),
        "A rank rotates the tokens of its part differently than one process rotates the whole row.",
        "Compute positions and rotations of the whole row, and cut them afterwards: longrope and "
        "dynamic scaling choose by the length that they see.",
    )
    LABELS_AT_BORDERS = Entry(
        ("borders",),
        "The cut of a row loses or doubles labels.",
        "Shift the labels of the whole row (shift_labels), and cut them afterwards. Pad a row until "
        "the number of ranks divides its length.",
    )
    LEAK_ACROSS_RANKS = Entry(
        ("across ranks",),
        "Conversations see each other across ranks.",
        "Pass the borders of the whole row (positions, cu_seqlens) to attention and recurrent layers, "
        "not the borders of a part.",
    )
    REPLICAS_DIFFER = Entry(
        ("replicas",),
        "The ranks train different models, and only one is saved.",
        "Create new tensors (adapters, resized embeddings) with the same seed on all ranks, or broadcast them from "
        "rank 0.",
    )
    REPLICAS_DRIFT = Entry(
        ("replicas",),
        "The ranks' copies drift apart, and only one is saved.",
        "Give every rank the sum of all gradients, and the same optimizer; see gradients.",
    )

    @property
    def entry(self) -> Entry:
        return self.value

    def remedy(self, library: str, values: Mapping[str, Any]) -> str:
        """Returns the meaning of the fault and what mends it.

        Args:
            library: The package of the trainer's class, "loop" for a loop, or "" for transformers.
            values: What the places in the texts stand for.
        """
        option = getattr(self.entry, library, "") if library else ""
        text = f"{self.entry.meaning} {option or self.entry.option}".strip() + self.entry.note
        return text.format_map({"padding": "", "of_trl": "", **values}).strip()


def library_of(trainer: Any) -> str:
    """Returns the package that the trainer's class is derived from; "" for transformers."""
    packages = {kind.__module__.partition(".")[0] for kind in type(trainer).__mro__}
    return next((name for name in ("axolotl", "llamafactory", "swift", "trl") if name in packages), "")


def values_of_mask(rows: Sequence[Any], *, is_assistant_only: bool, is_completion_only: bool) -> dict[str, str]:
    """Returns the values of a fault of the mask: what mends it in TRL, as far as the columns of the rows allow it."""
    columns = set(rows[0]) if rows and isinstance(rows[0], Mapping) else set()
    of_trl = _PAIRS.format() + "."
    if "messages" in columns:
        of_trl += (
            " assistant_only_loss=True does the same only with a chat template that has marks around each answer and "
            "its stop token (chat_template_path='marked.jinja'), and writes the same."
        )
        if is_assistant_only:
            of_trl = (
                "Move the marks of the chat template: {% generation %} behind the header of an answer, and "
                "{% endgeneration %} behind its stop token."
            )
    elif {"prompt", "completion"} <= columns and not is_completion_only:
        of_trl = "Set SFTConfig(completion_only_loss=True)."
    return {"of_trl": of_trl}
