"""A conversation with a model, turn by turn, through the model's own chat template."""

from __future__ import annotations

from collections.abc import Iterator

from sftron.data.text_stream import TextStream
from sftron.data.types import Message, Role
from sftron.models.generation import Choose, generate
from sftron.train.chat_model import ChatModel


class Chat:
    """messages: what was said so far. What looks like a control token in a text is plain text (law 3).

    system: the first message. has_stopped: whether the last answer ended by itself.
    """

    def __init__(self, opened: ChatModel, *, choose: Choose, max_new_tokens: int, system: str | None = None) -> None:
        self._opened, self._choose, self._max_new_tokens = opened, choose, max_new_tokens
        self._first = [] if system is None else [Message(Role.SYSTEM, system)]
        self.reset()

    def reset(self) -> None:
        """Forget what was said."""
        self.messages = list(self._first)
        self.has_stopped = False

    def ask(self, text: str) -> Iterator[str]:
        """The answer, in pieces as they come. Whoever stops asking for more has what came so far as the answer; where
        nothing came, nothing was asked.

        Raises ValueError, having asked nothing, where the template refuses, or the conversation fills the model.
        """
        asked = [*self.messages, Message(Role.USER, text)]
        prompt_ids = self._opened.chat_tokenizer.encode_prompt(asked)
        stream = TextStream(self._decode)
        answer, self.has_stopped = "", False
        try:
            for token_id in self._tokens(prompt_ids):
                self.has_stopped = token_id in self._opened.stop_ids
                piece = "" if self.has_stopped else stream.push(token_id)
                answer += piece
                if piece:
                    yield piece
            rest = stream.rest()
            answer += rest
            if rest:
                yield rest
        finally:
            if answer:
                self.messages = [*asked, Message(Role.ASSISTANT, answer)]

    def _decode(self, ids: list[int]) -> str:
        tokenizer = self._opened.chat_tokenizer.tokenizer
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _tokens(self, prompt_ids: list[int]) -> Iterator[int]:
        model = self._opened.model
        most = min(model.rope_table.num_positions, model.config.sliding_window or model.rope_table.num_positions)
        if len(prompt_ids) >= most:
            raise ValueError(f"the conversation has {len(prompt_ids):,} tokens, and the model takes {most:,}: /reset")
        return generate(
            model,
            prompt_ids,
            min(self._max_new_tokens, most - len(prompt_ids)),
            self._opened.stop_ids,
            choose=self._choose,
            dtype=model.head_weight.dtype,
        )
