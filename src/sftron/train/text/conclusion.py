"""What a run prints and draws after its steps, or if it has nothing to do: result, answers and losses."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sftron.config import Config
from sftron.report.charts import Chart, Line, Point, thinned, write_images
from sftron.report.terminal import wants_color
from sftron.train.logs import console
from sftron.train.run import Question
from sftron.train.run_directory import RunDirectory, read_records
from sftron.visible_text import visible_text

_MOST_POINTS, _MOST_MEANS = 400, 40
"""The maximum number of points in the faint line of the steps, and in the line of their means."""


def show_answers(
    questions: Sequence[Question],
    before: Sequence[Mapping[str, Any]] | None,
    after: Sequence[Mapping[str, Any]] | None,
) -> None:
    """Prints the greedy answers before and after training, if any."""
    if not questions or after is None or len(after) != len(questions):
        return
    if before is not None and len(before) != len(questions):
        before = None
    for number, question in enumerate(questions):
        text = _one_line(question.text)
        console.write("")
        console.write(text, f"\x1b[1m{text}\x1b[0m" if wants_color(sys.stdout) else None)
        if before is not None:
            console.write(f"  before   {_one_line(before[number]['answer'])}")
        console.write(f"  after    {_one_line(after[number]['answer'])}")
    console.write("")
    console.write(f"{_stopped(after)} ended by themselves" + (f"; before, {_stopped(before)}" if before else ""))
    console.write("")


def _stopped(answers: Sequence[Mapping[str, Any]]) -> str:
    return f"{sum(each['stopped'] for each in answers)} of {len(answers)} answers"


def _one_line(text: str) -> str:
    return " ".join(visible_text(text).split())


def conclude_not_finite(directory: RunDirectory, step: int, saved_step: int) -> None:
    write_loss_chart(directory)
    newest = f"continues from step {saved_step}, where both were finite" if saved_step else "begins at step 0"
    console.write(
        f"failed     after step {step}: the loss or gradients are not finite. The next start {newest}; lower "
        "optimizer.learning_rate, or check the rows named above",
        is_needed=True,
    )


def conclude(status: str, directory: RunDirectory, step: int, *, exported: Path | None, error: str | None) -> None:
    """Prints the result of the run. `status` is that in result.json: completed, diverged, forgot or preempted."""
    chart, run_dir = write_loss_chart(directory), directory.folder
    how = "stopped" if status == "preempted" else status
    next_time = "the same command continues it; " if status == "preempted" else ""
    console.write(f"{how:<10} after step {step}; {next_time}everything is in {run_dir}", is_needed=True)
    if status == "forgot":
        left = "the export is the best within the limits" if exported else "nothing within the limits is exported"
        console.warn(
            f"{error}; {left}. Mix in old rows (docs/keep.md), lower optimizer.learning_rate, or raise the "
            "limit; the same command then continues"
        )
    elif error is not None:
        console.warn(
            f"{error}. The weights are worse than the initial ones: lower "
            "optimizer.learning_rate, or raise optimizer.warmup_steps, and choose another general.run_name"
        )
    if chart is not None:
        console.write(f"picture    {chart} has the loss of every step and evaluation")
    if exported is not None:
        loader = "peft loads onto its base" if exported.parent.name == "adapter" else "transformers loads directly"
        also = f" (also {run_dir / 'latest'})" if directory.names("latest", exported) else ""
        console.write(f"exported   {exported}, which {loader}{also}")


def describe_finished(config: Config, status: str, step: int, unused: Sequence[str]) -> None:
    """Prints why a start does nothing, and how the configuration and data differ from the completed run's."""
    done = f"{status:<10} before, after step {step}; nothing is left to do, and {config.run_dir} is unchanged"
    console.write(done, is_needed=True)
    if unused:
        console.write("not used   these differ from the completed run:", is_needed=True)
        for each in unused:
            console.write(f"             {each}", is_needed=True)
        console.write(
            "           To train further, raise tokens.train_steps, tokens.train_epochs, evaluation.patience or a "
            "limit of evaluation.keep; for a run with these settings, choose another general.run_name",
            is_needed=True,
        )


# --- The picture of the losses ---


def write_loss_chart(directory: RunDirectory) -> Path | None:
    """Draws loss.png from metrics.jsonl and evaluations.jsonl. Returns its path, or None without data.

    Only the main rank draws. It reports a failure but goes on.
    """
    if not directory.is_main:
        return None
    try:
        steps = _points((record["step"], record["loss"]) for record in read_records(directory.metrics))
        sets: dict[str, list[Point]] = {}
        limits: dict[str, list[Point]] = {}
        for record in read_records(directory.evaluations):
            for name, found in record["sets"].items():
                sets.setdefault(name, []).extend(_points([(record["step"], found["loss"])]))
                if kept := found.get("kept"):
                    limit = (record["step"], kept["before"] + kept["max_rise"])
                    limits.setdefault(name, []).extend(_points([limit]))
        lines, names = [Line(thinned(steps, _MOST_MEANS), 0)], ["training"]
        if len(steps) > _MOST_MEANS:
            lines.append(Line(thinned(steps, _MOST_POINTS), 0, is_faint=True))
            names = [f"training: every step, and means of {_MOST_MEANS} spans of steps"]
        for style, (name, points) in enumerate(sets.items(), start=1):
            lines.append(Line(tuple(points), style, letter="e" if len(sets) == 1 else f"e{style}"))
            names.append(f"{lines[-1].letter}  evaluation, {name}")
        for name, points in limits.items():
            lines.append(Line(tuple(points), len(names)))
            names.append(f"limit of {name}")
        chart = Chart("loss", directory.folder.name, "step", "loss", tuple(lines))
        if not chart.points:
            return None
        write_images([chart], directory.folder, names=names)
        return directory.folder / f"{chart.name}.png"
    except Exception as error:  # a full disk, a damaged line, a fault of matplotlib
        console.warn(f"could not draw loss.png: {error}")
        return None


def _points(pairs: Iterable[tuple[int, float | None]]) -> list[Point]:
    return [(float(step), loss) for step, loss in pairs if loss is not None]
