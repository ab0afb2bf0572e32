"""Runs of models that are not named Llama, of those with a sliding window, and of wrappers of multimodal models."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from sftron.data.types import Batch
from sftron.train import loop
from tests.checkpoint.test_wrappers import WRAPPERS, make_wrapper, save
from tests.conftest import ASSETS, rest_nightly
from tests.models.reference import FAMILIES
from tests.train.killed_run import run_killed
from tests.train.ranks import launch, train
from tests.train.runs import make_config, make_model_folder, metrics, result, run, write_rows

TRAINED = ["Qwen 3", "Qwen 2", "Mistral 0.1", "Granite code", "Phi 1.5, 2", "Gemma 2", "gpt-oss", "Gemma 4 E2B", "LFM2"]
TRAINED += ["Gemma 4 26B-A4B"]


# Phi has parallel blocks, biases and a plain MLP, Gemma 2 norms on both sides, windows, soft caps and tied embeddings,
# gpt-oss sinks and experts, and Gemma 4 experts beside MLPs.
FAST = ["Phi 1.5, 2", "Gemma 2", "gpt-oss", "Gemma 4 E2B", "Gemma 4 26B-A4B"]


@pytest.mark.parametrize("family", rest_nightly(TRAINED, FAST))
def test_a_run_trains_and_exports_what_transformers_loads(tmp_path: Path, family: str) -> None:
    folder = _make_folder(tmp_path / "model", family)
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

    def recorded(model: Any, optimizer: Any, given: Sequence[Batch], *rest: Any, **options: Any) -> Any:
        batches.extend(given)
        return train_step(model, optimizer, given, *rest, **options)

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


MOVED = ["Phi 4 mini", "Cohere 2", "OLMo 3", "Gemma 2", "Mixtral", "Qwen 2 MoE", "gpt-oss", "Qwen 3.5", "Qwen 3.5 MoE"]
MOVED += ["GLM 4.5", "Apertus", "LFM2", *WRAPPERS]


@pytest.mark.nightly
@pytest.mark.parametrize("family", MOVED)
def test_a_killed_run_has_the_bits_of_one_that_was_not_and_a_hop_to_two_ranks_its_losses(
    tmp_path: Path, family: str
) -> None:
    folder = _make_folder(tmp_path / "model", family)
    write_rows(tmp_path / "rows.jsonl", 200)
    options = {"tokens__train_steps": 6, "checkpoints__interval": 2, "checkpoints__async": False}
    options |= {"optimizer__schedule": "constant", "optimizer__learning_rate": 1e-3, "model__attention": "auto"}
    make_config(tmp_path, folder, **options | {"general__run_name": "killed"})
    run_killed(tmp_path / "config.yaml", 4, "in the step")
    for name in ("whole", "killed"):
        make_config(tmp_path, folder, **options | {"general__run_name": name})
        _launch(tmp_path, 1)
    for num_ranks, last_step in ((1, 2), (2, 4), (1, 6)):
        layout = {"tokens__batch_accumulation_per_replica": 2 // num_ranks, "tokens__train_steps": last_step}
        make_config(tmp_path, folder, **options | layout | {"general__run_name": "hopped"})
        _launch(tmp_path, num_ranks)

    whole, killed, hopped = (tmp_path / "runs" / name for name in ("whole", "killed", "hopped"))
    weights, of_killed, of_hopped = (load_file(run / "latest" / "model.safetensors") for run in (whole, killed, hopped))
    assert all(value.equal(weights[name]) for name, value in of_killed.items())
    for ours, theirs in zip(metrics(hopped), metrics(whole), strict=True):
        assert (ours["loss"], ours["grad_norm"]) == pytest.approx((theirs["loss"], theirs["grad_norm"]), rel=1e-5)
        assert ours["trained_tokens"] == theirs["trained_tokens"]
    assert of_killed.keys() == of_hopped.keys() == weights.keys()
    source = load_file(folder / "model.safetensors")
    changes = {name: (value - source[name]).norm() for name, value in weights.items()}
    assert max(changes.values()) > 0.01
    for name, value in weights.items():
        # A router's gradient is a small difference between experts; AdamW divides it and its rounding by its size.
        allowed = 5e-3 if "router" in name or ".mlp.gate.weight" in name else 1e-4
        assert (of_hopped[name] - value).norm() <= allowed * changes[name], name


def _make_folder(folder: Path, family: str) -> Path:
    if family not in WRAPPERS:
        make_model_folder(folder, **FAMILIES[family])
    else:
        save(make_wrapper(family, vocab_size=768), folder)
        shutil.copytree(ASSETS / "tokenizer", folder, dirs_exist_ok=True)
    # Of some model types, transformers replaces pieces of any tokenizer; a published tokenizer.json has them.
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    return folder


def _launch(tmp_path: Path, num_ranks: int) -> None:
    for ended in launch(num_ranks, train, tmp_path / "config.yaml", folder=tmp_path):
        assert ended.exit_code == 0, ended.err[-3000:]
