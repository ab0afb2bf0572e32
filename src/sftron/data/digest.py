"""Digests of what a step trained, for metrics.jsonl: the evidence for law 6.

A pack is a pure function of data, settings and index (law 5). So a step writes only a digest of its packs. To learn its
rows, rebuild the packs, as `sftron audit` does:

    "rows": {"packs": [8, 10], "epochs": [0, 2], "data": "5b2e...", "keys": "91c0...", "tokens": "e07f..."}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sftron.data.types import Pack


class PackDigest(NamedTuple):
    """The digest of one pack; ranks exchange it as a JSON list."""

    index: int
    """The number of the pack in the run."""
    keys: str
    """The digest of its conversations and dropped rows, in order: data set, row, epoch, and the reason for a drop."""
    tokens: str
    """The digest of its ids, labels, loss weights and document bounds."""


def pack_digest(pack: Pack) -> PackDigest:
    trained = [[key.source, key.row, key.epoch] for key in pack.keys]
    dropped = [[drop.key.source, drop.key.row, drop.key.epoch, drop.reason] for drop in pack.dropped_rows]
    arrays = (pack.input_ids, pack.labels, pack.loss_weights, pack.cu_seqlens)
    tokens = _digest(b"".join(array.tobytes() for array in arrays))
    return PackDigest(pack.index, digest_of([trained, dropped]), tokens)


def step_rows(
    packs: Sequence[PackDigest], *, first_epoch: int, num_epochs: int | None, data: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the value of `rows` in metrics.jsonl.

    Args:
        packs: The packs of all ranks since the previous step; the first ones may hold no conversation.
        first_epoch: The epoch at which this data began; above 0 after a change of the data.
        num_epochs: The number of epochs that the dataset deals.
        data: The fingerprint of everything else that packs depend on.
    """
    ordered = sorted(packs)
    return {
        "packs": [ordered[0].index, ordered[-1].index + 1],
        "epochs": [first_epoch, num_epochs],
        "data": digest_of(data),
        **join_digests(ordered),
    }


def join_digests(packs: Sequence[PackDigest]) -> dict[str, str]:
    """Returns the digests of consecutive packs as one: {"keys": ..., "tokens": ...}."""
    return {name: digest_of([getattr(pack, name) for pack in packs]) for name in ("keys", "tokens")}


def digest_of(value: Any) -> str:
    """Returns the digest of a value of JSON, whatever the order of its keys."""
    return _digest(json.dumps(value, sort_keys=True).encode())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
