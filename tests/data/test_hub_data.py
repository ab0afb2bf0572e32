"""A data set of the Hub: its configurations and its revisions, streamed and downloaded, from a Hub on the loopback."""

import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sftron.data.sources import open_source, open_stream
from sftron.data.types import DataError
from tests.conftest import rest_nightly
from tests.data.files import all_rows
from tests.local_hub import (
    GSM8K_CONFIGS,
    SMOLTALK_CONFIGS,
    LocalHub,
    Repository,
    data_set,
    gsm8k,
    local_hub,
    point_at,
    smoltalk,
)

GSM8K, SMOLTALK = "openai/gsm8k", "HuggingFaceTB/smoltalk"
CASES = [
    *((GSM8K, config, split) for config in GSM8K_CONFIGS for split in ("train", "test")),
    *((SMOLTALK, config, split) for config in SMOLTALK_CONFIGS for split in ("train", "test")),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHub]:
    with local_hub(tmp_path_factory.mktemp("hub")) as hub:
        hub.repository(f"datasets/{GSM8K}").push(gsm8k("1"), "v1")
        hub.repository(f"datasets/{GSM8K}").push(gsm8k("2"), "refs/convert/parquet")
        hub.repository(f"datasets/{SMOLTALK}").push(smoltalk())
        yield hub


def rows_of(repository: Repository, config: str, split: str, revision: str = "main") -> list[dict[str, Any]]:
    """The rows of the one file of a split, as pyarrow reads it."""
    files = repository.commits[repository.refs[revision]]
    (data,) = [data for path, data in files.items() if f"{config}/{split}-" in path]
    return pq.read_table(io.BytesIO(data)).to_pylist()


def streamed(path: str, split: str = "train", **options: Any) -> list[Any]:
    source = open_stream(path, split, **options)
    return all_rows(source.head(1000))


def downloaded(path: str, split: str = "train", **options: Any) -> list[Any]:
    source = open_source(path, split, **options)
    assert all_rows(pickle.loads(pickle.dumps(source))) == all_rows(source)
    return all_rows(source)


READERS = pytest.mark.parametrize("read", [downloaded, streamed])


# One of each shape: several splits, files in a folder of the configuration and in one below data/.
FAST = [(GSM8K, "main", "train"), (GSM8K, "socratic", "test"), (SMOLTALK, "longalign", "train")]


@READERS
@pytest.mark.parametrize("case", rest_nightly(CASES, FAST), ids=str)
def test_every_configuration_and_split_has_its_rows(shared: LocalHub, case: tuple[str, str, str], read) -> None:
    path, config, split = case
    rows = rows_of(shared.repository(f"datasets/{path}"), config, split)
    assert len(rows) > 4
    assert read(path, split, config=config) == rows
    assert read(path, f"{split}[2:4]", config=config) == rows[2:4]


@READERS
@pytest.mark.parametrize("config", [None, "sokratic"])
@pytest.mark.parametrize(("path", "names"), [(GSM8K, GSM8K_CONFIGS), (SMOLTALK, SMOLTALK_CONFIGS)])
def test_a_configuration_that_is_missing_or_unknown_is_refused_with_all_that_there_are(
    shared: LocalHub, path: str, names: tuple[str, ...], config: str | None, read: Callable[..., Any]
) -> None:
    with pytest.raises(DataError, match=f"^{path}: .*`config` names a configuration") as caught:
        read(path, config=config)
    assert all(f"'{name}'" in str(caught.value) for name in names)


@READERS
def test_a_default_or_only_configuration_needs_no_name(tmp_path: Path, read: Callable[..., Any]) -> None:
    rows = {name: {"train": [{"question": name, "answer": str(n)} for n in range(3)]} for name in ("a", "b")}
    with local_hub(tmp_path) as hub:
        hub.repository("datasets/owner/two").push(data_set(rows, default="b"))
        hub.repository("datasets/owner/one").push(data_set({"a": rows["a"]}))
        assert read("owner/two") == rows["b"]["train"]
        assert read("owner/one") == read("owner/one", config="a") == rows["a"]["train"]


