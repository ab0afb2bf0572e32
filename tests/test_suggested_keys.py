"""The advice for a key of another trainer never names a key of another meaning."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from sftron.config import Config
from sftron.config.help import keys_of, locate, section_of, suggest_key
from sftron.config.replacements import OTHER_TRAINERS

# Of LLaMA-Factory, axolotl, nanotron, torchtune and peft, those that resemble a key of ours or are advised on.
OTHERS = """
ABSwap accumulate_grad_in_fp32 activation_offloading adam_beta1 adapter adapter_checkpoint adapter_folder add_tokens
alpha_pattern base_model batch_accumulation_per_replica batch_size bf16 bias chat_template chat_template_jinja
checkpoint_interval checkpoints_path clip_grad compute_dtype context_parallel_size conversation_column cutoff_len
data_files data_stages dataset dataset_folder dataset_weights datasets debug decay_steps device dp dp_replicate_size
dp_shard_size dtype early_stopping_steps epochs eval_dataset eval_max_new_tokens eval_steps expert_parallel_size
field_messages finetuning_type flash_attn fp8 general gradient_accumulation_steps init_method keep_last_n
layers_pattern learning_rate lora_alpha lora_r loss lr lr_scheduler lr_warmup_steps mask_history max_grad_norm
max_new_tokens max_prompt_len max_samples max_seq_len max_steps merges_file method metric_logger micro_batch_size
min_decay_lr min_sample_len model model_id model_revision model_type modules_to_save name num_loading_workers
optimizer output_dir overwrite_cache packed packing parallelism path peft_init_lora_weights pp profiler project
prompt_template push_to_hub r rank_pattern remove_cross_attention resume_checkpoint_path roles roles_to_train
run_name sample_packing save_steps seed sequence_len sequence_length shuffle source special_tokens split stage
streaming target_modules template tokenizer tokenizer_revision tokens torch_dtype tp train_on_completions_only
train_on_input train_on_inputs train_steps trust_remote_code type use_dora use_rslora val_size wandb_mode wandb_name
wandb_project warmup_ratio warmup_steps weight_decay weight_decay_exclude_named_params world_size zero_stage
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
    keys = {*of_trl, *f"{OTHERS} {SHORT}".split()}
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
        ("parallelism.tp", "there is no tensor, pipeline or expert parallelism"),
        ("tp", "there is no tensor, pipeline or expert parallelism"),
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
