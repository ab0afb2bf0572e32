"""Runs of models that are not named Llama, and of those with a sliding window."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sftron.train import run_data
from sftron.train.trainer import Trainer
from tests.models.reference import FAMILIES
from tests.train.runs import make_config, make_model_folder, metrics, result, run

WINDOW = 96
"""As long as the sequence_length of these runs."""


def _mistral(folder: Path, **overrides: Any) -> Path:
    return make_model_folder(folder, model_type="mistral", **{"sliding_window": WINDOW} | overrides)


@pytest.mark.parametrize("family", ["Qwen 3", "Qwen 2", "Mistral 0.1", "Granite code", "Phi 1.5, 2", "Gemma 2"])
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


@pytest.mark.parametrize(
    ("overrides", "longest", "advice"),
    [
        ({"tokens__sequence_length": WINDOW + 1}, WINDOW + 1, f"lower tokens.sequence_length to {WINDOW}$"),
        (
            {"tokens__sequence_length": 64, "tokens__micro_batch_size": 2, "data__remove_cross_attention": False},
            128,
            f"x tokens.micro_batch_size to {WINDOW}, or set data.remove_cross_attention: true",
        ),
    ],
    ids=["a conversation", "a whole pack"],
)
def test_documents_that_may_be_longer_than_the_window_are_refused_before_weights_are_read(
    tmp_path: Path, overrides: dict[str, Any], longest: int, advice: str
) -> None:
    folder = _mistral(tmp_path / "model")
    with pytest.raises(ValueError, match=f"may have {longest} tokens.* the last {WINDOW} only.*{advice}"):
        Trainer(make_config(tmp_path, folder, **overrides))


def test_padding_longer_than_the_window_is_no_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_once(name: str, sliding_window: int | None) -> list[float]:
        folder = _mistral(tmp_path / name, sliding_window=sliding_window, attention_dropout=0.1)
        options = {"tokens__micro_batch_size": 2, "data__packing": {"strategy": "none"}, "tokens__train_steps": 2}
        trained = run(make_config(tmp_path, folder, general__run_name=name, **options))
        return [line["loss"] for line in metrics(trained.directory.folder)]

    # As on a GPU, where the shape of a batch is always the same.
    make_loader = run_data.make_loader
    seen: list[int] = []

    def keeping_the_tail(*arguments: Any, keep_tail: bool, **options: Any) -> Any:
        assert not keep_tail
        loader = make_loader(*arguments, keep_tail=True, **options)
        seen.append(next(iter(loader)).max_seqlen)
        return make_loader(*arguments, keep_tail=True, **options)

    monkeypatch.setattr(run_data, "make_loader", keeping_the_tail)
    assert run_once("with", WINDOW) == run_once("without", None)
    assert min(seen) > WINDOW
    assert "attention_dropout 0.1 of config.json is not applied" in capsys.readouterr().out
