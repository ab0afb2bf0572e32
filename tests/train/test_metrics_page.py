"""docs/metrics.md describes every number of a step, and no other; wandb gets the same numbers under the same names."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.train.runs import chat_line, make_config, metrics, run

PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
DESCRIBED = re.findall(r"^\| `([\w.]+)` \|", PAGE.partition("## Losses by role")[0], re.MULTILINE)


def leaves(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def as_described(key: str) -> str:
    key = re.sub(r"^roles/\w+", "roles/ROLE", key)
    key = re.sub(r"^datasets/(.*?)/(?=\w+$|dropped/)", "datasets/NAME/", key)
    return re.sub(r"dropped/\w+$", "dropped/REASON", key).replace("/", ".")


@pytest.fixture
def told(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The lines of metrics.jsonl, what wandb was given at each step, and the lines of the console."""
    given: dict[int, dict[str, Any]] = {}
    wandb = SimpleNamespace(
        log=lambda numbers, step: given.update({step: numbers}),
        start=lambda: None,
        finish=lambda status: None,
        identity=None,
    )
    monkeypatch.setattr("sftron.train.trainer.start_wandb", lambda *arguments, **options: wandb)
    rows = [chat_line(f"What is {n}?", f"It is {n}.") for n in range(40)]
    rows.insert(3, chat_line("What?", "too long " * 200))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    options = {"tokens__train_steps": 4, "logging__interval": 1, "data__max_dropped_share": 1.0}
    folder = run(make_config(tmp_path, model_folder, **options)).directory.folder
    return metrics(folder), given, (folder / "console.log").read_text().splitlines()


def test_every_number_of_a_step_is_described_and_every_described_one_is_there(told: Any) -> None:
    lines, _, _ = told
    keys = {as_described(key) for line in lines for key, _ in leaves(line)}

    assert len(DESCRIBED) == len(set(DESCRIBED)) > 40
    # This run keeps the settings that it began with; test_run_record.py has one that does not.
    assert keys | {"changed_settings.KEY"} == set(DESCRIBED)


def test_wandb_gets_the_numbers_of_metrics_jsonl_to_the_last_digit(told: Any) -> None:
    lines, given, _ = told

    assert [line["step"] for line in lines] == sorted(given) == [1, 2, 3, 4]
    for line in lines:
        numbers = {key: value for key, value in leaves(line) if isinstance(value, (int, float))}
        assert json.loads(json.dumps(given[line["step"]])) == numbers


def test_the_console_tells_them_rounded(told: Any) -> None:
    lines, _, console = told
    steps = [line for line in console if line.startswith("step ")]

    assert len(steps) == 4
    for line, shown in zip(lines, steps, strict=True):
        for form in (
            "step {step:>4}/4 |",
            "| loss {loss:7.4f} ",
            "| accuracy {token_accuracy:.1%} ",
            "| lr {learning_rate:.2e} ",
            "| {tokens} tokens, {trained_share:.0%} trained ",
            "| {tokens_per_second:,.0f} tokens/s",
            "| data wait {data_seconds:.2f} s",
        ):
            assert form.format(**line) in shown
    assert all(f"{name} {role['loss']:.4f}" in steps[0] for name, role in lines[0]["roles"].items())
    assert len(lines[0]["roles"]) == 3


def test_names_of_other_trainers_stand_beside_names_of_ours() -> None:
    table = PAGE.partition("## The same in other trainers")[2]
    ours = re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE)

    assert len(ours) > 10
    assert set(ours) <= set(DESCRIBED)
