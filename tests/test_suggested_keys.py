"""The advice for a key of another trainer never names a key of another meaning."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from sftron.config import Config
from sftron.config.help import OTHER_TRAINERS, keys_of, locate, section_of, suggest_key

LLAMA_FACTORY = """
ABSwap adapter_folder adapter_name_or_path add_special_tokens add_tokens additional_target apollo_layerwise
apollo_rank apollo_scale apollo_target apollo_update_interval audio_sampling_rate badam_mode badam_start_block
badam_switch_interval bf16 block_diag_attn buffer_size cache_dir compute_accuracy compute_dtype create_new_adapter
crop_to_patches cutoff_len data_shared_file_system dataset dataset_dir ddp_find_unused_parameters_ ddp_timeout
deepspeed_ default_system device_map disable_gradient_checkpointing disable_shuffling disable_version_check
discard_history do_eval do_predict do_sample do_train dpo_label_smoothing early_stopping_steps enable_liger_kernel
enable_thinking eval_dataset eval_num_beams eval_on_each_dataset eval_steps eval_strategy export_device export_dir
export_hub_model_id export_legacy_format export_quantization_bit export_quantization_dataset export_size
finetuning_type flash_attn fp8 freeze_extra_modules freeze_language_model freeze_trainable_layers
freeze_trainable_modules freeze_vision_tower galore_layerwise galore_proj_type galore_rank galore_scale galore_target
galore_update_interval gradient_accumulation_steps hf_hub_token high_precision ignore_pad_token_for_loss
image_max_pixels image_min_pixels include_effective_tokens_per_second include_num_input_tokens_seen infer_backend
infer_dtype init_special_tokens interleave_probs kto_chosen_weight kv_cache_dtype ld_alpha learning_rate
length_penalty logging_steps lora_alpha lora_dropout lora_rank lora_target loraplus_lr_embedding loraplus_lr_ratio
low_cpu_mem_usage low_memory lr_scheduler_type mask_history max_grad_norm max_length max_new_tokens max_samples
media_dir mix_strategy mixture_of_depths model_max_length model_name_or_path model_revision modelscope module_dropout
moe_aux_loss_coef name_module_trainable neat_packing new_special_tokens_config num_beams num_layer_trainable
num_train_epochs offload_folder om_hub_token optim output_dir overwrite_cache overwrite_output_dir packing
per_device_eval_batch_size per_device_train_batch_size pissa_convert pissa_init pissa_iter plot_loss ppo_buffer_size
pref_beta pref_ftx pref_loss preprocessing_batch_size preprocessing_num_workers print_param_status pure_bf16
quantization_bit quantization_device_map quantization_method quantization_type ray_run_name ray_storage_path ref_model
repetition_penalty report_to resize_vocab reward_model rope_scaling run_name save_only_model save_steps save_strategy
seed sglang_config shift_attn simpo_gamma skip_special_tokens split_special_tokens stage steps_per_print streaming
swanlab_mode swanlab_project swanlab_run_name temperature template tokenized_path tool_format top_k top_p
train_from_scratch train_mm_proj_only train_on_prompt trust_remote_code upcast_layernorm upcast_lmhead_output
use_adam_mini use_apollo use_asft_loss use_audio_in_video use_badam use_cache use_dft_loss use_dora use_fast_tokenizer
use_galore use_kt use_kv_cache use_llama_pro use_muon use_reentrant_gc use_rslora use_swanlab use_unsloth
use_unsloth_gc use_v1_kernels val_size video_fps video_maxlen vllm_config vllm_enforce_eager vllm_gpu_util vllm_maxlen
warmup_ratio warmup_steps weight_decay
"""
AXOLOTL = """
accelerator_config activation_offloading adam_beta1 adam_beta2 adam_beta3 adam_epsilon adapter adversarial_dropout
auto_find_batch_size auto_resume_from_checkpoints base_model base_model_config base_model_ignore_patterns
batch_flattening batch_size bench_dataset bf16 bfloat16 bnb_config_kwargs bos_token chat_template chat_template_jinja
chunked_cross_entropy cls_model_config comet_api_key comet_experiment_key comet_mode comet_project_name
comet_workspace context_parallel_size cosine_constant_lr_ratio cosine_min_lr_ratio curriculum_sampling
cut_cross_entropy dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor
dataset_exact_deduplication dataset_keep_in_memory dataset_num_proc dataset_prepared_path dataset_processes
dataset_shard_idx dataset_shard_num datasets ddp ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters
ddp_timeout debug deepspeed default_system_message device device_map do_bench_eval do_causal_lm_eval do_not_train
dp_replicate_size dp_shard_size drop_system_message ds_type early_stopping_patience embeddings_skip_upcast eot_tokens
eval_batch_size eval_causal_lm_metrics eval_max_new_tokens eval_sample_packing eval_steps eval_strategy
eval_table_size evals_per_epoch evaluation_strategy excess_length_strategy experimental_skip_move_to_device
expert_parallel_size field field_human field_input field_instruction field_messages field_model field_output
field_system field_thinking field_tools fix_untrained_tokens flash_attention flash_attn_cross_entropy
flash_attn_fuse_mlp flash_attn_rms_norm flash_optimum flex_attention flex_attn_compile_kwargs float16 fp16 fp8 fsdp
fsdp_config fsdp_final_state_dict_type fsdp_version gc_steps gpu_memory_limit gradient_accumulation_steps
gradient_checkpointing gradient_checkpointing_kwargs greater_is_better group_by_length hf_mlflow_log_artifacts
hf_use_auth_token hub_model_id hub_revision hub_strategy include_tokens_per_second include_tkps
is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_preprocess is_qwen_derived_model
jagged_restart_steps jagged_restart_warmup_steps kd_alpha kd_ce_alpha kd_temperature label_smoothing_factor
layer_offloading learning_rate liger_glu_activation liger_rms_norm liger_rope lisa_layers_attribute lisa_n_layers
lisa_step_interval llama4_linearized_experts llmcompressor load_best_model_at_end load_in_4bit load_in_8bit local_rank
logging_steps lora_alpha lora_bias lora_dropout lora_fan_in_fan_out lora_mlp_kernel lora_model_dir
lora_modules_to_save lora_o_kernel lora_on_cpu lora_qkv_kernel lora_r lora_target_linear lora_target_modules
lora_target_parameters loraplus_lr_embedding loraplus_lr_ratio loss_watchdog_patience loss_watchdog_threshold
low_cpu_mem_usage lr_groups lr_quadratic_warmup lr_scheduler lr_scheduler_kwargs max_grad_norm max_memory
max_packed_sequence_len max_prompt_len max_steps mean_resizing_embeddings merge_lora message_field_content
message_field_role message_field_training message_field_training_detail message_property_mappings method
metric_for_best_model micro_batch_size min_sample_len mlflow_experiment_name mlflow_run_name mlflow_tracking_uri
model_config_type model_type multipack_real_batches name neftune_noise_alpha noisy_embedding_alpha num_epochs
num_generation_examples optim_args optim_target_modules optimizer orpo_alpha output_dir overrides_of_model_config
overrides_of_model_kwargs pad_to_sequence_len parallelism_config path peft peft_autocast_adapter_dtype
peft_init_lora_weights peft_layer_replication peft_layers_pattern peft_layers_to_transform
peft_trainable_token_indices peft_use_dora peft_use_rslora plugins pretraining_dataset
pretraining_sample_concatenation process_reward_model processor_type profiler_steps profiler_steps_start
push_dataset_to_hub push_to_hub qat quantization ray_num_workers ray_run_name relora relora_cpu_offload
relora_prune_ratio relora_steps remove_unused_columns resize_token_embeddings_to_32x resume_from_checkpoint
reward_model revision_of_model ring_attn_func rl roles roles_to_train rope_scaling rpo_alpha s2_attention
sample_packing sample_packing_bin_size sample_packing_drop_attention_mask sample_packing_eff_est
sample_packing_group_size sample_packing_sequentially save_first_step save_only_model save_safetensors save_steps
save_strategy save_total_limit saves_per_epoch scaling_softmax sdp_attention seed sequence_len
sequence_parallel_degree shard shards shuffle_before_merging_datasets shuffle_merged_datasets simpo_gamma
skip_prepare_dataset special_tokens spectrum_top_fraction spectrum_model_name split split_thinking
streaming_multipack_buffer_size strict swanlab_project tensor_parallel_size test_datasets test_value tf32 tiled_mlp
tiled_mlp_num_shards tokenizer_config tokenizer_legacy tokenizer_save_jinja_files tokenizer_type tokenizer_use_fast
tokenizer_use_mistral_common tokens torch_compile torch_compile_backend torch_compile_mode torch_dtype torchdistx_path
total_num_tokens total_supervised_tokens train_on_eos train_on_eot train_on_inputs trl truncation trust_remote_code
type unfrozen_parameters unsloth_lora_mlp use_comet use_dynamic_finetuning use_mlflow use_otel_metrics use_pose
use_ray use_tensorboard use_trackio use_wandb val_set_size vllm wandb_entity wandb_log_model wandb_mode wandb_name
wandb_project wandb_run_id wandb_watch warmup_ratio warmup_steps weight_decay world_size xformers_attention zero_first
"""
NANOTRON = """
accumulate_grad_in_fp32 adam_beta1 adam_beta2 adam_eps batch_accumulation_per_replica benchmark_csv_path
checkpoint_interval checkpoints checkpoints_path checkpoints_path_is_shared_file_system clip_grad
consumed_train_samples context_parallel_size conversation_column_name data data_stages dataloader_type dataset
dataset_folder dataset_max_tokens dataset_processing_num_proc_per_process dataset_read_path dataset_weights dp dtype
eod_mask_loss expert_parallel_size fp8 general grad_scale hf_dataset_config_name hf_dataset_data_dir
hf_dataset_or_datasets hf_dataset_splits ignore_sanity_checks init_method iteration_step_info_interval learning_rate
learning_rate_scheduler lighteval limit_test_batches limit_val_batches load_lr_scheduler load_optimizer log_level
log_level_replica lr_decay_starting_step lr_decay_steps lr_decay_style lr_warmup_steps lr_warmup_style
make_vocab_size_divisible_by metrics_logging micro_batch_size min_decay_lr model_config num_layers num_loading_workers
optimizer optimizer_factory pad_samples_to_global_batch_size parallelism pp pp_engine profiler project recompute_layer
remove_cross_attention resume_checkpoint_path return_positions run s3_upload sanity_token_dataloader_interval
save_final_state save_initial_state seed sequence_length shuffle_files skip_tokenization start_training_step std step
stop_on_nan text_column_name tokenizer tokenizer_max_length tokenizer_name_or_path tokenizer_revision tokens
torch_adam_is_fused tp tp_linear_async_communication tp_mode tp_recompute_allgather train_on_completions_only
train_steps use_async_tp val_check_interval vocab_file wandb_id weight_decay weight_decay_exclude_named_params
zero_stage
"""
TORCHTUNE = """
activation_offloading adapter_checkpoint apply_lora_to_mlp apply_lora_to_output batch_size checkpoint_dir
checkpoint_files checkpointer clip_grad_norm clip_grad_value_ compile component conversation_column
custom_sharded_layers data_files dataset dataset_val device dtype enable_activation_checkpointing
enable_activation_offloading enable_async_checkpointing epochs fused gamma gradient_accumulation_steps
keep_last_n_checkpoints log_dir log_every_n_steps log_level log_peak_memory_stats lora_alpha lora_attn_modules
lora_dropout lora_rank loss lr lr_scheduler max_seq_len max_steps_per_epoch memory_efficient_fsdp_wrap merges_file
metric_logger model model_type new_system_prompt num_output_chunks num_warmup_steps optimizer optimizer_in_bwd
output_dir packed packing_strategy profiler prompt_template quantizer recipe_checkpoint resume_from_checkpoint
run_val_every_n_steps safe_serialization save_adapter_weights_only seed shuffle source split tensor_parallel_dim
tensor_parallel_plan tokenizer train_on_input weight_decay
"""
PEFT = """
alpha_pattern auto_mapping base_model_name_or_path bias corda_config eva_config exclude_modules fan_in_fan_out
inference_mode init_lora_weights layer_replication layers_pattern layers_to_transform loftq_config lora_alpha
lora_bias lora_dropout megatron_config megatron_core modules_to_save peft_type qalora_group_size r rank_pattern
revision runtime_config target_modules target_parameters task_type trainable_token_indices use_dora use_qalora
use_rslora
"""
SHORT = "name path to load state type kind size steps step data eval train val test model_id max_len tags group every"

# Judged by hand: another trainer's key that is one of ours, or nearly so, and the keys of ours that mean the same.
SAME_MEANING = {
    "add_tokens": "tokenizer.add_tokens",
    "activation_checkpointing": "model.activation_checkpointing",
    "batch_accumulation_per_replica": "tokens.batch_accumulation_per_replica",
    "chat_template": "tokenizer.chat_template",
    "compute_dtype": "model.compute_dtype",
    "learning_rate": "optimizer.learning_rate",
    "max_grad_norm": "optimizer.max_grad_norm",
    "max_new_tokens": "evaluation.max_new_tokens",
    "max_samples": "data.datasets.max_samples",
    "micro_batch_size": "tokens.micro_batch_size",
    "modules_to_save": "lora.modules_to_save",
    "output_dir": "general.output_dir",
    "prompt_template": "data.datasets.prompt_template",
    "remove_cross_attention": "data.remove_cross_attention",
    "router_aux_loss_coef": "model.router_aux_loss_coef",
    "run_name": "general.run_name",
    "sequence_length": "tokens.sequence_length",
    "train_on_completions_only": "data.train_on_completions_only",
    "train_steps": "tokens.train_steps",
    "warmup_steps": "optimizer.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
}


def keys_of_trl() -> set[str]:
    """Returns the fields of TRL's and transformers' arguments from their source, because an import takes seconds."""
    files = {"trl": "*/*config.py", "transformers": "training_args.py"}
    folders = {name: importlib.util.find_spec(name) for name in files}
    sources = [
        path.read_text(encoding="utf-8")
        for name, spec in folders.items()
        for folder in (spec.submodule_search_locations or () if spec else ())
        for path in Path(folder).glob(files[name])
        if path.name in ("base_config.py", "sft_config.py", "model_config.py", "training_args.py")
    ]
    return {
        field.target.id
        for source in sources
        for part in ast.walk(ast.parse(source))
        if isinstance(part, ast.ClassDef)
        for field in part.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def test_no_key_of_another_trainer_is_answered_with_a_key_of_another_meaning() -> None:
    of_trl = keys_of_trl()
    assert {"assistant_only_loss", "lora_r", "per_device_train_batch_size"} <= of_trl
    keys = {*of_trl, *f"{LLAMA_FACTORY} {AXOLOTL} {NANOTRON} {TORCHTUNE} {PEFT} {SHORT}".split()}
    sections = [(), ("lora",), ("evaluation", "datasets", 0), ("data", "packing"), ("data", "datasets", 0)]
    sections += [(name,) for name, field in keys_of(Config).items() if section_of(field.annotation)]
    num_asked = num_advised = 0
    for key in sorted(keys):
        for section in sections:
            path = (*section, key)
            if locate(path)[1] is not None:
                continue
            num_asked += 1
            advice = suggest_key(path)
            if advice.startswith("the keys here are "):
                continue
            num_advised += 1
            if advice not in OTHER_TRAINERS.values():
                assert key in SAME_MEANING, f"{path}: {advice}"
                assert advice == f"did you mean {SAME_MEANING[key]}?", path
    print(f"{len(keys)} keys in {len(sections)} sections: {num_advised} of {num_asked} have advice")
    assert num_advised > 1000


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("optimizer.name", "AdamW is the only optimizer"),
        ("optimizer.type", "AdamW is the only optimizer"),
        ("parallelism.tp", "there is no tensor, pipeline, context or expert parallelism"),
        ("tp", "there is no tensor, pipeline, context or expert parallelism"),
        ("stage", "every run is supervised fine-tuning (SFT): remove the key"),
        ("template", "write tokenizer.chat_template; without it, the model's own template is taken"),
        ("finetuning_type", "write a section lora: {rank: 16} to train adapters; without it, all weights are trained"),
        ("model_id", "write model.path, a folder or a Hub id"),
        ("model.type", "the keys here are path,"),
        ("data.datasets.0.type", "a data set's format is detected, or named by format"),
        ("learning_rate", "did you mean optimizer.learning_rate?"),
        ("tokens.warmup_stepps", "did you mean optimizer.warmup_steps?"),
        ("optimizer.warm_up_steps", "did you mean warmup_steps?"),
        ("optimizer.wramup_steps", "did you mean warmup_steps?"),
    ],
)
def test_a_key_that_is_not_here_has_its_own_sentence(key: str, advice: str) -> None:
    path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
    assert suggest_key(path).startswith(advice)


def test_every_key_with_one_wrong_letter_is_recognized_in_its_section() -> None:
    """Of one letter left out, doubled or swapped. A slip may also be a slip of the key's neighbor, or another key."""
    num_slips = 0
    for section, field in keys_of(Config).items():
        inner = section_of(field.annotation)
        assert inner is not None
        for key in keys_of(inner):
            for n in range(1, len(key)):
                for slip in (
                    key[:n] + key[n + 1 :],
                    key[:n] + key[n] + key[n:],
                    key[: n - 1] + key[n] + key[n - 1] + key[n + 1 :],
                ):
                    if slip in keys_of(inner) or slip in OTHER_TRAINERS or len(slip) < 3:
                        continue
                    num_slips += 1
                    advice = suggest_key((section, slip))
                    assert re.search(rf"^did you mean .*\b{key}\b", advice), (section, slip, advice)
    assert num_slips > 1500
