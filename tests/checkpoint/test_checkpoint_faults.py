"""Whatever happens to a save or to its files, the next start takes the newest valid checkpoint (law 12)."""

import errno
import functools
import itertools
import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftron.checkpoint.atomic import restore_replaced
from sftron.checkpoint.checkpoint import (
    load_checkpoint,
    newest_checkpoint,
    prune,
    read_state,
    shards_to_store,
    state_text,
    verify_checkpoint,
    write_checkpoint,
)
from sftron.checkpoint.shards import Shard
from tests.checkpoint.saving import (
    STATE,
    ThreadRanks,
    at_system_call,
    bits,
    grid,
    killed,
    make,
    names_in,
    on_ranks,
    save,
    save_checkpoint,
)

NUM_RANKS = 3
MADE, LOADED = make(seed=4, steps=2), make(seed=9)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is synced matters where the power fails, not where a process dies."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two checkpoints, and what a killed writer left."""
    root = tmp_path / "checkpoints"
    for step, seed in ((10, 0), (20, 1)):
        save(root, step, seed=seed)
    shutil.copytree(root / "step-10", root / "step-15.tmp-0a1b")
    return root


def loaded(folder: Path) -> list[bytes]:
    model, optimizer = LOADED
    load_checkpoint(folder, model=model, optimizer=optimizer)
    return bits(model, optimizer)


def require_sound(root: Path, expected: dict[str, list[bytes]]) -> None:
    """The newest checkpoint is whole, none is half, and a later save leaves nothing of what was broken off."""
    restore_replaced(root)
    found = newest_checkpoint(root)
    assert found.folder is not None
    assert not found.rejected
    assert loaded(found.folder) == expected[found.folder.name]
    for folder in root.glob("step-*"):
        assert verify_checkpoint(folder) is None or ".tmp-" in folder.name
    save_checkpoint(root, 40, *MADE)
    assert names_in(root) == sorted([found.folder.name, "step-40"])


# Every third system call; the others are nightly.
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("step", [30, 20], ids=["new", "replacing"])
def test_a_kill_at_any_system_call_of_a_save_leaves_the_newest_valid_checkpoint_to_the_next_start(
    root: Path, tmp_path: Path, step: int, every: int
) -> None:
    made = make(seed=2, steps=2)
    before, after = loaded(root / "step-20"), bits(*made)
    taken = []
    for number in itertools.count(step=every):
        own = tmp_path / f"{number}"
        shutil.copytree(root, own)
        was_killed = killed(number, lambda own=own: save_checkpoint(own, step, *made))
        restore_replaced(own)
        folder = newest_checkpoint(own).folder
        assert folder is not None
        taken.append(loaded(folder) == after)
        # Of a checkpoint that is replaced, both are valid.
        require_sound(own, {"step-20": loaded(own / "step-20"), f"step-{step}": loaded(folder)})
        assert loaded(folder) in (before, after)
        if not was_killed:
            break
    assert len(taken) > 30 // every
    # Once the new one is there it stays; and there were kills before and after that.
    assert taken == sorted(taken)
    assert 10 // every < sum(taken) < len(taken) - 10 // every


def test_an_error_of_any_system_call_of_a_save_leaves_the_newest_valid_checkpoint(root: Path, tmp_path: Path) -> None:
    made = make(seed=2, steps=2)
    expected = {"step-20": loaded(root / "step-20"), "step-30": bits(*made)}
    outcomes = set()

    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error")

    for number in itertools.count():
        own = tmp_path / f"{number}"
        shutil.copytree(root, own)
        raised = None
        with at_system_call(number, fail) as calls:
            try:
                save_checkpoint(own, 30, *made)
            except OSError as error:
                raised = error.errno
        assert raised in (None, errno.EIO)
        # Only the last sync, of the folder that the new one is in already, may fail after the rename.
        published = (own / "step-30").is_dir()
        outcomes.add((bool(raised), published))
        if raised and not published:
            assert names_in(own) == names_in(root)
        require_sound(own, expected)
        if len(calls) <= number:
            break
    assert {(True, False), (False, True)} <= outcomes


# --- Several ranks ---


@functools.cache
def made(seed: int) -> Any:
    return make(seed, steps=2)


