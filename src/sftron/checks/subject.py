"""The subject of a run's checks: rows and packs of the user's data, and the model, all created lazily."""

from __future__ import annotations

import datetime
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from sftron import __version__
from sftron.checkpoint.adapter import model_projections
from sftron.checkpoint.checkpoint import trained_parameters
from sftron.checkpoint.model_folder import read_config, stop_ids_of
from sftron.checks.cut_model import cut_adapter, cut_model, layer_of
from sftron.checks.report import NotMeasuredError
from sftron.config import Config
from sftron.config.schema import Lora
from sftron.data.dataset import PackedDataset
from sftron.data.formats.table import Parsed
from sftron.data.loader import collate
from sftron.data.packing import lay_out
from sftron.data.types import (
    IGNORE_INDEX,
    Batch,
    Conversation,
    Document,
    Dropped,
    LabeledConversation,
    Pack,
    TokenizedConversation,
)
from sftron.kernels.device import default_device, device_name, is_gpu
from sftron.models.adapters import ALL_LINEAR, A, B, match_targets
from sftron.models.families.table import FAMILIES
from sftron.models.layers import Adapter
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import LossSum, loss_function, weighted_loss_sum
from sftron.models.quantization import from_stored
from sftron.train import build_data
from sftron.train.build_model import load_run_model
from sftron.train.build_run import open_run
from sftron.train.extension import load_extension
from sftron.train.objective import Objective, TokenLoss
from sftron.train.places import find_places, model_folder
from sftron.train.ranks import Ranks
from sftron.train.run import Setup
from sftron.train.sample import sampled_keys

_NUM_PACKS, _MOST_DOCUMENTS = 8, 8
_TOKENS_ON_CPU, _TOKENS_ON_GPU = 512, 8192
_SHORTEST_CUT = 3
"""The minimum length: the token before the first label, the labeled token, and the last token, which loses its
label."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One row of the data at every stage; `parsed` is the conversation after truncation, plain text, or ids."""

    parsed: Parsed
    tokenized: TokenizedConversation
    labeled: LabeledConversation
    location: str


