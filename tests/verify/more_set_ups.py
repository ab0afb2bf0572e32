"""More set-ups of the zoo: what is easily mistaken for a fault, and faults that hide behind healthy losses."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer

from tests.verify.zoo_materials import (
    ANSWERS,
    ROWS,
    Rows,
    broken,
    encoded,
    model,
    plain,
    sft,
    sound,
    tok,
    trl_template,
)
from tests.verify.zoo_proofs import answers_alone, labels_are_ids, leak, loss_ratio, moved, read, trained


class NeatPacking:
    """One row of conversations, their numbers as the mask: 1 1 1 2 2 3 3 3, and positions that restart."""

    def __call__(self, features: Rows) -> dict[str, torch.Tensor]:
        lengths = [len(row["input_ids"]) for row in features]
        flat = {name: torch.tensor([[value for row in features for value in row[name]]]) for name in features[0]}
        numbers = torch.cat([torch.full((length,), n + 1) for n, length in enumerate(lengths)])[None]
        return flat | {"attention_mask": numbers, "position_ids": torch.cat([*map(torch.arange, lengths)])[None]}


@broken("isolation", may="loss, positions", proof=lambda t: leak(t) > 1e-3)
def neat_packing_without_its_patch() -> Trainer:
    """The mask of document numbers of LLaMA-Factory and axolotl without their patch: transformers reads ones."""
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer), tokenizer, NeatPacking())


@broken("stop tokens", may="trained tokens", proof=lambda t: trained(t).count("<|im_end|>") == len(ROWS))
def stop_of_the_last_answer_alone() -> Trainer:
    """A script trains each answer's text and one stop at the end of a row: other answers do not learn to stop."""
    tokenizer = tok("chatml")
    features = encoded(tokenizer)
    for row in features:
        stops = [n for n, label in enumerate(row["labels"]) if label == tokenizer.eos_token_id]
        for n in stops[:-1]:
            row["labels"][n] = -100
    return plain(features, tokenizer)


class CountsAllTokens(Trainer):
    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        return sum(batch["attention_mask"].sum() for batch in batch_samples)


@broken("loss", proof=lambda t: loss_ratio(t) < 0.8)
def prompts_counted_in_the_denominator() -> Trainer:
    """num_items_in_batch counts every token that is attended: the longer the prompts, the smaller the step."""
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer), tokenizer, trainer=CountsAllTokens, gradient_accumulation_steps=2)


def mean_of_rows(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, targets = outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return (losses.sum(1) / (targets != -100).sum(1)).mean()


@broken("loss", proof=lambda t: loss_ratio(t) > 3)
def mean_of_rows_without_accumulation() -> Trainer:
    """A compute_loss_func returns a mean, and the Trainer takes it for a sum over the step: 4 times the gradient."""
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer), tokenizer, compute_loss_func=mean_of_rows, gradient_accumulation_steps=4)


@broken("adapters|generation", may="adapters, generation",
        proof=lambda t: any(found for name, found in moved(t).items() if "lora" not in name))  # fmt: skip
def base_trained_beside_its_adapter() -> Trainer:
    """All parameters get requires_grad after get_peft_model: the base is trained, and save_model saves the adapter."""
    tokenizer = tok("chatml")
    peft_model = get_peft_model(model(tokenizer), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    for parameter in peft_model.parameters():
        parameter.requires_grad_(True)
    return plain(encoded(tokenizer), tokenizer, their_model=peft_model)


@broken("positions|isolation", may="isolation, positions, loss", proof=lambda t: leak(t) > 1e-3)
def positions_of_the_whole_pack() -> Trainer:
    """A collator flattens and leaves positions to the model, which counts, and attends, through the pack."""
    tokenizer = tok("chatml")

    def flatten(features: Rows) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([[value for row in features for value in row[name]]]) for name in features[0]}

    return plain(encoded(tokenizer), tokenizer, flatten)


@sound(lambda t: not any(moved(t, 1).values()) and any(moved(t, 3).values()))
def warmup_from_zero() -> Trainer:
    """The first step of a warmup has a learning rate of 0: nothing moves in it, and nothing is wrong."""
    return sft(ANSWERS, tok("chatml"), warmup_steps=100, max_steps=1000)


