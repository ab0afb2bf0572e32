"""A zoo of broken and sound training loops for verify_step, each as somebody would write it by hand.

    python -m tests.sftcheck.loop_zoo                # prints one line for each loop
    python -m tests.sftcheck.loop_zoo --prove        # measures that each is what it claims, without sftron

Each is a function that returns the loop; its docstring says what is wrong. A broken one names the rows that must FAIL
(`a|b`: one of the two) and those that may fail as a consequence. `proof` is a measurement of loop_proofs.py, which
shares no code with sftron.
"""

import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sftcheck.faults import Fault
from tests.sftcheck.loop_materials import (
    ANSWER,
    CONVERSATIONS,
    FEATURES,
    IGNORE,
    TOKENIZER,
    ZOO,
    Batch,
    Loop,
    blocks,
    broken,
    logits_of,
    of_means,
    of_packs,
    of_rows,
    packed,
    padded,
    ratio,
    shifted,
    token_losses,
)
from tests.sftcheck.loop_proofs import (
    changes_behind,
    grows_with_the_step,
    is_next_token,
    kept_gradient,
    leaks,
    trained,
    weights,
)
from tests.sftcheck.sound_loops import same_weight
from tests.sftcheck.zoo_materials import model


@broken(
    Fault.UNSHIFTED_LABELS,
    "trained tokens",
    may="stop tokens, ids",
    proof=lambda loop: not is_next_token(loop),
)
def targets_that_are_not_shifted() -> Loop:
    """The logits of a token are compared with the token itself."""
    return of_rows(lambda llama, batch: token_losses(logits_of(llama, batch), batch["labels"]))


@broken(
    Fault.SHIFTED_LABELS,
    "trained tokens",
    may="stop tokens, ids",
    proof=lambda loop: not is_next_token(loop),
)
def targets_that_are_shifted_twice() -> Loop:
    """The loader gives the next token at each index, and the loss shifts them again."""
    batches = padded()
    for batch in batches:
        batch["labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)
    return of_rows(lambda llama, batch: shifted(logits_of(llama, batch), batch["labels"]), batches)


@broken(Fault.PROMPTS_TRAINED, "trained tokens",
        proof=lambda loop: CONVERSATIONS[0][-2]["content"][1:] in trained(loop))  # fmt: skip
def prompts_trained() -> Loop:
    """The loss is over all tokens but padding."""
    batches = padded()
    for batch in batches:
        batch["labels"] = batch["input_ids"].where(batch["attention_mask"] == 1, IGNORE)
    return of_rows(lambda llama, batch: shifted(logits_of(llama, batch), batch["labels"]), batches)


@broken(Fault.STOP_MASKED, "stop tokens", may="trained tokens", proof=lambda loop: "<|im_end|>" not in trained(loop))
def stop_tokens_masked() -> Loop:
    """The loader masks the stop token by its id, which is meant for padding."""
    batches = padded()
    for batch in batches:
        batch["labels"] = batch["labels"].where(batch["labels"] != TOKENIZER.eos_token_id, IGNORE)
    return of_rows(lambda llama, batch: shifted(logits_of(llama, batch), batch["labels"]), batches)


@broken(Fault.PADDING_TRAINED, "padding", may="trained tokens, loss",
        proof=lambda loop: "<|endoftext|>" in trained(loop))  # fmt: skip
def padding_trained() -> Loop:
    """The loader ignores with -100, and the loss with -1: what is negative was clamped to 0, the padding token."""

    def losses(llama: nn.Module, batch: Batch) -> Tensor:
        labels = batch["labels"].masked_fill(batch["labels"] == IGNORE, -1)
        labels = labels.where(batch["attention_mask"] == 1, TOKENIZER.pad_token_id)
        return token_losses(logits_of(llama, batch)[:, :-1], labels[:, 1:], ignore_index=-1)

    return of_rows(losses)


@broken(Fault.ANSWERS_LEFT_OUT, "trained tokens", may="stop tokens",
        proof=lambda loop: is_next_token(loop) and ANSWER[1:] in trained(loop).replace(ANSWER, ""))  # fmt: skip
def loss_mask_off_by_one() -> Loop:
    """The mask is that of the tokens, and is laid over the targets, which are one ahead."""

    def losses(llama: nn.Module, batch: Batch) -> Tensor:
        mask = batch["labels"] != IGNORE
        return token_losses(logits_of(llama, batch)[:, :-1], batch["input_ids"][:, 1:]) * mask[:, :-1]

    return of_rows(losses)


@broken(Fault.MASKED_IDS, "trained tokens", may="stop tokens, padding",
        proof=lambda loop: not is_next_token(loop))  # fmt: skip
def labels_of_the_neighbor_row() -> Loop:
    """The ids of a batch are sorted by length, and the labels are not."""
    batches = padded()
    for batch in batches:
        batch["labels"] = batch["labels"].roll(1, dims=0)
    return of_rows(lambda llama, batch: shifted(logits_of(llama, batch), batch["labels"]), batches)


@broken(Fault.ROWS_CUT, "stop tokens|truncation", may="stop tokens, truncation, trained tokens",
        proof=lambda loop: trained(loop).count("<|im_end|>") == 0)  # fmt: skip
def last_token_dropped() -> Loop:
    """Each row ends with its stop token. The loader cuts the last target off, and so does the loss, once more."""
    rows = [row["input_ids"][:-1] for row in FEATURES]  # without the line break behind the stop token
    labels = [row["labels"][:-1] for row in FEATURES]
    batches = [(torch.tensor([ids[:-1]]), torch.tensor([own[1:]])) for ids, own in zip(rows, labels, strict=True)]
    single = [n for n, row in enumerate(CONVERSATIONS) if sum(each["role"] == "assistant" for each in row) == 1]
    llama = model(TOKENIZER)
    losses = lambda batch: token_losses(llama(batch[0]).logits[:, :-1], batch[1][:, :-1])  # noqa: E731
    step = ratio(losses, lambda batch: (batch[1][:, :-1] != IGNORE).sum())
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-3)
    return Loop(llama, [batches[n] for n in single], step, {"optimizer": optimizer})


