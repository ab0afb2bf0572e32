"""The parts of a difference add up to it, and the factor that differs is the one that is named."""

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback

from sftcheck.diff.causes import _span
from sftcheck.diff.difference import RESIDUAL, Difference, as_text, difference
from sftcheck.diff.matching import _scored
from sftcheck.diff.parts import Factor
from sftcheck.faults import Fault
from sftcheck.record.recorder import record_trainer
from sftron.report.token_record import TokenRecord, sketch_of
from tests.sftcheck.diff_pairs import (
    CASES,
    EQUAL,
    FEW,
    UPDATES,
    CountsPrompts,
    FlattenWithoutPositions,
    Parts,
    double_beginning,
    drawn,
    features,
    few,
    put_together,
    train_everything,
    with_weights_of,
)
from tests.sftcheck.zoo_materials import ANSWERS, ROWS, Pad, in_bfloat16, sft, tok
from tests.sftcheck.zoo_training import CountsAllTokens, DividesAgain

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
    found = compared(a, case.record())
    require_sum(found)
    assert [each.factor for each in found.named] == [case.factor, *case.also]
    assert found.named[0].cause.fault is case.fault
    assert found.named[0].cause.side == ("B" if case.fault else "")


@pytest.mark.parametrize("name", CASES)
def test_a_difference_the_other_way_round_is_its_negative(name: str) -> None:
    case = CASES[name]
    a, b = sound() if case.sound is few else record_trainer(case.sound()), case.record()
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


def require_two_faults(faults: Sequence[tuple[Factor, Parts]], seed: int | None = None) -> None:
    """The parts are the steps of a path of real trainers: without fault, with the first one, and with both."""
    (first, one), (second, other) = faults
    with_one, with_both = record_trainer(put_together(one)), record_trainer(put_together(one, other))
    found, size = difference(sound(), with_both), max(abs(with_both.loss), sound().loss)
    require_sum(found)
    assert {each.factor for each in found.named} == {first, second}, (seed, found.named)
    assert value(found, first) == pytest.approx(with_one.loss - sound().loss, abs=2e-6 * size), seed
    assert value(found, second) == pytest.approx(with_both.loss - with_one.loss, abs=2e-6 * size), seed


@pytest.mark.parametrize("seed", range(10))
def test_two_faults_are_named_in_their_sizes(seed: int) -> None:
    require_two_faults(drawn(seed))


def test_a_token_of_one_record_is_trained_as_its_neighbors_are() -> None:
    require_two_faults([(Factor.IDS, {"ids": double_beginning}), (Factor.TRAINED, {"labels": train_all})])


@pytest.mark.nightly
def test_two_hundred_pairs_of_faults_are_named_in_their_sizes() -> None:
    for seed in range(10, 210):
        require_two_faults(drawn(seed), seed)


def train_all(row: dict[str, list[int]]) -> None:
    row["labels"] = list(row["input_ids"])


