"""Checks of a trainer's model on its own batches: isolation, loss, padding, what moves, and what is saved.

The docstring of a check is the law that a pass proves, and is printed in reports.
"""

from __future__ import annotations

import inspect
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sftron.data.chat.check import reference_ids
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.types import IGNORE_INDEX, Role
from sftron.verify.table import Finding, NotMeasuredError
from sftron.verify.trainer_documents import Document
from sftron.verify.trainer_state import untouched
from sftron.verify.trainer_subject import SeenBatch, TrainerSubject
from sftron.verify.trainers import Isolation, compare_documents, rounding_of


def isolation(subject: TrainerSubject) -> Finding:
    """No conversation of a batch sees another, with the arguments that the model is really called with."""
    found, problem = list[tuple[str, Isolation]](), ""
    for batch, documents in _computed(subject):
        for kind, places in _groups(documents):
            if len(places) < 2:
                continue
            try:
                found.append((kind, _isolation(subject, batch, places)))
            except NotMeasuredError as error:
                problem = str(error)
        if {kind for kind, _ in found} == {"in one row", "in different rows"}:
            break
    if not any(kind == "in one row" and not each.isolated for kind, each in found):
        _require_bounds(subject)
    if not found and not problem and _are_alone(subject):
        return Finding(True, f"each of {len(subject.batches):,} batches holds one conversation", "no other one")
    if not found:
        raise NotMeasuredError(problem or "no batch holds two conversations that could be told apart")
    leaking = [(kind, each) for kind, each in found if not each.isolated]
    kind, worst = max(leaking or found, key=lambda each: (each[1].difference, each[1].num_conversations))
    counts = Counter(kind for kind, _ in found)
    measured = f"{worst.num_conversations} conversations {kind}: others change by {worst.difference:.2g}"
    detail = (
        f"measured {', '.join(f'{number} times {kind}' for kind, number in counts.items())}",
        f"a changed conversation itself changes by {worst.own_difference:.2g}",
        f"arguments: {', '.join(sorted(subject.step.batches[0].seen))}",
    )
    name = getattr(getattr(subject.unwrapped, "config", None), "model_type", "this model")
    attention = getattr(getattr(subject.unwrapped, "config", None), "_attn_implementation", None)
    uses_cache = any(batch.seen.get("use_cache") is True for batch in subject.step.batches) or (
        "use_cache" not in subject.step.batches[0].seen
        and bool(getattr(getattr(subject.unwrapped, "config", None), "use_cache", False))
    )
    has_positions = subject.step.batches[0].positions is not None
    if leaking and kind == "in different rows":
        remedy = (
            "Rows of one batch affect each other. Remove what mixes them (batch statistics), or use batches of one row."
        )
    elif not has_positions:
        remedy = (
            "The packed row is passed without position_ids, so the model attends to all that is before. TRL: "
            "packing_strategy='bfd' (padding-free); transformers: DataCollatorWithFlattening; axolotl: "
            "sample_packing: true with flash attention; or packing=False."
        )
    elif uses_cache:
        remedy = "The cache joins the documents of a row. Set use_cache=False (TrainingArguments(use_cache=False))."
    else:
        remedy = (
            f"{name} with attention {attention!r} does not keep packed conversations apart. Set packing=False (and "
            "padding_free=False), or attn_implementation='flash_attention_2' where this model type supports packed "
            "rows; docs/isolation.md lists the types."
        )
    return Finding(not leaking, measured, f"<= {worst.rounding:.1g}", detail, remedy)


def _require_bounds(subject: TrainerSubject) -> None:
    """Raises NotMeasuredError if rows are packed, and a document could be several conversations."""
    documents = subject.found.documents
    is_packed = getattr(subject.trainer.args, "packing", False) or any(each.num_cut_before for each in documents)
    unclear = [
        each for each in documents if each.source in ("", "ids") and subject.batches[each.batch].positions is None
    ]
    if is_packed and any(subject.finder.may_be_several(each) for each in unclear):
        raise NotMeasuredError(
            "rows are packed, and the template does not show where a conversation begins; give them as conversations="
        )


