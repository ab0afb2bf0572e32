"""evaluations.jsonl: one object an evaluation, which a resume goes on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sftron.train.evaluation import Evaluation
from sftron.train.line_file import LineFile, drop_lines_after


class EvaluationLog:
    """Main rank only. evaluated_step: of the last evaluation that counts; None: of none yet, and lines are dropped."""

    def __init__(self, path: Path, evaluated_step: int | None) -> None:
        drop_lines_after(path, -1 if evaluated_step is None else evaluated_step)
        self._path, self._lines = path, LineFile(path)

    def write(self, evaluation: Evaluation) -> None:
        self._lines.append(json.dumps(evaluation.record(), allow_nan=False).encode())

    def answers(self, step: int) -> list[dict[str, Any]] | None:
        """Of the evaluation after `step`; None where there was none."""
        for line in self._path.read_bytes().splitlines():
            record = json.loads(line)
            if record["step"] == step:
                return record["answers"]
        return None

    def close(self) -> None:
        self._lines.close()
