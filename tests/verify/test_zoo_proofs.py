"""Each set-up of the zoo is broken, or sound, as it claims, measured without sftron; and verify_trainer finds it.

The remedy that it prints is applied, and the row passes.
"""

from pathlib import Path

import pytest

from sftron import verify_trainer
from tests.verify.trainer_zoo import ZOO, hush
from tests.verify.zoo_materials import ROWS, SMOLLM2, sft, tok
from tests.verify.zoo_remedies import APPLIED

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not SMOLLM2.exists(), reason="needs models/SmolLM2-135M-Instruct (make quickstart)"),
    pytest.mark.filterwarnings("ignore"),  # of TRL and transformers, about their own options
]


@pytest.mark.parametrize("name", ZOO)
def test_a_set_up_is_what_it_claims_to_be(name: str) -> None:
    hush()
    assert ZOO[name].why
    assert ZOO[name].proof(ZOO[name].make())


@pytest.mark.parametrize("name", ZOO)
def test_verify_trainer_fails_the_rows_that_are_wrong_and_no_other(name: str) -> None:
    hush()
    report = verify_trainer(ZOO[name].make(), **ZOO[name].arguments)
    assert not ZOO[name].problem(report)
    assert all(bool(row.remedy) == (row.status == "FAIL") for row in report.checks)
    if name in APPLIED:
        (remedy,) = (row.remedy for row in report.checks if row.name == APPLIED[name].row)
        assert APPLIED[name].words in remedy


@pytest.mark.parametrize("name", APPLIED)
def test_a_set_up_with_the_remedy_that_is_printed_for_it_passes_the_row(name: str) -> None:
    hush()
    arguments = dict(ZOO[name].arguments)
    if APPLIED[name].conversations is not None:
        arguments["conversations"] = APPLIED[name].conversations
    report = verify_trainer(APPLIED[name].make(), **arguments)
    (row,) = (row for row in report.checks if row.name == APPLIED[name].row)
    assert row.status == "PASS", row.measured


def test_trl_marks_no_answers_of_smollm2_and_both_ways_that_the_remedy_names_do(tmp_path: Path) -> None:
    hush()
    with pytest.raises(ValueError, match="patching is not supported for this template"):
        sft(ROWS, tok(), assistant_only_loss=True)
    pairs = [
        {"prompt": row["messages"][:n], "completion": [message]}
        for row in ROWS
        for n, message in enumerate(row["messages"])
        if message["role"] == "assistant"
    ]
    header, text, end = "'<|im_start|>' + message['role'] + '\n'", "message['content'] + '<|im_end|>'", "'\n'"
    template, written = str(tok().chat_template), f"{{{{{header} + {text} + {end}}}}}"
    assert template.count(written) == 1
    answer = f"{{% generation %}}{{{{{text}}}}}{{% endgeneration %}}"
    either = f"{{% if message['role'] == 'assistant' %}}{answer}{{% else %}}{{{{{text}}}}}{{% endif %}}"
    marked = template.replace(written, f"{{{{{header}}}}}{either}{{{{{end}}}}}")
    (tmp_path / "marked.jinja").write_text(marked)
    options = {"assistant_only_loss": True, "chat_template_path": str(tmp_path / "marked.jinja")}
    for trainer, num_rows in ((sft(pairs), len(pairs)), (sft(ROWS, **options), len(ROWS))):
        report = verify_trainer(trainer)
        assert report.passed, [(row.name, row.measured) for row in report.checks if row.status != "PASS"]
        assert f"{num_rows} of {num_rows} documents" in report.checks[0].measured


def test_every_broken_set_up_has_its_remedy_applied() -> None:
    assert set(APPLIED) == {name for name, each in ZOO.items() if each.fails}
