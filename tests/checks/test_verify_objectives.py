"""`sftron verify` with a user's objective: a sound one passes, a broken one fails the row of its law."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checks.test_verify_run import failed, report_of

MODULE = """
import torch
from sftron import Extension, TokenLoss

class Sound(TokenLoss):
    names = ("half",)

    def loss_sum(self, model, batch, measures):
        loss = self.token_loss(model, batch, measures)
        measures.add_measure("half", loss / 2)
        return loss

class MeanOfMeans(TokenLoss):
    def denominator(self, batch):
        return 1.0

    def loss_sum(self, model, batch, measures):
        return self.token_loss(model, batch, measures) / max(1.0, batch.weight_sum)

class NeighborsToken(TokenLoss):
    def loss_sum(self, model, batch, measures):
        # The last position of a conversation is trained on the first token of the next one.
        bounds = batch.cu_seqlens[1:-1].tolist()
        bounds = [bound for bound in bounds if bound < batch.num_real]
        from sftron import hidden_states, label_log_probabilities
        hidden = hidden_states(model, batch)
        loss = self.token_loss(model, batch, measures, hidden)
        if bounds:
            at = torch.tensor(bounds)
            logits = model.head.logits(hidden[at - 1]).float().log_softmax(-1)
            loss = loss - logits.gather(1, batch.input_ids[at][:, None].long()).sum()
        return loss

class OwnDenominator(TokenLoss):
    def denominator(self, batch):
        return float(batch.loss_weights.sum())

def setup(options) -> Extension:
    return Extension(objective=globals()[options["kind"]]())
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_objectives.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    yield "own_objectives"
    sys.modules.pop("own_objectives", None)


LAWS = ("accumulation", "packed = single", "resume", "learning")


@pytest.mark.parametrize(
    ("kind", "rows"),
    [("Sound", set()), ("MeanOfMeans", {"accumulation"}), ("NeighborsToken", {"accumulation", "packed = single"})],
)
def test_a_broken_objective_fails_the_row_of_its_law(
    home: Path, tmp_path: Path, module: str, kind: str, rows: set[str]
) -> None:
    report = report_of(home, tmp_path, *LAWS, extend__setup=f"{module}:setup", extend__options={"kind": kind})
    assert rows <= failed(report) <= rows | {"packed = single", "accumulation"}, report.as_dict()
    if not rows:
        assert len([check for check in report.checks if check.passed]) == len(LAWS)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("kind", "rows"), [("Sound", set()), ("OwnDenominator", {"context"})])
def test_an_objective_whose_denominator_is_of_its_own_rank_fails_the_row_of_ranks(
    home: Path, tmp_path: Path, module: str, kind: str, rows: set[str]
) -> None:
    given = {"extend__setup": f"{module}:setup", "extend__options": {"kind": kind}}
    report = report_of(home, tmp_path, "ranks", "context", ranks=2, context=2, **given)
    assert failed(report) == rows, report.as_dict()
