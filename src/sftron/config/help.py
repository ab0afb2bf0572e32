"""Descriptions of the schema, for `--help` and for error messages."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from os.path import commonprefix
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from sftron.config.removed import REMOVED
from sftron.config.schema import Config
from sftron.config.values import Section, Wanted

KeyPath = tuple[str | int, ...]
"""`("data", "datasets", 0, "path")` is data.datasets.0.path."""


def describe_config(width: int = 100) -> str:
    """Returns every section and key with its type, default and description, for `--help`."""
    return "\n".join(_describe_section(Config, indent="", width=width)).strip() + "\n"


def _describe_section(section: type[Section], indent: str, width: int) -> Iterator[str]:
    for name, field in keys_of(section).items():
        inner = section_in(field.annotation)
        if inner is not None and section_of(field.annotation) is inner:
            text = " ".join(f"{name}: {field.description or inner.__doc__}".split())
            yield ""
            yield from textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "  ")
            yield from _describe_section(inner, indent + "  ", width)
            continue
        default = "required" if field.is_required() else f"default {_plain(field.default)}"
        margin = indent + "      "
        heading = f"{name} ({default}): {words_of(field.rebuild_annotation())}"
        yield from textwrap.wrap(heading, max(width, 110), initial_indent=indent, subsequent_indent=margin)
        yield from textwrap.wrap(field.description or "", width, initial_indent=margin, subsequent_indent=margin)
        if inner is not None:
            yield from _describe_section(inner, indent + "    ", width)


# --- The schema by key ---


def keys_of(section: type[Section]) -> dict[str, FieldInfo]:
    """Returns the fields by their keys in a file; a key that is a Python keyword (`async`) is a field alias."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def is_section(annotation: Any) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def section_of(annotation: Any) -> type[Section] | None:
    """Returns the section class of a section or an optional section (`Lora | None`); None for other annotations."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next(filter(is_section, options), None)


def section_in(annotation: Any) -> type[Section] | None:
    """Returns the section class of an annotation, or of the items if it is a list; None if there is none."""
    return section_of(get_args(annotation)[0] if get_origin(annotation) is tuple else annotation)


def locate(location: tuple[int | str, ...]) -> tuple[KeyPath, FieldInfo | None]:
    """Returns the key path and the field of a pydantic error location.

    The location may continue after the key with a branch of a union or an index in a list; these are dropped.
    """
    path: KeyPath = ()
    section: type[Section] | None = Config
    field: FieldInfo | None = None
    for part in location:
        if section is None:
            break
        path = (*path, part)
        if isinstance(part, str):
            field = keys_of(section).get(part)
            section = None if field is None else section_in(field.annotation)
    return path, field


# --- Values and types in words ---


def words_of(annotation: Any) -> str:
    """Describes a type in words that complete the sentence "wanted ..."."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        outermost = next((mark.words for mark in reversed(metadata) if isinstance(mark, Wanted)), None)
        return outermost or words_of(inner)
    if get_origin(annotation) is Literal:
        *others, last = get_args(annotation)
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(words_of(option) for option in get_args(annotation))
    if is_section(annotation):
        return f"a mapping with the keys {', '.join(keys_of(annotation))}"
    return {bool: "true or false", NoneType: "null"}[annotation]


def dotted(path: Sequence[str | int]) -> str:
    return ".".join(map(str, path))


