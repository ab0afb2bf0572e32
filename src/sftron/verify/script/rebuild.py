"""The parts of a live trainer, collected as source text, and the rows from which its batches are made."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch

from sftron.data.types import IGNORE_INDEX, Conversation, Role
from sftron.verify.script.evidence import Facts
from sftron.verify.script.program import FIXED, Rows
from sftron.verify.script.source import Names, NoSourceError, dataclass_changes
from sftron.verify.trainer.batches import find, ids_of
from sftron.verify.trainer.documents import Document
from sftron.verify.trainer.label_checks import untrained_stops, wrong_labels
from sftron.verify.trainer.remedies import library_of
from sftron.verify.trainer.subject import TrainerSubject
from sftron.verify.trainer.truth import PlainText
from sftron.verify.trainer.view import View

SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
"""The sizes of a small model; those that a configuration has are stated, and none is larger than it was."""
_NOT_OF_THE_MODEL = {
    "architectures", "dtype", "model_type", "name_or_path", "torch_dtype", "transformers_version", "use_cache",
    "vocab_size", "attn_implementation",
}  # fmt: skip
_NOT_OF_THE_RUN = {
    "bf16", "dataset_num_proc", "disable_tqdm", "fp16", "hub_token", "logging_dir", "logging_steps",
    "logging_strategy", "output_dir", "project", "report_to", "run_name", "save_strategy", "seed", "use_cpu",
}  # fmt: skip
_MADE_BY_TRL = {"input_ids", "labels", "attention_mask", "completion_mask", "assistant_masks", "seq_lengths"}
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token")
_IMPORTS = {
    "AutoConfig": "from transformers import AutoConfig",
    "AutoModelForCausalLM": "from transformers import AutoModelForCausalLM",
    "AutoTokenizer": "from transformers import AutoTokenizer",
    "GenerationConfig": "from transformers import GenerationConfig",
    "TemplateProcessing": "from tokenizers.processors import TemplateProcessing",
    "cross_entropy": "from torch.nn.functional import cross_entropy",
    "groupby": "from itertools import groupby",
    **{name: f"import {name}" for name in ("re", "sys", "tempfile", "torch")},
}


@dataclass(frozen=True)
class Suspect:
    """A row of the data set that a failed check is about, or another one."""

    row: Any
    """Its columns; None if the row is not known."""
    ids: Sequence[Mapping[str, Sequence[int]]]
    """The columns of numbers of each document in it."""
    contents: Sequence[Mapping[str, Any] | str | None]
    """The conversation of each document as a row of messages, its text, or None."""
    is_given: bool = False
    index: int | None = None
    """Its number in the data set."""


@dataclass
class Materials:
    """What a program needs to build the trainer, as it was when it was checked."""

    names: Names
    tokenizer: Any
    tokenizer_name: str
    tokenizer_state: Mapping[str, Any]
    model_type: str
    config: Mapping[str, Any]
    defaults: Mapping[str, Any]
    """The configuration of a new model of the type."""
    model_options: Mapping[str, str]
    num_embeddings: int
    model_lines: tuple[str, ...]
    dataset: str
    arguments_class: str
    arguments: Mapping[str, str]
    trainer: str
    options: Mapping[str, str]
    after: tuple[str, ...]
    facts: Facts
    is_trl: bool
    completion_only: bool
    suspects: Mapping[tuple[str, bool], Sequence[Suspect]]
    """By the name of the row, and whether it is about the evaluation."""
    training_rows: Sequence[Suspect]
    problems: list[str] = field(default_factory=list)
    """Parts that have no source text, and are left out."""
    other_loss: bool = False


def versions() -> str:
    found = []
    for name in ("torch", "transformers", "trl", "peft", "accelerate", "datasets"):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def collect(subject: TrainerSubject, rows: Mapping[str, str]) -> Materials:
    """Collects the parts of a checked trainer. Raises NoSourceError if one that is needed has no source text.

    Args:
        rows: What each row of the table that a program may be asked for has measured, by its name.
    """
    trainer, model, names = subject.trainer, subject.model.unwrapped, Names()
    names.imports |= _IMPORTS
    problems, config = list[str](), model.config
    arguments = dict(_sources(names, dataclass_changes(trainer.args), _NOT_OF_THE_RUN, list[str]()))
    fixed = {"use_cpu": "True"} | ({"bf16": "False"} if library_of(trainer) == "trl" else {})
    options = dict(_options(trainer, names, problems))
    return Materials(
        names=names,
        tokenizer=subject.training.tokenizer,
        tokenizer_name=_tokenizer_name(subject.training.tokenizer),
        tokenizer_state=_tokenizer_state(subject.training.tokenizer),
        model_type=config.model_type,
        config=_settings(config.to_dict()),
        defaults=_settings(type(config)().to_dict()),
        model_options={"attn_implementation": repr(config._attn_implementation)},
        num_embeddings=len(model.get_input_embeddings().weight),
        model_lines=tuple(_adapter_lines(trainer, names, options, problems)),
        dataset=_dataset(trainer, names),
        arguments_class=names.name_of(type(trainer.args)),
        arguments=fixed | arguments,
        trainer=names.name_of(type(trainer)),
        options=options,
        after=("trainer.model_accepts_loss_kwargs = False",) if trainer.model_accepts_loss_kwargs is False else (),
        facts=_facts(subject),
        is_trl=library_of(trainer) == "trl",
        completion_only=bool(getattr(trainer, "completion_only_loss", False)),
        suspects={pair: each for name, measured in rows.items() for pair, each in _suspects(subject, name, measured)},
        training_rows=_all_rows(subject.training),
        problems=problems,
        other_loss="another loss" in rows.get("loss", ""),
    )


# -- parts -------------------------------------------------------------------------------------------------------------


def _sources(
    names: Names, values: Mapping[str, Any], left_out: set[str], problems: list[str]
) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if name in left_out:
            continue
        try:
            yield name, names.expression(value)
        except NoSourceError as error:
            problems.append(f"{name}: {error}")


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in config.items()
        if name.lstrip("_") not in _NOT_OF_THE_MODEL and not name.startswith("_")
    }


def _tokenizer_name(tokenizer: Any) -> str:
    name = tokenizer.name_or_path
    if not name:
        raise NoSourceError("the tokenizer does not name the folder or repository that it is from")
    return os.path.abspath(name) if os.path.isdir(name) else name  # noqa: PTH100, PTH112


def _tokenizer_state(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    processor = getattr(backend, "post_processor", None)
    state = {name: getattr(tokenizer, name, None) for name in (*_SPECIAL, "chat_template", "padding_side")}
    state["added"] = sorted(tokenizer.get_added_vocab(), key=tokenizer.get_added_vocab().get)
    state["processor"] = None if processor is None else json.loads(processor.__getstate__())
    return state


def tokenizer_lines(materials: Materials) -> tuple[tuple[str, ...], int]:
    """Returns the lines that make the tokenizer, and the number of tokens that it has before any is added."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(materials.tokenizer_name)
    own, state = materials.tokenizer_state, _tokenizer_state(loaded)
    lines = [f"tokenizer = AutoTokenizer.from_pretrained({materials.tokenizer_name!r})"]
    if new := [token for token in own["added"] if token not in state["added"]]:
        lines.append(f"tokenizer.add_tokens({new!r}, special_tokens=True)")
    for name in (*_SPECIAL, "padding_side", "chat_template"):
        if own[name] != state[name]:
            lines.append(f"tokenizer.{name} = {own[name]!r}")
    processor = own["processor"]
    if processor != state["processor"] and processor is not None and processor["type"] == "TemplateProcessing":
        parts = [each["SpecialToken"]["id"] if "SpecialToken" in each else "$A" for each in processor["single"]]
        marks = [(name, each["ids"][0]) for name, each in processor["special_tokens"].items()]
        call = f"TemplateProcessing(single={' '.join(parts)!r}, special_tokens={marks!r})"
        lines.append(f"tokenizer.backend_tokenizer.post_processor = {call}")
    return tuple(lines), len(loaded)


