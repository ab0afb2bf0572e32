"""Losses by role and data set, accuracy and entropy, against transformers' logits of every conversation alone."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sftron.data.loader import collate
from sftron.data.packing import lay_out
from sftron.data.types import IGNORE_INDEX, Batch, ConversationKey, LabeledConversation, Role
from sftron.models.loss import RowMeasures, weighted_loss_sum
from sftron.train.metrics import TokenLosses, TokenSums
from sftron.train.objective import TokenLoss, conversation_log_probabilities, hidden_states
from sftron.train.step import train_step
from tests.models.reference import make_ours, make_theirs
from tests.train.conftest import FinishedRun
from tests.train.runs import make_config, metrics, run
from tests.train.test_step import Recording, conversation

UNTRAINED = frozenset({Role.TEMPLATE, Role.USER, Role.SYSTEM})
TRAINED = frozenset({Role.ASSISTANT, Role.REASONING})


def with_roles(number: int, length: int, *, trained: frozenset[Role] = TRAINED) -> LabeledConversation:
    """Random roles, of which some are trained. From data set 0 or 1.

    Every other token is the model's own most likely one, so that some are hit.
    """
    made, reference = conversation(length, number, share_trained=1.0), make_theirs()
    ids = made.input_ids.copy()
    for index in range(1, length, 2):
        ids[index] = reference(torch.from_numpy(ids[:index].astype(np.int64))[None]).logits[0, -1].argmax()
    roles = np.random.default_rng(number).integers(0, 6, length).astype(np.uint8)
    roles[roles == Role.TOOL] = Role.REASONING
    is_trained = np.append(np.isin(roles[1:], list(trained)), False)
    return replace(
        made,
        input_ids=ids,
        labels=np.where(is_trained, np.append(ids[1:], 0), IGNORE_INDEX).astype(np.int32),
        loss_weights=np.where(is_trained, made.loss_weights, 0).astype(np.float32),
        role_ids=roles,
        key=ConversationKey(number % 2, number),
    )


CONVERSATIONS = [with_roles(number, length) for number, length in enumerate((9, 4, 14, 6, 7))]


def batch_of(conversations: Sequence[LabeledConversation], *, keep_tail: bool = False) -> Batch:
    pack = lay_out(conversations, token_budget=48, remove_cross_attention=True, pad_id=0)
    return collate(pack, keep_tail=keep_tail, measured_roles=UNTRAINED)


def expected_losses() -> tuple[dict[str, tuple[float, int]], list[tuple[float, int]], float, float]:
    """By role, by data set, accuracy, entropy; from transformers' logits, one conversation after another."""
    reference = make_theirs().double()
    by_role: dict[str, list[float]] = {}
    by_dataset: list[list[float]] = [[], []]
    hits, entropies = [], []
    for each in CONVERSATIONS:
        logits = reference(torch.from_numpy(each.input_ids.astype(np.int64))[None]).logits[0].detach()
        for index in range(len(each) - 1):
            label, role = int(each.input_ids[index + 1]), Role(int(each.role_ids[index + 1]))
            log_p = logits[index].log_softmax(dim=0)
            by_role.setdefault(role.name.lower(), []).append(-log_p[label].item())
            if each.labels[index] != IGNORE_INDEX:
                by_dataset[each.key.source].append(-log_p[label].item())
                hits.append(int(log_p.argmax()) == label)
                entropies.append(-(log_p.exp() * log_p).sum().item())

    def mean(losses: list[float]) -> tuple[float, int]:
        return sum(losses) / len(losses), len(losses)

    return (
        {role: mean(losses) for role, losses in by_role.items()},
        [mean(losses) for losses in by_dataset],
        sum(hits) / len(hits),
        sum(entropies) / len(entropies),
    )


LAYOUTS = {"1 pack": [[0, 1, 2, 3, 4]], "3 packs": [[4, 1], [2, 3], [0]], "with an empty one": [[3, 2], [], [0, 1, 4]]}


