"""Builds a run from its configuration: data and model, checked and equal on all ranks; no weights yet."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import torch

from sftron.config import Config, dump_config
from sftron.kernels.device import compute_capability, computes_bfloat16, device_name, is_gpu
from sftron.models.attention import describe_backends
from sftron.models.quantization import import_bitsandbytes
from sftron.train.build_data import build_data, longest_document, open_rows, plan_packs
from sftron.train.build_model import base_digest, build_model
from sftron.train.evaluation import require_metric, watched_metric
from sftron.train.extension import NO_EXTENSION, Extension
from sftron.train.places import Places, find_commits, find_places, local_files, pin
from sftron.train.ranks import Ranks
from sftron.train.run import RunData, RunModel, Setup

_PATIENCE_S = 60
"""The longest time that NFS clients may cache an old directory listing by default (acdirmax)."""


def build_run(config: Config, ranks: Ranks, extension: Extension = NO_EXTENSION) -> Setup:
    """Opens and checks everything in a run except its weights. Every rank calls this.

    Raises:
        ValueError: On all ranks, with a message for the user; DataError is a subclass.
    """
    gives_rows = extension.data is not None
    commits = ranks.gather(
        ranks.all_or_raise(lambda: find_commits(config, gives_rows=gives_rows) if ranks.is_main else {})
    )[0]
    config = pin(config, commits)
    places = find_places(config, ranks)
    ranks.all_or_raise(lambda: download_rows(config, ranks, extension))
    setup = replace(ranks.all_or_raise(lambda: open_run(config, ranks, places, extension)), commits=commits)
    if setup.model.adapters is not None:
        digest, stamps = base_digest(setup.model.folder, ranks)
        setup = replace(setup, model=replace(setup.model, base_digest=digest, base_stamps=stamps))
    require_alike(setup)
    plan_packs(setup)
    return setup


def open_run(config: Config, ranks: Ranks, places: Places, extension: Extension = NO_EXTENSION) -> Setup:
    """Does the work of `build_run` on one rank, after `find_places` and `download_rows`."""
    require_device(config, ranks)
    data = build_data(config, ranks, places, extension.data)
    model = build_model(config, ranks, places, data)
    preflight(config, data, model, extension)
    return Setup(config, ranks, data, model, extension=extension)


def download_rows(config: Config, ranks: Ranks, extension: Extension = NO_EXTENSION) -> None:
    """Downloads missing data sets on the first rank of each node. Raises ValueError."""
    if ranks.local_rank != 0:
        return
    named = config.data.datasets[0 if extension.data is None else 1 :]
    in_files = [options for options in named if not options.streaming]
    for each in (*in_files, *config.evaluation.datasets, *config.evaluation.keep):
        if local_files(each) is None:
            open_rows(config, each)


def require_alike(setup: Setup) -> None:
    """Requires that all ranks have the main rank's configuration, data, weights and attention. Every rank calls this.

    Otherwise, a node with an older copy of a file would silently train on different packs or weights. And if an
    attention backend fails on a rank's GPU, that rank would silently use another backend, perhaps a slow one.
    """
    weights = [f"{path.name} {path.stat().st_size}" for path in sorted(setup.model.folder.glob("*.safetensors"))]
    facts = {
        "the configuration": hashlib.sha256(dump_config(setup.config).encode()).hexdigest()[:12],
        "the user's own code": str(setup.resolved_config.extend),
        "the model's files": ", ".join(weights),
        "the attention backends": describe_backends(setup.model.attention),
        **{f"evaluation set {each.name}": each.fingerprint for each in setup.data.evaluation_sets},
        **setup.fingerprint,
    }
    first, *others = setup.ranks.gather(facts)
    for rank, other in enumerate(others, start=1):
        differing = [name for name in first if first[name] != other.get(name)]
        if differing:
            raise ValueError(
                f"rank {rank} differs from rank 0 in configuration, data or model; give every node the same files, "
                "arguments, packages and GPUs:\n  "
                + "\n  ".join(f"{name}: {first[name]} on rank 0, {other.get(name)} there" for name in differing)
            )


# --- Checks before the weights are read ---


def require_device(config: Config, ranks: Ranks) -> None:
    """Requires that this rank's device and torch support the configuration. Raises ValueError."""
    is_sharded = ranks.mesh is not None or ranks.dimensions.size > 1
    if config.model.frozen_dtype == "nf4" and is_sharded and torch.__version__ < "2.12":
        raise ValueError(
            f"model.frozen_dtype: nf4 over {ranks.dimensions.size} ranks needs torch 2.12, but {torch.__version__} is "
            "installed, whose FSDP2 casts the bytes of NF4 to bfloat16; install torch>=2.12, or set frozen_dtype to "
            "bfloat16"
        )
    if not is_gpu(ranks.device):
        return
    name = device_name(ranks.device)
    if config.model.compute_dtype == "bfloat16" and not computes_bfloat16(ranks.device):
        capability = ".".join(map(str, compute_capability(ranks.device)))
        raise ValueError(
            f"model.compute_dtype: bfloat16 needs a GPU of compute capability 8.0, but {name} has {capability}, which "
            "only emulates it; set compute_dtype to float32 (float16 is not implemented)"
        )
    if os.environ.get("TRITON_INTERPRET") != "1":
        require_compiler(name)


