"""A program as parts that can be taken away one by one, its text, and what it does when it runs."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sftcheck.program.quoting import called, literal, require_own_code
from sftcheck.program.source import Names, folded, needed

_FRESH = "import sys, runpy; sys.modules['sftron'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
_MOST_SECONDS = 600
_MOST_PARAMETERS = 10_000_000


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
        source, first = self.source_in("row"), self.rows[0]
        is_text = isinstance(first.get("prompt", first.get(self.text_column)), str)
        ids = f"tokenizer({source})['input_ids']"
        tools = ", tools=row['tools']" if "tools" in self.columns else ""
        ids = ids if is_text else f"tokenizer.apply_chat_template({source}{tools}, return_dict=False)"
        return [f"{self.prefix}documents = [{ids} for row in {self.prefix}rows]"]

    def source_in(self, row: str) -> str:
        """Returns the expression of the messages or the text in a row, whose own expression is `row`."""
        if "prompt" in self.columns:
            return f"{row}['prompt'] + {row}['completion']"
        return f"{row}[{literal(self.text_column)}]"

    @property
    def text_column(self) -> str:
        names = [name for name in ("messages", "text") if name in self.columns]
        if self.is_ids:
            return ""
        others = [name for name, value in self.rows[0].items() if isinstance(value, (str, list))]
        return (names or others or ["messages"])[0]


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
    parts, begin = list[str](), 0
    while begin < len(values):
        end, is_same = begin + 1, values[begin] == ids[begin]
        while end < len(values) and (values[end] == ids[end] if is_same else values[end] == values[begin] != ids[end]):
            end += 1
        last = "" if end == len(values) else str(end)
        parts.append(f"{name}[{begin or ''}:{last}]" if is_same else f"[{values[begin]}] * {end - begin}")
        begin = end
    return " + ".join(parts)


@dataclass(frozen=True)
class Program:
    """Source text by its place: expressions by the name of an argument, and lines."""

    names: Names = field(repr=False, compare=False)
    tokenizer_object: Any = field(repr=False, compare=False)
    model_type: str
    model_options: Mapping[str, str]
    model_lines: tuple[str, ...]
    dataset: str
    """The expression of a data set, with {} for its rows."""
    arguments_class: str
    arguments: Mapping[str, str]
    trainer: str
    options: Mapping[str, str]
    after: tuple[str, ...]
    comment: tuple[str, ...] = ()
    tokenizer: tuple[str, ...] = ()
    """The first line loads it."""
    config: Mapping[str, str] = field(default_factory=dict)
    own_config: frozenset[str] = frozenset()
    """The names of `config` that are those of its class; the others come from a file."""
    rows: Rows = Rows(())
    evidence: Callable[[Program], list[str]] = field(default=lambda _: [], compare=False)
    evaluation: Rows | None = None
    extra: tuple[str, ...] = ()
    """Lines before the evidence, such as given conversations."""

    @property
    def measured(self) -> Rows:
        """The rows that the evidence is about."""
        return self.evaluation or self.rows

    @property
    def loader(self) -> str:
        return f"trainer.get_{'train' if self.evaluation is None else 'eval'}_dataloader()"

    @property
    def text(self) -> str:
        measured = [*self.extra, *self.evidence(self)]
        return text_of(self.names, self.comment, self.tokenizer, self._setup(), measured)

    def _setup(self) -> list[str]:
        """Returns the lines that build the model, the rows and the trainer."""
        options = dict(self.options)
        if self.evaluation is not None:
            options = {"eval_dataset": self.dataset.format("eval_rows"), **options}
        setup = [
            *self._model(),
            *self.model_lines,
            *self.rows.lines(self.tokenizer_object),
            *(self.evaluation.lines(self.tokenizer_object) if self.evaluation is not None else ()),
            f"arguments = {called(self.arguments_class, [repr('/tmp/out')], self.arguments)}",
        ]
        given = {"train_dataset": self.dataset.format("rows"), "processing_class": "tokenizer", **options}
        setup.append(f"trainer = {called(self.trainer, ['model', 'arguments'], given)}")
        return [*setup, *self.after]

    def _model(self) -> list[str]:
        return [
            "torch.manual_seed(0)",
            f"config = {called('AutoConfig.for_model', [literal(self.model_type)], self.config, self.own_config)}",
            f"model = {called('AutoModelForCausalLM.from_config', ['config'], self.model_options)}",
        ]

    @property
    def is_small(self) -> bool:
        return makes_small_model(self.names, self._model(), self.tokenizer_object)


def text_of(
    names: Names, comment: Sequence[str], tokenizer: Sequence[str], setup: Sequence[str], measured: Sequence[str]
) -> str:
    """Returns the text of a comment, and of the lines of a tokenizer, of a setup and of a measurement."""
    tokenizer, setup, measured = (list(map(_fold, each)) for each in (tokenizer, setup, measured))
    imports, definitions = needed(names, [*tokenizer, *setup, *measured])
    require_own_code(imports, [*tokenizer, *setup, *measured], comment, definitions)
    blocks = (comment, imports, tokenizer, definitions.values(), setup, measured)
    return "\n\n".join("\n".join(map(_fold, block)) for block in blocks if block) + "\n"


def _fold(lines: str) -> str:
    return lines if "\n" in lines else folded(lines)


def comment_of(sentence: str) -> tuple[str, ...]:
    found = []
    for name in ("torch", "transformers", "trl", "peft", "accelerate", "datasets"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return f"# {', '.join(found)}", f"# {sentence}", "# Exit status: 1 if the fault shows, 0 if it does not."


def _execute(text: str, scope: dict[str, Any]) -> None:
    exec(compile(text, "<script>", "exec"), scope)


def makes_small_model(names: Names, lines: Sequence[str], tokenizer: Any = None) -> bool:
    """Returns whether the `model` of these lines has few parameters besides its vocabulary, without making it."""
    scope, text = dict[str, Any](tokenizer=tokenizer), text_of(names, (), (), lines, ())
    try:
        with quiet_and_restored(), torch.device("meta"):
            _execute(text, scope)
            vocabulary = len(scope["model"].get_input_embeddings().weight)
    except Exception:  # of the model's own code
        return False
    sizes = [each.numel() for each in scope["model"].parameters() if vocabulary not in each.shape]
    return sum(sizes) < _MOST_PARAMETERS


@dataclass(frozen=True)
class Outcome:
    """What a program has done: its exit status, None if an exception ended it, and what it printed."""

    status: int | None
    output: str

    @property
    def shows_fault(self) -> bool:
        return self.status == 1


def run_here(text: str) -> Outcome:
    """Runs a program in this process, and puts back what such programs change outside of themselves."""
    output = io.StringIO()
    with quiet_and_restored(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        try:
            _execute(text, {"__name__": "__main__"})
        except SystemExit as ended:
            return Outcome(int(ended.code or 0), output.getvalue())
        except Exception as error:
            return Outcome(None, f"{type(error).__name__}: {error}")
    return Outcome(0, output.getvalue())


@contextlib.contextmanager
def quiet_and_restored() -> Iterator[None]:
    shared = [(state, dict(state)) for state in _shared_states()]
    environment, level = dict(os.environ), logging.root.manager.disable
    states = random.getstate(), np.random.get_state()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        random.setstate(states[0])
        np.random.set_state(states[1])
        os.environ.clear()
        os.environ.update(environment)
        for state, before in shared:
            state.clear()
            state.update(before)


def _shared_states() -> list[dict[str, Any]]:
    try:
        from accelerate.state import AcceleratorState, GradientState, PartialState
    except ImportError:  # only trainers need it
        return []
    return [kind._shared_state for kind in (AcceleratorState, GradientState, PartialState)]


def run_fresh(text: str) -> Outcome:
    """Runs a program in a process of its own, in which sftron cannot be imported."""
    with tempfile.TemporaryDirectory(prefix="sftron-script-") as folder:
        path = Path(folder) / "script.py"
        path.write_text(text, encoding="utf-8")
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _FRESH, str(path)],
            capture_output=True,
            text=True,
            timeout=_MOST_SECONDS,
            check=False,
        )
    has_raised = "Traceback (most recent call last)" in ended.stderr
    if has_raised:
        return Outcome(None, ended.stderr.strip().splitlines()[-1])
    return Outcome(ended.returncode, ended.stdout)


def confirmed(text: str) -> str:
    """Returns the text. Raises ValueError if the program does not show its fault in a process of its own."""
    if not (outcome := run_fresh(text)).shows_fault:
        raise ValueError(f"the program shows its fault in this process alone: {outcome.output}")
    return text
