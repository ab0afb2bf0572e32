"""Each family on the pretended GPU: one step, one evaluation and one answer, without what CUDA refuses (law 11)."""

from typing import Any

import pytest
import torch

from sftron.data.loader import collate
from sftron.data.packing import lay_out
from sftron.data.types import Batch
from sftron.models.generation import generate, most_likely
from sftron.models.llama import LlamaForSFT, attention_of_layers
from sftron.train.objective import loss_of
from sftron.train.optimizer import make_by_name
from sftron.train.step import StepResult, train_step
from tests.models.reference import FAMILIES, make_native, make_reference
from tests.pretended import pretended_gpu
from tools.bench_step import random_rows


def _batch(model: LlamaForSFT) -> Batch:
    rows = random_rows([60, 30, 20], model.config.vocab_size)
    return collate(lay_out(rows, token_budget=128, remove_cross_attention=True, pad_id=0), keep_tail=True)


def _step(model: LlamaForSFT, batch: Batch) -> StepResult:
    settings: dict[str, Any] = {"learning_rate": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    return train_step(model, make_by_name(model.named_parameters(), **settings), [batch, batch], max_grad_norm=1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_evaluates_and_answers_on_a_gpu(family: str) -> None:
    reference = make_reference(**FAMILIES[family])
    on_cpu = make_native(reference, compute_dtype=torch.bfloat16)
    batch = _batch(on_cpu)
    expected = _step(on_cpu, batch)
    with pretended_gpu() as gpu:
        backends = attention_of_layers("auto", on_cpu.config, gpu.device, torch.bfloat16)
        model = make_native(reference, attention=backends, compute_dtype=torch.bfloat16).to(gpu.device)
        batch = batch.pin_memory()
        model.rope_tables.at(batch.position_ids[:1].to(gpu.device))  # the first batch copies the tables of rotations

        gpu.reset()
        found = _step(model, batch)
        assert [*gpu.waits.values()] == [1], gpu.waits
        (line,) = gpu.waits
        assert line.startswith("device to host train/step.py")
        # bfloat16 is rounded otherwise by another backend of attention.
        assert (found.loss, found.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=0.05)

        gpu.reset()
        with torch.no_grad():
            loss_of(model, batch)
        assert not gpu.waits
        tokens = list(generate(model, [1, 2, 3], 3, (), choose=most_likely))
        assert len(tokens) == 3
