"""A zoo of broken and sound trainers of TRL, transformers and peft, for verify_trainer.

    python -m tests.verify.trainer_zoo                   # prints one line for each set-up
    python -m tests.verify.trainer_zoo --only NAME ...
    python -m tests.verify.trainer_zoo --prove           # measures that each is what it claims, without sftron

Each set-up is a function that returns the trainer; its docstring says what is wrong and how it comes about. A broken
one names the rows that must FAIL (`a|b`: one of the two) and those that may fail as a consequence. `proof` is a
measurement of zoo_proofs.py, which shares no code with sftron.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from tokenizers.processors import TemplateProcessing
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from tests.conftest import ASSETS, LLAMA3_TEMPLATE, ROOT
from tests.verify.zoo_proofs import (
    leak,
    loss_ratio,
    moved,
    read,
    trained,
)
from tools.isolation_table import CASES, Case, make_config

SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"
_SCRATCH = tempfile.TemporaryDirectory(prefix="trainer-zoo-")
Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class SetUp:
    make: Callable[[], Trainer]
    fails: tuple[str, ...]
    may_fail: tuple[str, ...]
    proof: Callable[[Trainer], bool]
    arguments: dict[str, Any] = field(default_factory=dict)
    """The keyword arguments of verify_trainer: `conversations`, `trained_roles`."""

    @property
    def name(self) -> str:
        return self.make.__name__

    @property
    def why(self) -> str:
        return " ".join((self.make.__doc__ or "").split())

    def problem(self, report: Any) -> str:
        """Returns what is not as expected in the report, or nothing."""
        failed = {row.name for row in report.rows if row.status == "FAIL"}
        missed = [rows for rows in self.fails if not failed & set(rows.split("|"))]
        allowed = {name for rows in self.fails for name in rows.split("|")} | set(self.may_fail)
        problems = [f"{rows} did not fail" for rows in missed]
        problems += [f"{name} failed" for name in sorted(failed - allowed)]
        if report.passed == bool(self.fails):
            problems.append("passed" if report.passed else "did not pass")
        return ", ".join(problems)


ZOO: dict[str, SetUp] = {}


def broken(*fails: str, may: str = "", proof: Callable[[Trainer], bool], **arguments: Any) -> Callable[..., Any]:
    def add(make: Callable[[], Trainer]) -> Callable[[], Trainer]:
        may_fail = tuple(name.strip() for name in may.split(",") if name)
        ZOO[make.__name__] = SetUp(make=make, fails=fails, may_fail=may_fail, proof=proof, arguments=arguments)
        return make

    return add


def sound(proof: Callable[[Trainer], bool], **arguments: Any) -> Callable[..., Any]:
    return broken(proof=proof, **arguments)


# ── What they are made of ────────────────────────────────────────────────────────────────────────────────────────────


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
        path = ASSETS / "templates" / f"{template}.jinja"
        tokenizer.chat_template = path.read_text(encoding="utf-8") if path.exists() else template
    return tokenizer


def marked() -> PreTrainedTokenizerBase:
    """A template that marks the answers, stop token included, for TRL's assistant_only_loss."""
    return tok(template="with_generation_marks")


def model(tokenizer: PreTrainedTokenizerBase, kind: str = "llama", attention: str = "sdpa", **settings: Any) -> Any:
    """Returns a random model of two layers and 64 units."""
    (case, *_) = [case for case in CASES if case.model_type == kind]
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "max_position_embeddings": 4096, "initializer_range": 0.1}
    sizes |= {"n_embd": 64, "n_positions": 4096} if kind == "gpt2" else {}
    torch.manual_seed(0)
    config = make_config(Case(kind, settings={**case.settings, **sizes, **ids, **settings}))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def arguments(**given: Any) -> dict[str, Any]:
    defaults = {"per_device_train_batch_size": 4, "max_steps": 4, "learning_rate": 1e-3, "save_strategy": "no"}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False, "logging_strategy": "no"}
    return {"output_dir": _SCRATCH.name, **defaults, **quiet, **given}


