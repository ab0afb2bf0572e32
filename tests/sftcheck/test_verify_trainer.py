"""verify_trainer: finds what is silently wrong in trainers of TRL and transformers, and leaves them as they were."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, Trainer
from trl import SFTTrainer

from sftcheck.verify_trainer import RULES
from sftron import verify_trainer
from sftron.checks.presentation import page_of
from sftron.commands.verify_trainer import main, read_conversations
from tests.conftest import ROOT, rest_nightly
from tests.sftcheck.small_trainers import ALWAYS_FAILED, ANSWERS, ROWS, failed, plain, row_of, sft, tiny

NAMES = "ids, trained tokens, stop tokens, isolation, positions, truncation, loss, gradients, padding, forgery"
NAMES += ", adapters, generation"
MARKED = (ROOT / "tests/assets/templates/with_generation_marks.jinja").read_text(encoding="utf-8")
pytestmark = [pytest.mark.filterwarnings("ignore::"), pytest.mark.usefixtures("quiet")]


def test_a_sound_trainer_passes_in_every_row(own: Any, tmp_path: Path) -> None:
    report = verify_trainer(sft(own, tmp_path, ANSWERS))
    assert ", ".join(row.name for row in report.checks) == NAMES
    assert [row.status for row in report.checks] == ["PASS"] * len(RULES), [row.measured for row in report.checks]
    assert report.passed
    assert "24 from the data set's rows" in report.facts["truth"]
    assert "12 checks passed" in page_of(report)


def test_packs_whose_messages_are_gone_are_recovered_from_their_ids(own: Any, tmp_path: Path) -> None:
    own.chat_template = MARKED
    report = verify_trainer(sft(own, tmp_path, ROWS, packing=True, max_length=128, assistant_only_loss=True))
    assert not failed(report)
    assert report.passed
    assert "24 recovered from ids" in report.facts["truth"]
    assert "in one row: others change by 0" in row_of(report, "isolation").measured


def wrapped(own: Any, folder: Path) -> Trainer:
    return sft(own, folder, ANSWERS, packing=True, packing_strategy="wrapped", max_length=100)


def test_conversations_show_the_bounds_that_ids_do_not(own: Any, tmp_path: Path) -> None:
    trainer = wrapped(own, tmp_path)
    assert row_of(verify_trainer(trainer), "isolation").status == "SKIP"
    report = verify_trainer(trainer, [row["messages"] for row in ROWS])
    assert "from conversations=" in report.facts["truth"]
    assert {"isolation", "positions", "truncation"} <= set(failed(report))


def test_a_conversation_that_is_in_no_batch_is_a_row_that_was_dropped(own: Any, tmp_path: Path) -> None:
    asked = {"role": "user", "content": "A question that no batch holds, long as it is?"}
    given = [*(row["messages"] for row in ROWS), [asked, {"role": "assistant", "content": "It was dropped."}]]
    report = verify_trainer(sft(own, tmp_path, ANSWERS), given)
    assert "1 conversations are in no batch" in row_of(report, "truncation").measured


def losses_and_weights(trainer: Trainer) -> tuple[list[float], list[torch.Tensor]]:
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, [each.detach().clone() for each in trainer.model.parameters()]


@pytest.mark.parametrize("is_adapter", rest_nightly([False, True], [True]))
def test_a_run_after_it_has_the_bits_of_a_run_without_it(own: Any, tmp_path: Path, is_adapter: bool) -> None:
    def make() -> SFTTrainer:
        model = tiny(own, attention_dropout=0.1)
        if is_adapter:
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(0)
            model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear"))
        options = {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "logging_strategy": "steps"}
        return sft(own, tmp_path, ANSWERS, model, **options)

    expected, weights = losses_and_weights(make())
    trainer = make()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    attributes = dict(vars(trainer))
    verify_trainer(trainer)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert {name: id(each) for name, each in vars(trainer).items()} == {n: id(each) for n, each in attributes.items()}
    found, after = losses_and_weights(trainer)
    assert found == expected
    assert len(found) == 3
    assert all(a.equal(b) for a, b in zip(weights, after, strict=True))

    # The same when it is called between two runs, where an optimizer exists.
    again, weights = losses_and_weights(trainer)
    other = make()
    losses_and_weights(other)
    verify_trainer(other)
    found, after = losses_and_weights(other)
    assert found == again
    assert all(a.equal(b) for a, b in zip(weights, after, strict=True))


class Drawing(DataCollatorForSeq2Seq):
    """A collator with a generator inside an object of its own."""

    def __call__(self, features: Any, return_tensors: Any = None) -> Any:
        self.inner.generator.random()
        self.drawn.append(1)
        return super().__call__(features)


def test_generators_within_a_collator_do_not_advance(own: Any, tmp_path: Path) -> None:
    collator = Drawing(own)
    collator.inner, collator.drawn = SimpleNamespace(generator=np.random.default_rng(0)), []
    assert verify_trainer(plain(own, tmp_path, collator=collator)).passed
    assert collator.inner.generator.random() == np.random.default_rng(0).random()
    assert not collator.drawn


def test_rows_that_mix_do_not_pass_for_rounding(own: Any, tmp_path: Path) -> None:
    trainer = plain(own, tmp_path)
    hook = trainer.model.model.norm.register_forward_hook(lambda _module, _inputs, x: x - x.mean((0, 1), keepdim=True))
    try:
        assert "isolation" in failed(verify_trainer(trainer))
    finally:
        hook.remove()


def test_a_part_of_the_rows_that_cannot_be_read_is_not_passed(own: Any, tmp_path: Path) -> None:
    trainer = plain(own, tmp_path)
    features = list(trainer.train_dataset)
    for feature in features[::6]:
        feature["input_ids"] = own("### Question: What is it?\n### Answer: It is a number, as all of these are.")[
            "input_ids"
        ]
        feature["labels"] = list(feature["input_ids"])
    trainer.train_dataset = Dataset.from_list([{n: row[n] for n in ("input_ids", "labels")} for row in features])
    report = verify_trainer(trainer)
    assert row_of(report, "ids").status == "SKIP"
    assert "4 not recovered" in row_of(report, "ids").measured
    assert not report.passed


def test_what_cannot_be_checked_is_refused_with_its_remedy(own: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"found str; wanted a transformers\.Trainer"):
        verify_trainer("a trainer")
    trainer = plain(own, tmp_path)
    with pytest.raises(ValueError, match="trained_roles is 'user'"):
        verify_trainer(trainer, trained_roles="user")
    trainer.processing_class, trainer.data_collator = None, transformers.default_data_collator
    with pytest.raises(ValueError, match="no tokenizer; pass it as processing_class"):
        verify_trainer(trainer)
    trainer.train_dataset = Dataset.from_list(ROWS).to_iterable_dataset()
    with pytest.raises(ValueError, match="a streaming data set"):
        verify_trainer(trainer)


def test_text_without_roles_is_not_passed_unless_everything_is_meant(own: Any, tmp_path: Path) -> None:
    trainer = sft(
        own, tmp_path, [{"text": f"Once there were {number} birds." * (1 + number % 3)} for number in range(24)]
    )
    report = verify_trainer(trainer)
    assert failed(report) == ALWAYS_FAILED
    assert not report.passed
    assert row_of(report, "trained tokens").status == "SKIP"
    assert row_of(verify_trainer(trainer, trained_roles="all"), "trained tokens").status == "PASS"


SCRIPT = """
from pathlib import Path
from tests.sftcheck.small_trainers import ANSWERS, ROWS, sft
from transformers import AutoTokenizer

