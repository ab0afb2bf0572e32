"""Set-ups of rank_zoo.py in which each rank has rows of its own: their counts, their sums, and the replicas."""

from typing import Any

import torch
from accelerate.state import DistributedType, PartialState
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer
from trl import SFTConfig, SFTTrainer

from sftcheck.faults import Fault
from tests.sftcheck.rank_materials import (
    QUIET,
    arguments,
    broken,
    conversations,
    epoch,
    features,
    gathered,
    plain,
    ranks_drift,
    real_step,
    rows_are_lost,
    rows_are_repeated,
    scratch,
    sound,
    step_has_factor,
    step_is_right,
    step_is_wrong,
)
from tests.sftcheck.small_trainers import tiny
from tests.sftcheck.zoo_materials import tok

# -- broken ----------------------------------------------------------------------------------------------------------


@broken(Fault.GRADIENTS_OF_RANKS, "gradients", "denominators", "loss", proof=step_is_wrong)
def mean_per_rank() -> Trainer:
    """Each rank divides by its own labels, and DDP takes the mean of these means (prime-rl#1961)."""
    return plain(average_tokens_across_devices=False)


class _CountsTimesRanks(Trainer):
    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        count = super()._get_num_items_in_batch(batch_samples, device)
        return count * self.args.world_size


@broken(Fault.OTHER_DENOMINATOR, "denominators", "gradients", "loss", proof=step_has_factor(1 / 2))
def counts_times_ranks() -> Trainer:
    """The count of all ranks is summed over the ranks once more."""
    return plain(_CountsTimesRanks)


class _FloorOfTheCount(Trainer):
    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        count = super()._get_num_items_in_batch(batch_samples, device)
        return self.args.world_size * (count // self.args.world_size)


def _floor_differs(trainer: Trainer) -> bool:
    """The count that the trainer returns is not the labels of its batches, but the next lower multiple."""
    given = [{"labels": torch.tensor([[-100, 1, 2, 3]])}]
    if torch.distributed.get_rank():
        given = [{"labels": torch.tensor([[-100, 1, 2, -100]])}]
    return int(trainer._get_num_items_in_batch(given, torch.device("cpu"))) == 4  # pyright: ignore


@broken(Fault.OTHER_DENOMINATOR, "denominators", may="gradients, loss", proof=_floor_differs)
def floor_of_the_count() -> Trainer:
    """The labels of all ranks are divided by the number of ranks in whole numbers, as unsloth does."""
    return plain(_FloorOfTheCount)


class _Scaled(Trainer):
    factor = 1.0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        return self.factor * super().compute_loss(model, inputs, **given)


class _DividedTwice(_Scaled):
    factor = 1 / 2


class _MultipliedTwice(_Scaled):
    factor = 2.0


@broken(Fault.GRADIENT_FACTOR, "gradients", "loss", proof=step_has_factor(1 / 2))
def divided_twice() -> Trainer:
    """The loss is divided by the number of ranks, and DDP divides the gradients again."""
    return plain(_DividedTwice)


@broken(Fault.GRADIENT_FACTOR, "gradients", "loss", proof=step_has_factor(2.0))
def multiplied_twice() -> Trainer:
    """The loss is multiplied by the number of ranks twice (SkyRL#1751)."""
    return plain(_MultipliedTwice)


class _NeverSynced(Trainer):
    def training_step(self, model: Any, *args: Any, **given: Any) -> Any:
        with self.accelerator.no_sync(model=model):
            return super().training_step(model, *args, **given)


@broken(Fault.GRADIENTS_NOT_SUMMED, "gradients", "replicas", proof=ranks_drift)
def never_synced() -> Trainer:
    """Every micro-batch is computed within no_sync, so no rank hears of the others' gradients."""
    return plain(_NeverSynced)


class _FirstSynced(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        context = self.accelerator.no_sync(model=model) if self._is_last else torch.enable_grad()
        model.require_backward_grad_sync = True
        with context:
            return super().training_step(model, inputs, num_items_in_batch)

    @property
    def _is_last(self) -> bool:
        return self.accelerator.gradient_state.sync_gradients


@broken(Fault.GRADIENTS_NOT_SUMMED, "gradients", "replicas", proof=ranks_drift)
def first_micro_batch_synced() -> Trainer:
    """The first micro-batch is reduced, and the last one is within no_sync: the wrong way round."""
    return plain(_FirstSynced)


class _HeadIgnored(Trainer):
    def _wrap_model(self, model: nn.Module, *args: Any, **given: Any) -> nn.Module:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["lm_head.weight"])
        return super()._wrap_model(model, *args, **given)


@broken(Fault.GRADIENTS_NOT_SUMMED, "gradients", "replicas", proof=ranks_drift)
def head_not_reduced() -> Trainer:
    """DDP is told to ignore the head, of which every rank then trains its own."""
    return plain(_HeadIgnored)


class _NotInitialized(Trainer):
    def _wrap_model(self, model: nn.Module, *args: Any, **given: Any) -> nn.Module:
        return DistributedDataParallel(model, init_sync=False)


@broken(Fault.REPLICAS_DIFFER, "replicas", may="gradients, loss, across ranks", proof=ranks_drift)
def different_adapters() -> Trainer:
    """Each rank draws its own adapters, and nothing broadcasts those of rank 0: N ranks train N models."""
    model = tiny(tok("chatml"))
    torch.manual_seed(100 + torch.distributed.get_rank())
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return plain(_NotInitialized, model)


class _SameRows(Trainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=self._train_batch_size, collate_fn=self.data_collator)  # pyright: ignore


@broken(Fault.ROWS_REPEATED, "rows", proof=rows_are_repeated)
def same_rows_on_every_rank() -> Trainer:
    """A dataloader of one's own is not prepared by accelerate, so every rank computes every row."""
    return plain(_SameRows)


@broken(Fault.ROWS_REPEATED, "rows", proof=rows_are_lost(12))
def sharded_twice() -> Trainer:
    """Each rank loads its own half of the rows, of which the Trainer gives it the half again."""
    rank = torch.distributed.get_rank()
    return plain(rows=features(tok("chatml"))[rank::2])


class _Uneven(Trainer):
    def get_train_dataloader(self) -> Any:
        rows = list(range(len(self.train_dataset)))[self.args.process_index :: 2]  # pyright: ignore
        rows = rows[:8] if self.args.process_index else rows
        return DataLoader(
            torch.utils.data.Subset(self.train_dataset, rows),  # pyright: ignore
            batch_size=self._train_batch_size,
            collate_fn=self.data_collator,
        )


@broken(Fault.BATCHES_UNEQUAL, "rows", proof=lambda trainer: len(epoch(trainer)) == 20)
def uneven_batches() -> Trainer:
    """One rank has fewer batches than the other, which then waits for it for ever."""
    return plain(_Uneven)


class _NanOfARank(Trainer):
    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.model_accepts_loss_kwargs = False


def _loss_is_nan(trainer: Trainer) -> bool:
    first = next(iter(trainer.get_train_dataloader()))
    return any(gathered(bool(trainer.compute_loss(trainer.model, first).isnan()))) and step_is_wrong(trainer)


@broken(
    Fault.GRADIENTS_OF_RANKS,
    "gradients",
    "loss",
    may="replicas, adapters, truncation, trained tokens, stop tokens",
    proof=_loss_is_nan,
)
def no_label_on_a_rank() -> Trainer:
    """The labels of a batch are all on another rank, so this rank's mean divides by 0 (prime-rl#2485)."""
    rows = features(tok("chatml"))
    for number in range(0, len(rows), 4):  # of rank 0, in batches of one
        rows[number]["labels"] = [-100] * len(rows[number]["labels"])
    return plain(_NanOfARank, rows=rows, per_device_train_batch_size=1, train_sampling_strategy="sequential")


# -- sound -----------------------------------------------------------------------------------------------------------


@sound(proof=step_is_right)
def ddp_of_trainer() -> Trainer:
    """DDP with the defaults of transformers, and batches with unlike numbers of labels."""
    return plain()


@sound(proof=step_is_right, ranks=4)
def ddp_of_four_ranks() -> Trainer:
    return plain(per_device_train_batch_size=1, gradient_accumulation_steps=3)


def _trl(**given: Any) -> SFTTrainer:
    tokenizer = tok("chatml")
    rows = [{"prompt": each[:-1], "completion": each[-1:]} for each in conversations()]
    from datasets import Dataset

    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.0, **QUIET}
    model = given.pop("model", None) or tiny(tokenizer)
    evaluated = given.pop("eval_rows", None)
    return SFTTrainer(
        model,
        SFTConfig(str(scratch("trl")), **{**options, **given}),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=evaluated and Dataset.from_list(rows[:6]),
        processing_class=tokenizer,
    )


