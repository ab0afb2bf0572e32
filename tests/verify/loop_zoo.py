"""A zoo of broken and sound training loops for verify_step, each as somebody would write it by hand.

    python -m tests.verify.loop_zoo                # prints one line for each loop
    python -m tests.verify.loop_zoo --prove        # measures that each is what it claims, without sftron

Each is a function that returns the loop; its docstring says what is wrong. A broken one names the rows that must FAIL
(`a|b`: one of the two) and those that may fail as a consequence. `proof` is a measurement of loop_proofs.py, which
shares no code with sftron.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from examples.loops.nanochat_style import GPT
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from tests.verify.loop_proofs import (
    changes_behind,
    grows_with_the_step,
    is_next_token,
    kept_gradient,
    leaks,
    trained,
    weights,
)
from tests.verify.zoo_materials import ROWS, encoded, model, tok

TOKENIZER = tok("chatml")
SHORT = [row for row in ROWS if 40 < len(TOKENIZER.apply_chat_template(row["messages"], return_dict=False)) < 150][:16]
FEATURES = encoded(TOKENIZER, SHORT)
"""input_ids and labels of the same length, which are -100 for all but what the model writes."""
CONVERSATIONS = [row["messages"] for row in SHORT]
ANSWER = CONVERSATIONS[0][-1]["content"]
IGNORE = -100
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Loop:
    """The arguments of verify_step."""

    model: nn.Module
    batches: list[Any]
    step: Callable[[list[Any]], Any]
    options: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = TOKENIZER

    def arguments(self) -> dict[str, Any]:
        given = {"model": self.model, "batches": self.batches, "step": self.step, "tokenizer": self.tokenizer}
        return {**given, "conversations": CONVERSATIONS, **self.options}


@dataclass(frozen=True)
class SetUp:
    make: Callable[[], Loop]
    fails: tuple[str, ...]
    may_fail: tuple[str, ...]
    measured: str
    """What the first of the rows that fail has measured."""
    proof: Callable[[Loop], bool]

    def problem(self, report: Any) -> str:
        """Returns what is not as expected in the report, or nothing."""
        rows = {row.name: row for row in report.checks}
        failed = {name for name, row in rows.items() if row.status == "FAIL"}
        problems = [f"{names} did not fail" for names in self.fails if not failed & set(names.split("|"))]
        allowed = {name for names in self.fails for name in names.split("|")} | set(self.may_fail)
        problems += [f"{name} failed: {rows[name].measured}" for name in sorted(failed - allowed)]
        problems += [f"{row.name} raised {row.measured}" for row in report.checks if row.raised]
        if self.fails and not any(self.measured in rows[n].measured for n in self.fails[0].split("|")):
            problems.append(f"{self.fails[0]} measured {rows[self.fails[0].split('|')[0]].measured}")
        if report.passed == bool(self.fails):
            problems.append(report.verdict)
        return "; ".join(problems)


ZOO: dict[str, SetUp] = {}


def broken(*fails: str, measured: str = "", may: str = "", proof: Callable[[Loop], bool]) -> Callable[..., Any]:
    def add(make: Callable[[], Loop]) -> Callable[[], Loop]:
        names = tuple(name.strip() for name in may.split(",") if name)
        ZOO[make.__name__] = SetUp(make, fails, names, measured, proof)
        return make

    return add


def sound(proof: Callable[[Loop], bool]) -> Callable[..., Any]:
    return broken(proof=proof)


# ── What the loops are made of ────────────────────────────────────────────────────────────────────────────────────────


def padded(size: int = 4, *, fill: int = IGNORE) -> list[Batch]:
    """Rows padded on the right, with labels at the index of their own token."""
    batches = []
    for at in range(0, len(FEATURES), size):
        rows = FEATURES[at : at + size]
        ids, labels, ones = (
            [torch.tensor(each) for each in values]
            for values in (
                [row["input_ids"] for row in rows],
                [row["labels"] for row in rows],
                [[1] * len(row["input_ids"]) for row in rows],
            )
        )
        batches.append({
            "input_ids": pad_sequence(ids, True, TOKENIZER.pad_token_id),
            "labels": pad_sequence(labels, True, fill),
            "attention_mask": pad_sequence(ones, True, 0),
        })  # fmt: skip
    return batches


def packed(size: int = 3) -> list[Batch]:
    """Rows of whole conversations one behind the other, with the number of each and positions that begin at 0."""
    batches = []
    for at in range(0, len(FEATURES) - size + 1, size):
        rows = FEATURES[at : at + size]
        batch = {name: torch.tensor([[n for row in rows for n in row[name]]]) for name in ("input_ids", "labels")}
        lengths = [len(row["input_ids"]) for row in rows]
        batch["document_ids"] = torch.tensor([[n for n, length in enumerate(lengths) for _ in range(length)]])
        batch["position_ids"] = torch.tensor([[n for length in lengths for n in range(length)]])
        batches.append(batch)
    return batches


def token_losses(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """[B, T], 0 where a target is ignored."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none", **options).view_as(
        targets
    )


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return token_losses(logits[:, :-1], labels[:, 1:])


