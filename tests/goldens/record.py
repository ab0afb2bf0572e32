"""Records what sftron makes of fixed inputs, as small JSON files beside this one.

    python -m tests.goldens.record            writes tests/goldens/*.json

A golden changes in a commit of its own, which says why. Hashes are of exact values; losses and trained tensors are
numbers, as another processor rounds otherwise.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from sftron.data.types import Batch, DataError, Pack
from tests.goldens.subjects import SUBJECTS, TRAINED, make_folder, run_data, train

FOLDER = Path(__file__).parent
NUM_PACKS = 100
RESUMED_AFTER = 37


def digest(value: Any) -> str:
    """Of an array its type, shape and bytes; of anything else its JSON."""
    if isinstance(value, np.ndarray):
        content = f"{value.dtype} {value.shape} ".encode() + np.ascontiguousarray(value).tobytes()
    else:
        content = json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]


ARRAYS = ("input_ids", "role_ids", "labels", "loss_weights", "position_ids", "cu_seqlens", "conversation_bounds")


def pack_facts(pack: Pack) -> dict[str, str]:
    facts = {name: digest(getattr(pack, name)) for name in ARRAYS}
    facts["keys"] = digest([[key.source, key.row, key.epoch] for key in pack.keys])
    facts["dropped"] = digest(sorted([*key, count] for key, count in pack.dropped.items()))
    return facts


def batch_facts(batch: Batch) -> str:
    """Of the tensors that the model and the loss take."""
    positions = batch.label_positions
    tensors = (positions, batch.labels, batch.loss_weights, batch.label_roles, batch.label_sources)
    return digest([digest(each.numpy()) for each in tensors] + [batch.max_seqlen, batch.weight_sum])


def packs_of(name: str, folder: Path) -> dict[str, Any]:
    """Up to 100 packs: one hash a field over all, one hash a pack, and the state in the middle."""
    data = run_data(SUBJECTS[name].config(folder))
    facts, batches, state = [], [], None
    for number, batch in enumerate(itertools.islice(data.batches(), NUM_PACKS), 1):
        facts.append(pack_facts(batch.pack))
        batches.append(batch_facts(batch))
        if number == RESUMED_AFTER:
            state = json.loads(json.dumps(data.loader.state_dict()))
    assert state is not None, f"{name}: fewer than {RESUMED_AFTER} packs"
    return {
        "fields": {field: digest([each[field] for each in facts]) for field in facts[0]} | {"batches": digest(batches)},
        "packs": " ".join(digest(each)[:6] for each in facts),
        "state": state,
    }


def families() -> dict[str, str]:
    """Ids and roles of every template of tests/assets over the conversations that tell them apart."""
    from tests.data.family_conversations import CONVERSATIONS
    from tests.data.test_families import FOLLOWED, Family, chat_tokenizer_of, conversation

    found = {}
    for folder in ("tokenizer", "tokenizer_sentencepiece"):
        for name in FOLLOWED:
            encoded = []
            for each in CONVERSATIONS:
                try:
                    tokens = chat_tokenizer_of(Family(name), folder).encode(conversation(each))
                    encoded.append([tokens.input_ids.tolist(), tokens.role_ids.tolist()])
                except DataError:
                    encoded.append("refused")
            found[f"{folder} {name}"] = " ".join(digest(each)[:6] for each in encoded)
    return found


def training_of(name: str, folder: Path) -> dict[str, Any]:
    """Loss and gradient norm of 20 steps on one rank, and of each exported tensor its sum and norm."""
    config = TRAINED[name].config(folder, name.split()[0].strip(","))
    train(config)
    return {"steps": steps(config.run_dir), "tensors": tensors(config.run_dir / "hf")}


def steps(run_folder: Path) -> list[list[float]]:
    lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [[record["loss"], record["grad_norm"], record["trained_tokens"]] for record in map(json.loads, lines)]


def tensors(folder: Path) -> dict[str, list[Any]]:
    found = {}
    for path in sorted(folder.glob("step-*/*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in sorted(file.keys()):
                tensor = file.get_tensor(key)
                values = tensor.double()
                found[key] = [str(tensor.dtype), list(tensor.shape), values.sum().item(), values.norm().item()]
    return found


def goldens(folder: Path) -> Iterator[tuple[str, Any]]:
    yield "packs", {name: packs_of(name, folder) for name in SUBJECTS}
    yield "families", families()
    yield "training", {name: training_of(name, folder) for name in TRAINED}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for name, golden in goldens(make_folder(Path(temporary))):
            path = FOLDER / f"{name}.json"
            path.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            print(f"{path.name}  {path.stat().st_size:,} bytes")
