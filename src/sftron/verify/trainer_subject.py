"""A trainer of another library as the subject of checks: its own batches, its own model, and its own loss.

    trainer  ->  a sample of its rows  ->  Step: the batches of one accumulation, from its own dataloader and collator
             ->  SeenBatch: the arguments with which its model is really called
             ->  Document: one conversation, or a fragment of one, in a row of a batch (trainer_documents.py)

The data checks take all sampled rows and compute nothing: the call of the model is caught and ended. The checks of the
model take a second, small sample, which is computed in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sftron import __version__
from sftron.data.dataset import PackedDataset
from sftron.data.types import IGNORE_INDEX
from sftron.verify.table import NotMeasuredError
from sftron.verify.trainer_documents import Document, Documents, Finder
from sftron.verify.trainer_state import own_collator, restored

NUM_ROWS = 256
_MOST_TOKENS = 400_000
_TOKENS_ON_CPU, _TOKENS_ON_GPU = 1536, 16384
_MOST_MICRO_BATCHES, _NUM_PACKS = 8, 16


class Recorder:
    """A data collator that records the rows that it is given; else it is the trainer's own."""

    def __init__(self, collator: Any) -> None:
        self.collator, self.features = collator, list[Sequence[Any]]()

    def __call__(self, features: Sequence[Any], *args: Any, **options: Any) -> Any:
        self.features.append([dict(each) if isinstance(each, Mapping) else each for each in features])
        return self.collator(features, *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collator, name)


