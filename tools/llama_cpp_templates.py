"""Which chat templates llama.cpp's engine renders as transformers does, and the smallest program for each difference.

    python tools/llama_cpp_templates.py OUT
    python tools/llama_cpp_templates.py OUT PLACE... [--every N] [--no-shrink]

A PLACE is a template, or a folder with `*.jinja` files; without one, those of the tests, of the installed packages, and
of llama.cpp's source in $SFTRON_LLAMA_CPP. Each is served by llama.cpp's server with the tests' conversations, tools
and thoughts, one row at a time. Prints a table by cause (docs/served.md), and writes for each cause the shortest
template and row that shows it to OUT/CAUSE.jinja and OUT/CAUSE.json. Nothing more could be left out of them, as far as
--trials starts of the server show.
"""

import argparse
import json
import os
import re
import shutil
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer

from sftron.checks import served_turns
from sftron.checks.served_prompts import LlamaServerPrompts
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.formats.detect import resolve_format
from sftron.data.prepare import DataOptions, DataSet, Preparation
from sftron.data.sources import open_source
from sftron.errors import show
from tests.checks.llama_cpp import llama_server, write_gguf
from tests.checks.test_served_turns import MORE
from tests.conftest import ASSETS
from tests.data.family_conversations import CONVERSATIONS

Row = dict[str, Any]
CONTROL = re.compile(
    r"<\|[^|<>'\"{}\s]{1,40}\|>|<｜[^｜<>]{1,40}｜>|\[/?[A-Z_]{3,20}\]|</?s>"
    r"|<(?:bos|eos|unk|start_of_turn|end_of_turn|BOS_TOKEN|EOS_TOKEN)>"
)
STOPS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eot|>", "</s>", "<|end_of_text|>", "<|endoftext|>")
TAG = re.compile(r"(\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\})", re.DOTALL)
OF_TRAINING = {"control_text", "rewritten", "boundary"}
"""Causes that no engine could avoid."""


def places() -> list[Path]:
    site = Path(sysconfig.get_path("purelib"))
    found = [ASSETS / "templates", *site.glob("*/**/chat_templates")]
    source = Path(os.environ.get("SFTRON_LLAMA_CPP", "")) / "models" / "templates"
    return [*found, source] if source.is_dir() else found


def templates(of: Sequence[Path]) -> dict[str, str]:
    """Returns the sources by their names, each source once."""
    files = [file for place in of for file in ([place] if place.is_file() else sorted(place.rglob("*.jinja")))]
    sources = {file.read_text(encoding="utf-8"): "/".join(file.parts[-3:]) for file in reversed(files)}
    return {name: source for source, name in reversed(sources.items()) if "messages" in source}


def rows() -> Iterator[Row]:
    for case in (*CONVERSATIONS, *MORE):
        yield {"messages": list(case.messages), **({"tools": list(case.tools)} if case.tools else {})}


@contextmanager
def served(source: str) -> Iterator[Callable[[Row], set[str]]]:
    """Serves a template. Yields what gives the causes by which a row differs, and raises ValueError without turns."""
    with tempfile.TemporaryDirectory() as home:
        folder, data = Path(home) / "model", Path(home) / "row.jsonl"
        tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tokenizer")
        known, controls = tokenizer.get_vocab(), sorted(set(CONTROL.findall(source)))
        added = [AddedToken(each, special=True, normalized=False) for each in controls if each not in known]
        tokenizer.add_tokens(added, special_tokens=True)
        tokenizer.eos_token = next((stop for stop in STOPS if stop in controls), tokenizer.eos_token)
        tokenizer.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))

        chat, options = ChatTokenizer.from_pretrained(folder), DataOptions(sequence_length=2**31 - 1, num_epochs=1)
        with llama_server(write_gguf(folder, Path(home) / "model.gguf")) as url:
            prompts = LlamaServerPrompts(url, chat, None, 20.0)

            def causes_of(row: Row) -> set[str]:
                data.write_text(json.dumps(row) + "\n", encoding="utf-8")
                rows = open_source(str(data))
                prepared = Preparation([DataSet(rows.name, rows, resolve_format(rows))], chat, options)
                report = served_turns.compare_turns(folder, prepared, prompts)
                if not report.facts["turns"]:
                    raise ValueError("no trained turn")
                return set(report.facts["causes"])

            yield causes_of


