"""What nodes share, and what each rank reads of it."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

from sftron.checkpoint import model_folder
from sftron.checkpoint.checkpoint import load_checkpoint
from sftron.checkpoint.hf_weights import SafetensorsFolder, load_model
from sftron.checkpoint.model_folder import local_folder
from sftron.config import load_config
from sftron.data.sources import RowSource, hub, open_source
from sftron.models.sharding import shard_model, whole
from sftron.train import build_model, build_run
from sftron.train.optimizer import make_by_name
from sftron.train.ranks import Dimensions, RankError, end_ranks, start_ranks
from tests.checkpoint.saving import save_checkpoint
from tests.train.ranks import Ended, launch, train
from tests.train.runs import make_model_folder, settings, write_config, write_rows
from tests.train.sharded_steps import ODD


def require_all_zero(ended: list[Ended]) -> None:
    for rank, each in enumerate(ended):
        assert each.exit_code == 0, f"rank {rank}: {each.err[-3000:]}"


# -- what is read -----------------------------------------------------------------------------------------------------

NEW_IDS = list(range(768, 1541))
"""So many that some ranks have rows of new tokens alone."""


def load_share(folder: Path, path: Path) -> None:
    """What this rank reads while it loads the model, and the model's weights, put together."""
    ranks, num_bytes = start_ranks(), 0
    original = {name: getattr(SafetensorsFolder, name) for name in ("read", "read_range", "read_rows")}

    def counting(name: str, self: SafetensorsFolder, *arguments: Any) -> torch.Tensor:
        nonlocal num_bytes
        tensor = original[name](self, *arguments)
        num_bytes += tensor.nbytes
        return tensor

    for name in original:
        setattr(SafetensorsFolder, name, lambda self, *arguments, name=name: counting(name, self, *arguments))
    mesh = Dimensions(shard=ranks.dp_world_size).mesh("cpu")
    model = load_model(folder, shard=lambda model: shard_model(model, mesh))
    path.with_suffix(f".{ranks.dp_rank}").write_text(json.dumps(num_bytes))
    for name, method in original.items():
        setattr(SafetensorsFolder, name, method)
    grown = load_model(
        folder, vocab_size=1541, initialize_ids=[5, *NEW_IDS], shard=lambda model: shard_model(model, mesh)
    )
    torch.save(
        [{name: whole(p.detach()) for name, p in each.named_parameters()} for each in (model, grown)],
        path.with_suffix(f".pt{ranks.dp_rank}"),
    )
    checkpoints = path.with_name(f"checkpoints-{ranks.dp_world_size}-{folder.name}")
    optimizer = make_by_name(model.named_parameters(), learning_rate=0.1, betas=(0.9, 0.95), eps=1.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = [parameter.detach().clone() for parameter in model.parameters()]
    written = save_checkpoint(checkpoints, 1, model, optimizer, ranks=ranks)
    optimizer.step()
    load_checkpoint(written, model=model, optimizer=optimizer)
    for ours, theirs in zip(model.parameters(), saved, strict=True):
        assert whole(ours.detach()).equal(whole(theirs))
    end_ranks()


def test_a_rank_reads_its_own_share_of_the_weights_and_all_together_have_all(tmp_path: Path) -> None:
    even = make_model_folder(tmp_path / "even", hidden_size=72, num_attention_heads=6, tie_word_embeddings=True)
    odd = make_model_folder(tmp_path / "odd", **ODD)
    for num_ranks, folder in ((2, even), (4, odd)):
        num_bytes = (folder / "model.safetensors").stat().st_size
        alone = [load_model(folder), load_model(folder, vocab_size=1541, initialize_ids=[5, *NEW_IDS])]
        require_all_zero(launch(num_ranks, load_share, folder, tmp_path / "read", folder=tmp_path))
        for rank in range(num_ranks):
            # A row more of each tensor where the ranks do not divide them.
            assert json.loads((tmp_path / f"read.{rank}").read_text()) <= num_bytes / num_ranks + 10_000
            for ours, theirs in zip(torch.load(tmp_path / f"read.pt{rank}"), alone, strict=True):
                expected = dict(theirs.named_parameters())
                assert ours.keys() == expected.keys()
                for name, weight in ours.items():
                    assert weight.equal(expected[name]), name


# -- what is downloaded ---------------------------------------------------------------------------------------------


def test_weights_in_a_folder_of_a_repository_are_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ["config.json", "model-00001-of-00002.safetensors", "additional_chat_templates/tool_use.jinja"]
    found: list[str] = []

    def snapshot_download(_path: str, *, revision: None, local_files_only: bool, **patterns: Any) -> str:
        assert not local_files_only
        found.extend(filter_repo_objects([*wanted, "original/model.safetensors", "metal/model.bin"], **patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert local_folder("openai/gpt-oss-20b") == tmp_path
    assert found == wanted


COMMIT = "c" * 40


def plan_with_a_hub(config: Path, cache: Path, calls: Path) -> None:
    """Open the setup of a configuration whose model, tokenizer and data are on a Hub that notes who asks it."""
    import huggingface_hub

    from sftron.train.trainer import open_setup

    def note(what: str) -> None:
        with calls.open("a") as file:
            file.write(f"{what} {os.environ['RANK']}\n")

    def snapshot_download(
        path: str, *, revision: str, allow_patterns: list[str], local_files_only: bool, **_: object
    ) -> str:
        assert revision == COMMIT
        if not local_files_only:
            note(f"{path}{' with weights' if '*.safetensors' in allow_patterns else ''}")
            (cache / "downloaded").touch()
        assert (cache / "downloaded").exists(), "looked for before it is there"
        return str(cache / "model")

    def open_hub(split: hub.HubSplit, max_row_bytes: int) -> RowSource:
        assert split.revision == COMMIT
        note("rows" if not (cache / "rows").exists() else "rows in the cache")
        (cache / "rows").touch()
        return open_source(str(cache / "rows.jsonl"), max_row_bytes=max_row_bytes)

    def commit_of(name: str, *_: object) -> str:
        note(f"commit of {name}")
        return COMMIT

    huggingface_hub.snapshot_download = snapshot_download  # pyright: ignore[reportPrivateImportUsage]
    hub.HubSplit.open = open_hub  # pyright: ignore[reportAttributeAccessIssue]
    hub.commit_of = model_folder.commit_of = commit_of
    if os.environ["RANK"] == "2":
        os.environ["LOCAL_RANK"] = "0"  # of a second node
    assert open_setup(load_config(config)).model.folder == cache / "model"
    end_ranks()


def test_one_rank_of_each_node_downloads_and_the_others_find_it(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "model").symlink_to(model_folder)
    write_rows(tmp_path / "rows.jsonl", 200)
    tree = settings(tmp_path, Path("owner/model"), tokenizer__path="owner/tokenizer", data__num_lanes=12)
    tree["data"]["datasets"] = [{"path": "owner/rows"}]
    config = write_config(tmp_path / "config.yaml", tree)
    require_all_zero(launch(3, plan_with_a_hub, config, tmp_path, tmp_path / "calls", folder=tmp_path))
    calls = (tmp_path / "calls").read_text().splitlines()
    assert {call for call in calls if call.startswith("owner")} == {
        f"owner/{what} {rank}" for what in ("model with weights", "tokenizer") for rank in (0, 2)
    }
    # One rank decides which commits they are.
    asked = [f"commit of owner/{what} 0" for what in ("model", "tokenizer", "rows")]
    assert [call for call in calls if call.startswith("commit")] == asked
    # The first node to ask downloads the rows here, as both share a cache; nobody does before a local rank 0 has.
    assert sum(call.startswith("rows ") and "cache" not in call for call in calls) >= 1


# -- what has to be alike ---------------------------------------------------------------------------------------------


def train_in(config: Path, folders: list[Path]) -> int:
    """As `train`, each rank in a folder of its own."""
    os.chdir(folders[int(os.environ["RANK"])])
    return train(config)


def test_ranks_that_would_train_on_other_rows_are_refused(tmp_path: Path, model_folder: Path) -> None:
    folders = [tmp_path / "here", tmp_path / "there"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        write_rows(folder / "rows.jsonl", 100 + number)
    tree = settings(tmp_path, model_folder)
    tree["data"]["datasets"] = [{"path": "rows.jsonl"}]
    ended = launch(2, train_in, write_config(tmp_path / "config.yaml", tree), folders, folder=tmp_path)
    assert [each.exit_code for each in ended] == [2, 2]
    assert "rank 1 differs from rank 0 in configuration, data or model" in ended[0].err
    assert "data.datasets.0: " in ended[0].err


def train_with_other_attention(config: Path) -> int:
    """As `train`; on rank 1 the backend fails that rank 0 has."""
    if os.environ["RANK"] == "1":
        build_model.attention_of_layers = lambda _, architecture, *__: ("flex",) * len(architecture.layers)
    return train(config)


def test_a_rank_that_would_compute_attention_by_another_backend_is_refused(tmp_path: Path, model_folder: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 100)
    config = write_config(tmp_path / "config.yaml", settings(tmp_path, model_folder))
    ended = launch(2, train_with_other_attention, config, folder=tmp_path)
    assert [each.exit_code for each in ended] == [2, 2]
    assert "the attention backends: sdpa on rank 0, flex there" in ended[0].err


def look_in_a_full_folder(folder: Path) -> int:
    def touch(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    ranks, Path.touch = start_ranks(), touch
    try:
        build_run.require_one_folder(folder, ranks)
    except OSError as error:
        return error.errno or 0
    except RankError:
        return 1
    finally:
        end_ranks()
    return 0


def test_a_full_disk_is_named_and_not_the_file_that_it_has_no_room_for(tmp_path: Path) -> None:
    ended = launch(2, look_in_a_full_folder, tmp_path, folder=tmp_path)
    assert [each.exit_code for each in ended] == [errno.ENOSPC, 1], ended[0].err


def look_for_one_folder(folders: list[Path]) -> int:
    ranks = start_ranks()
    ranks = replace(ranks, local_rank=0)  # each on a node of its own
    try:
        build_run.require_one_folder(folders[ranks.dp_rank], ranks, patience_s=0.3)
    except ValueError as error:
        print(error)
        return 2
    finally:
        end_ranks()
    return 0


def test_a_run_directory_that_not_all_nodes_see_is_refused_and_left_clean(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    require_all_zero(launch(2, look_for_one_folder, [here, here], folder=tmp_path))
    ended = launch(2, look_for_one_folder, [here, there], folder=tmp_path)
    assert [each.exit_code for each in ended] == [2, 2]
    for each in ended:
        assert f"does not see what rank 0 writes to {there}" in each.out
    assert list(here.iterdir()) == []
