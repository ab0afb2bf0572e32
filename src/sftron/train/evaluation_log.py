"""evaluations.jsonl, one object an evaluation, which a resumed run continues; and the trackers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sftron.train.evaluation import Evaluation
from sftron.train.line_file import LineFile, drop_lines_after
from sftron.train.metrics import Table, Tracker, flat_numbers

_COLUMNS = ("prompt", "answer", "tokens", "stopped")


class EvaluationLog:
    """Main rank only. evaluated_step: of the last evaluation that counts; None: of none yet, and all lines go."""

    def __init__(self, path: Path, *, evaluated_step: int | None, trackers: Sequence[Tracker] = ()) -> None:
        drop_lines_after(path, -1 if evaluated_step is None else evaluated_step)
        self._path, self._lines, self._trackers = path, LineFile(path), trackers

    def write(self, evaluation: Evaluation) -> None:
        record = evaluation.record()
        self._lines.append(json.dumps(record, allow_nan=False).encode())
        logged: dict[str, Any] = dict(flat_numbers(evaluation.metrics()))
        if answers := record["answers"]:
            logged["eval/answers"] = Table(_COLUMNS, [[each[column] for column in _COLUMNS] for each in answers])
        for tracker in self._trackers:
            tracker.log(evaluation.step, logged)

    def answers(self, step: int) -> list[dict[str, Any]] | None:
        """Of the evaluation after `step`; None where there was none."""
        for line in self._path.read_bytes().splitlines():
            record = json.loads(line)
            if record["step"] == step:
                return record["answers"]
        return None

    def close(self) -> None:
        self._lines.close()