@pytest.mark.parametrize("keep_tail", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_losses_of_a_steps_tokens_are_those_of_transformers_logits(layout: str, keep_tail: bool) -> None:
    model = make_ours(make_theirs())
    batches = [batch_of([CONVERSATIONS[n] for n in numbers], keep_tail=keep_tail) for numbers in LAYOUTS[layout]]
    options = {"num_datasets": 2, "with_untrained": True}
    result = train_step(model, Recording(model), batches, max_grad_norm=None, **options).token_losses
    assert result is not None
    roles, datasets, accuracy, entropy = expected_losses()

    assert {role: mean.tokens for role, mean in result.roles.items()} == {role: n for role, (_, n) in roles.items()}
    assert len(roles) == 5
    for role, (loss, _) in roles.items():
        assert result.roles[role].loss == pytest.approx(loss, rel=1e-5)
    for mean, (loss, count) in zip(result.datasets, datasets, strict=True):
        assert (mean.loss, mean.tokens) == (pytest.approx(loss, rel=1e-5), count)
    assert result.token_accuracy == accuracy
    assert 0 < accuracy < 1
    assert result.entropy == pytest.approx(entropy, rel=1e-5)


def test_untrained_roles_change_no_bit_of_the_update_and_are_absent_where_they_are_not_wanted() -> None:
    results = []
    for with_untrained in (False, True):
        model = make_ours(make_theirs())
        recording = Recording(model)
        batches = [batch_of(CONVERSATIONS)]
        options = {"num_datasets": 2, "with_untrained": with_untrained}
        result = train_step(model, recording, batches, max_grad_norm=1.0, **options)
        results.append((result, recording.gradients))
    (without, gradients), (with_all, same) = results

    assert without.token_losses is not None
    assert with_all.token_losses is not None
    assert set(without.token_losses.roles) == {"assistant", "reasoning"}
    assert set(with_all.token_losses.roles) - set(without.token_losses.roles) == {"template", "system", "user"}
    assert with_all.token_losses.entropy == without.token_losses.entropy
    assert with_all.token_losses.token_accuracy == without.token_losses.token_accuracy
    assert (with_all.loss, with_all.grad_norm) == (without.loss, without.grad_norm)
    assert all(gradient.equal(same[name]) for name, gradient in gradients.items())


def test_a_loss_function_without_logits_gives_losses_and_no_accuracy_nor_entropy() -> None:
    def losses_alone(*args: torch.Tensor) -> tuple[torch.Tensor, RowMeasures]:
        total, measures = weighted_loss_sum(*args)
        return total, RowMeasures(measures.losses)

    model = make_ours(make_theirs())
    batches, objectives = (
        [batch_of(CONVERSATIONS)],
        (TokenLoss(), TokenLoss(losses_alone)),
    )
    whole, alone = (
        train_step(model, Recording(model), batches, each, max_grad_norm=None, num_datasets=2).token_losses
        for each in objectives
    )

    assert whole is not None
    assert alone == replace(whole, token_accuracy=None, entropy=None)


def test_a_loss_that_is_not_finite_counts_for_its_own_groups_alone() -> None:
    sums = TokenSums(2, torch.device("cpu"))
    losses = torch.tensor([1.0, float("nan"), 3.0])
    roles = torch.tensor([Role.USER, Role.ASSISTANT, Role.USER], dtype=torch.uint8)
    sums.add(RowMeasures(losses, losses, losses), roles, torch.tensor([0, 1, 0], dtype=torch.int32))
    means = TokenLosses.of(sums.table_G4.flatten().tolist())

    assert means.roles["user"].loss == means.datasets[0].loss == 2.0
    assert means.roles["assistant"].loss is not None
    assert math.isnan(means.roles["assistant"].loss)


def test_untrained_roles_are_measured_in_the_first_step_of_every_interval(finished: FinishedRun) -> None:
    assert {line["step"] for line in finished.steps if "user" in line["roles"]} == {1, 4}
    for line in finished.steps:
        assert line["roles"]["assistant"]["tokens"] == line["trained_tokens"]
        assert line["roles"]["assistant"]["loss"] == pytest.approx(line["loss"], rel=1e-6)
        if "user" in line["roles"]:
            # All tokens but the first of each conversation.
            counts = sum(role["tokens"] for role in line["roles"].values())
            assert counts == line["tokens"] - line["conversations"]


def test_without_an_interval_untrained_roles_are_not_measured(tmp_path: Path, model_folder: Path) -> None:
    config = make_config(tmp_path, model_folder, tokens__train_steps=2, checkpoints__export_hf=False)
    logging = config.logging.model_copy(update={"untrained_roles_interval": None})
    lines = metrics(run(config.model_copy(update={"logging": logging})).directory.folder)
    assert [set(line["roles"]) for line in lines] == [{"assistant"}] * 2


def test_where_every_token_is_trained_every_role_is_measured_at_every_step(tmp_path: Path, model_folder: Path) -> None:
    options = {"data__train_on_completions_only": False, "checkpoints__export_hf": False}
    lines = metrics(run(make_config(tmp_path, model_folder, tokens__train_steps=2, **options)).directory.folder)

    for line in lines:
        assert {"assistant", "user", "template"} <= set(line["roles"])
        assert sum(role["tokens"] for role in line["roles"].values()) == line["trained_tokens"]


def test_the_log_probabilities_of_a_conversation_are_those_of_the_conversation_alone() -> None:
    """Whatever else is in its pack."""
    model = make_ours(make_theirs())

    def sums_of(conversations: Sequence[LabeledConversation]) -> torch.Tensor:
        batch = batch_of(conversations)
        _, measures = weighted_loss_sum(
            hidden_states(model, batch), model.head, batch.label_positions, batch.labels, batch.loss_weights
        )
        return conversation_log_probabilities(measures, batch)

    alone = torch.cat([sums_of([each]) for each in CONVERSATIONS])
    assert len(alone) == len(CONVERSATIONS)
    assert (alone <= 0).all()
    torch.testing.assert_close(sums_of(CONVERSATIONS), alone)