def _are_alone(subject: TrainerSubject) -> bool:
    """Returns whether every batch holds one conversation, which is known from its beginning to its end."""
    numbers = Counter(each.batch for each in subject.found.documents)
    return all(each.source for each in subject.found.documents) and all(numbers[n] == 1 for n in numbers)


def _computed(subject: TrainerSubject) -> list[tuple[SeenBatch, list[Document]]]:
    """Returns the batches that are computed, with their documents; those with the most first."""
    batches = subject.step.batches
    found = subject.finder.documents(batches).documents
    pairs = [(batch, [each for each in found if each.batch == n and len(each)]) for n, batch in enumerate(batches)]
    return sorted(pairs, key=lambda pair: -len(pair[1]))


Place = tuple[int, slice]


def _groups(documents: Sequence[Document]) -> list[tuple[str, list[Place]]]:
    """Returns the places of the documents of one row, and those of different rows, in order."""
    rows: dict[int, list[Document]] = {}
    for each in documents:
        rows.setdefault(each.row, []).append(each)
    packed = max(rows.values(), key=len, default=[])
    across = [(row, slice(each[0].start, each[-1].end)) for row, each in rows.items()]
    return [
        ("in one row", [(each.row, slice(each.start, each.end)) for each in packed]),
        ("in different rows", across),
    ]


def _isolation(subject: TrainerSubject, batch: SeenBatch, places: list[Place]) -> Isolation:
    ids = batch.inputs["input_ids"]
    return compare_documents(
        lambda changed: subject.hidden({**batch.inputs, "input_ids": changed}),
        ids,
        places,
        lambda own: rounding_of(subject.model, subject.alone, own),
    )


# -- loss ------------------------------------------------------------------------------------------------------------

_TOLERANCE, _ROUNDED_TOLERANCE, _WEIGHT_TOLERANCE = 1e-4, 2**-6, 0.01
"""Relative: of the sum in float32, of the sum in other types, and of the weight of one micro-batch."""


def loss(subject: TrainerSubject) -> Finding:
    """The loss of a step is one ratio: the sum over all trained tokens of its batches, by their number."""
    step, trainer = subject.step, subject.trainer
    counts = [batch.num_trained for batch in step.batches]
    num_trained = sum(counts)
    if not num_trained:
        raise NotMeasuredError("no token of the computed batches is trained")
    sums = [float(subject.token_losses(batch.seen, batch.labels).double().sum()) for batch in step.batches]
    returned, auxiliary = subject.step_losses
    expected = [each / num_trained for each in sums]
    is_rounded = next(subject.unwrapped.parameters()).dtype != torch.float32 or trainer.accelerator.native_amp
    tolerance = _ROUNDED_TOLERANCE if is_rounded else _TOLERANCE
    weights = [a / b for a, b, count in zip(returned, expected, counts, strict=True) if count]
    apart = abs(sum(returned) - sum(expected)) / sum(expected)
    worst = max(abs(weight - 1) for weight in weights)
    num_items = None if step.num_items is None else int(step.num_items)
    detail = [
        f"labels of the micro-batches: {', '.join(map(str, counts))}; num_items_in_batch: {num_items}",
        f"the step returns {sum(returned):.6g}, the ratio is {sum(expected):.6g}",
        f"weight of each micro-batch against the ratio: {', '.join(f'{each:.3f}' for each in weights)}",
    ]
    other = _declared_loss(trainer)
    is_counted = num_items is None or num_items == num_trained
    if auxiliary:
        detail.append(f"without the auxiliary loss that the model adds, {auxiliary:.3g} in each micro-batch")
    if not is_counted:
        measured = f"num_items_in_batch is {num_items}, and {num_trained} labels are trained"
        return Finding(False, measured, "equal", tuple(detail), _COUNT_REMEDY)
    if apart <= max(tolerance, _TOLERANCE) and worst <= max(tolerance, _WEIGHT_TOLERANCE):
        spread = _spread_of_tokens(subject, tolerance)
        detail.append(f"the same rows one by one: {spread:.1e} apart")
        if spread > tolerance:
            measured = f"the same rows one by one have a loss {spread:.1%} off"
            return Finding(False, measured, f"<= {tolerance:.0e}", tuple(detail), _BATCH_REMEDY)
        measured = f"{apart:.1e} from the ratio of {num_trained:,} labels"
        return Finding(True, measured, f"<= {tolerance:.0e}, relative", tuple(detail))
    ratio = [a / (b / count) for a, b, count in zip(returned, sums, counts, strict=True) if count]
    is_mean = len(ratio) > 1 and max(ratio) - min(ratio) <= _WEIGHT_TOLERANCE * max(ratio)
    if is_mean and not (other and num_items is not None):
        measured = (
            f"a mean of {len(ratio)} micro-batches' means, {apart:.1%} from the ratio; weights off by {worst:.0%}"
        )
        return Finding(False, measured, f"<= {tolerance:.0e}", tuple(detail), _MEAN_REMEDY)
    spread = _spread_one_by_one(subject)
    if spread is not None and spread <= max(tolerance, 1e-3):
        what = other or "another loss than the cross-entropy"
        detail.append(f"{what}: only its invariance to batching is measured")
        return Finding(
            True, f"{what}; the same rows one by one: {spread:.1e} apart", f"<= {tolerance:.0e}", tuple(detail)
        )
    if spread is not None:
        detail.append(f"the same rows one by one: {spread:.1%} apart")
    measured = f"{apart:.1%} from the ratio; a micro-batch's weight is off by {worst:.0%}"
    return Finding(False, measured, f"<= {tolerance:.0e}", tuple(detail), _MEAN_REMEDY)


