"""Exports of a LoRA run: the adapter is what was trained, and a merge that is not is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sftron.checkpoint import export
from sftron.checkpoint.hf_weights import load_model
from sftron.checkpoint.merge import logits_of
from sftron.checks.parity import check_parity
from sftron.models.adapters import AdapterStart, LoraSpec
from sftron.train.build_model import adapter_tensors
from sftron.train.chat import open_chat_model
from sftron.train.exports import convert
from sftron.train.trainer import Trainer, open_setup
from tests.train.runs import make_config, make_model_folder, opened, run, write_rows

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
TEXT = [list(range(5, 25))]


def config_of(tmp_path: Path, folder: Path, **overrides: Any) -> Any:
    options = {"lora__rank": 4, "tokens__train_steps": 4, "optimizer__learning_rate": 5e-2, **overrides}
    return make_config(tmp_path, folder, **options)


def logits_in(folder: Path) -> torch.Tensor:
    return logits_of(load_model(folder, compute_dtype=torch.float32), TEXT)[0]


def merges_of(trainer: Trainer) -> dict[str, Any]:
    return json.loads((trainer.directory.folder / "merge_report.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Trainer:
    return run(config_of(tmp_path_factory.mktemp("lora"), model_folder, checkpoints__interval=2))


def test_adapter_and_merge_have_the_logits_of_the_trained_model(trained: Trainer, model_folder: Path) -> None:
    peft = pytest.importorskip("peft")
    expected = logits_of(trained.model, TEXT)[0]
    base = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    untrained = base(torch.tensor(TEXT)).logits[0]
    adapted = peft.PeftModel.from_pretrained(base, trained.directory.adapter(4)).eval()(torch.tensor(TEXT)).logits[0]
    limit = 1e-5 * expected.abs().max()
    assert (untrained - expected).abs().max() > 1000 * limit
    assert (adapted - expected).abs().max() <= limit
    assert (logits_in(trained.directory.hf(4)) - expected).abs().max() <= limit
    assert (trained.directory.folder / "latest").resolve() == trained.directory.hf(4).resolve()
    report = merges_of(trained)["4"]
    assert report["is_accepted"]
    assert report["largest_kl"] < 1e-5


def test_a_checkpoint_of_adapters_is_chatted_with_as_it_was_trained(trained: Trainer) -> None:
    checkpoint = trained.directory.checkpoints / "step-4"
    opened = open_chat_model(checkpoint, dtype=torch.float32)
    expected = logits_of(trained.model, TEXT)[0]
    assert (logits_of(opened.model, TEXT)[0] - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert opened.stop_ids


def test_a_checkpoint_exports_what_the_run_exported(trained: Trainer, tmp_path: Path) -> None:
    checkpoint = trained.directory.checkpoints / "step-4"
    for merge, own in ((False, trained.directory.adapter(4)), (True, trained.directory.hf(4))):
        convert(checkpoint, tmp_path / str(merge), merge=merge)
        (weights,) = own.glob("*.safetensors")
        for name in (weights.name, "README.md"):
            assert (tmp_path / str(merge) / name).read_bytes() == (own / name).read_bytes()


def test_a_merge_into_another_base_is_refused(trained: Trainer, tmp_path: Path, model_folder: Path) -> None:
    other = shutil.copytree(model_folder, tmp_path / "model")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    checkpoint, overrides = trained.directory.checkpoints / "step-4", [f"--model.path={other}"]
    with pytest.raises(ValueError, match="have SHA-256"):
        convert(checkpoint, tmp_path / "merged", merge=True, overrides=overrides)
    assert not (tmp_path / "merged").exists()


def test_a_merge_that_changes_the_model_is_not_written(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unmerged(source: Path, *_: Any, **__: Any) -> Any:
        return load_model(source, compute_dtype=torch.float32).named_parameters()

    monkeypatch.setattr(export, "merged_weights", unmerged)
    trainer = run(config_of(tmp_path, model_folder))
    assert "not merged: KL" in capsys.readouterr().out
    assert not list((trainer.directory.folder / "hf").iterdir())
    assert (trainer.directory.folder / "latest").resolve() == trainer.directory.adapter(4).resolve()
    assert not merges_of(trainer)["4"]["is_accepted"]


def test_a_base_that_changes_during_the_run_is_not_merged(tmp_path: Path, model_folder: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    trainer = opened(config_of(tmp_path, folder))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: 2 * each for name, each in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(OSError, match="cannot be merged"):
        trainer.train()
    assert trainer.directory.adapter(4).is_dir()


def test_without_merge_only_the_adapter_is_exported_and_a_finished_run_stays_as_it_is(
    tmp_path: Path, model_folder: Path
) -> None:
    config = config_of(tmp_path, model_folder, lora__merge=False, checkpoints__export_interval=2)
    trainer = run(config)
    folder = trainer.directory.folder
    assert [path.name for path in sorted((folder / "adapter").iterdir())] == ["step-2", "step-4"]
    assert not (folder / "hf").exists()
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    run(config)
    assert files == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def best_of(tmp_path: Path, model_folder: Path) -> tuple[Trainer, int]:
    """Returns a run whose best checkpoint is not its last, and the step of the best."""
    write_rows(tmp_path / "held_out.jsonl", 4)
    options = {"evaluation__datasets": [{"path": str(tmp_path / "held_out.jsonl"), "name": "held"}]}
    options |= {"evaluation__interval": 1, "checkpoints__keep_best": "eval/held/loss", "optimizer__learning_rate": 1.0}
    trainer = run(config_of(tmp_path, model_folder, **options))
    best = json.loads((trainer.directory.folder / "best.json").read_text())["step"]
    assert best < 4
    return trainer, best


def test_the_best_checkpoint_is_exported_as_adapter_and_merge(tmp_path: Path, model_folder: Path) -> None:
    trainer, best = best_of(tmp_path, model_folder)
    merge, adapter = trainer.directory.hf(best), trainer.directory.adapter(best)
    assert (trainer.directory.folder / "best").resolve() == merge.resolve()
    base = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    untrained = base(torch.tensor(TEXT)).logits[0]
    peft = pytest.importorskip("peft")
    expected = peft.PeftModel.from_pretrained(base, adapter).eval()(torch.tensor(TEXT)).logits[0]
    limit = 1e-3 * expected.abs().max()  # after steps with a learning rate of 1, rounding shows
    assert (untrained - expected).abs().max() > 100 * limit
    assert (logits_in(merge) - expected).abs().max() <= limit
    assert merges_of(trainer)[str(best)]["largest_kl"] < 1e-5
    assert merges_of(trainer)["4"]["is_accepted"]
    assert "rounding errors of float32" in (merge / "README.md").read_text()


def test_the_merge_of_the_best_is_compared_with_the_model_of_its_own_step(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = export.merged_weights
    calls = []

    def wrong_at_second(source: Path, *arguments: Any, **options: Any) -> Any:
        calls.append(source)
        if len(calls) == 1:  # the last step's, which is sound
            return real(source, *arguments, **options)
        return load_model(source, compute_dtype=torch.float32).named_parameters()

    monkeypatch.setattr(export, "merged_weights", wrong_at_second)
    trainer, best = best_of(tmp_path, model_folder)
    assert len(calls) == 2
    assert trainer.directory.refused_merges() == {best}
    assert (trainer.directory.folder / "best").resolve() == trainer.directory.adapter(best).resolve()
    assert trainer.directory.hf(4).is_dir()
    assert not trainer.directory.hf(best).exists()
    run(trainer.config)  # a finished run stays as it is
    assert len(calls) == 2


def test_a_run_goes_on_from_an_adapter(
    trained: Trainer, tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = str(trained.directory.adapter(4))
    with pytest.raises(ValueError, match=r"lora\.rank: 8, but .* has 4"):
        open_setup(config_of(tmp_path, model_folder, lora__rank=8, lora__adapter=adapter))
    again = opened(config_of(tmp_path, model_folder, lora__rank=None, lora__adapter=adapter))
    assert f"continuing from {adapter}, which names the base tiny" in capsys.readouterr().out
    expected = adapter_tensors(trained.model)
    found = adapter_tensors(again.model)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)


def test_a_model_with_frozen_weights_alone_computes_as_one_with_master_weights(model_folder: Path) -> None:
    frozen = AdapterStart(spec=LoraSpec(ranks={}, alphas={}))
    options = {"compute_dtype": torch.bfloat16, "adapters": frozen, "frozen_dtype": torch.bfloat16}
    expected = logits_of(load_model(model_folder, compute_dtype=torch.bfloat16), TEXT)[0]
    assert logits_of(load_model(model_folder, **options), TEXT)[0].equal(expected)


def test_the_card_of_a_merge_has_what_rounding_lost_and_a_second_start_writes_what_is_missing(
    trained: Trainer, tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "rounding errors of float32" in (trained.directory.hf(4) / "README.md").read_text()
    config = config_of(tmp_path, model_folder, lora__merge=False)
    run(config)
    assert "which peft loads onto its base (also" in capsys.readouterr().out
    resumed = run(config_of(tmp_path, model_folder, lora__merge=True))
    assert resumed.directory.hf(4).is_dir()


@pytest.mark.parametrize("name", ["nf4", "bfloat16"])
def test_a_checkpoint_is_merged_into_the_base_that_it_was_trained_with(
    tmp_path: Path, model_folder: Path, name: str
) -> None:
    if name == "nf4":
        pytest.importorskip("bitsandbytes")
        model_folder = make_model_folder(tmp_path / "wide", hidden_size=64, intermediate_size=128)
    made = run(config_of(tmp_path, model_folder, model__frozen_dtype=name))
    convert(made.directory.checkpoints / "step-4", tmp_path / "merged", merge=True)
    expected = logits_of(made.model, TEXT)[0]
    assert (logits_in(tmp_path / "merged") - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert "An adapter (LoRA) of" not in (tmp_path / "merged" / "README.md").read_text()


def test_an_adapter_of_a_base_in_nf4_is_merged_and_loaded_on_that_base_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    base = make_model_folder(tmp_path / "wide", hidden_size=64, intermediate_size=128)
    made = run(config_of(tmp_path, base, model__frozen_dtype="nf4"))
    adapter, expected = made.directory.adapter(4), logits_of(made.model, TEXT)[0]
    limit = 1e-4 * expected.abs().max()
    assert " in NF4, as README.md in it shows" in capsys.readouterr().out

    alone = shutil.copytree(made.directory.checkpoints / "step-4", tmp_path / "alone" / "step-4")
    for source, options in ((adapter, {}), (alone, {"merge": True})):
        target = tmp_path / f"merged-{source.parent.name}"
        convert(source, target, model=base, dtype=torch.float32, **options)
        assert "merged onto the base's matrices in NF4" in capsys.readouterr().out
        assert (logits_in(target) - expected).abs().max() <= limit
    convert(alone, tmp_path / "as-adapter", model=base)
    report = check_parity(base, [[{"role": "user", "content": "Hi."}]], max_new_tokens=1, adapter=adapter)
    assert "(trained on the base in NF4, compared on its unrounded weights)" in report.title

    for folder in (adapter, tmp_path / "as-adapter"):
        code = (folder / "README.md").read_text().partition("```python\n")[2].partition("messages = ")[0]
        assert "BitsAndBytesConfig(load_in_4bit=True" in code
        monkeypatch.chdir(folder)
        stated = json.loads(Path("adapter_config.json").read_text())
        Path("adapter_config.json").write_text(json.dumps(stated | {"base_model_name_or_path": str(base)}))
        scope: dict[str, Any] = {}
        exec(code.replace("torch.bfloat16", "torch.float32"), scope)
        # In eval mode, bitsandbytes computes in bfloat16 on a CPU.
        loaded = scope["model"].train()(torch.tensor(TEXT)).logits[0]
        assert (loaded - expected).abs().max() <= limit


def test_an_adapter_is_not_taken_for_a_model(trained: Trainer) -> None:
    with pytest.raises(ValueError, match="is an adapter, not a whole model; merge it"):
        load_model(trained.directory.adapter(4))
