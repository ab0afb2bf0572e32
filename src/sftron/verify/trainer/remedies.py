"""Remedies by what was measured: the options of TRL, transformers, peft, axolotl and LLaMA-Factory."""

TEMPLATE_UNSET = "Set tokenizer.chat_template to the template with which the rows were rendered, so that it is saved."
DOUBLED_BOS = (
    "The text of the template has its beginning-of-text token already, and the tokenizer adds another. Give the "
    "trainer the `messages` column (TRL renders and tokenizes them in one step), or tokenize with "
    "add_special_tokens=False."
)
NO_BEGINNING = (
    "The template writes a beginning that the batch lacks. Tokenize with apply_chat_template(tokenize=True), or give "
    "TRL the `messages` column; or save the template with which the rows were rendered (tokenizer.chat_template). "
    "LLaMA-Factory: leave `template:` out, and it takes the tokenizer's own."
)

SHIFTED_LABELS = (
    "The labels are shifted before the model shifts them again. Give labels that equal input_ids at the same index "
    "(transformers' models shift by one); shift_labels, if they are passed, hold the token after each."
)
MASKED_IDS = (
    "The ids themselves are changed, and the labels are those that were there, as for masked language models. Set "
    "DataCollatorForLanguageModeling(mlm=False)."
)
NOTHING_TRAINED = (
    "No answer is trained. A template without {% generation %} marks gives an empty assistant mask, and a "
    "response_template or instruction_template that does not occur in the ids masks everything: in TRL give messages "
    "with assistant_only_loss=True and a template with marks (chat_template_path=), or prompt-completion rows; "
    "elsewhere check the response template's ids in context."
)
PROMPTS_TRAINED = (
    "The prompts are trained. TRL: SFTConfig(assistant_only_loss=True) for messages, or prompt-completion rows with "
    "completion_only_loss=True; axolotl: train_on_inputs: false with roles_to_train: [assistant]; LLaMA-Factory: "
    "train_on_prompt: false. If a loss over everything is meant, pass trained_roles='all'."
)
HEADERS_TRAINED = (
    "The mask begins before what the model writes. Move {% generation %} after the header, or end the prompt with "
    "add_generation_prompt=True; TRL's prompt-completion rows do so."
)
ANSWERS_LEFT_OUT = (
    "Answers are left out of the loss. Multi-turn rows need a mask of every answer: TRL: assistant_only_loss=True; "
    "axolotl: train_on_inputs: false with roles_to_train; LLaMA-Factory: mask_history: false; a response_template has "
    "to be found in each turn."
)

STOP_MASKED = (
    "The stop token is masked away. Put it inside the template's {% generation %} marks, or train it with the answer "
    "(axolotl: train_on_eos: turn; LLaMA-Factory: efficient_eos: false); TRL's own training templates do so."
)
ANSWERS_UNTRAINED = "The answers themselves have no label, so their stop tokens have none; see trained tokens."
PAD_IS_STOP = (
    "The padding token is the stop token, {pad}, and the collator masks every padding token. Give the tokenizer "
    "another one (SFTConfig(pad_token=...), tokenizer.pad_token = ...), or one that pads labels by position, such as "
    "TRL's or DataCollatorForSeq2Seq."
)
NO_STOP = (
    "No stop token follows the answers. Give a template that ends them with one (TRL: chat_template_path=, axolotl: "
    "chat_template:), or add the eos_token to the text of each answer."
)

POSITIONS_RUN_ON = (
    "Positions run on through a packed row, so every conversation is at another distance from its beginning than when "
    "the model is used. TRL: packing_strategy='bfd' (padding-free, with position_ids); transformers: "
    "DataCollatorWithFlattening; axolotl: sample_packing: true with flash attention."
)
NOT_AS_ALONE = (
    "What is served is another model than what is trained: with the batch's arguments it computes something else for "
    "the same ids. Pass position_ids that begin at 0 with each conversation, or pad on the right "
    "(tokenizer.padding_side = 'right'); and no token_type_ids or masks that a server does not pass."
)
LABELS_CROSS = (
    "Labels cross the borders of packed documents. Set the label of each document's first token to -100, as "
    "DataCollatorWithFlattening and TRL's padding-free collator do."
)

TOO_LONG = (
    "Conversations are longer than the limit; the longest document here has {longest:,} tokens. Raise max_length "
    "(axolotl: sequence_len, LLaMA-Factory: cutoff_len), or leave long rows out of the data."
)
CUT_BY_PACKING = (
    "Packing cuts conversations where a pack is full. TRL: packing_strategy='bfd' and a max_length above the longest "
    "conversation; LLaMA-Factory: neat_packing: true; axolotl: sample_packing: true."
)
ROWS_DROPPED = "Rows are dropped while the data is prepared. Raise max_length, or remove the filter that drops them."
ROWS_EMPTY = "These rows train nothing: their answers are masked. Check the mask that trained tokens names."

