"""Well-known keys of TRL, axolotl and transformers, and their replacements, for error messages about unknown keys.

docs/migrating.md compares all keys, with their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping

_ADAPTERS = "adapters are not supported: all weights are trained"
_QUANTIZED = (
    "quantized models are not here: weights are float32, and model.compute_dtype is the type of the computation"
)
_HUB = "nothing is uploaded: checkpoints.export_hf writes a complete folder, hf/step-N, to upload by hand"
_WANDB = "metrics.jsonl is always written; logging.wandb.mode and logging.wandb.project send the same to wandb"
_OPTIMIZER = "AdamW is the only optimizer: optimizer.learning_rate, optimizer.betas, optimizer.weight_decay"
_STOPPING = "runs end at their length; checkpoints.keep_best keeps the best checkpoint, by evaluation.interval"
_LENGTH = "write tokens.sequence_length, the longest conversation; longer ones are not cut, see data.overlong"
_PACKING = "conversations are always packed; data.packing.strategy is pool, minibatch or none, one conversation a pack"
_EPOCHS = "write tokens.train_epochs, or tokens.train_steps"
_BATCH = (
    "write tokens.micro_batch_size: a step takes tokens.sequence_length x tokens.micro_batch_size x "
    "tokens.batch_accumulation_per_replica tokens per rank"
)
_ACCUMULATION = "write tokens.batch_accumulation_per_replica"
_RATE = "write optimizer.learning_rate, its peak, and optimizer.schedule"
_WARMUP = "write optimizer.warmup_steps, in steps"
_PRECISION = "write model.compute_dtype, bfloat16 or float32; weights are float32"
_TRAINED = "write data.train_on_completions_only (true), or data.train_on_roles for the roles that are trained"
_MODEL = "write model.path, a folder or a Hub id"
_DATA = "write data.datasets, a list with the path of each data set"
_FORMAT = "the format of the rows is detected, or named by format; columns names columns that are called otherwise"
_EVALUATION = "write evaluation.share for rows held out of the data or evaluation.datasets, and evaluation.interval"
_SHARDING = "parallelism.dp_shard and parallelism.dp_replicate set how torchrun's ranks share the model"
_RECOMPUTATION = "write model.activation_checkpointing: none, selective or full"

SENTENCES: Mapping[str, str] = {
    **dict.fromkeys(("peft", "peft_config", "use_peft", "lora", "lora_r", "lora_alpha", "lora_dropout"), _ADAPTERS),
    **dict.fromkeys(("lora_target_modules", "lora_target_linear", "adapter", "qlora"), _ADAPTERS),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization_config"), _QUANTIZED),
    **dict.fromkeys(("push_to_hub", "hub_model_id"), _HUB),
    **dict.fromkeys(("report_to", "wandb_project", "use_wandb"), _WANDB),
    **dict.fromkeys(("optim", "optimizer"), _OPTIMIZER),
    **dict.fromkeys(("early_stopping", "early_stopping_patience", "load_best_model_at_end"), _STOPPING),
    **dict.fromkeys(("max_length", "max_seq_length", "model_max_length", "sequence_len", "cutoff_len"), _LENGTH),
    **dict.fromkeys(("packing", "sample_packing", "padding_free"), _PACKING),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "max_steps"), _EPOCHS),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size"), _BATCH),
    "gradient_accumulation_steps": _ACCUMULATION,
    **dict.fromkeys(("lr", "lr_scheduler", "lr_scheduler_type"), _RATE),
    "warmup_ratio": _WARMUP,
    **dict.fromkeys(("bf16", "fp16", "dtype", "torch_dtype"), _PRECISION),
    **dict.fromkeys(("assistant_only_loss", "completion_only_loss", "train_on_inputs", "roles_to_train"), _TRAINED),
    **dict.fromkeys(("base_model", "model_name_or_path"), _MODEL),
    **dict.fromkeys(("train_dataset", "dataset_name", "dataset"), _DATA),
    **dict.fromkeys(("type", "field_messages", "dataset_text_field"), _FORMAT),
    **dict.fromkeys(("eval_dataset", "eval_strategy", "eval_steps", "val_set_size", "test_datasets"), _EVALUATION),
    **dict.fromkeys(("save_steps", "save_strategy"), "write checkpoints.interval, in steps"),
    "save_total_limit": "write checkpoints.keep_last",
    "resume_from_checkpoint": "the same command resumes by itself; checkpoints.resume names another checkpoint",
    "logging_steps": "write logging.interval",
    **dict.fromkeys(("gradient_checkpointing", "activation_offloading"), _RECOMPUTATION),
    **dict.fromkeys(("attn_implementation", "flash_attention"), "write model.attention; auto takes the fastest"),
    "torch_compile": "write model.compile: auto, on or off",
    "use_liger_kernel": "write model.loss: liger",
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config"), _SHARDING),
    "tensor_parallel_size": "there is no tensor parallelism: a model is sharded by parallelism.dp_shard",
    "dataset_num_proc": "rows are tokenized while training, by data.num_workers processes a rank",
    "neftune_noise_alpha": "noise on embeddings is not here: remove the key",
    "trust_remote_code": "code of a model's folder is never run: remove the key",
    "special_tokens": "write tokenizer.add_tokens, a list of control tokens",
    **dict.fromkeys(("eos_token", "pad_token"), "the template's own stop tokens are found, and packs need no padding"),
}
"""By key of another trainer: the replacement, or the statement that there is none."""
