"""The subject of a run's checks: rows and packs of the user's data, and the model, all made when first needed."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from sftron.checkpoint.hf_export import stop_ids_of
from sftron.checkpoint.hf_weights import SafetensorsFolder, read_config, read_json
from sftron.config import Config
from sftron.data.lanes.row_lengths import RowLengths
from sftron.data.loader import collate
from sftron.data.packing import lay_out
from sftron.data.types import (
    IGNORE_INDEX,
    Batch,
    Conversation,
    Dropped,
    LabeledConversation,
    Pack,
    TokenizedConversation,
)
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import LossSum, loss_function, weighted_loss_sum
from sftron.train import run_data
from sftron.train.model_folder import local_folder
from sftron.train.ranks import Ranks
from sftron.train.sample import sampled_keys
from sftron.train.setup import Setup, load_model, open_run

_NUM_PACKS, _MOST_DOCUMENTS = 8, 8
_TOKENS_ON_CPU, _TOKENS_ON_GPU = 512, 8192
_SHORTEST_CUT = 3
"""A token before the first label, the labelled one, and the last one, whose label is cut off."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One row of the data at every stage. parsed: the conversation as far as it is kept, or the row's own ids."""

    parsed: Conversation | TokenizedConversation
    tokenized: TokenizedConversation
    labeled: LabeledConversation
    location: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The amounts that the checks look at.

    rows: of the data. layers: of the model; None for all. tokens: of the packs that the model computes; None for a
    number that suits the device. ranks: the processes of the last check; None leaves it out.
    """

    rows: int = 400
    layers: int | None = None
    tokens: int | None = None
    ranks: int | None = None


class Subject:
    """A run that is about to begin, with its data opened and its rows labeled.

    scratch: a folder for files of the checks. Raises ValueError for a configuration or data that cannot be used.
    """

    def __init__(self, config: Config, scratch: Path, sizes: Sizes | None = None) -> None:
        self.scratch, self.sizes = scratch, sizes or Sizes()
        self.model_folder = local_folder(config.model.path)
        self.num_layers = read_config(self.model_folder).num_hidden_layers
        self.config = self._with_layers(config, self.sizes.layers)
        self.ranks = Ranks(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self.chat_tokenizer = run_data.load_chat_tokenizer(config)
        self.preparation = run_data.open_data(config, self.chat_tokenizer)
        self.dropped: Counter[str] = Counter()
        self.rows = tuple(self._read_rows())

    def _with_layers(self, config: Config, num_layers: int | None) -> Config:
        """Returns the configuration with a model of the first layers alone."""
        if num_layers is None or num_layers >= self.num_layers:
            return config
        folder = self.scratch / f"first-{num_layers}-layers"
        if not folder.exists():
            cut_model(self.model_folder, folder, num_layers)
        model = config.model.model_copy(update={"path": str(folder)})
        tokenizer = config.tokenizer.model_copy(update={"path": config.tokenizer_path})
        return config.model_copy(update={"model": model, "tokenizer": tokenizer})

    def cut_to(self, num_layers: int) -> Config:
        """Returns the configuration with a shallower model, for whole runs of it."""
        return self._with_layers(self.config, min(num_layers, self.sizes.layers or num_layers))

    @property
    def depth(self) -> str:
        """Names the layers that the model's checks compute; empty where these are all."""
        layers = self.sizes.layers
        return "" if layers is None or layers >= self.num_layers else f"first {layers} of {self.num_layers} layers"

    def _read_rows(self) -> Iterator[Row]:
        for key in sampled_keys(self.preparation, self.sizes.rows):
            tokenized = self.preparation.tokenize(key)
            if isinstance(tokenized, Dropped):
                self.dropped[tokenized.reason] += 1
                continue
            parsed = self.preparation.parse(key)
            if isinstance(parsed, Conversation) and tokenized.num_truncated_turns:
                parsed = replace(parsed, messages=parsed.messages[: len(tokenized.turns)])
            yield Row(parsed, tokenized, self.preparation.label(tokenized), self.preparation.location(key))

    @cached_property
    def chats(self) -> tuple[tuple[Conversation, Row], ...]:
        """The rows that hold conversations rather than ids."""
        return tuple((row.parsed, row) for row in self.rows if isinstance(row.parsed, Conversation))

    @cached_property
    def packs(self) -> tuple[Pack, ...]:
        """The first packs of the run."""
        dataset = run_data.make_dataset(self.config, self.preparation, row_lengths=self.row_lengths)
        return tuple(islice(dataset, _NUM_PACKS))

    @cached_property
    def row_lengths(self) -> RowLengths | None:
        """The lengths of all rows where the run's packing is planned by them, else None."""
        dataset = run_data.make_dataset(self.config, self.preparation)
        return dataset.measure() if dataset.is_planned else None

    @cached_property
    def own_stop_ids(self) -> frozenset[int]:
        """The ids that end generations by the model's own files, and the tokenizer's end of text."""
        eos = self.chat_tokenizer.tokenizer.eos_token_id
        return frozenset(stop_ids_of(self.model_folder)) | ({eos} if isinstance(eos, int) else set())

    # -- the model ---------------------------------------------------------------------------------------------------

    @cached_property
    def plan(self) -> Setup:
        """Raises ValueError where run_train.py would refuse to begin."""
        return open_run(self.config, self.ranks)

    @cached_property
    def refusal(self) -> str | None:
        """The reason why run_train.py would refuse to begin, and so there is no model to check, or None."""
        try:
            assert self.plan
        except ValueError as error:
            return str(error)
        return None

    @cached_property
    def model(self) -> LlamaForSFT:
        return load_model(self.plan)

    @property
    def loss(self) -> LossSum:
        """The run's own loss, in its compute type."""
        return (
            loss_function(self.plan.model.loss)
            if self.model.compute_dtype == self.plan.model.compute_dtype
            else NATIVE_LOSS
        )

    @contextmanager
    def in_fp32(self) -> Iterator[LlamaForSFT]:
        """Lets the model compute in fp32, with the attention that runs everywhere."""
        before = self.model.compute_dtype, self.model.attention
        if self.model.compute_dtype != torch.float32:
            self.model.compute_dtype, self.model.attention = torch.float32, "sdpa"
        try:
            yield self.model
        finally:
            self.model.compute_dtype, self.model.attention = before

    @cached_property
    def documents(self) -> tuple[LabeledConversation, ...]:
        """Conversations of the first packs, as many as the model can compute in seconds; long ones are cut."""
        on_gpu = self.ranks.device.type == "cuda"
        room = self.sizes.tokens or (_TOKENS_ON_GPU if on_gpu else _TOKENS_ON_CPU)
        longest, documents = max(_SHORTEST_CUT, room // 3), []
        for key in (key for pack in self.packs for key in pack.keys):
            read = self.preparation.read(key)
            assert isinstance(read, LabeledConversation)
            document = _cut(read, longest)
            if len(document) <= room and len(documents) < _MOST_DOCUMENTS:
                documents.append(document)
                room -= len(document)
        return tuple(documents)

    def batch(self, documents: Sequence[LabeledConversation], *, isolated: bool | None = None) -> Batch:
        """Returns a pack that the documents fill, isolated from each other or not; by default as in the run."""
        pack = lay_out(
            documents,
            token_budget=sum(map(len, documents)),
            remove_cross_attention=self.config.data.remove_cross_attention if isolated is None else isolated,
            pad_id=self.chat_tokenizer.pad_id,
        )
        return collate(pack, keep_tail=True)


NATIVE_LOSS: LossSum = weighted_loss_sum


def _cut(conversation: LabeledConversation, length: int) -> LabeledConversation:
    """Returns at most `length` tokens of a conversation, the first label among them."""
    if len(conversation) <= length:
        return conversation
    labeled = np.flatnonzero(conversation.labels != IGNORE_INDEX)
    start = int(np.clip(labeled[0] - length // 2, 0, len(conversation) - length))
    part = slice(start, start + length)
    labels, loss_weights = conversation.labels[part].copy(), conversation.loss_weights[part].copy()
    labels[-1], loss_weights[-1] = IGNORE_INDEX, 0
    return replace(
        conversation,
        input_ids=conversation.input_ids[part],
        labels=labels,
        loss_weights=loss_weights,
        role_ids=conversation.role_ids[part],
    )


_LAYER = re.compile(r"\.layers\.(\d+)\.")


def cut_model(source: Path, folder: Path, num_layers: int) -> Path:
    """Writes a model with the first `num_layers` layers of the one in `source` to `folder`; the rest is unchanged."""
    folder.mkdir(parents=True)
    for path in source.glob("*.json"):
        if not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    config = read_json(source / "config.json")
    config["num_hidden_layers"] = num_layers
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:num_layers]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with SafetensorsFolder(source) as weights:
        kept = {name: weights.read(name) for name in weights.names() if _layer(name) < num_layers}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _layer(name: str) -> int:
    """Returns the number of the layer of a tensor, -1 where it belongs to none."""
    found = _LAYER.search(name)
    return int(found.group(1)) if found else -1
