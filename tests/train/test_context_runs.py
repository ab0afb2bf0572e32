"""Ranks that share their packs make the step, the run, the checkpoints and the exports of those that do not."""

import json
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import rest_nightly
from tests.train.context_ranks import KINDS, save_mutants, save_steps
from tests.train.ranks import launch, train
from tests.train.runs import chat_line, make_model_folder, metrics, settings, write_config, write_rows
from tests.train.test_ranks import flat


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def run(num_ranks: int, *work: Any, folder: Path) -> None:
    for rank, ended in enumerate(launch(num_ranks, *work, folder=folder)):
        assert ended.exit_code == 0, f"rank {rank}: {ended.err[-3000:]}"


@pytest.mark.parametrize("isolated", rest_nightly([True, False], [True]))
def test_every_layout_has_the_packs_counts_losses_and_gradients_of_one_rank(tmp_path: Path, isolated: bool) -> None:
    """4 ranks in groups of 2 and of 4, and as 2 copies of 2, against 1; tests/train/test_ranks.py has groups of 1."""
    layouts = [(1, 2), (1, 4), (2, 2)]
    kinds = list(KINDS) if isolated else ["experts", "states"]
    run(4, save_steps, layouts, kinds, tmp_path / "found", isolated, folder=tmp_path)
    found = torch.load(tmp_path / "found", weights_only=False)
    for kind, layout in product(kinds, layouts):
        ours, alone = found[kind, layout], found[kind, (1, 1)]
        for name in ("counts", "packs", "flops"):
            assert ours[name] == alone[name], (kind, layout, name)
        assert ours["peak_memory"] == 3, "that of the busiest rank, which is here the last one"
        assert flat(ours["numbers"]) == pytest.approx(flat(alone["numbers"]), rel=2e-6), (kind, layout)
        assert ours["gradients"].keys() == alone["gradients"].keys()
        for name, gradient in alone["gradients"].items():
            scale = gradient.abs().max().item()
            assert scale > 0
            difference = (ours["gradients"][name] - gradient).abs().max().item()
            assert difference <= 5e-6 * scale, (kind, layout, name, difference / scale)
    roles = found[kinds[0], (1, 1)]["numbers"]["tokens"]["roles"]
    assert len(roles) == 4
    assert len({mean["tokens"] for mean in roles.values()}) > 1


def test_mistakes_of_others_change_the_loss_and_unequal_packs_are_named(tmp_path: Path) -> None:
    run(2, save_mutants, tmp_path / "found", folder=tmp_path)
    found, other = (torch.load(tmp_path / f"found-{rank}") for rank in (0, 1))
    alone, ours = found.pop("alone"), found.pop("")
    assert ours == pytest.approx(alone, rel=2e-6)
    error = found.pop("one rank with another pack")
    assert error == other["one rank with another pack"]
    assert "ranks 0 and 1 share their packs (parallelism.context), but read [[0, " in error
    assert " and [[1, " in error
    assert len(found) == 3
    for mutant, loss in found.items():
        assert abs(loss / alone - 1) > 1e-3, mutant


# --- Whole runs ---

KEYS = ("trained_tokens", "total_tokens", "conversations", "epoch", "fill", "sum_squared_lengths", "rows")


