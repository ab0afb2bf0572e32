"""Each set-up of the zoo is broken, or sound, as it claims, measured without sftron; and verify_trainer finds it.

The remedy that it prints is applied, and the row passes.
"""

import pytest

from sftron import verify_trainer
from tests.verify.trainer_zoo import ZOO, hush
from tests.verify.zoo_materials import SMOLLM2
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
    assert all(bool(row.remedy) == (row.status == "FAIL") for row in report.rows)
    if name in APPLIED:
        (remedy,) = (row.remedy for row in report.rows if row.name == APPLIED[name].row)
        assert APPLIED[name].words in remedy


@pytest.mark.parametrize("name", APPLIED)
def test_a_set_up_with_the_remedy_that_is_printed_for_it_passes_the_row(name: str) -> None:
    hush()
    arguments = dict(ZOO[name].arguments)
    if APPLIED[name].conversations is not None:
        arguments["conversations"] = APPLIED[name].conversations
    report = verify_trainer(APPLIED[name].make(), **arguments)
    (row,) = (row for row in report.rows if row.name == APPLIED[name].row)
    assert row.status == "PASS", row.measured


def test_every_broken_set_up_has_its_remedy_applied() -> None:
    assert set(APPLIED) == {name for name, each in ZOO.items() if each.fails}
