"""Each failed row of verify_trainer becomes a program without sftron that shows its fault; no sound trainer shows one.

By night, for all set-ups of the zoo.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import DataCollatorForSeq2Seq, Trainer

from sftcheck.program.evidence import EVIDENCE, Evidence
from sftcheck.program.program import run_here
from sftcheck.program.rebuild import Materials
from sftcheck.program.search import candidates
from sftron import verify_trainer
from sftron.checks.report import Report
from tests.conftest import ROOT
from tests.sftcheck.small_trainers import plain
from tests.sftcheck.test_zoo_proofs import NEEDS_SMOLLM2
from tests.sftcheck.trainer_zoo import ZOO, hush
from tests.sftcheck.zoo_remedies import APPLIED

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and transformers, about their own options
BROKEN = [name for name, each in ZOO.items() if each.fails]
SOUND = [name for name, each in ZOO.items() if not each.fails]
FAST = {
    "ids": "missing_bos",
    "trained tokens": "everything_after_the_first_prompt",
    "stop tokens": "labels_end_before_the_stop",
    "isolation": "mask_of_ones_and_packing",
    "positions": "labels_across_borders",
    "truncation": "answers_cut_by_max_length",
    "loss": "mean_of_means",
    "gradients": "zeroed_between_micro_batches",
    "padding": "trained_padding",
    "adapters": "head_left_out_of_the_optimizer",
    "generation": "stop_of_the_base_model",
}
"""A set-up of each row for make test; forgery needs a model's tokenizer, and is measured by night."""
FAST_SOUND = ("assistant_only_loss", "flattening_of_llama", "left_padding")
NOT_SHOWN = {
    ("wrapped_packing", "stop tokens"): "no program of the trainer's parts shows the fault",  # two of 58, at cuts
    # Earlier answers of its rows are not trained either, and a program looks at the completion alone.
    ("template_without_stop", "trained tokens"): "no program of the trainer's parts shows the fault",
}
"""The failed rows without a program, with a part of the reason that is given."""
RUN_FRESH = "sftcheck.program.program.run_fresh"
_BLOCKED = "import sys, runpy; sys.modules['sftron'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"


def report_of(name: str, trainer: Any = None, **changed: Any) -> Report:
    hush()
    return verify_trainer(trainer or ZOO[name].make(), **{**ZOO[name].arguments, **changed})


def faults_shown(report: Report, names: Any = EVIDENCE) -> list[str]:
    """Returns what the programs of a trainer show, one of each kind of failure, as if its rows had failed."""
    materials = report.make_script.args[0]  # pyright: ignore[reportFunctionMemberAccess, reportOptionalMemberAccess]
    assert isinstance(materials, Materials), materials
    found, tries = list[str](), Counter[Any]()
    has_other_loss = any("another loss" in each.measured for each in report.checks)
    for name in names:
        for program in candidates(materials, name):
            kind = (name, program.evidence.sentence, program.measured.is_ids)
            if tries[kind] >= 3 or (program.evidence.sentence.startswith("A micro-batch") and has_other_loss):
                continue
            outcome = run_here(program.text)
            tries[kind] += 1 if outcome.status is None else 3  # one that raises has too few rows, or none that fit
            found += [f"{kind}: {outcome.output}"] * outcome.shows_fault
    return found


_DATA = {"rows", "documents", "conversations", "eval_rows", "eval_documents"}


def names_of(node: ast.Assign) -> set[str]:
    return {each.id for each in node.targets if isinstance(each, ast.Name)}


def has_form(text: str, most: int = 38) -> bool:
    """Returns whether a program has 10 to 38 lines of 120 characters, besides rows, templates and the user's classes.

    A string is not broken, so its line may be longer.
    """
    rows = [each for each in ast.parse(text).body if isinstance(each, ast.Assign) and _DATA & names_of(each)]
    of_rows = {number for each in rows for number in range(each.lineno, (each.end_lineno or 0) + 1)}
    text = "\n".join(line for number, line in enumerate(text.splitlines(), 1) if number not in of_rows)
    blocks = [block for block in text.split("\n\n") if not block.startswith(("class ", "def ", "@"))]
    lines = [line for each in blocks for line in each.splitlines() if not line.startswith("tokenizer.chat_template =")]
    long_text = r"'(?:[^'\\]|\\.){60,}'|\"(?:[^\"\\]|\\.){60,}\""
    unbroken = [re.sub(long_text, "''", line) for line in lines]
    return 10 <= len(lines) <= most and all(len(line) <= 120 for line in unbroken)