def require_equal_whatever_the_order(seed: int) -> None:
    """Another shuffle, packing and micro-batch moves conversations between steps, and changes nothing else."""
    generator, rows = np.random.default_rng(seed), features(rows=ROWS[12:28])
    records = []
    for _ in range(2):
        size = int(generator.choice([1, 2, 4]))
        collator = [None, DataCollatorWithFlattening(), Pad(tok("chatml"), "left")][int(generator.integers(3))]
        own = {"data_seed": int(generator.integers(99)), "per_device_train_batch_size": size}
        records.append(
            record_trainer(few(rows, collator=collator, gradient_accumulation_steps=4 // size, **own), steps=4)
        )
    found = difference(*records)
    require_sum(found)
    assert {each.factor for each in found.named} <= {Factor.ROWS}, (seed, found.named)
    assert len(found.a.sketches) == len(found.b.sketches) == 16
    assert "the same 16 conversations" in found.parts[0].cause.sentence


@pytest.mark.parametrize("seed", range(4))
def test_another_order_is_no_other_factor(seed: int) -> None:
    require_equal_whatever_the_order(seed)


@pytest.mark.nightly
def test_a_hundred_other_orders_are_no_other_factor() -> None:
    for seed in range(4, 104):
        require_equal_whatever_the_order(seed)


@pytest.mark.parametrize("name", UPDATES)
def test_a_fact_of_the_update_is_named(name: str) -> None:
    found = compared(sound(), UPDATES[name]())
    assert name in [each.name for each in found.updates]
    if name != "types of the weights":
        assert not found.named


SGD = {"optim": "sgd", "max_grad_norm": 0.0}
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any], float | None]] = {
    "gradient": (SGD, SGD | {"trainer": DividesAgain}, 0.5),
    "clipping": (SGD | {"max_grad_norm": 0.4}, SGD | {"max_grad_norm": 0.1}, 0.25),
    "moments": ({}, {"optim": "sgd"}, None),
    "rate": ({}, {"learning_rate": 2e-3}, 2.0),
    "weight decay": (SGD, SGD | {"weight_decay": 0.5}, None),
}
"""Two set-ups whose updates differ in this part, and the factor by which they do, if it is known."""


@pytest.mark.parametrize("name", SIZES)
def test_the_parts_of_an_update_add_up_and_the_factor_that_differs_is_named(name: str) -> None:
    a, b, factor = SIZES[name]
    found = compared(few(**a), few(**b)).update
    assert None not in found.norms
    whole = np.log(found.norms[1]) - np.log(found.norms[0])
    assert sum(found.parts.values()) == pytest.approx(whole, abs=1e-12)
    assert [each for each, value in found.parts.items() if abs(value) > 1e-3] == [name]
    if factor is not None:
        assert found.parts[name] == pytest.approx(np.log(factor), abs=1e-5)


class Lion(torch.optim.Optimizer):
    """Updates each weight by the sign of its gradient, and decays it apart."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * each.grad.sign())


class OwnAdamW(torch.optim.AdamW):
    pass


def stepped_by(kind: Any) -> Trainer:
    return few(trainer=with_optimizer(kind))


def with_optimizer(kind: Any) -> type[Trainer]:
    class Stepped(Trainer):
        def create_optimizer(self, *_: Any) -> torch.optim.Optimizer:
            self.optimizer = kind(self.model.parameters(), lr=1e-3)
            return self.optimizer

    return Stepped


@pytest.mark.parametrize("name", ["rmsprop", "adagrad", "adafactor", "Lion", "RAdam"])
def test_the_update_of_an_optimizer_whose_parts_are_not_known_is_not_decomposed(name: str) -> None:
    kinds: dict[str, Any] = {"Lion": Lion, "RAdam": torch.optim.RAdam}
    found = compared(few(), stepped_by(kinds[name]) if name in kinds else few(optim=name))
    assert None not in found.update.norms
    assert not found.update.parts
    text = as_text(found).lower()
    assert f"it is not decomposed: {name.lower()}: only adam and sgd have known parts." in text


def test_the_update_of_a_class_made_of_adamw_is_decomposed() -> None:
    found = compared(few(learning_rate=1e-3, weight_decay=0.01), stepped_by(OwnAdamW)).update
    assert found.parts["moments"] == pytest.approx(0.0, abs=1e-9)
    assert found.parts["residual"] == pytest.approx(0.0, abs=1e-3)


def test_an_update_that_bfloat16_swallows_is_a_residual() -> None:
    small = {"learning_rate": 1e-6}
    found = compared(few(**small), in_bfloat16(few(**small)))
    assert found.update.parts["residual"] < -0.1
    assert "  residual " in as_text(found).partition("norm of the first update")[2]


def test_a_side_that_lacks_a_fact_is_said_to_lack_it() -> None:
    found = sound()
    facts = {name: value for name, value in found.facts.items() if name not in ("optimizer", "update", "seeds")}
    text = as_text(difference(found, TokenRecord(found.tokens, found.sketches, facts)))
    assert "B lacks optimizer, update: record it again" in text
    lines = {line.strip().partition("  ")[0]: line for line in text.splitlines()}
    assert lines["optimizer"].endswith("   not recorded")
    assert lines["seeds"].endswith("   not recorded")
    assert "betas" not in text


def test_other_adapters_are_named_though_they_compute_the_same() -> None:
    """What multiplies them is 0 at first; transformers and TRL draw them at another state of the generator."""

    def adapted(seed: int) -> Trainer:
        model = few().model
        torch.manual_seed(seed)
        return few(their_model=get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")))

    found = compared(adapted(0), adapted(1))
    assert not found.named
    names = [each.name for each in found.updates]
    assert names[:2] == ["gradient norm", "norm of 2 tensors at first"]
    assert "norm of" not in str([each.name for each in compared(adapted(0), adapted(0)).updates])


class SkipsSecond(Trainer):
    """Computes the second micro-batch of each step, and leaves its loss out."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if self.accelerator.gradient_state.sync_gradients:
            return self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch) * 0
        return super().training_step(model, inputs, num_items_in_batch)


