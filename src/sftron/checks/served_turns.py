"""Served as trained, for every trained turn of the user's own rows, without a pass of the model.

The ids that a server makes of everything before a trained turn are the ids before it in training, and the turn's own
stop, and no token before it, ends the generation there.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from sftron.checkpoint.model_folder import read_json, stop_ids_of
from sftron.checks.report import Check, Report
from sftron.checks.served_causes import Cause, Ids, cause_of, encode
from sftron.checks.served_prompts import LogProbabilities, PromptSource, open_prompts
from sftron.checks.served_weights import ServedTurn, check_weights
from sftron.config import load_config
from sftron.data.chat.layout import MODEL_ROLES
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.formats.detect import resolve_format
from sftron.data.prepare import DataOptions, DataSet, Preparation
from sftron.data.sources import open_source
from sftron.data.types import IGNORE_INDEX, Conversation, Dropped, Role, TokenizedConversation
from sftron.train.build_data import load_chat_tokenizer, open_data
from sftron.visible_text import counted

_CHANGES_GREEDY = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "bad_words_ids": [],
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "num_beams": 1,
    "sequence_bias": [],
    "guidance_scale": 1.0,
}
"""Keys of generation_config.json that change which token is the likeliest, with the values that change nothing."""
_SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p")


class _TrainedTurn(NamedTuple):
    """A trained turn: its message, and its generated tokens [start, end), the last of which is `stop` if it has one."""

    message: int
    start: int
    end: int
    stop: int | None
    num_trained: int


@dataclass(slots=True)
class _Found:
    """What one cause concerns."""

    rows: set[str] = field(default_factory=set)
    num_turns: int = 0
    num_tokens: int = 0
    first: str = ""

    def add(self, location: str, turn: _TrainedTurn, what: str) -> None:
        self.rows.add(location)
        self.num_turns += 1
        self.num_tokens += turn.num_trained
        self.first = self.first or f"{location}, message {turn.message + 1}: {what}"

    def line(self, cause: Cause) -> str:
        concerned = f"{counted(len(self.rows), 'rows')}, {counted(self.num_tokens, 'trained tokens')}"
        return f"{cause.name.lower()}: {concerned}; {self.first}"


def open_rows_to_serve(data: Path, folder: Path) -> Preparation:
    """Opens the data sets of a run's configuration (.yaml), or rows with the tokenizer in `folder`. Raises ValueError.

    A configuration trains with its own tokenizer, template and targets.
    """
    if data.suffix in (".yaml", ".yml"):
        config = load_config(data)
        return open_data(config, load_chat_tokenizer(config))
    source = open_source(str(data))
    options = DataOptions(sequence_length=2**31 - 1, num_epochs=1)
    chat = ChatTokenizer.from_pretrained(folder)
    return Preparation([DataSet(source.name, source, resolve_format(source))], chat, options)


def check_served_turns(
    folder: Path,
    data: Path,
    against: tuple[str, str],
    *,
    limit: int | None = None,
    served_model: str | None = None,
    timeout: float = 120.0,
    num_weighed: int = 0,
) -> Report:
    """Compares the trained prompts and stops of rows with what serves the model in `folder`.

    Args:
        data: A file of rows, or a run's configuration.
        against: A kind of served_prompts.KINDS, and the URL or the file.
        limit: The number of rows that are compared; by default all.
        timeout: The seconds in which each reply of a server must be complete.
        num_weighed: The number of turns whose answers' log-probabilities are compared, which computes the model.

    Raises:
        ValueError: The folder or the data cannot be used, nothing is served there, or a reply is not what is expected.
    """
    prepared = open_rows_to_serve(data, folder)
    served = open_prompts(*against, prepared.chat_tokenizer, served_model, timeout)
    if num_weighed and not isinstance(served, LogProbabilities):
        raise ValueError(f"--weights: {against[0]} gives no log-probabilities; serve with llama-server or vllm")
    report = compare_turns(folder, prepared, served, limit)
    if not num_weighed or not isinstance(served, LogProbabilities):
        return report
    turns = list(islice(_served_turns(prepared, limit), num_weighed))
    try:
        weights = check_weights(folder, turns, served)
    except ValueError as error:  # the other rows are known
        weights = Check("weights", passed=False, measured=str(error), raised=True)
    return replace(report, checks=(*report.checks, weights))


def _served_turns(prepared: Preparation, limit: int | None) -> Iterator[ServedTurn]:
    for _, tokenized in islice(_conversations(prepared), limit):
        ids = tokenized.input_ids.tolist()
        for turn in _trained_turns(prepared, tokenized):
            yield ServedTurn(ids[: turn.end], turn.start)


def compare_turns(folder: Path, prepared: Preparation, served: PromptSource, limit: int | None = None) -> Report:
    chat = prepared.chat_tokenizer
    stop_ids = {*stop_ids_of(folder)} if served.stop_ids is None else served.stop_ids
    readers = _readers_of(folder)
    found: dict[Cause, _Found] = defaultdict(_Found)
    stops, unlike, num_rows, num_turns = _Found(), list[str](), 0, 0
    for conversation, tokenized in islice(_conversations(prepared), limit):
        ids = tokenized.input_ids.tolist()
        num_rows += 1
        if not tokenized.holds_control_text:
            text = chat.decode(ids)
            unlike += [f"{conversation.location}: {name}" for name, read in readers if read(text) != encode(chat, text)]
        for turn in _trained_turns(prepared, tokenized):
            num_turns += 1
            before, trained = replace(conversation, messages=conversation.messages[: turn.message]), ids[: turn.start]
            if (theirs := served.prompt_ids(before)) != trained:
                cause = cause_of(chat, before, trained, theirs, served.prompt_ids)
                found[cause].add(conversation.location, turn, _first_difference(chat, trained, theirs))
            ends = [n for n in range(turn.start, turn.end) if ids[n] in stop_ids]
            if turn.stop is not None and ends[:1] != [turn.stop]:
                at = ends[0] if ends else turn.stop
                what = "ends it too early" if ends else "does not end it"
                stops.add(conversation.location, turn, f"{_quoted(chat, [ids[at]])} ({ids[at]}) {what}")
    if not num_turns:
        raise ValueError("no row of --data has a trained turn with a prompt; give rows of messages")
    checks = (
        _check_prompts(served, found, num_turns),
        _check_stops(stops, num_turns),
        Check(
            "tokenizer",
            not unlike,
            f"{num_rows - len({each.rpartition(':')[0] for each in unlike})} of {num_rows} rows have the trained ids",
            "all",
            tuple(unlike[:3]),
            remedy="" if not unlike else "Export again with the tokenizer that the run trained with.",
            faults=("special_tokens",) if unlike else (),
        ),
        _check_files(folder, chat),
        _check_sampling(folder),
    )
    causes = {cause.name.lower(): [len(each.rows), each.num_turns, each.num_tokens] for cause, each in found.items()}
    facts = {"model": str(folder), "served": served.name, "rows": num_rows, "turns": num_turns, "causes": causes}
    return Report(f"{folder} against {served.name}: {counted(num_turns, 'trained turns')}", facts, checks)


def _conversations(prepared: Preparation) -> Iterator[tuple[Conversation, TokenizedConversation]]:
    for key in prepared.all_keys():
        tokenized = prepared.tokenize(key)
        if isinstance(tokenized, Dropped):
            continue
        parsed = prepared.parse(key)
        if isinstance(parsed, Conversation):  # a pretokenized row has no messages to serve
            kept = len(parsed.messages) - tokenized.num_truncated_turns
            yield replace(parsed, messages=parsed.messages[:kept]), tokenized


def _trained_turns(prepared: Preparation, tokenized: TokenizedConversation) -> Iterator[_TrainedTurn]:
    """Yields the turns with a trained token that are not the first message, which has no prompt."""
    is_trained = np.append(False, prepared.label(tokenized).labels[:-1] != IGNORE_INDEX)
    is_generated = np.isin(tokenized.role_ids, list(MODEL_ROLES))
    last_end = 0
    for message, turn in enumerate(tokenized.turns):
        if turn.role is not Role.ASSISTANT:
            continue
        end = turn.end if turn.stop is None else turn.stop + 1
        generated = last_end + np.flatnonzero(is_generated[last_end:end])
        if (gaps := np.flatnonzero(np.diff(generated) > 1)).size and generated[0] == last_end > 0:
            generated = generated[gaps[0] + 1 :]  # a template may mark what follows the stop before
        if len(generated) and message:
            start = int(generated[0])
            if num_trained := int(is_trained[start:end].sum()):
                yield _TrainedTurn(message, start, end, turn.stop, num_trained)
        last_end = max(end, last_end)


def _first_difference(chat: ChatTokenizer, trained: Ids, served: Ids | None) -> str:
    if served is None:
        return "refused there"
    shared = (n for n, (a, b) in enumerate(zip(trained, served, strict=False)) if a != b)
    at = next(shared, min(len(trained), len(served)))
    return f"token {at} is {_quoted(chat, trained[at:])} in training, {_quoted(chat, served[at:])} there"


def _quoted(chat: ChatTokenizer, ids: Ids) -> str:
    return json.dumps(chat.decode(ids[:8]), ensure_ascii=False) + ("..." if len(ids) > 8 else "") if ids else "the end"


def _check_prompts(served: PromptSource, found: dict[Cause, _Found], num_turns: int) -> Check:
    causes = sorted(found, key=lambda cause: -found[cause].num_tokens)
    num_wrong = sum(each.num_turns for each in found.values())
    return Check(
        "prompts",
        not found,
        f"{num_turns - num_wrong} of {num_turns} turns have the trained ids before them ({served.source})",
        "all",
        tuple(found[cause].line(cause) for cause in causes),
        remedy=causes[0].remedy if causes else "",
        faults=tuple(cause.name.lower() for cause in causes),
    )


def _check_stops(stops: _Found, num_turns: int) -> Check:
    is_wrong, cause = bool(stops.num_turns), Cause.STOP_LIST
    measured = f"{num_turns - stops.num_turns} of {num_turns} turns end at their own stop"
    detail, faults = ((stops.line(cause),), (cause.name.lower(),)) if is_wrong else ((), ())
    return Check("stops", not is_wrong, measured, "all", detail, remedy=cause.remedy if is_wrong else "", faults=faults)


def _check_files(folder: Path, chat: ChatTokenizer) -> Check:
    """Checks that servers find what they need in the export: template, stop list, and added tokens."""
    settings, file = _json(folder / "tokenizer_config.json"), folder / "chat_template.jinja"
    places = {"tokenizer_config.json": settings.get("chat_template")}
    if file.is_file():
        places[file.name] = file.read_text(encoding="utf-8")
    lacking, faults = list[str](), list[Cause]()
    trained = (chat.template.source, chat.template.source_with_defaults)
    for place, template in places.items():
        if template is not None and (own := _default_of(template)) not in trained:
            problem = "no list of {name, template} with a default" if own is None else "another template than training"
            lacking.append(f"{place} has {problem}")
            faults.append(Cause.TEMPLATE)
    if not any(places.values()):
        lacking.append("no chat template in tokenizer_config.json or chat_template.jinja")
        faults.append(Cause.TEMPLATE)
    if _json(folder / "generation_config.json").get("eos_token_id") in (None, []):
        lacking.append("no eos_token_id in generation_config.json")
        faults.append(Cause.STOP_LIST)
    stored = {each["content"] for each in _json(folder / "tokenizer.json").get("added_tokens", [])}
    if missing := sorted({str(each) for each in chat.tokenizer.added_tokens_decoder.values()} - stored):
        lacking.append(f"tokenizer.json lacks the added tokens {', '.join(missing[:5])}")
        faults.append(Cause.SPECIAL_TOKENS)
    found = ", ".join(place for place, template in places.items() if template)
    return Check(
        "files",
        not lacking,
        f"{len(lacking)} lacking" if lacking else f"template in {found}, stop list, added tokens",
        "all that servers read",
        tuple(lacking),
        remedy=faults[0].remedy if faults else "",
        faults=tuple(cause.name.lower() for cause in faults),
    )


def _default_of(template: Any) -> Any:
    """Returns the default template of a chat_template, which is a text or several by name; None if it has none."""
    if isinstance(template, list):
        template = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
    return template.get("default") if isinstance(template, dict) else template


def _check_sampling(folder: Path) -> Check:
    config, cause = _json(folder / "generation_config.json"), Cause.SAMPLING
    wrong = {key: config[key] for key, neutral in _CHANGES_GREEDY.items() if config.get(key) not in (None, neutral)}
    sampled = ", ".join(f"{key}: {config[key]}" for key in _SAMPLING if config.get(key) is not None)
    return Check(
        "sampling",
        not wrong,
        f"servers sample with {sampled}" if sampled else "no defaults in generation_config.json",
        "no key that changes greedy answers",
        tuple(f"{key}: {value}" for key, value in wrong.items()),
        remedy=cause.remedy if wrong else "",
        faults=(cause.name.lower(),) if wrong else (),
    )


def _json(path: Path) -> dict:
    return dict(read_json(path)) if path.exists() else {}


def _readers_of(folder: Path) -> list[tuple[str, Callable[[str], Ids]]]:
    """Returns the tokenizer of the folder as strangers load it: by AutoTokenizer, and as the tokenizers library's."""
    chat, file = ChatTokenizer.from_pretrained(folder), folder / "tokenizer.json"
    readers: list[tuple[str, Callable[[str], Ids]]] = [("AutoTokenizer", lambda text: encode(chat, text))]
    if file.is_file():
        plain = Tokenizer.from_file(str(file))
        readers.append((file.name, lambda text: plain.encode(text, add_special_tokens=False).ids))
    return readers
