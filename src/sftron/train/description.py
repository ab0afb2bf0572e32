"""What will be trained, said and shown before it is."""

from __future__ import annotations

from pathlib import Path

from sftron.report.inspection import Inspection, inspect_packs
from sftron.train import console
from sftron.train.evaluation_report import describe_sets
from sftron.train.plan import RunPlan


def describe_run(plan: RunPlan, *, samples: Path | None) -> Inspection | None:
    """The data, the projection, the model, and the first pack in colour: here, and as a page where `samples` says.

    Returns what was shown of the pack; None on all ranks but the main one.
    """
    if not plan.ranks.is_main:
        return None
    console.describe_data(plan.config, plan.dataset, plan.sample)
    describe_sets(plan)
    console.describe_projection(plan.config, plan.projection)
    console.describe_model(plan)
    console.describe_peak(plan)
    inspection = inspect_packs(
        [next(iter(plan.dataset))],
        plan.sample.rows,
        plan.chat_tokenizer.decode,
        source_names=plan.preparation.source_names,
        targets=plan.preparation.targets,
        title=f"{plan.config.general.run_name}: what is trained",
    )
    console.show_pack(inspection)
    if samples is not None:
        inspection.write_html(samples)
        console.say(f"samples    {samples} shows this pack, and the audit of the sampled rows")
    return inspection
