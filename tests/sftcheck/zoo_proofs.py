"""Measurements with torch and transformers alone that prove what each set-up of trainer_zoo.py claims about itself.

They share no code with sftron: labels are decoded, tokens are changed, real steps are trained, a folder is saved.
"""

import tempfile
from itertools import islice
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, Trainer


def batches(trainer: Trainer, count: int = 40) -> list[dict[str, Any]]:
    """Returns batches of the trainer's own dataloader, in its own order."""
    return [dict(batch) for batch in islice(iter(trainer.get_train_dataloader()), count)]


def _tokenizer(trainer: Trainer) -> PreTrainedTokenizerBase:
    assert isinstance(trainer.processing_class, PreTrainedTokenizerBase)
    return trainer.processing_class


def read(trainer: Trainer) -> str:
    """Returns the text of all input ids, control tokens included."""
    rows = [row.tolist() for batch in batches(trainer) for row in batch["input_ids"]]
    return "\n¶\n".join(_tokenizer(trainer).decode(row) for row in rows)


def trained(trainer: Trainer) -> str:
    """Returns the text of all labels, with … in place of what has none."""
    return _text(trainer, [row for batch in batches(trainer) for row in batch["labels"].tolist()])


def evaluated(trainer: Trainer, key: str = "labels", name: str | None = None) -> str:
    """Returns the text of all labels of the evaluation, or of one of its data sets."""
    return _text(trainer, [row for batch in trainer.get_eval_dataloader(name) for row in batch[key].tolist()])


def _text(trainer: Trainer, rows: list[list[int]]) -> str:
    texts = []
    for row in rows:
        spans: list[list[int]] = [[]]
        for label in row:
            if label != -100:
                spans[-1].append(label)
            elif spans[-1]:
                spans.append([])
        texts.append("…".join(_tokenizer(trainer).decode(span) for span in spans))
    return "\n¶\n".join(texts)


def answers_alone(trainer: Trainer) -> bool:
    """Returns whether a last answer and its stop token have labels, and a question of the zoo's rows has none."""
    text, stop = trained(trainer), _tokenizer(trainer).eos_token
    return "sourdough never rises" not in text and f"overnight in the fridge.{stop}" in text.replace(f" {stop}", stop)


def labels_are_ids(trainer: Trainer) -> bool:
    """Returns whether each label is the id at the same index, as a model that shifts them itself expects."""
    found = [(batch["labels"] == -100) | (batch["labels"] == batch["input_ids"]) for batch in batches(trainer)]
    return all(bool(each.all()) for each in found)


def _logits(trainer: Trainer, batch: dict[str, Any]) -> torch.Tensor:
    given = {key: value for key, value in batch.items() if key != "labels"}
    trainer.model.train()
    torch.manual_seed(0)  # the same dropout
    with torch.no_grad():
        return trainer.model(**given).logits


class _CalledError(Exception):
    pass


def arguments_of_model(trainer: Trainer) -> dict[str, Any]:
    """Returns the keyword arguments with which a training step calls the model."""
    caught: dict[str, Any] = {}

    def catch(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        caught.update(kwargs)
        raise _CalledError

    handle = trainer.model.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        trainer.training_step(trainer.model, batches(trainer, 1)[0])
    except _CalledError:
        pass
    finally:
        handle.remove()
    return caught


def gradient_behind_labels(trainer: Trainer) -> float:
    """Returns the largest gradient of the loss in the logits of a last trained token, which predict nothing trained."""
    (batch,) = batches(trainer, 1)
    kept: list[torch.Tensor] = []
    head = trainer.model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _module, _inputs, output: (output.retain_grad(), kept.append(output))[0])
    count = (batch["labels"] != -100).sum()
    trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=count).backward()
    handle.remove()
    trainer.model.zero_grad()
    last = [int((row != -100).nonzero()[-1]) for row in batch["labels"]]
    gradient = kept[0].grad
    assert gradient is not None
    return max(float(gradient[n, at].abs().max()) for n, at in enumerate(last))


