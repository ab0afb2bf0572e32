"""Set-ups of the zoo whose fault is in the evaluation, in a loss or a mask of one's own, or in a detail of the text."""

from itertools import pairwise
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import WeightedRandomSampler
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, Trainer

from tests.verify.zoo_materials import (
    ANSWERS,
    LONG,
    PAIRS,
    ROWS,
    CompletionOnly,
    Pad,
    Rows,
    broken,
    encoded,
    marked,
    plain,
    sft,
    sound,
    tok,
)
from tests.verify.zoo_proofs import (
    answers_alone,
    batches,
    evaluated,
    labels_are_ids,
    leak,
    loss_ratio,
    moved_by_the_future,
    read,
    row_alone,
    trained,
)

QUESTION = "sourdough never rises"


# ── Evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────────


@broken("trained tokens", proof=lambda t: QUESTION in evaluated(t) and QUESTION not in trained(t))
def evaluation_over_prompts() -> Trainer:
    """Training has prompts and completions, and the evaluation's rows hold labels for everything."""
    tokenizer = tok("chatml")
    rows = [{**row, "labels": row["input_ids"]} for row in encoded(tokenizer, ROWS[:8])]
    return plain(encoded(tokenizer), tokenizer, eval_dataset=Dataset.from_list(rows))


@broken("trained tokens", may="stop tokens", proof=lambda t: QUESTION in evaluated(t) and answers_alone(t))
def evaluation_of_messages() -> Trainer:
    """completion_only_loss trains completions, and an eval_dataset of messages has none: its loss is over prompts."""
    evaluation = Dataset.from_list([{"messages": row["messages"]} for row in ROWS[:8]])
    return sft(ANSWERS, tok("chatml"), eval_dataset=evaluation)


@broken("ids", may="trained tokens", proof=lambda t: "[INST]" in evaluated(t, "input_ids") and "[INST]" not in read(t))
def evaluation_of_another_template() -> Trainer:
    """The evaluation's rows were tokenized with another template, so its loss is of prompts that nobody trains."""
    tokenizer = tok("chatml")
    other = Dataset.from_list(encoded(tok("chatml", "llama2_like"), ROWS[:8]))
    return plain(encoded(tokenizer), tokenizer, eval_dataset=other)


@broken("truncation", may="stop tokens, ids", proof=lambda t: "<|im_end|>" not in evaluated(t)[-40:])
def evaluation_cut() -> Trainer:
    """A shorter limit for the evaluation cuts its answers, so its loss is not of whole answers."""
    tokenizer = tok("chatml")
    rows = [{name: values[:150] for name, values in row.items()} for row in encoded(tokenizer, ROWS[:8])]
    return plain(encoded(tokenizer), tokenizer, eval_dataset=Dataset.from_list(rows))


@sound(lambda t: QUESTION not in evaluated(t) and answers_alone(t))
def evaluation_as_training() -> Trainer:
    """prompt-completion rows for the evaluation too."""
    return sft(ANSWERS, tok("chatml"), eval_dataset=Dataset.from_list(ANSWERS[:8]))


@sound(lambda t: all(QUESTION not in evaluated(t, name=name) for name in t.eval_dataset))
def two_evaluations() -> Trainer:
    """Two named data sets for the evaluation, packed as the training's."""
    evaluations = {"short": Dataset.from_list(ROWS[12:20]), "long": Dataset.from_list(ROWS[:6])}
    return sft(ROWS, marked(), assistant_only_loss=True, packing=True, eval_dataset=evaluations)


# ── Losses ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def losses(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")


def loss_of_each_token_itself(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return losses(outputs, labels) / num_items_in_batch


@broken("loss", proof=lambda t: abs(loss_ratio(t) - 1) > 1e-2)
def loss_without_shift() -> Trainer:
    """A compute_loss_func compares logits with labels at the same place: each token learns to repeat itself."""
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer), tokenizer, compute_loss_func=loss_of_each_token_itself)


def loss_of_second_halves(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100).clone()
    for row in labels:
        (places,) = (row != -100).nonzero(as_tuple=True)
        row[places[: len(places) // 2]] = -100
    return losses(outputs, labels) / num_items_in_batch


@broken("loss", proof=lambda t: loss_ratio(t) < 0.7)
def loss_of_half_of_the_answers() -> Trainer:
    """A compute_loss_func drops the first half of the labels of each row."""
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer), tokenizer, compute_loss_func=loss_of_second_halves)


def undivided(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return losses(outputs, torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100))


@broken("loss", proof=lambda t: loss_ratio(t) > 50)
def sum_without_division() -> Trainer:
    """A compute_loss_func returns the sum: the gradient grows with the number of labels of a step."""
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer), tokenizer, compute_loss_func=undivided, gradient_accumulation_steps=2)


