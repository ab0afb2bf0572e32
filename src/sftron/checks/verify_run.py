"""`verify_run`: the checks of a run before it begins, the rows of their table, and its page."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sftron.checks import adapter_checks, data_checks, model_checks, rank_checks, run_checks
from sftron.checks.report import Check, Report, Rule, measure_all
from sftron.checks.subject import Subject
from sftron.config import Config
from sftron.report.html import render
from sftron.report.page import shown_packs
from sftron.train.places import pinned

RULES: tuple[Rule, ...] = (
    Rule(
        "template",
        data_checks.template,
        proves="Each conversation has exactly the ids of the tokenizer's own apply_chat_template.",
        remedy=(
            "The model would be trained on another format than it is used with. Please report the row that is named; "
            "until then set tokenizer.chat_template to a template that can be followed."
        ),
    ),
    Rule(
        "prompt",
        data_checks.prompt,
        proves="What is trained begins where the generation prompt ends.",
        remedy=(
            "The model learns to answer after other tokens than those that it is prompted with. Bring the data into the"
            " template's form (a reasoning part, most often: data.reasoning), or set tokenizer.chat_template."
        ),
    ),
    Rule(
        "stop tokens",
        data_checks.stop_tokens,
        proves="Each answer trains the token that ends it, so the model learns to stop there.",
        remedy=(
            "The model would not stop after its answer. Look at the named turn with `sftron inspect`; the template has "
            "to write a control token after each answer."
        ),
    ),
    Rule(
        "masks",
        data_checks.masks,
        proves=(
            "What is trained is what the model itself has to write; each label is the next token of its own "
            "conversation."
        ),
        remedy=(
            "The run would train on prompts, or leave out parts of the answers. Look at the named row with `sftron "
            "inspect` and do not train before it is right."
        ),
    ),
    Rule(
        "forgery",
        data_checks.forgery,
        proves="Text that spells a control token or a whole turn stays plain text, and nothing of it is trained.",
        remedy=(
            "A text of the data could end a turn or begin another, in your data and in anyone's prompt. Please report "
            "the tokenizer and the row."
        ),
    ),
    Rule(
        "toggles",
        data_checks.toggles,
        proves=(
            "train_on_completions_only and remove_cross_attention change no pack: an ablation compares nothing else."
        ),
        remedy=(
            "Runs with other toggles would have other batches, and could not be compared. Please report this "
            "configuration."
        ),
    ),
    Rule(
        "data order",
        data_checks.data_order,
        proves="A run that is stopped resumes with exactly the next pack, also on two ranks.",
        remedy="A resume would repeat rows or lose them. If no file was changed while this ran, please report it.",
    ),
    Rule(
        "start-up",
        model_checks.start_up,
        proves="`sftron train` accepts configuration, data and model.",
        remedy="`sftron train` would end with this message and status 2; the message has the remedy.",
    ),
    Rule(
        "weights",
        model_checks.weights,
        proves="Hugging Face to sftron and back loses no bit of any tensor.",
        remedy=(
            "The export would hold other weights than were trained. Is the folder whole, and its config.json its own?"
        ),
    ),
    Rule(
        "transformers",
        model_checks.reference,
        proves="The model computes what transformers computes, and gives the same greedy answers.",
        remedy=(
            "Training would start from another function than the model's own. Do not train; run `sftron check` for the "
            "full comparison, and report it."
        ),
    ),
    Rule(
        "isolation",
        model_checks.isolation,
        proves=(
            "With this attention backend no conversation sees its neighbors in the pack, and no token those after it."
        ),
        remedy=(
            "Answers would be learned from other conversations' text. Set model.attention: sdpa, and report the "
            "backend."
        ),
    ),
    Rule(
        "gradients apart",
        model_checks.gradients_apart,
        proves="No conversation's loss has a gradient at another one's tokens.",
        remedy="The backward pass would leak between conversations. Set model.attention: sdpa, and report the backend.",
    ),
    Rule(
        "packed = single",
        model_checks.packed_as_single,
        proves=(
            "A pack has the loss and the gradients of its conversations alone: positions, bounds and masks are right."
        ),
        remedy=(
            "Packing would change what is learned. Set data.packing.strategy: none until it is found, and report it."
        ),
    ),
    Rule(
        "packed in its type",
        model_checks.packed_in_its_type,
        proves=(
            "A pack has the loss and the gradients of its conversations in the run's own type too, up to its rounding."
        ),
        remedy="This backend or loss is less exact than its type. Set model.attention: sdpa and model.loss: native.",
    ),
    Rule(
        "accumulation",
        model_checks.accumulation,
        proves="The step's loss is one ratio: the same tokens give the same gradient in 1, 2 or 4 micro-batches.",
        remedy=(
            "The weight of a token would depend on the other conversations in its micro-batch. Set "
            "tokens.batch_accumulation_per_replica: 1, and report it."
        ),
    ),
    Rule(
        "resume",
        run_checks.resume,
        proves="A run that is stopped and resumed is, to the bit, the run without a stop.",
        remedy=(
            "A requeued run would be another run. On a GPU set general.deterministic: true; else report what differs."
        ),
    ),
    Rule(
        "ranks",
        rank_checks.ranks,
        proves="Several processes take the steps that one process takes.",
        remedy="A run on several GPUs would be another run. Train on one, and report it.",
    ),
    Rule(
        "context",
        rank_checks.context,
        proves="Ranks that share each pack (parallelism.context) take the steps that one process takes.",
        remedy="A run with parallelism.context would be another run. Leave it at 1, and report it.",
    ),
    Rule(
        "learning",
        run_checks.learning,
        proves="With this optimizer and rate the loss falls on your data, and the stop token becomes likelier.",
        remedy=(
            "The run would not learn. Lower optimizer.learning_rate if the loss rises or is NaN; look at what is "
            "trained with `sftron inspect`."
        ),
    ),
)
"""Fast ones come first; the last one changes the model. docs/verify.md describes the method of each."""

ADAPTER_RULES: tuple[Rule, ...] = (
    Rule(
        "base unchanged",
        adapter_checks.base_unchanged,
        proves="Steps of the real optimizer change no bit of a weight that is not configured to be trained.",
        remedy=(
            "The adapter would belong to another model than its base. Do not train; report the tensors that are named."
        ),
    ),
    Rule(
        "adapters move",
        adapter_checks.adapters_move,
        proves=(
            "Each parameter of the configured adapters exists, has a gradient and moves; no other parameter is trained."
        ),
        remedy=(
            "Another model would be trained than lora describes, such as without the named adapter, or one over a fused"
            " matrix. Do not train; report it."
        ),
    ),
    Rule(
        "adapter = merged",
        adapter_checks.adapter_is_merged,
        proves=(
            "The merged model computes what the adapters compute: in float32, and up to its rounding in the export's "
            "type."
        ),
        remedy=(
            "The merged export would not be the trained model. If only the KL is too large, the export's type rounds "
            "the adapters away: set model.compute_dtype: float32, or lora.merge: false and serve the adapter. Else "
            "report it."
        ),
    ),
    Rule(
        "exported = trained",
        adapter_checks.exported_is_trained,
        proves=(
            "The exported adapter, loaded by peft into transformers' model, computes what was trained, and is read back"
            " to the bit."
        ),
        remedy=(
            "Others would load another adapter than was trained. Do not train; run `sftron check --adapter` on an "
            "export, and report it."
        ),
    ),
)
"""The rules for a run with `lora`, which come before `resume`."""


def select(
    names: Sequence[str], *, with_ranks: bool, with_context: bool = False, with_lora: bool = False
) -> tuple[Rule, ...]:
    """Returns the rules with these names, or all without names; `ranks` and `context` only by name or if wanted.

    Raises:
        ValueError: There is no rule with one of the names, or it is one for a run with `lora`.
    """
    at = [rule.name for rule in RULES].index("resume")
    rules = (*RULES[:at], *(ADAPTER_RULES if with_lora else ()), *RULES[at:])
    known = {rule.name for rule in rules}
    if unknown := set(names) - known:
        listed = ", ".join(rule.name for rule in rules)
        raise ValueError(f"--only: no check is named {', '.join(sorted(unknown))}; there are {listed}")
    several = {"ranks": with_ranks, "context": with_context}
    wanted = (set(names) or known - several.keys()) | {name for name, is_wanted in several.items() if is_wanted}
    return tuple(rule for rule in rules if rule.name in wanted)


def verify_run(
    config: Config,
    *,
    only: Sequence[str] = (),
    num_rows: int = 400,
    num_layers: int | None = None,
    num_tokens: int | None = None,
    num_ranks: int | None = None,
    num_sharing: int | None = None,
    on_check: Callable[[Check], None] | None = None,
) -> Report:
    """Checks a run before it begins, on its own model and data, as `sftron verify` does.

    Args:
        only: The names of the checks to make; without names, all.
        num_rows: Number of rows to look at.
        num_layers: Number of the model's layers to compute; None for all.
        num_tokens: Number of tokens in one computation of the model; None to go by the device.
        num_ranks: Number of processes of the check `ranks`, which is made if this is given.
        num_sharing: The same of the check `context`, whose processes share each pack; by default, the configured
            parallelism.context, if it is above 1.
        on_check: Called with each row as soon as it is measured.

    Raises:
        ValueError: The model or the data cannot be used, or no check has one of the names.
    """
    sizes = (num_rows, num_layers, num_tokens, num_ranks, num_sharing)
    with checked_run(config, only, *sizes, on_check=on_check) as (report, _):
        return report


@contextmanager
def checked_run(
    config: Config,
    only: Sequence[str],
    num_rows: int,
    num_layers: int | None,
    num_tokens: int | None,
    num_ranks: int | None,
    num_sharing: int | None,
    on_start: Callable[[str, dict[str, str]], None] | None = None,
    on_check: Callable[[Check], None] | None = None,
) -> Iterator[tuple[Report, Subject]]:
    """Makes the checks of `verify_run`, and yields their report and their subject, whose temporary files are removed
    afterwards. `on_start` is called with the title and the facts before the first check."""
    if num_sharing is None and config.parallelism.context > 1:
        num_sharing = config.parallelism.context
    wanted = {"with_ranks": num_ranks is not None, "with_context": num_sharing is not None}
    rules = select(only, **wanted, with_lora=config.lora is not None)
    with tempfile.TemporaryDirectory(prefix="sftron-verify-") as scratch:
        subject = Subject(
            pinned(config),
            Path(scratch),
            num_rows=num_rows,
            num_layers=num_layers,
            num_tokens=num_tokens,
            num_ranks=num_ranks,
            num_sharing=num_sharing,
        )
        title = f"{config.general.run_name}: before it begins"
        yield measure_all(title, rules, subject, is_own_code=True, on_start=on_start, on_check=on_check), subject


def page_of(report: Report, subject: Subject) -> str:
    """Returns a self-contained HTML page with the verdict, the table, the details of each row, and the first pack."""
    return render(
        "checks.html.jinja",
        report=report,
        looks={True: "good", False: "bad", None: "open"},
        shown=shown_packs(subject.packs[:1], subject.chat_tokenizer.decode, subject.preparation.location),
    )