@sound(proof=step_is_right)
def ddp_of_trl() -> Trainer:
    """TRL's SFTTrainer of prompts and completions."""
    return _trl()


@sound(proof=step_is_right)
def ddp_of_trl_with_adapters() -> Trainer:
    model = tiny(tok("chatml"))
    torch.manual_seed(1)
    return _trl(model=get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)))


def _packed_row(model: Any, row: dict[str, Any]) -> torch.Tensor:
    lengths = row.get("seq_lengths") or [len(row["input_ids"])]
    positions = torch.cat([torch.arange(length) for length in lengths])
    return model(input_ids=torch.tensor([row["input_ids"]]), position_ids=positions[None]).logits


@sound(proof=lambda trainer: real_step(trainer, _packed_row).is_right)
def ddp_of_trl_with_packing() -> Trainer:
    return _trl(packing=True, max_length=96, per_device_train_batch_size=1)


@sound(proof=step_is_right)
def ddp_with_evaluation() -> Trainer:
    return _trl(eval_rows=True)


@sound(proof=lambda trainer: len(epoch(trainer)) == 21 and epoch(trainer).total() == 24)
def rows_that_fill_the_last_batch() -> Trainer:
    """21 rows on two ranks with batches of two: accelerate repeats three, which is counted and no fault."""
    return plain(rows=features(tok("chatml"), 21))


class _LogsItsOwn(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        count = (inputs["labels"][:, 1:] != -100).sum()
        loss = super().training_step(model, inputs, num_items_in_batch)
        return loss * num_items_in_batch / (count * self.args.world_size * self.args.gradient_accumulation_steps)


@sound(proof=step_is_right)
def each_rank_logs_its_own_loss() -> Trainer:
    """What a rank returns is the mean of its own labels; what it trains on is not."""
    return plain(_LogsItsOwn)


@sound(proof=step_is_right)
def fsdp2_of_accelerate() -> Trainer:
    """FSDP2 as accelerate makes it; on a CPU accelerate leaves it out, unless it believes to be on several GPUs."""
    tokenizer = tok("chatml")
    wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    args = arguments(fsdp=True, fsdp_config=wrapped)
    _ = args.device  # it starts the process group
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return plain(model=tiny(tokenizer), args=args)
