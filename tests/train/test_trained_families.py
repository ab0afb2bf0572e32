"""Runs of models that are not named Llama, and of those with a sliding window."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sftron.data.types import Batch
from sftron.train import loop
from tests.conftest import rest_nightly
from tests.models.reference import FAMILIES
from tests.train.runs import make_config, make_model_folder, metrics, result, run

TRAINED = ["Qwen 3", "Qwen 2", "Mistral 0.1", "Granite code", "Phi 1.5, 2", "Gemma 2", "gpt-oss"]


# Phi has parallel blocks, biases and a plain MLP, Gemma 2 norms on both sides, windows, soft caps and tied embeddings,
# gpt-oss sinks and experts.
@pytest.mark.parametrize("family", rest_nightly(TRAINED, ["Phi 1.5, 2", "Gemma 2", "gpt-oss"]))
def test_a_run_trains_and_exports_what_transformers_loads(tmp_path: Path, family: str) -> None:
    folder = make_model_folder(tmp_path / "model", **FAMILIES[family])
    trained = run(make_config(tmp_path, folder, tokens__train_steps=8, model__activation_checkpointing="full"))

    losses = [line["loss"] for line in metrics(trained.directory.folder)]
    assert losses[-1] < 0.8 * losses[0]
    exported = Path(result(trained)["exported"])
    reference, info = transformers.AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(info.values()), info
    config = json.loads((folder / "config.json").read_text())
    assert config.items() <= json.loads((exported / "config.json").read_text()).items()
    ids = torch.arange(30)
    hidden = trained.model(ids, ids, torch.tensor([0, 30], dtype=torch.int32), 30)
    logits = trained.model.head.logits(hidden)
    torch.testing.assert_close(logits, reference.float()(ids[None]).logits[0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("isolated", [True, False], ids=["conversations", "whole packs"])
def test_the_loss_of_documents_longer_than_the_window_is_that_of_transformers(
    tmp_path: Path, isolated: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_model_folder(tmp_path / "model", model_type="mistral", sliding_window=9, attention_dropout=0.1)
    train_step, batches = loop.train_step, []

    def recorded(model: Any, optimizer: Any, given: Sequence[Batch], **options: Any) -> Any:
        batches.extend(given)
        return train_step(model, optimizer, given, **options)

    monkeypatch.setattr(loop, "train_step", recorded)
    options = {"tokens__micro_batch_size": 2, "tokens__train_steps": 1, "data__remove_cross_attention": isolated}
    trained = run(make_config(tmp_path, folder, **options))

    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    losses, lengths = [], []
    for batch in batches:
        documents = batch.input_ids.split(batch.cu_seqlens.diff().tolist())
        logits = torch.cat([reference(ids[None], use_cache=False).logits[0] for ids in documents if len(ids)])
        losses.append(torch.nn.functional.cross_entropy(logits[batch.label_positions], batch.labels, reduction="none"))
        lengths += map(len, documents)
    assert max(lengths) > (18 if isolated else 100)
    assert metrics(trained.directory.folder)[0]["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert "attention_dropout 0.1 of config.json is not applied" in capsys.readouterr().out
