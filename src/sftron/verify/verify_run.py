"""The checks of a run before it begins, on the user's own model and data, with their facts and their page."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence

import torch
import transformers

from sftron import __version__
from sftron.checkpoint.hf_weights import read_config
from sftron.report.page import render, shown_packs
from sftron.verify import data_checks, model_checks, run_checks
from sftron.verify.subject import Subject
from sftron.verify.table import Rule, RunReport

RULES: tuple[Rule[Subject], ...] = (
    data_checks.template,
    data_checks.prompt,
    data_checks.stop_tokens,
    data_checks.masks,
    data_checks.forgery,
    data_checks.toggles,
    data_checks.data_order,
    model_checks.start_up,
    model_checks.weights,
    model_checks.reference,
    model_checks.isolation,
    model_checks.gradients_apart,
    model_checks.packed_as_single,
    model_checks.packed_in_its_type,
    model_checks.accumulation,
    run_checks.resume,
    run_checks.ranks,
    run_checks.learning,
)
"""The rules in the order of the table, with fast ones first; the last one changes the model."""


def select(names: Sequence[str], *, with_ranks: bool) -> tuple[Rule[Subject], ...]:
    """Returns the rules with these names, or all without names; `ranks` only by its name or with `with_ranks`.

    Raises:
        ValueError: There is no rule with one of the names.
    """
    known = {rule.name for rule in RULES}
    if unknown := [name for name in names if name not in known]:
        listed = ", ".join(rule.name for rule in RULES)
        raise ValueError(f"--only: no check is named {', '.join(unknown)}; there are {listed}")
    wanted = set(names) or known - {"ranks"}
    return tuple(rule for rule in RULES if rule.name in wanted or (with_ranks and rule.name == "ranks"))


def facts_of(subject: Subject) -> dict[str, str]:
    """Returns a description of the subject of the checks and the versions of the software."""
    config, preparation = subject.config, subject.preparation
    num_layers = read_config(subject.model_folder).num_hidden_layers
    num_rows = "rows read forward" if preparation.num_rows is None else f"{preparation.num_rows:,} rows"
    dropped = "".join(f"; {count:,} dropped: {reason}" for reason, count in subject.dropped.items())
    device = subject.ranks.device
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, threads: {torch.get_num_threads()}"
    return {
        "model": f"{subject.model_folder}, {num_layers} layers",
        **({"depth": f"{subject.depth} computed (--layers)"} if subject.depth else {}),
        "data": f"{num_rows} of {', '.join(preparation.source_names)}",
        "looked at": f"{len(subject.rows):,} rows, {len(subject.packs)} packs{dropped}",
        "computed": f"{sum(map(len, subject.documents)):,} tokens of {len(subject.documents)} conversations",
        "trained": "what the model has to write" if config.data.train_on_completions_only else "every token",
        "device": on,
        "versions": f"sftron {__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def page_of(report: RunReport, subject: Subject) -> str:
    """Returns a self-contained HTML page with the verdict, the table, the details of each row, and the first pack."""
    return render(
        "checks.html.jinja",
        report=report,
        looks={True: "good", False: "bad", None: "open"},
        shown=shown_packs(subject.packs[:1], subject.chat_tokenizer.decode, subject.preparation.source_names),
    )