def shrink(parts: list[Any], is_kept: Callable[[list[Any]], bool], trials: int = 10**6) -> list[Any]:
    """Leaves out runs of parts, long ones first, as long as `is_kept`."""
    size = len(parts) // 2
    while size and trials > 0:
        at = 0
        while at < len(parts) and trials > 0:
            fewer = parts[:at] + parts[at + size :]
            trials -= 1
            if is_kept(fewer):
                parts = fewer
            else:
                at += size
        size //= 2
    return parts


def has_cause(causes_of: Callable[[Row], set[str]], row: Row, cause: str) -> bool:
    try:
        return cause in causes_of(row)
    except Exception:  # what was left out may be needed
        return False


def has_cause_as_served(source: str, row: Row, cause: str) -> bool:
    try:
        with served(source) as causes_of:
            return has_cause(causes_of, row, cause)
    except Exception:  # so may a part of the template: no engine reads it then
        return False


def smallest(source: str, row: Row, cause: str, trials: int) -> tuple[str, Row]:
    with served(source) as causes_of:
        messages = shrink(row["messages"], lambda fewer: has_cause(causes_of, row | {"messages": fewer}, cause))
        row = row | {"messages": messages}
        for at, message in enumerate(messages):
            for key in set(message) - {"role"}:
                fewer = {**row, "messages": [*messages[:at], {**message, key: ""}, *messages[at + 1 :]]}
                if message[key] and has_cause(causes_of, fewer, cause):
                    row, messages = fewer, fewer["messages"]
                    message = messages[at]
        if "tools" in row and has_cause(causes_of, without := {"messages": messages}, cause):
            row = without
    parts = [part for part in TAG.split(source) if part]
    return "".join(shrink(parts, lambda fewer: has_cause_as_served("".join(fewer), row, cause), trials)), row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("places", type=Path, nargs="*")
    parser.add_argument("--every", type=int, default=1, help="take each Nth template only")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--trials", type=int, default=200)
    options = parser.parse_args()
    served_turns._readers_of = lambda folder: []  # the report's row `tokenizer` asks no server
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)

    found = templates(options.places or places())
    counts, by_cause, first = Counter[str](), dict[str, set[str]](), dict[str, tuple[str, str, Row]]()
    for name, source in list(found.items())[:: options.every]:
        counts["templates"] += 1
        num_compared = counts["rows"]
        try:
            with served(source) as causes_of:
                for row in rows():
                    try:
                        causes = causes_of(row)
                    except ValueError:
                        counts["rows without a trained turn"] += 1
                        continue
                    counts["rows"] += 1
                    counts["rows equal"] += not causes
                    for cause in causes:
                        counts[f"rows {cause}"] += 1
                        by_cause.setdefault(cause, set()).add(name)
                        if cause not in first or len(source) < len(first[cause][1]):
                            first[cause] = name, source, row
        except Exception as error:  # a server that ends, and templates that raise anything
            counts["templates that end the server or the comparison"] += 1
            show(f"{name}: {type(error).__name__}: {str(error)[-150:]!r}")
        counts["templates with a row"] += counts["rows"] > num_compared

    show(f"{len(found) - counts['templates']} of {len(found)} templates left out")
    for what, number in counts.items():
        show(f"{number:6} {what}")
    for cause, (name, source, row) in first.items():
        show(f"{cause}: {', '.join(sorted(by_cause[cause]))}")
        if cause in OF_TRAINING:
            continue
        if not options.no_shrink:
            source, row = smallest(source, row, cause, options.trials)
        (options.out / f"{cause}.jinja").write_text(source, encoding="utf-8")
        shown = {"template": name, "cause": cause, **row}
        (options.out / f"{cause}.json").write_text(json.dumps(shown, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
