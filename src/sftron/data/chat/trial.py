"""One bounded trial of a tokenizer and its chat template before a run relies on them.

An expression in tokenizer.json may take longer than the run on a single word, and a template is a program: Jinja's
sandbox bounds neither its loops nor the memory of `'x' * 10 ** 10`. So a process of its own encodes short texts and
renders short conversations first. No signal or exception would end the libraries' own code; the end of a process does.
"""

from __future__ import annotations

import multiprocessing
import os
import string
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from sftron.data.chat.template import PROBED_TOOL
from sftron.data.chat.template_input import tracked_messages, tracked_tools
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.child_process import die_with_parent
from sftron.data.types import Conversation, ConversationKey, Message, Role

if sys.platform == "linux":
    import resource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 60.0
"""The time for each of the two parts."""
BYTES = 2**30
"""The memory that templates may take beyond what the process has; a conversation of 4 MiB takes a tenth."""
_MOST_CHARACTERS = 2**24
_TEXTS = [character * 500 + "!" for character in (*string.printable, "é", "中")]
"""Where an expression tries all ways to divide a word, these are divided in 2^500 ways; a sound one takes 0.1 s."""
_ROUND = (Message(Role.USER, "Why? " * 200), Message(Role.ASSISTANT, "So. " * 200))
_CONVERSATIONS = [
    Conversation(messages, ConversationKey(0, 0), "a trial", tools)
    for messages in (_ROUND, (Message(Role.SYSTEM, "Be brief."), *_ROUND * 8))
    for tools in ((), (PROBED_TOOL,))
]

_tried: set[int] = set()


def require_bounded(tokenizer: PreTrainedTokenizerBase, make: Callable[[], ChatTokenizer], key: object) -> None:
    """Tries a tokenizer and its template, once in this process.

    Args:
        tokenizer: The tokenizer.
        make: Makes the ChatTokenizer that the run uses.
        key: Differs for another template.

    Raises:
        ValueError: A part takes more than SECONDS, the template more than BYTES (on Linux), or the tokenizers library
            panics. Other failures are left to whoever uses the tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer) or (digest := hash((backend.to_str(), repr(key)))) in _tried:
        return
    context = multiprocessing.get_context("fork")
    answers, to_parent = context.Pipe(duplex=False)
    child = context.Process(target=_try, args=(backend, make, to_parent, os.getpid()), daemon=True)
    child.start()
    to_parent.close()
    remedy = f"take the tokenizer of {tokenizer.name_or_path} from where it was published"
    try:
        if not answers.poll(SECONDS):
            raise ValueError(
                f"the tokenizer takes more than {SECONDS:.0f} s for texts of 500 characters: an expression in its "
                f"tokenizer.json does not come to its end (or this machine is overloaded); {remedy}"
            )
        if panic := answers.recv_bytes().decode():
            raise ValueError(f"the tokenizer fails on texts of 500 characters ({panic}); {remedy}")
        remedy = "give one that does not (tokenizer.chat_template: FILE)"
        if not answers.poll(SECONDS):
            raise ValueError(f"the chat template takes more than {SECONDS:.0f} s for a short conversation; {remedy}")
        if problem := answers.recv_bytes().decode():
            raise ValueError(f"the chat template {problem} for a short conversation; {remedy}")
    except EOFError:
        child.join()
        raise ValueError(
            f"the tokenizer or its template ends the process (status {child.exitcode}); {remedy}"
        ) from None
    finally:
        child.kill()
        child.join()
        answers.close()
    _tried.add(digest)


def _try(backend: tokenizers.Tokenizer, make: Callable[[], ChatTokenizer], to_parent: Connection, parent: int) -> None:
    die_with_parent(parent)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where a panic is written as well
    for attempt in (lambda: _encode_texts(backend), lambda: _render_conversations(make)):
        to_parent.send_bytes(attempt().encode(errors="replace"))


def _encode_texts(backend: tokenizers.Tokenizer) -> str:
    try:
        for text in _TEXTS:
            backend.encode(text)
    except Exception:
        pass  # raised again where the tokenizer is used
    except BaseException as error:
        return str(error)
    return ""


def _render_conversations(make: Callable[[], ChatTokenizer]) -> str:
    if sys.platform == "linux":
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = num_pages * os.sysconf("SC_PAGE_SIZE") + BYTES
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
    longest = 0
    for conversation in _CONVERSATIONS:
        try:
            chat_tokenizer = make()  # computes the template's constants
            template = chat_tokenizer.template_for(conversation)
            messages, tools = tracked_messages(conversation.messages, template), tracked_tools(conversation.tools)
            longest = max(longest, len(template.render(messages, tools)))
        except MemoryError:
            return f"takes more than {BYTES // 2**20} MiB of memory"
        except Exception:
            continue  # raised again where the template is used
    return f"writes {longest:,} characters" if longest > _MOST_CHARACTERS else ""
