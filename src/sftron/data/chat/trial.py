"""One trial of a tokenizer and its chat template, with bounded time and memory, before a run uses them.

A regular expression in tokenizer.json may take longer than the whole run on a single word. A template is a program, and
Jinja's sandbox limits neither its loops nor the memory of `'x' * 10 ** 10`. So a child process first encodes short
texts and renders short conversations. A limit on its processor time also ends the native code of the libraries, which
an exception could not interrupt.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import string
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from sftron.data.chat.template import PROBE_TOOL, TemplateError
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.child_process import die_with_parent
from sftron.data.types import Conversation, ConversationKey, Message, Role

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
_TEXTS = [character * 500 + "!0" for character in (*string.printable, "é", "中")]
"""Words that a regular expression may split in 2^500 ways; the digit is for expressions that need one to start."""
_ROUND = (Message(Role.USER, "Why? " * 200), Message(Role.ASSISTANT, "So. " * 200))
_CONVERSATIONS = [
    Conversation(messages, ConversationKey(0, 0), "a trial", tools)
    for messages in (_ROUND, (Message(Role.SYSTEM, "Be brief."), *_ROUND * 8))
    for tools in ((), (PROBE_TOOL,))
]

_tried: set[int] = set()


def require_bounded(tokenizer: PreTrainedTokenizerBase, make: Callable[[], ChatTokenizer], key: object) -> None:
    """Runs the trial of a tokenizer and its template, once per process for each pair.

    Args:
        tokenizer: The tokenizer.
        make: Makes the ChatTokenizer that the run uses.
        key: A value that differs for different templates.

    Raises:
        ValueError: A step takes more than SECONDS, the template uses more than BYTES (on Linux) or writes too much
            text, or the tokenizers library panics. Other failures are ignored here, as they recur when the tokenizer is
            used.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer) or (digest := hash((backend.to_str(), repr(key)))) in _tried:
        return
    context = multiprocessing.get_context("fork")
    answers, to_parent = context.Pipe(duplex=False)
    child = context.Process(target=_try, args=(backend, make, to_parent, os.getpid()), daemon=True)
    child.start()
    to_parent.close()
    steps = [
        (
            "the tokenizer",
            "texts of 500 characters",
            f"take the tokenizer of {tokenizer.name_or_path} from where it was published",
        ),
        ("the chat template", "a short conversation", "give another one (tokenizer.chat_template: FILE)"),
    ]
    try:
        for name, task, remedy in steps:
            if not answers.poll(WALL_SECONDS):
                problem = f"is not done after {WALL_SECONDS:.0f} s"
            else:
                try:
                    problem = answers.recv_bytes().decode()
                except EOFError:
                    child.join()
                    problem = f"takes more than {SECONDS:.0f} s of processor time"
                    if child.exitcode != -signal.SIGPROF:
                        problem = f"ends the process (status {child.exitcode})"
            if problem:
                raise ValueError(f"{name} {problem} for {task}; {remedy}")
    finally:
        child.kill()
        child.join()
        answers.close()
    _tried.add(digest)


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
