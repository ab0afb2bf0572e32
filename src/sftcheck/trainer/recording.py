"""Which trainers can be checked, the rows that their collator is given, and the steps that they make of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import SequentialSampler, Subset

from sftcheck.batches import SeenBatch, Step
from sftcheck.restore import own_collator, own_dataset, restored
from sftcheck.trainer.called_model import CalledModel
from sftron.data.types import SeekablePacks
from sftron.user_code import place_of

MOST_TOKENS = 400_000
LIBRARIES = ("transformers", "trl", "axolotl", "llamafactory", "swift", "peft", "accelerate")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def require_checkable(trainer: Any, trained_roles: str) -> Any:
    """Returns the trainer's tokenizer. Raises ValueError, with the remedy, if the trainer cannot be checked."""
    import transformers

    if not isinstance(trainer, transformers.Trainer):
        raise ValueError(f"found {type(trainer).__name__}; wanted a transformers.Trainer, such as TRL's SFTTrainer")
    if trained_roles not in ("assistant", "all"):
        raise ValueError(f"trained_roles is {trained_roles!r}; wanted 'assistant' or 'all'")
    args, config = trainer.args, getattr(trainer.model, "config", None)
    data: Any = trainer.train_dataset
    if args.n_gpu > 1 or trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and args.world_size == 1):
        raise ValueError(
            f"the trainer has {max(1, args.n_gpu)} devices in one process, or DeepSpeed; give each device a process "
            "(torchrun), or check it in one process on one device (CUDA_VISIBLE_DEVICES=0)"
        )
    if not isinstance(data, SeekablePacks) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        found = "no train_dataset" if data is None else f"a streaming data set, {type(data).__name__}"
        raise ValueError(f"the trainer has {found}; give it a data set of known length, such as the first 256 rows")
    if not isinstance(data, SeekablePacks) and len(data) == 0:
        raise ValueError("the trainer's train_dataset has 0 rows")
    processor = trainer.processing_class
    if isinstance(processor, transformers.ProcessorMixin) or getattr(config, "vision_config", None) is not None:
        raise ValueError("vision models and processors are not checked; give a text model and its tokenizer")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{type(trainer.model).__name__} is an encoder-decoder; only decoders are checked")
    tokenizer = processor or getattr(trainer.data_collator, "tokenizer", None)
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
        raise ValueError("the trainer has no tokenizer; pass it as processing_class")
    return tokenizer


def own_callbacks(trainer: Any) -> list[str]:
    """Returns the callbacks that no library brings, each with its hooks: they may change what trains."""
    import transformers

    base, found = transformers.TrainerCallback, list[str]()
    for kind in (type(each) for each in trainer.callback_handler.callbacks):
        if kind.__module__.partition(".")[0] not in LIBRARIES:
            names = [each for each in dir(kind) if each.startswith("on_")]
            hooks = [each for each in names if getattr(kind, each) is not getattr(base, each, None)]
            found.append(f"{kind.__name__} ({', '.join(hooks)})")
    return found


def require_mappings(batches: Sequence[Any]) -> None:
    """Raises ValueError if the dataloader gives no tensors by name, as in TRL's GRPOTrainer."""
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"the trainer's batches are of type {type(batch).__name__}; wanted a mapping with input_ids and labels"
                ". A trainer that generates what it trains on (GRPO, RLOO, PPO) cannot be checked; give a trainer for "
                "supervised fine-tuning, such as TRL's SFTTrainer"
            )


class Recorder:
    """Wraps the trainer's own data collator, and records the rows that it is given."""

    def __init__(self, collator: Any) -> None:
        self.collator, self.features = collator, list[Sequence[Any]]()

    def __call__(self, features: Sequence[Any], *args: Any, **options: Any) -> Any:
        self.features.append([dict(each) if isinstance(each, Mapping) else each for each in features])
        return self.collator(features, *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collator, name)


@contextmanager
def recorded(trainer: Any, data: str, sample: Any) -> Iterator[Recorder]:
    """Gives the trainer these rows as its `train_dataset` or `eval_dataset`, and records what its collator is given.

    Batches are made in this process, as nothing could be recorded in a worker.
    """
    args, collator = trainer.args, "data_collator"
    if data == "eval_dataset" and getattr(trainer, "eval_data_collator", None) is not None:  # axolotl's
        collator = "eval_data_collator"
    recorder = Recorder(own_collator(trainer, collator))
    workers = {"dataloader_num_workers": 0, "dataloader_prefetch_factor": None, "dataloader_persistent_workers": False}
    with restored(trainer, data, collator), restored(args, *workers):
        for target, changes in ((trainer, {data: sample, collator: recorder}), (args, workers)):
            for name, value in changes.items():
                setattr(target, name, value)
        yield recorder