@broken(Fault.MEAN_OF_MEANS, "loss", proof=lambda loop: not same_weight(loop))
def mean_of_each_micro_batch() -> Loop:
    """The mean over each micro-batch, by the number of micro-batches: gradient accumulation as it is often written."""

    def step(llama: nn.Module, micro_batches: list[Batch]) -> None:
        for batch in micro_batches:
            (llama(**batch).loss / len(micro_batches)).backward()

    return of_means(step)


@broken(Fault.UNDIVIDED, "loss", proof=lambda loop: grows_with_the_step(loop))
def sum_that_is_not_divided() -> Loop:
    """The losses of all tokens are summed, so the gradient grows with the number of targets."""

    def step(llama: nn.Module, micro_batches: list[Batch]) -> None:
        for batch in micro_batches:
            shifted(logits_of(llama, batch), batch["labels"]).sum().backward()

    return of_means(step)


@broken(Fault.OTHER_COUNT, "loss", proof=lambda loop: float(weights(loop).sum()) < 0.9)
def divided_by_all_tokens() -> Loop:
    """The sum over the answers is divided by the number of all tokens, prompts and padding too."""

    def step(llama: nn.Module, micro_batches: list[Batch]) -> None:
        for batch in micro_batches:
            total = sum(each["labels"].numel() for each in micro_batches)
            (shifted(logits_of(llama, batch), batch["labels"]).sum() / total).backward()

    return of_means(step)


@broken(Fault.MEAN_BY_SEQUENCE, "loss", proof=lambda loop: not same_weight(loop))
def mean_of_each_row() -> Loop:
    """Each row has the mean of its own targets, so the tokens of short answers count for more."""

    def step(llama: nn.Module, micro_batches: list[Batch]) -> None:
        num_rows = sum(len(batch["labels"]) for batch in micro_batches)
        for batch in micro_batches:
            losses, is_target = shifted(logits_of(llama, batch), batch["labels"]), batch["labels"][:, 1:] != IGNORE
            ((losses.sum(1) / is_target.sum(1)).sum() / num_rows).backward()

    return of_means(step)


@broken(Fault.GRADIENT_LOST, "loss",
        proof=lambda loop: same_weight(loop) and kept_gradient(loop) > 0.1)  # fmt: skip
def gradients_zeroed_within_the_accumulation() -> Loop:
    """zero_grad is called for each micro-batch, so the step has the gradient of the last one."""

    def step(llama: nn.Module, micro_batches: list[Batch]) -> None:
        total = sum((batch["labels"][:, 1:] != IGNORE).sum() for batch in micro_batches)
        for batch in micro_batches:
            llama.zero_grad()
            (shifted(logits_of(llama, batch), batch["labels"]).sum() / total).backward()

    return of_means(step)


