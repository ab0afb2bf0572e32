"""Forward passes are watched, changed and ended in one way, which leaves no hook behind."""

import pytest
import torch
from torch import nn

from sftcheck.interception import end_forward, intercepted
from tests.conftest import ROOT


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def num_hooks(module: nn.Module) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in module.modules())


def test_a_call_is_ended_where_a_function_ends_it_and_no_hook_is_left() -> None:
    called, seen = model(), list[int]()
    with intercepted(called, on_output=lambda _, output: (seen.append(output.shape[1]), end_forward())):
        called(torch.ones(1, 2))
        pytest.fail("the call went on")
    assert seen == [3]
    assert num_hooks(called) == 0


def test_arguments_and_outputs_are_changed_and_an_exception_leaves_no_hook_either() -> None:
    called, given = model(), torch.ones(1, 2)
    zeros, plain = called(torch.zeros(1, 2)), called(given)
    with intercepted([called], on_call=lambda _module, args, kwargs: ((0 * args[0],), kwargs)):
        assert torch.equal(called(given), zeros)
    with intercepted([called[1]], on_output=lambda _, output: output + 1):
        assert torch.equal(called(given), plain + 1)
    with pytest.raises(RuntimeError, match="shapes"), intercepted([called[0]], on_output=lambda *_: None):
        called(torch.ones(1, 5))
    assert num_hooks(called) == 0


def test_no_other_module_registers_forward_hooks() -> None:
    paths = (ROOT / "src/sftcheck").rglob("*.py")
    found = [path.name for path in paths if "register_forward" in path.read_text(encoding="utf-8")]
    # A program for an issue has no code of ours.
    assert sorted(found) == ["interception.py", "measurements.py"]
