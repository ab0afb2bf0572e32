"""What the trainers of trainer_zoo.py are made of: conversations, tokenizers, tiny random models, trainers of TRL and
transformers with quiet arguments, and collators and losses as people write them.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from tests.conftest import ASSETS, LLAMA3_TEMPLATE, ROOT
from tests.sftcheck.set_up import Zoo
from tools.isolation_table import CASES, Case, make_config

SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"
_SCRATCH = tempfile.TemporaryDirectory(prefix="trainer-zoo-")
Rows = list[dict[str, Any]]


ZOO = Zoo()
broken, sound = ZOO.broken, ZOO.sound


def _rows(path: str, step: int = 1) -> Rows:
    return [json.loads(line) for line in (ROOT / path).read_text(encoding="utf-8").splitlines()[::step]]


LONG = _rows("tests/assets/zoo_conversations.jsonl")
"""A dozen conversations of 1 to 4 answers, in several languages, with code, tables and system prompts."""
ROWS = LONG + _rows("examples/quickstart/product.jsonl", 4) + _rows("examples/quickstart/support.jsonl", 6)
ANSWERS = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in ROWS]
PAIRS = [  # the first question and answer, as plain text
    {"prompt": f"Question: {question['content']}\nAnswer:", "completion": " " + answer["content"]}
    for question, answer in (row["messages"][-2:] for row in ROWS if len(row["messages"]) < 4)
]
MISTRAL_LIKE = (  # no space before [INST] and behind [/INST], and no system prompt
    "{{ bos_token }}{% for message in messages %}{{ '[INST] ' + message.content + '[/INST]' if message.role == 'user' "
    "else message.content + eos_token }}{% endfor %}"
)
NOT_CHAT = "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
NOT_CHAT += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"


def tok(name: str = "smollm2", template: str = "") -> PreTrainedTokenizerBase:
    """Returns a tokenizer: ChatML ("smollm2", "chatml"), or one that puts a BOS before texts ("llama3", "llama2")."""
    folders = {"smollm2": SMOLLM2, "llama2": ASSETS / "tokenizer_sentencepiece"}
    tokenizer = AutoTokenizer.from_pretrained(folders.get(name, ASSETS / "tokenizer"))
    if name == "llama3":
        tokenizer.chat_template, tokenizer.eos_token = LLAMA3_TEMPLATE, "<|eot_id|>"
    if name == "llama2":
        tokenizer.chat_template = (ASSETS / "templates/llama2_like.jinja").read_text(encoding="utf-8")
    if name.startswith("llama"):
        bos = tokenizer.bos_token
        marks = [(bos, tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=marks)
    if template:
        path = ASSETS / "templates" / f"{template[:40]}.jinja"
        tokenizer.chat_template = path.read_text(encoding="utf-8") if path.exists() else template
    return tokenizer


def trl_template(name: str) -> str:
    """Returns a template that TRL holds, as a model has it on the Hub."""
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def marked() -> PreTrainedTokenizerBase:
    """A template that marks the answers, stop token included, for TRL's assistant_only_loss."""
    return tok("chatml", "with_generation_marks")


def model(tokenizer: PreTrainedTokenizerBase, kind: str = "llama", attention: str = "sdpa", **settings: Any) -> Any:
    """Returns a random model of two layers and 64 units."""
    (case, *_) = [case for case in CASES if case.model_type == kind]
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "max_position_embeddings": 4096, "initializer_range": 0.1}
    sizes |= {"n_embd": 64, "n_positions": 4096} if kind == "gpt2" else {}
    torch.manual_seed(0)
    config = make_config(Case(kind, settings={**case.settings, **sizes, **ids, **settings}))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def in_bfloat16(trainer: Trainer) -> Trainer:
    """Returns the trainer with a model in bfloat16; peft keeps its adapters in float32."""
    for name, each in trainer.model.named_parameters():
        if "lora_" not in name:
            each.data = each.data.bfloat16()
    return trainer


def arguments(**given: Any) -> dict[str, Any]:
    defaults = {"per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 1e-3, "save_strategy": "no"}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False, "logging_strategy": "no"}
    return {"output_dir": _SCRATCH.name, **defaults, **quiet, **given}


def sft(rows: Rows, tokenizer: PreTrainedTokenizerBase | None = None, their_model: Any = None, **given: Any) -> Trainer:
    """TRL's SFTTrainer; `given` are arguments of SFTConfig, of SFTTrainer, or `kind` and `attention` of the model."""
    tokenizer = tokenizer or tok()
    names = ("peft_config", "formatting_func", "data_collator", "compute_loss_func", "optimizers", "eval_dataset")
    others = {name: given.pop(name) for name in names if name in given}
    chosen = {name: given.pop(name) for name in ("kind", "attention") if name in given}
    options = {"max_length": 1024 if given.get("packing") else 2048, "gradient_checkpointing": False} | given
    return SFTTrainer(
        their_model if their_model is not None else model(tokenizer, **chosen), SFTConfig(**arguments(**options)),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **others,
    )  # fmt: skip


def encoded(tokenizer: PreTrainedTokenizerBase, rows: Rows = ROWS) -> Rows:
    """Tokenizes by hand, as many scripts do: each answer up to its stop token has labels, found by prefixes."""
    features = []
    for messages in (row["messages"] for row in rows):
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        labels = [-100] * len(ids)
        for n in (n for n, message in enumerate(messages) if message["role"] == "assistant"):
            begin = len(tokenizer.apply_chat_template(messages[:n], add_generation_prompt=True, return_dict=False))
            end = len(tokenizer.apply_chat_template(messages[: n + 1], return_dict=False))
            while ids[end - 1] != tokenizer.eos_token_id:
                end -= 1
            labels[begin:end] = ids[begin:end]
        features.append({"input_ids": ids, "labels": labels})
    return features


def rendered(tokenizer: PreTrainedTokenizerBase, cut: str = "") -> Rows:
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in ROWS]
    return [{"text": str(text).removeprefix(cut)} for text in texts]