def model_config(materials: Materials, *, is_small: bool) -> dict[str, str]:
    """Returns the arguments of the configuration, with the vocabulary of the tokenizer."""
    config, defaults = dict(materials.config), materials.defaults
    found = {"vocab_size": "len(tokenizer)"}
    for name, value in config.items():
        if is_small and name in SMALL and isinstance(value, int):
            found[name] = repr(min(value, SMALL[name]))
        elif is_small and name in ("layer_types", "layers_block_type") and isinstance(value, list):
            kinds = list(dict.fromkeys(value))[:2]
            found[name] = repr((kinds * 2)[:2])
        elif name in SMALL or value != defaults.get(name):
            with suppress(NoSourceError):
                found[name] = materials.names.expression(value)
    return found


def _adapter_lines(trainer: Any, names: Names, options: dict[str, str], problems: list[str]) -> list[str]:
    """Returns the lines that add the adapters; TRL adds them itself, and is given their configuration."""
    if not hasattr(trainer.model, "peft_config"):
        return []
    config = trainer.model.peft_config["default"]
    default = {each.name: getattr(type(config)(), each.name) for each in dataclasses.fields(config)}
    left_out = {"peft_type", "base_model_name_or_path", "auto_mapping", "revision", "inference_mode", "peft_version"}
    changes = {
        each.name: value
        for each in dataclasses.fields(config)
        if each.init and each.name not in left_out and (value := getattr(config, each.name)) != default[each.name]
        if not dataclasses.is_dataclass(value)
    }
    given = ", ".join(f"{name}={source}" for name, source in _sources(names, changes, set(), problems))
    call = f"{names.name_of(type(config))}({given})"
    if library_of(trainer) == "trl":
        options["peft_config"] = call
        return []
    names.imports["get_peft_model"] = "from peft import get_peft_model"
    lines = [f"model = get_peft_model(model, {call})"]
    base = [each for name, each in trainer.model.named_parameters() if "lora_" not in name]
    if base and all(each.requires_grad for each in base):
        lines.append("model.requires_grad_(True)")
    return lines


