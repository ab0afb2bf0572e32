"""Several ranks do what one does: the same step, the same data, the same checkpoints (laws 5, 6 and 8)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sftron.train.ranks import start_ranks
from tests.conftest import rest_nightly
from tests.train.ranks import launch, save_gradients, train
from tests.train.runs import chat_line, make_model_folder, metrics, settings, write_config, write_rows


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("layouts", rest_nightly([(1, 4), (1, 2)], [(1, 4)]), ids=str)
def test_gradients_are_the_same_for_any_spread_over_ranks_and_micro_batches(
    tmp_path: Path, layouts: tuple[int, ...]
) -> None:
    """4 micro-batches as 1 x 4, 2 x 2 and 4 x 1, and 4 ranks as 2 copies of 2; two of them have nothing to train."""
    for num_ranks in layouts:
        for rank, ended in enumerate(launch(num_ranks, save_gradients, tmp_path, folder=tmp_path)):
            assert ended.exit_code == 0, f"rank {rank} of {num_ranks}: {ended.err[-2000:]}"
    saved: dict[str, Any] = {path.stem: torch.load(path, weights_only=True) for path in tmp_path.glob("*.pt")}
    assert len(saved) == (12 if 4 in layouts else 10)
    assert saved["gradients-1-1-experts"]["tokens"]["experts"]["largest_share"] > 1.2 / 6
    for name, ours in saved.items():
        alone = saved[f"gradients-1-1-{name.rpartition('-')[2]}"]
        assert ours.keys() == alone.keys()
        assert ours["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert ours["norm"] == pytest.approx(alone["norm"], rel=1e-6)
        assert len(alone["tokens"]["roles"]) == 5
        assert flat(ours["tokens"]) == pytest.approx(flat(alone["tokens"]), rel=1e-6)
        for key in alone.keys() - {"loss", "norm", "tokens"}:
            scale = alone[key].abs().max().item()
            assert scale > 0
            torch.testing.assert_close(ours[key], alone[key], atol=2e-6 * scale, rtol=0, msg=lambda m, k=key: k + m)


def flat(value: Any) -> list[Any]:
    """All numbers inside."""
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    return [number for each in value for number in flat(each)] if isinstance(value, list) else [value]


def _train(tmp_path: Path, model_folder: Path, name: str, num_ranks: int, **overrides: Any) -> list[Any]:
    options = {"tokens__batch_accumulation_per_replica": 4 // num_ranks, "optimizer__schedule": "constant"}
    tree = settings(tmp_path, model_folder, general__run_name=name, **(options | overrides))
    path = write_config(tmp_path / "config.yaml", tree)
    return launch(num_ranks, train, path, folder=tmp_path)


def test_a_run_that_hops_between_numbers_of_ranks_is_the_run_that_did_not(tmp_path: Path, model_folder: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 200)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(chat_line("What is 3?") + "\n")
    options = {"evaluation__prompts": str(prompts), "evaluation__max_new_tokens": 4}
    (alone,) = _train(tmp_path, model_folder, "alone", 1, tokens__train_steps=6, **options)
    assert alone.exit_code == 0, alone.err
    for num_ranks, last_step in ((2, 3), (4, 4), (1, 6)):
        for ended in _train(tmp_path, model_folder, "hop", num_ranks, tokens__train_steps=last_step, **options):
            assert ended.exit_code == 0, ended.err
    straight, hopped = metrics(tmp_path / "runs" / "alone"), metrics(tmp_path / "runs" / "hop")
    for theirs, ours in zip(straight, hopped, strict=True):
        for key in ("trained_tokens", "total_tokens", "conversations", "epoch", "fill", "sum_squared_lengths"):
            assert ours[key] == theirs[key], (ours["step"], key)
        for key in ("roles", "datasets", "token_accuracy", "entropy"):
            assert flat(ours[key]) == pytest.approx(flat(theirs[key]), rel=1e-5), (ours["step"], key)
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    weights = [load_file(tmp_path / "runs" / name / "hf" / "step-6" / "model.safetensors") for name in ("alone", "hop")]
    assert weights[0].keys() == weights[1].keys()
    for key, theirs in weights[0].items():
        torch.testing.assert_close(weights[1][key], theirs, atol=2e-5, rtol=1e-4)


def test_only_the_main_rank_speaks_and_all_end_alike_where_the_layout_is_refused(
    tmp_path: Path, model_folder: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 200)
    ended = _train(tmp_path, model_folder, "run", 2, parallelism__dp_replicate=3)
    assert [each.exit_code for each in ended] == [2, 2]
    assert "dp_replicate 3 x dp_shard auto x context 1 needs 3 ranks, but 2 were started" in ended[0].err
    assert "start 3 ranks (torchrun --nproc_per_node=3)" in ended[0].err
    assert ended[1].out == ended[1].err == ""


def test_a_run_of_two_ranks_is_the_same_to_the_bit_when_it_is_repeated(tmp_path: Path, model_folder: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 200)
    for name in ("first", "again"):
        options = {"general__deterministic": True, "model__compute_dtype": "bfloat16", "tokens__train_steps": 4}
        for ended in _train(tmp_path, model_folder, name, 2, model__activation_checkpointing="full", **options):
            assert ended.exit_code == 0, ended.err
    runs = [tmp_path / "runs" / name for name in ("first", "again")]
    timed = {"step_seconds", "data_seconds", "peak_memory_gb", "tflops", "mfu", "hfu"}
    for ours, theirs in zip(*map(metrics, runs), strict=True):
        assert ours["tokens_per_second_per_gpu"] == pytest.approx(ours["tokens_per_second"] / 2)
        timed |= {key for key in ours if "per_second" in key} | {"checkpoint_seconds", "evaluation_seconds"}
        assert {key: ours[key] for key in ours.keys() - timed} == {key: theirs[key] for key in theirs.keys() - timed}
    files = [sorted((run / "checkpoints" / "step-4").glob("*.safetensors")) for run in runs]
    assert len(files[0]) == 4  # of each rank, the model's and the optimizer's
    for ours, theirs in zip(*files, strict=True):
        assert ours.read_bytes() == theirs.read_bytes(), ours.name


def test_the_memory_of_a_step_is_that_of_the_rank_that_has_held_the_most(tmp_path: Path) -> None:
    for ended in launch(2, deal_of_unequal_ranks, folder=tmp_path):
        assert ended.exit_code == 0, ended.err


def deal_of_unequal_ranks() -> None:
    from sftron.train import step
    from sftron.train.flops import StepFlops
    from sftron.train.ranks import end_ranks, start_ranks

    ranks = start_ranks()
    step.peak_memory_bytes = lambda _: 100 - ranks.dp_rank if ranks.dp_rank else 7
    fetched = step.next_step_batches(iter([]), 0, ranks=ranks, num_datasets=1, flops_of=lambda _: StepFlops(0, 0))
    assert fetched.peak_memory_bytes == 99
    end_ranks()


# --- A rank's number, its data-parallel number and its place among those that share its packs are three things ---


def lay_out(sizes: tuple[int, int, int], folder: Path) -> None:
    from sftron.train.ranks import end_ranks, start_ranks

    replicate, shard, context = sizes
    ranks = start_ranks(replicate, shard, context=context)
    assert ranks.mesh is not None
    group = ranks.context_group
    found = {
        "dp_rank": [ranks.dp_rank, ranks.dp_world_size],
        "context": list(ranks.context),
        "shares with": [ranks.rank] if group is None else torch.distributed.get_process_group_ranks(group),
        "mesh": ranks.mesh.mesh.tolist(),
        "gathered": [facts["rank"] for facts in ranks.gather({"rank": ranks.rank})],
        "sum": ranks.sum(torch.tensor([10**ranks.rank])).item(),
        "is_asked_by_rank_3": ranks.any(ranks.rank == 3),
        "is_main": ranks.is_main,
    }
    (folder / f"found-{ranks.rank}").write_text(json.dumps(found))
    end_ranks()


@pytest.mark.parametrize(
    "layout",
    rest_nightly(
        [
            ((1, 2, 2), [0, 0, 1, 1], [0, 1, 2, 3]),
            ((2, 1, 2), [0, 0, 1, 1], [[0, 1], [2, 3]]),
            ((1, 1, 4), [0, 0, 0, 0], [0, 1, 2, 3]),
            ((2, 2, 1), [0, 1, 2, 3], [[0, 1], [2, 3]]),
        ],
        [((1, 2, 2), [0, 0, 1, 1], [0, 1, 2, 3])],
    ),
    ids=str,
)
def test_ranks_that_share_packs_are_neighbors_and_everything_else_is_over_all_ranks(
    tmp_path: Path, layout: tuple[tuple[int, int, int], list[int], list[Any]]
) -> None:
    sizes, dp_ranks, mesh = layout
    for ended in launch(4, lay_out, sizes, tmp_path, folder=tmp_path):
        assert ended.exit_code == 0, ended.err
    context = sizes[2]
    for rank in range(4):
        first = rank - rank % context
        assert json.loads((tmp_path / f"found-{rank}").read_text()) == {
            "dp_rank": [dp_ranks[rank], 4 // context],
            "context": [rank - first, context],
            "shares with": list(range(first, first + context)),
            "mesh": mesh,
            "gathered": [0, 1, 2, 3],
            "sum": 1111,
            "is_asked_by_rank_3": True,
            "is_main": rank == 0,
        }


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK", "RANK", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["x", "", "-1", "1.5", "²", "9" * 5000], ids=["x", "none", "-1", "1.5", "2", "9s"])
def test_a_variable_of_torchrun_that_is_no_number_is_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match=f"^{name} is '.*' in the environment, and torchrun sets a number: unset {name}$"
    ):
        start_ranks(1, 1, 60)