def of(rows):
    return sft(AutoTokenizer.from_pretrained({folder!r}), Path({out!r}), rows)

def sound():
    return of(ANSWERS)

def broken():
    return of(ROWS)
"""


def test_the_command_exits_with_0_1_or_2_and_writes_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "a_script.py"
    script.write_text(SCRIPT.format(folder=str(ROOT / "tests/assets/tokenizer"), out=str(tmp_path)), encoding="utf-8")
    report, page = tmp_path / "report.json", tmp_path / "page.html"
    assert main([f"{script}:sound"]) == 0
    assert main([f"{script}:broken", "--json", str(report), "--html", str(page)]) == 1
    assert "FAIL  trained tokens" in capsys.readouterr().out
    read = json.loads(report.read_text(encoding="utf-8"))
    assert [check["name"] for check in read["checks"] if check["status"] == "fail"] == [
        "trained tokens",
        *ALWAYS_FAILED,
    ]
    assert not read["passed"]
    assert "assistant_only_loss=True" in page.read_text(encoding="utf-8")
    assert main([f"{script}:broken", "--trained-roles", "all"]) == len(ALWAYS_FAILED)
    assert main([f"{script}:missing"]) == 2
    assert "has no function missing" in capsys.readouterr().err
    (tmp_path / "faq.csv").write_text("question,answer\n")
    for target in ("faq.csv", f"{tmp_path}/faq.csv", f"{tmp_path}/faq.csv:make"):
        assert main([target]) == 2
        assert "wanted SCRIPT.py:FUNCTION, a Python file and its function that returns" in capsys.readouterr().err


COLLATOR = """from pathlib import Path
from tests.sftcheck.small_trainers import DataCollatorForSeq2Seq, plain
class Wrong(DataCollatorForSeq2Seq):
    def __call__(self, features, return_tensors=None):
        return features[0]["label"]
