"""A PackedDataset under transformers: its collator's batches, sftron's losses, its Trainer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from sftcheck.check_isolation import check_isolation
from sftron.checkpoint.hf_weights import load_model
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.for_transformers import FlattenPacks
from sftron.data.labels import Targets
from sftron.data.loader import collate
from sftron.data.types import IGNORE_INDEX, DataError, Pack
from sftron.train.objective import loss_of
from tests.data.streams import take
from tests.train.runs import make_model_folder, write_rows

LENGTH = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model_folder(tmp_path_factory.mktemp("model"))
    write_rows(folder / "rows.jsonl")
    return folder


def dataset_of(folder: Path, **options: Any) -> PackedDataset:
    tokenizer = ChatTokenizer.from_pretrained(folder)
    return PackedDataset.from_path(
        folder / "rows.jsonl", tokenizer, **{"sequence_length": LENGTH, "num_lanes": 2} | options
    )


def features(dataset: PackedDataset, packs: list[Pack]) -> list[dict[str, Any]]:
    """What one would hand to Hugging Face's collator: the conversations, with labels that are not shifted."""
    conversations = [dataset.preparation.tokenize(key) for pack in packs for key in pack.keys]
    return [
        {
            "input_ids": each.input_ids.tolist(),  # pyright: ignore[reportAttributeAccessIssue]
            "labels": np.where(Targets().mask_of(each), each.input_ids, IGNORE_INDEX).tolist(),  # pyright: ignore
        }
        for each in conversations
    ]


@pytest.mark.parametrize("num_packs", [1, 3])
@pytest.mark.parametrize("flags", [{}, {"return_flash_attn_kwargs": False}, {"return_seq_idx": False}])
def test_the_batch_is_that_of_hugging_faces_own_collator(folder: Path, num_packs: int, flags: dict[str, bool]) -> None:
    dataset = dataset_of(folder, token_budget=1000)  # more than there is, so that padding is left
    packs = take(dataset, num_packs)
    all_keys = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
    reference = transformers.DataCollatorWithFlattening(**all_keys | flags)(features(dataset, packs))
    native = FlattenPacks(**flags)(packs)

    assert any(len(pack.keys) > 1 and pack.num_tokens < len(pack.input_ids) for pack in packs)
    assert native.keys() == reference.keys()
    for name, value in reference.items():
        if isinstance(value, int):
            assert native[name] == value, name
        else:
            assert native[name].dtype == value.dtype, name
            assert torch.equal(native[name], value), name


@pytest.mark.parametrize("remove_cross_attention", [True, False])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_transformers_loss_is_that_of_the_native_model(
    folder: Path, attention: str, remove_cross_attention: bool
) -> None:
    packs = take(dataset_of(folder, remove_cross_attention=remove_cross_attention), 3)
    reference = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation=attention)
    native = load_model(folder, compute_dtype=torch.float32)
    for pack in packs:
        assert len(pack.keys) > 1
        batch = collate(pack, keep_tail=False)
        with torch.no_grad():
            expected = float(loss_of(native, batch)) / batch.weight_sum
            found = float(reference(**FlattenPacks()([pack]), use_cache=False).loss)
            seeing_all = float(reference(**FlattenPacks()([pack]), use_cache=True).loss)
        assert found == pytest.approx(expected, abs=1e-5)
        if remove_cross_attention:
            # What docs/isolation.md warns of: with a cache, transformers keeps no documents apart.
            assert abs(seeing_all - expected) > 1e-3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_transformers_trainer_trains_as_sftron_does(folder: Path, tmp_path: Path, num_workers: int) -> None:
    """The losses of some steps, of two packs each, are those of the native model, a plain loop and AdamW."""
    num_steps = 4
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=num_steps, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        learning_rate=1e-2, lr_scheduler_type="constant", adam_beta2=0.95, max_grad_norm=1.0, logging_steps=1,
        dataloader_num_workers=num_workers, dataloader_pin_memory=False, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        transformers.LlamaForCausalLM.from_pretrained(folder),
        arguments,
        train_dataset=dataset_of(folder),
        data_collator=FlattenPacks(),
    )
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    model = load_model(folder, compute_dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    packs = iter(dataset_of(folder))
    expected = []
    for _ in range(num_steps):
        batches = [collate(next(packs), keep_tail=False) for _ in range(2)]
        loss = sum(loss_of(model, batch) for batch in batches) / sum(batch.weight_sum for batch in batches)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert found == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0]


def test_one_conversation_a_row_serves_a_model_that_leaks(folder: Path) -> None:
    """What check_isolation offers to every model."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=768, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, initializer_range=0.3, use_cache=False,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).eval()
    together = take(dataset_of(folder), 2)
    with pytest.raises(ValueError, match="gpt_oss does not keep the conversations of a pack apart"):
        check_isolation(model, together)
    collator = FlattenPacks(return_flash_attn_kwargs=False, return_seq_idx=False)
    for pack in take(dataset_of(folder, packing="none"), 4):
        assert len(pack.keys) == 1
        batch = collator([pack])
        with torch.no_grad():
            alone = model(input_ids=batch["input_ids"], labels=batch["labels"])
            assert torch.equal(model(**batch).logits, alone.logits)


def test_weights_that_labels_cannot_express_and_the_end_of_the_data_are_refused(folder: Path) -> None:
    dataset = dataset_of(folder, num_epochs=1)
    given = list(dataset)
    assert sum(len(each.keys) for each in given) == 30
    drained = replace(given[0], keys=())
    with pytest.raises(DataError, match=r"the data has ended \(num_epochs\); lower max_steps"):
        FlattenPacks()([drained])
    given[0].loss_weights[given[0].loss_weights > 0] = 0.25
    with pytest.raises(DataError, match=r"pack 0 has tokens of weight 0\.25"):
        FlattenPacks()([given[0]])


def test_the_rows_for_other_trainers_have_the_ids_and_labels_of_transformers_own_collators(folder: Path) -> None:
    dataset = dataset_of(folder)
    rows = dataset.to_hf()
    keys = list(dataset.preparation.all_keys())
    assert len(rows) == len(keys)
    for key, row in zip(keys, rows, strict=True):
        tokenized = dataset.preparation.tokenize(key)
        assert row["input_ids"] == tokenized.input_ids.tolist()  # pyright: ignore[reportAttributeAccessIssue]
        expected = np.where(Targets().mask_of(tokenized), row["input_ids"], IGNORE_INDEX)  # pyright: ignore
        assert row["labels"] == expected.tolist()


def test_weights_that_labels_cannot_express_are_refused(folder: Path) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.5}]}
    dataset = PackedDataset.from_rows([row], ChatTokenizer.from_pretrained(folder), sequence_length=LENGTH, num_lanes=1)
    with pytest.raises(DataError, match=r"rows\[0\] has tokens of weight 0\.5, .* remove the weights"):
        dataset.to_hf()
