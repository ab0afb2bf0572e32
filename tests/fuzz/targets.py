"""What anybody may write, given to whoever reads it: the contract of five readers, for fuzzers and for hypothesis.

    python tests/fuzz/targets.py TARGET [--runs N] [--corpus DIR] [--seed N]

TARGET is row, encode, config, manifest or lane_state. Mutations are random. An input that breaks a contract is written
to crash-TARGET, and raised.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]

import numpy as np  # noqa: E402
from transformers import AutoTokenizer, PreTrainedTokenizerBase  # noqa: E402

from sftron.checkpoint.checkpoint import CheckpointError, read_state, verify_checkpoint  # noqa: E402
from sftron.config import ConfigError, dump_config, load_config  # noqa: E402
from sftron.data.chat.tokenizer import ChatTokenizer  # noqa: E402
from sftron.data.formats.messages import apply_reasoning_policy  # noqa: E402
from sftron.data.formats.table import Format, RowFormat, parse_conversation  # noqa: E402
from sftron.data.lanes.lane import EpochFetcher, Stream  # noqa: E402
from sftron.data.lanes.mixture import MixtureFetcher  # noqa: E402
from sftron.data.sources.jsonl import parse_row  # noqa: E402
from sftron.data.types import Conversation, ConversationKey, DataError, Message, Role  # noqa: E402

CORPUS = Path(__file__).parent / "corpus"
_LOCATION, _KEY = "fuzz.jsonl:1", ConversationKey(0, 0)
_SPLIT = b"\n---\n"
"""Between the parts of an input that has several."""


def row(data: bytes) -> None:
    """Any line is, in each format, a conversation of whole texts or a DataError with its location, on one line."""
    for name in get_args(Format):
        try:
            parsed = parse_conversation(parse_row(data, _LOCATION), RowFormat(name), _KEY, _LOCATION)
            if isinstance(parsed, Conversation):
                assert parsed.messages
                for message in parsed.messages:
                    assert message.role in (Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL)
                    assert isinstance(message.content, str) or message.role is Role.ASSISTANT
                    assert 0 <= message.weight < float("inf")
                    assert not {"role", "content", "weight"} & set(message.fields)
                    json.dumps([message.content, message.fields], allow_nan=False, ensure_ascii=False).encode("utf-8")
                for policy in ("last", "strip"):
                    apply_reasoning_policy(parsed, policy)
            else:
                assert len(parsed.input_ids) == len(parsed.role_ids) > 0
        except DataError as error:
            _require_located(error)


def encode(data: bytes) -> None:
    """Texts of a conversation, divided by ---, become apply_chat_template's ids where they spell no control token, and
    never a control token that the template has not written."""
    texts = [_text(part) for part in data.split(_SPLIT)[:8]]
    roles = (Role.USER, Role.ASSISTANT)
    messages = tuple(Message(roles[n % 2], text) for n, text in enumerate(texts))
    for chat_tokenizer in _chat_tokenizers():
        conversation = Conversation(messages, _KEY, _LOCATION)
        try:
            encoded = chat_tokenizer.encode(conversation)
        except DataError as error:
            _require_located(error)
            continue
        neutral = Conversation(tuple(Message(m.role, "x") for m in messages), _KEY, _LOCATION)
        is_control = np.isin(encoded.input_ids, list(chat_tokenizer.control_ids))
        wanted = np.isin(chat_tokenizer.encode(neutral).input_ids, list(chat_tokenizer.control_ids))
        assert is_control.sum() == wanted.sum(), "a text has made a control token"
        assert len(encoded.role_ids) == len(encoded.input_ids)
        if not encoded.holds_control_text:
            template = chat_tokenizer.template_for(conversation)
            reference: Any = chat_tokenizer.tokenizer.apply_chat_template(
                template.plain_messages(messages), chat_template=template.source, return_dict=False
            )
            assert encoded.input_ids.tolist() == list(reference)


def _text(data: bytes) -> str:
    """Half characters too, be they written as such or bytes that are none."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "surrogateescape")


def config(data: bytes) -> None:
    """A file, and behind --- an override a line, are a Config that is written and read again as equal, or problems."""
    text, _, overrides = data.partition(_SPLIT)
    path = _folder() / "config.yaml"
    path.write_bytes(text)
    arguments = overrides.decode("utf-8", "replace").splitlines()[:20]
    try:
        loaded = load_config(path, arguments)
    except ConfigError:
        return
    path.write_text(dump_config(loaded), encoding="utf-8")
    assert load_config(path) == loaded


