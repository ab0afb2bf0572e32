"""verify_step: finds what is silently wrong in a loop of one's own, and leaves it as it was."""

import copy
import random
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from examples.loops.nanochat_style import GPT
from torch import nn
from torch.nn import functional as F

from sftcheck.loop.call import Call
from sftcheck.verify_step import RULES
from sftron import verify_step
from tests.conftest import rest_nightly
from tests.sftcheck import loop_materials, stranger_loop
from tests.sftcheck.loop_materials import CONVERSATIONS, IGNORE, TOKENIZER, Loop, of_rows, padded, shifted
from tests.sftcheck.loop_zoo import ZOO
from tests.sftcheck.small_trainers import row_of
from tests.sftcheck.zoo_materials import encoded, model, tok

pytestmark = pytest.mark.filterwarnings("ignore::")


@pytest.mark.parametrize("name", ZOO)
def test_each_loop_of_the_zoo_fails_the_rows_that_are_wrong_and_no_other(name: str) -> None:
    report = verify_step(**ZOO[name].make().arguments())
    assert not ZOO[name].problem(report)
    assert str(report) == report.as_text()


@pytest.mark.parametrize("name", rest_nightly(ZOO, ["one_ratio_over_padded_rows", "loss_mask_off_by_one"]))
def test_a_loop_is_what_it_claims_to_be(name: str) -> None:
    assert ZOO[name].make.__doc__
    assert ZOO[name].proof(ZOO[name].make())


@pytest.mark.parametrize("style", ["nanochat", "torchtitan", "prime_rl", "tinker"])
def test_the_loops_of_the_recipes_are_checked_as_they_are(style: str) -> None:
    report = verify_step(**import_module(f"examples.loops.{style}_style").make(TOKENIZER), tokenizer=TOKENIZER)
    assert report.passed, [(row.name, row.status, row.measured) for row in report.checks]
    assert [row.name for row in report.checks] == [rule.name for rule in RULES]
    skipped = {row.name for row in report.checks if row.status == "SKIP"}
    assert skipped == {"generation"} | ({"padding"} if style in ("torchtitan", "prime_rl") else set())
    assert "read from the gradient of the loss at the logits of lm_head" in report.facts["labels"]


def test_a_strangers_loop_is_checked_in_four_lines() -> None:
    rows = [row for row in CONVERSATIONS if sum(message["role"] == "assistant" for message in row) == 1]
    theirs = stranger_loop.Training(model(TOKENIZER), TOKENIZER)

    report = verify_step(theirs.model, theirs.texts(rows), theirs.train, TOKENIZER, rows)
    assert [row.name for row in report.checks if row.status == "FAIL"] == ["loss"]
    assert len(rows) % 4  # the last micro-batch has fewer rows, and its mean is over them
    assert "the weight of a micro-batch's tokens is off by" in row_of(report, "loss").measured

    report = verify_step(theirs.model, theirs.texts(rows[:4], 2), theirs.train, TOKENIZER, rows)
    assert [row.name for row in report.checks if row.status == "FAIL"] == ["loss"]  # the mean is over rows
    assert "times the ratio of" in row_of(report, "loss").measured
    assert "Divide by the number of targets" in row_of(report, "loss").remedy


