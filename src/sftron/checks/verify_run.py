"""`verify_run`: the checks of a run before it begins, the rows of their table, and their page."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sftron.checks import adapter_checks, data_checks, model_checks, presentation, rank_checks, run_checks
from sftron.checks.report import Check, Report, Rule, measure_all
from sftron.checks.subject import Subject
from sftron.config import Config
from sftron.report.page import shown_packs
from sftron.train.places import pin_revisions

RULES: tuple[Rule, ...] = (
    Rule(
        "template",
        data_checks.template,
        proves="Each conversation has exactly the ids that the tokenizer's own apply_chat_template gives.",
        remedy=(
            "The model would be trained on another format than it is used with. Please report the named row; until it "
            "is fixed, set tokenizer.chat_template to a template that passes."
        ),
    ),
    Rule(
        "prompt",
        data_checks.prompt,
        proves="Training begins where the generation prompt ends.",
        remedy=(
            "The model would learn to answer after tokens that its prompts do not end with. Change the data to the"
            " template's form (most often a reasoning part: data.reasoning), or set tokenizer.chat_template."
        ),
    ),
    Rule(
        "stop tokens",
        data_checks.stop_tokens,
        proves="Each answer trains the token that ends it, so the model learns to stop there.",
        remedy=(
            "The model would not stop after its answer. Look at the named turn with `sftron inspect`; the template "
            "must write a control token after each answer."
        ),
    ),
    Rule(
        "masks",
        data_checks.masks,
        proves=(
            "The run trains exactly what the model itself must write; each label is the next token of its own "
            "conversation."
        ),
        remedy=(
            "The run would train on prompts, or leave out parts of the answers. Look at the named row with `sftron "
            "inspect`, and do not train until it is right."
        ),
    ),
    Rule(
        "forgery",
        data_checks.forgery,
        proves="Text that spells a control token or a whole turn stays plain text, and no part of it is trained.",
        remedy=(
            "Text in your data or in anyone's prompt could end a turn or begin another. Please report the tokenizer "
            "and the row."
        ),
    ),
    Rule(
        "toggles",
        data_checks.toggles,
        proves=(
            "train_on_completions_only and remove_cross_attention change no pack, so an ablation compares only them."
        ),
        remedy=(
            "Runs with different toggles would have different batches, so they could not be compared. Please report "
            "this configuration."
        ),
    ),
    Rule(
        "data order",
        data_checks.data_order,
        proves="A stopped run resumes with exactly the next pack, on two ranks too.",
        remedy="A resume would repeat or lose rows. If no file changed while this check ran, please report it.",
    ),
    Rule(
        "start-up",
        model_checks.start_up,
        proves="`sftron train` accepts configuration, data and model.",
        remedy="`sftron train` would end with this message and status 2. The message gives the remedy.",
    ),
    Rule(
        "weights",
        model_checks.weights,
        proves="Hugging Face to sftron and back loses no bit of any tensor.",
        remedy=(
            "The export would not hold the trained weights. Check that the folder is complete and has its own "
            "config.json."
        ),
    ),
    Rule(
        "transformers",
        model_checks.reference,
        proves="The model computes what transformers computes, and gives the same greedy answers.",
        remedy=(
            "Training would start from a different function than the model's own. Do not train; run `sftron check` for "
            "the full comparison, and report it."
        ),
    ),
    Rule(
        "isolation",
        model_checks.isolation,
        proves=(
            "With this attention backend, no conversation sees its neighbors in the pack, and no token sees later ones."
        ),
        remedy=(
            "The model would learn answers from other conversations' text. Set model.attention: sdpa, and report the "
            "backend."
        ),
    ),
    Rule(
        "gradients apart",
        model_checks.gradients_apart,
        proves="No conversation's loss has a gradient at another conversation's tokens.",
        remedy="The backward pass would leak between conversations. Set model.attention: sdpa, and report the backend.",
    ),
    Rule(
        "packed = single",
        model_checks.packed_as_single,
        proves=(
            "A pack gives the same loss and gradients as its conversations one by one: positions, bounds and masks are "
            "right."
        ),
        remedy=(
            "Packing would change what is learned. Set data.packing.strategy: none until this is fixed, and report it."
        ),
    ),
    Rule(
        "packed in its type",
        model_checks.packed_in_its_type,
        proves=(
            "In the run's own type too, a pack gives the same loss and gradients as its conversations, up to rounding."
        ),
        remedy="This backend or loss is less accurate than its type. Set model.attention: sdpa and model.loss: native.",
    ),
    Rule(
        "accumulation",
        model_checks.accumulation,
        proves="The step's loss is one ratio: the same tokens give the same gradient in 1, 2 or 4 micro-batches.",
        remedy=(
            "A token's weight would depend on the other conversations in its micro-batch. Set "
            "tokens.batch_accumulation_per_replica: 1, and report it."
        ),
    ),
    Rule(
        "resume",
        run_checks.resume,
        proves="A stopped and resumed run equals the uninterrupted run, bit for bit.",
        remedy=(
            "A requeued run would differ from an uninterrupted one. On a GPU, set general.deterministic: true; on a "
            "CPU, report what differs."
        ),
    ),
    Rule(
        "ranks",
        rank_checks.ranks,
        proves="Several processes take the same steps as one process.",
        remedy="A run on several GPUs would differ from a run on one. Train on one, and report it.",
    ),
    Rule(
        "context",
        rank_checks.context,
        proves="Ranks that share each pack (parallelism.context) take the same steps as one process.",
        remedy="A run with parallelism.context would differ from one without. Leave it at 1, and report it.",
    ),
    Rule(
        "learning",
        run_checks.learning,
        proves="With this optimizer and rate, the loss falls on your data and the stop token becomes more likely.",
        remedy=(
            "The run would not learn. Lower optimizer.learning_rate if the loss rises or is NaN, and raise it if the "
            "loss hardly falls: adapters take about ten times the rate. Use `sftron inspect` to see what is trained."
        ),
    ),
)
"""Fast checks come first; the last one changes the model. docs/verify.md describes each method."""

ADAPTER_RULES: tuple[Rule, ...] = (
    Rule(
        "base unchanged",
        adapter_checks.base_unchanged,
        proves="Steps of the real optimizer change no bit of any weight outside the configured ones.",
        remedy="The adapter would no longer fit its base. Do not train; report the named tensors.",
    ),
    Rule(
        "adapters move",
        adapter_checks.adapters_move,
        proves="Each configured adapter parameter exists, has a gradient and changes; no other parameter is trained.",
        remedy=(
            "The run would not train what lora describes: for example, an adapter is missing, or spans a fused matrix."
            " Do not train; report it."
        ),
    ),
    Rule(
        "adapter = merged",
        adapter_checks.adapter_is_merged,
        proves=(
            "The merged model computes what the adapters compute: in float32, and in the export's type up to its "
            "rounding."
        ),
        remedy=(
            "The merged export would not be the trained model. If only the KL is too large, the export's type rounds "
            "the adapters away: set model.compute_dtype: float32, or set lora.merge: false and serve the adapter. "
            "Otherwise report it."
        ),
    ),
    Rule(
        "exported = trained",
        adapter_checks.exported_is_trained,
        proves=(
            "The exported adapter, loaded by peft into transformers' model, computes what was trained, and reads back"
            " bit for bit."
        ),
        remedy=(
            "Users would not load the trained adapter. Do not train; run `sftron check --adapter` on an export, and "
            "report it."
        ),
    ),
)
"""The rules for a run with `lora`; they come before `resume`."""


def select(
    names: Sequence[str], *, with_ranks: bool, with_context: bool = False, with_lora: bool = False
) -> tuple[Rule, ...]:
    """Returns the rules with these names, or all if no names are given; `ranks` and `context` only by name or on
    request.

    Raises:
        ValueError: A name is unknown, or names a rule for runs with `lora`.
    """
    at = [rule.name for rule in RULES].index("resume")
    rules = (*RULES[:at], *(ADAPTER_RULES if with_lora else ()), *RULES[at:])
    known = {rule.name for rule in rules}
    if unknown := set(names) - known:
        listed = ", ".join(rule.name for rule in rules)
        raise ValueError(f"--only: unknown check {', '.join(sorted(unknown))}; choose from {listed}")
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
        only: The names of the checks to run; without names, all.
        num_rows: Number of rows to look at.
        num_layers: Number of the model's layers to compute; None for all.
        num_tokens: Number of tokens that the model computes at once; None to decide by the device.
        num_ranks: Number of processes for the check `ranks`, which runs only if this is given.
        num_sharing: The same for the check `context`, whose processes share each pack. By default, it is the configured
            parallelism.context if that is above 1.
        on_check: Called with each row as soon as it is measured.

    Raises:
        ValueError: The model or the data cannot be used, or a name in `only` is unknown.
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
    """Runs the checks of `verify_run`, and yields their report and their subject; removes the subject's temporary files
    afterward. Calls `on_start` with the title and the facts before the first check."""
    if num_sharing is None and config.parallelism.context > 1:
        num_sharing = config.parallelism.context
    wanted = {"with_ranks": num_ranks is not None, "with_context": num_sharing is not None}
    rules = select(only, **wanted, with_lora=config.lora is not None)
    with tempfile.TemporaryDirectory(prefix="sftron-verify-") as scratch:
        subject = Subject(
            pin_revisions(config),
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
    shown = shown_packs(subject.packs[:1], subject.chat_tokenizer.decode, subject.preparation.location)
    return presentation.page_of(report, shown)
