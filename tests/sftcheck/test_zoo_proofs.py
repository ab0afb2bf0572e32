"""Each set-up of the zoo is broken, or sound, as it claims, measured without sftron; and verify_trainer finds it.

The remedy that it prints is applied, and the row passes.
"""

from pathlib import Path

import pytest

from sftcheck.faults import Fault
from sftron import verify_trainer
from tests.conftest import rest_nightly
from tests.sftcheck.trainer_zoo import ZOO, hush
from tests.sftcheck.zoo_materials import ROWS, SMOLLM2, in_bfloat16, sft, tok
from tests.sftcheck.zoo_remedies import APPLIED

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and transformers, about their own options
NEEDS_SMOLLM2 = pytest.mark.skipif(not SMOLLM2.exists(), reason="needs models/SmolLM2-135M-Instruct (make quickstart)")
FAST = {
    "cache_and_packing": "conversations in one row: others change by",
    "mask_of_ones_and_packing": "conversations in one row: others change by",
    "wrapped_packing": "conversations in one row: others change by",
    "labels_across_borders": "labels cross",
    "left_padding_of_gpt2": "the model computes a conversation differently alone",
    "doubled_bos": "0 of 42 documents have the template's ids",
    "missing_bos": "0 of 42 documents have the template's ids",
    "labels_shifted_twice": "labels are other tokens",
    "everything_after_the_first_prompt": "prompt tokens trained",
    "labels_begin_with_the_line_break": "70 tokens of headers trained",
    "last_answer_alone": "answer tokens not trained",
    "labels_end_before_the_stop": "0 of 70 answers train <|im_end|>",
    "template_without_stop": "answers train no stop token",
    "answers_cut_by_max_length": "answers cut off",
    "mean_of_means": "from the ratio; the weight of a micro-batch is off by",
    "prompts_counted_in_the_denominator": "num_items_in_batch is",
    "loss_without_shift_of_an_untrained_model": "the loss ignores",
    "zeroed_between_micro_batches": "from the gradients of the loss in 2 micro-batches",
    "left_padding_without_mask": "attended: changing it changes others by",
    "trained_padding": "padding tokens trained",
    "new_tokens_never_trained": "control tokens look untrained and are frozen",
    "head_left_out_of_the_optimizer": "trainable tensors are not in the optimizer: 1",
    "base_trained_beside_its_adapter": "trained tensors are not saved with the adapter",
    "stop_of_the_base_model": "generation does not end at <|im_end|>",
    "evaluation_over_prompts": "prompt tokens trained",
    "evaluation_of_messages": "prompt tokens trained",
}
"""The set-ups of make test, one of each fault, with what their row has measured."""
UNSEEN_IN_BFLOAT16 = {"logits_to_keep_is_one_less"}
"""One trained token of each batch is missing: 1.3 % of the loss, of which bfloat16 may round 2 %."""


@NEEDS_SMOLLM2
@pytest.mark.nightly
@pytest.mark.parametrize("name", ZOO)
def test_a_set_up_is_what_it_claims_to_be(name: str) -> None:
    hush()
    assert ZOO[name].why
    assert ZOO[name].proof(ZOO[name].make())


@pytest.mark.parametrize("name", FAST)
def test_verify_trainer_fails_the_row_that_is_wrong_with_what_it_measured(name: str) -> None:
    hush()
    report = verify_trainer(ZOO[name].make(), **ZOO[name].arguments)
    assert not ZOO[name].problem(report)
    (row,) = (row for row in report.checks if row.name == APPLIED[name].row)
    assert FAST[name] in row.measured
    assert APPLIED[name].words in row.remedy
    for each in report.checks:
        assert bool(each.faults) == (each.passed is False), each
        assert all(each.name in Fault[fault].entry.rows for fault in each.faults), each


