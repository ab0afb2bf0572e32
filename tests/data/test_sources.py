"""A path gives the rows that it names, wherever they are, or a message reports what is there instead."""

import os
import pickle
import time
from multiprocessing import get_context

import datasets
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sftron.data.sources import arrow, jsonl, open_source, open_stream
from sftron.data.sources.views import parse_split
from sftron.data.types import DataError
from tests.data.files import ROWS, all_rows, lines_of, numbered, refusal_of, write, write_rows

# --- Which files ---


def test_patterns_and_folders_give_their_files_in_sorted_order(tmp_path):
    for name in ("b", "a", "c"):
        write(tmp_path / "set" / f"{name}.jsonl", f'\n{{"name": "{name}"}}\n{{"name": "{name}2"}}\n')
    write(tmp_path / "set" / "notes.txt", "not data")
    expected = [{"name": name} for name in ("a", "a2", "b", "b2", "c", "c2")]
    for path in (tmp_path / "set", tmp_path / "set" / "*.jsonl", tmp_path / "**" / "?.jsonl"):
        source = open_source(str(path))
        assert all_rows(source) == expected
        assert source.locate(3) == f"{tmp_path}/set/b.jsonl:3"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "set/*.parquet",
            "set/*.parquet: no file matches this pattern in {tmp}; set/ has chats.gz, chats.jsonl, ",
        ),
        (
            "set/chat.jsonl",
            "set/chat.jsonl: no such file or folder in {tmp}, nor a Hub id (owner/name); set/ has",
        ),
        ("set/notes.txt", "set/notes.txt: a file with the ending .txt; wanted .jsonl"),
        ("set/chats.gz", "set/chats.gz: a file with the ending .gz; wanted .jsonl"),
        ("plain", "plain: no such file or folder in {tmp}, nor a Hub id (owner/name); ./ has"),
        ("empty", "empty: no file of rows in this folder (wanted .jsonl"),
        ("mixed", "mixed: files of several kinds (.json, .jsonl) in this folder; name one kind, mixed/*.json"),
        ("blank.jsonl", "blank.jsonl: has no rows"),
        (
            "owner/name",
            'owner/name: is not a local file or folder in {tmp}, and split "train" cannot be loaded from',
        ),
    ],
)
def test_a_path_without_rows_is_reported_with_what_is_there(tmp_path, monkeypatch, path, message):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    files = {"set/chats.jsonl": lines_of(ROWS), "set/notes.txt": "x", "set/chats.gz": "x", "blank.jsonl": "\n\n"}
    for name, content in {**files, "mixed/a.jsonl": lines_of(ROWS), "mixed/a.json": "[]"}.items():
        write(tmp_path / name, content)
    (tmp_path / "empty").mkdir()
    assert str(refusal_of(tmp_path, path)).startswith(message.replace("{tmp}", str(tmp_path)))


@pytest.mark.parametrize("path", ["dead.jsonl", "set", "set/*.jsonl", "set/b.jsonl", "dead"])
def test_a_dead_link_is_named_and_its_rows_are_not_missing_in_silence(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "set" / "a.jsonl", lines_of(ROWS))
    for name in ("dead.jsonl", "set/b.jsonl", "dead"):
        (tmp_path / name).symlink_to("/nowhere/b.jsonl")
    assert "is a symbolic link to /nowhere/b.jsonl, which does not exist" in str(refusal_of(tmp_path, path))
    (tmp_path / "set" / "b.jsonl").unlink()
    (tmp_path / "set" / "b.jsonl").symlink_to("a.jsonl")
    assert len(open_source("set")) == 2 * len(ROWS)