def leak(trainer: Trainer) -> float:
    """Returns the largest change of a logit of other conversations in a pack after tokens of one were changed.

    The last three tokens before the first border of position_ids change, and the logits behind it are compared. A batch
    without position_ids must be packed to the end: its first three tokens change, and its last logits are compared.
    """
    largest = 0.0
    for batch in batches(trainer, 3):
        border, compared = 3, -1
        if "position_ids" in batch:
            border = compared = int((batch["position_ids"][0] == 0).nonzero()[1])
        ids = batch["input_ids"].clone()
        ids[:, border - 3 : border] = (ids[:, border - 3 : border] + 7) % 500
        change = (_logits(trainer, batch) - _logits(trainer, {**batch, "input_ids": ids}))[:, compared:].abs()
        largest = max(largest, float(change.max()))
    return largest


def row_alone(trainer: Trainer) -> float:
    """Returns the largest difference between the last logits of padded rows and of each row alone, without dropout."""
    (batch,) = batches(trainer, 1)
    pad, model = _tokenizer(trainer).pad_token_id, trainer.model.eval()
    with torch.no_grad():
        together = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
        largest = 0.0
        for row, logits in zip(batch["input_ids"].tolist(), together, strict=True):
            real = [n for n, token in enumerate(row) if token != pad]
            begin, end = real[0], real[-1] + 1
            alone = model(input_ids=torch.tensor([row[begin:end]])).logits[0, -1]
            largest = max(largest, float((alone - logits[end - 1]).abs().max()))
    return largest


def moved_by_the_future(trainer: Trainer) -> float:
    """Returns the largest change of the first logits of a batch after the last tokens of its first row were changed."""
    (batch,) = batches(trainer, 1)
    ids = batch["input_ids"].clone()
    ids[0, 20:] = (ids[0, 20:] + 7) % 500
    change = _logits(trainer, batch)[0, :20] - _logits(trainer, {**batch, "input_ids": ids})[0, :20]
    return float(change.abs().max())


def padding_labels(trainer: Trainer) -> int:
    """Returns the number of labels under the padding on the right or the left."""
    pad, found = _tokenizer(trainer).pad_token_id, 0
    for batch in batches(trainer):
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            while len(ids) > 1 and ids[-1] == ids[-2] == pad:
                found += labels[-1] != -100
                ids, labels = ids[:-1], labels[:-1]
    return found


def loss_ratio(trainer: Trainer) -> float:
    """Returns what one accumulation of training steps returns, divided by the mean over all its trained tokens."""
    steps = trainer.args.gradient_accumulation_steps
    given, num_items = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), steps, torch.device("cpu"))
    trainer.current_gradient_accumulation_steps = len(given)
    total, count = 0.0, 0
    for batch in given:
        model = trainer.model.eval()
        with torch.no_grad():
            logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits[:, :-1].float()
        targets = batch["labels"][:, 1:]
        total += float(cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100))
        count += int((targets != -100).sum())
    found = sum(float(trainer.training_step(trainer.model, dict(batch), num_items)) for batch in given)
    trainer.model.zero_grad()
    return found / (total / count)


def moved(trainer: Trainer, steps: int = 2) -> dict[str, bool]:
    """Trains for some steps; returns for each parameter whether it changed."""
    before = {name: tensor.detach().clone() for name, tensor in trainer.model.named_parameters()}
    trainer.args.max_steps = steps
    trainer.train()
    return {name: not torch.equal(tensor, before[name]) for name, tensor in trainer.model.named_parameters()}


def saved(trainer: Trainer) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """Trains one step and saves; returns the saved tokenizer, and the tokens at which its folder stops."""
    trainer.args.max_steps = 1
    trainer.train()
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_model(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        is_whole = isinstance(trainer.model, transformers.PreTrainedModel)
        stops = GenerationConfig.from_pretrained(folder) if is_whole else trainer.model.generation_config
    return tokenizer, stops.eos_token_id if isinstance(stops.eos_token_id, list) else [stops.eos_token_id]
