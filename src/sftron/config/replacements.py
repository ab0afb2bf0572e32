"""Keys that the configuration lacks, and their replacements: removed keys, and keys of other trainers."""

from __future__ import annotations

REMOVED: dict[str, str] = {
    "logging.ledger": "each step's digest is always in metrics.jsonl, and `sftron audit` reads it",
    "optimizer.state": "write optimizer.name: adamw for fp32, adamw_8bit for 8bit",
    "model.loss=cce": "write native, or liger with the package liger-kernel",
}
"""By `section.key`, or by `section.key=value`: the sentence after "was removed". A row takes effect once its key has
left the schema, and may be added earlier."""

_REPLACEMENTS = """
adapter peft peft_config use_peft qlora = write a section lora: {rank: 16}; for QLoRA, also model.frozen_dtype: nf4
finetuning_type = write a section lora: {rank: 16} to train adapters; without it, all weights are trained
r rank lora_r lora_rank = write lora.rank
alpha lora_alpha = write lora.alpha
lora_dropout dropout = lora.dropout supports only 0, the default: remove the key
target_modules lora_target_modules = write lora.targets: all-linear, a list of names or a regular expression
lora_target_linear = write lora.targets: all-linear, which is the default
layers_to_transform layers_pattern exclude_modules peft_layers_to_transform = write lora.targets, a regular expression
rslora use_rslora peft_use_rslora = write lora.rslora
dora use_dora peft_use_dora = write lora.dora
lora_modules_to_save trainable_token_indices = write lora.modules_to_save, a list of embed_tokens or lm_head
init_lora_weights peft_init_lora_weights = write lora.init, default or gaussian
lora_model_dir adapter_name_or_path = write lora.adapter, the folder of the adapter to continue from
merge_lora merge_and_unload = write lora.merge (true by default)
rank_pattern alpha_pattern = all adapters have one lora.rank and one lora.alpha; patterns are read from lora.adapter
lora_target_parameters target_parameters = only linear layers have adapters, by lora.targets: remove the key
bias lora_bias = biases are not trained with lora: remove the key
task_type lora_task_type peft_type = adapters are always LoRA for a causal language model: remove the key
fan_in_fan_out lora_fan_in_fan_out = sftron knows the layout of weights: remove the key
relora use_galore use_badam = the adapters are LoRA, rsLoRA and DoRA: remove the key
loraplus_lr_ratio = A and B have one rate, optimizer.learning_rate: remove the key
load_in_4bit bnb_4bit_quant_type bnb_config_kwargs quantization_config = write model.frozen_dtype: nf4, with lora
bnb_4bit_compute_dtype bnb_4bit_quant_storage = write model.compute_dtype; model.frozen_dtype is the type of storage
bnb_4bit_use_double_quant use_bnb_nested_quant = write model.frozen_dtype: nf4
load_in_8bit = 8-bit weights are not supported: write model.frozen_dtype: bfloat16 or nf4, with lora
push_to_hub hub_model_id = write hub.push_to, the name of the repository, and hub.every
report_to use_wandb use_tensorboard use_mlflow = write logging.to, as in [wandb], or [] for none
wandb = write the section logging.wandb
wandb_project = write logging.wandb.project
wandb_entity = write logging.wandb.entity
wandb_mode = write logging.wandb.mode: online, offline or disabled
optim optimizer optimizer.type optimizer_name = write optimizer.name: adamw, adamw_8bit or muon
patience early_stopping early_stopping_patience = write evaluation.patience and evaluation.metric
load_best_model_at_end metric_for_best_model = checkpoints.keep_best keeps the best checkpoint
max_length max_seq_length model_max_length sequence_len cutoff_len = write tokens.sequence_length; see data.overlong too
packing sample_packing padding_free batch_flattening packing_strategy pack_len = \
conversations are always packed; data.packing.strategy is pool, minibatch or none
epochs num_epochs num_train_epochs max_steps = write tokens.train_epochs, or tokens.train_steps
evaluation.batch_size per_device_eval_batch_size eval_batch_size = write evaluation.tokens_per_batch, in tokens
batch_size per_device_train_batch_size = write tokens.micro_batch_size; a pack is tokens.sequence_length times as long
gradient_accumulation_steps = write tokens.batch_accumulation_per_replica
lr schedule lr_scheduler lr_scheduler_type lr_decay_style = \
write optimizer.learning_rate, its peak, and optimizer.schedule: cosine, linear, constant or wsd
lr_warmup_style = the warm-up is linear, over optimizer.warmup_steps: remove the key
lr_decay_steps lr_decay_starting_step = the decay ends with the run; wsd decays over its optimizer.decay_share
cosine_min_lr_ratio min_decay_lr = write optimizer.min_learning_rate_ratio, a share of the peak
clip_grad = write optimizer.max_grad_norm
wrapped = conversations are not split over packs; data.packing.strategy is pool, minibatch or none
excess_length_strategy truncation_mode = write data.overlong: drop, truncate_turns or error
shuffle_dataset shuffle_merged_datasets = rows are always shuffled, by general.seed: remove the key
loss_type chunked_nll = the loss is the mean over all trained tokens; write model.loss: auto, native or liger
seed data_seed = write general.seed
betas adam_beta1 adam_beta2 = write optimizer.betas, a list of both
eps adam_epsilon adam_eps = write optimizer.eps
warmup_ratio = write optimizer.warmup_steps, which below 1 is a share of the run
bf16 fp16 dtype torch_dtype = write model.compute_dtype, bfloat16 or float32; trained weights are float32
assistant_only_loss completion_only_loss = write data.train_on_completions_only, with the same value
train_on_inputs = write data.train_on_completions_only with the opposite value; data.train_on_roles names single roles
train_on_eos train_on_eot eot_tokens = a turn's stop token is always trained; data.train_on_turns is all or last
chat_template_kwargs enable_thinking = write tokenizer.template_kwargs, a mapping such as {enable_thinking: false}
split_thinking field_thinking = write data.reasoning: keep, last or strip
roles_to_train = write data.train_on_roles; for the last answer only, data.train_on_turns: last
roles = sftron knows each format's roles (the page on data lists them); data.train_on_roles names the trained ones
prompt_template = write prompt_template below the path of a data set in data.datasets, or tokenizer.chat_template
formatting_func = write the rows as messages, or prompt and completion; plain text has format: text
pretraining_dataset = write format: text below the path of a data set in data.datasets
message_field_training message_field_training_detail train_detail = a message has the key weight, 0 or 1
min_sample_len drop_system_message default_system_message dataset_exact_deduplication = \
sftron does not change rows: change them beforehand, and remove the key
dataset_prepared_path = sftron tokenizes rows while training and stores nothing: remove the key
dataset_kwargs = tokenized rows need format: input_ids, with labels: remove the key
fix_untrained_tokens = rows of new tokens start as the mean of all others: remove the key
strict = unknown keys are always refused: remove the key
base_model model_name_or_path model_name model_id model.name model.id model_init_kwargs = \
write model.path, a folder or a Hub id
train_dataset dataset_name dataset datasets data_files data_path data.path = \
write data.datasets, a list with the path of each data set
hf_dataset hf_dataset_split = write data.datasets, a list with the path and the split of each data set
datasets.type field_messages field_system field_tools message_property_mappings dataset_text_field \
conversation_column_name query_field resp_field = \
a data set's format is detected, or named by format; columns renames columns
eval_dataset evaluation.dataset val_set_size val_size test_datasets = \
write evaluation.share for rows held out of the data, or evaluation.datasets
eval_strategy eval_steps = write evaluation.interval, in steps, and evaluation.share or evaluation.datasets
eval_packing = evaluation sets are always packed, in documents that see only themselves; see evaluation.share
save_steps save_strategy checkpoint_interval = write checkpoints.interval, in steps
save_total_limit = write checkpoints.keep_last
resume_from_checkpoint auto_resume_from_checkpoints resume_checkpoint_path = \
the same command resumes automatically; checkpoints.resume names another checkpoint
logging_steps = write logging.interval
gradient_checkpointing activation_offloading = write model.activation_checkpointing: none, selective or full
attention attn_implementation flash_attention flash_attn sdp_attention flex_attention = \
write model.attention; auto takes the fastest
compile torch_compile = write model.compile: auto, on or off
use_liger_kernel = write model.loss: liger
dp deepspeed fsdp fsdp_config zero_stage dp_shard_size dp_replicate_size = \
write parallelism.dp_shard and parallelism.dp_replicate
cp context_parallel_size sequence_parallel_size = write parallelism.context, the number of ranks that share a pack
tokenizer_name_or_path = write tokenizer.path; without it, the run uses the model's own tokenizer
output_dir checkpoints_path = write general.output_dir; each run has the folder general.run_name in it
tp pp ep tensor_parallel_size = \
tensor, pipeline and expert parallelism are not supported: write parallelism.dp_shard to shard a model
dataset_num_proc = sftron tokenizes rows while training: write data.num_workers, processes per rank
neftune_noise_alpha = noise on embeddings is not supported: remove the key
trust_remote_code = sftron never runs code from a model's folder: remove the key
template chat_template_path chat_template_jinja = \
write tokenizer.chat_template; without it, the run uses the model's own template
stage = every run is supervised fine-tuning (SFT): remove the key
special_tokens tokens.tokens = write tokenizer.add_tokens, a list of control tokens
eos_token pad_token pad_to_multiple_of pad_to_sequence_len = \
sftron finds the template's stop tokens, and packs need no padding: remove the key
"""
"""Well-known keys of other trainers, and their replacements; docs/migrating.md has all.

`optimizer.type` means `type` in the section optimizer only. `seed` is a key; its row is advice for other sections."""