SPLIT_FOLDERS = {
    "as the datasets library names shards": (
        ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test-00000-of-00001.jsonl"],
        {"train": [0, 1], "test": [2]},
    ),
    "as it named them before": (
        ["train-00000-of-00002-1f3a.jsonl", "train-00001-of-00002-9c0e.jsonl", "test-00000-of-00001-77aa.jsonl"],
        {"train": [0, 1], "test": [2]},
    ),
    "splits of other names": (
        ["test_sft-00000-of-00001.jsonl", "train_sft-00000-of-00001.jsonl"],
        {"test_sft": [0], "train_sft": [1]},
    ),
    "as in its cache": (["gsm8k-test.jsonl", "gsm8k-train.jsonl"], {"test": [0], "train": [1]}),
    "as people name files": (["Dev.jsonl", "train.jsonl", "train_2.jsonl"], {"validation": [0], "train": [1, 2]}),
    "shards of no split": (["part-00000-of-00002.jsonl", "part-00001-of-00002.jsonl"], {"train": [0, 1]}),
    "no split": (["code.jsonl", "math.jsonl"], {"train": [0, 1]}),
}


@pytest.mark.parametrize(("names", "splits"), SPLIT_FOLDERS.values(), ids=SPLIT_FOLDERS.keys())
def test_a_folder_whose_files_name_splits_gives_the_files_of_one(tmp_path, names, splits):
    """Else the test rows of gsm8k/ would be trained on."""
    for number, name in enumerate(names):
        write(tmp_path / "set" / name, lines_of([{"n": number}]))
    for split, numbers in splits.items():
        assert [row["n"] for row in all_rows(open_source(str(tmp_path / "set"), split))] == numbers
    refusal = str(refusal_of(tmp_path, str(tmp_path / "set"), "dev"))
    assert f'set: has no split "dev", only {", ".join(sorted(splits))}: ' in refusal


def test_a_folder_that_is_not_whole_or_names_splits_for_some_files_only_is_refused(tmp_path):
    """Hidden files are no rows."""
    for name in ("some/test.jsonl", "some/math.jsonl", "shards/train-00000-of-00003.jsonl"):
        write(tmp_path / name, lines_of(ROWS))
    for name in ("shards/train-00002-of-00003.jsonl", "shards/.hidden.jsonl"):
        write(tmp_path / name, lines_of(ROWS))
    expected = "some: test.jsonl names a split, but math.jsonl does not; name the files you want by a pattern"
    assert str(refusal_of(tmp_path, str(tmp_path / "some"))).startswith(expected)
    assert len(open_source(str(tmp_path / "some" / "*.jsonl"))) == 2 * len(ROWS)
    refusal = str(refusal_of(tmp_path, str(tmp_path / "shards")))
    assert "1 of the 3 files train-... are missing, first number 1; download them again" in refusal


# --- The Hub ---

README = "---\nlicense: mit\nconfigs:\n{configs}---\n# A data set\n"
ONE = "- config_name: {name}\n  data_files:\n  - split: {split}\n    path: {path}\n"
DOWNLOADED = {
    "shards under data/": ("", ["data/train-00000-of-00002", "data/train-00001-of-00002", "data/test-00000-of-00001"]),
    "a README that names some of the files": (
        ONE.format(name="default", split="train", path="'[ab].parquet'") + "  - split: test\n    path: more/*\n",
        ["a", "b", "more/c", "old"],
    ),
}


@pytest.mark.parametrize(("configs", "names"), DOWNLOADED.values(), ids=DOWNLOADED.keys())
def test_a_downloaded_data_set_of_the_hub_is_read_by_its_root(tmp_path, configs, names):
    folder = tmp_path / "set"
    for number, name in enumerate(names):
        write_rows(folder / f"{name}.parquet", [{"n": number}])
    write(folder / "README.md", README.format(configs=configs) if configs else "# A data set\n")
    (tmp_path / "link").symlink_to(folder)
    for split, numbers in (("train", [0, 1]), ("test", [2])):
        for rows in (open_source(str(tmp_path / "link"), split), open_stream(str(folder), split).head(100)):
            assert [row["n"] for row in all_rows(rows)] == numbers
    assert 'set: has no split "validation", only train, test: ' in str(refusal_of(tmp_path, str(folder), "validation"))


