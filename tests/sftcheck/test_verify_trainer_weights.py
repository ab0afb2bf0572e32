"""verify_trainer: a model whose weights are packed in 4 bits computes the same after the call as before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer

from sftcheck.restore import restore_model_after
from sftron import verify_trainer
from tests.sftcheck.small_trainers import ANSWERS, row_of, sft
from tests.sftcheck.zoo_materials import model

pytestmark = [pytest.mark.filterwarnings("ignore::"), pytest.mark.usefixtures("quiet")]


def behavior(trainer: Trainer) -> dict[str, Tensor]:
    """Returns the gradients of a batch in training, and the logits in both modes, evaluation last."""
    batch = dict(next(iter(trainer.get_train_dataloader())))
    trainer.model.train()
    torch.manual_seed(0)
    trainer.model(**batch).loss.backward()
    found = {name: each.grad for name, each in trainer.model.named_parameters() if each.grad is not None}
    trainer.model.zero_grad()
    with torch.no_grad():
        for mode in (True, False):
            torch.manual_seed(0)
            found[f"logits, training {mode}"] = trainer.model.train(mode)(**batch).logits.clone()
    return found


def in_4_bit(own: Any, folder: Path, nested: bool) -> Trainer:
    """LoRA on a base whose linear layers are in NF4."""
    bnb = pytest.importorskip("bitsandbytes").nn
    base = model(own, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16, intermediate_size=64)
    for layer in base.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, each in list(parent.named_children()):
                if isinstance(each, nn.Linear):
                    new = bnb.Linear4bit(each.in_features, each.out_features, bias=False, quant_type="nf4",
                                         compute_dtype=torch.float32, compress_statistics=nested)  # fmt: skip
                    new.load_state_dict(each.state_dict())
                    setattr(parent, name, new.to("cpu"))
    base.is_loaded_in_4bit = True
    torch.manual_seed(0)
    return sft(own, folder, ANSWERS, get_peft_model(base, LoraConfig(target_modules="all-linear")))


@pytest.mark.parametrize("nested", [False, True])
def test_a_model_in_4_bit_passes_and_computes_the_same_afterwards(nested: bool, own: Any, tmp_path: Path) -> None:
    expected = behavior(in_4_bit(own, tmp_path, nested))
    trainer = in_4_bit(own, tmp_path, nested)
    report = verify_trainer(trainer)
    assert report.passed, [(row.name, row.measured) for row in report.checks if row.status != "PASS"]
    assert {row_of(report, name).status for name in ("loss", "gradients", "adapters")} == {"PASS"}
    found = behavior(trainer)
    assert found.keys() == expected.keys()
    assert [name for name, each in expected.items() if not found[name].equal(each)] == []


def test_weights_that_are_packed_in_another_form_are_put_back() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compress_statistics=True).to("cpu")
    weight, tensor = layer.weight, layer.weight.data
    state, absmax, inner = weight.quant_state, weight.quant_state.absmax, weight.quant_state.state2
    before = dict(vars(state)), tensor.clone(), absmax.clone()
    with restore_model_after(layer):
        weight.data, weight.quant_state = bnb.functional._convert_weight_packed_for_cpu(weight.data, weight.quant_state)
        weight.quant_state.packing_format_for_cpu = weight.mark = True
        assert weight.shape != tensor.shape
    assert layer.weight is weight
    assert weight.quant_state is state
    assert not hasattr(weight, "mark")
    assert dict(vars(state)) == before[0]
    assert state.state2 is inner
    assert weight.data_ptr() == tensor.data_ptr()
    assert weight.equal(before[1])
    assert state.absmax.equal(before[2])