def with_dropout() -> Loop:
    torch.manual_seed(0)
    llama = model(TOKENIZER, attention_dropout=0.1)
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (1 + number))

    def step(micro_batches: list[Any]) -> None:
        llama.train()
        for batch in micro_batches:
            labels = batch.pop("labels")
            total = sum(int((each["labels"][:, 1:] != IGNORE).sum()) for each in micro_batches if "labels" in each)
            (shifted(llama(**batch).logits, labels).sum() / (total + 1)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return Loop(llama, padded(), step, {"scheduler": scheduler, "inner": optimizer})


def test_a_loop_goes_on_with_the_bits_that_it_would_have_had() -> None:
    def run(is_checked: bool) -> list[torch.Tensor]:
        loop = with_dropout()
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        loop.step(copy.deepcopy(loop.batches[:2]))  # the optimizer has a state
        before = [each.clone() for batch in loop.batches for each in batch.values()]
        if is_checked:
            verify_step(loop.model, loop.batches, loop.step, TOKENIZER)
        after = [each for batch in loop.batches for each in batch.values()]
        assert all(a.equal(b) for a, b in zip(before, after, strict=True))
        assert all(each.grad is None for each in loop.model.parameters())
        loop.step(copy.deepcopy(loop.batches[2:]))
        state = [each for values in loop.options["inner"].state.values() for each in values.values()]
        rate = torch.tensor(loop.options["scheduler"].get_last_lr())
        drawn = torch.tensor([random.random(), np.random.random(), float(torch.rand(()))])
        return [*loop.model.parameters(), *state, rate, drawn]

    pairs = list(zip(run(True), run(False), strict=True))
    assert all(a.equal(b) for a, b in pairs)
    assert len(pairs) > 60


def test_gradients_and_hooks_of_before_are_put_back() -> None:
    loop = ZOO["one_ratio_over_padded_rows"].make()
    loop.step(loop.batches[:2])
    before = {name: each.grad.clone() for name, each in loop.model.named_parameters() if each.grad is not None}
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in loop.model.modules()]
    verify_step(**loop.arguments())
    assert len(before) > 10
    assert all(each.grad is not None and each.grad.equal(before[n]) for n, each in loop.model.named_parameters())
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in loop.model.modules()]


@pytest.mark.parametrize("is_whole_step", rest_nightly([False, True], [False]))
def test_a_compiled_model_is_checked_without_its_compiler(is_whole_step: bool) -> None:
    loop = ZOO["mean_of_each_micro_batch"].make()
    compiled = torch.compile(loop.model, backend="eager")

    def step(micro_batches: list[Any]) -> None:
        for batch in micro_batches:
            (compiled(**batch).loss / len(micro_batches)).backward()

    given = torch.compile(step, backend="eager") if is_whole_step else step
    given(loop.batches[:2])  # what is compiled then knows no hooks
    report = verify_step(compiled, loop.batches, given, TOKENIZER, CONVERSATIONS)  # pyright: ignore
    assert [row.name for row in report.checks if row.status == "FAIL"] == ["loss"]


def test_without_conversations_rows_say_what_they_could_not_see() -> None:
    loop = of_rows(lambda llama, batch: shifted(loop_materials.logits_of(llama, batch), batch["labels"]))
    report = verify_step(loop.model, loop.batches, loop.step, TOKENIZER)
    assert not report.passed
    assert "16 recovered from ids" in report.facts["truth"]
    measured = {row.name: row.measured for row in report.checks if row.status == "SKIP"}
    assert "give them as conversations=" in measured["isolation"]
    assert "the messages of the rows are gone" in measured["forgery"]
    assert "let it make one, or pass optimizer=" in measured["adapters"]
    assert "what it saves has to end generation at <|im_end|>" in measured["generation"]
    assert not [row.name for row in report.checks if row.status == "FAIL"]


def test_micro_batches_with_equal_numbers_of_targets_hide_no_mean_of_means() -> None:
    loop = ZOO["mean_of_each_micro_batch"].make()
    report = verify_step(loop.model, loop.batches[:1] * 4, loop.step, TOKENIZER, CONVERSATIONS)
    assert row_of(report, "loss").status == "SKIP"
    assert "so a mean of means equals the ratio" in row_of(report, "loss").measured
    one = verify_step(loop.model, loop.batches, loop.step, TOKENIZER, CONVERSATIONS, num_micro_batches=1)
    assert row_of(one, "loss").status == "PASS"


class Packed(nn.Module):
    def forward(self, tokens: Any, positions: Any, bounds: Any, max_seqlen: int, targets: Any) -> None: ...