def test_micro_batches_that_a_step_leaves_out_are_counted() -> None:
    found = compared(sound(), few(trainer=SkipsSecond))
    weights = next(each.cause for each in found.named if each.factor is Factor.WEIGHTS)
    assert (weights.fault, weights.side) == (Fault.ROWS_SKIPPED, "B")
    assert weights.sentence.endswith("tokens are trained, because the step loses the gradients of 1 micro-batch")
    assert "B lacks 4 of A's 8" in found.parts[0].cause.sentence


class Freezing(TrainerCallback):
    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        model.requires_grad_(requires_grad=False)


def test_callbacks_that_no_record_runs_are_named_with_their_hooks() -> None:
    trainer = few()
    trainer.add_callback(Freezing())
    found = compared(sound(), trainer)
    facts = {each.name: (each.a, each.b) for each in found.updates}
    assert facts == {"callbacks, which no record runs": ([], ["Freezing (on_train_begin)"])}
    assert "none   Freezing (on_train_begin)" in as_text(found)


def test_equal_updates_have_no_fact_that_differs() -> None:
    assert not compared(sound(), few()).updates


class CountsFirstTokens(Trainer):
    """Counts the labels as transformers did before 5.10.1, which are one more for each row than are predicted."""

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        return sum((batch["labels"] != -100).sum() for batch in batch_samples)


@pytest.mark.parametrize("steps", [1, 4])
def test_counted_first_tokens_are_no_mean_of_means(steps: int) -> None:
    """Each of several steps has another number of tokens, but within a step all weigh the same."""
    size = 8 // (2 * steps)
    a, b = (
        record_trainer(
            few(features(train_all), trainer=each, per_device_train_batch_size=size, gradient_accumulation_steps=2),
            steps=steps,
        )
        for each in (Trainer, CountsFirstTokens)
    )
    found, num_trained = difference(a, b), int(a.is_trained.sum())
    require_sum(found)
    (part,) = found.named
    assert (part.factor, part.cause.fault, part.cause.side) == (Factor.WEIGHTS, Fault.OTHER_COUNT, "B")
    assert f"divided by {num_trained + 8:,}, and {num_trained:,} tokens" in part.cause.sentence
    assert "as if the first token of each row were counted" in part.cause.sentence
    other = difference(sound(), record_trainer(few(trainer=CountsAllTokens))).named[0].cause.sentence
    assert "first token" not in other


# -- what is no fault --------------------------------------------------------------------------------------------------


