"""What sftron makes of fixed inputs stays what it was; see record.py."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import rest_nightly
from tests.goldens import record
from tests.goldens.record import NUM_PACKS, RESUMED_AFTER
from tests.goldens.subjects import SUBJECTS, TRAINED, make_folder, run_data
from tests.train.ranks import launch, train

ROUNDING = 2e-5
"""Of losses and of trained tensors, relative: processors and numbers of ranks add in other orders."""


def recorded(name: str) -> dict[str, Any]:
    return json.loads((record.FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("goldens"))


@pytest.mark.parametrize("name", SUBJECTS)
def test_packs_and_lane_states_are_as_recorded(name: str, folder: Path) -> None:
    assert record.packs_of(name, folder) == recorded("packs")[name]


# Each source and packing of rows; the recorded packs of all subjects are compared above.
FAST = ["dropped", "mixture", "streamed", "twelve lanes, wide packs", "minibatch"]


@pytest.mark.parametrize("name", rest_nightly(SUBJECTS, FAST))
def test_a_recorded_state_goes_on_with_the_recorded_packs_on_two_ranks(name: str, folder: Path) -> None:
    golden = recorded("packs")[name]
    wanted = golden["packs"].split()[RESUMED_AFTER:]
    num_ranks = 1 if SUBJECTS[name].settings.get("data.num_lanes") == 1 else 2
    found: dict[int, str] = {}
    for rank in range(num_ranks):
        data = run_data(SUBJECTS[name].config(folder), dp_rank=rank, dp_world_size=num_ranks)
        data.loader.load_state_dict(golden["state"])
        for batch in itertools.islice(data.batches(), (NUM_PACKS - RESUMED_AFTER) // num_ranks):
            found[batch.pack.index] = record.digest(record.pack_facts(batch.pack))[:6]
    assert [found[index] for index in sorted(found)][: len(wanted)] == wanted[: len(found)]
    assert len(found) >= min(len(wanted), NUM_PACKS - RESUMED_AFTER - 1)


def test_ids_and_roles_of_every_template_are_as_recorded() -> None:
    assert record.families() == recorded("families")


def require_close(found: dict[str, Any], golden: dict[str, Any]) -> None:
    for number, (one, other) in enumerate(zip(found["steps"], golden["steps"], strict=True), 1):
        assert one == pytest.approx(other, rel=ROUNDING), f"step {number}"
    assert found["tensors"].keys() == golden["tensors"].keys()
    for key, (*kind, total, norm) in golden["tensors"].items():
        assert found["tensors"][key][:2] == kind
        # A sum's terms cancel: its rounding is that of the norm.
        assert found["tensors"][key][2:] == pytest.approx([total, norm], abs=ROUNDING * max(1.0, norm) * 10), key


@pytest.mark.parametrize("name", rest_nightly(TRAINED, ["packed", "weights"]))
def test_twenty_steps_and_the_exported_tensors_are_as_recorded(name: str, folder: Path) -> None:
    require_close(record.training_of(name, folder), recorded("training")[name])


def test_two_ranks_make_the_recorded_steps(folder: Path, tmp_path: Path) -> None:
    settings = {"tokens.batch_accumulation_per_replica": 1}
    config = TRAINED["packed"].config(folder, "two_ranks", **settings)
    ended = launch(2, train, folder / "two_ranks.yaml", folder=tmp_path)
    assert [each.exit_code for each in ended] == [0, 0], ended[0].err + ended[1].err
    found = {"steps": record.steps(config.run_dir), "tensors": record.tensors(config.run_dir / "hf")}
    require_close(found, recorded("training")["packed"])
