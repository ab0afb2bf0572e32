"""One bounded trial of a tokenizer before a run relies on it: an expression in tokenizer.json may take longer than the
run on a single word, and neither a signal nor an exception ends the library's own code."""

from __future__ import annotations

import multiprocessing
import os
import string
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import tokenizers

from sftron.data.child_process import die_with_parent
from sftron.data.control_tokens import ControlTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 60.0
_TEXTS = [character * 500 + "!" for character in (*string.printable, "é", "中")]
"""Where an expression tries all ways to divide a word, these are divided in 2^500 ways; a sound one takes 0.1 s."""

_tried: set[int] = set()


def require_bounded(tokenizer: PreTrainedTokenizerBase) -> None:
    """Encodes short texts in a process of its own, once for each tokenizer. Raises ValueError where that takes
    more than SECONDS, or where the tokenizers library panics."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer) or (digest := hash(backend.to_str())) in _tried:
        return
    context = multiprocessing.get_context("fork")
    answer, to_parent = context.Pipe(duplex=False)
    child = context.Process(target=_encode_texts, args=(backend, to_parent, os.getpid()), daemon=True)
    child.start()
    to_parent.close()
    remedy = f"take the tokenizer of {tokenizer.name_or_path} from where it was published"
    try:
        if not answer.poll(SECONDS):
            raise ValueError(
                f"the tokenizer takes more than {SECONDS:.0f} s for texts of 500 characters: an expression in its "
                f"tokenizer.json does not come to its end (or this machine is overloaded); {remedy}"
            )
        if panic := answer.recv_bytes().decode():
            raise ValueError(f"the tokenizer fails on texts of 500 characters ({panic}); {remedy}")
    except EOFError:
        child.join()
        raise ValueError(f"the tokenizer ends its process (status {child.exitcode}); {remedy}") from None
    finally:
        child.kill()
        child.join()
        answer.close()
    _tried.add(digest)


def _encode_texts(backend: tokenizers.Tokenizer, to_parent: Connection, parent: int) -> None:
    die_with_parent(parent)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where a panic is written as well
    panic = ""
    try:
        control = ControlTokens(backend)
        renamed = control.renamed_tokenizer(control.plane_for(""))
        for text in _TEXTS:
            renamed.encode([text])
            backend.encode(text)
    except Exception:
        pass  # of this text, or to be raised again where the tokenizer is used
    except BaseException as error:
        panic = str(error)
    to_parent.send_bytes(panic.encode(errors="replace"))
