"""Set-ups of the zoo about what is computed, changed and saved: the rows loss, adapters and generation."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken
from torch.nn.functional import pad
from torch.optim import AdamW
from torch.utils.data import WeightedRandomSampler
from transformers import Trainer

from sftcheck.faults import Fault
from tests.sftcheck.zoo_materials import (
    ANSWERS,
    ROWS,
    SumOfMeans,
    broken,
    chatml,
    encoded,
    marked,
    mean_over_all_tokens,
    model,
    of_marks,
    plain,
    sft,
    sound,
    tok,
)
from tests.sftcheck.zoo_proofs import (
    answers_alone,
    arguments_of_model,
    gradient_behind_labels,
    labels_are_ids,
    loss_ratio,
    moved,
    saved,
)

# ── Broken ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@broken(Fault.MEAN_OF_MEANS, "loss", proof=lambda t: 3 < loss_ratio(t) < 5)
def sum_of_means() -> Trainer:
    """compute_loss ignores num_items_in_batch, so 4 micro-batches make 4 times the loss (transformers#37766)."""
    return chatml(trainer=SumOfMeans, gradient_accumulation_steps=4)


@broken(Fault.NO_LOSS_KWARGS, "loss", proof=lambda t: abs(loss_ratio(t) - 1) > 1e-3)
def mean_of_means() -> Trainer:
    """model_accepts_loss_kwargs = False, a remedy that circulates: a short answer weighs as much as a long one."""
    tokenizer = tok("chatml")
    trainer = plain(encoded(tokenizer), tokenizer, gradient_accumulation_steps=4, per_device_train_batch_size=1)
    trainer.model_accepts_loss_kwargs = False
    return trainer


@broken(Fault.MEAN_OF_MEANS, "loss", proof=lambda t: loss_ratio(t) < 0.8)
def mean_over_padding() -> Trainer:
    """A compute_loss_func divides by all tokens of its batch, so prompts and padding make the gradient small."""
    return chatml(compute_loss_func=mean_over_all_tokens)


def with_new_tokens(**settings: Any) -> Trainer:
    """A base model without ChatML's tokens gets them, as trl.setup_chat_format did, and LoRA on all linear layers."""
    tokenizer = tok("llama2", "with_generation_marks")
    base = model(tokenizer)
    new = [AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>")]
    tokenizer.add_tokens(new)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    base.resize_token_embeddings(len(tokenizer))
    config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **settings)
    return sft(ROWS, tokenizer, base, assistant_only_loss=True, peft_config=config)


@broken(
    Fault.TOKENS_FROZEN,
    "adapters",
    proof=lambda t: not any(found for name, found in moved(t).items() if "embed" in name or "head" in name),
)
def new_tokens_never_trained() -> Trainer:
    """LoRA leaves the new rows of embedding and head as resizing made them: it cannot learn to stop (Qwen3#1064)."""
    return with_new_tokens()


@broken(Fault.NOT_OPTIMIZED, "adapters", proof=lambda t: not any(moved(t).values()))
def optimizer_without_adapters() -> Trainer:
    """The optimizer is made from model.parameters() before TRL adds the adapters: nothing it holds is trained."""
    tokenizer = marked()
    base = model(tokenizer)
    return sft(ROWS, tokenizer, base, assistant_only_loss=True, peft_config=LoraConfig(target_modules="all-linear"),
               optimizers=(AdamW(base.parameters(), lr=1e-3), None))  # fmt: skip


@broken(
    Fault.NOT_OPTIMIZED,
    "adapters",
    proof=lambda t: {name for name, found in moved(t).items() if not found} == {"lm_head.weight"},
)
def head_left_out_of_the_optimizer() -> Trainer:
    """Own groups of parameters, for decay and layers, and no group for the head."""
    tokenizer = tok("chatml")
    base = model(tokenizer, tie_word_embeddings=False)
    groups = [{"params": [each for name, each in base.named_parameters() if name.startswith("model.")]}]
    return plain(encoded(tokenizer), tokenizer, their_model=base, optimizers=(AdamW(groups, lr=1e-3), None))


def of_a_base_model(**settings: Any) -> Trainer:
    tokenizer = tok("chatml", "with_generation_marks")
    tokenizer.eos_token = "<|endoftext|>"
    return sft(ROWS, tokenizer, assistant_only_loss=True, **settings)


@broken(
    Fault.NO_END,
    "generation",
    proof=lambda t: t.processing_class.convert_tokens_to_ids("<|im_end|>") not in saved(t)[1],
)
def stop_of_the_base_model() -> Trainer:
    """A base model's EOS is <|endoftext|>, its template's stop is <|im_end|>: the folder does not stop (trl#3299)."""
    return of_a_base_model()


@broken(
    Fault.TEMPLATE_UNSET,
    "generation|ids",
    may="generation, ids",
    conversations=ROWS,
    proof=lambda t: not saved(t)[0].chat_template,
)
def saved_without_template() -> Trainer:
    """A template is passed to apply_chat_template and never set on the tokenizer, so that it is not saved."""
    tokenizer, own = tok("chatml"), tok("chatml")
    own.chat_template = None
    return plain(encoded(tokenizer), own)


def losses(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")


def loss_of_each_token_itself(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return losses(outputs, labels) / num_items_in_batch


@broken(Fault.OTHER_LABELS, "loss", proof=lambda t: abs(loss_ratio(t) - 1) > 1e-2)
def loss_without_shift() -> Trainer:
    """A compute_loss_func compares logits with labels at the same place: each token learns to repeat itself."""
    return chatml(compute_loss_func=loss_of_each_token_itself)


def loss_of_second_halves(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100).clone()
    for row in labels:
        (places,) = (row != -100).nonzero(as_tuple=True)
        row[places[: len(places) // 2]] = -100
    return losses(outputs, labels) / num_items_in_batch


@broken(Fault.OTHER_LABELS, "loss", proof=lambda t: loss_ratio(t) < 0.7)
def loss_of_half_of_the_answers() -> Trainer:
    """A compute_loss_func drops the first half of the labels of each row."""
    return chatml(compute_loss_func=loss_of_second_halves)


def undivided(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return losses(outputs, torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100))


@broken(Fault.UNDIVIDED, "loss", proof=lambda t: loss_ratio(t) > 50)
def sum_without_division() -> Trainer:
    """A compute_loss_func returns the sum: the gradient grows with the number of labels of a step."""
    return chatml(compute_loss_func=undivided, gradient_accumulation_steps=2)


class CountsAllTokens(Trainer):
    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        return sum(batch["attention_mask"].sum() for batch in batch_samples)


@broken(Fault.OTHER_COUNT, "loss", proof=lambda t: loss_ratio(t) < 0.8)
def prompts_counted_in_the_denominator() -> Trainer:
    """num_items_in_batch counts every token that is attended: the longer the prompts, the smaller the step."""
    return chatml(trainer=CountsAllTokens, gradient_accumulation_steps=2)


def mean_of_rows(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, targets = outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return (losses.sum(1) / (targets != -100).sum(1)).mean()


@broken(Fault.MEAN_OF_MEANS, "loss", proof=lambda t: loss_ratio(t) > 3)
def mean_of_rows_without_accumulation() -> Trainer:
    """A compute_loss_func returns a mean, and the Trainer takes it for a sum over the step: 4 times the gradient."""
    return chatml(compute_loss_func=mean_of_rows, gradient_accumulation_steps=4)


@broken(Fault.NOT_SAVED, "adapters|generation", may="adapters, generation",
        proof=lambda t: any(found for name, found in moved(t).items() if "lora" not in name))  # fmt: skip
def base_trained_beside_its_adapter() -> Trainer:
    """All parameters get requires_grad after get_peft_model: the base is trained, and save_model saves the adapter."""
    tokenizer = tok("chatml")
    peft_model = get_peft_model(model(tokenizer), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    for parameter in peft_model.parameters():
        parameter.requires_grad_(True)
    return plain(encoded(tokenizer), tokenizer, their_model=peft_model)


def keeps_logits(trainer: Trainer) -> bool:
    return "logits_to_keep" in arguments_of_model(trainer) and abs(loss_ratio(trainer) - 1) < 1e-4


@sound(lambda t: keeps_logits(t) and answers_alone(t))
def logits_to_keep() -> Trainer:
    """ms-swift passes labels of the end of the rows alone, and as many logits (use_logits_to_keep, its default)."""
    return chatml(trainer=KeepsLogits, gradient_accumulation_steps=2)


class KeepsLogits(Trainer):
    """`_prepare_inputs` and `prepare_logits_to_keep` of ms-swift 4.6, which is not installed for the tests.

    It needs older versions of transformers and TRL.
    """

    num_more = 1

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        labels = inputs["labels"]
        if labels.shape[0] == 1:
            loss_mask = (labels != -100)[0]
            labels = pad(labels[:, loss_mask], (1, 0), value=-100)
            logits_to_keep: Any = pad(loss_mask[1:], (0, 1), value=True)
        else:
            logits_to_keep = labels.shape[-1] - ((labels != -100).int().argmax(-1).min().item()) + self.num_more
            labels = labels[:, -logits_to_keep:]
        return {**inputs, "labels": labels, "logits_to_keep": logits_to_keep}


class KeepsOneLogitLess(KeepsLogits):
    num_more = 0


@broken(
    Fault.MEAN_OF_MEANS,
    "loss",
    proof=lambda t: "logits_to_keep" in arguments_of_model(t) and abs(loss_ratio(t) - 1) > 1e-3,
)
def logits_to_keep_is_one_less() -> Trainer:
    """One logit less is kept, so the first token of an answer in each batch is not trained, and it is counted."""
    return chatml(trainer=KeepsOneLogitLess, gradient_accumulation_steps=2)


@broken(Fault.OTHER_LABELS, "loss", proof=lambda t: abs(loss_ratio(t) - 1) < 1e-4 and gradient_behind_labels(t) > 0)
def loss_without_shift_of_an_untrained_model() -> Trainer:
    """Each token learns to repeat itself, and the loss of a new model is the logarithm of its vocabulary anyway."""
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer), tokenizer, their_model=model(tokenizer, initializer_range=1e-4),
                 compute_loss_func=loss_of_each_token_itself)  # fmt: skip


class OwnStep(Trainer):
    """A training_step as people write it, with a change behind each backward pass."""

    def change(self, model: Any) -> None: ...

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.backward(loss)
        self.change(model)
        return loss.detach()

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)


class DividesAgain(OwnStep):
    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss / self.args.gradient_accumulation_steps)


class Clips(OwnStep):
    def change(self, model: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


class ZeroesFirst(OwnStep):
    def backward(self, loss: torch.Tensor) -> None:
        self.model.zero_grad()
        self.accelerator.backward(loss)


def left_gradients(trainer: Trainer) -> float:
    """Returns the norm of what the gradients of two micro-batches are off from those of their losses, relative."""
    given, count = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 2, torch.device("cpu"))
    found = []
    for step in (trainer.training_step, lambda *args: trainer.compute_loss(*args).backward()):
        trainer.model.zero_grad()
        for batch in given:
            step(trainer.model, dict(batch), *([False, count] if found else [count]))
        found.append(torch.cat([each.grad.flatten().clone() for each in trainer.model.parameters()]))
    trainer.model.zero_grad()
    return float((found[0] - found[1]).norm() / found[1].norm())


@broken(
    Fault.GRADIENT_SCALED,
    "gradients",
    proof=lambda t: abs(left_gradients(t) - 0.5) < 1e-3 and abs(loss_ratio(t) - 1) < 1e-4,
)
def gradient_divided_once_more() -> Trainer:
    """An own training_step divides the loss by the accumulation, as compute_loss has done by all labels."""
    return chatml(trainer=DividesAgain, gradient_accumulation_steps=2)


@broken(Fault.GRADIENT_CHANGED, "gradients", proof=lambda t: left_gradients(t) > 0.1 and abs(loss_ratio(t) - 1) < 1e-4)
def clipped_in_each_micro_batch() -> Trainer:
    """An own training_step clips what has been accumulated so far, so the first micro-batches count for less."""
    return chatml(trainer=Clips, gradient_accumulation_steps=2)


@broken(Fault.GRADIENT_CHANGED, "gradients", proof=lambda t: left_gradients(t) > 0.1 and abs(loss_ratio(t) - 1) < 1e-4)
def zeroed_between_micro_batches() -> Trainer:
    """An own training_step calls zero_grad in front of each backward pass: the last micro-batch alone is learned."""
    return chatml(trainer=ZeroesFirst, gradient_accumulation_steps=2)


# ── Sound ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@sound(lambda t: left_gradients(t) < 1e-5)
def own_training_step() -> Trainer:
    """A training_step of one's own that is right."""
    return chatml(trainer=OwnStep, gradient_accumulation_steps=2)


@sound(lambda t: abs(loss_ratio(t) - 1) < 1e-4)
def uneven_accumulation() -> Trainer:
    """Four micro-batches of one conversation each, 30 to 600 tokens long, and one ratio."""
    return sft(ANSWERS, tok("chatml"), gradient_accumulation_steps=4, per_device_train_batch_size=1)


@sound(lambda t: abs(loss_ratio(t) - 1) < 1e-4)
def mean_of_equal_micro_batches() -> Trainer:
    """Without accumulation, a compute_loss that ignores num_items_in_batch is the same mean."""
    return chatml(trainer=SumOfMeans, gradient_accumulation_steps=1)


@sound(lambda t: 0 < loss_ratio(t) < 0.9)
def dft_loss() -> Trainer:
    """loss_type="dft" weights each token by its own probability: no cross-entropy, and nothing wrong with it."""
    return sft(ANSWERS, tok("chatml"), loss_type="dft", gradient_accumulation_steps=2)


@sound(lambda t: answers_alone(t) and t.label_smoother is not None)
def label_smoothing() -> Trainer:
    """label_smoothing_factor=0.1 in transformers' Trainer."""
    return chatml(label_smoothing_factor=0.1, gradient_accumulation_steps=2)


@sound(lambda t: {name for name, found in moved(t).items() if found}
       == {name for name, each in t.model.named_parameters() if each.requires_grad and "lora" in name})  # fmt: skip
def lora_of_all_linear_layers() -> Trainer:
    """LoRA on all linear layers, control tokens that the model knows, bf16 autocast, activation checkpointing."""
    return of_marks(bf16=True, gradient_checkpointing=True,
               peft_config=LoraConfig(target_modules="all-linear"))  # fmt: skip


@sound(lambda t: any(found for name, found in moved(t).items() if "embed_tokens" in name and "original" not in name))
def new_tokens_trained_whole() -> Trainer:
    """The new tokens again, with modules_to_save=["embed_tokens", "lm_head"]."""
    return with_new_tokens(modules_to_save=["embed_tokens", "lm_head"])


@sound(lambda t: t.processing_class.convert_tokens_to_ids("<|im_end|>") in saved(t)[1])
def stop_of_the_template() -> Trainer:
    """The base model again, with eos_token="<|im_end|>" in SFTConfig."""
    return of_a_base_model(eos_token="<|im_end|>")


class Weighted(Trainer):
    def _get_train_sampler(self, *_: Any) -> WeightedRandomSampler:
        return WeightedRandomSampler([1 + n % 3 for n in range(len(ROWS))], len(ROWS))


@sound(lambda t: labels_are_ids(t) and abs(loss_ratio(t) - 1) < 1e-4)
def weighted_sampler() -> Trainer:
    """A sampler that numbers the rows of the whole data set, for weights of rows."""
    return chatml(trainer=Weighted)


@sound(lambda t: not any(moved(t, 1).values()) and any(moved(t, 3).values()))
def warmup_from_zero() -> Trainer:
    """The first step of a warmup has a learning rate of 0: nothing moves in it, and nothing is wrong."""
    return sft(ANSWERS, tok("chatml"), warmup_steps=100, max_steps=1000)


@sound(lambda t: answers_alone(t) and t.model.config.resid_pdrop == 0.1)
def dropout_of_gpt2() -> Trainer:
    """gpt2's own dropout of 0.1 makes every pass another, padded on the right."""
    return chatml(kind="gpt2", gradient_accumulation_steps=2)


@sound(lambda t: answers_alone(t) and t.aux_loss_enabled)
def mixture_of_experts() -> Trainer:
    """qwen3_moe with TRL's auxiliary loss for balance, which is no cross-entropy of tokens."""
    return sft(ANSWERS, tok("chatml"), kind="qwen3_moe", router_aux_loss_coef=0.01, gradient_accumulation_steps=2)


@sound(lambda t: answers_alone(t) and t.args.neftune_noise_alpha == 5)
def neftune() -> Trainer:
    """neftune_noise_alpha=5 adds noise to the embeddings of each pass."""
    return sft(ANSWERS, tok("chatml"), neftune_noise_alpha=5)


@sound(lambda t: keeps_logits(t) and answers_alone(t))
def logits_to_keep_of_single_rows() -> Trainer:
    """With one row a batch, ms-swift passes a mask of the logits that predict labels."""
    tokenizer = tok("chatml")
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    return plain(encoded(tokenizer), tokenizer, trainer=KeepsLogits, **options)