def test_a_conversation_alone_has_its_own_positions_and_bounds() -> None:
    arguments = {
        "tokens": torch.tensor([[5, 6, 7, 8, 9]]),
        "positions": torch.tensor([[0, 1, 2, 0, 1]]),
        "bounds": torch.tensor([0, 3, 5], dtype=torch.int32),
        "max_seqlen": 3,
        "targets": torch.tensor([[6, 7, -1, 9, -1]]),
    }
    call = Call(Packed(), (), arguments)
    assert call.starts == {0, 3}
    _, alone = call.alone(torch.tensor([[5, 6, 7, 8], [6, 7, 8, 9]]), Packed())
    assert alone["positions"].tolist() == [[0, 1, 2, 3]] * 2
    assert alone["bounds"].tolist() == [0, 4, 8]
    assert alone["max_seqlen"] == 4
    assert alone["targets"].shape == (2, 4)


def packs_shifted_by_document(tokenizer: Any, size: int = 3) -> list[dict[str, torch.Tensor]]:
    """Packs in which each conversation was shifted by itself, so its last token is in the targets alone."""
    features = encoded(tokenizer, [{"messages": row} for row in CONVERSATIONS])
    packs = []
    for at in range(0, len(features) - size + 1, size):
        rows = features[at : at + size]
        packs.append(
            {
                "input_ids": torch.tensor([[n for row in rows for n in row["input_ids"][:-1]]]),
                "targets": torch.tensor([[n for row in rows for n in row["labels"][1:]]]),
                "position_ids": torch.tensor([[n for row in rows for n in range(len(row["input_ids"]) - 1)]]),
            }
        )
    return packs


