"""Makes rows from your own source, here the tickets of a help desk in a database.

    python examples/custom_dataset.py --tokenizer models/SmolLM2-135M-Instruct --jsonl runs/tickets.jsonl

The command shows the first pack as it would be trained, and writes the rows for `sftron train`.
"""

import argparse
import json
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from sftron import ChatTokenizer, PackedDataset
from sftron.report.terminal import pack_as_text, wants_color


def open_database() -> sqlite3.Connection:
    """Stands for your own source."""
    database = sqlite3.connect(":memory:")
    database.execute("create table tickets (number integer, author text, text text)")
    database.executemany(
        "insert into tickets values (?, ?, ?)",
        [
            (1, "customer", "My Fernwick does not chirp before rain."),
            (1, "agent", "Is the rain alarm on? Hold the brass button for 5 seconds."),
            (1, "customer", "It was off. Thank you!"),
            (1, "agent", "Gladly. Happy growing!"),
            (2, "customer", "Which battery does it take?"),
            (2, "agent", "One AA battery, for 9 months. Happy growing!"),
        ],
    )
    return database


def conversations(database: sqlite3.Connection) -> Iterator[dict[str, Any]]:
    """Yields one row per ticket, in the format `messages`. The agent's text is the assistant's, and so is trained."""
    roles = {"customer": "user", "agent": "assistant"}
    for (number,) in database.execute("select distinct number from tickets order by number"):
        lines = database.execute("select author, text from tickets where number = ? order by rowid", [number])
        yield {"messages": [{"role": roles[author], "content": text} for author, text in lines]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with a tokenizer and a chat template")
    parser.add_argument("--jsonl", type=Path, help="write the rows here")
    options = parser.parse_args(arguments)

    # Anything with a length and rows by index works, so rows need not be in memory (docs/python.md).
    with closing(open_database()) as database:
        rows = list(conversations(database))
    tokenizer = ChatTokenizer.from_pretrained(options.tokenizer)
    dataset = PackedDataset.from_rows(rows, tokenizer, sequence_length=256)
    print(pack_as_text(next(iter(dataset)), tokenizer.decode, color=wants_color(sys.stdout)))
    if options.jsonl:
        options.jsonl.parent.mkdir(parents=True, exist_ok=True)
        options.jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{len(rows)} rows written: name {options.jsonl} in data.datasets")


if __name__ == "__main__":
    main()