def _options(trainer: Any, names: Names, problems: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the arguments of the trainer that may matter, each of which is left out again if it does not."""
    values = {"data_collator": trainer.data_collator, "compute_loss_func": trainer.compute_loss_func}
    if library_of(trainer) == "trl" and type(trainer.data_collator).__module__.startswith("trl."):
        del values["data_collator"]  # TRL's own default, which it refuses to be given
    yield from _sources(names, {name: value for name, value in values.items() if value is not None}, set(), problems)
    if trainer.optimizer is not None:
        yield "optimizers", _optimizer(trainer, names)


def _optimizer(trainer: Any, names: Names) -> str:
    """Returns the pair of a given optimizer and no scheduler."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    own = [(name, each) for name, each in trainer.model.named_parameters() if "lora_" not in name]
    missing = [name for name, each in own if id(each) not in held]
    parameters = "model.parameters()"
    if missing and len(missing) < len(own):
        parameters = f"[each for name, each in model.named_parameters() if name not in {missing!r}]"
    return f"({names.name_of(type(optimizer))}({parameters}, lr={optimizer.defaults['lr']!r}), None)"


def _dataset(trainer: Any, names: Names) -> str:
    if hasattr(trainer.train_dataset, "column_names"):
        names.imports["Dataset"] = "from datasets import Dataset"
        return "Dataset.from_list({})"
    return "{}"


# -- what was seen -----------------------------------------------------------------------------------------------------


def _facts(subject: TrainerSubject) -> Facts:
    view, trainer, tokenizer = subject.training, subject.trainer, subject.training.tokenizer
    batch = max(subject.step.batches, key=lambda each: each.ids.size)
    header, stop, beginning = _template_texts(tokenizer)
    before = _user_header(tokenizer)
    stops = Counter(n for each in view.documents if each.tokens is not None for n in each.tokens.stop_ids)
    if stops:
        stop = tokenizer.decode([stops.most_common(1)[0][0]])
    contents = [each.truth.content for each in view.documents if each.truth is not None]
    features = [each for each in batch.features if isinstance(each, Mapping)]
    columns = [name for name, value in (features[0] if features else {}).items() if _is_of_numbers(value)]
    return Facts(
        header=header,
        stop=stop or tokenizer.eos_token or "",
        has_stop=bool(stop),
        beginning=beginning,
        twice=before + beginning if before and beginning else "",
        is_everything=subject.trained_roles == "all",
        is_text=bool(contents) and all(isinstance(each, PlainText) for each in contents),
        is_marked_by_trl=bool(getattr(trainer, "chat_template", None)),
        has_positions="position_ids" in batch.inputs,
        has_mask=getattr(batch.inputs.get("attention_mask"), "ndim", 0) == 2,
        is_packed=any(len(documents) > 1 for *_, documents in view.documents_of_rows),
        is_adapter=hasattr(trainer.model, "peft_config"),
        pads_with_stop=tokenizer.pad_token == stop,
        columns=tuple(name for name in columns if name in _MADE_BY_TRL - {"seq_lengths"}),
    )


def _template_texts(tokenizer: Any) -> tuple[str, str, str]:
    """Returns what the template writes before an answer, the token behind it, and what it begins with."""
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}

    def rendered(*messages: Any, **options: Any) -> str:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))

    try:
        both, prompt = rendered(user, answer), rendered(user, add_generation_prompt=True)
        header = prompt.removeprefix(rendered(user)) if both.startswith(prompt) else ""
    except Exception:  # no template, or one that refuses such messages
        return "", tokenizer.eos_token or "", ""
    header = header or both.partition("Hi")[2].partition("Yo")[0]
    read = tokenizer.decode(tokenizer.encode(both, add_special_tokens=False))
    if header not in read:  # SentencePiece writes a space behind a control token
        header = tokenizer.decode(tokenizer.encode(header, add_special_tokens=False))
    rest = both.partition("Yo")[2].strip()
    tokens = [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()]
    stop = next((token for token in tokens if rest.startswith(token)), "")
    with suppress(Exception):
        other = rendered({"role": "system", "content": "Be kind."}, user)
        return header.strip(" "), stop, os.path.commonprefix([other, both])
    return header.strip(" "), stop, ""


