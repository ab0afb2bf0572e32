"""Each set-up of the zoo is broken, or sound, in the way that it claims: measured without sftron."""

import pytest

from tests.verify.trainer_zoo import SMOLLM2, ZOO, hush

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