@sound(lambda t: answers_alone(t) and t.model.config.resid_pdrop == 0.1)
def dropout_of_gpt2() -> Trainer:
    """gpt2's own dropout of 0.1 makes every pass another, padded on the right."""
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer), tokenizer, kind="gpt2", gradient_accumulation_steps=2)


@sound(lambda t: answers_alone(t) and t.aux_loss_enabled)
def mixture_of_experts() -> Trainer:
    """qwen3_moe with TRL's auxiliary loss for balance, which is no cross-entropy of tokens."""
    return sft(ANSWERS, tok("chatml"), kind="qwen3_moe", router_aux_loss_coef=0.01, gradient_accumulation_steps=2)


@sound(lambda t: answers_alone(t) and t.args.neftune_noise_alpha == 5)
def neftune() -> Trainer:
    """neftune_noise_alpha=5 adds noise to the embeddings of each pass."""
    return sft(ANSWERS, tok("chatml"), neftune_noise_alpha=5)


@sound(lambda t: answers_alone(t) and "feed the starter once a week" not in trained(t) and labels_are_ids(t))
def labels_as_train_on_responses_only() -> Trainer:
    """Pretokenized rows with labels from each answer's header to the next header, as Unsloth's helper makes them."""
    tokenizer = tok()
    features = encoded(tokenizer)
    newline = tokenizer.encode("\n")
    for row in features:
        for n, label in enumerate(row["labels"]):
            if label == tokenizer.eos_token_id:
                row["labels"][n + 1 : n + 2] = newline
    return sft(features, tokenizer)


@sound(lambda t: "feed the starter once a week" in trained(t) and labels_are_ids(t), trained_roles="all")
def sharegpt_rows() -> Trainer:
    """A `conversations` column with from and value; TRL keeps the names as roles, so human and gpt would be wrong."""
    rows = [[{"from": each["role"], "value": each["content"]} for each in row["messages"]] for row in ROWS]
    return sft([{"conversations": row} for row in rows], tok("chatml"))


TOOL = {"name": "forecast", "description": "Returns the weather.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}  # fmt: skip
CALLS = [
    [{"role": "user", "content": f"Will it rain in {city}?"},
     {"role": "assistant", "content": "", "tool_calls": [
         {"type": "function", "function": {"name": "forecast", "arguments": {"city": city}}}]},
     {"role": "tool", "name": "forecast", "content": f"{{\"rain\": {n % 90}}}"},
     {"role": "assistant", "content": f"The chance of rain in {city} is {n % 90} percent."}]
    for n, city in enumerate(("Oslo", "Lima", "Porto", "Graz", "Kyoto", "Quito", "Bern", "Riga"), start=31)
]  # fmt: skip


@sound(lambda t: '"name": "forecast"' in trained(t) and '{"rain": 3' not in trained(t) and "Will it" not in trained(t))
def tool_calls() -> Trainer:
    """Rows with tools, calls and results: calls and answers are trained, results are not."""
    tokenizer = tok(template=trl_template("qwen2_5"))
    return sft([{"messages": row, "tools": [{"type": "function", "function": TOOL}]} for row in CALLS], tokenizer,
               assistant_only_loss=True)  # fmt: skip


def thinking(**given: Any) -> Trainer:
    rows = [[dict(each) for each in row["messages"]] for row in ROWS]
    for row in rows:
        for each in row:
            if each["role"] == "assistant":
                each["content"] = f"<think>\nThe user wants a short answer.\n</think>\n\n{each['content']}"
    return sft([{"messages": row} for row in rows], tok(template=trl_template("qwen3")), **given)


def differs_from_its_template(trainer: Trainer) -> bool:
    """Returns whether a row is rendered otherwise than by the tokenizer's own template."""
    return read(trainer).count("The user wants a short answer.") > len(ROWS)


@broken("ids|generation", may="ids, generation, trained tokens, stop tokens", proof=differs_from_its_template)
def thinking_kept_by_the_training_template() -> Trainer:
    """For assistant_only_loss TRL renders its copy of Qwen3's template, which keeps the thinking of earlier turns."""
    return thinking(assistant_only_loss=True)