def split(seed: int, ranks: ThreadRanks) -> dict[str, dict[str, Shard]]:
    """What a rank would have to write of `made(seed)`: its share of the rows."""
    shards = {}
    for kind, named in shards_to_store(*made(seed), is_main=True).items():
        parts = {name: grid(shard.tensor, (ranks.world_size,) if shard.shape else ()) for name, shard in named.items()}
        shards[kind] = {name: each[ranks.rank] for name, each in parts.items() if ranks.rank < len(each)}
    return shards


def save_sharded(root: Path, step: int, seed: int = 0, num_ranks: int = NUM_RANKS) -> list[Any]:
    def work(ranks: ThreadRanks) -> Path:
        text = state_text(step, STATE)
        folder = write_checkpoint(root / f"step-{step}", step, split(seed, ranks), state=text, ranks=ranks)
        if ranks.rank == 0:
            prune(root, step, 2)
        return folder

    return on_ranks(num_ranks, work)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    root = tmp_path / "sharded"
    for step, seed in ((10, 0), (20, 1)):
        made(seed)  # before its ranks are threads, which share one random generator
        assert save_sharded(root, step, seed) == [root / f"step-{step}"] * NUM_RANKS
    return root


def test_the_files_of_several_ranks_are_what_one_would_have_written(sharded: Path, tmp_path: Path) -> None:
    assert len(names_in(sharded / "step-20")) == 2 * NUM_RANKS + 2
    assert loaded(sharded / "step-20") == loaded(save(tmp_path / "alone", 20, seed=1))
    assert json.loads((sharded / "step-20" / "MANIFEST.json").read_text())["num_ranks"] == NUM_RANKS


def disk_with(room: int, write: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
    """A disk with so much room, whose writes are short before it is full."""
    lock = threading.Lock()  # ranks are threads here

    def some(file: int, data: Any) -> int:
        nonlocal room
        with lock:
            if not room:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = write(file, data[: min(room, 700)])
            room -= written
            return written

    return some


@pytest.mark.parametrize("num_ranks", [1, NUM_RANKS])
def test_where_the_disk_is_full_at_any_byte_all_ranks_raise_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    made(0)
    save_sharded(tmp_path, 10, num_ranks=num_ranks)
    write, sizes = os.write, [path.stat().st_size for path in sorted((tmp_path / "step-10").iterdir())]
    edges = {edge + near for edge in itertools.accumulate(sizes) for near in (-1, 0, 1)}
    rooms = {0, *range(1, sum(sizes), 197), *edges}
    for room in sorted(room for room in rooms if room < sum(sizes)):
        monkeypatch.setattr(os, "write", disk_with(room, write))
        ended = save_sharded(tmp_path, 30, num_ranks=num_ranks)
        assert all(isinstance(each, OSError) and "No space left" in str(each) for each in ended), ended
        assert all(f"{tmp_path}/step-30.tmp-" in str(each) for each in ended), ended
        assert names_in(tmp_path) == ["step-10"]
    monkeypatch.setattr(os, "write", disk_with(sum(sizes), write))
    save_sharded(tmp_path, 30, num_ranks=num_ranks)
    assert loaded(tmp_path / "step-30") == loaded(tmp_path / "step-10")


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def zero_a_page(path: Path) -> None:
    content = path.read_bytes()
    start = len(content) // 2
    path.write_bytes(content[:start] + bytes(min(64, len(content) - start)) + content[start + 64 :])


def forget(folder: Path, name: str, **stated: Any) -> None:
    """Removes a file, from the manifest too."""
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    del manifest["files"][name]
    (folder / name).unlink()
    (folder / "MANIFEST.json").write_text(json.dumps(manifest | stated))


def rename(folder: Path, name: str, other: str) -> None:
    """Renames a file, in the manifest too."""
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    manifest["files"][other] = manifest["files"].pop(name)
    (folder / name).rename(folder / other)
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))


def link(path: Path) -> None:
    """To the same bytes, outside of the folder."""
    path.rename(path.parent.parent / "moved")
    path.symlink_to("../moved")


