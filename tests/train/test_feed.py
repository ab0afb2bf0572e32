"""The configuration's data sets become the rows it says, and what is held out of them is trained on by no one."""

from pathlib import Path

import pytest

from sftron.checkpoint.hf_weights import read_config
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.prepare import Preparation
from sftron.data.sources import RowSource
from sftron.data.types import DataError, Dropped
from sftron.train import run_data
from sftron.train.description import describe_data
from sftron.train.sample import check_sample
from tests.data.files import all_rows
from tests.train.runs import make_config, write_rows


def prepare(
    tmp_path: Path,
    model_folder: Path,
    chat_tokenizer: ChatTokenizer,
    *,
    share: float = 0.0,
    seed: int = 7,
    num_others: int = 0,
    **options: object,
) -> Preparation:
    """Of rows.jsonl, read with these options, behind some other data sets. share: evaluation.share."""
    others = [{"path": str(write_rows(tmp_path / f"other{number}.jsonl", 10))} for number in range(num_others)]
    datasets = [*others, {"path": str(write_rows(tmp_path / "rows.jsonl", 100)), **options}]
    config = make_config(tmp_path, model_folder, data__datasets=datasets, evaluation__share=share, general__seed=seed)
    return run_data.open_data(config, chat_tokenizer)


def questions(source: RowSource | None) -> set[str]:
    assert source is not None
    return {row["messages"][0]["content"] for row in all_rows(source)}


def test_a_part_is_taken_then_its_first_rows_and_of_these_some_are_held_out(tmp_path, model_folder, chat_tokenizer):
    options = {"split": "train[50:90]", "max_samples": 30, "share": 0.1}
    (dataset,) = prepare(tmp_path, model_folder, chat_tokenizer, **options).datasets
    assert (len(dataset.source), len(dataset.held_out)) == (27, 3)
    assert questions(dataset.source).isdisjoint(questions(dataset.held_out))
    assert questions(dataset.source) | questions(dataset.held_out) == {f"What is {n}?" for n in range(50, 80)}
    assert dataset.name == f"{tmp_path}/rows.jsonl (train[50:90])"


def test_the_same_rows_are_held_out_whatever_the_seed_and_the_other_data_sets(tmp_path, model_folder, chat_tokenizer):
    held_out = [
        questions(prepare(tmp_path, model_folder, chat_tokenizer, share=0.05, **options).datasets[-1].held_out)
        for options in ({}, {"seed": 8}, {"num_others": 2})
    ]
    assert held_out == held_out[:1] * 3
    assert len(held_out[0]) == 5


def test_no_row_is_held_out_unless_asked_and_a_share_that_leaves_none_is_refused(
    tmp_path, model_folder, chat_tokenizer
):
    (dataset,) = prepare(tmp_path, model_folder, chat_tokenizer).datasets
    assert (len(dataset.source), dataset.held_out) == (100, None)
    with pytest.raises(DataError, match=r"evaluation\.share 0\.9 of 2 rows leaves none to train on; lower it"):
        prepare(tmp_path, model_folder, chat_tokenizer, share=0.9, max_samples=2)


def test_the_console_tells_how_many_rows_are_held_out(tmp_path, model_folder, chat_tokenizer, capsys):
    preparation = prepare(tmp_path, model_folder, chat_tokenizer, share=0.05)
    config = make_config(tmp_path, model_folder)
    sample = check_sample(preparation, 0.05)
    describe_data(config, run_data.make_dataset(config, preparation), sample)
    output = capsys.readouterr().out
    assert "rows.jsonl, read as messages; 5 rows held out of training\n" in output
    assert "\n           95 rows in " in output


def test_fewer_workers_are_taken_and_said_where_the_wanted_number_does_not_divide_the_lanes(
    tmp_path: Path, model_folder: Path, chat_tokenizer: ChatTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, model_folder, data__num_workers=5, data__num_lanes=12)
    preparation = run_data.open_data(config, chat_tokenizer)
    taken = [
        run_data.num_workers(config, run_data.make_dataset(config, preparation, dp_world_size=ranks))
        for ranks in (1, 2, 4, 12)
    ]
    assert taken == [4, 3, 3, 1]
    dataset = run_data.make_dataset(config, preparation, dp_world_size=2)
    describe_data(config, dataset, check_sample(preparation, 0.0))
    assert "in 12 lanes, loader workers: 3 (5 do not divide the lanes)" in capsys.readouterr().out
    with pytest.raises(
        DataError, match=r"5 ranks do not divide data\.num_lanes: 12; .* one of 1, 2, 3.* set data\.num_lanes: 60"
    ):
        run_data.make_dataset(config, preparation, dp_world_size=5)


def test_the_longest_row_is_the_configurations_and_decides_what_is_dealt(tmp_path, model_folder, chat_tokenizer):
    for streaming in (False, True):
        datasets = [{"path": str(write_rows(tmp_path / "rows.jsonl", 30)), "streaming": streaming}]
        options = {"data__datasets": datasets, "data__on_bad_row": "skip"}
        fingerprints = []
        for max_row_bytes in (110, 4096):
            config = make_config(tmp_path, model_folder, data__max_row_bytes=max_row_bytes, **options)
            preparation = run_data.open_data(config, chat_tokenizer)
            dropped = [each for each in map(preparation.read, preparation.all_keys()) if isinstance(each, Dropped)]
            assert {each.reason for each in dropped} == ({"too_large"} if max_row_bytes == 110 else set())
            assert all(len(line) > 110 for line in _lines_of(dropped))
            architecture = read_config(model_folder)
            fingerprints.append(run_data.fingerprint(config, run_data.make_dataset(config, preparation), architecture))
        changed = {name for name in fingerprints[0] if fingerprints[0][name] != fingerprints[1][name]}
        assert changed == {"data.max_row_bytes"}


def _lines_of(dropped: list[Dropped]) -> list[str]:
    files = [each.detail.split(":", 2)[:2] for each in dropped]
    return [Path(path).read_text().splitlines()[int(line) - 1] for path, line in files]