def plain(features: Rows, tokenizer: PreTrainedTokenizerBase, collator: Any = None, **given: Any) -> Trainer:
    """transformers' Trainer, or the class `trainer`; `given` are arguments as in `sft`."""
    names = ("compute_loss_func", "optimizers", "eval_dataset")
    others = {name: given.pop(name) for name in names if name in given}
    chosen = {name: given.pop(name) for name in ("kind", "attention") if name in given}
    kind, their_model = given.pop("trainer", Trainer), given.pop("their_model", None)
    return kind(
        their_model if their_model is not None else model(tokenizer, **chosen), TrainingArguments(**arguments(**given)),
        train_dataset=Dataset.from_list(features), processing_class=tokenizer, **others,
        data_collator=collator or transformers.DataCollatorForSeq2Seq(tokenizer),
    )  # fmt: skip


@dataclass
class Pad:
    """A collator as people write it: pads on one side, with or without a mask, labels, and a shift of its own."""

    tokenizer: PreTrainedTokenizerBase
    side: str = "right"
    mask: bool = True
    label: int = -100
    shift: bool = False

    def __call__(self, features: Rows) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in features)
        batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
        for row in features:
            ids, fill = row["input_ids"], width - len(row["input_ids"])
            labels = [*row["labels"][1:], -100] if self.shift else row["labels"]
            values = ((ids, self.tokenizer.pad_token_id), (labels, self.label), ([1] * len(ids), 0))
            for name, (tokens, filling) in zip(batch, values, strict=True):
                padding = [filling] * fill
                batch[name].append(padding + tokens if self.side == "left" else tokens + padding)
        return {name: torch.tensor(rows) for name, rows in batch.items() if self.mask or name != "attention_mask"}


@dataclass
class CompletionOnly:
    """DataCollatorForCompletionOnlyLM, which TRL removed, as copies of it go on: labels behind the last match."""

    tokenizer: PreTrainedTokenizerBase
    response_template: str | list[int]

    def __call__(self, features: Rows) -> dict[str, torch.Tensor]:
        batch = transformers.DataCollatorForLanguageModeling(self.tokenizer, mlm=False)(features)
        wanted = self.response_template
        if isinstance(wanted, str):
            wanted = self.tokenizer.encode(wanted, add_special_tokens=False)
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"], strict=True):
            matches = [n for n in range(len(ids)) if ids[n : n + len(wanted)] == wanted]
            labels[: matches[-1] + len(wanted) if matches else len(ids)] = -100
        return dict(batch)


def chatml(features: Rows | None = None, collator: Any = None, **given: Any) -> Trainer:
    """What most of the broken set-ups have changed: rows encoded by hand, and each answer with its labels."""
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer) if features is None else features, tokenizer, collator, **given)


def smollm2(rows: Rows = ROWS, **given: Any) -> Trainer:
    return plain(encoded(tok(), rows), tok(), **given)


def padded(side: str = "right", *, mask: bool = True, label: int = -100, shift: bool = False, **given: Any) -> Trainer:
    return chatml(collator=Pad(tok("chatml"), side, mask, label, shift), **given)


def flat(**given: Any) -> Trainer:
    return chatml(collator=transformers.DataCollatorWithFlattening(), **given)


def of_marks(rows: Rows = ROWS, **given: Any) -> Trainer:
    """TRL's assistant_only_loss with a template that marks the answers."""
    return sft(rows, marked(), assistant_only_loss=True, **given)


class FlattenAndMask(transformers.DataCollatorWithFlattening):
    def __call__(self, features: Rows, *given: Any, **options: Any) -> dict[str, Any]:
        batch = super().__call__(features, *given, **options)
        return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


class FlattenWithFirstTokens(transformers.DataCollatorWithFlattening):
    def __call__(self, features: Rows, *given: Any, **options: Any) -> dict[str, Any]:
        batch = super().__call__(features, *given, **options)
        return batch | {"labels": batch["input_ids"].clone()}


class SumOfMeans(Trainer):
    """The compute_loss of countless scripts."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def mean_over_all_tokens(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / labels.numel()