# ── As LLaMA-Factory does ────────────────────────────────────────────────────────────────────────────────────────────


@broken("trained tokens", may="stop tokens",
        proof=lambda t: "custard tarts" not in trained(t) and "Use the wet afternoon" in trained(t))  # fmt: skip
def mask_history() -> Trainer:
    """mask_history: true trains the last answer of each conversation, and leaves out the stop tokens of the others."""
    tokenizer = tok()
    features = encoded(tokenizer)
    for row in features:
        labels = row["labels"]
        last = max(n for n, (before, label) in enumerate(pairwise([-100, *labels])) if before == -100 != label)
        row["labels"] = [-100] * last + row["labels"][last:]
    return plain(features, tokenizer)


@broken(
    "truncation|ids|trained tokens",
    may="truncation, ids, trained tokens, stop tokens",
    proof=lambda t: any(each and "<|im_start|>assistant" not in each for each in read(t).split("\n¶\n")),
)
def questions_and_answers_cut() -> Trainer:
    """cutoff_len cuts a question and its answer each by itself, and loses the header between them."""
    tokenizer = tok()
    features = encoded(tokenizer, ROWS[12:])
    for row in features:
        size, first = len(row["input_ids"]), row["labels"].count(-100)
        answer = min(size - first, 30)
        is_long = size > 60 and first > 60 - answer
        kept = [*range(60 - answer), *range(first, first + answer)] if is_long else range(size)
        row.update({name: [values[n] for n in kept] for name, values in row.items()})
    return plain(features, tokenizer)


@broken("truncation", trained_roles="all", proof=lambda t: read(t).count("\n<|im_start|>\n¶") > 3)
def cut_within_a_header() -> Trainer:
    """A limit falls into the header of the next turn: what is there is the template's, and the rest is gone."""
    tokenizer = tok("chatml")
    features = encoded(tokenizer, LONG)
    for row in features:
        ends = [n for n, token in enumerate(row["input_ids"]) if token == tokenizer.eos_token_id]
        ids = row["input_ids"][: ends[-2] + 3]
        row.update(input_ids=ids, labels=ids)
    return plain(features, tokenizer, per_device_train_batch_size=1)


@sound(lambda t: leak(t) == 0.0 and read(t).count(t.processing_class.eos_token) >= len(PAIRS), trained_roles="all")
def packed_texts() -> Trainer:
    """Plain texts for more pretraining, packed by TRL, which keeps their ids alone."""
    return sft([{"text": row["prompt"] + row["completion"]} for row in PAIRS], packing=True)


# ── Masks and positions ──────────────────────────────────────────────────────────────────────────────────────────────


class MaskOfIds(DataCollatorForSeq2Seq):
    def __call__(self, features: Rows, return_tensors: Any = None) -> Any:
        batch = super().__call__(features)
        return dict(batch) | {"attention_mask": (batch["input_ids"] != self.tokenizer.pad_token_id).long()}


@broken("padding", may="positions, isolation, loss", proof=lambda t: row_alone(t) > 1e-3)
def mask_from_the_ids_of_padding() -> Trainer:
    """attention_mask = input_ids != pad_token_id, where the padding is the stop: no answer sees where another ended."""
    tokenizer = tok()
    return plain(encoded(tokenizer), tokenizer, MaskOfIds(tokenizer))


class BlockMask:
    """One row of conversations with a mask [1, 1, T, T] of its own; positions are left to the model."""

    def __init__(self, causal: bool) -> None:
        self.causal = causal

    def __call__(self, features: Rows) -> dict[str, torch.Tensor]:
        flat = {name: torch.tensor([[value for row in features for value in row[name]]]) for name in features[0]}
        sees = torch.block_diag(*(torch.ones(len(row["input_ids"]), len(row["input_ids"])) for row in features))
        sees = sees.tril() if self.causal else sees
        flat["labels"][0, [sum(len(row["input_ids"]) for row in features[:n]) for n in range(len(features))]] = -100
        return flat | {"attention_mask": torch.zeros_like(sees).masked_fill(sees == 0, torch.finfo().min)[None, None]}


@broken("isolation", may="positions, loss", proof=lambda t: moved_by_the_future(t) > 1e-3)
def mask_that_shows_the_future() -> Trainer:
    """A block mask without its causal half: each token sees the ones that it is to predict."""
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer), tokenizer, BlockMask(causal=False))


@sound(lambda t: moved_by_the_future(t) == 0.0)
def block_mask_and_relative_positions() -> Trainer:
    """A causal block mask without position_ids: Llama's positions are relative, so nothing changes."""
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer), tokenizer, BlockMask(causal=True))