def _user_header(tokenizer: Any) -> str:
    """Returns what the template writes in front of a question, from its last control token on."""
    with suppress(Exception):
        text = str(tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False))
        head, tokens = text.partition("Hi")[0], [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()]
        return head[max(head.rfind(token) for token in tokens) :] if any(each in head for each in tokens) else ""
    return ""


def _is_of_numbers(value: Any) -> bool:
    value = value.tolist() if isinstance(value, torch.Tensor) or hasattr(value, "tolist") else value
    return isinstance(value, list) and bool(value) and all(isinstance(each, int) for each in value)


def _suspects(subject: TrainerSubject, name: str, measured: str) -> Iterator[tuple[tuple[str, bool], list[Suspect]]]:
    """Yields the rows of the training, and of the evaluation, that a check is about, the likeliest first."""
    views = [(False, subject.training)]
    views += [(True, view) for view in subject.evaluation.values() if isinstance(view, View)][:1]
    for is_evaluation, view in views:
        wrong = {id(each) for each in _wrong(view, name)}
        ordered = sorted(view.documents, key=lambda each: (id(each) not in wrong, len(each)))
        is_about_rows = name == "truncation"  # of others, the rows that are there are the ones to look at
        missing = [_of_given(view, truth) for truth in view.given if is_about_rows and truth.excerpt in view.missing]
        yield (name, is_evaluation), [*missing, *_rows_of(view, ordered)]


def _all_rows(view: View) -> list[Suspect]:
    return _rows_of(view, sorted(view.documents, key=len))


def _wrong(view: View, name: str) -> list[Document]:
    documents = view.documents
    if name == "trained tokens":
        with suppress(ValueError):
            return wrong_labels(view)
    if name == "stop tokens":
        return untrained_stops(view)
    if name == "truncation":
        empty = [
            each[0] for batch, row, each in view.documents_of_rows if (batch.labels[row, 1:] == IGNORE_INDEX).all()
        ]
        return [each for each in documents if each.is_cut_after or each.num_cut_before] or empty
    if name == "forgery":
        return [each for each in documents if each.is_forged] or untrained_stops(view)
    return [each for each in documents if each.difference]


