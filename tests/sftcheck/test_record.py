"""A record holds what a step trains, and recording leaves the trainer as it was."""

import functools
import hashlib
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutputWithPast

from sftcheck.diff.difference import difference
from sftcheck.record.recorder import record_step, record_trainer
from sftron.commands.diff import main
from sftron.report.token_record import RecordError, TokenRecord, prefix_digests, read_record, sketch_of
from tests.conftest import ROOT
from tests.sftcheck.diff_pairs import CASES, FEW, few, with_fused_head
from tests.sftcheck.zoo_materials import ANSWERS, SumOfMeans, encoded, in_bfloat16, model, sft, tok
from tests.sftcheck.zoo_training import Clips, DividesAgain, KeepsLogits

pytestmark = pytest.mark.usefixtures("quiet")


def halves(**given: Any) -> Trainer:
    """Eight conversations in two steps."""
    return few(per_device_train_batch_size=2, **given)


def by_probability(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Weighs each token by its own probability."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return (losses * torch.exp(-losses).detach()).sum() / num_items_in_batch


TRAINERS: dict[str, Callable[[], Trainer]] = {
    "transformers": halves,
    "TRL": lambda: sft(ANSWERS, tok("chatml")),
    "TRL, own weights": lambda: sft(ANSWERS, tok("chatml"), loss_type="dft", gradient_accumulation_steps=2),
    "own weights": lambda: halves(compute_loss_func=by_probability),
    "logits of the last tokens": lambda: halves(trainer=KeepsLogits),
    "logits of chosen tokens": lambda: few(trainer=KeepsLogits, per_device_train_batch_size=1),
    "mean of means": lambda: halves(trainer=SumOfMeans),
    "experts": lambda: sft(ANSWERS, tok("chatml"), kind="qwen3_moe", router_aux_loss_coef=0.01),
    "scaled logits": lambda: halves(their_model=model(tok("chatml"), "granite", logits_scaling=8.0)),
    "bounded logits": lambda: halves(kind="gemma2", attention="eager"),
    "half the gradient": lambda: halves(trainer=DividesAgain),
    "fused head": lambda: with_fused_head(halves(gradient_checkpointing=True)),
    "fused head, scaled logits": lambda: with_fused_head(
        halves(their_model=model(tok("chatml"), "granite", logits_scaling=8.0))
    ),
    "fused head, bounded logits": lambda: with_fused_head(halves(kind="gemma2", attention="eager")),
    "fused head, bfloat16": lambda: with_fused_head(in_bfloat16(halves())),
    "fused head, products in bfloat16": lambda: with_fused_head(in_bfloat16(halves()), in_float32=False),
    "fused head, autocast": lambda: with_fused_head(halves(bf16=True)),
    "fused head, adapters": lambda: with_fused_head(
        halves(their_model=get_peft_model(model(tok("chatml")), LoraConfig(target_modules="all-linear")), bf16=True)
    ),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_the_weights_times_the_losses_are_the_loss_of_each_step(name: str) -> None:
    found = record_trainer(TRAINERS[name](), steps=2)
    sums = np.bincount(found.step, -found.weight * found.own, minlength=found.num_steps)
    is_rounded = name.endswith("products in bfloat16")  # a loss of rounded logits, which nothing shows
    assert sums == pytest.approx(found.facts["losses"], rel=1e-5 if is_rounded else 1e-6)
    assert (found.weight != 0).tolist() == (found.target != -100).tolist()
    assert found.num_steps == 2
    assert found.facts["gradient_of_loss"] == pytest.approx(0.5 if name == "half the gradient" else 1.0, rel=1e-5)


def test_a_fused_head_that_computes_no_cross_entropy_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"the loss is no cross-entropy of the call's labels; switch off what fuses"):
        record_trainer(with_fused_head(few(), shift=0))
    with pytest.raises(ValueError, match=r"without its labels, the model raises \w+Error: .*; switch off what fuses"):
        record_trainer(with_fused_head(few(), needs_labels=True))
    hidden = with_fused_head(few())
    hidden.model.get_decoder = lambda: None
    with pytest.raises(ValueError, match=r"no module of the model gives logits.*; switch off what fuses"):
        record_trainer(hidden)


def test_label_smoothing_of_a_fused_head_is_a_residual_as_of_one_with_logits() -> None:
    assert not difference(record_trainer(few()), record_trainer(with_fused_head(few(), smoothing=0.1))).is_explained


@pytest.mark.parametrize("name", ["mean of means", "all tokens counted", "stops masked", "padding trained"])
def test_a_fault_of_a_fused_head_is_read_as_of_one_with_logits(name: str) -> None:
    fused, plain = (record_trainer(make(CASES[name].broken())) for make in (with_fused_head, lambda trainer: trainer))
    assert not difference(fused, plain).named
    assert [each.factor for each in difference(record_trainer(few()), fused).named] == [CASES[name].factor]


def test_recording_changes_no_bit_of_the_training() -> None:
    def weights(is_recorded: bool) -> dict[str, torch.Tensor]:
        trainer = sft(ANSWERS, tok("chatml"), gradient_accumulation_steps=2, kind="gpt2")
        if is_recorded:
            record_trainer(trainer, steps=2)
        trainer.train()
        return trainer.model.state_dict()

    plain, recorded = weights(False), weights(True)
    assert all(torch.equal(each, recorded[name]) for name, each in plain.items())


def test_a_record_computes_the_decoder_for_the_step_for_its_context_and_for_each_conversation() -> None:
    trainer, calls = few(), list[int]()
    layer = trainer.model.model.layers[0]
    hook = layer.register_forward_hook(lambda _module, _inputs, output: calls.append(len(output)))
    found = record_trainer(trainer)
    hook.remove()
    assert len(found.sketches) == 8
    assert sorted(calls) == [1] * 8 + [4] * 4  # two micro-batches of four rows


def test_a_record_takes_less_than_twice_the_operations_of_a_step() -> None:
    trainer = few()
    with FlopCounterMode(display=False) as of_step:
        batches, number = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 2, trainer.args.device)
        for batch in batches:
            trainer.training_step(trainer.model, batch, number)
    trainer.model.zero_grad()
    with FlopCounterMode(display=False) as of_record:
        record_trainer(trainer)
    ratio = of_record.get_total_flops() / of_step.get_total_flops()
    print(f"{ratio:.2f}")
    assert 1 < ratio < 2


