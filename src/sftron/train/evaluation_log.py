"""evaluations.jsonl, one object an evaluation, which a resume goes on with; and wandb, if given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sftron.train.evaluation import Evaluation
from sftron.train.line_file import LineFile, drop_lines_after
from sftron.train.wandb_log import WandbLog, flat_numbers

_COLUMNS = ("prompt", "answer", "tokens", "stopped")


class EvaluationLog:
    """Main rank only. evaluated_step: of the last evaluation that counts; None: of none yet, and all lines go."""

    def __init__(self, path: Path, *, evaluated_step: int | None, wandb: WandbLog | None = None) -> None:
        drop_lines_after(path, -1 if evaluated_step is None else evaluated_step)
        self._path, self._lines, self._wandb = path, LineFile(path), wandb

    def write(self, evaluation: Evaluation) -> None:
        record = evaluation.record()
        self._lines.append(json.dumps(record, allow_nan=False).encode())
        if self._wandb is not None:
            self._wandb.log(dict(flat_numbers(evaluation.metrics())), evaluation.step)
            if answers := record["answers"]:
                rows = [[each[column] for column in _COLUMNS] for each in answers]
                self._wandb.log_table("eval/answers", _COLUMNS, rows, evaluation.step)

    def answers(self, step: int) -> list[dict[str, Any]] | None:
        """Of the evaluation after `step`; None where there was none."""
        for line in self._path.read_bytes().splitlines():
            record = json.loads(line)
            if record["step"] == step:
                return record["answers"]
        return None

    def close(self) -> None:
        self._lines.close()