SECOND, LAST = "optimizer-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"
MANIFEST_ERROR = "MANIFEST.json cannot be read ("
DAMAGES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "truncated": (f"{SECOND} has ", lambda f: os.truncate(f / SECOND, (f / SECOND).stat().st_size - 1)),
    "a zeroed page": (f"{SECOND} does not have the manifest's sha256", lambda f: zero_a_page(f / SECOND)),
    "a file missing": (f"{SECOND} is missing", lambda f: (f / SECOND).unlink()),
    "a folder for a file": (f"{SECOND} is missing", lambda f: ((f / SECOND).unlink(), (f / SECOND).mkdir())),
    "missing here and in the manifest": ("MANIFEST.json does not list the 7 files", lambda f: forget(f, SECOND)),
    "one rank fewer stated": ("MANIFEST.json does not list the 5 files", lambda f: forget(f, LAST, num_ranks=2)),
    "no rank": ("MANIFEST.json does not list", lambda f: forget(f, SECOND, num_ranks=0)),
    "ranks beyond number": ("MANIFEST.json does not list", lambda f: forget(f, SECOND, num_ranks=10**18)),
    "another name": ("MANIFEST.json does not list the 7 files", lambda f: rename(f, SECOND, "optimizer.safetensors")),
    "without the state": ("MANIFEST.json does not list", lambda f: forget(f, "state.json")),
    "a file too many": (
        "x.safetensors is not in MANIFEST.json",
        lambda f: shutil.copyfile(f / LAST, f / "x.safetensors"),
    ),
    "another's files": (
        "MANIFEST.json belongs to step 10",
        lambda f: (shutil.rmtree(f), shutil.copytree(f.with_name("step-10"), f)),
    ),
    "a link for a file": (f"{SECOND} is a link to ../moved; a checkpoint must hold", lambda f: link(f / SECOND)),
    "a link for the manifest": (f"{MANIFEST_ERROR}it is a link", lambda f: link(f / "MANIFEST.json")),
    "a pipe for the manifest": (
        f"{MANIFEST_ERROR}is not a regular file",
        lambda f: ((f / "MANIFEST.json").unlink(), os.mkfifo(f / "MANIFEST.json")),
    ),
    "no manifest": (MANIFEST_ERROR, lambda f: (f / "MANIFEST.json").unlink()),
    "an empty manifest": (f"{MANIFEST_ERROR}E", lambda f: (f / "MANIFEST.json").write_text("")),
    "a manifest that is a list": (f"{MANIFEST_ERROR}l", lambda f: (f / "MANIFEST.json").write_text("[]")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_the_files_of_several_ranks_is_named_and_the_checkpoint_before_is_taken(
    sharded: Path, damage: str
) -> None:
    problem, do = DAMAGES[damage]
    folder = sharded / "step-20"
    do(folder)

    alone = newest_checkpoint(sharded)
    assert alone.folder == sharded / "step-10"
    assert alone.rejected[0].startswith(f"{folder}: {problem}")
    for num_ranks in (2, 4):  # whoever looks at which file
        assert on_ranks(num_ranks, lambda ranks: newest_checkpoint(sharded, ranks)) == [alone] * num_ranks


def test_any_flipped_bit_is_found_or_changes_nothing(sharded: Path) -> None:
    folder, chance = sharded / "step-20", random.Random(5)
    state, weights = read_state(folder), loaded(folder)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for bit in chance.sample(range(8 * len(content)), 60):
            flip(path, bit)
            problem = verify_checkpoint(folder)
            # Of the manifest alone some bits mean nothing: white space, and the name of what need not be stated.
            assert problem is not None or path.name == "MANIFEST.json", (path.name, bit)
            if problem is None:
                assert (read_state(folder), loaded(folder)) == (state, weights)
            path.write_bytes(content)
    assert verify_checkpoint(folder) is None


def test_files_that_cannot_be_read_are_a_problem_of_the_checkpoint_and_not_of_the_run(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Path.open

    def broken(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.name == SECOND and self.parent.name == "step-20":
            raise OSError(errno.EIO, "Input/output error")
        return original(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", broken)
    found = newest_checkpoint(sharded)
    assert found.folder == sharded / "step-10"
    assert f"{SECOND} cannot be read ([Errno 5] Input/output error)" in found.rejected[0]