_MEAN_REMEDY = (
    "Tokens weigh more or less by who shares their micro-batch. Do not override compute_loss, or accept "
    "num_items_in_batch in it (or in compute_loss_func) and divide the sum of the token losses by it, and set "
    "loss_is_scaled_for_ga accordingly."
)
_COUNT_REMEDY = (
    "The loss is divided by another number than that of its labels. Mask padding and the first token of each row with "
    "-100, and do not override get_batch_samples or _get_num_items_in_batch."
)
_BATCH_REMEDY = (
    "What is learned from a row depends on its neighbors in the batch. See isolation, positions and padding; without "
    "packing, packing=False and padding_free=False."
)


def _declared_loss(trainer: Any) -> str:
    """Returns the name of a loss that the trainer declares and that is no cross-entropy; "" if there is none."""
    if getattr(trainer.args, "loss_type", "nll") not in ("nll", None):
        return f"loss_type={trainer.args.loss_type!r}"
    if getattr(trainer.args, "label_smoothing_factor", 0):
        return f"label smoothing of {trainer.args.label_smoothing_factor:g}"
    return "compute_loss_func" if trainer.compute_loss_func is not None else ""


def _spread_of_tokens(subject: TrainerSubject, tolerance: float) -> float:
    """Returns how far the cross-entropies of the step's rows are from those of the same rows, each alone in a batch.

    They are compared in training mode and, if that differs, without dropout. It is 0.0 if no batch has several rows.
    """
    batches = subject.step.batches
    if all(len(batch.features) < 2 for batch in batches):
        return 0.0
    alone = [subject.see_alone(feature, subject.step.num_items) for batch in batches for feature in batch.features]
    spread = 0.0
    for training in (True, False):
        whole, single = (
            sum(float(subject.token_losses(x.seen, x.labels, training=training).double().sum()) for x in each)
            for each in (batches, alone)
        )
        spread = abs(single - whole) / whole
        if spread <= tolerance:
            break
    return spread


def _spread_one_by_one(subject: TrainerSubject) -> float | None:
    """Returns how far the trainer's own loss of the step's rows is from that of the same rows one by one, without
    dropout; None if the rows are not known."""
    features, num_items = [each for batch in subject.step.batches for each in batch.features], subject.step.num_items
    if not features or num_items is None:
        return None
    batches = (subject.step.batches, [subject.see_alone(feature, num_items) for feature in features])
    with torch.no_grad():
        whole, alone = (
            sum(float(subject.loss_of(x.inputs, num_items, training=False)) for x in each) for each in batches
        )
    return abs(alone - whole) / abs(whole)


# -- padding ---------------------------------------------------------------------------------------------------------