def sft(rows: Rows, tokenizer: PreTrainedTokenizerBase | None = None, their_model: Any = None, **given: Any) -> Trainer:
    """TRL's SFTTrainer; `given` are arguments of SFTConfig, of SFTTrainer, or `kind` and `attention` of the model."""
    tokenizer = tokenizer or tok()
    names = ("peft_config", "formatting_func", "data_collator", "compute_loss_func", "optimizers", "eval_dataset")
    others = {name: given.pop(name) for name in names if name in given}
    chosen = {name: given.pop(name) for name in ("kind", "attention") if name in given}
    options = {"max_length": 2048, "gradient_checkpointing": False} | given
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
    response_template: str

    def __call__(self, features: Rows) -> dict[str, torch.Tensor]:
        batch = transformers.DataCollatorForLanguageModeling(self.tokenizer, mlm=False)(features)
        wanted = self.tokenizer.encode(self.response_template, add_special_tokens=False)
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"], strict=True):
            matches = [n for n in range(len(ids)) if ids[n : n + len(wanted)] == wanted]
            labels[: matches[-1] + len(wanted) if matches else len(ids)] = -100
        return dict(batch)


# ── Broken: isolation and positions ──────────────────────────────────────────────────────────────────────────────────


@broken("isolation", may="loss", proof=lambda t: leak(t) > 1e-3)
def bfd_packing_of_falcon() -> Trainer:
    """packing=True flattens conversations and passes position_ids, but falcon makes its masks without them."""
    return sft(ROWS, marked(), kind="falcon", packing=True, assistant_only_loss=True)


@broken("isolation", may="loss", proof=lambda t: leak(t) > 1e-3)
def bfd_packing_of_gpt_oss() -> Trainer:
    """gpt_oss with eager attention attends over the whole pack (transformers#39997, open since 2025)."""
    return sft(ROWS, marked(), kind="gpt_oss", attention="eager", packing=True, assistant_only_loss=True)


@broken("isolation", "truncation", "positions", may="ids, stop tokens, trained tokens", trained_roles="all",
        proof=lambda t: leak(t) > 1e-3)  # fmt: skip
def wrapped_packing() -> Trainer:
    """packing_strategy="wrapped" cuts one long text every 256 tokens, in the middle of answers (trl#3067)."""
    return sft(ROWS, packing=True, packing_strategy="wrapped", max_length=256)


@broken("isolation", may="loss", proof=lambda t: leak(t) > 1e-3)
def cache_and_packing() -> Trainer:
    """With TrainingArguments(use_cache=True), transformers makes no mask from position_ids, whatever the model."""
    tokenizer = tok()
    return plain(encoded(tokenizer), tokenizer, transformers.DataCollatorWithFlattening(), use_cache=True)


# ── Broken: ids and trained tokens ───────────────────────────────────────────────────────────────────────────────────


@broken("trained tokens", proof=lambda t: "My sourdough never rises" in trained(t))
def loss_over_prompts() -> Trainer:
    """A `messages` column alone gives a loss over everything, though answers were to be learned (TRL's default)."""
    return sft(ROWS)


@broken("stop tokens", may="trained tokens", trained_roles="all",
        proof=lambda t: "<|im_end|>" not in trained(t) and "sourdough" in trained(t))  # fmt: skip
def masked_stop_tokens() -> Trainer:
    """DataCollatorForLanguageModeling masks every pad token, and SmolLM2's pad is its stop (transformers#23530)."""
    tokenizer = tok()
    ids = [{"input_ids": row["input_ids"]} for row in encoded(tokenizer)]
    return plain(ids, tokenizer, transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False))


@broken("stop tokens", proof=lambda t: "Happy growing!" in trained(t) and "<|im_end|>" not in trained(t))
def marks_without_stop() -> Trainer:
    """assistant_only_loss=True with {% generation %} marks that end before <|im_end|>; TRL warns in the log only."""
    return sft(ROWS, tok(template="with_marks_without_stop"), assistant_only_loss=True)


