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
    "Give labels of -100 to all but what the model writes: the tokens behind apply_chat_template(..., "
    "add_generation_prompt=True) up to each answer's stop token, which has its label too.",
    trl="{of_trl}",
    axolotl="Set train_on_inputs: false with roles_to_train: [assistant] and train_on_eos: turn.",
    llamafactory="Set train_on_prompt: false and mask_history: false.",
    swift="Set --loss_scale default, and --template_backend swift: the other one masks nothing.",
    loop="Give the loss a target where the model writes, and nowhere else: the tokens behind apply_chat_template(..., "
    "add_generation_prompt=True) up to each answer's stop token, which is trained too.",
)
_LIMIT = "raise {} above the longest conversation; else keep every message where the rows are made."
_OF_STEP = (
    "Do not override training_step; or call accelerator.backward(loss) once for each micro-batch with the loss that it "
    "returns, and do not divide, clip or zero gradients in it: max_grad_norm clips once a step."
)


@unique
class Fault(Enum):
    """One way in which a run is wrong."""

    # -- masks ---------------------------------------------------------------------------------------------------------
    EVERY_TOKEN = Entry(
        ("trained tokens", "stop tokens"),
        "Tokens are left out of the loss.",
        "Give each token but padding its own id as label.",
        note="{padding}",
    )
    PROMPTS_TRAINED = replace(
        _MASK,
        meaning="The prompts are trained.",
        note=" If a loss over everything is meant, pass trained_roles='all'.",
    )
    HEADERS_TRAINED = replace(_MASK, meaning="The mask begins before what the model writes.")
    WEIGHTS_IGNORED = Entry(
        ("trained tokens",),
        "The rows give answers the weight 0, and they are trained.",
        "Set the labels of those answers to -100, their stop tokens included.",
        trl=f"TRL does not read `weight`. {_PAIRS}.",
        loop="Give the tokens of those answers, their stop tokens included, no target or the weight 0.",
    )
    ANSWERS_LEFT_OUT = replace(_MASK, meaning="Answers, or parts of them, are left out of the loss.")
    NOTHING_TRAINED = replace(_MASK, meaning="No answer is trained.")
    STOP_MASKED = replace(_MASK, rows=("stop tokens",), meaning="The stop token is masked away.", note="{padding}")
    SHIFTED_LABELS = Entry(
        ("trained tokens", "stop tokens"),
        "The labels are shifted before the model shifts them again.",
        "Give labels that equal input_ids at the same index; shift_labels, if passed, hold the token after each.",
        loop="targets[:, t] is input_ids[:, t + 1]: shift once, in the batch or in the loss.",
    )
    UNSHIFTED_LABELS = Entry(
        ("trained tokens", "stop tokens"),
        "Each token is trained to be itself, which it already is in the input.",
        "A token's logits predict the next one: compare logits[:, :-1] with labels[:, 1:].",
    )
    MASKED_IDS = Entry(
        ("trained tokens", "stop tokens"),
        "The ids are changed, and the labels are those that were there.",
        "Set DataCollatorForLanguageModeling(mlm=False).",
        loop="Or the targets are those of other rows: targets[:, t] is input_ids[:, t + 1] wherever it is trained.",
    )
    ANSWERS_UNTRAINED = Entry(("stop tokens",), "The answers themselves have no label; see trained tokens.")
    PAD_IS_STOP = Entry(
        ("stop tokens",),
        "The padding token is the stop token, {pad}: if the collator masks every padding token,",
        "set tokenizer.pad_token to another token, or take DataCollatorForSeq2Seq, which pads labels by position.",
        trl="leave data_collator out: TRL's pads labels by position.",
    )
    NO_STOP = Entry(
        ("stop tokens",),
        "No stop token follows the answers.",
        "Give a chat template that writes one, such as the eos_token, behind each answer.",
        trl="Give a chat template (chat_template_path=) that writes one, such as the eos_token, behind each answer.",
    )
    # -- ids and bounds ------------------------------------------------------------------------------------------------
    OTHER_FORMAT = Entry(
        ("ids",),
        "The model is trained on another format than its tokenizer's template writes, and than it is used with.",
        "Tokenize the messages with apply_chat_template(tokenize=True); or set tokenizer.chat_template to the template "
        "in which the rows are, so that it is saved.",
        trl="Give rows of messages, or of prompt and completion, which TRL renders with the tokenizer's template.",
        llamafactory="Leave `template:` out, and LLaMA-Factory takes the tokenizer's own.",
        swift="Take the --template of ms-swift that writes the same as the tokenizer's own.",
    )
    OTHER_TURNS = replace(
        OTHER_FORMAT, meaning="The rows have no turn of the template, so the model is trained on another format."
    )
    NO_BEGINNING = replace(OTHER_FORMAT, meaning="The template writes a beginning that the batch lacks.")
    TRAINING_TEMPLATE = Entry(
        ("ids",),
        "For assistant_only_loss TRL renders a copy of the template, which writes these rows otherwise than the "
        f"tokenizer's own, with which the model is saved. {_PAIRS}; leave assistant_only_loss out.",
    )
    APPLIED_TWICE = Entry(
        ("ids",),
        "The chat template is applied twice: the text of a message begins as a rendered conversation does.",
        "Render the messages once: give either rendered text or messages to what tokenizes them.",
        trl="Give TRL the messages as they are, not rendered.",
    )
    TOOLS_LEFT_OUT = Entry(
        ("ids",),
        "The rows have tools that the model is not shown: it is trained to call what no prompt declares.",
        "Pass the tools of each row to the template: apply_chat_template(messages, tools=row['tools']).",
        trl="Give each row its column `tools`, as JSON schemas, with its messages.",
        axolotl="Set field_tools to the column of the tools.",
        llamafactory="Set columns: tools in dataset_info.json to the column of the tools.",
    )
    DOUBLED_BOS = Entry(
        ("ids",),
        "The text of the template has its beginning-of-text token already, and the tokenizer adds another.",
        "Tokenize rendered text with add_special_tokens=False.",
        trl="Give rows of messages: TRL renders and tokenizes them in one step.",
    )
    TEMPLATE_UNSET = Entry(
        ("ids",),
        "A server would have no template for its prompts.",
        "Set tokenizer.chat_template to the template with which the rows were rendered, so that it is saved.",
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
        loop="raise it above the longest conversation; else keep every message where the rows are made.",
    )
    ROWS_DROPPED = Entry(
        ("truncation",),
        "Rows are dropped while the data is prepared.",
        "Remove the filter that drops them.",
        trl="Raise SFTConfig(max_length=...) above the longest conversation, or remove the filter that drops them.",
    )
    ROWS_SKIPPED = Entry(
        ("truncation",),
        "training_step returns for some micro-batches without a call of the model, so nothing is learned from their "
        "rows, although num_items_in_batch counts their labels.",
        "Do not override training_step; leave out such rows where the data set is made.",
    )
    ROWS_EMPTY = Entry(("truncation",), "These rows train nothing: their answers are masked; see trained tokens.")
    # -- packing -------------------------------------------------------------------------------------------------------
    CUT_BY_PACKING = Entry(
        ("truncation",),
        "Packing cuts conversations where a pack is full.",
        "Take one conversation as a row, and DataCollatorWithFlattening(), which passes position_ids.",
        trl="Set packing_strategy='bfd' and a max_length above the longest conversation.",
        axolotl="Set sample_packing: true with flash attention.",
        llamafactory="Set neat_packing: true.",
        loop="Fill packs with whole conversations; pass positions that begin at 0 with each, and their bounds "
        "(cu_seqlens, document ids, or a mask of blocks) to attention.",
    )
    POSITIONS_RUN_ON = replace(
        CUT_BY_PACKING, rows=("positions",), meaning="Positions run on, where the model is used from position 0 on."
    )
    POSITIONS_OUT_OF_ORDER = Entry(
        ("positions",),
        "The model gets the tokens in another order than the one in which it will be used.",
        "Leave position_ids out of batches with one conversation in each row, or count 0, 1, 2 and so on from the "
        "first token of each conversation.",
    )
    NO_POSITIONS = replace(
        CUT_BY_PACKING,
        rows=("isolation",),
        meaning="The packed row has no position_ids: the model attends to all before.",
    )
    LABELS_CROSS = replace(
        CUT_BY_PACKING,
        rows=("positions",),
        meaning="Labels cross the borders of packed documents.",
        option="Set the label of each document's first token to -100, as DataCollatorWithFlattening() does.",
        loop="Ignore the target of each document's last token, which is the beginning of the next one.",
    )
    MASK_OF_ONES = Entry(
        ("isolation",),
        "transformers reads the borders of conversations from position_ids only without an attention_mask.",
        "Leave the mask out of the batch, as DataCollatorWithFlattening() does, for a model type that supports packed "
        "rows; docs/isolation.md lists the types.",
        llamafactory="Set neat_packing: true.",
    )
    OWN_MASK = Entry(
        ("isolation",),
        "The batch carries an attention_mask of its own shape, which lets conversations through.",
        "Fix it, or pass position_ids alone, from which transformers makes the mask.",
    )
    FUTURE = Entry(
        ("isolation",),
        "The attention mask lets a token see those that come after it, which it is to predict.",
        "Make the mask causal within each conversation, or pass none and let the model make it.",
    )
    CACHE = Entry(
        ("isolation",),
        "The cache joins the documents of a row.",
        "Set TrainingArguments(use_cache=False), also where a compute_loss of your own calls the model.",
        trl="Set SFTConfig(use_cache=False).",
        loop="Pass use_cache=False to the model, or set model.config.use_cache = False.",
    )
    NOT_ISOLATED = Entry(
        ("isolation",),
        "{name} with attention {attention!r} does not keep packed conversations apart; docs/isolation.md lists the "
        "types that do.",
        "Give the batches one conversation in each row, such as DataCollatorForSeq2Seq pads.",
        trl="Set packing=False and padding_free=False.",
        axolotl="Set sample_packing: false.",
        llamafactory="Set packing: false.",
        swift="Set --packing false and --padding_free false.",
        loop="Pass the bounds of the conversations (cu_seqlens, document ids, or a mask of blocks) to attention, or "
        "give one conversation in each row.",
    )
    ROWS_MIXED = Entry(
        ("isolation",),
        "Rows of one batch affect each other.",
        "Remove what mixes them (batch statistics), or use batches of one row.",
    )
    NOT_AS_ALONE = Entry(
        ("positions",),
        "With the batch's arguments the model computes something else for the same ids than it will when it is served.",
        "Pass position_ids that begin at 0 with each conversation, or pad on the right (tokenizer.padding_side = "
        "'right'); and no token_type_ids or masks that a server does not pass.",
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
        "eval_loss depends on per_device_eval_batch_size: the mean of a batch with few labels counts as much as any "
        "other. The training's own loss is not concerned.",
        "Weight the loss of each batch by its number of labels in an evaluate() of your own; or raise "
        "per_device_eval_batch_size to the number of rows, so that there is one batch.",
    )
    MEAN_BY_SEQUENCE = Entry(
        ("loss",),
        "The tokens of a short answer count for more than those of a long one.",
        "Divide the sum of the token losses of all rows by the number of their targets, not each row by its own.",
    )
    GRADIENT_LOST = Entry(
        ("loss",),
        "Some micro-batches of a step are computed, and their gradients are not used.",
        "Call backward for each micro-batch, and zero_grad once a step, not between its micro-batches.",
    )
    GRADIENT_SCALED = Entry(
        ("gradients",),
        "The gradients have another size than the loss, as a learning rate or a clipping of the norm that is wrong by "
        "it has.",
        _OF_STEP,
    )
    GRADIENT_CHANGED = Entry(("gradients",), "The optimizer does not get the gradients of the step's loss.", _OF_STEP)
    OTHER_COUNT = Entry(
        ("loss",),
        "The loss is divided by another number than that of its labels.",
        "Mask padding and the first token of each row with -100, and do not override get_batch_samples or "
        "_get_num_items_in_batch.",
        loop="Divide by the number of targets that are not ignored, of all micro-batches of the step.",
    )
    BATCH_DEPENDENT = Entry(
        ("loss",), "What is learned from a row depends on its neighbors: see isolation, positions and padding."
    )
    PADDING_TRAINED = Entry(
        ("padding",),
        "Padding is trained, and counted as labels.",
        "Pad labels with -100, as DataCollatorForSeq2Seq does, or set labels[attention_mask == 0] = -100.",
        loop="Give padding the target that the loss ignores (ignore_index, which is -100 if it is not passed), or the "
        "weight 0.",
    )
    TEXT_MASKED = Entry(
        ("padding",),
        "The attention mask hides tokens of the conversations.",
        "Make it from their lengths, not from input_ids != pad_token_id, or give the tokenizer a padding token of its "
        "own.",
    )
    PADDING_ATTENDED = Entry(
        ("padding",),
        "Padding is attended to.",
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
        "Give the optimizer only tensors whose requires_grad is True, and let no frozen tensor share memory with a "
        "trained one.",
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
        "Set LoraConfig(modules_to_save=['embed_tokens', 'lm_head']), or take a chat template whose tokens the model "
        "knows.",
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
        "The folder's tokenizer gives other ids than those that are trained.",
        "Pass the tokenizer that made the data as processing_class; if it is that one, the folder is loaded as another "
        "class, by its config.json.",
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
        "Rows are trained several times, or never.",
        "Give every rank the whole data set and the same seed: accelerate's dataloader shards it, ranks that share "
        "rows get the same ones, and a sampler or a shard of your own does it a second time.",
    )
    BATCHES_UNEQUAL = Entry(
        ("rows",),
        "The ranks have unequal numbers of batches, so the others wait for ever for the rank that finishes first.",
        "Give every rank the same number of batches: let accelerate shard the data set, or cut every rank's shard to "
        "the shortest.",
    )
    OTHER_DENOMINATOR = Entry(
        ("denominators",),
        "The weight of a token depends on the number of ranks, or on its neighbors.",
        "Keep average_tokens_across_devices=True, and do not override get_batch_samples or _get_num_items_in_batch; a "
        "count of your own is summed over all ranks with different rows, once, and is not divided in whole numbers.",
    )
    MEAN_OF_RANKS = Entry(
        ("loss",),
        "The step is a mean of the ranks' own means, or is divided by another number than that of all labels.",
        "Divide the sum of a rank's token losses by the labels of all ranks, times the number of ranks whose gradients "
        "are averaged, as transformers' compute_loss does.",
    )
    GRADIENT_FACTOR = Entry(
        ("gradients",),
        "The gradient has a factor, as a learning rate or a clipping of the norm that is wrong by it has.",
        "Multiply the loss by the number of ranks exactly where their gradients are averaged (DDP and FSDP average), "
        "and divide by it once.",
    )
    GRADIENTS_NOT_SUMMED = Entry(
        ("gradients",),
        "The ranks do not add up their gradients, so their weights drift apart.",
        "Wrap the model in DDP or FSDP over all ranks, those that share rows too, and do not call no_sync in the last "
        "micro-batch.",
    )
    GRADIENTS_OF_RANKS = Entry(
        ("gradients",),
        "The ranks together train on something else than one process does.",
        "The rows above and below say what differs: rows, denominators, rotations, borders, across ranks. If none "
        "fails, look for attention or recurrent layers that see only a part of the row.",
    )
    RANK_NOT_FINITE = Entry(
        ("loss", "gradients"),
        "A rank without a label divides by zero, or its weights are not finite.",
        "Divide by the labels of all ranks.",
    )
    OTHER_ROTATIONS = Entry(
        ("rotations",),
        "Tokens of a part are rotated otherwise than in the whole row.",
        "Compute positions and rotations of the whole row and cut them afterwards; longrope and dynamic scaling choose "
        "by the length that they see.",
    )
    LABELS_AT_BORDERS = Entry(
        ("borders",),
        "Labels are lost or doubled where a row is cut.",
        "Shift the labels of the whole row (shift_labels), and cut them afterwards; pad a row whose length the number "
        "of ranks does not divide.",
    )
    LEAK_ACROSS_RANKS = Entry(
        ("across ranks",),
        "Conversations see each other across ranks.",
        "Pass the borders of the whole row (positions, cu_seqlens) to attention and recurrent layers, not those of a "
        "part.",
    )
    REPLICAS_DIFFER = Entry(
        ("replicas",),
        "The ranks train different models, of which one is saved.",
        "Create new tensors (adapters, resized embeddings) with the same seed on all ranks, or broadcast them from "
        "rank 0.",
    )
    REPLICAS_DRIFT = Entry(
        ("replicas",),
        "The ranks' copies drift apart, and one of them is saved.",
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