class Subject:
    """A run before it begins, with its data opened and its rows labeled.

    Args:
        scratch: An empty folder for the files of the checks.
        num_rows: The number of rows to look at.
        num_layers: The number of the model's layers to compute; None for all. The model of `config` has only these
            layers; `whole_config` is the run's configuration.
        num_tokens: The number of tokens that the model computes at once; None to decide by the device.
        num_ranks: The number of processes in the check `ranks`; None for two.
        num_sharing: The number of processes that share each pack in the check `context`; None for two.

    Raises:
        ValueError: The configuration or the data cannot be used.
    """

    def __init__(
        self,
        config: Config,
        scratch: Path,
        *,
        num_rows: int = 400,
        num_layers: int | None = None,
        num_tokens: int | None = None,
        num_ranks: int | None = None,
        num_sharing: int | None = None,
    ) -> None:
        self.scratch, self.num_ranks, self.num_sharing = scratch, num_ranks or 2, num_sharing or 2
        self.whole_config = config
        self.model_folder = model_folder(config)
        architecture = read_config(self.model_folder)
        self.total_layers = architecture.num_hidden_layers
        self._is_whole = FAMILIES[architecture.model_type].is_whole
        self.num_layers = self.total_layers
        self.num_layers = self.first_layers(num_layers or self.total_layers)
        self.config = self.with_layers(config, self.num_layers)
        self.ranks = Ranks(device=default_device())
        self._num_tokens = num_tokens or (_TOKENS_ON_GPU if is_gpu(self.ranks.device) else _TOKENS_ON_CPU)
        self.chat_tokenizer = build_data.load_chat_tokenizer(config)
        self.extension = load_extension(config.extend, config.model.path)
        self.preparation = build_data.open_data(config, self.chat_tokenizer, self.extension.data)
        self.dropped: Counter[str] = Counter()
        self._start: dict[str, Tensor] = {}
        self.rows = tuple(self._read_rows(num_rows))

    def first_layers(self, num_layers: int) -> int:
        """Returns the number of layers to compute where the first `num_layers` suffice, or all if these do not form a
        model."""
        return self.num_layers if self._is_whole else min(num_layers, self.num_layers)

    def with_layers(self, config: Config, num_layers: int) -> Config:
        """Returns the configuration with a model of only the first layers, at most the subject's."""
        num_layers = self.first_layers(num_layers)
        if num_layers == self.total_layers:
            return config
        folder = self.scratch / f"first-{num_layers}-layers"
        if not folder.exists():
            cut_model(self.model_folder, folder, num_layers)
        model = config.model.model_copy(update={"path": str(folder), "revision": None})
        at = {"path": config.tokenizer_path, "revision": config.tokenizer_revision}
        tokenizer = config.tokenizer.model_copy(update=at)
        lora = self._lora_of_layers(config.lora, num_layers)
        return config.model_copy(update={"model": model, "tokenizer": tokenizer, "lora": lora})

    def _lora_of_layers(self, lora: Lora | None, num_layers: int) -> Lora | None:
        """Returns the section `lora` for a model of only the first layers.

        Raises NotMeasuredError if these layers have no adapter.
        """
        if lora is None:
            return None
        updates: dict[str, Any] = {}
        if lora.targets != ALL_LINEAR:
            # A name or an expression may match only layers that the cut model lacks.
            kept = [
                name
                for name in match_targets(lora.targets, list(model_projections(read_config(self.model_folder))))
                if layer_of(name) < num_layers
            ]
            if not kept:
                raise NotMeasuredError(f"the first {num_layers} of {self.total_layers} layers have no adapter")
            updates["targets"] = tuple(kept)
        if lora.adapter is not None:
            folder = self.scratch / f"adapter-of-first-{num_layers}-layers"
            if not folder.exists():
                cut_adapter(Path(lora.adapter), folder, num_layers)
            updates["adapter"] = str(folder)
        return lora.model_copy(update=updates)

    @property
    def depth(self) -> str:
        """The number of layers as text; empty if the checks use all layers."""
        return "" if self.num_layers == self.total_layers else f"first {self.num_layers} of {self.total_layers} layers"

    @property
    def facts(self) -> dict[str, str]:
        """The checked configuration, data and model, and the versions of the software."""
        num_rows, device = self.preparation.num_rows, self.ranks.device
        rows = "rows read forward" if num_rows is None else f"{num_rows:,} rows"
        dropped = "".join(f"; {count:,} dropped: {reason}" for reason, count in self.dropped.items())
        trained = ["what the model has to write"] * bool(self.chats or not self.texts) + ["plain text"] * bool(
            self.texts
        )
        adapters = ""
        if (lora := self.config.lora) is not None:
            adapters = lora.adapter or "new; random values, so that a mistake shows"
        on = device_name(device) if is_gpu(device) else f"cpu, threads: {torch.get_num_threads()}"
        facts = {
            "model": f"{self.model_folder}, {self.total_layers} layers",
            "depth": f"{self.depth} computed (--layers)" if self.depth else "",
            "data": f"{rows} of {', '.join(self.preparation.source_names)}",
            "looked at": f"{len(self.rows):,} rows, {len(self.packs)} packs{dropped}",
            "computed": f"{sum(map(len, self.documents)):,} tokens of {len(self.documents)} conversations",
            "adapters": adapters,
            "trained": " and ".join(trained) if self.config.data.train_on_completions_only else "every token",
            "device": on,
            "versions": f"sftron {__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
            f"Python {platform.python_version()}",
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        }
        return {name: fact for name, fact in facts.items() if fact}

    # -- the data ----------------------------------------------------------------------------------------------------

    def _read_rows(self, num_rows: int) -> Iterator[Row]:
        for key in sampled_keys(self.preparation, num_rows):
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
    def texts(self) -> tuple[tuple[Document, Row], ...]:
        """The rows that contain plain text."""
        return tuple((row.parsed, row) for row in self.rows if isinstance(row.parsed, Document))

    def open_dataset(self, config: Config, **ranks: int) -> PackedDataset:
        """Opens the data again with the settings of `config`; `ranks` are dp_rank and dp_world_size."""
        preparation = build_data.open_data(config, self.chat_tokenizer, self.extension.data)
        return build_data.make_dataset(config, preparation, row_lengths=self._row_lengths, **ranks)

    @cached_property
    def _row_lengths(self) -> Sequence[int | str] | None:
        """The lengths of all rows if packing is planned, else None."""
        dataset = build_data.make_dataset(self.config, self.preparation)
        return dataset.measure() if dataset.is_planned else None

    @cached_property
    def packs(self) -> tuple[Pack, ...]:
        """The first packs of the run."""
        return tuple(islice(self.open_dataset(self.config), _NUM_PACKS))

    @cached_property
    def own_stop_ids(self) -> frozenset[int]:
        """The ids that end a generation according to the model's own files, and the tokenizer's end-of-text token."""
        eos = self.chat_tokenizer.tokenizer.eos_token_id
        return frozenset(stop_ids_of(self.model_folder)) | ({eos} if isinstance(eos, int) else set())

    # -- the model ---------------------------------------------------------------------------------------------------

    @cached_property
    def setup_or_refusal(self) -> Setup | ValueError:
        """The run's setup, or the error with which `sftron train` would refuse it."""
        try:
            return open_run(self.config, self.ranks, find_places(self.config), self.extension)
        except ValueError as error:
            return error

    @property
    def setup(self) -> Setup:
        """The run's setup. Raises NotMeasuredError if `sftron train` would refuse the run, because it then has no
        model."""
        if isinstance(self.setup_or_refusal, ValueError):
            raise NotMeasuredError("`sftron train` would refuse this run: see start-up")
        return self.setup_or_refusal

    @cached_property
    def model(self) -> LlamaForSFT:
        """The model. Adapters that start at zero get random values, because a mistake in a zero adapter would not
        show."""
        model = load_run_model(self.setup)
        if self.config.lora is not None and self.config.lora.adapter is None:
            self._start = {name: each.detach().clone() for name, each in trained_parameters(model).items()}
            _randomize_adapters(model)
        return model

    @contextmanager
    def at_start(self) -> Iterator[LlamaForSFT]:
        """Temporarily gives the trained parameters the values with which the run starts."""
        trained = trained_parameters(self.model) if self.config.lora is not None else {}
        before = {name: each.detach().clone() for name, each in trained.items()}
        try:
            _copy_into(trained, self._start)
            yield self.model
        finally:
            _copy_into(trained, before)

    @property
    def loss(self) -> LossSum:
        """The loss function of the run; the native one if the model currently computes in another type."""
        planned = self.setup.model
        is_planned = self.model.compute_dtype == planned.compute_dtype
        return loss_function(planned.loss) if is_planned else weighted_loss_sum

    @property
    def objective(self) -> Objective:
        """What the run minimizes: a user's own objective, or the run's loss function."""
        return TokenLoss(self.loss) if self.extension.objective is None else self.extension.objective

    @contextmanager
    def in_fp32(self) -> Iterator[LlamaForSFT]:
        """Temporarily makes the model compute in fp32, with the attention backend that runs on every device."""
        before = self.model.compute_dtype, self.model.attention
        if self.model.compute_dtype != torch.float32:
            self.model.compute_dtype, self.model.attention = torch.float32, "sdpa"
        try:
            yield self.model
        finally:
            self.model.compute_dtype, self.model.attention = before

    @cached_property
    def documents(self) -> tuple[LabeledConversation, ...]:
        """Conversations from the first packs, as many as the model can compute in seconds; long ones are cut."""
        room = self._num_tokens
        longest, documents = max(_SHORTEST_CUT, room // 3), []
        for key in (key for pack in self.packs for key in pack.keys):
            read = self.preparation.read(key)
            assert isinstance(read, LabeledConversation)
            document = _cut(read, longest)
            if len(document) <= room and len(documents) < _MOST_DOCUMENTS:
                documents.append(document)
                room -= len(document)
        return tuple(documents)

    def require_documents(self, number: int) -> tuple[LabeledConversation, ...]:
        """Returns `documents`. Raises NotMeasuredError if there are fewer than `number`."""
        if len(self.documents) < number:
            raise NotMeasuredError(f"{len(self.documents) or 'no'} conversation fits into --tokens")
        return self.documents

    def batch(self, documents: Sequence[LabeledConversation], *, isolated: bool | None = None) -> Batch:
        """Returns a batch of one pack with the documents; `isolated` defaults to the run's setting."""
        pack = lay_out(
            documents,
            token_budget=sum(map(len, documents)),
            remove_cross_attention=self.config.data.remove_cross_attention if isolated is None else isolated,
            pad_id=self.chat_tokenizer.pad_id,
        )
        return collate(pack, keep_tail=True)


def _cut(conversation: LabeledConversation, length: int) -> LabeledConversation:
    """Returns a conversation cut to at most `length` tokens, which include the first label."""
    if len(conversation) <= length:
        return conversation
    first_label = int(np.flatnonzero(conversation.labels != IGNORE_INDEX)[0])
    start = int(np.clip(first_label - length // 2, 0, len(conversation) - length))
    names = ("input_ids", "labels", "loss_weights", "role_ids")
    span = {name: getattr(conversation, name)[start : start + length].copy() for name in names}
    span["labels"][-1], span["loss_weights"][-1] = IGNORE_INDEX, 0
    return replace(conversation, **span)


_SHARE_OF_WEIGHTS = 0.1


@torch.no_grad()
def _randomize_adapters(model: LlamaForSFT) -> None:
    """Gives each lora_B values that make its adapter change the weights by about a tenth. Changes every other trained
    tensor, except lora_A, by about a tenth too."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in trained_parameters(model).items():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        if name.endswith(B):
            linear, adapter = (model.get_submodule(name.rsplit(".", num)[0]) for num in (3, 1))
            assert isinstance(adapter, Adapter)
            weight = from_stored(linear.get_parameter("weight"), torch.float32)
            deltas = adapter.scale * adapter.lora_A.norm() / adapter.lora_A.shape[1] ** 0.5
            parameter.copy_(noise * _SHARE_OF_WEIGHTS * weight.square().mean().sqrt() / deltas)
        elif not name.endswith(A):
            parameter.mul_(1 + _SHARE_OF_WEIGHTS * noise)


def _copy_into(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