def require_compiler(device: str) -> None:
    """Requires what Triton needs to launch its kernels the first time. Raises ValueError."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise ValueError(
            f"the kernels for {device} need a C compiler on first use (Triton), but neither gcc nor clang "
            "is on PATH; install one (apt-get install gcc), or name it in the environment variable CC"
        )
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton looks on Debian
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    if not header.exists():
        raise ValueError(
            f"the kernels for {device} need Python's headers on first use (Triton), but "
            f"{header} is missing; install them (apt-get install python3-dev)"
        )


def preflight(config: Config, data: RunData, model: RunModel, extension: Extension = NO_EXTENSION) -> None:
    """Runs all checks that one rank can make without weights. Raises ValueError with both values and the remedy."""
    if extension.compute_metrics is not None and not data.questions:
        raise ValueError(
            "compute_metrics: there are no answers to compute from; set evaluation.prompts to a file of questions, or "
            "remove compute_metrics"
        )
    if config.optimizer.name == "adamw_8bit":
        import_bitsandbytes("optimizer.name: adamw_8bit")
    if config.model.frozen_dtype == "nf4":
        import_bitsandbytes("model.frozen_dtype: nf4")
    watched = None if config.evaluation.patience is None else watched_metric(config, data.evaluation_sets)
    for key, metric in (("checkpoints.keep_best", config.checkpoints.keep_best), ("evaluation.metric", watched)):
        if metric is not None:
            has_prompts, has_own = bool(data.questions), extension.compute_metrics is not None
            require_metric(key, metric, data.evaluation_sets, has_prompts=has_prompts, has_own=has_own)
    _require_positions(config, model)
    highest_id, token = max((number, token) for token, number in data.chat_tokenizer.tokenizer.get_vocab().items())
    if highest_id >= (num_ids := model.architecture.vocab_size):
        raise ValueError(
            f"the tokenizer has ids up to {highest_id} ({token!r}), but {model.folder} embeds ids up to {num_ids - 1} "
            f"(vocab_size {num_ids}); use this model's tokenizer, without added tokens"
        )
    epochs, warmup_steps = config.tokens.train_epochs, config.optimizer.warmup_steps
    if (
        epochs
        and isinstance(warmup_steps, int)
        and warmup_steps >= (steps := epochs * (data.projection.steps_per_epoch or 0))
    ):
        raise ValueError(
            f"optimizer.warmup_steps: {warmup_steps} is not below about {steps:,.0f}, the steps of {epochs} epochs,"
            " so the learning rate would never reach its peak; lower it"
        )


def _require_positions(config: Config, model: RunModel) -> None:
    """Requires that the longest possible document fits the positions of the model."""
    length, architecture = longest_document(config), model.architecture
    if length > architecture.max_position_embeddings:
        raise ValueError(
            f"documents may have {length} tokens, but {model.folder} has {architecture.max_position_embeddings} "
            "positions (max_position_embeddings); lower tokens.sequence_length"
            # Without isolation, positions continue through the whole pack.
            + ("" if config.data.remove_cross_attention else ", or set data.remove_cross_attention: true")
        )


def require_one_folder(folder: Path, ranks: Ranks, patience_s: float = _PATIENCE_S) -> None:
    """Requires that all nodes share `folder`, to which each rank writes its shard of a checkpoint.

    Every rank calls this. The main rank writes a file, and each node waits up to `patience_s` seconds to see it.
    """
    if ranks.world_size == 1:
        return
    seen = folder / ranks.gather({"name": f"seen-by-all-{secrets.token_hex(8)}"})[0]["name"]

    def look() -> None:
        if ranks.is_main:
            seen.touch()
        end = time.monotonic() + patience_s
        while ranks.local_rank == 0 and not seen.exists():
            if time.monotonic() > end:
                raise ValueError(
                    f"{socket.gethostname()} does not see what rank 0 writes to {folder}. Set general.output_dir to "
                    "a folder on a file system that all nodes share"
                )
            time.sleep(0.1)

    try:
        ranks.all_or_raise(look)
    finally:
        if ranks.is_main:
            seen.unlink(missing_ok=True)  # it could not be made on a full disk
