"""Checks of what a trainer changes and saves: the tensors that move in a step, and the saved folder.

verify_trainer.py says what a pass of each proves.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from sftcheck.faults import Fault
from sftcheck.restore import restore_after
from sftcheck.subject import Subject
from sftcheck.tolerances import UNTRAINED_ROW
from sftcheck.trainer.trainer_subject import TrainerSubject
from sftron.checks.report import Finding, NotMeasuredError
from sftron.data.chat.reference import reference_ids
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.chat.tokenizer_file import difference_from_file
from sftron.data.types import Conversation

_MOST_NAMED, _MOST_BYTES = 4, 2 * 2**30


def adapters(subject: Subject) -> Finding:
    model = subject.model.trained
    named, is_adapter = dict(model.named_parameters()), hasattr(model, "peft_config")
    trainable = [name for name, each in named.items() if each.requires_grad]
    if not trainable:
        return Finding(False, "no tensor is trainable", "some", (), (Fault.NOTHING_TRAINABLE,))
    if not any(batch.num_trained for batch in subject.step.batches):
        raise NotMeasuredError("no token of the computed batches is trained, so nothing can move")
    moves = subject.moves(named)
    optimized, with_gradient, moved = moves.optimized, moves.with_gradient, moves.moved
    stuck = [name for name in trainable if name in with_gradient & optimized - moved]
    not_optimized = [name for name in trainable if name not in optimized]
    not_saved = _not_saved(model, trainable) if is_adapter else []
    frozen_moved = [name for name in named if name in moved and name not in trainable]
    # In a mixture, an expert to which no token is routed has none.
    without_gradient = [name for name in trainable if name not in with_gradient and "expert" not in name]
    none_moves = bool(stuck) and not any(name in moved for name in trainable)
    counts = {
        "frozen tensors move": frozen_moved,
        "trainable tensors get no gradient": without_gradient,
        "trainable tensors are not in the optimizer": not_optimized,
        "trained tensors are not saved with the adapter": not_saved,
    }
    if none_moves:
        counts["trainable tensors do not move (learning rate, or the rounding of their type)"] = stuck
    untrained = _untrained_tokens(subject) if is_adapter else {}
    found = [f"{name}: {len(each):,}" for name, each in counts.items() if each]
    if untrained:
        found.append(f"{len(untrained)} control tokens look untrained and are frozen: {', '.join(untrained)}")
    detail = [f"{name}: {', '.join(each[:_MOST_NAMED])}" for name, each in counts.items() if each]
    detail += [f"{token}: {why}" for token, why in untrained.items()]
    if stuck:
        why = "the update is too small for their type, and rounds to zero"
        detail.append(f"{len(stuck):,} tensors have a gradient but do not change: {why}")
    faults = {
        Fault.TOKENS_FROZEN: untrained,
        Fault.NOT_SAVED: not_saved,
        Fault.NOT_OPTIMIZED: not_optimized,
        Fault.NOT_LEARNING: without_gradient or none_moves,
        Fault.FROZEN_MOVED: frozen_moved,
    }
    steps = f"{moves.num_steps} step{'s' * (moves.num_steps > 1)}"
    measured = f"{len(trainable):,} of {len(named):,} tensors are trainable; {len(moved):,} moved in {steps}, "
    return Finding(
        not found,
        ", ".join(found) or f"{measured}no frozen one",
        "all, and no frozen one",
        tuple(detail),
        tuple(fault for fault, names in faults.items() if names),
    )


def _not_saved(model: Any, trainable: list[str]) -> list[str]:
    """Returns the trainable tensors that are not in the folder of a peft model."""
    from peft import get_peft_model_state_dict

    saved = list(get_peft_model_state_dict(model, save_embedding_layers=False).values())
    pointers = {each.data_ptr() for each in saved}
    rest = {name: each for name in trainable if (each := model.get_parameter(name)).data_ptr() not in pointers}
    # Virtual tokens are saved as a copy.
    return [
        name for name, own in rest.items() if not any(each.shape == own.shape and each.equal(own) for each in saved)
    ]


def _untrained_tokens(subject: Subject) -> dict[str, str]:
    """Returns the control tokens of the documents whose frozen rows look as if nobody had trained them.

    Such a row is nearly zero, or nearly the mean of all rows, which is how new rows are made.
    """
    tokenizer, model = subject.training.tokenizer, subject.model.unwrapped
    present = {int(n) for each in subject.training.documents for n in np.unique(each.ids)}
    present &= set(tokenizer.get_added_vocab().values())
    found: dict[str, str] = {}
    for name, layer in {"embeddings": model.get_input_embeddings(), "head": model.get_output_embeddings()}.items():
        weight = getattr(layer, "weight", None)
        is_trained = isinstance(layer, nn.Module) and any(each.requires_grad for each in layer.parameters())
        if is_trained or not isinstance(weight, Tensor) or weight.ndim != 2:
            continue
        values = weight.detach().float()
        norms, distances = values.norm(dim=1), (values - values.mean(dim=0)).norm(dim=1)
        # torch never trains the row of padding_idx.
        for row in sorted(n for n in present - {getattr(layer, "padding_idx", None)} if n < len(weight)):
            size, median = float(norms[row]), float(norms.median())
            if size < UNTRAINED_ROW * median:
                why = f"norm {size:.2g} in the {name}, where others have {median:.2g}"
            elif distances[row] < UNTRAINED_ROW * distances.median():
                why = f"its row of the {name} is the mean of all rows, as for a new token"
            else:
                continue
            found[tokenizer.convert_ids_to_tokens(row)] = why
    return found


# -- what is saved ---------------------------------------------------------------------------------------------------


def generation(subject: TrainerSubject) -> Finding:
    tokenizer, documents = subject.training.tokenizer, subject.training.with_roles()
    stops = Counter(
        int(each.ids[turn.stop])
        for each in documents
        for turn in each.answers
        if turn.stop is not None and each.trained[turn.stop]
    )
    if not stops:
        raise NotMeasuredError("no stop token is trained, so nothing can be compared with the saved folder")
    ends, folder, detail, difference = _saved(subject)
    # A tokenizer that was built wrongly is saved as it is, so that only the file that it is from shows it.
    source = tokenizer.name_or_path
    difference = (difference_from_file(tokenizer, source) if source else "") or difference
    lacking = [n for n in stops if n not in ends]
    rendered = [
        (truth.content, truth.ids.tolist())
        for each in documents
        if (truth := each.truth) is not None and isinstance(truth.content, Conversation) and truth.tokens is not None
        if not (each.difference or truth.problem or truth.tokens.holds_control_text)
    ]
    chat = ChatTokenizer(folder) if rendered else None
    num_differing = sum(chat is not None and reference_ids(chat, each) != ids for each, ids in rendered)
    found = []
    if lacking:
        names = ", ".join(tokenizer.convert_ids_to_tokens(lacking))
        found.append(f"generation does not end at {names}, which is trained to end answers")
    if num_differing:
        found.append(f"{num_differing:,} of {len(rendered):,} documents differ from the saved template's")
    if difference:
        found.append("the tokenizer differs from its tokenizer.json")
        detail.append(difference)
    detail.append(f"the folder loads as {type(folder).__name__}, the trainer has {type(tokenizer).__name__}")
    detail.append(f"eos_token_id of the folder: {sorted(ends)}; trained stop tokens: {dict(stops)}")
    measured = f"ends at {', '.join(tokenizer.convert_ids_to_tokens(list(stops)))}; the same template"
    stop = tokenizer.convert_ids_to_tokens((lacking or list(stops))[0])
    faults = {Fault.NO_END: lacking, Fault.OTHER_TOKENIZER: num_differing, Fault.OTHER_CLASS: difference}
    return Finding(
        not found,
        ", ".join(found) or measured,
        "stops, and ids",
        tuple(detail),
        tuple(fault for fault, is_found in faults.items() if is_found),
        {"stop": stop},
    )


def _saved(subject: TrainerSubject) -> tuple[set[int], Any, list[str], str]:
    """Saves the trainer. Returns the tokens that end generation, the saved tokenizer, notes, and its difference from
    its file.
    """
    from transformers import AutoTokenizer, GenerationConfig, trainer_utils

    trainer, tokenizer, detail, difference = subject.trainer, subject.training.tokenizer, list[str](), ""
    with tempfile.TemporaryDirectory(prefix="sftron-verify-") as name, restore_after(trainer):
        # As train() does before its first step. In the first releases of transformers 5 it is a method of its Trainer.
        if hasattr(trainer_utils, "align_special_tokens"):
            trainer_utils.align_special_tokens(trainer.model, tokenizer)
        else:
            trainer._align_special_tokens()
        size = sum(each.numel() * each.element_size() for each in trainer.model.parameters())
        if hasattr(trainer.model, "peft_config") or size <= _MOST_BYTES:
            trainer.args.push_to_hub = False
            trainer.save_model(name)
        else:
            tokenizer.save_pretrained(name)
            detail.append("the weights are too large for this check, which saved only the other files")
        if (Path(name) / "generation_config.json").exists():
            saved = GenerationConfig.from_pretrained(name)
        else:
            saved = getattr(subject.model.unwrapped, "generation_config", None)
            detail.append("the folder has no generation_config.json; the check compares the model's own")
        if (Path(name) / "tokenizer_config.json").exists():
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            difference = difference_from_file(tokenizer, name).replace(name, "the saved folder")
        ends = getattr(saved, "eos_token_id", None)  # the model's own configuration is put back afterwards
    return {ends} if isinstance(ends, int) else set(ends or ()), tokenizer, detail, difference
