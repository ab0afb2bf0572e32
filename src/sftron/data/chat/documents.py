"""DocumentTokenizer encodes plain text as the tokenizer alone does, and cuts long documents into pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from sftron.data.chat.control_tokens import ControlTokens, Tokens
from sftron.data.chat.template import TemplateError
from sftron.data.types import DataError, Document, Role, TokenizedConversation

_ANYWHERE, _AT_SPACE, _AT_LINE = range(3)
"""How good a place is to cut a text: within a word, at white space, at the beginning of a line."""
_QUARTER = 1 / 4
"""The share of a piece, at its end, in which the best place to cut is looked for."""


class DocumentTokenizer:
    """Encodes documents of plain text.

    The ids are those of `tokenizer(text)`, but for strings of control tokens, which are plain text (law 3).

    Args:
        tokenizer: The tokenizer, which may add tokens before and after any text.
        control: Its control tokens.
        tokenize: Returns the tokens of texts with renamed control tokens, or for each the exception that it raised.
        allowed: The control tokens that a text may contain.
        end: The control token that ends each document; None stands for what the tokenizer adds.

    Raises:
        TemplateError: `end` is not a control token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        control: ControlTokens,
        tokenize: Callable[[Sequence[str]], Sequence[Tokens | BaseException]],
        allowed: frozenset[str],
        end: str | None,
    ) -> None:
        if end is not None and end not in control.ids:
            remedy = "name one, such as <|endoftext|>, or remove the key"
            raise TemplateError(f"tokenizer.document_end: {end} is not a control token of the tokenizer; {remedy}")
        self.end = end
        self._tokenizer, self._control, self._tokenize, self._allowed = tokenizer, control, tokenize, allowed

    @cached_property
    def frame(self) -> tuple[list[int], list[int]]:
        """The ids before and after the text of a document.

        They are what the tokenizer adds to any text, as nothing else tells what the model was pretrained with, and
        `end`, if it is given.
        """
        before, after = self._added
        return before, after if self.end is None else [self._control.ids[self.end]]

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        text: list[int] = self._call("Hi", add_special_tokens=False)
        framed = self._call("Hi")
        start = next(n for n in range(len(framed)) if framed[n : n + len(text)] == text)
        return framed[:start], framed[start + len(text) :]

    @property
    def frame_in_words(self) -> str:
        """What begins and ends each document, and who says so."""
        before, after = (" ".join(self._tokenizer.convert_ids_to_tokens(ids)) for ids in self.frame)
        begins = f"each piece begins with {before}, as the tokenizer adds it" if before else "the tokenizer adds no BOS"
        if self.end is not None:
            return f"{begins}; each document ends in {after} (tokenizer.document_end)"
        ends = f"each document ends in {after}, as the tokenizer adds it" if after else "no EOS ends a document"
        return f"{begins}; {ends} (tokenizer.document_end sets another)"

    def _call(self, text: str, **options: Any) -> list[int]:
        called: Any = self._tokenizer(text, verbose=False, **options)
        return called["input_ids"]

    def reference_ids(self, document: Document) -> list[int]:
        """Returns the ids of `tokenizer(text)`, with the end that the document has."""
        ids, num_added = self._call(document.text), len(self._added[1])
        if document.is_last and self.end is None:
            return ids
        return ids[: len(ids) - num_added] + (self.frame[1] if document.is_last else [])

    def encode(self, documents: Sequence[Document]) -> list[TokenizedConversation | DataError]:
        """Returns the ids of each document, all of role TEXT, or why it cannot be encoded."""
        encoded = self._encode([document.text for document in documents])
        return [
            DataError(f"{document.location}: {each}", reason="tokenizer_failed")
            if isinstance(each, BaseException)
            else self._framed(document, each)
            for document, each in zip(documents, encoded, strict=True)
        ]

    def _framed(self, document: Document, tokens: Tokens) -> TokenizedConversation:
        before, after = self.frame
        ids = np.concatenate([before, tokens.ids, after if document.is_last else []]).astype(np.int32)
        # Of a text that holds control tokens only where they are allowed, every occurrence is one.
        num_spelled = len(self._control.find(document.text))
        return TokenizedConversation(
            ids,
            np.full(len(ids), Role.TEXT, dtype=np.uint8),
            (),
            document.key,
            holds_control_text=num_spelled > int(tokens.is_control.sum()),
        )

    def _encode(self, texts: Sequence[str]) -> Sequence[Tokens | BaseException]:
        outcomes: list[str | BaseException] = []
        for text in texts:
            try:
                outcomes.append(self._renamed(text))
            except TemplateError as error:
                outcomes.append(error)
        tokens = iter(self._tokenize([each for each in outcomes if isinstance(each, str)]))
        return [next(tokens) if isinstance(each, str) else each for each in outcomes]

    def _renamed(self, text: str) -> str:
        self._control.require_usable(text)
        return self._control.rename(text, tuple(f for f in self._control.find(text) if f[1] in self._allowed))

    # --- Pieces ---

    def pieces(self, text: str, num_tokens: int) -> list[str]:
        """Returns the text cut into pieces, each of which is a document of at most `num_tokens` tokens.

        Joined, they are the text. They are about equally long, and cut at the beginning of a line or at white space,
        if there is any in the last quarter of a piece; never within a character. A text that cannot be encoded stays
        whole, and so does one character of more tokens.
        """
        most = num_tokens - sum(map(len, self.frame))
        (tokens,) = self._encode([text])
        if isinstance(tokens, BaseException) or len(tokens.ids) <= most:
            return [text]
        renamed, room = self._renamed(text), max(1, most)
        while True:
            parts = _parts(renamed, tokens, room)
            # A piece may have other tokens than its text had within the document.
            longest = max(len(each.ids) for each in self._tokenize(parts) if isinstance(each, Tokens))
            if longest <= most or room == 1:
                return [self._control.restored(part) for part in parts]
            room = max(1, room - (longest - most))


def _parts(text: str, tokens: Tokens, room: int) -> list[str]:
    """Returns the text cut where tokens begin, into parts of at most `room` tokens where that is possible."""
    first_bytes = (np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8) & 0xC0) != 0x80
    characters = np.append(first_bytes.cumsum() - first_bytes, len(text))[tokens.starts].tolist()
    # Where a character has several tokens, only the first of them may begin a part.
    is_cut = np.append(first_bytes, True)[tokens.starts]
    is_cut[1:] &= tokens.starts[1:] >= tokens.ends[:-1]

    def can_cut(token: int) -> bool:
        return bool(is_cut[token]) and bounds[-1] < characters[token] < len(text)

    def quality(token: int) -> tuple[int, int]:
        before, after = text[characters[token] - 1], text[characters[token]]
        is_at_space = before.isspace() or after.isspace()
        return _AT_LINE if before == "\n" else _AT_SPACE if is_at_space else _ANYWHERE, token

    start, end, bounds = 0, len(tokens.ids), [0]
    while end - start > room:
        last = start - -(end - start) // -(-(end - start) // room)  # the parts left have about equal lengths
        least = max(start + 1, last - int(_QUARTER * (last - start)))
        near = filter(can_cut, range(least, last + 1))
        far = filter(can_cut, chain(range(least - 1, start, -1), range(last + 1, end)))
        if (cut := max(near, key=quality, default=None) or next(far, None)) is None:
            break
        start = cut
        bounds.append(characters[cut])
    return [text[a:b] for a, b in zip(bounds, [*bounds[1:], len(text)], strict=True)]