UNCLEAR = "set: the datasets library cannot determine which files to read: "


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        (
            ONE.format(name="main", split="train", path="main/*") + ONE.format(name="more", split="train", path="b/*"),
            UNCLEAR + "Config name is missing. Please pick one among the available configs: ['main', 'more']; ",
        ),
        (ONE.format(name="default", split="train", path="gone/*"), UNCLEAR),
        (ONE.format(name="default", split="train", path="../outside/*"), "set: names "),
        ("- [\n", UNCLEAR),
    ],
)
def test_a_readme_that_does_not_say_which_files_are_meant_is_refused(tmp_path, monkeypatch, configs, message):
    monkeypatch.chdir(tmp_path)
    for name in ("set/main", "set/b", "set", "outside"):
        (tmp_path / name).mkdir(exist_ok=True, parents=True)
        write_rows(tmp_path / name / "rows.parquet", [{"n": 1}])
    write(tmp_path / "set" / "README.md", README.format(configs=configs))
    assert str(refusal_of(tmp_path, "set")).startswith(message)
    assert len(open_source("set/main")) == 1


@pytest.mark.parametrize("header", ["\n", " ", "\r\n", "configs\n", "--\n", "a: b\n"])
def test_a_readme_of_a_header_that_does_not_end_takes_no_time(tmp_path, header):
    write_rows(tmp_path / "rows.parquet", [{"n": 1}])
    write(tmp_path / "README.md", "---\n" + header * 400_000)
    before = time.process_time()
    assert len(open_source(str(tmp_path))) == 1
    assert time.process_time() - before < 10, "twenty minutes, where the time is of the square of the lines"


@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml", "data/train.jsonl", "dataset_dict.json"])
@pytest.mark.parametrize("has_rows", [True, False])
def test_a_pipe_in_a_folder_of_data_holds_no_command(tmp_path, name, has_rows):
    if has_rows:
        write_rows(tmp_path / "rows.parquet", [{"n": 1}])
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    if has_rows:
        assert len(open_source(str(tmp_path))) == 1
    else:
        message = f"{name}: is a pipe or a device, in a folder of files; remove it"
        assert message in str(refusal_of(tmp_path, str(tmp_path)))


@pytest.mark.parametrize("name", ["dataset_info.json", "train/dataset_info.json", "train/state.json"])
def test_a_pipe_in_a_saved_data_set_holds_no_command(tmp_path, name):
    write(tmp_path / ("dataset_dict.json" if "/" in name else "state.json"), '{"splits": ["train"]}')
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    assert f"{name}: is a pipe or a device" in str(refusal_of(tmp_path, str(tmp_path)))


# --- Parts of splits ---


@st.composite
def parts(draw: st.DrawFn) -> str:
    unit, most = draw(st.sampled_from([("%", 100), ("", 250)]))
    border = st.integers(-most, most).map(lambda number: f"{number}{unit}") | st.just("")
    return f"train[{draw(border)}:{draw(border)}]"


@given(part=parts(), num_rows=st.integers(1, 230))
@example(part="train[:50%]", num_rows=5)  # 2.5 rows, halves to the even one
@example(part="train[-10%:]", num_rows=199)
def test_a_part_takes_the_rows_that_the_datasets_library_takes(part: str, num_rows: int) -> None:
    (expected,) = datasets.ReadInstruction.from_spec(part).to_absolute({"train": num_rows})
    assert list(parse_split(part).rows(num_rows)) == list(range(num_rows))[expected.from_ : expected.to]


@pytest.mark.parametrize("text", ["train[:5", "train[5]", "train[:0.5%]", "train[::2]", "train [:5]", ""])
def test_what_the_syntax_does_not_have_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(DataError, match=r"is not valid; write train, train\[:100\]"):
        parse_split(text)
    with pytest.raises(DataError, match="is not valid; make each part a data set of its own"):
        parse_split(f"train+{text}")