def _rows_of(view: View, documents: Sequence[Document]) -> list[Suspect]:
    """Returns the rows of these documents, each with all documents of its batch's row, in the order of the first."""
    neighbors: dict[tuple[int, int], list[Document]] = {}
    for each in view.documents:
        neighbors.setdefault((each.batch, each.row), []).append(each)
    found, seen = list[Suspect](), set[int]()
    for each in documents:
        row = _row_with(view, each)
        if row is None or id(row) in seen:
            continue
        seen.add(id(row))
        ids = ids_of(row)
        own = [other for other in neighbors[each.batch, each.row] if ids is None or find(ids, other.ids) >= 0] or [each]
        found.append(
            Suspect(
                row,
                _segments(row, own),
                [_content(view, other) for other in own],
                any(other.source == "conversations" for other in own),
                next((n for n, other in enumerate(view.rows) if other is row), None),
            )
        )
    return found


def _row_with(view: View, document: Document) -> Any:
    """Returns the row of the data set in which the document's ids are; None if it is not found."""
    features = view.batches[document.batch].features
    if len(features) == len(view.batches[document.batch].ids) and (ids := ids_of(features[document.row])) is not None:
        return view._row_of_ids.get(ids.tobytes(), features[document.row])
    for row in view.rows:
        if (ids := ids_of(row)) is not None and find(ids, document.ids) >= 0:
            return row
    return None


def _segments(row: Mapping[str, Any], documents: Sequence[Document]) -> list[dict[str, list[int]]]:
    """Returns the columns of numbers of a row, cut where its documents begin."""
    columns = {
        name: list(map(int, value))
        for name, value in row.items()
        if _is_of_numbers(value) and name != "seq_lengths" and len(value) == len(row["input_ids"])
    }
    if not columns:
        return []
    ids, starts = ids_of(row), [0]
    assert ids is not None
    fixed = np.ones(len(ids), dtype=int)
    for each in documents:
        at = find(ids, each.ids)
        if at > starts[-1]:
            starts.append(at)
        if at >= 0:
            fixed[at : at + len(each)] = _fixed(each)
    columns[FIXED] = fixed.tolist()
    ends = [*starts[1:], len(ids)]
    return [
        {name: values[begin:end] for name, values in columns.items()} for begin, end in zip(starts, ends, strict=True)
    ]


def _fixed(document: Document) -> np.ndarray:
    """Returns whether each token is the template's, or the first of a text; none is if the roles are not known."""
    if document.tokens is None:
        return np.zeros(len(document), dtype=bool)
    fixed = document.tokens.role_ids == Role.TEMPLATE
    for turn in document.tokens.turns:
        fixed[[turn.start] if turn.stop is None else [turn.start, turn.stop]] = True
    return fixed


def _content(view: View, document: Document) -> Mapping[str, Any] | str | None:
    return None if document.truth is None else _row_of(view, document.truth.content)


def _row_of(view: View, content: Any) -> Mapping[str, Any] | str:
    if isinstance(content, Conversation):
        chat = view.encoder.chat
        assert chat is not None
        return {"messages": [dict(each) for each in chat.template_for(content).plain_messages(content.messages)]}
    return content.text


def _of_given(view: View, truth: Any) -> Suspect:
    content = _row_of(view, truth.content)
    return Suspect(content if isinstance(content, Mapping) else None, (), [content], is_given=True)


def rows_for(suspects: Sequence[Suspect], way: str, materials: Materials, prefix: str) -> Rows | None:
    """Returns the rows of a program from suspects: their "columns", "conversations" or "ids"; None if they have none."""
    make: Mapping[str, Callable[[Suspect], list[Any]]] = {
        "columns": lambda each: [_text_columns(each.row)],
        "conversations": lambda each: [_as_row(content, materials) for content in each.contents],
        "ids": lambda each: [tuple(each.ids)],
    }
    rows = [row for each in suspects for row in make[way](each)]
    if not rows or not all(rows):
        return None
    return Rows(tuple(rows), is_ids=way == "ids", prefix=prefix)


def _text_columns(row: Any) -> dict[str, Any]:
    """Returns the columns of a row that hold its texts, from which TRL makes the others."""
    if not isinstance(row, Mapping):
        return {}
    return {name: value for name, value in row.items() if name not in _MADE_BY_TRL and value is not None}


def _as_row(content: Mapping[str, Any] | str | None, materials: Materials) -> dict[str, Any]:
    if content is None:
        return {}
    if isinstance(content, str):
        return {"text": content}
    if materials.completion_only:
        return {"prompt": content["messages"][:-1], "completion": content["messages"][-1:]}
    return dict(content)