@broken("ids", trained_roles="all", proof=lambda t: "<|begin_of_text|><|begin_of_text|>" in read(t))
def doubled_bos() -> Trainer:
    """The text is rendered with the template, BOS included, and tokenized with another BOS (trl#1400)."""
    tokenizer = tok("llama3")
    return sft([{"text": tokenizer.apply_chat_template(row["messages"], tokenize=False)} for row in ROWS], tokenizer)


# ── Broken: the rest ─────────────────────────────────────────────────────────────────────────────────────────────────


@broken("truncation", may="stop tokens", proof=lambda t: any(len(row["input_ids"]) == 128 for row in t.train_dataset))
def answers_cut_by_max_length() -> Trainer:
    """max_length=128 keeps the start of each conversation and cuts the last answers, stop token and all."""
    return sft(ROWS, marked(), assistant_only_loss=True, max_length=128)


class SumOfMeans(Trainer):
    """The compute_loss of countless scripts."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@broken("loss", proof=lambda t: 3 < loss_ratio(t) < 5)
def sum_of_means() -> Trainer:
    """compute_loss ignores num_items_in_batch, so 4 micro-batches make 4 times the loss (transformers#37766)."""
    tokenizer = tok()
    return plain(encoded(tokenizer), tokenizer, trainer=SumOfMeans, gradient_accumulation_steps=4)


@broken("adapters", proof=lambda t: not any(moved(t).values()))
def optimizer_without_adapters() -> Trainer:
    """The optimizer is made from model.parameters() before TRL adds the adapters: nothing it holds is trained."""
    tokenizer = marked()
    base = model(tokenizer)
    return sft(ROWS, tokenizer, base, assistant_only_loss=True, peft_config=LoraConfig(target_modules="all-linear"),
               optimizers=(AdamW(base.parameters(), lr=1e-3), None))  # fmt: skip


# ── Sound ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@sound(lambda t: "sourdough" not in trained(t) and "Fernwick costs 34 euros. Happy growing!<|im_end|>" in trained(t))
def prompt_completion_of_messages() -> Trainer:
    """Conversational prompt and completion, the form that TRL's documentation recommends."""
    return sft(ANSWERS)


@sound(lambda t: leak(t) == 0.0)
def bfd_packing_of_llama() -> Trainer:
    """The same packing with a model that makes its mask from position_ids, on sdpa and CPU."""
    return sft(ROWS, marked(), packing=True, assistant_only_loss=True)


# ── The command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def hush() -> None:
    warnings.simplefilter("ignore")
    disable_progress_bars()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)


def run(set_up: SetUp, prove: bool) -> str:
    """Verifies or proves one set-up; returns its line, which begins with "ok" if it is as expected."""
    started = time.monotonic()
    expected = ", ".join(set_up.fails) or "sound"
    try:
        trainer = set_up.make()
        if prove:
            failed, problem = "", "" if set_up.proof(trainer) else "the proof does not hold"
        else:
            from sftron import verify_trainer  # not needed for --prove

            report = verify_trainer(trainer, **set_up.arguments)
            failed = ", ".join(row.name for row in report.rows if row.status == "FAIL") or "nothing"
            problem = set_up.problem(report)
    except Exception as error:
        if "--trace" in sys.argv:
            traceback.print_exc()
        failed, problem = "raised", f"{type(error).__name__}: {error}".splitlines()[0][:160]
    seconds = time.monotonic() - started
    verdict = f"NOT as expected: {problem}" if problem else "as expected"
    return f"{'ok' if not problem else '!!'} {set_up.name:34} {expected:38} {failed:38} {seconds:5.1f} s  {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(ZOO), choices=list(ZOO), metavar="NAME")
    parser.add_argument("--prove", action="store_true", help="run the proofs instead of verify_trainer")
    parser.add_argument("--trace", action="store_true", help="print tracebacks")
    chosen = parser.parse_args()
    hush()
    lines = []
    for name in chosen.only:
        lines.append(run(ZOO[name], chosen.prove))
        print(lines[-1], flush=True)
    wrong = sum(line.startswith("!!") for line in lines)
    print(f"{len(lines)} set-ups, {len(lines) - wrong} as expected, {wrong} not")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