def test_a_part_has_the_rows_lines_and_fingerprint_of_its_own(tmp_path) -> None:
    path = write_rows(tmp_path / "a.jsonl", numbered(200))
    whole, part = open_source(path), open_source(path, "train[10%:15%]", max_samples=4)
    assert all_rows(part) == numbered(200)[20:24]
    assert (part.locate(0), part.name) == (f"{path}:21", f"{path} (train[10%:15%])")
    others = [("train", None), ("train[10%:15%]", 5), ("train[10%:15%]", None), ("train[21:25]", None)]
    prints = [open_source(path, split, max_samples=number).fingerprint for split, number in others]
    assert len({*prints, part.fingerprint}) == 5
    assert open_source(path, "train[20:]", max_samples=4).fingerprint == part.fingerprint
    assert open_source(path, "train[:100%]", max_samples=200).fingerprint != part.fingerprint
    assert open_source(path, max_samples=1000).fingerprint == whole.fingerprint
    for outside in (-1, 4):
        with pytest.raises(IndexError, match="has 4 rows, no row"):
            part[outside]
    assert 'a.jsonl: split "train[:0%]" selects none of its 200 rows' in str(refusal_of(tmp_path, path, "train[:0%]"))


# --- Fingerprints and processes ---


def test_a_fingerprint_follows_the_content_and_not_the_name(tmp_path):
    one = open_source(write(tmp_path / "a.jsonl", lines_of(ROWS))).fingerprint
    assert open_source(write(tmp_path / "b.jsonl", lines_of(ROWS))).fingerprint == one
    assert open_source(write(tmp_path / "b.jsonl", lines_of(ROWS[:2]))).fingerprint != one
    assert open_source(write(tmp_path / "b.jsonl", lines_of(ROWS).replace("0", "9"))).fingerprint != one
    assert {open_source(write_rows(tmp_path / f"a.jsonl.{e}", ROWS)).fingerprint for e in ("gz", "zst")} == {one}


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "saved"])
def test_a_file_that_was_changed_is_read_again_though_its_time_was_put_back(tmp_path, name):
    """No copy is kept: the datasets library's cache would give the rows of before, since it looks at the time alone."""

    def write_and_read(text: str) -> tuple[list, str]:
        path = tmp_path / name
        rows = [{"text": text}]
        if name == "saved":
            datasets.Dataset.from_list(rows).save_to_disk(path)
        elif name == "a.csv":
            write(path, f"text\n{text}\n")
        else:
            write_rows(path, rows)
        for file in [path, *path.glob("*")]:
            os.utime(file, (1, 1))
        source = open_source(str(path))
        return all_rows(source), source.fingerprint

    before, after = write_and_read("one"), write_and_read("two")
    assert (before[0], after[0]) == ([{"text": "one"}], [{"text": "two"}])
    assert before[1] != after[1]


def test_a_large_files_fingerprint_follows_its_size_first_and_last_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "_HASHED_WHOLE_BYTES", 100)
    monkeypatch.setattr(jsonl, "_HASHED_BLOCK_BYTES", 4)
    lines = lines_of(numbered(50))
    prints = {
        open_source(write(tmp_path / "large.jsonl", content)).fingerprint
        for content in (lines, " " + lines[1:], lines[:-1] + " ", lines + "\n")
    }
    assert len(prints) == 4


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.arrow", "*.jsonl"])
def test_a_source_works_after_pickling_and_in_a_forked_process(tmp_path, monkeypatch, name):
    for file in ("b.jsonl", name.replace("*", "a")):
        write_rows(tmp_path / file, ROWS, **({"row_group_size": 1} if ".parquet" in name else {}))
    monkeypatch.setattr(arrow, "_BATCH_ROWS", 1)
    source = open_source(str(tmp_path / name))
    expected = all_rows(source)  # the file is open by now
    assert all_rows(pickle.loads(pickle.dumps(source))) == expected
    with get_context("fork").Pool(2) as pool:
        assert pool.map(all_rows, [source, source]) == [expected, expected]
    assert all_rows(source) == expected


def test_a_data_error_keeps_its_reason_across_processes():
    error = pickle.loads(pickle.dumps(DataError("a.jsonl:3: broken", reason="broken_json")))
    assert (str(error), error.reason) == ("a.jsonl:3: broken", "broken_json")
