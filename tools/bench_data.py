"""Times how fast rows become packed tensors, against the tokenizer alone and apply_chat_template.

    python tools/bench_data.py --tokenizer FOLDER [FOLDER ...] --data gsm8k_train.jsonl

Three kinds of rows are made from the conversations of the file: the rows as they are, short instructions, and eight
rows in one conversation. Everything runs on one core, by turns. The exit status is 0 if every way gives the same
number of tokens, 1 if one does not, and 2 if the data or a tokenizer cannot be used.
"""

import os

# The libraries below read these variables at import.
os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

# Makes sftron and tools importable without an installation.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from transformers import AutoTokenizer

from sftron import ChatTokenizer, PackedDataset
from sftron.commands.arguments import positive
from sftron.data.loader import collate
from sftron.data.types import Conversation, DataError
from sftron.errors import exit_with, refuse, show
from tools.bench_report import benchmark_parser, markdown_table, write_report

BATCH, FAST = "encode_batch", "encode_batch_fast"
BATCH_SIZE = 256

Messages = list[dict[str, str]]
Work = Callable[[], int]
"""A function that does the work once and returns the number of tokens it produced."""


def read_messages(path: Path, tokenizer: ChatTokenizer, num_rows: int | None) -> list[Messages]:
    """Returns the conversations of a file as messages with role and content. Raises DataError if there are none."""
    preparation = PackedDataset.from_path(path, tokenizer, sequence_length=2**20).preparation
    parsed = (preparation.parse(key) for key in list(preparation.all_keys())[:num_rows])
    conversations = [each for each in parsed if isinstance(each, Conversation)]
    if not conversations:
        raise DataError(f"{path}: rows of ids have no text to tokenize; give a file of conversations")
    return [
        [{"role": message.role.name.lower(), "content": message.content or ""} for message in each.messages]
        for each in conversations
    ]


def kinds_of(rows: list[Messages]) -> dict[str, list[Messages]]:
    """Returns the three kinds of rows by name."""
    short = [[each | {"content": " ".join(each["content"].split()[:18])} for each in row] for row in rows]
    plain = [[message for message in row if message["role"] != "system"] for row in rows]
    turns = [[message for row in plain[start : start + 8] for message in row] for start in range(0, len(plain), 8)]
    return {"the file's rows": rows, "short instructions": short, "many turns": turns}


def ways_of(rows: list[Messages], folder: str, path: Path, sequence_length: int) -> dict[str, Work]:
    """Returns the work of each way by name, with new objects, so that every round starts with empty caches."""
    tokenizer = ChatTokenizer.from_pretrained(folder)
    tokenizer.encode_messages(rows[0])  # creates the internal copy of the tokenizer, which is not timed
    apply = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).apply_chat_template

    def ours() -> int:
        dataset = PackedDataset.from_path(path, tokenizer, sequence_length=sequence_length, num_epochs=1, num_lanes=1)
        return sum(collate(pack, keep_tail=True).pack.num_tokens for pack in dataset)

    def tokenizer_alone(method: str) -> Work:
        texts = [apply(row, tokenize=False) for row in rows]
        encode = getattr(AutoTokenizer.from_pretrained(folder, trust_remote_code=False).backend_tokenizer, method)
        batches = [texts[start : start + BATCH_SIZE] for start in range(0, len(texts), BATCH_SIZE)]
        return lambda: sum(len(each) for batch in batches for each in encode(batch, add_special_tokens=False))

    return {
        "sftron, rows to packs": ours,
        BATCH: tokenizer_alone(BATCH),
        FAST: tokenizer_alone(FAST),
        "apply_chat_template": lambda: sum(len(apply(row, return_dict=True)["input_ids"]) for row in rows),
    }


def measure(make: Callable[[], dict[str, Work]], num_rounds: int) -> dict[str, tuple[int, float]]:
    """Runs the ways in turn. Returns the number of tokens and the best processor time in seconds of each way."""
    measured: dict[str, tuple[int, float]] = {}
    for _ in range(num_rounds):
        for name, work in make().items():
            started = process_time()
            num_tokens = work()
            seconds = process_time() - started
            measured[name] = (num_tokens, min(seconds, measured.get(name, (0, seconds))[1]))
    return measured


def benchmark(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one record for each tokenizer, kind of rows and way."""
    for folder in options.tokenizer:
        all_rows = read_messages(options.data, ChatTokenizer.from_pretrained(folder), options.rows)
        for kind, rows in kinds_of(all_rows).items():
            with tempfile.TemporaryDirectory() as temporary:
                path = Path(temporary) / "rows.jsonl"
                path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")
                measured = measure(partial(ways_of, rows, folder, path, options.sequence_length), options.rounds)
            for name, (num_tokens, seconds) in measured.items():
                yield {
                    "tokenizer": Path(folder).name,
                    "rows": kind,
                    "way": name,
                    "tokens": num_tokens,
                    "tokens/s": num_tokens / seconds,
                    "us a row": 1e6 * seconds / len(rows),
                    "x encode_batch": measured[BATCH][1] / seconds,
                }


def table(records: Sequence[dict[str, Any]]) -> str:
    rows = []
    for record in records:
        *names, tokens, rate, row_time, ratio = record.values()
        rows.append([*names, f"{tokens:,}", f"{rate:,.0f}", f"{row_time:,.1f}", f"{ratio:.2f}"])
    return markdown_table(list(records[0]), rows, num_names=3)


def main(arguments: list[str]) -> int:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--tokenizer", nargs="+", required=True, metavar="FOLDER", help="tokenizers with a chat template")
    add("--data", type=Path, required=True, metavar="FILE", help="conversations")
    add("--rows", type=positive, help="take only the first ROWS rows")
    add("--sequence-length", type=positive, default=8192, help="tokens of a pack (default: %(default)s)")
    add("--rounds", type=positive, default=3, help="the best of them counts (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write every number there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        records = list(benchmark(options))
        show(table(records))
        write_report("", records, json_file=options.json)
    except (ValueError, OSError) as error:
        return refuse(error, "bench_data")
    totals: dict[tuple[str, str], set[int]] = {}
    for record in records:
        totals.setdefault((record["tokenizer"], record["rows"]), set()).add(record["tokens"])
    different = [" with ".join(reversed(key)) for key, counts in totals.items() if len(counts) > 1]
    if different:
        show(f"FAIL: the ways give different numbers of tokens for {'; '.join(different)}", to=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
