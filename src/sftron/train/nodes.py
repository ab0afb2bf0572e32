"""What the nodes of a run share: what is downloaded, the data and settings, and the folder that they write to."""

from __future__ import annotations

import hashlib
import secrets
import socket
import time
from pathlib import Path

from sftron.checkpoint.atomic import main_or_raise
from sftron.config import Config, dump_config
from sftron.data.sources import find_files, open_source
from sftron.train.model_folder import local_folder
from sftron.train.plan import RunPlan
from sftron.train.ranks import Ranks

_PATIENCE_S = 60
"""NFS clients may hold a folder's old listing for up to so long (acdirmax)."""


def download_once(config: Config, ranks: Ranks) -> None:
    """What is not on this machine is fetched by one rank of each node; the others find it. Raises ValueError."""

    def fetch() -> None:
        if ranks.local_rank != 0:
            return
        local_folder(config.model.path)
        local_folder(config.tokenizer_path, with_weights=config.tokenizer_path == config.model.path)
        in_files = [options for options in config.data.datasets if not options.streaming]
        for options in (*in_files, *config.evaluation.datasets):
            if find_files(options.path, options.split) is None:
                open_source(options.path, options.split, config.data.max_row_bytes)

    ranks.together(fetch)


def require_alike(plan: RunPlan) -> None:
    """Raises ValueError, on all ranks, where one has other data, settings or weights than the main one: a node may have
    an older copy, and then packs or weights would be of two kinds without anybody noticing."""
    config = hashlib.sha256(dump_config(plan.config).encode()).hexdigest()[:12]
    weights = [f"{path.name} {path.stat().st_size}" for path in sorted(plan.model_folder.glob("*.safetensors"))]
    evaluated = {f"evaluation set {each.name}": each.fingerprint for each in plan.evaluation_sets}
    facts = {"the configuration": config, "the model's files": ", ".join(weights), **evaluated, **plan.fingerprint}
    first, *others = plan.ranks.gather(facts)
    for rank, theirs in enumerate(others, start=1):
        different = [
            f"{name}: {first[name]}, there {theirs.get(name)}" for name in first if first[name] != theirs.get(name)
        ]
        if different:
            raise ValueError(
                f"rank {rank} would not train on what rank 0 does; give every node the same files and arguments:\n  "
                + "\n  ".join(different)
            )


def require_one_folder(folder: Path, ranks: Ranks, patience_s: float = _PATIENCE_S) -> None:
    """Raises ValueError, on all ranks, where a node does not see what the main rank writes to `folder`: each rank
    writes its part of a checkpoint there."""
    if ranks.dp_world_size == 1:
        return

    def write() -> list[str]:
        token = folder / f"seen-by-all-{secrets.token_hex(8)}"
        token.touch()
        return [token.name, socket.gethostname()]

    name, host = main_or_raise(ranks, write)

    def look() -> None:
        end = time.monotonic() + patience_s
        while ranks.local_rank == 0 and not (folder / name).exists():
            if time.monotonic() > end:
                raise ValueError(
                    f"{socket.gethostname()} does not see what rank 0 on {host} writes to {folder}. "
                    "general.output_dir has to lie on a file system that all nodes share"
                )
            time.sleep(0.1)

    try:
        ranks.together(look)
    finally:
        if ranks.is_main:
            (folder / name).unlink()