def small_sizes(shortest: np.ndarray, budget: int, size: int, accumulated: int) -> tuple[int, int]:
    """Returns the rows of a micro-batch and the micro-batches of a step whose tokens are within a budget, if any are.

    Args:
        shortest: The lengths of the rows, sorted.
    """
    least = 1 if shortest[0] > budget else 2  # a long row is a pack; else rows need a neighbor
    while size > least and shortest[: size * accumulated].sum() > budget:
        size = (size + 1) // 2
    while accumulated > 2 and shortest[: size * accumulated].sum() > budget:
        accumulated //= 2
    return size, accumulated


def chosen_rows(size: int, most: int) -> np.ndarray:
    """Returns the numbers of the rows that are looked at, in order."""
    return np.sort(np.random.default_rng(0).choice(size, most, replace=False)) if size > most else np.arange(size)


def select(data: Any, chosen: np.ndarray) -> Any:
    """Returns some rows of a data set, without writing a cache file."""
    if hasattr(data, "select") and hasattr(data, "column_names"):
        return data.select(chosen.tolist(), keep_in_memory=True)
    return Subset(own_dataset(data), chosen.tolist())


def rows_of(sample: Any) -> list[Any]:
    """Returns the rows of a sample, as dictionaries if they are mappings. Raises ValueError if one holds an image."""
    rows = [dict(row) if isinstance(row := sample[n], Mapping) else row for n in range(len(sample))]
    for row in rows:
        # LLaMA-Factory gives every row such columns, which are empty for text.
        if media := [name for name in _MEDIA if isinstance(row, dict) and row.get(name)]:
            raise ValueError(f"a row of the data set has {media[0]}; only text is checked")
    return rows


class TrainerBatches:
    """The batches of a trainer, within `restore_after`.

    Attributes:
        total_rows: The number of rows of its data set.
    """

    def __init__(self, trainer: Any, total_rows: int) -> None:
        self.trainer, self.total_rows = trainer, total_rows
        self._needs_all_rows = False  # whether the trainer's own sampler numbers rows that a sample does not have

    @cached_property
    def model(self) -> CalledModel:
        return CalledModel(self.trainer)

    def _steps(self, sample: Any) -> list[Step]:
        """Returns the trainer's accumulations over some of its rows, as its training loop gets them."""
        try:
            return list(self.accumulations(sample))
        except ValueError:
            if self._needs_all_rows or len(sample) == self.total_rows:
                raise
        self._needs_all_rows = True
        return list(self.accumulations(sample))

    def accumulations(self, sample: Any) -> Iterator[Step]:
        trainer, args = self.trainer, self.trainer.args
        with recorded(trainer, "train_dataset", sample) as recorder, restored(trainer, "_get_train_sampler"):
            if self._needs_all_rows:
                trainer._get_train_sampler = lambda *_: SequentialSampler(sample)
            loader, num_tokens = iter(trainer.get_train_dataloader()), 0
            while num_tokens <= MOST_TOKENS:
                try:
                    batches, num_items = trainer.get_batch_samples(
                        loader, args.gradient_accumulation_steps, args.device
                    )
                except Exception as error:
                    problem = f"the trainer cannot make its batches: {place_of(error)}: {type(error).__name__}: {error}"
                    raise ValueError(f"{problem} (with {len(sample):,} of {self.total_rows:,} rows)") from error
                if not batches:
                    return
                features = [recorder.features.pop(0) if recorder.features else [] for _ in batches]
                step = self._seen_step(batches, features, num_items)
                num_tokens += sum(batch.ids.size for batch in step.batches)
                yield step

    def _seen_step(self, batches: Sequence[Any], features: Sequence[Any], num_items: Any) -> Step:
        require_mappings(batches)
        self.trainer.current_gradient_accumulation_steps = len(batches)
        return Step(tuple(map(self._see, batches, features, [num_items] * len(batches))), num_items)

    def _see(self, inputs: Any, features: Sequence[Any], num_items: Any) -> SeenBatch:
        """Returns the batch with the arguments of the model's call in `training_step`."""
        module = self.model.module
        seen = self.model.arguments(lambda: self.trainer.training_step(module, dict(inputs), num_items))
        return SeenBatch(features, dict(inputs), seen or dict(inputs), is_called=bool(seen))