def test_the_gradient_of_another_size_is_a_fact_and_no_weight() -> None:
    found = record_trainer(few(trainer=DividesAgain))
    assert found.facts["gradient_of_loss"] == pytest.approx(0.5, rel=1e-5)
    assert found.weight.sum() == pytest.approx(1.0, rel=1e-5)
    assert record_trainer(few(trainer=Clips)).facts["gradient"]["apart"] > 0.1
    assert record_trainer(few()).facts["gradient"]["apart"] < 1e-6


def test_the_reference_has_no_dropout() -> None:
    found = record_trainer(few(kind="gpt2"))
    trained = found.is_trained
    assert np.abs(found.context - found.reference)[trained].max() < 1e-4
    assert np.abs(found.own - found.context)[trained].max() > 1e-2


def test_a_loop_is_recorded_as_the_trainer_is() -> None:
    trainer = few()
    features, model = encoded(tok("chatml"), FEW), trainer.model

    def step(batches: list[Any]) -> torch.Tensor:
        total = sum(sum(label != -100 for label in row["labels"]) for row in batches)
        losses = []
        for row in batches:
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
            logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
            losses.append(torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / total)
        sum(losses).backward()
        return sum(losses)

    found = record_step(model, features, step, tok("chatml"), num_micro_batches=8)
    expected = record_trainer(trainer)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert np.sort(found.sketches, axis=0).tolist() == np.sort(expected.sketches, axis=0).tolist()
    assert found.weight.sum() == pytest.approx(1.0, rel=1e-6)
    assert "optimizer" not in found.facts

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def stepping(batches: list[Any]) -> torch.Tensor:
        loss = step(batches)
        optimizer.step()
        return loss

    norm = np.sqrt(sum(each**2 for each in found.facts["gradient_norms"].values()))
    before = [each.detach().clone() for each in model.parameters()]
    for one, given in ((stepping, None), (stepping, optimizer), (step, optimizer)):
        found = record_step(model, features, one, tok("chatml"), num_micro_batches=8, optimizer=given)
        assert found.facts["update"]["norm"] == pytest.approx(0.5 * norm, rel=1e-4)
        assert found.facts["optimizer"]["name"] == "SGD"
    assert all(map(torch.equal, before, model.parameters()))


