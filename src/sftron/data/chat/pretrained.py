"""Loads a ChatTokenizer from a folder or the Hub, after one trial with bounded time and memory.

A regular expression in tokenizer.json may take longer than the whole run on a single word. A template is a program, and
Jinja's sandbox limits neither its loops nor the memory of `'x' * 10 ** 10`. So a child process first encodes short
texts and renders short conversations. A limit on its processor time also ends the native code of the libraries, which
an exception could not interrupt.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import string
import sys
from collections.abc import Callable, Collection, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from sftron.data.chat.template import PROBE_TOOL, TEMPLATE_NAMES, TemplateError, named_template, probe
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.child_process import die_with_parent
from sftron.data.types import Message, Role

if sys.platform == "linux":
    import resource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 60.0
"""The limit of processor time for each of the two steps; a sound tokenizer or template takes far less than a second."""
WALL_SECONDS = 1800.0
"""The limit of wall-clock time for each step, for a process that waits without using processor time."""
BYTES = 2**30
"""The memory that templates may use in addition to the process's own; a conversation of 4 MiB uses a tenth of it."""
_MOST_CHARACTERS = 2**24
_MAIN_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model"),
)
"""The folder of a tokenizer has one of these files."""
_TEXTS = [character * 500 + "!0" for character in (*string.printable, "é", "中")]
"""Words that a regular expression may split in 2^500 ways; the digit is for expressions that need one to start."""
_ROUND = (Message(Role.USER, "Why? " * 200), Message(Role.ASSISTANT, "So. " * 200))
_CONVERSATIONS = [
    probe(messages, tools)
    for messages in (_ROUND, (Message(Role.SYSTEM, "Be brief."), *_ROUND * 8))
    for tools in ((), (PROBE_TOOL,))
]

_tried: set[int] = set()


def load_chat_tokenizer(
    path: str | Path,
    *,
    chat_template: str | None = None,
    add_tokens: Collection[str] = (),
    date: datetime.date | None = None,
    allow_control_tokens: Mapping[str, Collection[str]] | None = None,
) -> ChatTokenizer:
    """Loads a tokenizer from a local folder or a Hub id.

    The other arguments are the configuration's keys of the same names. Raises ValueError if the folder, the tokenizer
    or the template cannot be used.
    """
    from transformers import AddedToken, AutoTokenizer  # slow to import

    if Path(path).is_dir() and not any((Path(path) / name).exists() for name in _MAIN_FILES):
        # Some versions of transformers would make an empty tokenizer.
        raise ValueError(f"{path} has no {_MAIN_FILES[0]}; copy the tokenizer's files from the original model")
    try:
        # By default, transformers may prompt on the terminal for permission to run the folder's code.
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exceptions for a broken tokenizer.json
        remedy = "; check its tokenizer.json, tokenizer_config.json and config.json" if Path(path).is_dir() else ""
        raise ValueError(
            f"no tokenizer can be loaded from {path}: {' '.join(str(error).split()).rstrip('.')}{remedy}"
        ) from error
    if added := [token for token in add_tokens if token not in tokenizer.get_vocab()]:
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    template = None if chat_template is None else _template_source(chat_template, tokenizer)

    def make() -> ChatTokenizer:
        return ChatTokenizer(tokenizer, template, date, allow_control_tokens, added)

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, tokenizers.Tokenizer):  # else ChatTokenizer refuses it
        digest = hash((backend.to_str(), repr(template or tokenizer.chat_template)))
        if digest not in _tried:
            _require_bounded(path, backend, make)
            _tried.add(digest)
    return make()


def _template_source(template: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the source of a template: a file, one of TEMPLATE_NAMES, or one of the tokenizer's. Raises ValueError."""
    if template in TEMPLATE_NAMES:
        return named_template(template, tokenizer)
    if isinstance(tokenizer.chat_template, dict) and template in tokenizer.chat_template:
        return tokenizer.chat_template[template]
    if not Path(template).is_file():
        raise ValueError(
            f"tokenizer.chat_template: {template} is not a file, nor one of {', '.join(TEMPLATE_NAMES)}; give the "
            "path of a Jinja template"
        )
    try:
        source = Path(template).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        problem = f"{template} is not UTF-8 text ({error}); save it as UTF-8"
        raise ValueError(f"tokenizer.chat_template: {problem}") from error
    if not source.strip():
        raise ValueError(f"tokenizer.chat_template: {template} is empty; write a Jinja template, or remove the key")
    return source


# --- The trial ---


def _require_bounded(path: str | Path, backend: tokenizers.Tokenizer, make: Callable[[], ChatTokenizer]) -> None:
    """Runs the trial of a tokenizer and its template; `make` makes the ChatTokenizer.

    Raises ValueError if a step takes more than SECONDS, the template uses more than BYTES (on Linux) or writes too much
    text, or the tokenizers library panics. Other failures are ignored here, as they recur when the tokenizer is used.
    """
    context = multiprocessing.get_context("fork")
    answers, to_parent = context.Pipe(duplex=False)
    child = context.Process(target=_try, args=(backend, make, to_parent, os.getpid()), daemon=True)
    child.start()
    to_parent.close()
    remedy = f"take the tokenizer of {path} from where it was published"
    steps = [
        ("the tokenizer", "texts of 500 characters", remedy),
        ("the chat template", "a short conversation", "give another one (tokenizer.chat_template: FILE)"),
    ]
    try:
        for name, task, remedy in steps:
            problem = f"takes more than {WALL_SECONDS:.0f} s"
            if answers.poll(WALL_SECONDS):
                try:
                    problem = answers.recv_bytes().decode()
                except EOFError:
                    child.join()
                    problem = f"ends the process (status {child.exitcode})"
                    if child.exitcode == -signal.SIGPROF:
                        problem = f"takes more than {SECONDS:.0f} s of processor time"
            if problem:
                raise ValueError(f"{name} {problem} for {task}; {remedy}")
    finally:
        child.kill()
        child.join()
        answers.close()


def _try(backend: tokenizers.Tokenizer, make: Callable[[], ChatTokenizer], to_parent: Connection, parent: int) -> None:
    die_with_parent(parent)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the tokenizers library prints its panics to stderr
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for step in (lambda: _encode_texts(backend), lambda: _render_conversations(make)):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        to_parent.send_bytes(step().encode(errors="replace"))


def _encode_texts(backend: tokenizers.Tokenizer) -> str:
    try:
        for text in _TEXTS:
            backend.encode(text)
    except Exception:
        pass  # raised again where the tokenizer is used
    except BaseException as error:
        return f"fails ({error})"
    return ""


def _render_conversations(make: Callable[[], ChatTokenizer]) -> str:
    if sys.platform == "linux":
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = num_pages * os.sysconf("SC_PAGE_SIZE") + BYTES
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
    longest = 0
    try:
        chat_tokenizer = make()  # Jinja computes the template's constants
        for conversation in _CONVERSATIONS:
            try:
                text = chat_tokenizer.template_for(conversation).render_conversation(conversation)
            except TemplateError:
                continue
            longest = max(longest, len(text))
    except MemoryError:
        return f"takes more than {BYTES // 2**20} MiB of memory"
    except Exception:
        pass  # raised again where the template is used
    return f"writes {longest:,} characters" if longest > _MOST_CHARACTERS else ""