@NEEDS_SMOLLM2
@pytest.mark.nightly
@pytest.mark.parametrize("name", ZOO)
def test_verify_trainer_fails_the_rows_that_are_wrong_and_no_other(name: str) -> None:
    hush()
    report = verify_trainer(ZOO[name].make(), **ZOO[name].arguments)
    assert not ZOO[name].problem(report)
    assert all(bool(row.remedy) == (row.status == "FAIL") for row in report.checks)
    if name in APPLIED:
        (remedy,) = (row.remedy for row in report.checks if row.name == APPLIED[name].row)
        assert APPLIED[name].words in remedy


@pytest.mark.parametrize(
    "name",
    rest_nightly(
        [name for name, each in ZOO.items() if not each.fails],
        ["lora_of_all_linear_layers", "new_tokens_trained_whole", "mixture_of_experts"],
    ),
)
def test_a_sound_set_up_passes_with_a_model_in_bfloat16(name: str) -> None:
    hush()
    report = verify_trainer(in_bfloat16(ZOO[name].make()), **ZOO[name].arguments)
    assert not ZOO[name].problem(report), [(row.name, row.measured) for row in report.checks if row.status == "FAIL"]
    (row,) = (row for row in report.checks if row.name == "loss")
    assert row.status == "PASS", row.measured


@NEEDS_SMOLLM2
@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, each in ZOO.items() if each.fails])
def test_verify_trainer_fails_a_broken_set_up_with_a_model_in_bfloat16(name: str) -> None:
    hush()
    report = verify_trainer(in_bfloat16(ZOO[name].make()), **ZOO[name].arguments)
    assert not any(row.raised for row in report.checks), [(row.name, row.measured) for row in report.checks]
    assert report.passed == (name in UNSEEN_IN_BFLOAT16)


@NEEDS_SMOLLM2
@pytest.mark.nightly
@pytest.mark.parametrize("name", APPLIED)
def test_a_set_up_with_the_remedy_that_is_printed_for_it_passes_the_row(name: str) -> None:
    hush()
    arguments = dict(ZOO[name].arguments)
    if APPLIED[name].conversations is not None:
        arguments["conversations"] = APPLIED[name].conversations
    report = verify_trainer(APPLIED[name].make(), **arguments)
    (row,) = (row for row in report.checks if row.name == APPLIED[name].row)
    assert row.status == "PASS", row.measured


@NEEDS_SMOLLM2
@pytest.mark.nightly
def test_trl_marks_no_answers_of_smollm2_and_both_ways_that_the_remedy_names_do(tmp_path: Path) -> None:
    hush()
    with pytest.raises(ValueError, match="patching is not supported for this template"):
        sft(ROWS, tok(), assistant_only_loss=True)
    pairs = [
        {"prompt": row["messages"][:n], "completion": [message]}
        for row in ROWS
        for n, message in enumerate(row["messages"])
        if message["role"] == "assistant"
    ]
    header, text, end = "'<|im_start|>' + message['role'] + '\n'", "message['content'] + '<|im_end|>'", "'\n'"
    template, written = str(tok().chat_template), f"{{{{{header} + {text} + {end}}}}}"
    assert template.count(written) == 1
    answer = f"{{% generation %}}{{{{{text}}}}}{{% endgeneration %}}"
    either = f"{{% if message['role'] == 'assistant' %}}{answer}{{% else %}}{{{{{text}}}}}{{% endif %}}"
    marked = template.replace(written, f"{{{{{header}}}}}{either}{{{{{end}}}}}")
    (tmp_path / "marked.jinja").write_text(marked)
    options = {"assistant_only_loss": True, "chat_template_path": str(tmp_path / "marked.jinja")}
    for trainer, num_rows in ((sft(pairs), len(pairs)), (sft(ROWS, **options), len(ROWS))):
        report = verify_trainer(trainer)
        assert report.passed, [(row.name, row.measured) for row in report.checks if row.status != "PASS"]
        assert f"{num_rows} of {num_rows} documents" in report.checks[0].measured


def test_every_broken_set_up_has_its_remedy_applied() -> None:
    assert set(APPLIED) == {name for name, each in ZOO.items() if each.fails}
