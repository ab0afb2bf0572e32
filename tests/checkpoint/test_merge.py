"""Merges of adapters into their base: the model of the adapter, and what rounding loses, by kind of matrix."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from sftron.checkpoint.adapter import read_adapter, write_adapter
from sftron.checkpoint.checkpoint import MODEL, OPTIMIZER, state_text, write_checkpoint
from sftron.checkpoint.export import BASE_WEIGHTS, differing_weights, export_hf
from sftron.checkpoint.hf_weights import digest_of, file_digests, load_model
from sftron.checkpoint.merge import MergeReport, merged_weights
from sftron.checkpoint.model_folder import stop_ids_of
from sftron.checkpoint.shards import own_shards
from sftron.commands.convert import main
from sftron.models.adapters import LoraSpec
from sftron.models.architecture import architecture_facts
from sftron.models.fusion import split_state_dict
from sftron.train.exports import convert
from tests.checkpoint.test_adapter import ALL_CASES, IDS, logits_of, make_base, native_model
from tests.conftest import rest_nightly
from tests.models.reference import FAMILIES, make_reference
from tests.models.test_adapters import make_peft, spec_of, trained

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft


def make_adapter(family: str, **options: Any) -> tuple[LoraSpec, dict[str, torch.Tensor]]:
    reference = make_peft(family, **options)
    return spec_of(reference), {name: each.detach() for name, each in trained(reference).items()}


# Each kind of adapter and of layer; names that are another tensor's natively (GLM 4), experts, a delta layer.
FAST = ["ranks and alphas", "rslora and dora", "dora with biases", "plain MLP", "already fused", "embeddings"]
FAST += ["tied embeddings", "glm4", "qwen2_moe", "gpt_oss", "qwen3_5_text", "beside experts"]


@pytest.mark.parametrize("case", rest_nightly(ALL_CASES, FAST))
def test_a_merged_export_is_the_model_that_peft_merges_in_transformers_and_here(case: str, tmp_path: Path) -> None:
    family, options = ALL_CASES[case]
    source, reference = make_base(tmp_path / "base", family), make_peft(family, **options)
    spec, tensors = spec_of(reference), {name: each.detach() for name, each in trained(reference).items()}

    def weights() -> Any:
        return merged_weights(tmp_path / "base", tensors, spec, report)

    report = MergeReport(torch.float32)
    export_hf(weights(), tmp_path / "out", source_folder=source, dtype=torch.float32, stop_token_ids=[])
    assert set(report.lost.values()) == {0.0}
    num_tensors, different = differing_weights(weights(), tmp_path / "out")
    assert num_tensors == len(source.stored_names)
    assert different == []

    merged, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    expected = reference.merge_and_unload()
    base, found = make_reference(**FAMILIES[family]).state_dict(), merged.state_dict()
    changed = {f"{name}.weight" for name in spec.ranks} | tensors.keys() & base.keys()
    changed |= {"lm_head.weight"} if source.architecture.tie_word_embeddings and spec.modules_to_save else set()
    assert {name for name, tensor in found.items() if not tensor.equal(base[name])} == changed
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)
    logits = expected(IDS[None], use_cache=False).logits[0]
    close = {"rtol": 0, "atol": 1e-5 * logits.abs().max().item()}
    torch.testing.assert_close(merged(IDS[None], use_cache=False).logits[0], logits, **close)
    torch.testing.assert_close(logits_of(load_model(tmp_path / "out", compute_dtype=torch.float32)), logits, **close)


def test_the_report_has_the_share_of_the_delta_that_rounding_lost_by_kind_of_matrix(tmp_path: Path) -> None:
    source = make_base(tmp_path / "base", "Llama 3")
    spec, tensors = make_adapter("Llama 3", target_modules=["q_proj", "down_proj"])
    tensors = {name: each * (0.01 if "down_proj.lora_B" in name else 1) for name, each in tensors.items()}
    report = MergeReport(torch.bfloat16)
    weights = merged_weights(tmp_path / "base", tensors, spec, report)
    merged = dict(split_state_dict(weights, source.architecture))
    base = load_file(tmp_path / "base" / "model.safetensors")
    assert report.lost.keys() == {"q_proj", "down_proj"}
    for kind, lost in report.lost.items():
        names = [name for name in base if f".{kind}." in name]
        pairs = [(merged[name].double(), base[name].double()) for name in names]
        rounding = torch.cat([(each.bfloat16().double() - each).flatten() for each, _ in pairs])
        delta = torch.cat([(each - before).flatten() for each, before in pairs])
        assert lost == pytest.approx((rounding.norm() / delta.norm()).item(), rel=1e-3)
    assert report.lost["down_proj"] > 20 * report.lost["q_proj"] > 0
    assert f"down_proj {report.lost['down_proj']:.1%}" in "".join(report.lines())


@pytest.mark.parametrize(("change", "has_delta"), [(0.0, False), (1e-4, True), (2.0, True)])
def test_a_matrix_that_is_trained_in_full_counts_as_changed_however_little_it_is(
    change: float, has_delta: bool
) -> None:
    report, base = MergeReport(torch.bfloat16), torch.ones(2, 2)
    report.add("embed_tokens", base, base + change)
    assert report.has_delta == has_delta
    assert ("the adapter is zero" in report.lines()[0]) != has_delta


def test_a_merge_that_rounding_undoes_is_refused_and_a_zero_adapter_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_base(tmp_path / "base", "Llama 3")
    spec, tensors = make_adapter("Llama 3", target_modules=["q_proj"])
    write_adapter(
        tmp_path / "tiny",
        {name: each * 1e-9 for name, each in tensors.items()},
        spec,
        source=source,
        base_model="base",
    )
    options: dict[str, Any] = {"model": tmp_path / "base", "dtype": torch.bfloat16}
    with pytest.raises(ValueError, match=r"lost the whole adapter.*Merge in float32, or serve the adapter"):
        convert(tmp_path / "tiny", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()

    zero = {name: each * 0 if "lora_B" in name else each for name, each in tensors.items()}
    write_adapter(tmp_path / "zero", zero, spec, source=source, base_model="base")
    convert(tmp_path / "zero", tmp_path / "out", **options)
    assert capsys.readouterr().out == "the adapter is zero: the merged weights equal the base\n"


def test_the_base_of_a_merge_can_be_what_was_trained_on(tmp_path: Path) -> None:
    config = make_base(tmp_path / "base", "Llama 3").architecture
    spec, tensors = make_adapter("Llama 3", target_modules=["q_proj"])

    def read_base(_name: str, stored: torch.Tensor) -> torch.Tensor:
        return stored.bfloat16() if stored.ndim == 2 else stored

    options = (tmp_path / "base", tensors, spec)
    merges = [merged_weights(*options, MergeReport(torch.float32), read_base=each) for each in (read_base, None)]
    coarse, exact = (dict(split_state_dict(weights, config)) for weights in merges)
    base = load_file(tmp_path / "base" / "model.safetensors")
    for name, tensor in base.items():
        torch.testing.assert_close(exact[name] - coarse[name], tensor - read_base(name, tensor), rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", ["glm4", "dora", "tied embeddings"])
def test_a_checkpoint_of_adapters_becomes_an_adapter_folder_or_a_merged_model(case: str, tmp_path: Path) -> None:
    family, options = ALL_CASES[case]
    source, base = make_base(tmp_path / "base", family), str(tmp_path / "base")
    spec, tensors = make_adapter(family, **options)
    native = native_model(tmp_path / "base", spec, tensors)
    shards = {MODEL: dict(own_shards(((n, p) for n, p in native.named_parameters() if p.requires_grad), is_main=True))}
    fingerprint = architecture_facts(source.architecture) | {BASE_WEIGHTS: digest_of(file_digests(tmp_path / "base"))}
    facts = {"fingerprint": fingerprint, "stop_token_ids": [7], "lora": spec.as_dict()}
    checkpoint = tmp_path / "checkpoint"
    write_checkpoint(checkpoint, 3, shards | {OPTIMIZER: {}}, state=state_text(3, facts))

    def convert_by_command(*arguments: object) -> None:
        assert main([*map(str, arguments), "--model", base, "--dtype", "float32"]) == 0

    convert_by_command(checkpoint, tmp_path / "adapter")
    convert_by_command(checkpoint, tmp_path / "merged", "--merge")
    convert_by_command(tmp_path / "adapter", tmp_path / "again")
    found = read_adapter(tmp_path / "adapter", source.architecture)
    assert found.spec == spec
    assert all(found.tensors[name].equal(tensor) for name, tensor in tensors.items())
    merged, again = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "again"))
    assert merged.keys() == again.keys()
    assert all(merged[name].equal(tensor) for name, tensor in again.items())
    for name in ("merged", "again"):
        assert 7 in stop_ids_of(tmp_path / name)
    expected = logits_of(native)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    logits = model(IDS[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "library_name: peft" in card
    assert "- lora" in card


def test_an_adapter_without_its_base_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_base(tmp_path / "base", "Llama 3")
    spec, tensors = make_adapter("Llama 3", target_modules=["q_proj"])
    write_adapter(tmp_path / "adapter", tensors, spec, source=source, base_model="base")
    assert main([str(tmp_path / "adapter"), str(tmp_path / "out")]) == 2
    assert "is an adapter; give the folder of its base (--model)" in capsys.readouterr().err
