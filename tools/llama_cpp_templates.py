"""Which chat templates llama.cpp's engine renders as transformers does, and the smallest program for each difference.

    python tools/llama_cpp_templates.py OUT PLACE... [--every N] [--no-shrink]

A PLACE is a file or a folder. Templates are *.jinja, and the texts in *.json and *.py that transformers can render a
question with. Each is served by llama.cpp's server. For each prompt of the tests' conversations, tools and thoughts
that transformers renders, the server's ids are compared with those of transformers' text. Prints a table by cause
(docs/served.md), to which templates with which the server does not start belong, and writes OUT/differences.jsonl. For
each cause it writes the shortest template and row that shows it to OUT/CAUSE.jinja and OUT/CAUSE.json. Nothing more
could be left out of them, as far as --trials starts of the server show.
"""

import argparse
import ast
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from tokenizers import AddedToken
from transformers import AutoTokenizer

from sftcheck.program import search
from sftron.checks.served_causes import Ids, Render, cause_of, render_prompt
from sftron.checks.served_prompts import LlamaServerPrompts
from sftron.checks.servers import RefusedError
from sftron.commands.arguments import count, positive, refusing
from sftron.data.chat.template import ChatTemplate, TemplateError
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.types import Conversation, Role
from sftron.errors import exit_with, show
from sftron.visible_text import counted
from tests.checks.llama_cpp import llama_server, write_gguf
from tests.checks.test_served_turns import MORE
from tests.conftest import ASSETS
from tests.data.family_conversations import CONVERSATIONS, Given
from tests.data.test_families import conversation

CONTROL = re.compile(
    r"<\|[^|<>'\"{}\s]{1,40}\|>|<｜[^｜<>]{1,40}｜>|\[/?[A-Z_]{3,20}\]|</?s>"
    r"|<(?:bos|eos|unk|start_of_turn|end_of_turn|BOS_TOKEN|EOS_TOKEN)>"
)
STOPS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eot|>", "</s>", "<|end_of_text|>", "<|endoftext|>")
TAG = re.compile(r"(\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\})", re.DOTALL)
CASES = (*CONVERSATIONS, *MORE)
GIVEN = {"enable_thinking": True, "date_string": "26 Jul 2024", "datetime": "Jul 26 2024"}
"""Variables that llama.cpp gives to every template, with values that both sides get where they may be the cause."""
NOT_STARTED = "not_started"
"""The cause of a template with which the server ends at once."""
QUESTION = {"role": "user", "content": "Who?"}


class Difference(NamedTuple):
    """A prompt that transformers and llama.cpp write otherwise, and the texts from the first difference on."""

    cause: str
    transformers: str
    llama_cpp: str


def templates(places: Sequence[Path]) -> dict[str, str]:
    """Returns the sources by their names, each source once. A name ends as the file's path does."""
    if missing := [place for place in places if not place.exists()]:
        raise ValueError(f"{missing[0]}: no such file or folder")
    files = [file for place in places for file in (sorted(place.rglob("*")) if place.is_dir() else [place])]
    sources, seen = dict[str, str](), Counter[str]()
    for file in files:
        for number, source in enumerate(texts(file)):
            if isinstance(source, str) and source not in sources and is_template(source):
                name = "/".join(file.parts[-3:]) + (f":{number}" if number else "")
                seen[name] += 1
                sources[source] = name + (f" ({seen[name]})" if seen[name] > 1 else "")
    return {name: source for source, name in sources.items()}


def texts(file: Path) -> Iterator[object]:
    """Yields the texts that may be templates: that of a *.jinja file, and those in a *.json or *.py file."""
    if file.suffix not in (".jinja", ".json", ".py") or "messages" not in (text := file.read_text("utf-8", "replace")):
        return
    if file.suffix == ".jinja":
        yield text
    elif file.suffix == ".py":
        with suppress(SyntaxError):
            yield from (each.value for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Constant))
    else:
        try:
            values = [json.loads(text)]
        except (ValueError, RecursionError) as error:
            show(f"{file} is left out: {error}")
            return
        while values:
            value = values.pop()
            values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            yield value