@dataclass(frozen=True, slots=True, eq=False)
class SeenBatch:
    """One micro-batch: what the collator made of which rows, and what the model is called with."""

    features: Sequence[Any]
    """The rows that the collator was given; empty if the trainer does not use its `data_collator`."""
    inputs: Mapping[str, Any]
    """The batch of the trainer's dataloader."""
    seen: Mapping[str, Any]
    """The keyword arguments of the model's call in `training_step`."""
    ids: np.ndarray
    """int64 [B, T]."""
    labels: np.ndarray
    """int64 [B, T]: the label of the token at the same index, which the model predicts from the tokens before it; or
    IGNORE_INDEX."""
    attended: np.ndarray | None
    """[B, T], the attention mask, if it has one number for each token; 0 for padding."""
    positions: np.ndarray | None
    """[B, T], the position ids, if they are passed."""

    @property
    def num_trained(self) -> int:
        """The number of labels from which the loss is computed; no token precedes the first of a row."""
        return int((self.labels[:, 1:] != IGNORE_INDEX).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The micro-batches of one optimizer step, and the number by which the trainer divides their loss."""

    batches: tuple[SeenBatch, ...]
    num_items: Any
    """`num_items_in_batch` of `get_batch_samples`; None if the trainer counts nothing."""


class _Caught(BaseException):
    """The call of the model, caught."""


class TrainerSubject:
    """A trainer, as it is before `train()`.

    Args:
        trainer: A `transformers.Trainer`, within `untouched`.
        conversations: The conversations of the data set, if its rows hold ids alone.
        trained_roles: "assistant", or "all" for a loss over every token.

    Raises:
        ValueError: The trainer cannot be checked.
    """

    def __init__(self, trainer: Any, conversations: Any = None, trained_roles: str = "assistant") -> None:
        self.trainer, self.trained_roles = trainer, trained_roles
        self.tokenizer = require_checkable(trainer, trained_roles)
        data = trainer.train_dataset
        if is_packed := isinstance(data, PackedDataset):  # endless; its first packs stand for all
            state = data.state_dict()
            data = list(islice(data, _NUM_PACKS))
            trainer.train_dataset.load_state_dict(state)
        self.total_rows = len(data)
        chosen = np.arange(self.total_rows)
        if self.total_rows > NUM_ROWS:
            chosen = np.sort(np.random.default_rng(0).choice(self.total_rows, NUM_ROWS, replace=False))
        self.is_whole = self.total_rows <= NUM_ROWS and not is_packed
        self.sample = _select(data, chosen)
        self.rows = [dict(row) if isinstance(row := self.sample[n], Mapping) else row for n in range(len(chosen))]
        self.gradients: dict[str, Tensor | None] = {}
        self._conversations = list(conversations) if conversations is not None else None

    @cached_property
    def model(self) -> nn.Module:
        """The model as `train()` prepares it: autocast, recomputed activations, and noise on the embeddings."""
        trainer, args = self.trainer, self.trainer.args
        if getattr(args, "activation_checkpointing", False) or getattr(args, "gradient_checkpointing", False):
            name = "activation_checkpointing"
            if not hasattr(trainer.model, f"{name}_enable"):
                name = "gradient_checkpointing"
            options = dict(getattr(args, f"{name}_kwargs", None) or {})
            options = {key: value for key, value in options.items() if key not in ("every_n_layers", "offload")}
            getattr(trainer.model, f"{name}_enable")(**{f"{name}_kwargs": options or None})
        if args.torch_compile:
            return trainer.model
        model = trainer.accelerator.prepare_model(trainer.model, device_placement=False)
        trainer.model_wrapped = model
        return model

    # -- the data ----------------------------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The accumulations of all sampled rows, without any computation of the model."""
        return tuple(self._steps(self.sample))

    @property
    def batches(self) -> list[SeenBatch]:
        return [batch for step in self.steps for batch in step.batches]

    @cached_property
    def found(self) -> Documents:
        """The documents of all sampled rows."""
        return self.finder.documents(self.batches)

    @cached_property
    def finder(self) -> Finder:
        # TRL's own attribute declares that of each row only the completion is trained.
        is_last_alone = bool(getattr(self.trainer, "completion_only_loss", False))
        return Finder(self.rows, self._conversations, self.tokenizer, is_last_alone)

    def documents(self, with_roles: bool = True) -> list[Document]:
        """Returns the documents. Raises NotMeasuredError if there are none whose tokens have roles."""
        documents = [each for each in self.found.documents if each.tokens is not None or not with_roles]
        if not documents:
            raise NotMeasuredError(f"no document of the batches has known roles: {self.found.summary}")
        return documents

    def _steps(self, sample: Any, most: int | None = None) -> Iterator[Step]:
        """Yields the trainer's accumulations over some of its rows, as its training loop gets them."""
        trainer = self.trainer
        recorder = Recorder(own_collator(trainer.data_collator))
        with restored(trainer, "train_dataset", "data_collator"):
            trainer.train_dataset, trainer.data_collator = sample, recorder
            loader = iter(trainer.get_train_dataloader())
            number, num_tokens = trainer.args.gradient_accumulation_steps, 0
            num_seen = 0
            while most is None or most > 0:
                try:
                    batches, num_items = trainer.get_batch_samples(loader, number, trainer.args.device)
                except Exception as error:
                    problem = f"the trainer cannot make its batches: {type(error).__name__}: {error}"
                    raise ValueError(f"{problem}; train() would end with the same error") from error
                if not batches:
                    return
                features = recorder.features[num_seen : num_seen + len(batches)]
                features += [[]] * (len(batches) - len(features))
                num_seen += len(batches)
                trainer.current_gradient_accumulation_steps = len(batches)
                seen = tuple(self._see(*pair, num_items) for pair in zip(batches, features, strict=True))
                yield Step(seen, num_items)
                num_tokens += sum(batch.ids.size for batch in seen)
                most = None if most is None else most - 1
                if num_tokens > _MOST_TOKENS:
                    self.is_whole = False
                    return

    def _see(self, inputs: Any, features: Sequence[Any], num_items: Any) -> SeenBatch:
        """Returns the batch with the arguments of the model's call, which is caught and not computed."""
        caught: dict[str, Any] = {}

        def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught.update(kwargs)
            if args and "input_ids" not in kwargs:
                caught["input_ids"] = args[0]
            raise _Caught

        handle = self.model.register_forward_pre_hook(catch, with_kwargs=True)
        try:
            self.trainer.training_step(self.model, dict(inputs), num_items)
        except _Caught:
            pass
        finally:
            handle.remove()
        seen = caught or dict(inputs)
        if not isinstance(seen.get("input_ids"), Tensor):
            raise ValueError("the trainer calls its model without input_ids, so its documents cannot be read")
        ids, attention = _array(seen["input_ids"]), seen.get("attention_mask")
        positions = seen.get("position_ids")
        return SeenBatch(
            features=features,
            inputs=dict(inputs),
            seen=seen,
            ids=ids,
            labels=_labels(seen, inputs, ids),
            attended=_array(attention) if isinstance(attention, Tensor) and attention.ndim == 2 else None,
            positions=np.broadcast_to(_array(positions), ids.shape)
            if isinstance(positions, Tensor) and positions.ndim == 2
            else None,
        )

    # -- the model ---------------------------------------------------------------------------------------------------

    @cached_property
    def step(self) -> Step:
        """One accumulation that is small enough to be computed: fewer or shorter rows, but the trainer's own batches.

        The number of micro-batches is the trainer's, up to eight.
        """
        trainer, args = self.trainer, self.trainer.args
        on_cpu = torch.device(args.device).type == "cpu"
        budget = _TOKENS_ON_CPU if on_cpu else _TOKENS_ON_GPU
        lengths = self._row_lengths
        accumulated = min(args.gradient_accumulation_steps, _MOST_MICRO_BATCHES)
        shortest = sorted(lengths)
        size = trainer._train_batch_size
        least = 1 if shortest[0] > budget // 2 else 2  # a long row is a pack; else rows need a neighbor
        while size > least and sum(shortest[: size * accumulated]) > budget:
            size = (size + 1) // 2
        while accumulated > 2 and sum(shortest[: size * accumulated]) > budget:
            accumulated //= 2
        number = min(size * accumulated, len(lengths))
        order = np.argsort(lengths, kind="stable")
        room = max(number, int(np.searchsorted(np.sort(lengths), budget / max(1, number), side="right")))
        chosen = order[np.unique(np.linspace(0, room - 1, number).round().astype(int))]
        with restored(trainer, "_train_batch_size"), restored(args, "gradient_accumulation_steps"):
            trainer._train_batch_size, args.gradient_accumulation_steps = size, accumulated
            step = next(self._steps(_select(self.sample, np.sort(chosen)), most=1))
        trainer.current_gradient_accumulation_steps = len(step.batches)
        return step

    @cached_property
    def _row_lengths(self) -> list[int]:
        """The number of tokens of each sampled row; of its batch, on average, where the row itself has no ids."""
        if self.rows and all(isinstance(row, Mapping) and "input_ids" in row for row in self.rows):
            return [len(row["input_ids"]) for row in self.rows]
        num_tokens = sum(batch.ids.size for batch in self.batches)
        return [max(1, num_tokens // max(1, len(self.rows)))] * len(self.rows)

    def loss_of(self, inputs: Mapping[str, Any], num_items: Any, *, training: bool = True) -> Tensor:
        """Returns what the trainer's `compute_loss` gives for a batch, with its own contexts."""
        inputs = self.trainer._prepare_inputs(dict(inputs))
        torch.manual_seed(0)  # the same dropout in every pass
        self.model.train(training)
        with self.trainer.compute_loss_context_manager():
            return self.trainer.compute_loss(self.model, inputs, num_items_in_batch=num_items)

    def hidden(self, inputs: Mapping[str, Any]) -> Tensor:
        """Returns the last hidden states [B, T, H] of the batch within the trainer's own `compute_loss`.

        Logits [B, T, V] take their place if the decoder cannot be found.
        """
        return self._hidden(lambda: self.loss_of(inputs, 1))[:, -inputs["input_ids"].shape[1] :]

    @torch.no_grad()
    def _hidden(self, call: Callable[[], Any]) -> Tensor:
        found: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            value = getattr(output, "last_hidden_state", None)
            value = getattr(output, "logits", None) if value is None else value
            if isinstance(value, Tensor) and value.ndim == 3:
                found.append(value.detach())
                raise _Caught

        handles = [each.register_forward_hook(keep) for each in self._decoders]
        torch.manual_seed(0)
        try:
            call()
        except _Caught:
            pass
        finally:
            for handle in handles:
                handle.remove()
        if not found:
            raise NotMeasuredError("the model shows neither hidden states nor logits")
        return found[0]

    def alone(self, ids: Tensor) -> Tensor:
        """Returns the last hidden states [B, n, H] of ids [B, n] without any other argument."""
        return self._hidden(lambda: self.model(input_ids=ids.to(self.trainer.args.device), use_cache=False))

    def see_alone(self, feature: Any, num_items: Any) -> SeenBatch:
        """Returns the batch that the trainer's collator makes of one row."""
        feature = dict(feature) if isinstance(feature, Mapping) else feature
        return self._see(own_collator(self.trainer.data_collator)([feature]), [feature], num_items)

    @cached_property
    def step_losses(self) -> tuple[list[float], float]:
        """What `training_step` returns for each micro-batch, without the auxiliary loss of a mixture of experts, and
        that auxiliary loss. The gradients are kept in `gradients`."""
        losses, auxiliary = list[float](), list[float]()

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(found := getattr(output, "aux_loss", None), Tensor):
                auxiliary.append(float(found))

        # TRL divides by it; later accumulations of the sample have set it too.
        self.trainer.current_gradient_accumulation_steps = len(self.step.batches)
        handle = self.model.register_forward_hook(keep)
        try:
            for batch in self.step.batches:
                torch.manual_seed(0)
                losses.append(float(self.trainer.training_step(self.model, dict(batch.inputs), self.step.num_items)))
        finally:
            handle.remove()
            self.gradients = {name: each.grad for name, each in self.trainer.model.named_parameters()}
            self.trainer.model.zero_grad(set_to_none=True)
        if len(auxiliary) != len(losses):
            return losses, 0.0
        config = self.unwrapped.config.get_text_config()
        share = getattr(self.trainer, "router_aux_loss_coef", None) or getattr(config, "router_aux_loss_coef", 0.0)
        if hasattr(self.trainer, "router_aux_loss_coef") and self.step.num_items is not None:
            share /= len(losses)  # TRL averages it over the accumulation
        return [loss - share * each for loss, each in zip(losses, auxiliary, strict=True)], share * max(auxiliary)

    @torch.no_grad()
    def token_losses(self, seen: Mapping[str, Any], labels: np.ndarray, *, training: bool = True) -> Tensor:
        """Returns the cross-entropy of each trained token of a batch, in fp32, from the model's own logits."""
        ours = ("labels", "shift_labels", "num_items_in_batch", "fused_lm_head")
        arguments = {name: value for name, value in seen.items() if name not in ours}
        torch.manual_seed(0)
        self.model.train(training)
        with self.trainer.compute_loss_context_manager():
            logits = getattr(self.model(**arguments), "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            raise NotMeasuredError("the model gives no logits")
        targets = torch.from_numpy(labels[:, 1:].astype(np.int64)).to(logits.device)
        logits = logits[:, -labels.shape[1] : -1]
        is_trained = targets != IGNORE_INDEX
        return nn.functional.cross_entropy(logits[is_trained].float(), targets[is_trained], reduction="none")

    @property
    def unwrapped(self) -> Any:
        """The model itself, without wrappers of accelerate and peft."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model, keep_fp32_wrapper=True)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    @property
    def _decoders(self) -> list[nn.Module]:
        model = self.unwrapped
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
        return [each for each in (decoder, self.model) if isinstance(each, nn.Module)]

    @property
    def facts(self) -> dict[str, str]:
        """What the checks look at, and the versions of the software."""
        import transformers

        trainer, model = self.trainer, self.unwrapped
        step, config = self.step, getattr(model, "config", None)
        computed = ", ".join(f"{batch.ids.shape[0]} x {batch.ids.shape[1]}" for batch in step.batches)
        facts = {
            "trainer": f"{type(trainer).__module__.partition('.')[0]} {type(trainer).__name__}",
            "model": f"{type(model).__name__} ({getattr(config, 'model_type', 'no configuration')}), attention "
            f"{getattr(config, '_attn_implementation', 'unknown')}, {next(model.parameters()).dtype}",
            "data": f"{self.total_rows:,} rows, {len(self.rows):,} looked at, in {len(self.batches):,} batches",
            "truth": self.found.summary,
            "computed": f"micro-batches of {computed} tokens",
            "trained": "what the model has to write" if self.trained_roles == "assistant" else "every token",
            "versions": f"sftron {__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
        }
        return {name: str(fact) for name, fact in facts.items() if fact}


def require_checkable(trainer: Any, trained_roles: str) -> Any:
    """Returns the trainer's tokenizer. Raises ValueError, with the remedy, if the trainer cannot be checked."""
    import transformers

    if not isinstance(trainer, transformers.Trainer):
        raise ValueError(f"found {type(trainer).__name__}; wanted a transformers.Trainer, such as TRL's SFTTrainer")
    if trained_roles not in ("assistant", "all"):
        raise ValueError(f"trained_roles is {trained_roles!r}; wanted 'assistant' or 'all'")
    args, config = trainer.args, getattr(trainer.model, "config", None)
    if args.world_size > 1 or args.n_gpu > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError(
            f"the trainer has {max(args.world_size, args.n_gpu)} ranks, or shards its model; check it in one process "
            "on one device (CUDA_VISIBLE_DEVICES=0, without a launcher), as its batches are the same there"
        )
    data: Any = trainer.train_dataset
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        if len(data) == 0:
            raise ValueError("the trainer's train_dataset has 0 rows")
    elif not isinstance(data, PackedDataset):
        found = "no train_dataset" if data is None else f"a streaming data set, {type(data).__name__}"
        raise ValueError(f"the trainer has {found}; give it a data set of known length, such as the first 256 rows")
    columns = getattr(data, "column_names", None) or []
    processor = trainer.processing_class
    if isinstance(processor, transformers.ProcessorMixin) or getattr(config, "vision_config", None) is not None:
        raise ValueError("vision models and processors are not checked; give a text model and its tokenizer")
    if found := {"image", "images", "video", "videos", "audio"} & set(columns):
        raise ValueError(f"the data set has a column {sorted(found)[0]}; only text is checked")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{type(trainer.model).__name__} is an encoder-decoder; only decoders are checked")
    tokenizer = processor or getattr(trainer.data_collator, "tokenizer", None)
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
        raise ValueError("the trainer has no tokenizer; pass it as processing_class")
    return tokenizer


def _select(data: Any, chosen: np.ndarray) -> Any:
    """Returns some rows of a data set, without writing a cache file."""
    if hasattr(data, "select") and hasattr(data, "column_names"):
        return data.select(chosen.tolist(), keep_in_memory=True)
    return torch.utils.data.Subset(data, chosen.tolist())


def _array(value: Tensor) -> np.ndarray:
    return value.detach().cpu().numpy()


def _labels(seen: Mapping[str, Any], inputs: Mapping[str, Any], ids: np.ndarray) -> np.ndarray:
    """Returns the label of each token [B, T]: those that the model is given, or those of the batch."""
    if isinstance(shifted := seen.get("shift_labels"), Tensor):
        first = np.full((len(ids), 1), IGNORE_INDEX, dtype=np.int64)
        return np.concatenate([first, _array(shifted)[:, :-1]], axis=1)
    for labels in (seen.get("labels"), inputs.get("labels")):
        if isinstance(labels, Tensor) and labels.shape == ids.shape:
            return _array(labels)
    raise ValueError("the trainer's batches have no labels of the shape of input_ids, so nothing would be trained")