VALUES_OF_OTHERS: dict[str, str] = {
    "optimizer.schedule=constant_with_warmup": "write constant; every schedule warms up over optimizer.warmup_steps",
    "optimizer.schedule=warmup_stable_decay": "write wsd, and its optimizer.decay_share",
    "optimizer.schedule=cosine_with_min_lr": "write cosine, and optimizer.min_learning_rate_ratio",
    "model.attention=flash_attention_2": "write auto, which takes the fastest one, or flash_attn",
    "model.attention=flash_attention_3": "write auto, which takes the fastest one, or flash_attn",
    "model.attention=flex_attention": "write flex",
    "model.attention=eager": "write sdpa",
    "model.compute_dtype=bf16": "write bfloat16",
    "model.compute_dtype=fp16": "training in float16 is not supported: write bfloat16, or float32",
    "model.compute_dtype=float16": "training in float16 is not supported: write bfloat16, or float32",
    "model.compute_dtype=fp32": "write float32",
    "model.frozen_dtype=4bit": "write nf4",
    "data.packing.strategy=bfd": "write pool",
    "data.overlong=truncate": "write truncate_turns, which removes whole turns",
    "logging.to=none": "write [] for no logger",
    "logging.to=all": "write a list of loggers, as in [wandb]",
    "logging.to=comet": "write comet_ml",
}
"""By `section.key=value`: the replacement for a well-known value of another trainer."""

OTHER_TRAINERS: dict[str, str] = {
    key: sentence
    for keys, sentence in (line.split(" = ") for line in _REPLACEMENTS.strip().splitlines())
    for key in keys.split()
}
"""By key: the replacement, or a statement that none exists."""