@pytest.mark.parametrize("row", FAST)
def test_a_failed_row_has_a_program_and_with_its_remedy_applied_there_is_none(
    row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RUN_FRESH, run_here)  # a process takes ten seconds, and one test below has one
    text = report_of(FAST[row]).script(row)
    assert has_form(text), text
    assert "sftron" not in text.replace("/sftron", "")
    outcome = run_here(text)
    assert outcome.status == 1
    assert "wanted" in outcome.output
    assert re.search(r"^# torch \S+, transformers \S+", text)
    if APPLIED[FAST[row]].row == row:
        applied = APPLIED[FAST[row]].make()
        assert not faults_shown(report_of(FAST[row], applied), [row])


@pytest.mark.parametrize("name", FAST_SOUND)
def test_no_program_of_a_sound_trainer_shows_a_fault(name: str) -> None:
    assert not faults_shown(report_of(name))


def test_an_evidence_that_always_shows_a_fault_is_seen_in_a_sound_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Evidence("Everything is wrong.", "print('found 1; wanted 0')\nsys.exit(True)")
    monkeypatch.setitem(EVIDENCE, "ids", (wrong,))
    assert len(faults_shown(report_of("flattening_of_llama"), ["ids"])) == 1


def run_alone(text: str, folder: Path) -> tuple[int, str]:
    path = folder / "program.py"
    path.write_text(text, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-c", _BLOCKED, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_a_program_shows_its_fault_in_a_process_without_sftron(own: Any, tmp_path: Path) -> None:
    trainer = plain(own, tmp_path, AllTokens)
    text = verify_trainer(trainer).script("loss")
    status, output = run_alone(text, tmp_path)
    assert status == 1
    assert "wanted" in output
    sound = re.sub(r"class AllTokens.*?\n\n", "", text, flags=re.DOTALL).replace("AllTokens(", "Trainer(")
    sound = sound.replace("import AutoConfig", "import Trainer, AutoConfig")
    assert run_alone(sound, tmp_path)[0] == 0


class AllTokens(Trainer):
    """Divides by the number of all tokens."""

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        return sum(batch["input_ids"].numel() for batch in batch_samples)


class Keyed(DataCollatorForSeq2Seq):
    """A collator that no program can make: it does not keep what it was given."""

    def __init__(self, tokenizer: Any, key: Any) -> None:
        super().__init__(tokenizer)

    def __call__(self, features: Any, return_tensors: Any = None) -> Any:
        batch = super().__call__(features)
        batch["labels"] = batch["input_ids"].clone()
        return batch


def test_a_trainer_that_cannot_be_written_has_no_program_and_the_reason_is_told(own: Any, tmp_path: Path) -> None:
    report = verify_trainer(plain(own, tmp_path, collator=Keyed(own, object())))
    with pytest.raises(ValueError, match=r"trained tokens: no program .* Keyed does not keep its argument key"):
        report.script("trained tokens")
    with pytest.raises(ValueError, match=r"no row 'ids' has failed; failed: .*trained tokens"):
        report.script("ids")
    with pytest.raises(ValueError, match="only a report of verify_trainer has programs"):
        Report("", {}, ()).script()


@NEEDS_SMOLLM2
def test_the_program_of_the_page_prints_what_the_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    hush()
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/verify-any-trainer.md").read_text(encoding="utf-8")
    text, shown = re.findall(r"^```text\n(.*?)^```", page.split("## A program for an issue")[1], re.DOTALL | re.M)[:2]
    outcome = run_here(text)
    assert outcome.status == 1
    numbers = [re.findall(r"\d+\.\d+", output) for output in (outcome.output, shown)]
    assert float(numbers[0][0]) == pytest.approx(float(numbers[1][0]), rel=0.01)
    assert re.sub(r"\d+\.\d+", "", outcome.output) == re.sub(r"\d+\.\d+", "", shown)


# -- by night ----------------------------------------------------------------------------------------------------------


@NEEDS_SMOLLM2
@pytest.mark.nightly
@pytest.mark.parametrize("name", BROKEN)
def test_every_failed_row_of_the_zoo_has_a_program(name: str, tmp_path: Path) -> None:
    report = report_of(name)
    for check in report.failed:
        if (name, check.name) in NOT_SHOWN:
            with pytest.raises(ValueError, match=re.escape(NOT_SHOWN[name, check.name])):
                report.script(check.name)
            continue
        text = report.script(check.name)
        assert has_form(text), text
        status, output = run_alone(text, tmp_path)
        assert (status, "wanted" in output) == (1, True)


@NEEDS_SMOLLM2
@pytest.mark.nightly
@pytest.mark.parametrize("name", SOUND)
def test_no_program_of_any_sound_set_up_shows_a_fault(name: str) -> None:
    assert not faults_shown(report_of(name))


@NEEDS_SMOLLM2
@pytest.mark.nightly
@pytest.mark.parametrize("name", APPLIED)
def test_with_the_printed_remedy_no_program_of_the_row_shows_a_fault(name: str) -> None:
    changed = {} if APPLIED[name].conversations is None else {"conversations": APPLIED[name].conversations}
    assert not faults_shown(report_of(name, APPLIED[name].make(), **changed), [APPLIED[name].row])