@pytest.mark.parametrize("is_given", [True, False])
def test_a_stop_token_that_is_a_target_alone_ends_its_conversation(is_given: bool) -> None:
    tokenizer = tok("llama3")  # its template ends with the stop token
    llama = model(tokenizer, use_cache=False)

    def losses(batch: Any) -> torch.Tensor:
        logits = llama(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        return loop_materials.token_losses(logits, batch["targets"])

    packs = packs_shifted_by_document(tokenizer)
    assert all(int(batch["input_ids"][0, -1]) != tokenizer.eos_token_id for batch in packs)
    step = loop_materials.ratio(losses, lambda batch: (batch["targets"] != IGNORE).sum())
    report = verify_step(llama, packs, step, tokenizer, CONVERSATIONS if is_given else None)
    assert report.passed, [(row.name, row.status, row.measured) for row in report.checks]
    assert "12 of 12 documents" in row_of(report, "ids").measured
    assert "3 conversations in one row: others change by 0" in row_of(report, "isolation").measured

    for batch in packs:
        batch["targets"][batch["targets"] == tokenizer.eos_token_id] = IGNORE
    report = verify_step(llama, packs, step, tokenizer, CONVERSATIONS if is_given else None)
    assert {"stop tokens", "truncation"} & {row.name for row in report.checks if row.status == "FAIL"}


class Flat(GPT):
    """Takes the ids of a pack in one dimension, with the bounds of its documents; knows positions by them."""

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # pyright: ignore
        tokens, bounds = batch["tokens"], batch["cu_seqlens"]
        at = torch.arange(len(tokens))
        document = torch.searchsorted(bounds, at, right=True)
        is_seen = (document[:, None] == document[None]) | torch.tensor(self.is_leaky)
        positions = at - bounds[document - 1]
        return {"logits": super().forward(tokens[None], mask=is_seen.tril(), positions=positions[None])[0]}

    is_leaky = False


@pytest.mark.parametrize("is_leaky", [False, True])
def test_flat_packs_within_one_argument_are_checked(is_leaky: bool) -> None:
    torch.manual_seed(0)
    gpt, batches = Flat(len(TOKENIZER)), []
    gpt.is_leaky = is_leaky
    for pack in loop_materials.packed():
        starts = (pack["position_ids"][0] == 0).nonzero()[:, 0].tolist()
        bounds = torch.tensor([*starts, pack["input_ids"].shape[1]])
        batches.append({"tokens": pack["input_ids"][0], "labels": pack["labels"][0], "cu_seqlens": bounds})

    def losses(batch: Any) -> torch.Tensor:
        return shifted(
            gpt({name: batch[name] for name in ("tokens", "cu_seqlens")})["logits"][None], batch["labels"][None]
        )

    step = loop_materials.ratio(losses, lambda batch: (batch["labels"][1:] != IGNORE).sum())
    report = verify_step(gpt, batches, step, TOKENIZER, optimizer=torch.optim.SGD(gpt.parameters(), lr=0.1))
    if is_leaky:
        assert row_of(report, "isolation").status == "FAIL"
    else:
        assert report.passed, [(row.name, row.status, row.measured) for row in report.checks]
        assert "cu_seqlens, tokens" in " ".join(row_of(report, "isolation").detail)


class Hidden(nn.Module):
    """A model whose head is within its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = model(TOKENIZER)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.llama.model(ids).last_hidden_state[:, :-1]
        return F.cross_entropy((hidden @ self.llama.lm_head.weight.T).flatten(0, 1), labels[:, 1:].flatten())


def test_what_cannot_be_checked_is_refused_with_its_remedy() -> None:
    llama, batches, other = model(TOKENIZER), padded(), model(TOKENIZER)

    def loss(batch: Any, called: Any = llama, **options: Any) -> torch.Tensor:
        return called(**{**batch, **options}).loss

    def check(step: Any, of: Any = llama, given: Any = batches, **options: Any) -> None:
        verify_step(of, given, step, **{"tokenizer": TOKENIZER, **options})

    def of_all(function: Any) -> Any:
        return lambda micro_batches: sum(function(batch) for batch in micro_batches)

    sound = of_all(loss)
    for words, call in {
        r"model is a function; wanted the torch\.nn\.Module": lambda: check(sound, of=loss),
        "batches is a dict; wanted a loader, or a list": lambda: check(sound, given=batches[0]),
        "batches holds no micro-batch": lambda: check(sound, given=[]),
        "tokenizer is a str; wanted one of transformers": lambda: check(sound, tokenizer="smollm2"),
        "trained_roles is 'user'; wanted": lambda: check(sound, trained_roles="user"),
        "step never calls the model": lambda: check(sound, of=other),
        "step calls the model 4 times for 2 micro-batches": lambda: check(of_all(lambda each: loss(each) + loss(each))),
        "step calls the model 1 times for 2 micro-batches": lambda: check(lambda given: loss(given[0])),
        "without ids, as integers": lambda: check(of_all(lambda each: loss(
            {"labels": None}, inputs_embeds=llama.get_input_embeddings()(each["input_ids"])))),
        "no gradient reaches the logits": lambda: check(of_all(lambda each: loss(each).detach())),
        r"which the check sets to 0, a loss of \d+\.\d a token": lambda: check(
            of_all(lambda each: (lambda own: own * float(own < 5))(loss(each)).detach())),
        "step returns a list of 2 losses; return their sum": lambda: check(
            lambda given: [loss(each) for each in given]),
        "no module of the model gives logits": lambda: (lambda fused: check(of_all(
            lambda each: fused(each["input_ids"], each["labels"])), of=fused))(Hidden()),
        "the loss has several targets at each of": lambda: check(of_all(
            lambda each: -llama(each["input_ids"]).logits.softmax(-1)[..., :9].sum())),
        "the head gives logits for 4 of": lambda: check(of_all(
            lambda each: llama(each["input_ids"], logits_to_keep=1).logits.logsumexp(-1).sum())),
        "the step raises ZeroDivisionError: division by zero": lambda: check(lambda _: 1 / 0),
        "the batches hold token 99,999, and the model has embeddings for": lambda: check(
            sound, given=[{**batch, "input_ids": batch["input_ids"] + 99_999 - int(batch["input_ids"].max())}
                          for batch in batches]),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call()
