"""A program as parts that can be taken away one by one, its text, and what it does when it runs."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sftcheck.program import measurements as texts
from sftcheck.program.evidence import Evidence, Facts
from sftcheck.program.quoting import called, filled, literal, require_own_code
from sftcheck.program.rows import Rows
from sftcheck.program.source import Names, folded, needed
from sftcheck.restore import restore_random_states_after

_FRESH = "import sys, runpy; sys.modules['sftron'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
_MOST_SECONDS = 600
_MOST_PARAMETERS = 10_000_000


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
    facts: Facts
    tokenizer: tuple[str, ...] = ()
    """The first line loads it."""
    config: Mapping[str, str] = field(default_factory=dict)
    own_config: frozenset[str] = frozenset()
    """The names of `config` that are those of its class; the others come from a file."""
    rows: Rows = field(default_factory=lambda: Rows(()))
    evidence: Evidence = field(default_factory=lambda: Evidence("", ""))
    evaluation: Rows | None = None
    conversations: str = ""
    """The line that defines `conversations`, where the rows do not hold the ones that they are compared with."""

    @property
    def measured(self) -> Rows:
        """The rows that the evidence is about."""
        return self.evaluation or self.rows

    @property
    def loader(self) -> str:
        return f"trainer.get_{'train' if self.evaluation is None else 'eval'}_dataloader()"

    @property
    def text(self) -> str:
        lines = [self.conversations, *filled(self.evidence.text, self._places()).split("\n")]
        measured = [line for line in lines if line.strip()]
        return text_of(self.names, comment_of(self.evidence.sentence), self.tokenizer, self._setup(), measured)

    def _setup(self) -> list[str]:
        """Returns the lines that build the model, the rows and the trainer."""
        data = {"train_dataset": self.dataset.format("rows"), "processing_class": "tokenizer"}
        lines = self.rows.lines(self.tokenizer_object)
        if self.evaluation is not None:
            data["eval_dataset"] = self.dataset.format("eval_rows")
            lines += self.evaluation.lines(self.tokenizer_object)
        return [
            *self._model(),
            *self.model_lines,
            *lines,
            f"arguments = {called(self.arguments_class, [repr('/tmp/out')], self.arguments)}",
            f"trainer = {called(self.trainer, ['model', 'arguments'], {**data, **self.options})}",
            *self.after,
        ]

    def _model(self) -> list[str]:
        return [
            "torch.manual_seed(0)",
            f"config = {called('AutoConfig.for_model', [literal(self.model_type)], self.config, self.own_config)}",
            f"model = {called('AutoModelForCausalLM.from_config', ['config'], self.model_options)}",
        ]

    def _places(self) -> dict[str, str]:
        """Returns what the places of a measurement stand for in this program."""
        facts, rows = self.facts, self.measured
        name, documents, last = f"{rows.prefix}rows", f"{rows.prefix}documents", rows.num_answers
        documents_line = "\n".join(rows.documents_line())
        wanted = f"{documents_line}\nwanted = {documents}[0]"
        each, of = rows.source_in("row") + rows.tools, f"row in {name}"
        if self.conversations:
            wanted = "wanted = tokenizer.apply_chat_template(conversations[0], return_dict=False)"
            each, of = "each", "each in conversations"
        number = f"text.count({literal(facts.header)})" if last is None else str(last)
        of_mask, of_ids = "batch['attention_mask'] == 0", "batch['input_ids'] == tokenizer.pad_token_id"
        of_model, of_folder = "trainer.model.generation_config", "GenerationConfig.from_pretrained(folder)"
        strip = "strip()" if facts.is_marked_by_trl else "strip(' ').rstrip()"
        of_documents = filled(texts.BORDER_OF_DOCUMENTS, {"documents": documents, "documents_line": documents_line})
        return {
            "answer": literal(f"{re.escape(facts.header)}(.*?{re.escape(facts.stop)})"),
            "batch": f"batch = next(iter({self.loader}))",
            "beginning": literal(facts.beginning),
            "border": texts.BORDER_OF_POSITIONS if facts.has_positions else of_documents,
            "each": each,
            "ends": of_model if facts.is_adapter else of_folder,
            "header": literal(facts.header),
            "last": "" if last is None else f"[-{last} :]",
            "loader": self.loader,
            "messages": rows.source_in(f"{name}[0]"),
            "number": "1" if facts.is_text else number,
            "of": of,
            "padding": of_mask if facts.has_mask else of_ids,
            "rows": name,
            "stop": literal(facts.stop),
            "strip": strip,
            "trained": filled(texts.TRAINED, {"strip": strip}),
            "twice": literal(facts.twice),
            "wanted": wanted,
        }

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
    """Puts back the environment, accelerate's shared state, the level of logs and all random states."""
    shared = [(state, dict(state)) for state in (os.environ, *_shared_states())]
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), restore_random_states_after():
            yield
    finally:
        logging.disable(level)
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
    if "Traceback (most recent call last)" in ended.stderr:
        return Outcome(None, ended.stderr.strip().splitlines()[-1])
    return Outcome(ended.returncode, ended.stdout)


def confirmed(text: str) -> str:
    """Returns the text. Raises ValueError if the program does not show its fault in a process of its own."""
    if not (outcome := run_fresh(text)).shows_fault:
        raise ValueError(f"the program shows its fault in this process alone: {outcome.output}")
    return text
