"""docs/how-it-is-tested.md: it is what its numbers say, and a survivor is a test, has a reason, or is open."""

import json
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tools.tested_page import NUMBERS, PAGE, mutants, page

KNOWN: dict[str, Any] = json.loads(NUMBERS.read_text(encoding="utf-8"))


def test_the_page_is_that_of_its_numbers() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(KNOWN)


def test_each_survivor_is_killed_by_a_test_that_exists_or_has_a_reason_or_is_open() -> None:
    for each in KNOWN["mutants"]["survivors"]:
        path, _, name = each["by"].partition("::")
        if each["outcome"] == "killed":
            assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8"), each["name"]
        else:
            assert each["outcome"] == "open" or each["reason"], each["name"]


def test_results_are_counted_by_their_first_and_their_last_run(tmp_path: Path) -> None:
    def line(name: str, outcome: str, by: str = "") -> str:
        path, change = f"src/sftron/{name}.py", ["-x + 1", "+x - 1"]
        return json.dumps({"name": f"{path}:1 op #0", "path": path, "change": change, "outcome": outcome, "by": by})

    results = [line("data/a", "killed", "t"), line("data/b", "survived"), line("train/c", "uncovered")]
    results += [line("train/d", "survived"), line("data/b", "killed", "tests/test_b.py::test_b[1]")]
    (tmp_path / "results.jsonl").write_text("\n".join(results), encoding="utf-8")
    counts = {"seed": 3, "number": 4, "places": 10, "files": 4, "mutants": 20, "commit": "1234abcd", "seconds": 15}
    (tmp_path / "drawn.json").write_text(json.dumps(counts), encoding="utf-8")
    verdict = {"outcome": "equivalent", "by": "", "reason": "c is printed alone."}
    before = {"survivors": [{"name": "src/sftron/train/c.py:1 op #0", **verdict}]}
    found = mutants(tmp_path, before)
    assert found["folders"] == {"data": [2, 1], "train": [2, 0]}
    outcomes = {each["name"][11:18]: each["outcome"] for each in found["survivors"]}
    assert outcomes == {"data/b.": "killed", "train/c": "equivalent", "train/d": "open"}
    text = page(KNOWN | {"mutants": found})
    assert "**1 of 4 were killed (25.0%).** Of the 3 that survived, tests that were added since" in text
    assert "coverage does not see, kill 1; 1 change nothing that a law states, and 1 are open: **66.7%** of" in text
    assert "| data/b.py:1 | `- x + 1`<br>`+ x - 1` | `test_b[1]` |" in text
    fresh = found | {"killed": 3}
    assert "1234abcd), **3 were killed (75.0%)** by" in page(KNOWN | {"mutants": found | {"fresh": fresh}})