ROWS_MIXED = (
    "Rows of one batch affect each other. Remove what mixes them (batch statistics), or use batches of one row."
)
NO_POSITIONS = (
    "The packed row is passed without position_ids, so the model attends to all that is before. TRL: "
    "packing_strategy='bfd' (padding-free); transformers: DataCollatorWithFlattening; axolotl: sample_packing: true "
    "with flash attention; or packing=False."
)
FUTURE = (
    "The attention mask lets a token see those that come after it, which it is to predict. Make the mask causal within "
    "each conversation, or pass none and let the model make it."
)
OWN_MASK = (
    "The batch carries an attention_mask of its own shape, which lets conversations through. Fix it, or pass "
    "position_ids alone, from which transformers makes the mask."
)
MASK_OF_ONES = (
    "The packed rows are passed with an attention_mask, and transformers reads the borders of conversations from "
    "position_ids only without one. Leave the mask out of the batch, as DataCollatorWithFlattening does (LLaMA-"
    "Factory: neat_packing: true), for a model type that supports packed rows; docs/isolation.md lists the types."
)
CACHE = (
    "The cache joins the documents of a row. Set use_cache=False (TrainingArguments(use_cache=False)), also where a "
    "compute_loss of your own calls the model."
)
NOT_ISOLATED = (
    "{name} with attention {attention!r} does not keep packed conversations apart. Set packing=False (and "
    "padding_free=False), or attn_implementation='flash_attention_2' where this model type supports packed rows; "
    "docs/isolation.md lists the types."
)

NAN = "The loss is not finite before anything is trained. Look for NaN or infinity in the model's weights."
UNDIVIDED = (
    "The gradient grows with the number of labels of a step. Divide the sum of the token losses by num_items_in_batch, "
    "or do not override compute_loss."
)
OTHER_LABELS = (
    "The loss is over other tokens than the labels of the batch. A token's logits predict the next one: compare "
    "logits[:, :-1] with labels[:, 1:], and use all labels; or do not override compute_loss."
)
MEAN_OF_MEANS = (
    "The weight of a token depends on the other conversations in its micro-batch. Do not override compute_loss, or "
    "accept num_items_in_batch in it (or in compute_loss_func) and divide the sum of the token losses by it, and set "
    "loss_is_scaled_for_ga accordingly."
)
OTHER_COUNT = (
    "The loss is divided by another number than that of its labels. Mask padding and the first token of each row with "
    "-100, and do not override get_batch_samples or _get_num_items_in_batch."
)
BATCH_DEPENDENT = (
    "What is learned from a row depends on its neighbors in the batch. See isolation, positions and padding; without "
    "packing, packing=False and padding_free=False."
)

PADDING_TRAINED = (
    "Padding is trained, and counted as labels. Pad labels with -100: TRL's collator, DataCollatorForSeq2Seq "
    "(label_pad_token_id=-100), or labels[attention_mask == 0] = -100."
)
TEXT_MASKED = (
    "The attention mask hides tokens of the conversations. Make it from their lengths, not from input_ids != "
    "pad_token_id, or give the tokenizer a padding token of its own."
)
PADDING_ATTENDED = (
    "Padding is attended to. Pass the attention_mask of the tokenizer on to the model, or pad on the right "
    "(tokenizer.padding_side = 'right')."
)

NOT_LEARNING = (
    "Parts that should learn do not. Check requires_grad and the optimizer's parameters; with peft, target_modules and "
    "modules_to_save."
)
NOT_SAVED = (
    "save_model writes the adapter alone, so the saved folder is not the trained model. Leave the base frozen, or name "
    "what is trained in addition to the adapters in LoraConfig(modules_to_save=[...])."
)
TOKENS_FROZEN = (
    "The adapter cannot teach tokens whose embeddings are frozen. LoraConfig(modules_to_save=['embed_tokens', "
    "'lm_head']) or trainable_token_indices=; axolotl: lora_modules_to_save; or a chat template whose tokens the model "
    "knows."
)

NO_END = (
    "A server would generate beyond the answer. TRL: SFTConfig(eos_token=...) with the template's stop token; "
    "transformers: model.generation_config.eos_token_id; axolotl: special_tokens: eos_token."
)
OTHER_TOKENIZER = (
    "The folder's tokenizer gives other ids than those that are trained. Pass the tokenizer that made the data as "
    "processing_class; if it is that one, the folder is loaded as another class, by its config.json."
)
EVALUATION = "In the evaluation's batches: {remedy} TRL prepares eval_dataset as train_dataset; elsewhere do the same."
