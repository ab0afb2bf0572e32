"""The configuration's data sets become the rows it names, read as it says; what is held out is trained on by no run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sftron.commands import inspect
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.prepare import DataSet
from sftron.data.sources import RowSource
from sftron.data.types import DataError, Dropped, TokenizedConversation
from sftron.train.build_data import make_dataset, num_workers, open_data
from sftron.train.run import data_fingerprint
from sftron.train.sample import check_sample
from sftron.train.text.description import describe_data
from tests.data.files import all_rows
from tests.train.runs import make_config, write_rows


def opened(
    tmp_path: Path, model_folder: Path, chat_tokenizer: ChatTokenizer, *, num_others: int = 0, **overrides: Any
) -> DataSet:
    """100 rows of which some are held out, after some other data sets; overrides: of the data set and the run."""
    others = [{"path": str(write_rows(tmp_path / f"other{number}.jsonl", 10))} for number in range(num_others)]
    of_run = {key: overrides.pop(key) for key in list(overrides) if "__" in key}
    datasets = [*others, {"path": str(write_rows(tmp_path / "rows.jsonl", 100)), **overrides}]
    config = make_config(tmp_path, model_folder, data__datasets=datasets, **{"evaluation__share": 0.05} | of_run)
    return open_data(config, chat_tokenizer).datasets[-1]


def questions(source: RowSource | None) -> set[str]:
    assert source is not None
    return {row["messages"][0]["content"] for row in all_rows(source)}


def test_a_part_is_taken_then_its_first_rows_and_of_these_some_are_held_out(tmp_path, model_folder, chat_tokenizer):
    options = {"split": "train[50:90]", "max_samples": 30, "evaluation__share": 0.1}
    dataset = opened(tmp_path, model_folder, chat_tokenizer, **options)
    assert (len(dataset.source), len(dataset.held_out)) == (27, 3)
    assert questions(dataset.source).isdisjoint(questions(dataset.held_out))
    assert questions(dataset.source) | questions(dataset.held_out) == {f"What is {n}?" for n in range(50, 80)}
    assert dataset.name == f"{tmp_path}/rows.jsonl (train[50:90])"


def test_a_shown_conversation_has_the_line_of_the_file_whatever_is_taken_or_held_out(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 100)
    datasets = [{"path": str(rows), "split": "train[20:90]"}]
    make_config(tmp_path, model_folder, data__datasets=datasets, evaluation__share=0.2)
    assert inspect.main(["--config", str(tmp_path / "config.yaml"), "-n", "8", "--packs", "8"]) == 0
    shown = re.findall(r"rows\.jsonl:(\d+) .*?What is (\d+)\?", capsys.readouterr().out, re.DOTALL)
    assert len(shown) > 8
    assert [int(line) for line, _ in shown] == [int(number) + 1 for _, number in shown]


def test_the_same_rows_are_held_out_whatever_the_seed_and_the_other_data_sets(tmp_path, model_folder, chat_tokenizer):
    held_out = [
        questions(opened(tmp_path, model_folder, chat_tokenizer, **options).held_out)
        for options in ({}, {"general__seed": 8}, {"num_others": 2})
    ]
    assert held_out == held_out[:1] * 3
    assert len(held_out[0]) == 5
    assert opened(tmp_path, model_folder, chat_tokenizer, evaluation__share=0.0).held_out is None
    with pytest.raises(DataError, match=r"evaluation\.share 0\.9 of 2 rows leaves no row to train on"):
        opened(tmp_path, model_folder, chat_tokenizer, evaluation__share=0.9, max_samples=2)


def test_fewer_workers_are_taken_and_reported_where_their_number_does_not_divide_the_lanes(
    tmp_path: Path, model_folder: Path, chat_tokenizer: ChatTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, model_folder, data__num_workers=5, data__num_lanes=12)
    preparation = open_data(config, chat_tokenizer)
    datasets = {ranks: make_dataset(config, preparation, dp_world_size=ranks) for ranks in (1, 2, 4, 12)}
    assert [num_workers(config, dataset) for dataset in datasets.values()] == [4, 3, 3, 1]
    describe_data(config, datasets[2], check_sample(preparation, 0.0))
    assert "in 12 lanes, loader workers: 3 (5 does not divide the lanes)" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"5 ranks do not divide data\.num_lanes: 12; .* set data\.num_lanes: 60"):
        make_dataset(config, preparation, dp_world_size=5)
    sharing = make_config(tmp_path, model_folder, data__num_lanes=12, parallelism__context=2)
    with pytest.raises(
        DataError, match=r"10 ranks, which count as 5 ranks because 2 share each pack \(context\), do not"
    ):
        make_dataset(sharing, preparation, dp_world_size=5)


@pytest.mark.parametrize("streaming", [False, True])
def test_the_longest_row_is_the_configurations_and_part_of_the_fingerprint(
    tmp_path, model_folder, chat_tokenizer, streaming
):
    datasets = [{"path": str(write_rows(tmp_path / "rows.jsonl", 30)), "streaming": streaming}]
    options = {"data__datasets": datasets, "data__on_bad_row": "skip"}
    fingerprints, reasons = [], []
    for max_row_bytes in (110, 4096):
        config = make_config(tmp_path, model_folder, data__max_row_bytes=max_row_bytes, **options)
        preparation = open_data(config, chat_tokenizer)
        read = map(preparation.read, preparation.all_keys())
        reasons.append({each.reason for each in read if isinstance(each, Dropped)})
        fingerprints.append(data_fingerprint(config, make_dataset(config, preparation)))
    assert reasons == [{"too_large"}, set()]
    changed = {name for name in fingerprints[0] if fingerprints[0][name] != fingerprints[1][name]}
    assert changed == {"data.max_row_bytes"}


# --- Formats ---


def config_for(
    tmp_path: Path, model_folder: Path, *datasets: tuple[list[dict], dict[str, Any]], **overrides: Any
) -> Any:
    """A configuration of data sets of these rows, with these keys."""
    options = []
    for number, (rows, keys) in enumerate(datasets):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        options.append({"path": str(path), "name": f"set {number}", **keys})
    return make_config(tmp_path, model_folder, data__datasets=options, **overrides)


def messages(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_columns_prompt_template_and_reasoning_of_the_configuration_reach_the_conversations(
    tmp_path: Path, model_folder: Path, chat_tokenizer: ChatTokenizer
) -> None:
    def ids(config: Any) -> list[int]:
        preparation = open_data(config, chat_tokenizer)
        tokenized = preparation.tokenize(preparation.key(0))
        assert isinstance(tokenized, TokenizedConversation), tokenized
        return tokenized.input_ids.tolist()

    problems = [{"problem": "1 + 1", "solution": "<think>easy</think>2"}]
    columns = {"columns": {"query": "problem", "response": "solution"}, "prompt_template": "What is {query}?"}
    found = ids(config_for(tmp_path, model_folder, (problems, columns), data__reasoning="strip"))
    assert found == ids(config_for(tmp_path, model_folder, ([messages("What is 1 + 1?", "2")], {})))


def test_the_description_counts_pretokenized_rows_stop_tokens_and_empty_answers(
    tmp_path: Path, model_folder: Path, chat_tokenizer: ChatTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [messages("q", "a") | {"id": 1}, messages("q", "")]
    tokenizer = chat_tokenizer.tokenizer
    word, end = tokenizer.encode("word")[0], tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = [
        {"input_ids": [word] * 5, "labels": [-100, word, word, -100, word]},
        {"input_ids": [word, word, end, word, word], "labels": [-100, word, end, -100, word], "note": "x"},
    ]
    config = config_for(tmp_path, model_folder, (ids, {}), (chats, {}))
    preparation = open_data(config, chat_tokenizer)
    sample = check_sample(preparation, max_dropped_share=0.0)

    assert (sample.num_pretokenized, sample.num_equal, sample.audit.num_kept) == (2, 2, 4)
    assert sample.stop_ids == (end,)
    assert sample.audit.turns.num_turns == 2
    describe_data(config, make_dataset(config, preparation), sample)
    printed = capsys.readouterr().out
    assert "data       set 0, read as input_ids; not read: note\n" in printed
    assert "2 of 2 sampled conversations have exactly the ids of apply_chat_template\n" in printed
    assert "2 of 2 assistant turns train their stop token, <|im_end|>\n" in printed
    assert "2 sampled rows are pretokenized" in printed
    assert "WARNING    empty answers, which teach" in printed
    assert "among the sampled rows: 1, the first in " in printed
    assert "/1.jsonl:2\n" in printed

    only_words = open_data(config_for(tmp_path, model_folder, (ids[:1], {})), chat_tokenizer)
    assert check_sample(only_words, max_dropped_share=0.0).stop_ids == ()


def test_a_thought_that_the_template_writes_beside_one_in_a_content_is_named_at_start(
    tmp_path: Path, model_folder: Path, chat_tokenizer: ChatTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """As TRL's template of Qwen 3.8, which reads thoughts only from reasoning_content."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
        "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    answers = ["<think>\nTwo and two.\n</think>\n\nIt is 4.", "Three and three.\n</think>\n\nIt is 6.", "It is 8."]
    config = config_for(tmp_path, model_folder, ([messages("q", answer) for answer in answers], {}))
    preparation = open_data(config, ChatTokenizer(chat_tokenizer.tokenizer, template))
    describe_data(config, make_dataset(config, preparation), check_sample(preparation, max_dropped_share=0.0))
    printed = capsys.readouterr().out
    assert "WARNING    the template adds its own reasoning to answers whose content has some, in 2 sampled" in printed
    assert "leaves out" not in printed