class TypedTokens(DataCollatorForSeq2Seq):
    def __call__(self, features: Rows, return_tensors: Any = None) -> Any:
        batch = super().__call__(features)
        return dict(batch) | {"token_type_ids": (batch["labels"] != -100).long()}


@broken("positions", may="loss", proof=lambda t: row_alone(t) > 1e-3)
def token_types_of_gpt2() -> Trainer:
    """token_type_ids that mark the answer are added to gpt2's embeddings, and no server passes them."""
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer), tokenizer, TypedTokens(tokenizer), kind="gpt2")


# ── Texts, rows and samplers ─────────────────────────────────────────────────────────────────────────────────────────


@broken("ids|truncation", may="ids, truncation", trained_roles="all",
        proof=lambda t: read(t).count("<|im_start|>assistant\n<|im_end|>") == len(ROWS))  # fmt: skip
def rendered_with_a_generation_prompt() -> Trainer:
    """add_generation_prompt=True for the training's texts: each ends in an answer that is empty, and trained."""
    tokenizer = tok("chatml")
    options = {"tokenize": False, "add_generation_prompt": True}
    return sft([{"text": tokenizer.apply_chat_template(row["messages"], **options)} for row in ROWS], tokenizer)


@broken("ids", proof=lambda t: "named SmolLM" not in read(t) and labels_are_ids(t))
def default_system_prompt_left_out() -> Trainer:
    """ChatML by hand, without the system prompt that SmolLM2's template writes in front of each conversation."""
    own = tok("smollm2", "{% for m in messages %}{{'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n'}}"
              "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}")  # fmt: skip
    rows = [row for row in ROWS if row["messages"][0]["role"] != "system"]
    return plain(encoded(own, rows), tok())


@broken("trained tokens", may="truncation, stop tokens",
        proof=lambda t: any((row == -100).all() for b in batches(t) for row in b["labels"]))  # fmt: skip
def response_template_that_misses_some_rows() -> Trainer:
    """A marker that a part of the rows does not have: these train nothing, and no text spells a control token."""
    tokenizer = tok("chatml")

    class Some(CompletionOnly):
        def __call__(self, features: Rows) -> dict[str, torch.Tensor]:
            batch = super().__call__(features)
            for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
                if len(ids[ids != tokenizer.pad_token_id]) < 120:
                    labels[:] = -100
            return batch

    ids = [{"input_ids": row["input_ids"]} for row in encoded(tokenizer)]
    return plain(ids, tokenizer, Some(tokenizer, "<|im_start|>assistant\n"))


@broken("trained tokens", may="ids, stop tokens, padding, truncation, forgery, loss, generation",
        trained_roles="all", proof=lambda t: not labels_are_ids(t))  # fmt: skip
def masked_language_modeling() -> Trainer:
    """DataCollatorForLanguageModeling without mlm=False: ids are masked, and a causal model learns the masks."""
    tokenizer = tok("chatml")
    tokenizer.mask_token = "<|endoftext|>"
    ids = [{"input_ids": row["input_ids"]} for row in encoded(tokenizer)]
    return plain(ids, tokenizer, DataCollatorForLanguageModeling(tokenizer))


class Weighted(Trainer):
    def _get_train_sampler(self, *_: Any) -> WeightedRandomSampler:
        return WeightedRandomSampler([1 + n % 3 for n in range(len(ROWS))], len(ROWS))


@sound(lambda t: labels_are_ids(t) and abs(loss_ratio(t) - 1) < 1e-4)
def weighted_sampler() -> Trainer:
    """A sampler that numbers the rows of the whole data set, for weights of rows."""
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer), tokenizer, trainer=Weighted)


@sound(lambda t: "stays warm" in trained(t) and labels_are_ids(t), trained_roles="all")
def texts_of_another_column() -> Trainer:
    """Plain texts in the column that dataset_text_field names, and a loss over all of them."""
    rows = [{"body": f"The stove of cabin {n} stays warm for {n % 9} hours."} for n in range(24)]
    return sft(rows, tok("chatml"), dataset_text_field="body")


@sound(lambda t: row_alone(t) < 1e-3 and labels_are_ids(t))
def left_padding_with_positions() -> Trainer:
    """gpt2 padded on the left, with position_ids that begin behind the padding."""
    tokenizer = tok("chatml")

    def collate(features: Rows) -> dict[str, torch.Tensor]:
        batch = Pad(tokenizer, "left")(features)
        return batch | {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}

    return plain(encoded(tokenizer), tokenizer, collate, kind="gpt2")
