"""The sound loops of loop_zoo.py."""

import torch
from torch import Tensor, nn

from tests.sftcheck.loop_materials import (
    ANSWER,
    CONVERSATIONS,
    IGNORE,
    TOKENIZER,
    Batch,
    Loop,
    blocks,
    logits_of,
    of_packs,
    of_rows,
    padded,
    ratio,
    shifted,
    sound,
    token_losses,
)
from tests.sftcheck.loop_proofs import (
    changes_behind,
    is_next_token,
    kept_gradient,
    leaks,
    trained,
    weights,
)
from tests.sftcheck.zoo_materials import model


def answers_alone(loop: Loop) -> bool:
    """Returns whether answers and stop tokens are trained, and no question is, each as the next token."""
    text, roles = trained(loop), {"user": False, "assistant": True}
    whole = [message for row in CONVERSATIONS[:6] for message in row if len(message["content"]) > 12]
    are_as_meant = all((each["content"] in text) == roles.get(each["role"], False) for each in whole)
    return are_as_meant and is_next_token(loop) and "<|im_end|>" in text


def same_weight(loop: Loop) -> bool:
    found = weights(loop)
    return float((found * len(found) - 1).abs().max()) < 1e-3


@sound(lambda loop: answers_alone(loop) and same_weight(loop))
def one_ratio_over_padded_rows() -> Loop:
    """Labels at the index of their tokens, shifted in the loss, and one ratio over the micro-batches."""
    return of_rows(lambda llama, batch: shifted(logits_of(llama, batch), batch["labels"]))


@sound(lambda loop: answers_alone(loop) and same_weight(loop))
def loss_of_the_models_own() -> Loop:
    """transformers' model computes the loss from labels; the loop weighs micro-batches by their numbers of labels."""
    llama = model(TOKENIZER)

    def step(micro_batches: list[Batch]) -> None:
        counts = [int((batch["labels"][:, 1:] != IGNORE).sum()) for batch in micro_batches]
        for batch, count in zip(micro_batches, counts, strict=True):
            (llama(**batch).loss * count / sum(counts)).backward()

    return Loop(llama, padded(), step, {"optimizer": torch.optim.SGD(llama.parameters(), lr=1e-2)})


@sound(lambda loop: answers_alone(loop) and not leaks(loop) and not changes_behind(loop))
def packs_with_a_mask_of_blocks() -> Loop:
    """Whole conversations in a row, a mask of blocks, and positions that begin at 0 with each."""
    return of_packs(lambda batch: {"mask": blocks(batch["document_ids"]), "positions": batch["position_ids"]})


@sound(lambda loop: answers_alone(loop) and float(weights(loop).max() / weights(loop).min()) < 1.1)
def bfloat16() -> Loop:
    """The model and its logits are in bfloat16, and all sums are rounded."""
    loop = of_rows(lambda llama, batch: shifted(logits_of(llama, batch), batch["labels"]))
    loop.model.bfloat16()
    return loop


@sound(lambda loop: answers_alone(loop) and kept_gradient(loop) < 1e-4)
def gradients_divided_after_the_backward_passes() -> Loop:
    """The sums of all micro-batches are trained, and their gradients divided by the number of targets, then clipped."""
    llama = model(TOKENIZER)
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-3)

    def step(micro_batches: list[Batch]) -> None:
        optimizer.zero_grad()
        num_targets = 0
        for batch in micro_batches:
            num_targets += int((batch["labels"][:, 1:] != IGNORE).sum())
            shifted(logits_of(llama, batch), batch["labels"]).sum().backward()
        for parameter in llama.parameters():
            if parameter.grad is not None:
                parameter.grad /= num_targets
        nn.utils.clip_grad_norm_(llama.parameters(), 1e6)
        optimizer.step()

    return Loop(llama, padded(), step)


@sound(lambda loop: answers_alone(loop) and abs(float(weights(loop).sum()) / 1024 - 1) < 1e-3)
def scaled_loss() -> Loop:
    """A gradient scaler multiplies the loss by 1,024 and divides the gradients before the step of the optimizer."""
    llama = model(TOKENIZER)
    optimizer, scaler = torch.optim.AdamW(llama.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=1024)

    def step(micro_batches: list[Batch]) -> None:
        optimizer.zero_grad()
        total = sum((batch["labels"][:, 1:] != IGNORE).sum() for batch in micro_batches)
        for batch in micro_batches:
            scaler.scale(shifted(logits_of(llama, batch), batch["labels"]).sum() / total).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(llama.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return Loop(llama, padded(), step)


@sound(lambda loop: answers_alone(loop) and float(weights(loop).max() / weights(loop).min()) > 1.9)
def weights_for_each_token() -> Loop:
    """A batch gives each target a weight, 1 or 0.5, and the loss is divided by the sum of the weights of the step."""
    batches = padded()
    for batch in batches:
        batch["weights"] = (batch["labels"] != IGNORE).float()
        batch["weights"][::2] *= 0.5
    llama = model(TOKENIZER)

    def losses(batch: Batch) -> Tensor:
        ids = batch["input_ids"]
        return token_losses(logits_of(llama, batch)[:, :-1], ids[:, 1:]) * batch["weights"][:, 1:]

    step = ratio(losses, lambda batch: batch["weights"][:, 1:].sum())
    return Loop(llama, batches, step, {"optimizer": torch.optim.AdamW(llama.parameters(), lr=1e-3)})


@sound(lambda loop: is_next_token(loop) and float(weights(loop).max() / weights(loop).min()) > 1.5)
def weights_by_probability() -> Loop:
    """Dynamic fine-tuning: the loss of a token is weighed by its probability, which has no gradient."""

    def losses(llama: nn.Module, batch: Batch) -> Tensor:
        found = shifted(logits_of(llama, batch), batch["labels"])
        return found * (-found.detach()).exp()

    return of_rows(losses)


@sound(lambda loop: ANSWER in trained(loop) and float(weights(loop).sum()) < 0.95)
def smoothed_labels() -> Loop:
    """A tenth of each target is given to all tokens alike."""

    def losses(llama: nn.Module, batch: Batch) -> Tensor:
        logits, targets = logits_of(llama, batch)[:, :-1], batch["labels"][:, 1:]
        return token_losses(logits, targets, label_smoothing=0.1)

    return of_rows(losses)


@sound(lambda loop: answers_alone(loop) and same_weight(loop))
def adapters_with_an_optimizer_in_the_step() -> Loop:
    """Adapters by peft; their B is zero, so the first gradient of each A is too."""
    from peft import LoraConfig, get_peft_model

    llama = get_peft_model(model(TOKENIZER), LoraConfig(r=4, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([each for each in llama.parameters() if each.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    accumulate = ratio(lambda batch: shifted(logits_of(llama, batch), batch["labels"]))

    def step(micro_batches: list[Batch]) -> None:
        accumulate(micro_batches)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return Loop(llama, padded(), step)
