"""The checks of a run before it begins, on the user's own model and data, the cheap ones first."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence

import torch
import transformers

from sftron import __version__
from sftron.checkpoint.hf_weights import read_config
from sftron.verify.data_checks import (
    check_forgery,
    check_masks,
    check_order,
    check_prompt,
    check_stops,
    check_template,
    check_toggles,
)
from sftron.verify.model_checks import (
    check_accumulation,
    check_gradient_isolation,
    check_isolation,
    check_packed,
    check_packed_rounded,
)
from sftron.verify.reference_checks import check_reference, check_weights
from sftron.verify.run_checks import check_learning, check_ranks, check_resume
from sftron.verify.subject import Subject
from sftron.verify.table import Finding, Rule


def check_start(subject: Subject) -> Finding:
    """Carries out all that run_train.py checks before it reads a weight."""
    if subject.refusal:
        return Finding(False, subject.refusal.splitlines()[0], "nothing to refuse", tuple(subject.refusal.splitlines()))
    plan = subject.plan
    dtype = str(plan.model.compute_dtype).removeprefix("torch.")
    return Finding(
        True,
        f"attention {plan.model.attention}, loss {plan.model.loss}, {dtype}",
        "nothing to refuse",
        (
            f"on {plan.ranks.device}",
            f"packs of {plan.data.dataset.token_budget:,} tokens; rows in {plan.data.dataset.lanes_in_words}",
        ),
    )


RULES: tuple[Rule[Subject], ...] = (
    Rule(
        "template",
        check_template,
        "Each conversation has exactly the ids of the tokenizer's own apply_chat_template.",
        "The model would be trained on another format than it is asked in. Please report the row that is named; until "
        "then set tokenizer.chat_template to a template that can be followed.",
    ),
    Rule(
        "prompt",
        check_prompt,
        "What is trained begins where the generation prompt ends.",
        "The model learns to answer after other tokens than those it will be asked with. Bring the data into the "
        "template's form (a reasoning part, most often: data.reasoning), or set tokenizer.chat_template.",
    ),
    Rule(
        "stop tokens",
        check_stops,
        "Each answer trains the token that ends it, so the model learns to stop there.",
        "The model would go on talking after its answer. Look at the named turn with tools/inspect_data.py; the "
        "template has to write a control token after each answer.",
    ),
    Rule(
        "masks",
        check_masks,
        "What is trained is what the model itself has to say; each label is the next token of its own conversation.",
        "The run would train on prompts, or leave out parts of the answers. Look at the named row with "
        "tools/inspect_data.py and do not train before it is right.",
    ),
    Rule(
        "forgery",
        check_forgery,
        "Text that spells a control token or a whole turn stays plain text, and nothing of it is trained.",
        "A text of the data could end a turn or begin another, in your data and in anyone's prompt. Please report the "
        "tokenizer and the row.",
    ),
    Rule(
        "toggles",
        check_toggles,
        "train_on_completions_only and remove_cross_attention change no pack: an ablation compares nothing else.",
        "Runs with other toggles would see other batches, and could not be compared. Please report this configuration.",
    ),
    Rule(
        "data order",
        check_order,
        "A run that is stopped goes on with exactly the next pack, also on two ranks.",
        "A resume would repeat rows or lose them. Were files changed while this ran? Else please report it.",
    ),
    Rule(
        "start-up",
        check_start,
        "run_train.py accepts configuration, data and model.",
        "run_train.py would end with this message and status 2; the message says what to do.",
    ),
    Rule(
        "weights",
        check_weights,
        "Hugging Face to sftron and back loses no bit of any tensor.",
        "The export would hold other weights than were trained. Is the folder whole, and its config.json its own?",
    ),
    Rule(
        "transformers",
        check_reference,
        "The model computes what transformers computes, and gives the same greedy answers.",
        "Training would go on from another function than the model's own. Do not train; run tools/check_sft.py for the "
        "full comparison, and report it.",
    ),
    Rule(
        "isolation",
        check_isolation,
        "With this attention backend no conversation sees its neighbours in the pack.",
        "Answers would be learned from other conversations' text. Set model.attention: sdpa, and report the backend.",
    ),
    Rule(
        "gradients apart",
        check_gradient_isolation,
        "No conversation's loss has a gradient at another one's tokens.",
        "The backward pass would leak between conversations. Set model.attention: sdpa, and report the backend.",
    ),
    Rule(
        "packed = single",
        check_packed,
        "A pack has the loss and the gradients of its conversations alone: positions, bounds and masks are right.",
        "Packing would change what is learned. Set data.packing.strategy: none until it is found, and report it.",
    ),
    Rule(
        "packed in its type",
        check_packed_rounded,
        "The same in the run's own type, attention and loss, up to the rounding of that type.",
        "This backend or loss is less exact than its type. Set model.attention: sdpa and model.loss: native.",
    ),
    Rule(
        "accumulation",
        check_accumulation,
        "The step's loss is one ratio: the same tokens give the same gradient in 1, 2 or 4 micro-batches.",
        "Tokens would weigh more or less by who shares their micro-batch. Set "
        "tokens.batch_accumulation_per_replica: 1, and report it.",
    ),
    Rule(
        "resume",
        check_resume,
        "A run that is stopped and goes on is, to the bit, the run without a stop.",
        "A requeued run would be another run. On a GPU set general.deterministic: true; else report what differs.",
    ),
    Rule(
        "ranks",
        check_ranks,
        "Several processes take the steps that one process takes.",
        "A run on several GPUs would be another run. Train on one, and report it.",
    ),
    Rule(
        "learning",
        check_learning,
        "With this optimizer and rate the loss goes down on your data, and the stop token becomes likelier.",
        "The run would not learn. Lower optimizer.learning_rate if the loss rises or is no number; look at what is "
        "trained with tools/inspect_data.py.",
    ),
)


def chosen(names: Sequence[str], *, with_ranks: bool) -> tuple[Rule[Subject], ...]:
    """Returns the rules with these names, or all but `ranks` without a name; and `ranks` where it is wanted.

    Raises ValueError for an unknown name.
    """
    known = {rule.name: rule for rule in RULES}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only: no check is named {', '.join(unknown)}; there are {', '.join(known)}")
    wanted = {*(names or known.keys() - {"ranks"}), *(["ranks"] if with_ranks else [])}
    return tuple(rule for rule in RULES if rule.name in wanted)


def facts_of(subject: Subject) -> dict[str, str]:
    """Describes what is checked, and with what versions."""
    config, preparation = subject.config, subject.preparation
    llama = read_config(subject.model_folder)
    num_rows = "rows read forward" if preparation.num_rows is None else f"{preparation.num_rows:,} rows"
    dropped = ", ".join(f"{count:,} dropped: {reason}" for reason, count in subject.dropped.items())
    device = subject.ranks.device
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, threads: {torch.get_num_threads()}"
    return {
        "model": f"{subject.model_folder}, {llama.num_hidden_layers} layers",
        **({"depth": f"{subject.depth} computed (--layers)"} if subject.depth else {}),
        "data": f"{num_rows} of {', '.join(preparation.source_names)}",
        "looked at": f"{len(subject.rows):,} rows, {len(subject.packs)} packs" + (f"; {dropped}" if dropped else ""),
        "computed": f"{sum(map(len, subject.documents)):,} tokens of {len(subject.documents)} conversations",
        "trained": "what the model has to say" if config.data.train_on_completions_only else "every token",
        "device": on,
        "versions": f"sftron {__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