def made():
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained({folder!r})
    return plain(tokenizer, Path("/tmp"), collator=Wrong(tokenizer))
""".format(folder=str(ROOT / "tests/assets/tokenizer"))


def test_a_script_that_fails_and_a_bad_line_are_refused_in_one_line_that_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, rows = tmp_path / "failing.py", tmp_path / "rows.jsonl"
    for text, words in (
        ("import absent_package\n", f"{script}:1, in <module>: ModuleNotFoundError: No module named 'absent_package'"),
        ("def made():\n    return {}['a\\nb']\n", f"{script}:2, in made: KeyError: 'a\\nb'"),
        ("def made():\n    raise RuntimeError('a\\nb')\n", f"{script}:2, in made: RuntimeError: a b"),
        ("def made():\n    raise MemoryError\n", f"{script}:2, in made: MemoryError"),
        (
            "import sys\n\ndef made():\n    sys.exit(0)\n",
            f"{script}:4, in made: SystemExit: 0; return the trainer, and exit only under if __name__ == '__main__'",
        ),
        ("raise SystemExit(0)\n", f"{script}:1, in <module>: SystemExit: 0; return the trainer, and exit only under"),
        ("class Stop(BaseException):\n    pass\n\ndef made():\n    raise Stop\n", f"{script}:5, in made: Stop"),
        ("def made(model):\n    return model\n", f"{script}:made: missing a required argument: 'model'; give"),
        ("def made(:\n", f"{script}:1: SyntaxError: invalid syntax (failing.py, line 1)"),
        (
            "import transformers\ndef made():\n    transformers.AutoTokenizer.from_pretrained('/no/such')\n",
            f"{script}:3, in made: OSError: ",
        ),
        (COLLATOR, f"the trainer cannot make its batches: {script}:5, in __call__: KeyError: 'label'"),
    ):
        script.write_text(text)
        assert main([f"{script}:made"]) == 2
        err = capsys.readouterr().err
        assert err.startswith(words)
        assert err.count("\n") == 1
    for bad in (b"{'a': 1}", b"\xff"):
        rows.write_bytes('{"a": "\u2028"}\r\n\n'.encode() + bad + b"\n")
        assert main([f"{script}:made", "--conversations", str(rows)]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"{rows}:3: ")
        assert err.count("\n") == 1
    rows.write_text('{"a": "\u2028"}\r\n\n{"a": 2}', encoding="utf-8")
    assert read_conversations(rows) == [{"a": "\u2028"}, {"a": 2}]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("options", [{}, {"padding_free": True, "max_length": None}])
def test_a_trainer_of_trl_over_the_rows_of_a_packed_data_set_is_sound(
    own: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    from sftron import ChatTokenizer, PackedDataset

    packed = PackedDataset.from_rows(ROWS, ChatTokenizer(own), sequence_length=256, num_lanes=1)
    trainer = sft(own, tmp_path, packed.to_hf().to_list(), **options)
    report = verify_trainer(trainer, ROWS)
    assert failed(report) == ALWAYS_FAILED, report.as_dict()