@READERS
def test_a_revision_is_a_branch_a_tag_or_a_commit_and_has_its_own_rows(shared: LocalHub, read) -> None:
    repository = shared.repository(f"datasets/{GSM8K}")
    old, new = rows_of(repository, "main", "train", "v1"), rows_of(repository, "main", "train")
    assert old != new
    for revision in ("v1", repository.refs["v1"]):
        assert read(GSM8K, config="main", revision=revision) == old
    for revision in (None, "main", "refs/convert/parquet", repository.refs["main"]):
        assert read(GSM8K, config="main", revision=revision) == new
    with pytest.raises(DataError, match=r"openai/gsm8k: .* of revision v9 cannot be loaded .* Revision Not Found"):
        read(GSM8K, config="main", revision="v9")


@pytest.mark.parametrize("open_rows", [open_source, open_stream])
def test_the_fingerprint_follows_the_commit_where_no_row_that_is_looked_at_differs(tmp_path: Path, open_rows) -> None:
    def rows(last: str) -> list[dict[str, str]]:
        return [{"question": f"What is {n}?", "answer": last if n == 600 else f"It is {n}."} for n in range(1000)]

    with local_hub(tmp_path) as hub:
        repository = hub.repository("datasets/owner/set")
        commits = [repository.push(data_set({"default": {"train": rows(last)}})) for last in ("A", "B")]
        prints = {commit: open_rows("owner/set", revision=commit).fingerprint for commit in commits}
        assert len(set(prints.values())) == 2
        assert open_rows("owner/set").fingerprint == prints[commits[1]]
        assert open_rows("owner/set", "train[:900]").fingerprint != prints[commits[1]]


# A connection that is refused is tried again for 20 s.
@pytest.mark.parametrize("offline", rest_nightly([True, False], [True]))
def test_without_the_hub_a_cache_gives_its_own_commit_and_no_other(tmp_path: Path, offline: bool) -> None:
    with local_hub(tmp_path) as hub:
        repository = hub.repository(f"datasets/{GSM8K}")
        absent, cached = repository.push(gsm8k("1")), repository.push(gsm8k("2"))
        rows = downloaded(GSM8K, config="main")
        point_at("http://127.0.0.1:1", tmp_path, offline=offline)
        for revision in (None, "main", cached) if offline else (None,):
            assert downloaded(GSM8K, config="main", revision=revision) == rows
        with pytest.raises(DataError, match=f"commit {absent} cannot be loaded .*, but the cache has {cached}"):
            downloaded(GSM8K, config="main", revision=absent)
        with pytest.raises(DataError, match=r"openai/gsm8k: .* cannot be loaded from the Hub"):
            downloaded(GSM8K, config="main", revision="v1")


UNCLEAR = "the datasets library cannot determine which files to read:"


def test_a_downloaded_data_set_has_configurations_and_no_revision(tmp_path: Path) -> None:
    for path, data in gsm8k("1").items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(data)
    for read in (downloaded, streamed):
        assert read(str(tmp_path), config="socratic")[0]["question"] == "What is 0 in socratic?"
        for path, options, problem in (
            (tmp_path, {}, f"{UNCLEAR} Config name is missing."),
            (tmp_path, {"config": "more"}, f"{UNCLEAR} BuilderConfig 'more' not found."),
            (tmp_path, {"config": "main", "revision": "v1"}, 'is local, so it has no revision "v1"; remove'),
            (tmp_path / "main", {"config": "main"}, 'README.md declares no configs, so it has no "main"; remove'),
            (tmp_path / "main/train-*", {"config": "main"}, 'is not a data set of the Hub, so it has no config "main"'),
        ):
            with pytest.raises(DataError) as caught:
                read(str(path), **options)
            assert str(caught.value).startswith(f"{path}: {problem}")