def _plain(value: Any) -> str:
    """Returns a value as a user would type it, shortened to 60 characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return textwrap.shorten(text.encode("utf-8", "backslashreplace").decode(), 60) or '""'


def describe_value(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "", int: " (a whole number)", float: " (a number)", str: " (text)", list: " (a list)"}
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
    return (text if len(text) <= 60 else text[:57] + "...") + kinds.get(type(value), " (a mapping)")


# --- Unknown keys ---


def suggest_key(path: KeyPath) -> str:
    """Returns advice for an unknown key, or the keys of its section if there is none.

    Advice is a key of which this one is a misspelling, a key that has this name in another section, or the replacement
    for a key of another trainer. A key of another section must have a name of several words: one word, such as `name`
    or `path`, means something else in each section.
    """
    name = str(path[-1])
    parent = locate(path[:-1])[1]
    section = Config if parent is None else section_in(parent.annotation)
    here = [] if section is None else list(keys_of(section))
    everywhere = _every_key()
    if name in everywhere:
        return f"write {name} nested: a line for each section and one for the key"
    qualified = dotted([part for part in path if isinstance(part, str)][-2:])
    if dotted(path) in REMOVED:
        return f"it was removed: {REMOVED[dotted(path)]}"
    if replacement := OTHER_TRAINERS.get(qualified, OTHER_TRAINERS.get(name)):
        return replacement
    nearest = [key for key in here if _is_slip(name, key)]
    nearest = nearest or [key for key in everywhere if "_" in (last := key.rsplit(".", 1)[-1]) and _is_slip(name, last)]
    return f"did you mean {' or '.join(nearest)}?" if nearest else f"the keys here are {', '.join(here)}"


def _is_slip(name: str, key: str) -> bool:
    """Returns whether at most one letter of the key was changed, added, left out or swapped with the next one.

    With one changed letter, a name of up to five letters is often another word: stage and state, data and date.
    """
    num_equal = len(commonprefix([name, key]))  # noqa: RUF071  of characters, not of folders
    name_rest, key_rest = name[num_equal:], key[num_equal:]
    changed = len(name) > 5 and name_rest[1:] == key_rest[1:]
    added, left_out = name_rest[1:] == key_rest, name_rest == key_rest[1:]
    swapped = name_rest[1::-1] + name_rest[2:] == key_rest
    return len(name) > 2 and (changed or added or left_out or swapped)


@cache
def _every_key() -> tuple[str, ...]:
    return tuple(_all_keys(Config))


def _all_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in keys_of(section).items():
        if inner := section_of(field.annotation):
            yield from _all_keys(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


_REPLACEMENTS = """
adapter peft peft_config use_peft qlora = write a section lora: {rank: 16}; for QLoRA, also model.frozen_dtype: nf4
finetuning_type = write a section lora: {rank: 16} to train adapters; without it, all weights are trained
r rank lora_r lora_rank = write lora.rank
alpha lora_alpha = write lora.alpha
lora_dropout dropout = only lora.dropout: 0 is supported, which is the default: remove the key
target_modules lora_target_modules = write lora.targets: all-linear, a list of names or a regular expression
lora_target_linear = write lora.targets: all-linear, which is the default
layers_to_transform layers_pattern exclude_modules peft_layers_to_transform = write lora.targets, a regular expression
rslora use_rslora peft_use_rslora = write lora.rslora
dora use_dora peft_use_dora = write lora.dora
lora_modules_to_save trainable_token_indices = write lora.modules_to_save, a list of embed_tokens or lm_head
init_lora_weights peft_init_lora_weights = write lora.init, default or gaussian
lora_model_dir adapter_name_or_path = write lora.adapter, the folder of the adapter to go on from
merge_lora = write lora.merge, which is true by default
rank_pattern alpha_pattern = all adapters have one lora.rank and one lora.alpha; patterns are read from lora.adapter
lora_target_parameters target_parameters = only linear layers have adapters, by lora.targets: remove the key
bias lora_bias = biases are not trained with lora: remove the key
task_type lora_task_type peft_type = adapters are always LoRA for a causal language model: remove the key
fan_in_fan_out lora_fan_in_fan_out = the layout of weights is known: remove the key
relora use_galore use_badam = the adapters are LoRA, rsLoRA and DoRA: remove the key
loraplus_lr_ratio = A and B have one rate, optimizer.learning_rate: remove the key
load_in_4bit bnb_4bit_quant_type bnb_config_kwargs quantization_config = write model.frozen_dtype: nf4, with lora
bnb_4bit_compute_dtype bnb_4bit_quant_storage = write model.compute_dtype; model.frozen_dtype is the type of storage
bnb_4bit_use_double_quant use_bnb_nested_quant = write model.frozen_dtype: nf4
load_in_8bit = there are no 8-bit weights: write model.frozen_dtype: bfloat16 or nf4, with lora
push_to_hub hub_model_id = write hub.push_to, the name of the repository, and hub.every
report_to use_wandb use_tensorboard use_mlflow = write logging.to, as in [wandb]
wandb = write the section logging.wandb
wandb_project = write logging.wandb.project
optim optimizer optimizer.type optimizer.name optimizer_name = \
AdamW is the only optimizer: optimizer.learning_rate, optimizer.betas; optimizer.state is fp32 or 8bit
patience early_stopping early_stopping_patience = write evaluation.patience and evaluation.metric
load_best_model_at_end metric_for_best_model = checkpoints.keep_best keeps the best checkpoint
max_length max_seq_length model_max_length sequence_len cutoff_len = write tokens.sequence_length; see data.overlong too
packing sample_packing padding_free = conversations are always packed; data.packing.strategy is pool, minibatch or none
epochs num_epochs num_train_epochs max_steps = write tokens.train_epochs, or tokens.train_steps
evaluation.batch_size per_device_eval_batch_size eval_batch_size = write evaluation.tokens_per_batch, in tokens
batch_size per_device_train_batch_size = write tokens.micro_batch_size; a pack is tokens.sequence_length times as long
gradient_accumulation_steps = write tokens.batch_accumulation_per_replica
lr schedule lr_scheduler lr_scheduler_type = write optimizer.learning_rate, its peak, and optimizer.schedule
seed = write general.seed
betas adam_beta1 adam_beta2 = write optimizer.betas, a list of both
eps adam_epsilon adam_eps = write optimizer.eps
warmup_ratio = write optimizer.warmup_steps, which below 1 is a share of the run
bf16 fp16 dtype torch_dtype = write model.compute_dtype, bfloat16 or float32; trained weights are float32
assistant_only_loss completion_only_loss train_on_inputs = write data.train_on_completions_only
roles_to_train = write data.train_on_roles
base_model model_name_or_path model_name model_id model.name model.id = write model.path, a folder or a Hub id
train_dataset dataset_name dataset datasets data_files data.path = \
write data.datasets, a list with the path of each data set
datasets.type field_messages dataset_text_field = \
a data set's format is detected, or named by format; columns renames columns
eval_dataset evaluation.dataset val_set_size val_size test_datasets = \
write evaluation.share for rows held out of the data, or evaluation.datasets
eval_strategy eval_steps = write evaluation.interval
save_steps save_strategy = write checkpoints.interval, in steps
save_total_limit = write checkpoints.keep_last
resume_from_checkpoint = the same command resumes by itself; checkpoints.resume names another checkpoint
logging_steps = write logging.interval
gradient_checkpointing activation_offloading = write model.activation_checkpointing: none, selective or full
attention attn_implementation flash_attention flash_attn = write model.attention; auto takes the fastest
compile torch_compile = write model.compile: auto, on or off
use_liger_kernel = write model.loss: liger
dp deepspeed fsdp fsdp_config = write parallelism.dp_shard and parallelism.dp_replicate
tp pp cp ep tensor_parallel_size context_parallel_size = \
there is no tensor, pipeline, context or expert parallelism: a model is sharded by parallelism.dp_shard
dataset_num_proc = rows are tokenized while training, by data.num_workers processes a rank
neftune_noise_alpha = noise on embeddings is not supported: remove the key
trust_remote_code = code in a model's folder is never run: remove the key
template = write tokenizer.chat_template; without it, the model's own template is taken
stage = every run is supervised fine-tuning (SFT): remove the key
special_tokens = write tokenizer.add_tokens, a list of control tokens
eos_token pad_token = the template's own stop tokens are found, and packs need no padding: remove the key
"""
"""Well-known keys of other trainers, and their replacements; docs/migrating.md has all.

`optimizer.type` is `type` in the section optimizer only. `seed` is a key, and this is its advice in other sections."""

OTHER_TRAINERS: dict[str, str] = {
    key: sentence
    for keys, sentence in (line.split(" = ") for line in _REPLACEMENTS.strip().splitlines())
    for key in keys.split()
}
"""By key: the replacement, or the statement that there is none."""


def is_optional_section(path: KeyPath) -> bool:
    """Returns whether the key at `path` is a section that may be null."""
    found, field = locate(path)
    annotation = field.annotation if field is not None and found == path else None
    return section_of(annotation) is not None and not is_section(annotation)