Losses = Callable[[Any], Tensor]
"""Returns the losses of the tokens of one micro-batch, [B, T]."""


def ratio(losses: Losses, count: Callable[[Any], Any] = lambda batch: (batch["labels"][:, 1:] != IGNORE).sum()) -> Any:
    """The step that most loops here share: one ratio over all micro-batches."""

    def step(micro_batches: list[Any]) -> Tensor:
        total = sum(count(batch) for batch in micro_batches)
        loss = sum(losses(batch).sum() / total for batch in micro_batches)
        loss.backward()
        return loss.detach()

    return step


def logits_of(llama: nn.Module, batch: Batch) -> Tensor:
    return llama(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def of_rows(losses: Callable[[nn.Module, Batch], Tensor], batches: list[Batch] | None = None, **options: Any) -> Loop:
    """A loop over padded rows with a tiny Llama of transformers."""
    llama = model(TOKENIZER)
    options = {"optimizer": torch.optim.AdamW(llama.parameters(), lr=1e-3), **options}
    return Loop(llama, batches or padded(), ratio(lambda batch: losses(llama, batch)), options)


def of_means(mean: Callable[[nn.Module, list[Batch]], None]) -> Loop:
    """The same with a step of its own, which calls backward."""
    llama = model(TOKENIZER)
    step = lambda micro_batches: mean(llama, micro_batches)  # noqa: E731
    return Loop(llama, padded(), step, {"optimizer": torch.optim.AdamW(llama.parameters(), lr=1e-3)})


def blocks(document_ids: Tensor) -> Tensor:
    """Returns the mask [B, 1, T, T] in which a token attends to those before it in its own document."""
    return (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril()


def of_packs(arguments: Callable[[Batch], dict[str, Any]]) -> Loop:
    """A loop over packs with a GPT of its own, which has learned positions."""
    torch.manual_seed(0)
    gpt = GPT(len(TOKENIZER))
    losses = lambda batch: shifted(gpt(batch["input_ids"], **arguments(batch)), batch["labels"])  # noqa: E731
    return Loop(gpt, packed(), ratio(losses), {"optimizer": torch.optim.AdamW(gpt.parameters(), lr=1e-3)})


# ── Sound ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── Broken ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@broken(
    "trained tokens",
    measured="labels are other tokens",
    may="stop tokens, ids",
    proof=lambda loop: not is_next_token(loop),
)
def targets_that_are_not_shifted() -> Loop:
    """The logits of a token are compared with the token itself."""
    return of_rows(lambda llama, batch: token_losses(logits_of(llama, batch), batch["labels"]))


@broken(
    "trained tokens",
    measured="labels are other tokens",
    may="stop tokens, ids",
    proof=lambda loop: not is_next_token(loop),
)
def targets_that_are_shifted_twice() -> Loop:
    """The loader gives the next token at each index, and the loss shifts them again."""
    batches = padded()
    for batch in batches:
        batch["labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)
    return of_rows(lambda llama, batch: shifted(logits_of(llama, batch), batch["labels"]), batches)


@broken("trained tokens", measured="prompt tokens trained",
        proof=lambda loop: CONVERSATIONS[0][-2]["content"][1:] in trained(loop))  # fmt: skip
def prompts_trained() -> Loop:
    """The loss is over all tokens but padding."""
    batches = padded()
    for batch in batches:
        batch["labels"] = batch["input_ids"].where(batch["attention_mask"] == 1, IGNORE)
    return of_rows(lambda llama, batch: shifted(logits_of(llama, batch), batch["labels"]), batches)


@broken("stop tokens", measured="0 of", may="trained tokens", proof=lambda loop: "<|im_end|>" not in trained(loop))
def stop_tokens_masked() -> Loop:
    """The loader masks the stop token by its id, which is meant for padding."""
    batches = padded()
    for batch in batches:
        batch["labels"] = batch["labels"].where(batch["labels"] != TOKENIZER.eos_token_id, IGNORE)
    return of_rows(lambda llama, batch: shifted(logits_of(llama, batch), batch["labels"]), batches)


@broken("padding", measured="padding tokens trained", may="trained tokens, loss",
        proof=lambda loop: "<|endoftext|>" in trained(loop))  # fmt: skip
def padding_trained() -> Loop:
    """The loader ignores with -100, and the loss with -1: what is negative was clamped to 0, the padding token."""

    def losses(llama: nn.Module, batch: Batch) -> Tensor:
        labels = batch["labels"].masked_fill(batch["labels"] == IGNORE, -1)
        labels = labels.where(batch["attention_mask"] == 1, TOKENIZER.pad_token_id)
        return token_losses(logits_of(llama, batch)[:, :-1], labels[:, 1:], ignore_index=-1)

    return of_rows(losses)


@broken("trained tokens", measured="answer tokens not trained", may="stop tokens",
        proof=lambda loop: is_next_token(loop) and ANSWER[1:] in trained(loop).replace(ANSWER, ""))  # fmt: skip
def loss_mask_off_by_one() -> Loop:
    """The mask is that of the tokens, and is laid over the targets, which are one ahead."""

    def losses(llama: nn.Module, batch: Batch) -> Tensor:
        mask = batch["labels"] != IGNORE
        return token_losses(logits_of(llama, batch)[:, :-1], batch["input_ids"][:, 1:]) * mask[:, :-1]

    return of_rows(losses)


@broken("trained tokens", measured="labels are other tokens", may="stop tokens, padding",
        proof=lambda loop: not is_next_token(loop))  # fmt: skip
def labels_of_the_neighbor_row() -> Loop:
    """The ids of a batch are sorted by length, and the labels are not."""
    batches = padded()
    for batch in batches:
        batch["labels"] = batch["labels"].roll(1, dims=0)
    return of_rows(lambda llama, batch: shifted(logits_of(llama, batch), batch["labels"]), batches)


@broken("stop tokens|truncation", may="stop tokens, truncation, trained tokens",
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


@broken("loss", measured="the weight of a micro-batch's tokens is off by", proof=lambda loop: not same_weight(loop))
def mean_of_each_micro_batch() -> Loop:
    """The mean over each micro-batch, by the number of micro-batches: gradient accumulation as it is often written."""

    def step(llama: nn.Module, micro_batches: list[Batch]) -> None:
        for batch in micro_batches:
            (llama(**batch).loss / len(micro_batches)).backward()

    return of_means(step)


@broken("loss", measured="a sum that is not divided by its", proof=lambda loop: grows_with_the_step(loop))
def sum_that_is_not_divided() -> Loop:
    """The losses of all tokens are summed, so the gradient grows with the number of targets."""

    def step(llama: nn.Module, micro_batches: list[Batch]) -> None:
        for batch in micro_batches:
            shifted(logits_of(llama, batch), batch["labels"]).sum().backward()

    return of_means(step)


@broken("loss", measured="times the ratio", proof=lambda loop: float(weights(loop).sum()) < 0.9)
def divided_by_all_tokens() -> Loop:
    """The sum over the answers is divided by the number of all tokens, prompts and padding too."""

    def step(llama: nn.Module, micro_batches: list[Batch]) -> None:
        for batch in micro_batches:
            total = sum(each["labels"].numel() for each in micro_batches)
            (shifted(logits_of(llama, batch), batch["labels"]).sum() / total).backward()

    return of_means(step)


@broken("loss", measured="each conversation counts alike", proof=lambda loop: not same_weight(loop))
def mean_of_each_row() -> Loop:
    """Each row has the mean of its own targets, so the tokens of short answers count for more."""

    def step(llama: nn.Module, micro_batches: list[Batch]) -> None:
        num_rows = sum(len(batch["labels"]) for batch in micro_batches)
        for batch in micro_batches:
            losses, is_target = shifted(logits_of(llama, batch), batch["labels"]), batch["labels"][:, 1:] != IGNORE
            ((losses.sum(1) / is_target.sum(1)).sum() / num_rows).backward()

    return of_means(step)


@broken("loss", measured="off from the sum of its micro-batches' gradients",
        proof=lambda loop: same_weight(loop) and kept_gradient(loop) > 0.1)  # fmt: skip
def gradients_zeroed_within_the_accumulation() -> Loop:
    """zero_grad is called for each micro-batch, so the step has the gradient of the last one."""

    def step(llama: nn.Module, micro_batches: list[Batch]) -> None:
        total = sum((batch["labels"][:, 1:] != IGNORE).sum() for batch in micro_batches)
        for batch in micro_batches:
            llama.zero_grad()
            (shifted(logits_of(llama, batch), batch["labels"]).sum() / total).backward()

    return of_means(step)


@broken("loss", measured="1 of 2 micro-batches have no gradient", may="trained tokens, stop tokens, truncation",
        proof=lambda loop: bool((weights(loop, all_tokens=True).flatten(1).sum(1) == 0).any()))  # fmt: skip
def backward_of_the_last_micro_batch_alone() -> Loop:
    """backward stands behind the loop over the micro-batches instead of within it."""

    def step(llama: nn.Module, micro_batches: list[Batch]) -> None:
        loss = torch.zeros(())
        for batch in micro_batches:
            loss = llama(**batch).loss
        loss.backward()

    return of_means(step)


@broken("isolation", measured="conversations in one row: others change by", may="positions", proof=leaks)
def packs_without_bounds() -> Loop:
    """Conversations one behind the other, and a causal mask over all of them."""
    return of_packs(lambda _: {})


@broken("isolation", measured="conversations in one row: others change by", may="positions", proof=leaks)
def packs_with_a_cache() -> Loop:
    """transformers' model with its own use_cache, which is true, reads no borders from position_ids."""
    llama = model(TOKENIZER)
    losses = lambda batch: shifted(  # noqa: E731
        llama(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits, batch["labels"]
    )
    return Loop(llama, packed(), ratio(losses), {"optimizer": torch.optim.AdamW(llama.parameters(), lr=1e-3)})


@broken("positions", measured="wrong starts", proof=lambda loop: not leaks(loop) and changes_behind(loop))
def positions_that_run_on() -> Loop:
    """A mask of blocks, and learned positions that count through the pack."""
    return of_packs(lambda batch: {"mask": blocks(batch["document_ids"])})


@broken("adapters", measured="not in the optimizer", proof=lambda loop: all(
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
