"""The checks beside TRL 0.29 and transformers 4.57, where the older half of a comparison lives (`make versions-old`).

The other tests need transformers 5, so this file makes its trainers itself. `make test` runs it with the newest
releases.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from packaging.version import Version
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from sftcheck.diff.difference import difference
from sftcheck.diff.parts import Factor
from sftcheck.verify_trainer import RULES
from sftron import record_trainer, verify_trainer
from sftron.report.token_record import read_record

TOKENIZER = Path(__file__).parents[1] / "assets" / "tokenizer"
MESSAGES = [
    {
        "messages": [
            {"role": "user", "content": f"What is {number} plus one?"},
            {"role": "assistant", "content": f"{number} is " + "one more than " * (number % 5) + f"{number}."},
        ]
    }
    for number in range(12)
]
ANSWERS = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in MESSAGES]
COUNTS_FIRST_TOKENS = Version(transformers.__version__) < Version("5.11")
"""Whether num_items_in_batch counts the first token of each row, although no label of it is predicted."""

pytestmark = pytest.mark.filterwarnings("ignore")


def trainer(folder: Path, rows: list[dict[str, Any]], **options: Any) -> SFTTrainer:
    tokens = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(TOKENIZER / "tokenizer.json"),
        **{name: token for name, token in tokens.items() if name.endswith("_token")},
    )
    tokenizer.chat_template = (TOKENIZER / "chat_template.jinja").read_text()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
        **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")},
    )
    arguments = SFTConfig(
        str(folder / "out"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        save_strategy="no",
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SFTTrainer(
            LlamaForCausalLM(config), arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
        )


def test_a_sound_trainer_passes_every_row(tmp_path: Path) -> None:
    report = verify_trainer(trainer(tmp_path, ANSWERS))
    print(report)
    assert report.passed, report.verdict
    assert {row.name: row.status for row in report.checks} == {rule.name: "PASS" for rule in RULES}


BROKEN: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "PROMPTS_TRAINED": (MESSAGES, {}, "trained tokens"),
    "ROWS_CUT": (ANSWERS, {"max_length": 40}, "truncation"),
    "CUT_BY_PACKING": (ANSWERS, {"packing": True, "packing_strategy": "wrapped", "max_length": 64}, "truncation"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_trainer_fails_by_its_fault(fault: str, tmp_path: Path) -> None:
    rows, options, name = BROKEN[fault]
    report = verify_trainer(trainer(tmp_path, rows, **options))
    print(report)
    (row,) = (row for row in report.checks if row.name == name)
    assert row.status == "FAIL"
    assert fault in row.faults
    assert not [row for row in report.checks if row.raised]


def test_two_records_name_what_differs(tmp_path: Path) -> None:
    for name, rows in {"a": ANSWERS, "b": MESSAGES}.items():
        record_trainer(trainer(tmp_path, rows)).write(tmp_path / f"{name}.safetensors")
    records = [read_record(tmp_path / f"{name}.safetensors") for name in "ab"]
    parts = {part.factor: abs(part.value) for part in difference(*records).parts}
    print(parts)
    assert parts[Factor.TRAINED] > 1e-3
    assert max(parts[each] for each in (Factor.ROWS, Factor.IDS, Factor.CONTEXT)) < 1e-6
    assert (parts[Factor.WEIGHTS] > 1e-2) == COUNTS_FIRST_TOKENS