def launch_run(tmp_path: Path, folder: Path, name: str, num_ranks: int, context: int, **overrides: Any) -> list[Any]:
    options = {
        "tokens__batch_accumulation_per_replica": max(1, 4 * context // num_ranks),
        "parallelism__context": context,
        "parallelism__timeout_seconds": 60,
        "optimizer__schedule": "constant",
        "data__num_lanes": 4,
    }
    tree = settings(tmp_path, folder, general__run_name=name, **(options | overrides))
    return launch(num_ranks, train, write_config(tmp_path / "config.yaml", tree), folder=tmp_path)


def require_ended(ended: list[Any]) -> None:
    for rank, each in enumerate(ended):
        assert each.exit_code == 0, f"rank {rank}: {each.err[-3000:]}"


LORA = {"optimizer__weight_decay": 0.0, "lora__rank": 4}


@pytest.mark.parametrize("trained", rest_nightly(["full", "lora", "nf4"], ["full"]))
def test_a_run_that_hops_between_layouts_is_the_run_that_did_not(
    tmp_path: Path, model_folder: Path, trained: str
) -> None:
    write_rows(tmp_path / "rows.jsonl", 200)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(chat_line("What is 3?") + "\n")
    options: dict[str, Any] = {
        "evaluation__prompts": str(prompts),
        "evaluation__max_new_tokens": 4,
        "evaluation__share": 0.1,
        "logging__untrained_roles_interval": 2,
        "model__activation_checkpointing": "full",
    }
    if trained != "full":
        options |= LORA
    if trained == "nf4":
        pytest.importorskip("bitsandbytes")
        options["model__frozen_dtype"] = "nf4"
        model_folder = make_model_folder(tmp_path / "model", hidden_size=64, intermediate_size=64)  # blocks of 64
    require_ended(launch_run(tmp_path, model_folder, "alone", 1, 1, tokens__train_steps=6, **options))
    for num_ranks, context, last_step in ((4, 2, 2), (4, 4, 4), (2, 1, 5), (2, 2, 6)):
        layout = {"tokens__train_steps": last_step}
        require_ended(launch_run(tmp_path, model_folder, "hop", num_ranks, context, **layout, **options))
    alone, hop = tmp_path / "runs" / "alone", tmp_path / "runs" / "hop"
    for theirs, ours in zip(metrics(alone), metrics(hop), strict=True):
        for key in KEYS:
            assert ours[key] == theirs[key], (ours["step"], key)
        for key in ("roles", "datasets", "token_accuracy", "entropy", "loss", "grad_norm"):
            assert flat(ours[key]) == pytest.approx(flat(theirs[key]), rel=1e-5), (ours["step"], key)
    evaluations = [
        [json.loads(line) for line in (path / "evaluations.jsonl").read_text().splitlines()] for path in (alone, hop)
    ]
    theirs, ours = ({each["step"]: each for each in lines} for lines in evaluations)
    for each in (*ours[6]["sets"].values(), *theirs[6]["sets"].values()):
        assert each.pop("kept") is None
    assert flat(ours[6]["sets"]) == pytest.approx(flat(theirs[6]["sets"]), rel=1e-5)
    assert ours[6]["answers"] == theirs[6]["answers"]


def test_a_step_that_changes_nothing_leaves_the_same_bits_on_any_ranks(tmp_path: Path, model_folder: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 60)
    source, found = load_file(model_folder / "model.safetensors"), {}
    options = {"tokens__train_steps": 1, "optimizer__learning_rate": 1e-40, "optimizer__weight_decay": 0.0}
    for context in (1, 2):
        require_ended(launch_run(tmp_path, model_folder, f"context-{context}", 2, context, **options))
        folder = tmp_path / "runs" / f"context-{context}"
        exported = load_file(folder / "hf" / "step-1" / "model.safetensors")
        assert exported.keys() == source.keys()
        assert all(value.equal(source[name]) for name, value in exported.items())
        shards = sorted((folder / "checkpoints" / "step-1").glob("model-*.safetensors"))
        found[context] = [path.read_bytes() for path in shards]
    assert len(found[1]) == 2
    assert found[1] == found[2]


def test_a_run_that_diverges_names_each_row_once_and_states_its_layout(tmp_path: Path, model_folder: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 60)
    options = {"tokens__train_steps": 8, "optimizer__learning_rate": 1e38}
    said = {}
    for num_ranks, context in ((1, 1), (2, 2)):
        name = f"context-{context}"
        ended = launch_run(tmp_path, model_folder, name, num_ranks, context, **options)
        assert [each.exit_code for each in ended] == [3] * num_ranks
        said[context] = (tmp_path / "runs" / name / "console.log").read_text()
    alone, shared = (
        [re.findall(r"rows\.jsonl:\d+", line) for line in text.splitlines() if "no update was made" in line]
        for text in said.values()
    )
    assert shared == alone
    assert [bool(rows) for rows in alone] == [True] * 3
    assert "ranks      2: one copy of the model, each on 2 ranks; 2 ranks share each pack" in said[2]
    projections = [re.findall(r"about ([\d,]+) tokens a step", text) for text in said.values()]
    assert projections[0] == projections[1] != []


def test_packs_without_a_conversation_count_once_for_the_ranks_that_share_them(
    tmp_path: Path, model_folder: Path
) -> None:
    """Two of four lanes drain first. If each rank counted their packs, the data would seem to have ended."""
    write_rows(tmp_path / "rows.jsonl", 10)
    epoch = {"tokens__train_steps": None, "tokens__train_epochs": 1, "tokens__batch_accumulation_per_replica": 1}
    options = epoch | {"tokens__sequence_length": 64, "data__max_dropped_share": 1.0, "checkpoints__export_hf": False}
    require_ended(launch_run(tmp_path, model_folder, "run", 2, 2, **options))
    packs = [each["rows"]["packs"] for each in metrics(tmp_path / "runs" / "run")]
    assert packs == [*([n, n + 1] for n in range(7)), [7, 10]]


def test_a_dry_run_judges_the_loss_of_all_ranks_that_share_a_pack(tmp_path: Path, model_folder: Path) -> None:
    """The second of two ranks has the last of three tokens, without a label: its part of any loss is 0."""
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][:] = 8e37  # finite, as its loss is not
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}) + "\n")
    options = {"tokens__sequence_length": 3, "parallelism__context": 2, "parallelism__timeout_seconds": 60}
    config = write_config(tmp_path / "config.yaml", settings(tmp_path, folder, **options))
    ended = launch(2, train, config, "--dry-run", folder=tmp_path)
    assert [each.exit_code for each in ended] == [2, 2], ended[1].err[-3000:]
    assert "holds broken weights" in ended[0].err


def test_more_ranks_than_heads_or_tokens_are_refused_with_the_key(tmp_path: Path, model_folder: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 60)
    one_head = make_model_folder(tmp_path / "model", num_attention_heads=1, num_key_value_heads=1)
    ended = launch_run(tmp_path, one_head, "run", 2, 2)
    assert [each.exit_code for each in ended] == [2, 2]
    assert "parallelism.context is 2, but" in ended[0].err
    assert "layers with 1 heads" in ended[0].err
    short = {"tokens__sequence_length": 3, "parallelism__context": 4}
    (refused,) = launch_run(tmp_path, model_folder, "run", 1, 1, **short)
    assert refused.exit_code == 2
    assert "parallelism.context" in refused.err
    assert "cannot share a pack of 3 tokens" in refused.err
