"""The rows of a program's data set, as source text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sftcheck.program.quoting import literal


@dataclass(frozen=True)
class Rows:
    """The rows of a data set.

    Attributes:
        rows: The columns of each row by name; or, for rows of ids, the documents in each row, with their columns.
        is_ids: Whether they are rows of ids.
        prefix: What the names of a program begin with: "", or "eval_".
    """

    rows: tuple[Any, ...]
    is_ids: bool = False
    prefix: str = ""

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(self.rows[0][0] if self.is_ids else self.rows[0])

    def lines(self, tokenizer: Any) -> list[str]:
        """Returns the lines that define `rows`; for rows of ids also `documents`, the ids of each document."""
        if not self.is_ids:
            return [f"{self.prefix}rows = {literal(list(self.rows))}"]
        documents, rows = list[list[int]](), list[str]()
        for row in self.rows:
            columns: dict[str, list[str]] = {name: [] for name in row[0]}
            for document in row:
                name = f"{self.prefix}documents[{len(documents)}]"
                documents.append(list(document["input_ids"]))
                for column, parts in columns.items():
                    parts.append(_runs(document[column], document["input_ids"], name))
            sources = {name: " + ".join(parts) for name, parts in columns.items()}
            rows.append(f"{{{', '.join(f'{literal(name)}: {source}' for name, source in sources.items())}}}")
        return [
            f"{self.prefix}documents = {_ids_source(documents, tokenizer)}",
            f"{self.prefix}rows = [{', '.join(rows)}]",
        ]

    def documents_line(self) -> list[str]:
        """Returns the line that defines `documents` for rows of messages or texts; none for rows of ids."""
        if self.is_ids:
            return []
        first = self.rows[0]
        is_text = isinstance(first.get("prompt", first.get(self.text_column)), str)
        ids = f"tokenizer({self.source_in('row')})['input_ids']"
        if not is_text:
            ids = f"tokenizer.apply_chat_template({self.source_in('row')}{self.tools}, return_dict=False)"
        return [f"{self.prefix}documents = [{ids} for row in {self.prefix}rows]"]

    @property
    def tools(self) -> str:
        """The argument of apply_chat_template with the tools of `row`."""
        return ", tools=row['tools']" if "tools" in self.columns else ""

    @property
    def has_conversations(self) -> bool:
        return not self.is_ids and bool({"messages", "completion"} & self.columns)

    @property
    def num_answers(self) -> int | None:
        """The number of answers at the end of a row that are to be trained; None for all."""
        completion = None if self.is_ids else self.rows[0].get("completion")
        return sum(each["role"] == "assistant" for each in completion) if isinstance(completion, list) else None

    def source_in(self, row: str) -> str:
        """Returns the expression of the messages or the text in a row, whose own expression is `row`."""
        if "prompt" in self.columns:
            return f"{row}['prompt'] + {row}['completion']"
        return f"{row}[{literal(self.text_column)}]"

    @property
    def text_column(self) -> str:
        if self.is_ids:
            return ""
        names = [name for name in ("messages", "text") if name in self.columns]
        others = (name for name, value in self.rows[0].items() if isinstance(value, (str, list)))
        return next(iter([*names, *others]), "messages")


def _ids_source(documents: Sequence[list[int]], tokenizer: Any) -> str:
    """Returns an expression for the ids of documents, which encodes their texts if these have the same ids."""
    texts = [tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) for ids in documents]
    if [tokenizer.encode(text, add_special_tokens=False) for text in texts] == documents:
        return f"[tokenizer.encode(text, add_special_tokens=False) for text in {literal(texts)}]"
    return literal(documents)


def _runs(values: Sequence[int], ids: Sequence[int], name: str) -> str:
    """Returns an expression for the values, as parts of the ids of that name and repeated numbers."""
    if list(values) == list(ids):
        return name
    parts, at = list[str](), 0
    for value, run in groupby(None if value == own else value for value, own in zip(values, ids, strict=True)):
        begin, at = at, at + len(list(run))
        last = "" if at == len(values) else str(at)
        parts.append(f"{name}[{begin or ''}:{last}]" if value is None else f"[{value}] * {at - begin}")
    return " + ".join(parts)