def test_other_labels_over_several_steps_are_no_other_rows() -> None:
    """A step's loss is a ratio of its own, so a pooled mean would call the difference one of rows."""
    small = {"per_device_train_batch_size": 2}
    found = difference(
        *(record_trainer(few(rows, **small), steps=2) for rows in (features(), features(train_everything)))
    )
    require_sum(found)
    assert found.a.num_steps == 2
    assert [each.factor for each in found.named] == [Factor.TRAINED]


def test_another_answer_is_no_other_template() -> None:
    def answered(word: str) -> Trainer:
        first = {**ANSWERS[0], "completion": [{"role": "assistant", "content": word}]}
        return sft([first, *ANSWERS[1:4]], tok("chatml"), per_device_train_batch_size=4)

    found = compared(answered("yes, of course"), answered("no"))
    require_sum(found)
    assert found.named[0].factor is Factor.IDS
    assert found.named[0].cause.fault is None
    assert "other text" in found.named[0].cause.sentence
    assert "of the answers" in found.named[0].cause.sentence


@pytest.mark.parametrize("kind", ["bfloat16", "flattened without positions"])
def test_a_record_is_equal_to_itself_whatever_its_type_and_its_faults(kind: str) -> None:
    trainer = in_bfloat16(few()) if kind == "bfloat16" else few(collator=FlattenWithoutPositions())
    found = record_trainer(trainer)
    same = difference(found, found)
    assert not same.named
    assert any(each.cause.sentence.startswith("the same: ") for each in same.parts)


def test_numbers_have_their_nouns_and_the_digits_that_tell_them_apart() -> None:
    rows = features()
    sentences = {each.factor: each.cause.sentence for each in compared(few(rows[:2]), few(rows[1:2], bf16=True)).parts}
    assert sentences[Factor.ROWS].endswith("1 conversation is in both")
    assert "without dropout (float32, autocast to bfloat16)" in sentences[Factor.MODEL]
    assert _span(np.array([1.00004, 1.0, 1.00012])) == "1 to 1.00012"
    assert _span(np.array([0.5, 1.25])) == "0.5 to 1.25"


def test_repeated_rows_are_no_conversations_that_are_lacking() -> None:
    rows = features()
    found = compared(few(rows[:4]), few([*rows[:4], *rows[:3], rows[5]]))
    sentence = found.parts[0].cause.sentence
    assert "A lacks 1 of B's 5" in sentence
    assert "B repeats 3 of those that are in both, in 3 rows more than A" in sentence
    assert "4 conversations are in both" in sentence


def test_a_renamed_tensor_has_no_other_norm() -> None:
    other = record_trainer(with_weights_of(1))
    norms = dict(other.facts["weight_norms"])
    norms["elsewhere"] = norms.pop("model.norm.weight")
    renamed = TokenRecord(other.tokens, other.sketches, {**other.facts, "weight_norms": norms})
    whole = {**other.facts["weight_norms"]}
    mine = TokenRecord(sound().tokens, sound().sketches, {**sound().facts, "weight_norms": whole})
    sentence = next(each for each in difference(mine, renamed).parts if each.factor is Factor.MODEL).cause.sentence
    assert f"0 of {len(whole) - 1} tensors have other norms" in sentence
    assert "1 are renamed: model.norm.weight is elsewhere in B" in sentence


def test_autocast_dropout_and_attention_are_named_where_the_model_differs() -> None:
    other = few(bf16=True, attention="eager")
    other.model.model.layers[0].self_attn.attention_dropout = 0.25
    sentence = next(each for each in compared(sound(), other).parts if each.factor is Factor.MODEL).cause.sentence
    assert "autocast none in A, bfloat16 in B" in sentence
    assert "dropout 0.0 in A, 0.25 in B" in sentence
    assert "attention sdpa in A, eager in B" in sentence