def padding(subject: TrainerSubject) -> Finding:
    """Padding is neither trained, nor attended to, nor counted."""
    num_padding = num_trained = 0
    for number, batch in enumerate(subject.batches):
        is_padding = _padding_of(batch, [each for each in subject.found.documents if each.batch == number])
        num_padding += int(is_padding.sum())
        num_trained += int((is_padding[:, 1:] & (batch.labels[:, 1:] != IGNORE_INDEX)).sum())
    if not num_padding:
        raise NotMeasuredError("no batch has padding")
    difference = allowed = 0.0
    for batch, documents in _computed(subject):
        is_padding = torch.from_numpy(_padding_of(batch, documents))
        ids = batch.inputs["input_ids"]
        if not is_padding.any() or is_padding.all():
            continue
        others = ids[~is_padding.to(ids.device)].unique()
        changed = torch.where(is_padding.to(ids.device), others[len(others) // 2], ids)
        before, after = (subject.hidden({**batch.inputs, "input_ids": each}) for each in (ids, changed))
        real = ~is_padding.to(before.device)
        difference = float((before[real].float() - after[real].float()).abs().max())
        if difference > 0:
            own = max(documents, key=len)
            allowed = 4 * rounding_of(subject.model, subject.alone, ids[own.row, own.start : own.end][None])
        break
    found = [f"{num_trained:,} of {num_padding:,} padding tokens trained"] if num_trained else []
    if difference > allowed:
        found.append(f"attended: changing it changes others by {difference:.2g}")
    remedy = (
        "Padding is trained, and counted as labels. Pad labels with -100: TRL's collator, DataCollatorForSeq2Seq "
        "(label_pad_token_id=-100), or labels[attention_mask == 0] = -100."
    )
    if not num_trained:
        remedy = (
            "Padding is attended to. Pass the attention_mask of the tokenizer on to the model, or pad on the right "
            "(tokenizer.padding_side = 'right')."
        )
    measured = ", ".join(found) or f"{num_padding:,} padding tokens: not trained, not attended to, not counted"
    return Finding(not found, measured, "none", (), remedy)


def _padding_of(batch: SeenBatch, documents: Sequence[Document]) -> np.ndarray:
    """Returns, as bool [B, T], what is in no document."""
    is_padding = np.ones(batch.ids.shape, dtype=bool)
    for each in documents:
        is_padding[each.row, each.start : each.end] = False
    return is_padding


# -- what moves ------------------------------------------------------------------------------------------------------

_MOST_NAMED, _LEAST_DISTANCE = 4, 0.1


def adapters(subject: TrainerSubject) -> Finding:
    """Each trainable tensor moves within two steps, no frozen one does, and no token without training is frozen."""
    trainer, model = subject.trainer, subject.trainer.model
    named = dict(model.named_parameters())
    trainable = {name: each for name, each in named.items() if each.requires_grad}
    is_adapter = hasattr(model, "peft_config")
    kind = f"{len(trainable):,} of {len(named):,} tensors are trainable"
    if not trainable:
        return Finding(False, "no tensor is trainable", "some", (), "Set requires_grad, or give a peft_config.")
    if not any(batch.num_trained for batch in subject.step.batches):
        raise NotMeasuredError("no token of the computed batches is trained, so nothing can move")
    with untouched(trainer):
        before = {name: each.detach().clone() for name, each in named.items()}
        optimizer = _new_optimizer(trainer)
        optimized = {id(each) for group in optimizer.param_groups for each in group["params"]}
        _ = subject.step_losses  # computes the gradients
        for name, each in named.items():
            each.grad = subject.gradients[name]
        has_gradient, num_steps = _with_gradient(trainable), 1
        optimizer.step()
        if len(has_gradient) < len(trainable):  # as an adapter's A, while its B is zero
            num_steps = 2
            model.zero_grad(set_to_none=True)
            batch = min(subject.step.batches, key=lambda each: (not each.num_trained, each.ids.size))
            trainer.training_step(subject.model, dict(batch.inputs), subject.step.num_items)
            has_gradient |= _with_gradient(trainable)
            optimizer.step()
        moved = {name for name, each in named.items() if not each.equal(before[name])}
        del before
    frozen_moved = [name for name in named if name in moved and name not in trainable]
    without = [name for name in trainable if name not in has_gradient and "expert" not in name]
    left_out = [name for name, each in trainable.items() if id(each) not in optimized]
    stuck = [name for name in trainable if name in has_gradient and name not in moved and name not in left_out]
    not_saved = _not_saved(model, trainable) if is_adapter else []
    untrained = _untrained_tokens(subject) if is_adapter else {}
    counts = {
        "frozen tensors move": frozen_moved,
        "trainable tensors get no gradient": without,
        "trainable tensors are not in the optimizer": left_out,
        "trained tensors are not saved with the adapter": not_saved,
    }
    if stuck and len(stuck) == len(trainable) - len(without) - len(left_out):
        counts["trainable tensors do not move (learning rate, or the rounding of their type)"] = stuck
    found = [f"{len(each):,} {name}" for name, each in counts.items() if each]
    if untrained:
        found.append(f"{len(untrained)} control tokens look untrained and are frozen: {', '.join(untrained)}")
    detail = [f"{name}: {', '.join(each[:_MOST_NAMED])}" for name, each in counts.items() if each]
    detail += [f"{token}: {why}" for token, why in untrained.items()]
    if stuck:
        detail.append(f"{len(stuck):,} tensors have a gradient and do not move, as the step is below their rounding")
    remedy = (
        "Parts that should learn do not. Check requires_grad and the optimizer's parameters; with peft, target_modules "
        "and modules_to_save."
    )
    if not_saved:
        remedy = (
            "save_model writes the adapter alone, so the saved folder is not the trained model. Leave the base frozen, "
            "or name what is trained beside the adapters in LoraConfig(modules_to_save=[...])."
        )
    if untrained:
        remedy = (
            "The adapter cannot teach tokens whose embeddings are frozen. LoraConfig(modules_to_save=['embed_tokens', "
            "'lm_head']) or trainable_token_indices=; axolotl: lora_modules_to_save; or a chat template whose tokens "
            "the model knows."
        )
    measured = (
        ", ".join(found) or f"{kind}; {len(moved):,} moved in {num_steps} step{'s' * (num_steps > 1)}, no frozen one"
    )
    return Finding(not found, measured, "all, and no frozen one", tuple(detail), remedy)


def _not_saved(model: Any, trainable: Mapping[str, nn.Parameter]) -> list[str]:
    """Returns the trainable tensors that are not in the folder of a peft model."""
    from peft import get_peft_model_state_dict

    saved = {each.data_ptr() for each in get_peft_model_state_dict(model, save_embedding_layers=False).values()}
    return [name for name, each in trainable.items() if each.data_ptr() not in saved]


def _with_gradient(trainable: Mapping[str, nn.Parameter]) -> set[str]:
    return {name for name, each in trainable.items() if each.grad is not None and bool(each.grad.any())}


def _new_optimizer(trainer: Any) -> Any:
    """Returns an optimizer as the trainer makes it, with no state."""
    if trainer.optimizer is None:
        return trainer.create_optimizer()
    given = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    groups = [{**group, "lr": group.get("initial_lr", group["lr"])} for group in given.param_groups]
    names = inspect.signature(type(given).__init__).parameters
    return type(given)(groups, **{name: value for name, value in given.defaults.items() if name in names})


def _untrained_tokens(subject: TrainerSubject) -> dict[str, str]:
    """Returns the control tokens of the documents whose frozen rows look as if nobody had trained them.

    Such a row is nearly zero, or nearly the mean of all rows, which is how new rows are made.
    """
    tokenizer, model = subject.tokenizer, subject.unwrapped
    added = set(tokenizer.get_added_vocab().values())
    present = {int(n) for each in subject.found.documents for n in np.unique(each.ids)} & added
    found: dict[str, str] = {}
    layers = {"embeddings": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    for name, layer in layers.items():
        weight = _frozen_weight(layer)
        if weight is None:
            continue
        padding = getattr(layer, "padding_idx", None)  # torch never trains its row
        rows = torch.tensor(sorted(n for n in present - {padding} if n < len(weight)), device=weight.device)
        if not len(rows):
            continue
        values = weight.detach().float()
        mean, norms = values.mean(dim=0), values.norm(dim=1)
        distances = (values - mean).norm(dim=1)
        for row in rows.tolist():
            token = tokenizer.convert_ids_to_tokens(row)
            if norms[row] < _LEAST_DISTANCE * norms.median():
                found[token] = (
                    f"norm {float(norms[row]):.2g} in the {name}, where others have {float(norms.median()):.2g}"
                )
            elif distances[row] < _LEAST_DISTANCE * distances.median():
                found[token] = f"its row of the {name} is the mean of all rows, as that of a new token"
    return found


def _frozen_weight(layer: Any) -> Tensor | None:
    """Returns the weight of an embedding or a head that nothing trains; None if something does."""
    if not isinstance(layer, nn.Module) or any(each.requires_grad for each in layer.parameters()):
        return None
    weight = getattr(layer, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.ndim == 2 else None


# -- what is saved ---------------------------------------------------------------------------------------------------

_MOST_BYTES = 2 * 2**30


def generation(subject: TrainerSubject) -> Finding:
    """The saved folder stops where the model is trained to stop, and its template gives the ids that are trained."""
    from transformers import AutoTokenizer, GenerationConfig
    from transformers.trainer_utils import align_special_tokens

    trainer, tokenizer = subject.trainer, subject.tokenizer
    documents = [each for each in subject.documents() if each.tokens is not None]
    stops = Counter(n for each in documents for n in _trained_stops(each))
    if not stops:
        raise NotMeasuredError("no stop token is trained, so nothing can be compared with the saved folder")
    detail = []
    with tempfile.TemporaryDirectory(prefix="sftron-verify-") as name, untouched(trainer):
        align_special_tokens(trainer.model, tokenizer)
        size = sum(each.numel() * each.element_size() for each in trainer.model.parameters())
        if hasattr(trainer.model, "peft_config") or size <= _MOST_BYTES:
            trainer.args.push_to_hub = False
            trainer.save_model(name)
        else:
            tokenizer.save_pretrained(name)
            detail.append("the weights are too large to be saved for a check: only the other files were")
        if (Path(name) / "generation_config.json").exists():
            saved = GenerationConfig.from_pretrained(name)
        else:
            saved = getattr(subject.unwrapped, "generation_config", None)
            detail.append("the folder has no generation_config.json; that of the model in memory is compared")
        ends = getattr(saved, "eos_token_id", None)
        has_tokenizer = (Path(name) / "tokenizer_config.json").exists()
        folder = AutoTokenizer.from_pretrained(name, trust_remote_code=False) if has_tokenizer else tokenizer
    own = {ends} if isinstance(ends, int) else set(ends or ())
    lacking = [n for n in stops if n not in own]
    differing, num_rendered, chat = 0, 0, None
    for each in documents:
        if each.truth is None or each.truth.conversation is None or each.difference or each.truth.problem:
            continue
        if each.truth.tokens is None or each.truth.tokens.holds_control_text:
            continue
        num_rendered += 1
        chat = chat or ChatTokenizer(folder)
        differing += reference_ids(chat, each.truth.conversation) != each.truth.ids.tolist()
    found = []
    if lacking:
        names = ", ".join(tokenizer.convert_ids_to_tokens(lacking))
        found.append(f"generation does not end at {names}, which is trained to end answers")
    if differing:
        found.append(f"{differing:,} of {num_rendered:,} documents differ from the saved template's")
    detail.append(f"eos_token_id of the folder: {sorted(own)}; trained stop tokens: {dict(stops)}")
    remedy = (
        "A server would generate beyond the answer. TRL: SFTConfig(eos_token=...) with the template's stop token; "
        "transformers: model.generation_config.eos_token_id; axolotl: special_tokens: eos_token."
    )
    if differing and not lacking:
        remedy = "The saved tokenizer is not the one that made the data. Pass that one as processing_class."
    measured = (
        ", ".join(found) or f"ends at {', '.join(tokenizer.convert_ids_to_tokens(list(stops)))}; the same template"
    )
    return Finding(not found, measured, "stops, and ids", tuple(detail), remedy)


def _trained_stops(document: Document) -> list[int]:
    assert document.tokens is not None
    turns = [turn for turn in document.tokens.turns if turn.role is Role.ASSISTANT and turn.stop is not None]
    return [int(document.ids[turn.stop]) for turn in turns if turn.stop is not None and document.trained[turn.stop]]
