"""docs/metrics.md describes every number of a step, and no other; wandb gets the same numbers under the same names."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tests.conftest import ROOT
from tests.train.conftest import FinishedRun

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
    key = re.sub(r"^changed_settings/.*", "changed_settings/KEY", key)
    key = re.sub(r"^datasets/(.*?)/(?=\w+$|dropped/)", "datasets/NAME/", key)
    return re.sub(r"dropped/\w+$", "dropped/REASON", key).replace("/", ".")


def test_every_number_of_a_step_is_described_and_every_described_one_is_there(finished: FinishedRun) -> None:
    keys = {as_described(key) for line in finished.steps for key, _ in leaves(line)}

    assert len(DESCRIBED) == len(set(DESCRIBED)) > 40
    assert keys == set(DESCRIBED)


def test_wandb_gets_the_numbers_of_metrics_jsonl_to_the_last_digit(finished: FinishedRun) -> None:
    logged = finished.wandb.steps

    assert [line["step"] for line in finished.steps] == sorted(logged) == [1, 2, 3, 4, 5, 6]
    for line in finished.steps:
        numbers = {key: value for key, value in leaves(line) if isinstance(value, (int, float))}
        assert json.loads(json.dumps(logged[line["step"]])) == numbers


def test_the_console_shows_them_rounded(finished: FinishedRun) -> None:
    shown = [line for line in finished.console if line.startswith("step ")]

    assert len(shown) == 6
    for line, text in zip(finished.steps, shown, strict=True):
        for form in (
            "| loss {loss:7.4f} ",
            "| accuracy {token_accuracy:.1%} ",
            "| lr {learning_rate:.2e} ",
            "| {tokens} tokens, {trained_share:.0%} trained ",
            "| {tokens_per_second:,.0f} tokens/s",
            "| data wait {data_seconds:.2f} s",
        ):
            assert form.format(**line) in text
    assert all(f"{name} {role['loss']:.4f}" in shown[0] for name, role in finished.steps[0]["roles"].items())
    assert len(finished.steps[0]["roles"]) == 3


def test_names_of_other_trainers_stand_next_to_names_of_sftron() -> None:
    table = PAGE.partition("## The same in other trainers")[2]
    names = re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE)

    assert len(names) > 10
    assert set(names) <= set(DESCRIBED)
