"""The parts of a difference add up to it, and the factor that differs is the one that is named."""

from functools import cache

import numpy as np
import pytest
from transformers import Trainer

from sftcheck.diff.difference import RESIDUAL, Difference, difference
from sftcheck.diff.parts import Factor
from sftcheck.faults import Fault
from sftcheck.record.recorder import record_trainer
from sftron.report.token_record import TokenRecord
from tests.sftcheck.diff_pairs import CASES, EQUAL, few

pytestmark = pytest.mark.usefixtures("quiet")


@cache
def sound() -> TokenRecord:
    return record_trainer(few())


def compared(a: Trainer | TokenRecord, b: Trainer | TokenRecord) -> Difference:
    return difference(*(each if isinstance(each, TokenRecord) else record_trainer(each) for each in (a, b)))


def value(found: Difference, factor: Factor) -> float:
    return next(each.value for each in found.parts if each.factor is factor)


def require_sum(found: Difference) -> None:
    """The parts add up, and what the steps return is the sum over the tokens."""
    whole, size = found.b.loss - found.a.loss, max(abs(found.a.loss), abs(found.b.loss))
    assert sum(each.value for each in found.parts) == pytest.approx(whole, abs=1e-9 * size)
    assert abs(value(found, Factor.RESIDUAL)) <= RESIDUAL * size


@pytest.mark.parametrize("name", CASES)
def test_the_factor_of_a_fault_is_named_first_and_alone(name: str) -> None:
    case = CASES[name]
    a = sound() if case.sound is few else record_trainer(case.sound())
    found = compared(a, case.broken())
    require_sum(found)
    assert [each.factor for each in found.named] == [case.factor]
    assert found.named[0].cause.fault is case.fault
    assert found.named[0].cause.side == ("B" if case.fault else "")


@pytest.mark.parametrize("name", CASES)
def test_a_difference_the_other_way_round_is_its_negative(name: str) -> None:
    case = CASES[name]
    a, b = sound() if case.sound is few else record_trainer(case.sound()), record_trainer(case.broken())
    there, back = difference(a, b), difference(b, a)
    require_sum(back)
    assert [each.factor for each in back.named] == [each.factor for each in there.named]
    assert [each.value for each in back.named] == pytest.approx([-each.value for each in there.named], rel=1e-3)
    is_sided = case.fault not in (None, Fault.OTHER_FORMAT)  # nobody knows which template is meant
    assert not is_sided or back.named[0].cause.side == "A"
    assert back.named[0].cause.fault is case.fault


@pytest.mark.parametrize("name", EQUAL)
def test_equal_trainers_are_equal_in_every_part(name: str) -> None:
    found = compared(sound(), EQUAL[name]())
    require_sum(found)
    assert not found.named
    assert found.worst is None
    assert len(found.a.sketches) == len(found.b.sketches) == 8
    assert int(np.sum(found.b.is_trained)) > 100