def is_template(source: str) -> bool:
    """Returns whether transformers renders a question with it."""
    if "messages" not in source or "{%" not in source:
        return False
    answer, system = {"role": "assistant", "content": "Pip."}, {"role": "system", "content": "Be kind."}
    for messages in ([QUESTION], [QUESTION, answer], [system, QUESTION]):
        with suppress(TemplateError):
            if QUESTION["content"] in ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages):
                return True
    return False


@contextmanager
def served(source: str) -> Iterator[Callable[[Given], list[Difference] | None]]:
    """Serves a template. Yields what gives the differences of a row; None if transformers renders no prompt of it."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "model"
        tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tokenizer")
        known, controls = tokenizer.get_vocab(), sorted(set(CONTROL.findall(source)))
        added = [AddedToken(each, special=True, normalized=False) for each in controls if each not in known]
        tokenizer.add_tokens(added, special_tokens=True)
        tokenizer.eos_token = next((stop for stop in STOPS if stop in controls), tokenizer.eos_token)
        tokenizer.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")

        chat = ChatTokenizer.from_pretrained(folder)
        with llama_server(write_gguf(folder, Path(home) / "model.gguf")) as url:
            prompts = LlamaServerPrompts(url, chat, None, 120.0)

            def ask(prompt: Conversation) -> Ids | None:
                try:
                    return prompts.prompt_ids(prompt)
                except ValueError as error:
                    if isinstance(error.__cause__, RefusedError):  # a template that raises is a failure of the server
                        return None
                    raise

            def differences(row: Given) -> list[Difference] | None:
                whole, found, num_rendered = conversation(row), list[Difference](), 0
                for number, message in enumerate(whole.messages):
                    prompt = replace(whole, messages=whole.messages[:number])
                    if number and message.role is Role.ASSISTANT and (own := render_prompt(chat, prompt)) is not None:
                        num_rendered += 1
                        if (theirs := ask(prompt)) != own:
                            found.append(difference_of(chat, prompt, own, theirs, ask))
                return found if num_rendered else None

            yield differences


def difference_of(chat: ChatTokenizer, prompt: Conversation, own: Ids, theirs: Ids | None, ask: Render) -> Difference:
    """Returns the variables that explain a difference, or else its cause with the same variables on both sides."""
    names = sorted(GIVEN.keys() & chat.template.variables)
    for given in (*([name] for name in names), names):
        same = replace(prompt, template_kwargs={name: GIVEN[name] for name in given})
        if given and (rendered := render_prompt(chat, same)) is not None:
            if ask(same) == rendered:
                return Difference(" and ".join(given), *first_difference(chat, own, theirs))
            if given == names:
                prompt, own, theirs = same, rendered, ask(same)
    cause = cause_of(chat, prompt, own, theirs, ask)
    return Difference(cause.name.lower(), *first_difference(chat, own, theirs))


def first_difference(chat: ChatTokenizer, own: Ids, theirs: Ids | None) -> tuple[str, str]:
    if theirs is None:
        return chat.decode(own), "refused"
    ours, there = chat.decode(own), chat.decode(theirs)
    at = next((n for n, (a, b) in enumerate(zip(ours, there, strict=False)) if a != b), min(len(ours), len(there)))
    return ours[max(at - 30, 0) :][:120], there[max(at - 30, 0) :][:120]


def shrink(parts: Sequence[Any], is_kept: Callable[[list[Any]], bool], trials: int = 10**6) -> list[Any]:
    """Leaves out runs of parts, long ones first, as long as `is_kept`, in at most so many trials."""
    left = iter(range(trials))
    return search.smallest(parts, list, lambda fewer: next(left, None) is not None and is_kept(fewer), least=1)


def has_cause(differences: Callable[[Given], list[Difference] | None], row: Given, cause: str) -> bool:
    try:
        return cause in {each.cause for each in differences(row) or ()}
    except Exception:  # what was left out may be needed
        return False


def has_cause_as_served(source: str, row: Given, cause: str) -> bool:
    try:
        with served(source) as differences:
            return has_cause(differences, row, cause)
    except AssertionError:
        return cause == NOT_STARTED and is_template(source)
    except Exception:  # so may a part of the template: no engine reads it then
        return False


def smallest(source: str, row: Given, cause: str, trials: int) -> tuple[str, Given]:
    row = smallest_row(source, row, cause) if cause != NOT_STARTED else row
    parts = [part for part in TAG.split(source) if part]
    return "".join(shrink(parts, lambda fewer: has_cause_as_served("".join(fewer), row, cause), trials)), row


def smallest_row(source: str, row: Given, cause: str) -> Given:
    with served(source) as differences:
        fewer = shrink([*row.messages], lambda fewer: has_cause(differences, replace(row, messages=(*fewer,)), cause))
        row = replace(row, messages=(*fewer,))
        for at, message in enumerate(row.messages):
            for key in sorted(set(message) - {"role"}):
                less = {**row.messages[at], key: ""}
                fewer = replace(row, messages=(*row.messages[:at], less, *row.messages[at + 1 :]))
                if message[key] and has_cause(differences, fewer, cause):
                    row = fewer
        if row.tools and has_cause(differences, without := replace(row, tools=()), cause):
            row = without
    return row


@refusing(ValueError, OSError, tool="llama_cpp_templates")
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder that is not there, or empty")
    parser.add_argument("places", type=Path, nargs="+")
    parser.add_argument("--every", type=positive, default=1, help="take each Nth template only")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--trials", type=count, default=200)
    options = parser.parse_args(arguments)
    found = templates(options.places)
    if not found:
        named = ", ".join(map(str, options.places))
        raise ValueError(f"no chat template is in {named}; name files or folders with *.jinja, *.json or *.py")
    options.out.mkdir(parents=True, exist_ok=True)
    if any(options.out.iterdir()):
        raise ValueError(f"{options.out} is not empty; name a folder that is not there")

    counts, by_cause, first = Counter[str](), dict[str, set[str]](), dict[str, tuple[str, str, Given]]()

    def note(cause: str, name: str, source: str, row: Given) -> None:
        by_cause.setdefault(cause, set()).add(name)
        if cause not in first or len(source) < len(first[cause][1]):
            first[cause] = name, source, row

    def write(name: str, row: Given, difference: Difference) -> None:
        with (options.out / "differences.jsonl").open("a", encoding="utf-8") as file:
            line = {"template": name, "row": row.name, **difference._asdict()}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    for name, source in list(found.items())[:: options.every]:
        counts["templates"] += 1
        try:
            with served(source) as differences:
                compared = [(row, each) for row in CASES if (each := differences(row)) is not None]
        except AssertionError:
            counts[f"templates {NOT_STARTED}"] += 1
            note(NOT_STARTED, name, source, CASES[0])
            write(name, CASES[0], Difference(NOT_STARTED, "", ""))
            continue
        except Exception as error:  # templates raise anything
            counts["templates that end the comparison"] += 1
            show(f"{name}: {type(error).__name__}: {str(error)[-150:]!r}")
            continue
        counts["templates equal"] += not any(each for _, each in compared)
        counts["rows"] += len(compared)
        counts["rows equal"] += sum(not each for _, each in compared)
        for row, differing in compared:
            for each in differing:
                write(name, row, each)
            for cause in {each.cause for each in differing}:
                counts[f"rows {cause}"] += 1
                note(cause, name, source, row)

    show(f"{len(found) - counts['templates']} of {len(found)} templates left out")
    for what, number in counts.items():
        show(f"{number:6} {what}")
    for cause, (name, source, row) in first.items():
        show(f"{cause}: {counted(len(by_cause[cause]), 'templates')}; the shortest is {name}")
        if not options.no_shrink:
            source, row = smallest(source, row, cause, options.trials)
        (options.out / f"{cause}.jinja").write_text(source, encoding="utf-8")
        shown = {"template": name, "cause": cause, "messages": row.messages, "tools": row.tools}
        (options.out / f"{cause}.json").write_text(json.dumps(shown, indent=2, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