def test_a_loop_whose_model_returns_its_loss_alone_is_recorded_unless_it_changes_the_weights() -> None:
    trainer = with_fused_head(few())
    model, optimizer = trainer.model, torch.optim.SGD(trainer.model.parameters(), lr=0.5)

    def step(batches: list[Any]) -> torch.Tensor:
        total = sum(sum(label != -100 for label in row["labels"]) for row in batches)
        rows = [{name: torch.tensor([ids]) for name, ids in row.items()} for row in batches]
        return sum(model(**row, num_items_in_batch=total).loss for row in rows)

    def unnamed(batches: list[Any]) -> torch.Tensor:
        return sum(model(*(torch.tensor([row[name]]) for name in ("input_ids", "labels"))).loss for row in batches)

    def stepping(batches: list[Any]) -> torch.Tensor:
        loss = step(batches)
        loss.backward()
        optimizer.step()
        return loss

    rows, own = encoded(tok("chatml"), FEW), {"num_micro_batches": 8}
    assert not difference(record_step(model, rows, step, tok("chatml"), **own), record_trainer(few())).named
    for refused, words in (
        (stepping, "changes the weights of the head"),
        (unnamed, "gives no logits without its labels"),
    ):
        with pytest.raises(ValueError, match=rf"{words}.*; switch off what fuses"):
            record_step(model, rows, refused, tok("chatml"), **own)


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("record") / "a.safetensors"
    record_trainer(few()).write(path)
    return path


def test_a_file_is_read_as_it_was_written(written: Path, tmp_path: Path) -> None:
    found = read_record(str(written))
    found.write(tmp_path / "b.safetensors")
    assert (tmp_path / "b.safetensors").read_bytes() == written.read_bytes()
    assert len(written.read_bytes()) < 2000 * len(found.id)
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = safetensors.load_file(written)
    assert all(np.array_equal(arrays[name], array, equal_nan=True) for name, array in found.tokens.items())