@broken(Fault.GRADIENT_CHANGED, "loss",
        proof=lambda loop: same_weight(loop) and kept_gradient(loop) > 0.1)  # fmt: skip
def clipped_within_the_accumulation() -> Loop:
    """What has been accumulated is clipped behind each micro-batch, so the first ones count for less."""

    def step(llama: nn.Module, micro_batches: list[Batch]) -> None:
        total = sum((batch["labels"][:, 1:] != IGNORE).sum() for batch in micro_batches)
        for batch in micro_batches:
            (shifted(logits_of(llama, batch), batch["labels"]).sum() / total).backward()
            nn.utils.clip_grad_norm_(llama.parameters(), 0.05)

    return of_means(step)


@broken(Fault.GRADIENT_LOST, "loss", may="trained tokens, stop tokens, truncation",
        proof=lambda loop: bool((weights(loop, all_tokens=True).flatten(1).sum(1) == 0).any()))  # fmt: skip
def backward_of_the_last_micro_batch_alone() -> Loop:
    """backward stands behind the loop over the micro-batches instead of within it."""

    def step(llama: nn.Module, micro_batches: list[Batch]) -> None:
        loss = torch.zeros(())
        for batch in micro_batches:
            loss = llama(**batch).loss
        loss.backward()

    return of_means(step)


@broken(Fault.NO_POSITIONS, "isolation", may="positions", proof=leaks)
def packs_without_bounds() -> Loop:
    """Conversations one behind the other, and a causal mask over all of them."""
    return of_packs(lambda _: {})


@broken(Fault.CACHE, "isolation", may="positions", proof=leaks)
def packs_with_a_cache() -> Loop:
    """transformers' model with its own use_cache, which is true, reads no borders from position_ids."""
    llama = model(TOKENIZER)
    losses = lambda batch: shifted(  # noqa: E731
        llama(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits, batch["labels"]
    )
    return Loop(llama, packed(), ratio(losses), {"optimizer": torch.optim.AdamW(llama.parameters(), lr=1e-3)})


@broken(Fault.POSITIONS_RUN_ON, "positions", proof=lambda loop: not leaks(loop) and changes_behind(loop))
def positions_that_run_on() -> Loop:
    """A mask of blocks, and learned positions that count through the pack."""
    return of_packs(lambda batch: {"mask": blocks(batch["document_ids"])})


@broken(Fault.NOT_OPTIMIZED, "adapters", proof=lambda loop: all(
    loop.model.get_parameter("lm_head.weight") is not each
    for group in loop.options["optimizer"].param_groups for each in group["params"]))  # fmt: skip
def head_without_an_optimizer() -> Loop:
    """The groups of the optimizer are made by name, and the head is in none of them."""
    loop = of_rows(lambda llama, batch: shifted(logits_of(llama, batch), batch["labels"]))
    own = [
        each for name, each in loop.model.named_parameters() if "layers" in name or "embed" in name or "norm" in name
    ]
    return Loop(loop.model, loop.batches, loop.step, {"optimizer": torch.optim.AdamW(own, lr=1e-3)})


def run(name: str, is_proof: bool) -> str:
    """Verifies or proves one loop; returns its line, which begins with "ok" if it is as expected."""
    set_up, started = ZOO[name], time.monotonic()
    loop, failed = set_up.make(), ""
    if is_proof:
        problem = "" if set_up.proof(loop) else "the proof does not hold"
    else:
        from sftron import verify_step

        report = verify_step(**loop.arguments())
        failed = ", ".join(row.name for row in report.checks if row.status == "FAIL") or "nothing"
        problem = set_up.problem(report)
    seconds, expected = time.monotonic() - started, ", ".join(set_up.fails) or "sound"
    verdict = f"NOT as expected: {problem}" if problem else "as expected"
    return f"{'ok' if not problem else '!!'} {name:44} {expected:24} {failed:34} {seconds:4.1f} s  {verdict}"


def main() -> int:
    chosen = [name for name in sys.argv[1:] if name in ZOO] or list(ZOO)
    lines = []
    for name in chosen:
        lines.append(run(name, "--prove" in sys.argv))
        print(lines[-1], flush=True)
    return int(any(line.startswith("!!") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
