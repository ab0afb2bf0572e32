"""A run from its configuration: its data and its model, checked, and the same on all ranks; no weights yet."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from sftron.config import Config, dump_config
from sftron.data.sources import find_files
from sftron.train.build_data import build_data, open_rows, plan_packs
from sftron.train.build_model import base_digest, build_model
from sftron.train.preflight import preflight
from sftron.train.ranks import Ranks
from sftron.train.revisions import model_folder, tokenizer_folder
from sftron.train.run import Setup


def build_run(config: Config, ranks: Ranks) -> Setup:
    """Opens and checks everything in a run except its weights. Every rank calls this.

    Raises:
        ValueError: On all ranks, with a message for the user; DataError is a subclass.
    """
    ranks.all_or_raise(lambda: download(config, ranks))
    setup = ranks.all_or_raise(lambda: open_run(config, ranks))
    if setup.model.adapters is not None:
        digest = base_digest(setup.model.folder, ranks)
        setup = replace(setup, model=replace(setup.model, base_digest=digest))
    require_alike(setup)
    plan_packs(setup)
    return setup


def open_run(config: Config, ranks: Ranks) -> Setup:
    """Does the work of `build_run` on one rank, after `download`."""
    data = build_data(config, ranks)
    model = build_model(config, ranks, data)
    preflight(config, data, model)
    return Setup(config, ranks, data, model)


def download(config: Config, ranks: Ranks) -> None:
    """Downloads missing models, tokenizers and data sets on the first rank of each node. Raises ValueError."""
    if ranks.local_rank != 0:
        return
    model_folder(config)
    tokenizer_folder(config)
    in_files = [options for options in config.data.datasets if not options.streaming]
    for each in (*in_files, *config.evaluation.datasets):
        if find_files(each.path, each.split, each.config) is None:
            open_rows(config, each)


def require_alike(setup: Setup) -> None:
    """Requires that all ranks have the configuration, data and weights of the main one. Every rank calls this.

    A node with an older copy of a file would otherwise train on different packs or weights without an error.
    """
    weights = [f"{path.name} {path.stat().st_size}" for path in sorted(setup.model.folder.glob("*.safetensors"))]
    facts = {
        "the configuration": hashlib.sha256(dump_config(setup.config).encode()).hexdigest()[:12],
        "the model's files": ", ".join(weights),
        **{f"evaluation set {each.name}": each.fingerprint for each in setup.data.evaluation_sets},
        **setup.fingerprint,
    }
    first, *others = setup.ranks.gather(facts)
    for rank, other in enumerate(others, start=1):
        differing = [name for name in first if first[name] != other.get(name)]
        if differing:
            raise ValueError(
                f"rank {rank} has another configuration, data or model than rank 0; give every node the same files "
                "and arguments:\n  "
                + "\n  ".join(f"{name}: {first[name]}, there {other.get(name)}" for name in differing)
            )