def manifest(data: bytes) -> None:
    """A manifest, and behind --- a state: something is said to be wrong with the first, or the files are as it says."""
    folder = _folder()
    text, _, state = data.partition(_SPLIT)
    for name in ("model.safetensors", "optimizer.safetensors"):
        (folder / name).write_bytes(b"")
    (folder / "MANIFEST.json").write_bytes(text)
    (folder / "state.json").write_bytes(state)
    problem = verify_checkpoint(folder)
    assert problem is None or isinstance(problem, str)
    stated = {"size": len(state), "sha256": hashlib.sha256(state).hexdigest()}
    of_the_state = {"num_ranks": 1, "step": 0, "files": {"state.json": stated}}
    (folder / "MANIFEST.json").write_text(json.dumps(of_the_state))
    with contextlib.suppress(CheckpointError):
        assert read_state(folder)["step"] >= 0


def lane_state(data: bytes) -> None:
    """A lane's state is taken and given back as it was, or refused."""
    text = data.decode("utf-8", "replace")
    stream = Stream(lambda _: [], None)
    for sampler in (EpochFetcher(0, 4, stream, num_epochs=None), MixtureFetcher(0, 4, [stream, stream], [1, 2])):
        try:
            sampler.load_state(text)
        except ValueError:
            continue
        assert sampler.state() == text


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each for each in (row, encode, config, manifest, lane_state)
}


def corpus(target: str, folder: Path = CORPUS) -> list[bytes]:
    """The inputs of one target, as far as files of its name are there."""
    return [path.read_bytes() for path in sorted((folder / target).glob("*")) if path.is_file()]


@cache
def _chat_tokenizers() -> tuple[ChatTokenizer, ...]:
    assets = CORPUS.parents[1] / "assets"
    tokenizers: list[PreTrainedTokenizerBase] = [
        AutoTokenizer.from_pretrained(assets / name, trust_remote_code=False) for name in _TEMPLATES
    ]
    return tuple(ChatTokenizer(*each) for each in zip(tokenizers, _TEMPLATES.values(), strict=True))


_TEMPLATES = {
    "tokenizer": "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}",
    "tokenizer_sentencepiece": "{% for m in messages %}<s>[{{ m.role }}] {{ m.content | trim }} </s>{% endfor %}",
}


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="sftron-fuzz-"))


def _require_located(error: DataError) -> None:
    assert str(error).startswith(_LOCATION), error
    assert error.reason.isidentifier(), error.reason
    assert error.reason != "bad_data"
    assert str(error).isprintable(), str(error)


# --- Mutations ---

_TOKENS = (
    *(b"\x00", b"\xff", b"\xed\xa0\x80", b"\\ud800"),
    *(b"\xe2\x80\xa8", b"\xf3\xb0\x80\x80", b"\xf4\x80\x80\x80", b"\xc2\x85"),
    *(b'"', b"{", b"}", b"[", b"]", b":", b",", b"null", b"true", b"NaN", b"1e999", b"-1", b"0", b"9" * 400),
    *(b'"role"', b'"content"', b'"from"', b'"value"', b'"tool_calls"', b'"weight"', b'"function"', b'"arguments"'),
    *(b"<|im_start|>", b"<|im_end|>", b"<think>", b"</think>", b"</s>", b"<s>", b"<unk>", _SPLIT),
    *(b"&a ", b"*a", b"!!python/object:os.system ", b"- ", b"\n", b"? ", b"| ", b"> ", b"<<: ", b"--", b"."),
)


def mutated(data: bytes, others: Sequence[bytes], luck: random.Random) -> bytes:
    mutant = bytearray(data)
    for _ in range(luck.choice((1, 1, 2, 4, 8))):
        start = luck.randint(0, len(mutant))
        stop = min(len(mutant), start + luck.choice((0, 0, 1, 1, 4, 16)))
        match luck.randrange(5):
            case 0:
                mutant[start:stop] = luck.choice(_TOKENS)
            case 1:
                mutant[start:stop] = luck.randbytes(luck.randint(0, 4))
            case 2:
                mutant[start:stop] = mutant[start:stop] * luck.choice((2, 3, 300))
            case 3:
                other = luck.choice(others)
                at = luck.randint(0, len(other))
                mutant[start:stop] = other[at : at + luck.choice((1, 8, 64))]
            case _:
                del mutant[start:stop]
    return bytes(mutant[:20_000])


def run_randomly(target: str, inputs: Sequence[bytes], num_runs: int, seed: int) -> None:
    """Mutations of the inputs, and of mutations of them. Raises what the target raises."""
    luck, pool = random.Random(seed), [*inputs]
    for _ in range(num_runs):
        data = mutated(luck.choice(pool), inputs, luck)
        try:
            TARGETS[target](data)
        except BaseException:
            Path(f"crash-{target}").write_bytes(data)
            raise
        if luck.random() < 0.05:
            pool = [*inputs, *pool[len(inputs) :][-200:], data]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    inputs = corpus(options.target, options.corpus) or [b""]
    for data in inputs:
        TARGETS[options.target](data)
    run_randomly(options.target, inputs, options.runs, options.seed)


if __name__ == "__main__":
    main(sys.argv[1:])
