"""The peers' documented examples, with a tiny random model and the zoo's rows in place of the Hub's.

Each is as documented, apart from arguments that keep it offline, on the CPU and quiet, and from `processing_class`
where the example leaves the tokenizer out of the trainer.
"""

import tempfile
from pathlib import Path
from typing import Any

import transformers
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from sftcheck.faults import Fault
from tests.sftcheck.zoo_materials import (
    PAIRS,
    ROWS,
    SMOLLM2,
    CompletionOnly,
    broken,
    encoded,
    model,
    sound,
    tok,
    trl_template,
)
from tests.sftcheck.zoo_proofs import answers_alone, labels_are_ids, leak, moved, saved, trained

OFFLINE: dict[str, Any] = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "max_steps": 2}
_HUB = tempfile.TemporaryDirectory(prefix="trainer-zoo-hub-")
DATASET = Dataset.from_list(ROWS)
INSTRUCTIONS = [{"instruction": row["prompt"][10:-8], "output": row["completion"][1:]} for row in PAIRS]
PAIRS_OF_BLOG = [
    {"prompt": f"### Question: {row['instruction']}\n ### Answer:", "completion": f" {row['output']}"}
    for row in INSTRUCTIONS
]


def hub(name: str, tokenizer: PreTrainedTokenizerBase, kind: str) -> str:
    """Saves a tiny model and its tokenizer, as from_pretrained would find them on the Hub; returns the folder."""
    folder = Path(_HUB.name) / name
    if not folder.exists():
        model(tokenizer, kind).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        # The class that config.json names may replace parts of the tokenizer: the file holds them, as on the Hub.
        AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    return str(folder)


def qwen3() -> str:
    return hub("Qwen3-0.6B", tok(template=trl_template("qwen3")), "qwen3")


def qwen2_5_base() -> str:
    tokenizer = tok(template=trl_template("qwen2_5"))
    tokenizer.eos_token = tokenizer.pad_token = "<|endoftext|>"
    return hub("Qwen2.5-0.5B", tokenizer, "qwen2")


def config(**given: Any) -> SFTConfig:
    return SFTConfig(_HUB.name, **OFFLINE, **given)


@broken(Fault.PROMPTS_TRAINED, "trained tokens", proof=lambda t: "My sourdough never rises" in trained(t))
def trl_quick_start() -> Trainer:
    """The quick start of TRL's SFT page: Qwen3 and a `messages` column (Capybara) train every question as well."""
    return SFTTrainer(model=qwen3(), args=config(), train_dataset=DATASET)


@broken(Fault.NO_END, "trained tokens", "generation", proof=lambda t: "My sourdough never rises" in trained(t)
        and t.processing_class.convert_tokens_to_ids("<|im_end|>") not in saved(t)[1])  # fmt: skip
def trl_readme() -> Trainer:
    """The first example of TRL's README: a Qwen2.5 base model, whose saved folder stops at <|endoftext|> alone."""
    return SFTTrainer(model=qwen2_5_base(), args=config(), train_dataset=DATASET)


@broken(Fault.PROMPTS_TRAINED, "trained tokens", proof=lambda t: "My sourdough never rises" in trained(t))
def trl_with_peft() -> Trainer:
    """The example of "Train adapters with PEFT" on TRL's SFT page."""
    return SFTTrainer(model=qwen3(), args=config(), train_dataset=DATASET, peft_config=LoraConfig())


@broken(
    Fault.TRAINING_TEMPLATE,
    "ids",
    may="generation",
    proof=lambda t: "<think>" in trained(t) and "My sourdough never rises" not in trained(t),
)
def trl_assistant_only_loss() -> Trainer:
    """The example of "Train on assistant messages only" on TRL's SFT page: TRL renders its own template with marks.

    It writes an empty thought into every earlier answer, where the tokenizer's own template has none.
    """
    return SFTTrainer(model=qwen3(), args=config(assistant_only_loss=True), train_dataset=DATASET)


@broken(Fault.PROMPTS_TRAINED, "trained tokens", proof=lambda t: "My sourdough never rises" in trained(t)
        and t.processing_class.convert_tokens_to_ids("<|im_end|>") in saved(t)[1])  # fmt: skip
def trl_instruction_tuning() -> Trainer:
    """The example of "Instruction tuning" on TRL's SFT page: a base model takes the template of another model."""
    tokenizer = tok("llama2")
    tokenizer.chat_template = None
    folder = hub("Qwen3-0.6B-Base", tokenizer, "qwen3")
    return SFTTrainer(model=folder, args=config(chat_template_path=str(SMOLLM2)), train_dataset=DATASET)


