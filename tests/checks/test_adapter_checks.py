"""A run with adapters passes every check, and each known way to train or export other adapters turns a row red."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sftron.checkpoint import merge as merge_module
from sftron.checks import adapter_checks, rank_checks
from sftron.checks import subject as subject_module
from sftron.checks.verify_run import ADAPTER_RULES, RULES
from sftron.models import adapters
from sftron.models.adapters import LoraSpec
from sftron.train import build_model
from sftron.train.run import Setup
from tests.checks.test_verify_run import MODEL, Patch, failed, report_of, skipped, wrap
from tests.conftest import LazyModule
from tests.models.reference import FAMILIES
from tests.train.runs import make_model_folder

LazyModule("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft

LORA = {"lora__rank": 4}
OF_ADAPTERS = tuple(rule.name for rule in ADAPTER_RULES)
BASE, MOVE, MERGED, EXPORTED = OF_ADAPTERS


@pytest.mark.usefixtures("forked_ranks")
def test_a_sound_run_with_adapters_passes_every_check(home: Path, tmp_path: Path) -> None:
    report = report_of(home, tmp_path, ranks=2, context=2, **LORA)
    assert (failed(report), skipped(report)) == (set(), set()), report.as_dict()
    assert len(report.checks) == len(RULES) + len(OF_ADAPTERS)
    measured = {check.name: check.measured for check in report.checks}
    assert "28 of 28 tensors" in measured[MOVE]  # A and B of 7 layers in 2 blocks
    assert "0 wrong keys" in measured[EXPORTED]
    assert "2 processes" in measured["ranks"]


@pytest.mark.parametrize(
    "options",
    [
        {"lora__dora": True, "lora__rslora": True},
        {"lora__targets": ["model.layers.1.self_attn.q_proj", "v_proj"], "lora__alpha": 3},
        {"lora__targets": ".*gate_proj", "lora__modules_to_save": ["embed_tokens", "lm_head"]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_kind_of_adapter_passes_the_checks_of_model_and_adapters(
    home: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    report = report_of(home, tmp_path, *MODEL, *OF_ADAPTERS, **LORA | options)
    assert failed(report) == set(), report.as_dict()
    assert skipped(report) <= {"packed in its type"}


@pytest.mark.parametrize("spelling", ["qwen3_moe", "mixtral", "gpt_oss", "gemma4_text"])
def test_adapters_of_a_mixture_are_expected_where_a_run_trains_them(home: Path, tmp_path: Path, spelling: str) -> None:
    experts = {"num_experts" if spelling == "qwen3_moe" else "num_local_experts": 4, "num_experts_per_tok": 2}
    model: dict[str, Any] = {"model_type": spelling, **experts}
    model, num_tensors = (model, 16) if spelling != "gemma4_text" else (FAMILIES["Gemma 4 26B-A4B"], 66)
    make_model_folder(tmp_path / "model", **model)
    report = report_of(home, tmp_path, MOVE, EXPORTED, **LORA, model__path=str(tmp_path / "model"))
    assert (failed(report), skipped(report)) == (set(), set()), report.as_dict()
    assert f"{num_tensors} of {num_tensors} tensors" in report.checks[0].measured


def test_the_first_layers_keep_the_adapters_of_the_whole_model(home: Path, tmp_path: Path) -> None:
    targets = ["model.layers.1.self_attn.q_proj", "up_proj"]
    report = report_of(home, tmp_path, MOVE, EXPORTED, "resume", layers=1, **LORA, lora__targets=targets)
    assert failed(report) == set(), report.as_dict()
    assert "2 of 2 tensors" in report.checks[0].measured
    (other := tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="the first 1 of 2 layers have no adapter"):
        report_of(home, other, MOVE, layers=1, **LORA, lora__targets=targets[:1])


# --- What is broken ---


def forget_the_rank(patch: Patch) -> None:
    patch.setattr(LoraSpec, "scale", lambda self, projection: self.alphas[projection])


def adapt_the_fused_matrix(patch: Patch) -> None:
    """The adapter of q_proj is one of the whole matrix, so k_proj is trained too."""

    def wrong(right: Any, *arguments: Any) -> Any:
        found = right(*arguments)
        num_rows = {at.linear: 0 for at in found.values()}
        for at in found.values():
            num_rows[at.linear] += at.num_rows
        return {n: replace(at, num_rows=num_rows[at.linear]) if at.name == "q_proj" else at for n, at in found.items()}

    wrap(patch, adapters, "projections_of", wrong)


def choose(patch: Patch, change: Callable[[list[str], list[str]], list[str]]) -> None:
    def changed(right: Any, targets: Any, names: Any, **_: Any) -> list[str]:
        return change(right(targets, names), list(names))

    wrap(patch, build_model, "match_targets", changed)


def train_k_too(patch: Patch) -> None:
    choose(patch, lambda found, names: [name for name in names if name in found or name.endswith("k_proj")])


def leave_the_gate_out(patch: Patch) -> None:
    choose(patch, lambda found, _: [name for name in found if not name.endswith("gate_proj")])


def skip_the_merge(patch: Patch) -> None:
    patch.setattr(merge_module, "merge", lambda weight, *_: weight.float())


def change_the_export(patch: Patch, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
    def wrong(right: Any, folder: Path, tensors: Mapping[str, torch.Tensor], *rest: Any, **options: Any) -> None:
        changed = {name: change(name, value) for name, value in tensors.items()}
        right(folder, {name: value for name, value in changed.items() if value is not None}, *rest, **options)

    wrap(patch, adapter_checks, "write_adapter", wrong)


def export_one_b_as_zero(patch: Patch) -> None:
    last = "layers.1.mlp.down_proj.lora_B"
    change_the_export(patch, lambda name, value: value * 0 if last in name else value)


def export_no_gate(patch: Patch) -> None:
    change_the_export(patch, lambda name, value: None if "gate_proj" in name else value)


def leave_an_adapter_out_of_the_optimizer(patch: Patch) -> None:
    def wrong(_right: Any, config: Any, model: Any) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained[1:], lr=config.optimizer.learning_rate)

    wrap(patch, adapter_checks, "make_optimizer", wrong)


def decay_a_frozen_norm(patch: Patch) -> None:
    def wrong(right: Any, model: Any, *arguments: Any, **options: Any) -> Any:
        with torch.no_grad():
            model.model.norm.weight.mul_(0.99)
        return right(model, *arguments, **options)

    wrap(patch, adapter_checks, "train_step", wrong)


def train_a_norm_too(patch: Patch) -> None:
    def wrong(right: Any, run: Setup) -> Any:
        model = right(run)
        model.model.norm.weight.requires_grad_(True)
        return model

    wrap(patch, subject_module, "load_run_model", wrong)


@pytest.mark.parametrize(
    ("break_it", "red"),
    [
        (forget_the_rank, {EXPORTED}),
        (adapt_the_fused_matrix, {MOVE, MERGED, EXPORTED}),
        (train_k_too, {MOVE}),
        (leave_the_gate_out, {MOVE}),
        (skip_the_merge, {MERGED}),
        (export_one_b_as_zero, {EXPORTED}),
        (export_no_gate, {EXPORTED}),
        (leave_an_adapter_out_of_the_optimizer, {MOVE}),
        (decay_a_frozen_norm, {BASE, EXPORTED}),
        (train_a_norm_too, set(OF_ADAPTERS)),
    ],
)
def test_what_is_broken_turns_its_own_rows_red_and_no_others(
    home: Path, tmp_path: Path, monkeypatch: Patch, break_it: Callable[[Patch], None], red: set[str]
) -> None:
    break_it(monkeypatch)
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    report = report_of(home, tmp_path, *OF_ADAPTERS, **LORA, lora__targets=targets)
    assert failed(report) == red, report.as_dict()


ADAPTERS_AFTER_SHARDING = """
from sftron.checkpoint import hf_weights
from sftron.models.adapters import add_adapters, initial_value, is_adapter
right = hf_weights.load_model

def add_after_sharding(*arguments, adapters, frozen_dtype, **options):
    model = right(*arguments, **options)
    add_adapters(model, model.config, adapters.spec)
    for name, each in model.named_parameters():
        if is_adapter(name):
            each.data.copy_(initial_value(name, each.shape, seed=adapters.seed, init="default", row_norms=None))
    return model

hf_weights.load_model = add_after_sharding
"""


@pytest.mark.usefixtures("forked_ranks")
def test_adapters_that_are_added_after_sharding_differ_between_ranks(
    home: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(rank_checks, "_SCRIPT", ADAPTERS_AFTER_SHARDING + rank_checks._SCRIPT)
    report = report_of(home, tmp_path, "ranks", ranks=2, **LORA)
    assert failed(report) == {"ranks"}
    assert "differs between ranks" in "\n".join(report.failed[0].detail)


def test_without_peft_the_export_is_not_measured_and_the_reason_has_the_remedy(
    home: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    report = report_of(home, tmp_path, EXPORTED, **LORA)
    assert skipped(report) == {EXPORTED}
    assert "pip install" in report.checks[0].measured


def test_rows_of_adapters_are_there_with_lora_alone(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown check"):
        report_of(home, tmp_path, MOVE)