@pytest.mark.parametrize("is_given", [False, True])
def test_packs_that_cut_conversations_are_the_side_at_fault(is_given: bool) -> None:
    """Without a system prompt, ids do not show where a conversation begins; with the rows, it is found again."""
    rows = [{"messages": [each for each in row["messages"] if each["role"] != "system"]} for row in FEW]
    given = rows if is_given else None
    packs = {"packing": True, "packing_strategy": "wrapped", "max_length": 71}
    a, b = (
        record_trainer(sft(rows, tok("chatml"), per_device_train_batch_size=8, **own), given, "all")
        for own in ({}, packs)
    )
    for found, side in ((difference(a, b), "B"), (difference(b, a), "A")):
        require_sum(found)
        faults = {each.factor: each.cause for each in found.named if each.cause.fault is not None}
        assert faults[Factor.CONTEXT if is_given else Factor.IDS].fault is Fault.CUT_BY_PACKING
        assert {each.fault for each in faults.values()} <= {Fault.CUT_BY_PACKING, Fault.LABELS_CROSS}
        assert {each.side for each in faults.values()} == {side}
        assert (Factor.IDS in faults) is not is_given
        assert is_given or "--conversations" in faults[Factor.IDS].sentence


def test_a_context_that_is_the_same_has_a_part_where_its_tokens_weigh_otherwise() -> None:
    a, b = (few(collator=FlattenWithoutPositions(), **own) for own in ({}, {"trainer": CountsPrompts}))
    found = compared(a, b)
    require_sum(found)
    assert [each.factor for each in found.named] == [Factor.WEIGHTS, Factor.CONTEXT]
    sentence = found.named[1].cause.sentence
    assert sentence.startswith("the same: ")
    assert sentence.endswith("; but B weighs these tokens otherwise than A")


def test_a_loss_that_is_no_sum_of_cross_entropies_has_no_fault_of_weights() -> None:
    found = compared(few(), few(label_smoothing_factor=0.1))
    assert not found.is_explained
    assert all(each.cause.fault is None for each in found.parts)


def test_the_reference_of_a_rounded_model_of_trl_is_in_float32() -> None:
    """TRL puts a forward of its own on the instance, whose copy would compute the original's."""
    found = record_trainer(in_bfloat16(sft(ANSWERS[:4], tok("chatml"), per_device_train_batch_size=1)))
    is_known = found.is_trained & ~np.isnan(found.reference)
    assert np.abs(found.context - found.reference)[is_known].max() < 1e-4
    assert np.abs(found.own - found.context)[is_known].max() > 1e-3


@pytest.mark.parametrize(("strategy", "length"), [("bfd_split", 65), ("wrapped", 66)])
def test_documents_of_the_same_ids_are_one_though_they_have_no_text(strategy: str, length: int) -> None:
    """The end of a conversation that a pack cuts may be a line break alone."""
    packs = {"packing": True, "packing_strategy": strategy, "max_length": length}
    found = record_trainer(sft(FEW, tok("chatml"), per_device_train_batch_size=8, **packs), FEW, "all")
    same = difference(found, found)
    assert same.parts[0].cause.count == 0
    assert "lacks" not in same.parts[0].cause.sentence
    assert not same.named
    assert {each.cause.count for each in same.parts} == {0}


@pytest.mark.parametrize("shared", [True, False])
def test_a_thousand_conversations_are_found_again_in_seconds(shared: bool) -> None:
    """Each text and its second half, with other ids; a system prompt of all makes each pair of them a candidate."""
    letters = np.random.default_rng(0).integers(97, 123, (1000, 200))
    letters[:, :60] = letters[0, :60] if shared else letters[:, :60]
    a, b = (np.stack([sketch_of("".join(map(chr, row[begin:].tolist()))) for row in letters]) for begin in (0, 100))
    begin = time.process_time()
    scored = sorted(_scored(a, b, (), ()))
    assert time.process_time() - begin < 5
    assert [(n, m) for *_, n, m in scored] == [(n, n) for *_, n, _ in scored]
    assert len(scored) == 1000