def test_a_record_of_a_hundred_thousand_tokens_is_far_below_200_mb(written: Path, tmp_path: Path) -> None:
    """Also with a conversation for every 20 tokens, the norms of 2,000 tensors, and the text of 20,000 ids."""
    few, size, length = read_record(written), 100_000, 20
    tokens = {name: np.resize(array, size) for name, array in few.tokens.items()}
    tokens["document"] = np.arange(size, dtype=tokens["document"].dtype) // length
    norms = {f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_A.default.weight": 1 / 3 for n in range(2000)}
    facts = few.facts | {"texts": {str(n): "x" * 12 for n in range(20_000)}}
    facts |= {"gradient_norms": norms, "weight_norms": norms}
    found = TokenRecord(tokens, np.resize(few.sketches, (size // length, few.sketches.shape[1])), facts)
    found.write(tmp_path / "large.safetensors")
    assert len(read_record(tmp_path / "large.safetensors").id) == size
    assert (tmp_path / "large.safetensors").stat().st_size < 20_000_000


def test_a_cut_file_is_refused_by_name(written: Path, tmp_path: Path) -> None:
    data, path = written.read_bytes(), tmp_path / "cut.safetensors"
    for size in (0, 7, 8, 200, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(RecordError, match=r"cut\.safetensors: .*\bcut\b"):
            read_record(path)


def test_a_changed_byte_is_refused_wherever_it_is(written: Path, tmp_path: Path) -> None:
    data, path = written.read_bytes(), tmp_path / "changed.safetensors"
    (size,) = struct.unpack("<Q", data[:8])
    blank = len(data[: 8 + size].rstrip(b" "))
    places = np.random.default_rng(0).choice(len(data), 200, replace=False)
    for place in (*range(0, 300, 7), *places.tolist(), len(data) - 1):
        if blank <= place < 8 + size:
            continue  # the padding of the header
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(RecordError, match=r"changed\.safetensors: .*; record it again"):
            read_record(path)


DAMAGES: dict[str, tuple[Callable[[TokenRecord], dict[str, Any]], str]] = {
    "no losses": (lambda _: {"losses": None}, "losses are None"),
    "empty losses": (lambda _: {"losses": []}, r"losses are \[\]"),
    "losses of text": (lambda _: {"losses": "ab"}, "losses are 'ab'"),
    "a loss that is no number": (lambda _: {"losses": [float("nan")]}, r"losses are \[nan\]"),
    "norms as a list": (lambda _: {"gradient_norms": [1.0]}, "gradient_norms"),
    "a norm of text": (lambda _: {"weight_norms": {"head": "x"}}, "weight_norms of head"),
    "half an update": (lambda _: {"update": {"norm": 1.0}}, "without_decay"),
    "an optimizer of text": (lambda _: {"optimizer": "AdamW"}, "optimizer is 'AdamW'"),
    "groups of numbers": (lambda _: {"optimizer": {"groups": [3]}}, "groups"),
    "versions that are none": (lambda _: {"versions": None}, "versions"),
    "a factor that is none": (lambda _: {"gradient_of_loss": None}, "gradient_of_loss"),
    "a weight that is no number": (lambda found: {"weight": found.weight * np.nan}, "weight .* not finite"),
    "an infinite context": (lambda found: {"context": found.context + np.inf}, "context .* not finite"),
    "a column": (lambda found: {"id": found.id[:, None]}, r"\(.*,.*\)"),
    "a shorter array": (lambda found: {"own": found.own[1:]}, "array own has the shape"),
    "no tokens": (lambda found: {name: each[:0] for name, each in found.tokens.items()}, "0 tokens"),
    "a step too many": (lambda found: {"step": found.step + 1}, "step has 1 to 1; wanted 0 to 0"),
    "a step before the first": (lambda found: {"step": found.step - 1}, "step has -1"),
    "a document too many": (lambda found: {"document": found.document + 1}, "document"),
    "a document before the first": (lambda found: {"document": found.document - 9}, "document has -9"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_record_of_another_form_is_refused_with_the_remedy(
    name: str, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, words = DAMAGES[name]
    found, path = read_record(written), tmp_path / "crafted.safetensors"
    changed = change(found)
    tokens = {key: changed.pop(key, array) for key, array in found.tokens.items()}
    TokenRecord(tokens, found.sketches, {**found.facts, **changed}).write(path)
    with pytest.raises(RecordError, match=rf"crafted\.safetensors: .*{words}.*; record it again"):
        read_record(path)
    assert main([str(written), str(path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_foreign_file_is_refused_by_name(tmp_path: Path) -> None:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    for number, data in enumerate((b"{}", b"PK\x03\x04" * 20, struct.pack("<Q", len(header)) + header + b"\0" * 4)):
        path = tmp_path / f"foreign{number}.safetensors"
        path.write_bytes(data)
        with pytest.raises(RecordError, match=f"foreign{number}"):
            read_record(path)


def test_a_file_of_another_release_is_refused_with_both_formats(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "later.safetensors"
    path.write_bytes(written.read_bytes().replace(b"sftron-record/1", b"sftron-record/2"))
    with pytest.raises(RecordError, match=r"later.*'sftron-record/2'; wanted 'sftron-record/1'"):
        read_record(path)


def test_a_record_holds_no_text_unless_it_is_asked_for(written: Path, tmp_path: Path) -> None:
    word = "Fernwick"
    assert any(word in message["content"] for row in FEW for message in row["messages"])
    assert word.encode() not in written.read_bytes()
    assert not read_record(written).facts["texts"]
    found = record_trainer(few(), with_text=True)
    assert "".join(found.facts["texts"][str(n)] for n in found.id[found.document == 0])


# -- hashes ------------------------------------------------------------------------------------------------------------


def test_a_sketch_is_the_same_for_other_spaces_and_has_much_of_the_whole_for_a_part() -> None:
    text = " ".join(hashlib.sha256(str(n).encode()).hexdigest() for n in range(40))
    whole = sketch_of(text)
    assert np.array_equal(whole, sketch_of("\n" + text.replace(" ", "  ")))
    for part in (text[: len(text) // 2], text[len(text) // 2 :]):
        shared = len(set(whole.tolist()) & set(sketch_of(part).tolist()))
        assert shared >= 8
    assert not set(whole.tolist()) & set(sketch_of(text[::-1]).tolist())


def test_a_digest_depends_on_the_ids_since_the_start_their_order_and_nothing_else() -> None:
    ids = np.array([5, 6, 7, 5, 6, 7])
    starts = np.array([0, 0, 0, 3, 3, 3])
    found = prefix_digests(ids, starts)
    assert found[:3].tolist() == found[3:].tolist()
    assert len(set(found.tolist())) == 3
    assert prefix_digests(ids[[1, 0, 2]], starts[:3])[2] != found[2]
    hidden = prefix_digests(
        np.array([9, 9, 5, 6, 7]), np.zeros(5, dtype=int), np.array([False, False, True, True, True])
    )
    assert hidden[2:].tolist() == found[:3].tolist()


# -- the command -------------------------------------------------------------------------------------------------------

SCRIPT = """
from tests.sftcheck.diff_pairs import few, features, train_everything

def sound():
    return few()

def broken():
    return few(features(train_everything))
"""


def test_the_command_records_and_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, a, b = tmp_path / "diffed_script.py", tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    script.write_text(SCRIPT)
    assert main(["record", f"{script}:sound", "--out", str(a), "--with-text"]) == 0
    assert main(["record", f"{script}:broken", "--out", str(b), "--with-text"]) == 0
    assert "tokens" in capsys.readouterr().out
    assert main([str(a), str(b), "--json", str(tmp_path / "found.json")]) == 0
    shown = capsys.readouterr().out
    assert "of the questions" in shown
    assert "The loss trains the prompts." in shown
    assert "⟦" in shown
    found = json.loads((tmp_path / "found.json").read_text())
    named = [each for each in found["parts"] if not each["equal"]]
    assert [(each["factor"], each["fault"], each["side"]) for each in named] == [
        ("trained tokens", "PROMPTS_TRAINED", "B")
    ]
    # The half that compares needs numpy alone.
    program = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'safetensors', 'trl', 'datasets', 'rich'):\n"
        "    sys.modules[name] = None\n"
        f"from sftron.__main__ import main\nsys.exit(main(['diff', {str(a)!r}, {str(b)!r}]))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, shown), ended.stderr


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, marker = tmp_path / "marking_script.py", tmp_path / "called"
    script.write_text(f"import pathlib\n\ndef make():\n    pathlib.Path({str(marker)!r}).touch()\n")
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "folder", script / "a.safetensors", Path("/proc/none/a.safetensors")):
        assert main(["record", f"{script}:make", "--out", str(place)]) == 2
        assert f"{place} cannot be written" in capsys.readouterr().err
    monkeypatch.setattr("os.access", lambda *_: False)
    assert main(["record", f"{script}:make", "--out", str(tmp_path / "a.safetensors")]) == 2
    assert "cannot be written: Permission denied; choose another place with --out" in capsys.readouterr().err
    assert not marker.exists()


def test_a_residual_is_a_line_and_an_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    record_trainer(few()).write(a)
    record_trainer(few(label_smoothing_factor=0.1)).write(b)
    assert main([str(a), str(b)]) == 1
    assert "unexplained: " in capsys.readouterr().out
    assert main([str(a), str(tmp_path / "missing.safetensors")]) == 2
    assert "missing.safetensors" in capsys.readouterr().err


def test_what_cannot_be_recorded_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"wanted a transformers\.Trainer"):
        record_trainer(torch.nn.Linear(2, 2))
    with_nan, without_log_probs = few(), sft(ANSWERS, tok("chatml"))
    with torch.no_grad():
        with_nan.model.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(ValueError, match=r"the loss of step 1 is nan; look for NaN or infinity in the model's weights"):
        record_trainer(with_nan)
    own = without_log_probs.model.forward
    without_log_probs.model.forward = functools.wraps(own)(
        lambda **given: CausalLMOutputWithPast(loss=own(**given).loss)
    )
    with pytest.raises(ValueError, match=r"the step raises AttributeError: .*log_probs.* \(.*sft_trainer\.py:\d+, in"):
        record_trainer(without_log_probs)


def test_a_step_that_trains_nothing_has_the_loss_0() -> None:
    found = record_trainer(few([{**row, "labels": [-100] * len(row["labels"])} for row in encoded(tok("chatml"), FEW)]))
    assert found.facts["losses"] == [0.0]
    assert not found.is_trained.any()


def test_the_report_does_not_overwrite_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.safetensors"
    record_trainer(few()).write(str(file))
    before = file.read_bytes()
    with pytest.raises(SystemExit):
        main([str(file), str(file), "--json", str(file)])
    assert "is a record that is compared; name another file" in capsys.readouterr().err
    assert file.read_bytes() == before
    assert main([str(file), str(file), "--json", str(tmp_path / "parts.json")]) == 0
