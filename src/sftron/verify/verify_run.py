"""`verify_run`: the checks of a run before it begins, the rows of their table, and its page."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sftron.config import Config
from sftron.report.page import render, shown_packs
from sftron.train.revisions import pinned
from sftron.verify import adapter_checks, data_checks, model_checks, rank_checks, run_checks
from sftron.verify.report import Check, Report, Rule, measure_all
from sftron.verify.subject import Subject

RULES: tuple[Rule, ...] = (
    Rule("template", data_checks.template),
    Rule("prompt", data_checks.prompt),
    Rule("stop tokens", data_checks.stop_tokens),
    Rule("masks", data_checks.masks),
    Rule("forgery", data_checks.forgery),
    Rule("toggles", data_checks.toggles),
    Rule("data order", data_checks.data_order),
    Rule("start-up", model_checks.start_up),
    Rule("weights", model_checks.weights),
    Rule("transformers", model_checks.reference),
    Rule("isolation", model_checks.isolation),
    Rule("gradients apart", model_checks.gradients_apart),
    Rule("packed = single", model_checks.packed_as_single),
    Rule("packed in its type", model_checks.packed_in_its_type),
    Rule("accumulation", model_checks.accumulation),
    Rule("resume", run_checks.resume),
    Rule("ranks", rank_checks.ranks),
    Rule("context", rank_checks.context),
    Rule("learning", run_checks.learning),
)
"""Fast ones come first; the last one changes the model. docs/verify.md describes the method of each."""

ADAPTER_RULES: tuple[Rule, ...] = (
    Rule("base unchanged", adapter_checks.base_unchanged),
    Rule("adapters move", adapter_checks.adapters_move),
    Rule("adapter = merged", adapter_checks.adapter_is_merged),
    Rule("exported = trained", adapter_checks.exported_is_trained),
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
