"""Each set-up of the zoo is broken, or sound, as it claims, measured without sftron; and verify_trainer finds it."""

import pytest

from sftron import verify_trainer
from tests.verify.trainer_zoo import ZOO, hush
from tests.verify.zoo_materials import SMOLLM2

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
    assert not ZOO[name].problem(verify_trainer(ZOO[name].make(), **ZOO[name].arguments))
