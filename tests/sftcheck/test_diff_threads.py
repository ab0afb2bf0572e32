"""Six reports of users, rebuilt small with other words and data: each difference is explained in one line.

a template drops the thoughts of earlier answers     one trainer's evaluation falls, with the same data and model
accumulation as a mean of means                      the loss depends on the number of micro-batches
packing that leaks                                   packing changes the loss, with the same rows
a completion-only collator, prompts and completions  the same option in two releases
truncation from the left                             long conversations lose their beginning
a doubled BOS                                        the template writes one, and the tokenizer another
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from transformers import DataCollatorWithFlattening, Trainer

from sftcheck.diff.difference import RESIDUAL, Part, difference
from sftcheck.diff.parts import Factor
from sftcheck.faults import Fault
from sftcheck.record.recorder import record_trainer
from tests.sftcheck.zoo_materials import (
    ANSWERS,
    CompletionOnly,
    FlattenAndMask,
    Rows,
    SumOfMeans,
    chatml,
    encoded,
    plain,
    sft,
    tok,
)

pytestmark = pytest.mark.usefixtures("quiet")

TURNS = [
    ("Which bus goes to the harbor?", "The harbor is south, and line 4 runs south.", "Take line 4, platform B."),
    ("And back at night?", "After midnight only the night line runs.", "The night line N2, every 30 minutes."),
    ("Is there a ticket for both?", "A day ticket covers both lines.", "Yes, the day ticket, for 6 euros."),
]
THOUGHTFUL: Rows = [
    {"messages": [message for question, thought, answer in TURNS[:number]
                  for message in ({"role": "user", "content": f"{greeting} {question}"},
                                  {"role": "assistant", "content": f"<think>{thought}</think>{answer}"})]}
    for greeting in ("Hello!", "Good evening.") for number in (1, 2, 3)
]  # fmt: skip
CHATML = (
    "{%% for each in messages %%}{{ '<|im_start|>' + each.role + '\n' }}%s{{ '<|im_end|>\n' }}{%% endfor %%}"
    "{%% if add_generation_prompt %%}{{ '<|im_start|>assistant\n' }}{%% endif %%}"
)
KEEPS = CHATML % "{{ each.content }}"
DROPS = CHATML % "{{ each.content if loop.last else each.content.split('</think>')[-1] }}"
LONG = [
    {"messages": [
        {"role": "user", "content": f"Note {n}: " + "the tide turns at noon, " * n + "what turns?"},
        {"role": "assistant", "content": "The tide. " * (1 + n % 3) + "At noon."},
    ]}
    for n in (1, 2, 3, 40, 50)
]  # fmt: skip


def thoughtful(template: str) -> Trainer:
    tokenizer = tok("chatml", template)
    rows = []
    for row in THOUGHTFUL:  # the last answer alone, as a server of one turn needs it
        ids = tokenizer.apply_chat_template(row["messages"], return_dict=False)
        begin = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=False)
        rows.append({"input_ids": ids, "labels": [-100] * len(begin) + ids[len(begin) :]})
    return plain(rows, tokenizer, per_device_train_batch_size=6)


def rows_of(limit: int | None) -> Trainer:
    tokenizer = tok("chatml")
    rows = encoded(tokenizer, LONG)
    rows = [{name: ids[-limit:] if limit else ids for name, ids in row.items()} for row in rows]
    return plain(rows, tokenizer, per_device_train_batch_size=5)


def with_bos(*, is_doubled: bool) -> Trainer:
    tokenizer = tok("llama3")
    rows = []
    for row in encoded(tokenizer, LONG):
        text = tokenizer.decode(row["input_ids"])
        ids = tokenizer(text, add_special_tokens=is_doubled)["input_ids"]
        rows.append({"input_ids": ids, "labels": [-100] * (len(ids) - len(row["input_ids"])) + row["labels"]})
    return plain(rows, tokenizer, per_device_train_batch_size=5)


def accumulated(kind: type[Trainer]) -> Trainer:
    return chatml(encoded(tok("chatml"), LONG), trainer=kind, per_device_train_batch_size=1,
                  gradient_accumulation_steps=5)  # fmt: skip


def of_completions(*, by_collator: bool) -> Trainer:
    tokenizer = tok("chatml")
    rows = [{"messages": each["prompt"] + each["completion"]} for each in ANSWERS]
    if not by_collator:
        return sft(ANSWERS, tokenizer, per_device_train_batch_size=8, completion_only_loss=True)
    ids = [{"input_ids": row["input_ids"]} for row in encoded(tokenizer, rows)]
    return plain(ids, tokenizer, CompletionOnly(tokenizer, "<|im_start|>user\n"), per_device_train_batch_size=8)


@dataclass(frozen=True)
class Thread:
    sound: Callable[[], Trainer]
    broken: Callable[[], Trainer]
    factor: Factor
    fault: Fault
    words: str


THREADS = {
    "thoughts": Thread(lambda: thoughtful(KEEPS), lambda: thoughtful(DROPS), Factor.IDS, Fault.OTHER_FORMAT, "fewer"),
    "accumulation": Thread(
        lambda: accumulated(Trainer), lambda: accumulated(SumOfMeans), Factor.WEIGHTS, Fault.MEAN_OF_MEANS,
        "by their micro-batch",
    ),
    "packing": Thread(
        lambda: chatml(collator=DataCollatorWithFlattening(), per_device_train_batch_size=8),
        lambda: chatml(collator=FlattenAndMask(), per_device_train_batch_size=8),
        Factor.CONTEXT, Fault.MASK_OF_ONES, "beside their neighbors",
    ),
    "completions": Thread(
        lambda: of_completions(by_collator=False), lambda: of_completions(by_collator=True),
        Factor.TRAINED, Fault.PROMPTS_TRAINED, "of the questions",
    ),
    "truncation": Thread(lambda: rows_of(None), lambda: rows_of(200), Factor.IDS, Fault.ROWS_CUT, "at the beginning"),
    "beginning": Thread(
        lambda: with_bos(is_doubled=False), lambda: with_bos(is_doubled=True), Factor.IDS, Fault.DOUBLED_BOS,
        "the same token twice",
    ),
}  # fmt: skip


def explained(thread: Thread) -> Part:
    found = difference(record_trainer(thread.sound()), record_trainer(thread.broken()))
    assert abs(found.residual.value) <= RESIDUAL * abs(found.b.loss)
    assert sum(each.value for each in found.parts) == pytest.approx(found.b.loss - found.a.loss, abs=1e-9)
    assert found.named[0].share > 0.9, found.named
    return found.named[0]


@pytest.mark.parametrize("name", THREADS)
def test_the_report_is_explained_in_one_line(name: str) -> None:
    thread = THREADS[name]
    part = explained(thread)
    assert (part.factor, part.cause.fault, part.cause.side) == (thread.factor, thread.fault, "B")
    assert thread.words in part.cause.sentence
