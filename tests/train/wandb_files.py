"""What an offline wandb run has left on the disk, read record by record: the files are LevelDB logs of protobufs."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FILE_HEADER_BYTES, _BLOCK_BYTES = 7, 32_768
_HEADER = struct.Struct("<IHB")  # checksum, length, kind
_FULL, _LAST = 1, 4


@dataclass
class OfflineRun:
    """What `wandb sync` would send. steps: the x axis of each point; numbers: of each point, by name."""

    run: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)
    exit_code: int | None = None
    is_preempting: bool = False
    text: str = ""

    @property
    def steps(self) -> list[int]:
        return [point["step"] for point in self.points if "loss" in point]


def offline_files(run_directory: Path) -> list[Path]:
    """Of each time that the run was started, in order."""
    return sorted(run_directory.glob("wandb/*run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def read_offline(path: Path) -> OfflineRun:
    found = OfflineRun()
    for record in _records(path):
        kind = record.WhichOneof("record_type")
        found.kinds.append(kind)
        found.text += str(record)
        if kind == "run":
            found.run = record.run
            found.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            found.points.append(_nested(record.history.item))
        elif kind == "summary":
            found.summary |= _nested(record.summary.update)
        elif kind == "metric":
            found.metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
        elif kind == "preempting":
            found.is_preempting = True
    return found


def _nested(items: Any) -> dict[str, Any]:
    """The first part of each key; tables' own fields are not told apart."""
    return {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}


def _records(path: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = path.read_bytes(), _FILE_HEADER_BYTES, b""
    while position + _HEADER.size <= len(data):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _HEADER.size:
            position += left
            continue
        _, length, kind = _HEADER.unpack_from(data, position)
        position += _HEADER.size
        parts += data[position : position + length]
        position += length
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record