def blog_flattening(kind: str) -> Trainer:
    tokenizer = tok()
    data_collator = transformers.DataCollatorWithFlattening()
    train_args = TrainingArguments(output_dir=_HUB.name, **OFFLINE)
    train_dataset = Dataset.from_list([{"input_ids": row["input_ids"]} for row in encoded(tokenizer)])
    return Trainer(model=model(tokenizer, kind), args=train_args, train_dataset=train_dataset,
                   data_collator=data_collator, processing_class=tokenizer)  # fmt: skip


@sound(lambda t: leak(t) == 0.0 and labels_are_ids(t), trained_roles="all")
def blog_flattening_of_llama() -> Trainer:
    """The first snippet of Hugging Face's "packing with Flash Attention 2", with sdpa in place of flash attention."""
    return blog_flattening("llama")


@broken(Fault.NOT_ISOLATED, "isolation", may="loss", proof=lambda t: leak(t) > 1e-3, trained_roles="all")
def blog_flattening_of_falcon() -> Trainer:
    """The same with falcon, which the blog lists among the models that are supported."""
    return blog_flattening("falcon")


@broken(
    Fault.OTHER_FORMAT,
    "ids",
    may="trained tokens, stop tokens, truncation, positions",
    conversations=PAIRS_OF_BLOG,
    proof=lambda t: (
        "12 are 2 hours" in trained(t) and "From 14:35" not in trained(t) and "<|im_end|>" not in trained(t)
    ),
)
def blog_completion_only_as_it_was() -> Trainer:
    """The blog's second snippet with a copy of its collator: [2:] leaves the last ":" of a text, which has no EOS."""
    tokenizer = tok()
    tokenizer.pad_token = tokenizer.eos_token
    texts = [f"### Question: {row['instruction']}\n ### Answer: {row['output']}" for row in INSTRUCTIONS]
    response_template_ids = tokenizer.encode(" ### Answer:", add_special_tokens=False)[2:]
    return Trainer(
        model=model(tokenizer), args=TrainingArguments(output_dir=_HUB.name, **OFFLINE),
        train_dataset=Dataset.from_list([{"input_ids": ids} for ids in tokenizer(texts)["input_ids"]]),
        data_collator=CompletionOnly(tokenizer, response_template_ids), processing_class=tokenizer,
    )  # fmt: skip


@sound(
    lambda t: leak(t) == 0.0 and "Question:" not in trained(t) and "34 euros. Happy growing!<|im_end|>" in trained(t)
)
def blog_completion_only_today() -> Trainer:
    """What the blog's second snippet becomes in TRL 1.16: prompt, completion and padding_free=True."""
    tokenizer = tok()
    tokenizer.pad_token = tokenizer.eos_token
    arguments = config(padding_free=True, max_length=None, gradient_checkpointing=True, per_device_train_batch_size=8)
    return SFTTrainer(model(tokenizer), args=arguments, train_dataset=Dataset.from_list(PAIRS_OF_BLOG),
                      processing_class=tokenizer)  # fmt: skip


@sound(
    lambda t: answers_alone(t) and all("q_proj" in name and "lora" in name for name, found in moved(t).items() if found)
)
def peft_quicktour() -> Trainer:
    """peft's quick tour: LoRA on q_proj alone, in transformers' Trainer; its collator is left open there."""
    peft_config = LoraConfig(target_modules=["q_proj"], task_type=TaskType.CAUSAL_LM, inference_mode=False, r=8,
                             lora_alpha=32, lora_dropout=0.1)  # fmt: skip
    tokenizer = tok()
    training_args = TrainingArguments(
        output_dir=_HUB.name, learning_rate=1e-3, per_device_train_batch_size=32, weight_decay=0.01, **OFFLINE
    )
    return Trainer(model=get_peft_model(model(tokenizer), peft_config), args=training_args, processing_class=tokenizer,
                   train_dataset=Dataset.from_list(encoded(tokenizer)),
                   data_collator=transformers.DataCollatorForSeq2Seq(tokenizer))  # fmt: skip


@broken(
    Fault.NO_POSITIONS,
    "isolation",
    "truncation",
    "positions",
    "stop tokens",
    may="ids, trained tokens",
    trained_roles="all",
    proof=lambda t: leak(t) > 1e-3 and "<|im_end|>" not in trained(t),
)
def transformers_language_modeling() -> Trainer:
    """transformers' guide to causal language modeling, on chats: blocks of 128 tokens and pad_token = eos_token."""
    tokenizer = tok()
    tokenizer.pad_token = tokenizer.eos_token
    texts = [str(tokenizer.apply_chat_template(row["messages"], tokenize=False)) for row in ROWS]
    ids = [token for row in tokenizer(texts)["input_ids"] for token in row]
    blocks = [{"input_ids": ids[begin : begin + 128]} for begin in range(0, len(ids) // 128 * 128, 128)]
    return Trainer(
        model=model(tokenizer), args=TrainingArguments(output_dir=_HUB.name, **OFFLINE), processing_class=tokenizer,
        train_dataset=Dataset.from_list(blocks),
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False),
    )  # fmt: skip
